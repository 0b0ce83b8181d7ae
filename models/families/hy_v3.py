"""Hy3 (Tencent 2026): norms of each head, and experts chosen by sigmoids that a correction balances."""

from dataclasses import dataclass

from megacore.models.experts_config import NamedLayersConfig, SharedExpertConfig
from megacore.models.presets import tiny
from megacore.models.rope_config import Convention
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class HYV3Config(NamedLayersConfig, SharedExpertConfig):
    family = "hy_v3"
    architecture = "HYV3ForCausalLM"
    # In what precision the shared expert is added.
    harmless = SharedExpertConfig.harmless | {"enable_moe_fp32_combine"}
    fixed = {"mlp_bias": False, "first_k_dense_replace": 1}
    defaults = {"num_key_value_heads": 8, "head_dim": 128}
    saved = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
    }
    spellings = {"num_local_experts": "n_routed_experts"}
    rope_convention = Convention(rope_theta=11158840.0)
    rule = {"score": "sigmoid", "normalised": True, "epsilon": 1e-20}
    head_norms = {}
    leading = 1

    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.006
    attention_bias: bool = False
    moe_intermediate_size: int = 1536
    n_routed_experts: int = 192
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.826
    first_k_dense_replace: int = 1

    def experts(self, t: Table) -> Rows:
        experts = t.experts(router="mlp.router.gate", correction="mlp.expert_bias")
        return experts + t.shared_expert("mlp.shared_mlp")


PRESETS = {"hy_v3-tiny": tiny(96, head_dim=16, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=4)}
