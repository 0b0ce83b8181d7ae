"""Youtu-LLM 2B (Tencent 2025, arXiv 2512.24618): latent attention, and no experts."""

from dataclasses import dataclass
from typing import Any

from megacore.models.latent_config import LatentConfig
from megacore.models.presets import rope, shape, tiny_latent


@dataclass(frozen=True, kw_only=True)
class YoutuConfig(LatentConfig):
    family = "youtu"
    architecture = "YoutuForCausalLM"
    harmless = frozenset({"embedding_initializer_range"})
    fixed = {"mlp_bias": False}

    tie_word_embeddings: bool = True
    rope_interleave: bool = True

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        if values.get("initializer_range") is None and isinstance(hidden := values.get("hidden_size"), int) and hidden:
            values["initializer_range"] = 2.0 / (5.0 * hidden) ** 0.5
        return super()._derive(values)


PRESETS = {
    "youtu-tiny": tiny_latent(),
    "youtu-llm-2b": shape(2048, 6144, 32, 16) | {"vocab_size": 128256, "max_position_embeddings": 131072} | rope(1.6e6),
}
