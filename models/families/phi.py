"""Phi-1, Phi-1.5, Phi-2 (Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv 2309.05463): branches side by
side behind one LayerNorm, biases everywhere, the head's included, and heads of which a part turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.config import probabilities
from megacore.models.decoder_config import DecoderConfig, shape
from megacore.models.rope_config import Convention
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class PhiConfig(DecoderConfig):
    family: ClassVar[str] = "phi"
    architecture: ClassVar[str] = "PhiForCausalLM"
    eps: ClassVar[str] = "layer_norm_eps"
    derived: ClassVar[frozenset[str]] = frozenset({"head_dim"})
    rope_convention: ClassVar[Convention] = Convention(partial_rotary_factor=0.5, pairs=True)

    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = False
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0

    @property
    def anatomy(self) -> Anatomy:
        return self.anatomy_of(
            norm="layer",
            parallel=True,
            branch_dropout=self.resid_pdrop,
            embedding_dropout=self.embd_pdrop,
        )

    def params(self) -> tuple[Param, ...]:
        t = self.table(norm_bias=True)
        return t.model(
            t.attention(bias=True, out="dense", out_bias=True),
            *(t.norm(f"attn.{of}_norm", f"self_attn.{of}_layernorm", "head") for of in "qk" if self.qk_layernorm),
            t.plain_mlp("fc1", "fc2", bias=True),
            t.norm("attn_norm", "input_layernorm"),
            tied=self.tie_word_embeddings,
            norm="model.final_layernorm",
            head_bias=True,
        )

    def problems(self) -> list[str]:
        return super().problems() + probabilities(self, "resid_pdrop", "embd_pdrop")


_PHI = {"vocab_size": 51200, "max_position_embeddings": 2048}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "phi-tiny": shape(64, 256, 4, 4) | {"vocab_size": 512, "max_position_embeddings": 512},
    "phi-1.5": _PHI | shape(2048, 8192, 24, 32) | {"partial_rotary_factor": 0.5},
    "phi-2": _PHI | shape(2560, 10240, 32, 32) | {"partial_rotary_factor": 0.4},
}

PARAMETERS: Mapping[str, int] = {
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
}
