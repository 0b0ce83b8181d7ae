"""Mistral 7B, Nemo, Small, Large (Jiang et al. 2023, arXiv 2310.06825): LLaMA whose layers all see one window."""

from dataclasses import dataclass

from megacore.models.layer_types import OneWindowConfig
from megacore.models.presets import rope, shape


@dataclass(frozen=True, kw_only=True)
class MistralConfig(OneWindowConfig):
    family = "mistral"
    architecture = "MistralForCausalLM"
    defaults = {"num_key_value_heads": 8}

    rms_norm_eps: float = 1e-6
    sliding_window: int | None = 4096


_EACH = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768}
_7B = _EACH | shape(4096, 14336, 32, 32)
_NEMO = {"head_dim": 128, "vocab_size": 131072, "sliding_window": None}

PRESETS = {
    "mistral-tiny": _EACH | shape(64, 176, 4, 4) | {"vocab_size": 512, "num_key_value_heads": 2, "sliding_window": 128},
    "mistral-7b-v0.1": _7B | {"vocab_size": 32000, "sliding_window": 4096},
    "mistral-7b-v0.3": _7B | {"vocab_size": 32768, "sliding_window": None} | rope(1e6),
    "mistral-nemo-12b": _EACH | shape(5120, 14336, 40, 32) | _NEMO | rope(1e6) | {"max_position_embeddings": 131072},
    "mistral-small-24b": _EACH | shape(5120, 32768, 40, 32) | _NEMO | rope(1e8),
    "mistral-large-123b": _EACH
    | shape(12288, 28672, 88, 96, vocab_size=32768, sliding_window=None, max_position_embeddings=131072)
    | rope(1e6),
}
