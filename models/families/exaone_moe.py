"""K-EXAONE 236B (LG AI Research 2026): EXAONE 4.0's windows and norms of heads, and experts chosen as DeepSeek-V3's."""

from dataclasses import dataclass

from megacore.models.anatomy import FULL, SLIDING
from megacore.models.experts_config import TypedLayersConfig
from megacore.models.families.exaone4 import Exaone4Config
from megacore.models.presets import rope, shape, tiny
from megacore.models.weight_rows import NORMS, around


@dataclass(frozen=True, kw_only=True)
class ExaoneMoeConfig(TypedLayersConfig, Exaone4Config):
    family = "exaone_moe"
    architecture = "ExaoneMoeForCausalLM"
    saved = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    correction = "mlp.e_score_correction_bias"
    parts = around(**NORMS)

    pad_token_id: int | None = 0
    moe_intermediate_size: int = 1024
    n_routed_experts: int = 64
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1


PRESETS = {
    "exaone_moe-tiny": tiny(96, sliding_window=128, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=4),
    "k-exaone-236b-a23b": shape(6144, 18432, 48, 64)
    | {"vocab_size": 153600, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144}
    | {"sliding_window": 128, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 12}
    | {"moe_intermediate_size": 2048, "num_experts": 128}
    | rope(1e6),
}
