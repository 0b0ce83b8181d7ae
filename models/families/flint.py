"""Flint (RecursiveSI 2026): sinks, windows that alone rotate, and experts chosen by sigmoids beside a shared one."""

from dataclasses import dataclass
from typing import Any

from megacore.models.experts_config import SparseConfig
from megacore.models.layer_types import WindowedConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class FlintConfig(SparseConfig, WindowedConfig):
    family = "flint"
    architecture = "FlintForCausalLM"
    defaults = {"num_key_value_heads": 4, "head_dim": 128}
    axes = {**SparseConfig.axes, "shared_mlp": "shared_expert_intermediate_size"}
    rule = {"score": "sigmoid"}
    all_rotate = False

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    sliding_window: int | None = 513
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 1024
    num_experts: int = 256
    num_experts_per_tok: int = 6
    norm_topk_prob: bool = True

    def slides(self, layer: int) -> bool:
        return layer > 1 and layer % 4 != 1 and layer != self.num_hidden_layers - 1

    def mixer(self, t: Table) -> Rows:
        return super().mixer(t) + t.norms_of_heads() + t.sinks("self_attn.softmax_offset", held="self_attn.sinks")

    def experts(self, t: Table) -> Rows:
        return t.experts() + t.shared_expert("mlp.shared_expert")

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        if values.get("mlp_only_layers") is None:
            values["mlp_only_layers"] = (0, 1)
        return super()._derive(values)


PRESETS = {
    "flint-tiny": tiny(head_dim=16, sliding_window=128, moe_intermediate_size=32, shared_expert_intermediate_size=64)
    | {"num_experts": 16, "num_experts_per_tok": 4}
}
