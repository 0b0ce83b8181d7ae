"""EXAONE 4.0 (LG AI Research 2025, arXiv 2507.11407): norms of what branches give and of each head; where some layers
have windows, the others do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import FULL, ROPE, SLIDING, Anatomy, by_kind
from megacore.models.decoder_config import shape
from megacore.models.layer_types import PatternedConfig
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(PatternedConfig):
    family: ClassVar[str] = "exaone4"
    architecture: ClassVar[str] = "Exaone4ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32}
    pattern: ClassVar[int] = 4

    rms_norm_eps: float = 1e-5

    def slides(self, layer: int) -> bool:
        return self.sliding_window is not None and super().slides(layer)

    def anatomy_of(self, **own: Any) -> Anatomy:
        ropes = {FULL: ROPE if self.sliding_window is None else None, SLIDING: ROPE}
        return super().anatomy_of(**({"layers": by_kind(self.kinds, self.sliding_window, ropes)} | own))

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.attention(),
            *(t.norm(f"attn.{of}_norm", f"self_attn.{of}_norm", "head") for of in "qk"),
            t.gated_mlp(),
            t.norm("attn_out_norm", "post_attention_layernorm"),
            t.norm("mlp_out_norm", "post_feedforward_layernorm"),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | ({"sliding_window": None, "layer_types": [FULL] * layers} if rng.random() < 0.3 else {})


EXAONE4 = {"vocab_size": 102400, "num_key_value_heads": 8}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "exaone4-tiny": shape(64, 176, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 128},
    "exaone-4.0-1.2b": EXAONE4
    | shape(2048, 4096, 30, 32)
    | {"head_dim": 64, "max_position_embeddings": 65536, "sliding_window": None, "tie_word_embeddings": True}
    | {"rope_parameters": _ROPE},
    "exaone-4.0-32b": EXAONE4
    | shape(5120, 27392, 64, 40)
    | {"max_position_embeddings": 131072, "rope_parameters": _ROPE},
}

PARAMETERS: Mapping[str, int] = {"exaone-4.0-1.2b": 1_279_391_488, "exaone-4.0-32b": 32_003_216_384}
