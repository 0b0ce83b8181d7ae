"""Granite Swash with experts (IBM 2026): its attention before the experts of Granite 4's preview."""

from dataclasses import dataclass

from megacore.models.families.granite_swa import SwashConfig
from megacore.models.families.granitemoeshared import GraniteMoeSharedConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class GraniteMoeSWAConfig(SwashConfig, GraniteMoeSharedConfig):
    family = "granitemoe_swa"
    architecture = "GraniteMoeSWAForCausalLM"

    def experts(self, t: Table) -> Rows:
        router = t.linear("mlp.router", "routes", "embed", "block_sparse_moe.router")
        return router + t.stacked_experts(hf="block_sparse_moe.experts", outputs_first=True) + self.shared(t)


PRESETS = {"granitemoe_swa-tiny": tiny(32, sliding_window=32, attention_multiplier=0.0625)}
