"""Command R7B (Cohere 2024), Command A (Cohere 2025, arXiv 2504.00698): windows, and no rope in the layers without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import FULL, ROPE, SLIDING, Anatomy, by_kind
from megacore.models.decoder_config import shape
from megacore.models.families.cohere import CommandConfig
from megacore.models.layer_types import PatternedConfig


@dataclass(frozen=True, kw_only=True)
class Cohere2Config(CommandConfig, PatternedConfig):
    family: ClassVar[str] = "cohere2"
    architecture: ClassVar[str] = "Cohere2ForCausalLM"
    # What transformers does not read: it says what all models of the family are.
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "_sliding_window_pattern",
            "cache_implementation",
            "layer_switch",
            "model_max_length",
            "order_of_interleaved_layers",
            "position_embedding_type",
            "pretraining_tp",
            "rotary_pct",
            "use_embedding_sharing",
            "use_gated_activation",
            "use_parallel_block",
            "use_parallel_embedding",
        }
    )
    fixed: ClassVar[Mapping[str, Any]] = {"use_qk_norm": False}
    pattern: ClassVar[int] = 4

    def anatomy_of(self, **own: Any) -> Anatomy:
        layers = by_kind(self.kinds, self.sliding_window, {FULL: None, SLIDING: ROPE})
        return super().anatomy_of(**({"layers": layers} | own))


_COHERE2 = {
    "vocab_size": 256000,
    "num_key_value_heads": 8,
    "logit_scale": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "cohere2-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 128},
    "command-r7b": _COHERE2 | shape(4096, 14336, 32, 32) | {"max_position_embeddings": 8192},
    "command-a": _COHERE2 | shape(12288, 36864, 64, 96) | {"max_position_embeddings": 131072},
}

PARAMETERS: Mapping[str, int] = {"command-r7b": 8_028_033_024, "command-a": 111_057_580_032}
