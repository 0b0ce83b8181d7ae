"""CWM 32B (Meta FAIR 2025, arXiv 2510.02387): LLaMA of which three layers of four have windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.decoder_config import shape
from megacore.models.layer_types import WindowedConfig
from megacore.models.rope_config import Convention
from megacore.parallel.weights.schema import Param

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, kw_only=True)
class CwmConfig(WindowedConfig):
    family: ClassVar[str] = "cwm"
    architecture: ClassVar[str] = "CwmForCausalLM"
    harmless: ClassVar[frozenset[str]] = frozenset({"pretraining_tp"})
    fixed: ClassVar[Mapping[str, Any]] = {"attention_bias": False, "mlp_bias": False}
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "head_dim": 128}
    rope_convention: ClassVar[Convention] = Convention(rope_theta=1e6, parameters=_ROPE)

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 8192

    def slides(self, layer: int) -> bool:
        return layer % 4 > 0

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(),
            t.norm("mlp_norm", "post_attention_layernorm"),
            t.gated_mlp(),
            tied=self.tie_word_embeddings,
        )

    def to_hugging_face(self) -> dict[str, Any]:
        # The class takes no null for it.
        return {name: value for name, value in super().to_hugging_face().items() if name != "bos_token_id"}

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        # The class takes no other: a multiple of the heads.
        return drawn | {"hidden_size": drawn["num_attention_heads"] * rng.choice((3, 5))}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "cwm-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    | {"sliding_window": 128},
    "cwm-32b": shape(6144, 21504, 64, 48) | {"vocab_size": 128256, "max_position_embeddings": 131072},
}

PARAMETERS: Mapping[str, int] = {"cwm-32b": 32_581_097_472}
