"""A dense model read as one with experts: each of its feed-forward networks stands for every expert of its layer.

That is a transfer, as any conversion is: a dense weight is listed once for each copy, its hidden features ``mlp`` named
``experts expert_mlp``. Only the rows of routers are drawn, and what comes out of slices is scaled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from megacore.models.stages import layout_of
from megacore.models.upcycle import DENSE, DOWN, EXPERTS, ROUTER, SHARED, UP, Upcycling
from megacore.parallel.random import initial_values
from megacore.parallel.weights.fingerprint import Logical
from megacore.parallel.weights.layout import MeshShape, Shard
from megacore.parallel.weights.pattern import Pattern, Piece
from megacore.parallel.weights.transfer import Stored, whole_name
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.companions import Companion
from megacore.store.tensor_files.dtypes import as_floats, rounded
from megacore.store.tensor_files.stream import Read
from megacore.store.tensor_files.tensor_cache import TensorCache
from megacore.store.tensor_files.tensors import DTYPES
from megacore.store.weight_folders.folder import SafetensorsFolder, WeightFolder
from megacore.store.weight_folders.index import Index

_HIDDEN = re.compile(r"\bmlp\b(?!:)")
"""The axis of hidden features in a sentence."""


@dataclass(frozen=True)
class UpcycledFolder(WeightFolder):
    """The weights of a dense model as those of one with experts. ``seed``: the seed of the rows of routers, which are
    those of a new model of this seed; ``wanted``: the dtype of what is drawn or scaled; None for that of the dense
    weights."""

    dense: SafetensorsFolder = field(kw_only=True)
    way: Upcycling = field(kw_only=True)
    seed: int = field(kw_only=True)
    wanted: str | None = field(kw_only=True)
    _scaled: TensorCache = field(default_factory=TensorCache, kw_only=True)

    @classmethod
    def of(cls, dense: SafetensorsFolder, way: Upcycling, seed: int, wanted: str | None = None) -> UpcycledFolder:
        """Read a folder so; arguments as above. Raises StoreError: its tensors hold parts of slices."""
        index = Index(way.raw, layout_of(way.config, MeshShape()), ("weights",), None, {})
        made = cls(dense.path, index, dense=dense, way=way, seed=seed, wanted=wanted)
        for stored in dense.stored():
            made._check(stored)
        return made

    def companions(self) -> Mapping[str, Companion]:
        return self.dense.companions()

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        if state not in self.states:
            return
        for stored in self.dense.stored():
            yield from self._sources(stored)
        for name, shard in self._new.items():
            yield Stored(None, name, shard.param.name, shard.param.sentence.labels, shard.param.sentence, shard.box)

    def dtype(self, state: str, stored: Stored) -> str:
        # What is new has the dtype of the dense weights of its layer, unless another one is wanted.
        held = self.dense.dtype(state, self._beside[stored.box["layer"][0]] if stored.where is None else stored)
        return self.wanted or held if stored.where is None or self._is_scaled(stored) else held

    def _is_scaled(self, stored: Stored) -> bool:
        return self.way.scale != 1 and stored.param == EXPERTS + DOWN

    def read(self, state: str = "weights") -> Read:
        plain = self.dense.read(state)

        def read(stored: Stored, view: Piece | None = None) -> tuple[str, np.ndarray]:
            if stored.where is None:
                dtype = self.dtype(state, stored)
                return dtype, self._drawn(self._new[stored.name], dtype)
            if not self._is_scaled(stored):
                return plain(stored, view)
            dtype = self.dtype(state, stored)
            make = partial(_times, *plain(stored), self.way.scale, dtype)
            return dtype, self._scaled.get((stored.where, stored.name), make)

        return read

    def fingerprints(self, state: str) -> Mapping[Logical, int]:
        """Return those of the weights that stay as they are."""
        known = self.dense.fingerprints(state)
        return {piece: value for piece, value in known.items() if piece[0] not in self.replaced}

    def widens(self, dtype: str) -> bool:
        """Return whether a dtype has more bits than all that is scaled."""
        dense = (stored for stored in self.dense.stored() if stored.param == DENSE + DOWN)
        return all(DTYPES[self.dense.dtype("weights", each)].itemsize < DTYPES[dtype].itemsize for each in dense)

    @cached_property
    def replaced(self) -> set[str]:
        """The whole names of the dense weights that stand for experts', of which no fingerprint is compared."""
        dense = self.dense.layout.schema
        return {whole_name(dense, stored) for stored in self.dense.stored() if stored.param.startswith(DENSE)}

    def _sources(self, stored: Stored) -> Iterator[Stored]:
        """Yield a tensor of the dense model as often as the one with experts is made of it."""
        if not stored.param.startswith(DENSE):
            yield stored
            return
        box = dict(stored.box)
        hidden = box.pop("mlp")
        slices, of_each = self._slices(*hidden)
        made = replace(stored, param=stored.param.replace(DENSE, EXPERTS), pattern=_of(stored, "(experts expert_mlp)"))
        for copy in range(0, self.way.experts, self.way.granularity):
            at = copy + slices[0], copy + slices[1]
            yield replace(made, box={**box, "experts": at, "expert_mlp": of_each})
        shared = stored.param.replace(DENSE, SHARED)
        if shared in self.schema.by_name and shared not in self._named_new:
            yield replace(stored, param=shared, pattern=_of(stored, "shared_mlp"), box={**box, "shared_mlp": hidden})

    def _slices(self, start: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return which slices some hidden features are of, and which features of a slice they are."""
        if self.way.granularity == 1:  # those beyond the last one, which pad it, are of no other
            return (0, 1), (start, stop)
        each = self.way.config.sizes["expert_mlp"]
        if stop - start >= each:
            return (start // each, stop // each), (0, each)
        first = start // each
        return (first, first + 1), (start - first * each, stop - first * each)

    def _check(self, stored: Stored) -> None:
        """Refuse a tensor that holds what no one box of slices is."""
        if self.way.granularity == 1 or not stored.param.startswith(DENSE):
            return
        each, (start, stop) = self.way.config.sizes["expert_mlp"], stored.box["mlp"]
        held = stop - start
        if (held % each and each % held) or stop > self.dense.layout.schema.sizes["mlp"]:
            raise StoreError(
                f"{self.path}: {stored.name} holds mlp from {start} to {stop}, and slices of {each} do not divide so: "
                "`megacore reshard` it to --tp 1 first"
            )

    @cached_property
    def _named_new(self) -> frozenset[str]:
        """The parameters that no dense weight stands for. All but routers begin with zeros: a shared expert adds
        nothing until it is trained."""
        made = {param.name.replace(DENSE, EXPERTS) for param in self.dense.schema.params} | {SHARED + UP}
        return frozenset(param.name for param in self.schema.params if param.name not in made)

    @cached_property
    def _new(self) -> Mapping[str, Shard]:
        shards = self.layout.shards(self.layout.mesh.place(0))
        return {shard.name: shard for shard in shards if shard.param.name in self._named_new}

    @cached_property
    def _beside(self) -> Mapping[int, Stored]:
        """A dense weight of each layer."""
        return {stored.box["layer"][0]: stored for stored in self.dense.stored() if stored.param.startswith(DENSE)}

    def _drawn(self, shard: Shard, dtype: str) -> np.ndarray:
        values = np.zeros(shard.shape, np.float32)
        if shard.param.name == ROUTER:
            slices = self.way.granularity
            values = np.repeat(initial_values(self.layout, shard, "", self.seed)[::slices], slices, axis=0)
        return rounded(values, "F32", dtype)


def _of(stored: Stored, hidden: str) -> Pattern:
    """Return the sentence of a dense weight with other words for its hidden features."""
    return Pattern.parse(_HIDDEN.sub(hidden, str(stored.pattern)))


def _times(dtype: str, bits: np.ndarray, scale: float, wanted: str) -> np.ndarray:
    """Return the bits of all elements times a factor in another dtype, rounded once."""
    wide = "F64" if "F64" in (dtype, wanted) else "F32"
    made = np.empty(bits.shape, DTYPES[wanted])
    for part, row in zip(made, bits, strict=True):
        part[...] = rounded(as_floats(row, dtype, wide) * scale, wide, wanted)
    return made
