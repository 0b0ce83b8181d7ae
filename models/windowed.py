"""The config of families whose layers are of two kinds: some see all tokens before, some no further than a window.

A family says which layers slide where its ``config.json`` does not. No torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from megacore.models.anatomy import FULL, SLIDING, Anatomy, by_kind
from megacore.models.decoder_config import DecoderConfig
from megacore.parallel import limits


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(DecoderConfig):
    """Fields carry their Hugging Face names."""

    sliding_window: int | None = 4096
    # None becomes what `slides` says of each layer.
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.layer_types is None and self.num_hidden_layers <= limits.LAYERS:
            kinds = (SLIDING if self.slides(layer) else FULL for layer in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", tuple(kinds))
        super().__post_init__()

    @abstractmethod
    def slides(self, layer: int) -> bool:
        """Return whether a layer sees no further than the window, where ``layer_types`` is null."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return self.layer_types or ()

    @classmethod
    def draw(cls, rng: Random, *, layers: int, vocab: int, positions: int, tp: int) -> dict[str, Any]:
        drawn = super().draw(rng, layers=layers, vocab=vocab, positions=positions, tp=tp)
        kinds = [rng.choice((FULL, SLIDING)) for _ in range(layers)]
        return drawn | {"sliding_window": rng.choice((2, 3, positions)), "layer_types": rng.choice((None, kinds))}

    def anatomy_of(self, **own: Any) -> Anatomy:
        return super().anatomy_of(**({"layers": by_kind(self.kinds, self.sliding_window)} | own))

    def problems(self) -> list[str]:
        found = super().problems() + window_problems(self.sliding_window)
        if unknown := sorted({*self.kinds} - {FULL, SLIDING}):
            found.append(f"layer_types names {', '.join(unknown)}: only {FULL} and {SLIDING} are supported")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            found.append(
                f"layer_types names {len(self.layer_types)} layers, and num_hidden_layers is "
                f"{self.num_hidden_layers}: give as many, or null"
            )
        if SLIDING in self.kinds and self.sliding_window is None:
            found.append(f"layer_types names {SLIDING}, and there is no sliding_window: give one")
        return found


@dataclass(frozen=True, kw_only=True)
class PatternedConfig(WindowedConfig):
    """The last one of every so many layers sees all tokens before.

    How many these are, older files say in ``sliding_window_pattern`` where they have no ``layer_types``.
    """

    # Where a file has neither.
    pattern: ClassVar[int]

    def slides(self, layer: int) -> bool:
        return (layer + 1) % self.pattern > 0

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, problems = super()._read(config)
        every, layers = config.get("sliding_window_pattern"), values.get("num_hidden_layers")
        if every is None or values.get("layer_types") is not None:
            return values, problems
        if type(every) is not int or every < 1:
            return values, [*problems, f"sliding_window_pattern is {every!r}: it must be a whole number above 0"]
        if isinstance(layers, int) and layers <= limits.LAYERS:
            values["layer_types"] = tuple(SLIDING if layer % every else FULL for layer in range(1, layers + 1))
        return values, problems

    @classmethod
    def _consumed(cls) -> set[str]:
        return {*super()._consumed(), "sliding_window_pattern"}


def window_problems(window: int | None) -> list[str]:
    """Return what is wrong with a ``sliding_window``."""
    return [] if window is None or window > 0 else [f"sliding_window is {window}: it must be at least 1, or null"]
