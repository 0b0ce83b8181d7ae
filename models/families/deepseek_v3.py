"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437): latent attention, and experts that are chosen by sigmoids, in
groups, with a correction that keeps them balanced."""

from dataclasses import dataclass
from typing import Any

from megacore.models.experts_config import SigmoidConfig
from megacore.models.families.deepseek_v2 import DeepseekConfig
from megacore.models.presets import EXPERTS, shape, tiny_latent, yarn


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DeepseekConfig, SigmoidConfig):
    family = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    fixed = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    n_group: int = 8
    topk_group: int = 4
    rope_interleave: bool = True


def _yarn(theta: float, factor: float, fast: int) -> dict[str, Any]:
    return yarn(factor, 4096, rope_theta=theta, beta_fast=fast, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)


PRESETS = {
    "deepseek_v3-tiny": tiny_latent(96, num_key_value_heads=4, first_k_dense_replace=1, n_group=4, topk_group=2)
    | EXPERTS,
    "deepseek-v3": shape(7168, 18432, 61, 128)
    | {"vocab_size": 129280, "max_position_embeddings": 163840, "rope_parameters": _yarn(10000.0, 40.0, 32)},
    # Moonshot AI 2025, arXiv 2507.20534.
    "kimi-k2": shape(7168, 18432, 61, 64)
    | {"vocab_size": 163840, "max_position_embeddings": 131072, "rope_parameters": _yarn(50000.0, 32.0, 1)}
    | {"n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 2.827},
}
