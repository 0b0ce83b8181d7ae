"""Gemma 3, its text models (Gemma Team 2025, arXiv 2503.19786): Gemma 2 with norms of queries and keys, two ropes."""

from dataclasses import dataclass
from typing import Any

from megacore.models.anatomy import FULL, SLIDING
from megacore.models.families.gemma2 import Gemma2Config
from megacore.models.layer_types import PatternedConfig
from megacore.models.local_rope import LocalRopeConfig
from megacore.models.presets import shape, tiny
from megacore.models.rope_config import Convention


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config, LocalRopeConfig, PatternedConfig):
    family = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    harmless = frozenset({"_sliding_window_pattern", "cache_implementation"})
    # transformers has a cap of scores among the fields, and does not apply it.
    fixed = {"use_bidirectional_attention": False, "attn_logit_softcapping": None}
    # What the larger models leave out.
    defaults = {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
    rope_kinds = {FULL: Convention(rope_theta=1e6), SLIDING: Convention(theta_key="rope_local_base_freq", scaled=False)}
    constants = {"both_ways": "images"}
    pattern = 6
    of_text = True
    head_norms = {}

    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    slides = PatternedConfig.slides


def _text(size: int, *sizes: int, kv: int) -> dict[str, Any]:
    """Return the text part of a model that also sees."""
    linear = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    ropes = {FULL: linear, SLIDING: {"rope_type": "default", "rope_theta": 10000.0}}
    return shape(size, *sizes) | {"num_key_value_heads": kv, "sliding_window": 1024, "rope_parameters": ropes}


_SMALL = {"vocab_size": 262144, "num_key_value_heads": 1, "max_position_embeddings": 32768, "sliding_window": 512}

PRESETS = {
    "gemma3_text-tiny": tiny(layers=6, head_dim=32, query_pre_attn_scalar=32, sliding_window=128),
    "gemma-3-270m": _SMALL | shape(640, 2048, 18, 4),
    "gemma-3-1b": _SMALL | shape(1152, 6912, 26, 4),
    "gemma-3-4b": _text(2560, 10240, 34, 8, kv=4),
    "gemma-3-12b": _text(3840, 15360, 48, 16, kv=8),
    "gemma-3-27b": _text(5376, 21504, 62, 32, kv=16) | {"head_dim": 128, "query_pre_attn_scalar": 168},
}
