"""The configs of families without a rope, whose heads share no keys and values, and of those with learned positions. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megacore.models.anatomy import Anatomy
from megacore.models.decoder_config import DecoderConfig
from megacore.parallel.weights.schema import Param


@dataclass(frozen=True, kw_only=True)
class NoRopeConfig(DecoderConfig):
    """Fields carry their Hugging Face names, or those of ``saved``."""

    derived: ClassVar[frozenset[str]] = frozenset({"head_dim", "num_key_value_heads", "rope_parameters"})

    constants: ClassVar[Mapping[str, Any]] = {"norm": "layer"}

    def anatomy_of(self, **own: Any) -> Anatomy:
        made = super().anatomy_of(**own)
        return replace(made, ropes={}, layers=tuple(replace(layer, rope=None) for layer in made.layers))

    def rope_problems(self) -> list[str]:
        return []

    @classmethod
    def _read_ropes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    @classmethod
    def readable(cls) -> set[str]:
        return super().readable() - cls.rope_convention.keys

    def _write(self) -> dict[str, Any]:
        return {name: value for name, value in super()._write().items() if name not in self.rope_convention.keys}


@dataclass(frozen=True, kw_only=True)
class LearnedPositionsConfig(NoRopeConfig):
    """Positions are rows of a table."""

    axes: ClassVar[Mapping[str, str]] = {**DecoderConfig.axes, "position": "max_position_embeddings"}
    # Hugging Face's name of the positions.
    positions: ClassVar[str]

    @property
    def sizes(self) -> Mapping[str, int]:
        before = self._of_bases("constants").get("position_offset", 0)  # rows before the first position
        return {**super().sizes, "position": self.max_position_embeddings + before}

    def params(self) -> tuple[Param, ...]:
        embed, *others = super().params()
        weight = Param("positions.weight", "position embed", f"{self.positions}.weight", std=self.initializer_range)
        return embed, weight, *others
