"""Mellum 2 (JetBrains 2026): Qwen3's experts behind windows and a rope for each kind of layer."""

from dataclasses import dataclass

from megacore.models.anatomy import FULL, SLIDING
from megacore.models.experts_config import MoEConfig, NamedLayersConfig
from megacore.models.local_rope import LocalRopeConfig
from megacore.models.mtp import FIELD
from megacore.models.presets import tiny
from megacore.models.rope_config import Convention


@dataclass(frozen=True, kw_only=True)
class MellumConfig(NamedLayersConfig, LocalRopeConfig):
    family = "mellum"
    architecture = "MellumForCausalLM"
    # Of the layer that predicts a further token, which is told and not read.
    further = ("mtp.",)
    harmless = MoEConfig.harmless | {
        FIELD, "max_window_layers", "mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers"
    }  # fmt: skip
    defaults = {"num_key_value_heads": 4, "head_dim": 128}
    spellings = {"num_experts": "num_local_experts"}
    axes = {
        **MoEConfig.axes,
        "mlp": "intermediate_size",
        "experts": "num_local_experts",
        "expert_mlp": "moe_intermediate_size",
    }
    rope_kinds = {SLIDING: Convention(scaled=False), FULL: Convention(rope_theta=500000.0)}
    head_norms = {}

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    sliding_window: int | None = 1024
    moe_intermediate_size: int = 896
    num_local_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True

    def slides(self, layer: int) -> bool:
        return False


PRESETS = {
    "mellum-tiny": tiny(head_dim=16, sliding_window=128, moe_intermediate_size=32)
    | {"num_experts": 16, "num_experts_per_tok": 4, "layer_types": [SLIDING, FULL] * 2}
}
