"""EXAONE 4.0 (LG AI Research 2025, arXiv 2507.11407): norms of what branches give and of each head; where some layers
have windows, the others do not rotate."""

from dataclasses import dataclass

from megacore.models.layer_types import PatternedConfig
from megacore.models.presets import llama3, shape, tiny
from megacore.models.weight_rows import BRANCHES, OUT_NORMS


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(PatternedConfig):
    family = "exaone4"
    architecture = "Exaone4ForCausalLM"
    defaults = {"num_key_value_heads": 32}
    harmless = PatternedConfig.harmless | {"reorder_and_qk_norm"}
    pattern = 4
    parts = BRANCHES | OUT_NORMS
    head_norms = {}

    rms_norm_eps: float = 1e-5

    def slides(self, layer: int) -> bool:
        return self.sliding_window is not None and super().slides(layer)

    @property
    def all_rotate(self) -> bool:
        return self.sliding_window is None


EXAONE4 = {"vocab_size": 102400, "num_key_value_heads": 8}
_ROPE = llama3(1e6, 16.0)

PRESETS = {
    "exaone4-tiny": tiny(sliding_window=128),
    "exaone-4.0-1.2b": EXAONE4
    | shape(2048, 4096, 30, 32)
    | {"head_dim": 64, "max_position_embeddings": 65536, "sliding_window": None, "tie_word_embeddings": True}
    | {"rope_parameters": _ROPE},
    "exaone-4.0-32b": EXAONE4 | shape(5120, 27392, 64, 40, max_position_embeddings=131072, rope_parameters=_ROPE),
}
