"""Ministral 8B (Mistral AI 2024): Mistral with layers that see a window between layers that see all."""

from dataclasses import dataclass

from megacore.models.anatomy import FULL, SLIDING
from megacore.models.layer_types import WindowedConfig
from megacore.models.presets import rope, shape, tiny


@dataclass(frozen=True, kw_only=True)
class MinistralConfig(WindowedConfig):
    family = "ministral"
    architecture = "MinistralForCausalLM"
    defaults = {"num_key_value_heads": 8}

    rms_norm_eps: float = 1e-6

    def slides(self, layer: int) -> bool:
        return self.sliding_window is not None


PRESETS = {
    "ministral-tiny": tiny(sliding_window=128),
    "ministral-8b": shape(4096, 12288, 36, 32)
    | {"vocab_size": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 131072, "sliding_window": 32768, "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 9}
    | rope(1e8),
}
