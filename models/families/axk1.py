"""A.X K1 (SK Telecom 2025): DeepSeek-V3 with a norm of what experts give."""

from dataclasses import dataclass, replace

from megacore.models.families.glm4_moe_lite import Glm4MoeLiteConfig
from megacore.models.presets import EXPERTS, tiny_latent
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class AXK1Config(Glm4MoeLiteConfig):
    family = "axk1"
    architecture = "AXK1ForCausalLM"
    # Published files have such a norm in layers without experts, too, which nothing reads.
    ignored = (*Glm4MoeLiteConfig.ignored, "model.layers.{layer}.post_mlp_layernorm.weight")

    rms_norm_eps: float = 1e-6
    q_lora_rank: int = 1536
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 192
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4

    def experts(self, t: Table) -> Rows:
        (norm,) = t.norm("mlp_out_norm", "post_mlp_layernorm")
        held = norm.hf.replace("post_mlp", "mlp.post_mlp")
        return *super().experts(t), replace(norm, hf_held=held)


PRESETS = {"axk1-tiny": tiny_latent(96, n_group=4, topk_group=2) | EXPERTS}
