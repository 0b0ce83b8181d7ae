"""Granite 4's preview (Granite Team, IBM 2025): Granite's experts, and a shared one beside them."""

from collections.abc import Mapping
from dataclasses import dataclass

from megacore.models.families.granitemoe import SHARED, GraniteMoeConfig
from megacore.models.presets import tiny
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class GraniteMoeSharedConfig(GraniteMoeConfig):
    family = "granitemoeshared"
    architecture = "GraniteMoeSharedForCausalLM"

    shared_intermediate_size: int = 0

    @property
    def sizes(self) -> Mapping[str, int]:
        return {
            **super().sizes,
            **({"shared_mlp": self.shared_intermediate_size} if self.shared_intermediate_size else {}),
        }

    def experts(self, t: Table) -> Rows:
        return super().experts(t) + self.shared(t)

    def shared(self, t: Table) -> Rows:
        """Return the rows of the expert that every token goes to, where there is one."""
        return t.shared_expert(**SHARED) if self.shared_intermediate_size else ()

    def problems(self) -> list[str]:
        wrong = self.shared_intermediate_size < 0
        return (
            super().problems()
            + [f"shared_intermediate_size is {self.shared_intermediate_size}: it must be 0 or more"] * wrong
        )


PRESETS = {"granitemoeshared-tiny": tiny(32, shared_intermediate_size=64, attention_multiplier=0.0625)}
