"""Granite 4's preview (Granite Team, IBM 2025): Granite's experts, and a shared one beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.decoder_config import shape
from megacore.models.families.granitemoe import SHARED, GraniteMoeConfig
from megacore.models.weight_rows import Rows, Table


@dataclass(frozen=True, kw_only=True)
class GraniteMoeSharedConfig(GraniteMoeConfig):
    family: ClassVar[str] = "granitemoeshared"
    architecture: ClassVar[str] = "GraniteMoeSharedForCausalLM"

    shared_intermediate_size: int = 0

    @property
    def sizes(self) -> Mapping[str, int]:
        return {
            **super().sizes,
            **({"shared_mlp": self.shared_intermediate_size} if self.shared_intermediate_size else {}),
        }

    def shared(self, t: Table) -> Rows:
        return t.shared_expert(**SHARED) if self.shared_intermediate_size else ()

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        return drawn | {"shared_intermediate_size": rng.choice((0, 10, 13))}

    def problems(self) -> list[str]:
        wrong = self.shared_intermediate_size < 0
        return (
            super().problems()
            + [f"shared_intermediate_size is {self.shared_intermediate_size}: it must be 0 or more"] * wrong
        )


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "granitemoeshared-tiny": shape(64, 32, 4, 4)
    | {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 512, "shared_intermediate_size": 64}
    | {"attention_multiplier": 0.0625},
}

PARAMETERS: Mapping[str, int] = {}
