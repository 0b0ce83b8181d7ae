"""Granite 3 with experts (Granite Team, IBM 2024): Granite's multipliers, experts stored as one tensor a layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.models.experts_config import MoEConfig
from megacore.models.families.granite import GRANITE3, Multipliers
from megacore.models.presets import shape, tiny
from megacore.models.weight_rows import Rows, Table

STACKED: Mapping[str, Any] = {
    "hf": "block_sparse_moe.input_linear",
    "down": "block_sparse_moe.output_linear",
    "router": "block_sparse_moe.router.layer",
    "held": ("block_sparse_moe.experts", "block_sparse_moe.router"),
}
"""Hugging Face's names of the experts."""
SHARED: Mapping[str, Any] = {"hf": "shared_mlp", "up": "input_linear", "down": "output_linear"}
"""And of one that every token goes to, where there is one."""


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(MoEConfig, Multipliers):
    family = "granitemoe"
    architecture = "GraniteMoeForCausalLM"
    axes = {**MoEConfig.axes, "experts": "num_local_experts"}
    rule = {"weigh": "chosen"}

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    def experts(self, t: Table) -> Rows:
        return t.experts(**STACKED)


_EACH = GRANITE3 | {"rms_norm_eps": 1e-6, "attention_multiplier": 0.015625, "logits_scaling": 6.0}

PRESETS = {
    "granitemoe-tiny": _EACH | tiny(32, attention_multiplier=0.0625),
    "granite-3.0-1b-a400m": _EACH | shape(1024, 512, 24, 16) | {"num_local_experts": 32, "num_experts_per_tok": 8},
    "granite-3.0-3b-a800m": _EACH | shape(1536, 512, 32, 24) | {"num_local_experts": 40, "num_experts_per_tok": 8},
}
