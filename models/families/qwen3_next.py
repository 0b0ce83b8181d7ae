"""Qwen3-Next (Qwen Team 2025): the gated delta rule in three layers of four, gated attention in the fourth, experts."""

from dataclasses import dataclass

from megacore.models.delta_config import QwenDeltaConfig
from megacore.models.experts_config import SparseConfig
from megacore.models.presets import STATES, rope, shape, tiny
from megacore.models.weight_rows import STATE_QKV, STATE_VALUES, Rows, Table


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(SparseConfig, QwenDeltaConfig):
    family = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    defaults = QwenDeltaConfig.defaults
    harmless = SparseConfig.harmless | {"use_sliding_window"}
    axes = {**QwenDeltaConfig.axes, **SparseConfig.axes, "shared_mlp": "shared_expert_intermediate_size"}

    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 512
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = True

    def delta_rule(self, t: Table) -> Rows:
        gates = "b: {0}each + a: {0}each"
        inner = f"(qkvz: ({STATE_QKV} + z: {STATE_VALUES}) + ba: ({gates.format('state_heads ')}))"
        values = "each state_value"
        heads = f"state_heads (q: state_key + k: state_key + v: {values} + z: {values})"
        return t.delta_rule(
            inner, "in_proj_{qkvz,ba}", stored=f"(qkvz: {heads} + ba: state_heads ({gates.format('')}))"
        )

    def experts(self, t: Table) -> Rows:
        return t.experts() + t.shared_expert("mlp.shared_expert", gate="mlp.shared_expert_gate")


_EACH = {
    "vocab_size": 151936,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    **rope(1e7, partial_rotary_factor=0.25),
}

PRESETS = {
    "qwen3_next-tiny": _EACH
    | tiny(head_dim=16, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts_per_tok=4)
    | STATES
    | {"num_experts": 16},
    "qwen3-next-80b-a3b": _EACH | shape(2048, 5120, 48, 16) | {"num_key_value_heads": 2},
}
