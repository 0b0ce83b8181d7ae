"""The config of families in which some layers attend, and the others mix tokens otherwise: with a state. No torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import FULL
from megacore.models.decoder_config import DecoderConfig
from megacore.parallel import limits


@dataclass(frozen=True, kw_only=True)
class HybridConfig(DecoderConfig):
    """Fields carry their Hugging Face names."""

    # The kind of layers that have a state.
    with_state: ClassVar[str]

    # None becomes what `attends` says of each layer.
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.layer_types is None and self.num_hidden_layers <= limits.LAYERS:
            kinds = (FULL if self.attends(layer) else self.with_state for layer in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", tuple(kinds))
        super().__post_init__()

    @abstractmethod
    def attends(self, layer: int) -> bool:
        """Return whether a layer attends, where ``layer_types`` is null."""

    def layers_of(self, kind: str) -> list[int]:
        """Return the layers of a kind."""
        return [layer for layer, each in enumerate(self.layer_types or ()) if each == kind]

    def problems(self) -> list[str]:
        found, kinds = super().problems(), self.layer_types or ()
        if self.num_hidden_layers > limits.LAYERS:
            return [*found, f"num_hidden_layers is {self.num_hidden_layers}: it may be up to {limits.LAYERS}"]
        if unknown := sorted({*kinds} - {FULL, self.with_state}):
            found.append(f"layer_types names {', '.join(unknown)}: only {FULL} and {self.with_state} are supported")
        if len(kinds) != self.num_hidden_layers:
            found.append(
                f"layer_types names {len(kinds)} layers, and num_hidden_layers is {self.num_hidden_layers}: "
                "give as many, or null"
            )
        return found

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        kinds = [rng.choice((FULL, cls.with_state, cls.with_state)) for _ in range(layers)]
        kinds[rng.randrange(layers)] = FULL  # transformers' cache asks one that attends how many tokens there are
        return drawn | {"layer_types": kinds}
