"""Command R7B (Cohere 2024), Command A (Cohere 2025, arXiv 2504.00698): windows, and no rope in the layers without."""

from dataclasses import dataclass

from megacore.models.families.cohere import CommandConfig
from megacore.models.layer_types import PatternedConfig
from megacore.models.presets import rope, shape, tiny


@dataclass(frozen=True, kw_only=True)
class Cohere2Config(CommandConfig, PatternedConfig):
    family = "cohere2"
    architecture = "Cohere2ForCausalLM"
    # What transformers does not read: it says what all models of the family are.
    harmless = frozenset(
        {
            "_sliding_window_pattern", "cache_implementation", "layer_switch", "model_max_length",
            "order_of_interleaved_layers", "position_embedding_type", "pretraining_tp", "rotary_pct",
            "use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding",
        }
    )  # fmt: skip
    fixed = {"use_qk_norm": False}
    pattern = 4
    all_rotate = False


_COHERE2 = {"vocab_size": 256000, "num_key_value_heads": 8, "logit_scale": 0.25, **rope(50000.0)}

PRESETS = {
    "cohere2-tiny": tiny(sliding_window=128),
    "command-r7b": _COHERE2 | shape(4096, 14336, 32, 32) | {"max_position_embeddings": 8192},
    "command-a": _COHERE2 | shape(12288, 36864, 64, 96) | {"max_position_embeddings": 131072},
}
