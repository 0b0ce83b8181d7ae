"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): Gemma with norms around each branch, softcaps, and windows."""

from dataclasses import dataclass, field, replace
from typing import Any

from megacore.models.anatomy import Anatomy
from megacore.models.config import above_zero
from megacore.models.families.gemma import TANH, GemmaConfig
from megacore.models.layer_types import WindowedConfig
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import OUT_NORMS, around


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig, WindowedConfig):
    family = "gemma2"
    architecture = "Gemma2ForCausalLM"
    harmless = frozenset({"cache_implementation", "sliding_window_size"})
    defaults = {"num_key_value_heads": 4, "head_dim": 256}
    derived = frozenset({"hidden_act"})
    told = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    parts = around("input_layernorm", "pre_feedforward_layernorm", **OUT_NORMS)

    hidden_act: str = field()
    hidden_activation: str = TANH
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0

    @property
    def anatomy(self) -> Anatomy:
        return replace(super().anatomy, attention_scale=self.query_pre_attn_scalar**-0.5)

    def problems(self) -> list[str]:
        factors = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
        return super().problems() + above_zero(self, *factors)

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        values["hidden_act"] = values.get("hidden_activation", TANH)
        return super()._derive(values)


_GEMMA2 = {"vocab_size": 256000, "max_position_embeddings": 8192}

PRESETS = {
    "gemma2-tiny": tiny(head_dim=32, query_pre_attn_scalar=32, sliding_window=128),
    "gemma-2-2b": _GEMMA2 | shape(2304, 9216, 26, 8),
    "gemma-2-9b": _GEMMA2 | shape(3584, 14336, 42, 16) | {"num_key_value_heads": 8},
    "gemma-2-27b": _GEMMA2
    | shape(4608, 36864, 46, 32, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=144),
}
