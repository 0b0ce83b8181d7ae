"""Qwen3 with experts (Yang et al. 2025, arXiv 2505.09388): norms of each head, 128 experts in every layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.config import Shapes
from megacore.models.experts_config import MoEConfig, SparseConfig
from megacore.models.layer_types import OneWindowConfig
from megacore.models.presets import rope, shape, tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(SparseConfig, OneWindowConfig):
    family = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    harmless = MoEConfig.harmless | {"max_window_layers"}
    defaults = {"num_key_value_heads": 4}
    # As published files have it; transformers saves the other.
    spellings = {"num_experts": "num_local_experts"}
    axes = {**SparseConfig.axes, "experts": "num_local_experts"}
    # Which no file of the family says: it is said of a part of Qwen3-VL.
    derived = frozenset({"stacked_experts"})
    head_norms = {}

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    moe_intermediate_size: int = 768
    num_local_experts: int = 128
    num_experts_per_tok: int = 8
    # Where a tensor has all experts of a layer: what stands first in it, "inputs" or "outputs".
    stacked_experts: str = ""

    def experts(self, t: Table) -> Rows:
        if not self.stacked_experts:
            return t.experts()
        stacked = t.stacked_experts(outputs_first=self.stacked_experts == "outputs")
        return t.linear("mlp.router", "routes", "embed", "mlp.gate") + stacked

    @classmethod
    def as_held(cls, raw: Mapping[str, Any], shapes: Shapes) -> tuple[dict[str, Any], str | None]:
        """Do as the base class; experts lie with inputs first in published files of Qwen3-VL, and not in those that
        transformers saves, which takes what fits as it lies."""
        made, told = super().as_held(raw, shapes)
        embed, inner = raw.get("hidden_size"), raw.get("moe_intermediate_size")
        down = next((shape for name, shape in shapes.items() if name.endswith("mlp.experts.down_proj")), ())
        if made.get("stacked_experts") and down and isinstance(inner, int):
            made["stacked_experts"] = "outputs" if embed in (inner, 2 * inner, *down[1:2]) else "inputs"
        return made, told

    @classmethod
    def _derive(cls, values: dict[str, Any]) -> list[str]:
        # What transformers makes of a window that is not used.
        if not values.get("use_sliding_window"):
            values["sliding_window"] = None
        return super()._derive(values)


_EACH = {
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
    **rope(1e6),
}

PRESETS = {
    "qwen3_moe-tiny": _EACH
    | tiny(max_position_embeddings=40960, head_dim=16, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=4),
    "qwen3-30b-a3b": _EACH | shape(2048, 6144, 48, 32),
    "qwen3-235b-a22b": _EACH | shape(4096, 12288, 94, 64) | {"moe_intermediate_size": 1536},
}
