"""Apertus (Swiss AI 2025, arXiv 2509.14233): no gate, and an activation with weights of its own (xIELU)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import ACTIVATIONS
from megacore.models.decoder_config import DecoderConfig, shape
from megacore.models.rope_config import Convention
from megacore.parallel.weights.schema import Param

_LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@dataclass(frozen=True, kw_only=True)
class ApertusConfig(DecoderConfig):
    family: ClassVar[str] = "apertus"
    architecture: ClassVar[str] = "ApertusForCausalLM"
    rope_convention: ClassVar[Convention] = Convention(rope_theta=12000000.0, parameters=_LLAMA3)
    derived: ClassVar[frozenset[str]] = frozenset({"head_dim"})
    # What the checkpoints of its makers also say: of the norms and the activation, which the class has in any case.
    activations: ClassVar[Collection[str]] = (*ACTIVATIONS, "xielu")
    fixed: ClassVar[Mapping[str, Any]] = {"qk_norm": True, "post_norm": False, "mlp_bias": False}

    hidden_act: str = "xielu"
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 65536
    pad_token_id: int | None = 3
    attention_bias: bool = False

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "one": 1}

    def params(self) -> tuple[Param, ...]:
        t, bias, name = self.table(), self.attention_bias, "layers.{layer}.mlp.up.xielu"
        hf = f"{t.layer}.mlp.act_fn"
        activation = (
            # softplus makes 0.8 of the one, and 0.3 of the other, which beta makes 0.8.
            Param(f"{name}.positive", "one", f"{hf}.alpha_p", mean=0.2033, vector=True),
            Param(f"{name}.negative", "one", f"{hf}.alpha_n", mean=-1.0502, vector=True),
            Param(f"{name}.beta", "", f"{hf}.beta", mean=0.5, buffer=True, vector=True),
            Param(f"{name}.eps", "", f"{hf}.eps", mean=-1e-6, buffer=True, vector=True),
        )
        return t.model(
            t.norm("attn_norm", "attention_layernorm"),
            t.attention(bias=bias, out_bias=bias),
            t.norm("attn.q_norm", "self_attn.q_norm", "head"),
            t.norm("attn.k_norm", "self_attn.k_norm", "head"),
            t.norm("mlp_norm", "feedforward_layernorm"),
            t.plain_mlp("up_proj", "down_proj"),
            activation if self.hidden_act == "xielu" else (),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | {"hidden_act": rng.choice(("xielu", "xielu", drawn["hidden_act"]))}


_EACH = {"vocab_size": 131072, "num_key_value_heads": 8}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "apertus-tiny": shape(64, 256, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2},
    "apertus-8b": shape(4096, 21504, 32, 32) | _EACH,
    "apertus-70b": shape(8192, 43008, 80, 64) | _EACH,
}

PARAMETERS: Mapping[str, int] = {}
