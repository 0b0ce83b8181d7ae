"""Qwen3 (Yang et al. 2025, arXiv 2505.09388): LLaMA with norms of each head's queries and keys."""

from dataclasses import dataclass

from megacore.models.families.qwen2 import Qwen2Config
from megacore.models.presets import rope, shape


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    family = "qwen3"
    architecture = "Qwen3ForCausalLM"
    defaults = {**Qwen2Config.defaults, "head_dim": 128}
    head_norms = {}
    out_bias = True

    attention_bias: bool = False


_EACH = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, **rope(1e6)}
_TIED = _EACH | {"tie_word_embeddings": True}

PRESETS = {
    "qwen3-tiny": _TIED | shape(64, 176, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2, "head_dim": 16},
    "qwen3-0.6b": _TIED | shape(1024, 3072, 28, 16),
    "qwen3-1.7b": _TIED | shape(2048, 6144, 28, 16),
    "qwen3-4b": _TIED | shape(2560, 9728, 36, 32),
    "qwen3-8b": _EACH | shape(4096, 12288, 36, 32),
    "qwen3-14b": _EACH | shape(5120, 17408, 40, 40),
    "qwen3-32b": _EACH | shape(5120, 25600, 64, 64),
}
