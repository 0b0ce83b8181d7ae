"""K-EXAONE 236B (LG AI Research 2026): EXAONE 4.0's windows and norms of heads, and experts chosen as DeepSeek-V3's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import FULL, SLIDING
from megacore.models.decoder_config import shape
from megacore.models.experts_config import TypedLayersConfig
from megacore.models.families.exaone4 import Exaone4Config
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class ExaoneMoeConfig(TypedLayersConfig, Exaone4Config):
    family: ClassVar[str] = "exaone_moe"
    architecture: ClassVar[str] = "ExaoneMoeForCausalLM"
    saved: ClassVar[Mapping[str, str]] = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    correction: ClassVar[str] = "mlp.e_score_correction_bias"

    pad_token_id: int | None = 0
    moe_intermediate_size: int = 1024
    n_routed_experts: int = 64
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1

    def params(self) -> tuple[Param, ...]:
        t = self.table()
        return t.model(
            t.norm("attn_norm", "input_layernorm"),
            t.attention(),
            *(t.norm(f"attn.{of}_norm", f"self_attn.{of}_norm", "head") for of in "qk"),
            t.norm("mlp_norm", "post_attention_layernorm"),
            self.feed_forward(t, self.experts(t)),
            tied=self.tie_word_embeddings,
        )

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        drawn["sliding_window"] = rng.choice((2, 3, positions))  # the class cannot do without
        return {cls.saved.get(name, name): value for name, value in drawn.items()}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "exaone_moe-tiny": shape(64, 96, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 128}
    | {"moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4},
    "k-exaone-236b-a23b": shape(6144, 18432, 48, 64)
    | {"vocab_size": 153600, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144}
    | {"sliding_window": 128, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 12}
    | {"moe_intermediate_size": 2048, "num_experts": 128}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}

PARAMETERS: Mapping[str, int] = {"k-exaone-236b-a23b": 236_571_150_336}
