"""Kolibri 1 (Aleph Alpha 2026): EXAONE 4.0's attention with norms around branches, and experts chosen by logits."""

from dataclasses import dataclass

from megacore.models.experts_config import MoEConfig
from megacore.models.families.exaone4 import Exaone4Config
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table, around


@dataclass(frozen=True, kw_only=True)
class Kolibri1Config(MoEConfig, Exaone4Config):
    family = "kolibri1"
    architecture = "Kolibri1ForCausalLM"
    # No layer is without experts: the size of such a network is of nothing.
    derived = frozenset({"intermediate_size"})
    defaults = {"num_key_value_heads": 4, "head_dim": 128}
    spellings = {"num_experts": "num_local_experts"}
    axes = {
        **MoEConfig.axes,
        "experts": "num_local_experts",
        "expert_mlp": "moe_intermediate_size",
        "shared_mlp": "shared_expert_intermediate_size",
    }
    rule = {"score": "sigmoid", "choose": "logits"}
    interval = None
    pattern = 5
    parts = around("input_layernorm", "post_attention_layernorm", "post_attn_norm", "post_ffn_norm")
    taken = {"intermediate_size": 0}

    intermediate_size: int = 0
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = 513
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_local_experts: int = 384
    num_experts_per_tok: int = 6
    norm_topk_prob: bool = False

    def experts(self, t: Table) -> Rows:
        return t.experts(correction="moe.router.expert_bias") + t.shared_expert()


PRESETS = {
    "kolibri1-tiny": tiny(0, head_dim=16, sliding_window=128, moe_intermediate_size=32, num_experts=16)
    | {"shared_expert_intermediate_size": 64, "num_experts_per_tok": 4}
}
