"""The config of families whose layers are of two kinds, of which one attends to all tokens before. No torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megacore.models.anatomy import FULL, ROPE, SLIDING, Anatomy, LayerAttention, by_kind
from megacore.models.config import positive
from megacore.models.decoder_config import DecoderConfig
from megacore.parallel import limits


@dataclass(frozen=True, kw_only=True)
class LayerTypesConfig(DecoderConfig):
    # The other kind, and more of them.
    other: ClassVar[str]
    more: ClassVar[tuple[str, ...]] = ()
    # The key by which files without layer_types say that the last one of every so many layers attends to all.
    interval: ClassVar[str | None] = None

    # None becomes what `kind` says of each layer.
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self.fill_in("layer_types", self.kind)
        super().__post_init__()

    @abstractmethod
    def kind(self, layer: int) -> str:
        """Return the kind of a layer, where ``layer_types`` is null."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return self.layer_types or ()

    def layers_of(self, kind: str) -> list[int]:
        """Return the layers of a kind."""
        return [layer for layer, each in enumerate(self.kinds) if each == kind]

    def problems(self) -> list[str]:
        found = super().problems()
        if self.layer_types is None:  # there are too many layers
            return found
        return found + kind_problems("layer_types", self.kinds, self.num_hidden_layers, (FULL, self.other, *self.more))

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        values, problems = super()._read(config)
        every, layers = config.get(cls.interval or ""), values.get("num_hidden_layers")
        if every is None or values.get("layer_types") is not None:
            return values, problems
        if type(every) is not int or every < 1:
            return values, [*problems, f"{cls.interval} is {every!r}: it must be a whole number above 0"]
        if isinstance(layers, int) and layers <= limits.LAYERS:
            values["layer_types"] = tuple(cls.other if layer % every else FULL for layer in range(1, layers + 1))
        return values, problems

    @classmethod
    def readable(cls) -> set[str]:
        return super().readable() | ({cls.interval} if cls.interval else set())


@dataclass(frozen=True, kw_only=True)
class OneWindowConfig(DecoderConfig):
    """All layers see no further than one window."""

    sliding_window: int | None = None

    def anatomy_of(self, **own: Any) -> Anatomy:
        layers = (LayerAttention(window=self.sliding_window),) * self.num_hidden_layers
        return super().anatomy_of(**({"layers": layers} | own))

    def problems(self) -> list[str]:
        return super().problems() + window_problems(self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(LayerTypesConfig):
    """Layers of the other kind see no further than a window."""

    other: ClassVar[str] = SLIDING

    sliding_window: int | None = 4096

    @abstractmethod
    def slides(self, layer: int) -> bool:
        """Return whether a layer sees no further than the window, where ``layer_types`` is null."""

    def kind(self, layer: int) -> str:
        return SLIDING if self.slides(layer) else FULL

    @property
    def all_rotate(self) -> bool:
        """Whether layers that see all tokens before have a rope, too."""
        return True

    def anatomy_of(self, **own: Any) -> Anatomy:
        ropes = {FULL: ROPE if self.all_rotate else None, SLIDING: ROPE}
        return super().anatomy_of(**({"layers": by_kind(self.kinds, self.sliding_window, ropes)} | own))

    def problems(self) -> list[str]:
        found = super().problems() + window_problems(self.sliding_window)
        if SLIDING in self.kinds and self.sliding_window is None:
            found.append(f"layer_types names {SLIDING}, and there is no sliding_window: give one")
        return found


@dataclass(frozen=True, kw_only=True)
class RotatingConfig(LayerTypesConfig):
    """Some layers have no rope, as ``no_rope_layers`` says: 1 for each that rotates, and 0 for the others."""

    # None, or nothing, becomes a 0 for the last of every interval.
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4

    def __post_init__(self) -> None:
        if not self.no_rope_layers and self.no_rope_layer_interval > 0 and self.num_hidden_layers <= limits.LAYERS:
            ends = (layer % self.no_rope_layer_interval == 0 for layer in range(1, self.num_hidden_layers + 1))
            object.__setattr__(self, "no_rope_layers", tuple(int(not end) for end in ends))
        super().__post_init__()

    def rotates(self, layer: int) -> bool:
        """Return whether a layer has the rope."""
        return any((self.no_rope_layers or ())[layer : layer + 1])

    def problems(self) -> list[str]:
        found = super().problems() + positive(self, "no_rope_layer_interval")
        if self.no_rope_layers is not None and len(self.no_rope_layers) < self.num_hidden_layers:
            found.append(
                f"no_rope_layers names {len(self.no_rope_layers)} layers, and num_hidden_layers is "
                f"{self.num_hidden_layers}: give as many, or null"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class PatternedConfig(WindowedConfig):
    """The last one of every so many layers sees all tokens before.

    How many these are, older files say in ``sliding_window_pattern`` where they have no ``layer_types``.
    """

    interval: ClassVar[str | None] = "sliding_window_pattern"
    # Where a file has neither.
    pattern: ClassVar[int]

    def slides(self, layer: int) -> bool:
        return (layer + 1) % self.pattern > 0


@dataclass(frozen=True, kw_only=True)
class HybridConfig(LayerTypesConfig):
    """Layers of the other kind mix tokens otherwise: with a state."""

    @abstractmethod
    def attends(self, layer: int) -> bool:
        """Return whether a layer attends, where ``layer_types`` is null."""

    def kind(self, layer: int) -> str:
        return FULL if self.attends(layer) else self.other


def kind_problems(field: str, kinds: Iterable[str], layers: int, known: Iterable[str]) -> list[str]:
    """Return what is wrong with a field that says the kind of each layer."""
    kinds, known = list(kinds), list(known)
    found = []
    if unknown := sorted({*kinds} - {*known}):
        found.append(f"{field} names {', '.join(unknown)}: only {' and '.join(known)} are supported")
    if len(kinds) != layers:
        found.append(f"{field} names {len(kinds)} layers, and num_hidden_layers is {layers}: give as many, or null")
    return found


def window_problems(window: int | None) -> list[str]:
    """Return what is wrong with a ``sliding_window``."""
    return [] if window is None or window > 0 else [f"sliding_window is {window}: it must be at least 1, or null"]
