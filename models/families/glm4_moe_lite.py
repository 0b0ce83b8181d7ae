"""GLM-4.7-Flash (Z.ai 2026): latent attention and experts as DeepSeek-V3 has them, in layers that are named."""

from dataclasses import dataclass

from megacore.models.experts_config import TypedLayersConfig
from megacore.models.families.deepseek_v3 import DeepseekV3Config
from megacore.models.presets import rope, shape, tiny_latent


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(DeepseekV3Config, TypedLayersConfig):
    family = "glm4_moe_lite"
    architecture = "Glm4MoeLiteForCausalLM"
    # The class takes one layer without experts where mlp_layer_types says nothing, whatever stands here.
    fixed = {**DeepseekV3Config.fixed, "first_k_dense_replace": 1}

    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    moe_intermediate_size: int = 1536
    n_routed_experts: int = 64
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 1.8
    first_k_dense_replace: int = 1
    n_group: int = 1
    topk_group: int = 1


PRESETS = {
    "glm4_moe_lite-tiny": tiny_latent(96, moe_intermediate_size=32, n_routed_experts=16),
    "glm-4.7-flash": shape(2048, 10240, 47, 20) | {"vocab_size": 154880, "max_position_embeddings": 202752} | rope(1e6),
}
