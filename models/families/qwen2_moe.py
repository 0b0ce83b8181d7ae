"""Qwen1.5-MoE, Qwen2-57B-A14B (Yang et al. 2024, arXiv 2407.10671): Qwen2 with experts, and one for every token."""

from dataclasses import dataclass

from megacore.models.experts_config import MoEConfig, SparseConfig
from megacore.models.families.qwen2 import Qwen2Config
from megacore.models.presets import rope, shape, tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(SparseConfig, Qwen2Config):
    family = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    harmless = MoEConfig.harmless | Qwen2Config.harmless
    defaults = {"num_key_value_heads": 16}
    axes = {**SparseConfig.axes, "shared_mlp": "shared_expert_intermediate_size"}

    qkv_bias: bool = True
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_experts: int = 60
    num_experts_per_tok: int = 4

    def slides(self, layer: int) -> bool:
        # Of the first layers every other one, where Qwen2's are the last ones.
        return self.use_sliding_window and layer < self.max_window_layers and layer % 2 == 0

    def mixer(self, t: Table) -> Rows:
        return t.attention(bias=self.qkv_bias)

    def experts(self, t: Table) -> Rows:
        return t.experts() + t.shared_expert("mlp.shared_expert", gate="mlp.shared_expert_gate")


_EACH = {"vocab_size": 151936, **rope(1e6)}

PRESETS = {
    "qwen2_moe-tiny": tiny(moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=8),
    "qwen1.5-moe-a2.7b": _EACH | shape(2048, 5632, 24, 16) | {"max_position_embeddings": 8192},
    "qwen2-57b-a14b": _EACH
    | shape(3584, 18944, 28, 28)
    | {"num_key_value_heads": 4, "max_position_embeddings": 131072}
    | {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480}
    | {"num_experts": 64, "num_experts_per_tok": 8},
}
