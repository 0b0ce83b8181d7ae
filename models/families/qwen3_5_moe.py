"""Qwen3.5's text models with experts (Qwen Team 2026): as Qwen3-Next, and experts in every layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.config import Shapes
from megacore.models.experts_config import MoEConfig
from megacore.models.families.qwen3_5 import EACH, Qwen3_5Config
from megacore.models.presets import STATES
from megacore.models.weight_rows import Rows, Table
from megacore.models.wrappers import LIE


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(MoEConfig, Qwen3_5Config):
    family = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"
    defaults = {"num_key_value_heads": 2, "head_dim": 256}
    harmless = MoEConfig.harmless | Qwen3_5Config.harmless
    # How experts lie no file says, but its tensors.
    derived = frozenset({"intermediate_size", LIE})
    axes = {
        **{axis: name for axis, name in Qwen3_5Config.axes.items() if axis != "mlp"},
        "experts": "num_experts",
        "expert_mlp": "moe_intermediate_size",
        "shared_mlp": "shared_expert_intermediate_size",
    }
    rule = {"normalised": True}

    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 256
    num_experts_per_tok: int = 8
    # "outputs", where a tensor has all experts of a layer, as they are in transformers' memory.
    stacked_experts: str = ""

    def experts(self, t: Table) -> Rows:
        router = t.linear("mlp.router", "routes", "embed", "mlp.gate")
        experts = router + t.stacked_experts(outputs_first=True) if self.stacked_experts else t.experts()
        return experts + t.shared_expert("mlp.shared_expert", gate="mlp.shared_expert_gate")

    @classmethod
    def as_held(cls, raw: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Any], str | None]:
        made, told = super().as_held(raw, shapes)
        stacked = {LIE: "outputs"} if any(name.endswith("mlp.experts.down_proj") for name in shapes) else {}
        return {**made, **stacked}, told

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        values["intermediate_size"] = values.get("moe_intermediate_size", cls.moe_intermediate_size)
        return super()._derive(values)


PRESETS = {
    "qwen3_5_moe_text-tiny": EACH
    | {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512, "head_dim": 16}
    | {"num_key_value_heads": 2, "max_position_embeddings": 512, "num_experts": 16, "num_experts_per_tok": 4}
    | STATES
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3.5-35b-a3b": EACH | {"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16},
}
