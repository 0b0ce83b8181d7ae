"""The config of families whose sliding layers have a rope of their own, beside that of the others. No torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megacore.models import rope_config
from megacore.models.anatomy import FULL, SLIDING, Anatomy, by_kind
from megacore.models.layer_types import WindowedConfig
from megacore.models.rope_config import DefaultRope, Kinds, Rope
from megacore.models.weight_rows import Rows, Table, in_layers


@dataclass(frozen=True, kw_only=True)
class LocalRopeConfig(WindowedConfig):
    """Fields carry their Hugging Face names, but for the two ropes, which are nested in ``rope_parameters`` there."""

    # How config.json says the rope of each kind of layer.
    rope_kinds: ClassVar[Kinds]

    local_rope: Rope = field(default_factory=DefaultRope)

    @property
    def ropes(self) -> dict[str, Rope]:
        """The rope of each kind of layer."""
        return {FULL: self.rope_parameters, SLIDING: self.local_rope}

    @property
    def rotary_heads(self) -> dict[str, int]:
        """The size of the heads of each kind of layer."""
        return dict.fromkeys(self.ropes, self.head_dim)

    def anatomy_of(self, **own: Any) -> Anatomy:
        layers = by_kind(self.kinds, self.sliding_window, {kind: kind for kind in self.ropes})
        by_rope = {"layers": layers, "ropes": self.ropes, "rotary_heads": self.rotary_heads}
        return super().anatomy_of(**(by_rope | own))

    def rope_problems(self) -> list[str]:
        heads = self.rotary_heads
        return [f"{kind}: {each}" for kind, rope in self.ropes.items() for each in rope.problems(heads[kind])]

    @classmethod
    def override(cls, base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        return rope_config.override_by_kind(base, fields, cls.rope_kinds)

    @classmethod
    def _read_ropes(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        found = rope_config.by_kind(config, cls.rope_kinds)
        return {"rope_parameters": found[FULL], "local_rope": found[SLIDING]}

    @classmethod
    def as_written(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Do as the base class; flat ``rope_parameters``, of which transformers 5.23 reads nothing, are nested."""
        made = super().as_written(raw)
        if not rope_config.is_flat(raw, cls.rope_kinds):
            return made
        keys = frozenset[str]().union(*(convention.keys for convention in cls.rope_kinds.values()))
        nested = rope_config.by_kind_to_hugging_face(rope_config.by_kind(raw, cls.rope_kinds), cls.rope_kinds)
        return {name: value for name, value in made.items() if name not in keys} | nested

    @classmethod
    def readable(cls) -> set[str]:
        return super().readable().union(*(convention.keys for convention in cls.rope_kinds.values()))

    def _write(self) -> dict[str, Any]:
        plain = {name: value for name, value in super()._write().items() if name != "local_rope"}
        return plain | rope_config.by_kind_to_hugging_face(self.ropes, self.rope_kinds)


@dataclass(frozen=True, kw_only=True)
class LocalHeadsConfig(LocalRopeConfig):
    """Heads of layers with windows have sizes of their own, the axes ``local_kv`` and ``local_head``: ``kv`` and
    ``head`` are of the others."""

    @property
    def rotary_heads(self) -> dict[str, int]:
        return {kind: self.sizes[axis] for kind, axis in _HEADS.items()}

    @abstractmethod
    def attention(self, t: Table, kind: str) -> Rows:
        """Return the rows of the attention of layers of a kind: ``attn``, or ``local_attn``."""

    def mixer(self, t: Table) -> Rows:
        full, sliding = (in_layers(self.layers_of(kind), self.attention(t, kind)) for kind in (FULL, SLIDING))
        return full + sliding

    def problems(self) -> list[str]:
        found, sizes = super().problems(), self.sizes
        of_kinds = {FULL: (sizes["heads"], sizes["kv"]), SLIDING: (sizes["heads"], sizes["local_kv"])}
        return found or [
            f"{kind}: {heads} heads are no multiple of {kv} heads of keys"
            for kind, (heads, kv) in of_kinds.items()
            if heads % kv
        ]


_HEADS = {FULL: "head", SLIDING: "local_head"}
