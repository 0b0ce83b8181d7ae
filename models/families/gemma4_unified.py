"""Gemma 4 12B, its text model (Google 2026), whose images and sounds go through no tower: no experts, no embeddings of
each layer."""

from dataclasses import dataclass

from megacore.models.families.gemma4 import Gemma4Config
from megacore.models.presets import tiny

_ABSENT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262144} | {
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedConfig(Gemma4Config):
    family = "gemma4_unified_text"
    architecture = "Gemma4UnifiedForCausalLM"
    defaults = {**Gemma4Config.defaults, "max_position_embeddings": 262144}
    taken = _ABSENT
    derived = frozenset(_ABSENT)

    sliding_window: int | None = 1024
    use_bidirectional_attention: str | None = "vision"


PRESETS = {
    "gemma4_unified_text-tiny": tiny(layers=6, head_dim=16, global_head_dim=32, sliding_window=128)
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
}
