"""Files that show weights in a wider dtype than they lie in, computed when they are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from megacore.parallel.weights.pattern import Piece
from megacore.store.tensor_files.accounting import TensorInFile
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.tensor_files.tensors import DTYPES, Bits, TensorFile

if TYPE_CHECKING:
    from torch import Tensor

AT_ONCE = (1 << 15) - 1
"""Elements that are computed before they leave the cache, and so few that torch's own threads stay out of the way of
those that write."""
Box = tuple[tuple[int, int], ...]
"""[start, stop) of each dimension."""


@dataclass(frozen=True)
class QuantisedWeight(ABC):
    """A weight that lies in few bits in the tensor ``stored``; ``shape`` and ``dtype`` (safetensors') are those that it
    is shown in."""

    stored: TensorInFile
    shape: tuple[int, ...]
    dtype: str

    @abstractmethod
    def fill(self, floats: Tensor, box: Box) -> None:
        """Write its numbers that lie in a box into ``floats``, of its shape and contiguous; those outside may be
        anything. Raises StoreError: it is damaged."""


def shown(
    files: Iterable[TensorFile], quantised: Mapping[str, QuantisedWeight], parts: Set[str] = frozenset()
) -> tuple[TensorFile, ...]:
    """Return the files as they are read: ``quantised`` weights by the names that they are shown under, and neither what
    they lie in nor other ``parts`` of them."""
    hidden = parts | {weight.stored.name for weight in quantised.values()}
    return tuple(_shown(file, quantised, hidden) for file in files)


def _shown(file: TensorFile, quantised: Mapping[str, QuantisedWeight], hidden: Set[str]) -> TensorFile:
    own = {name: weight for name, weight in quantised.items() if weight.stored.file is file}
    entries = {name: entry for name, entry in file.entries.items() if name not in hidden}
    for name, weight in own.items():
        entries[name] = replace(weight.stored.entry, dtype=weight.dtype, shape=weight.shape)
    return QuantisedFile(file.path, entries, file.metadata, file.size, file.root, stored=file, quantised=own)


def halves(numbers: np.ndarray, higher_first: bool) -> np.ndarray:
    """Return what each of the 256 bytes holds two of, as [256] of the bits of two floats: to be taken by bytes at once,
    many times as fast as rows of two. ``numbers`` [16], fp32: what each half of a byte stands for."""
    byte = np.arange(256)
    pairs = [numbers[byte >> 4], numbers[byte & 15]]
    return np.stack(pairs if higher_first else pairs[::-1], 1).view(np.int64).reshape(-1)


@dataclass(frozen=True)
class QuantisedFile(TensorFile):
    """A file that shows ``quantised`` weights in a wider dtype, and not their scales."""

    stored: TensorFile = field(kw_only=True)
    quantised: Mapping[str, QuantisedWeight] = field(kw_only=True)

    def hold(self) -> None:
        self.stored.hold()

    def array(self, name: str, view: Piece | None = None) -> Bits:
        return self.part(name, [] if view is None else [view])

    def part(self, name: str, views: Iterable[Piece]) -> Bits:
        if name not in self.quantised:
            return self.stored.array(name)
        import torch  # only to compute with: moving bytes must not wait for its import

        weight = self.quantised[name]
        made = np.empty(weight.shape, DTYPES[weight.dtype])  # what nobody touches takes no memory
        floats = torch.from_numpy(made.view(f"i{made.itemsize}")).view(getattr(torch, FLOATS[weight.dtype]))
        weight.fill(floats, _box(views, weight.shape))
        return made


def _box(views: Iterable[Piece], shape: tuple[int, ...]) -> Box:
    """Return what views of a tensor lie in; all of it where there are no views, or one runs across its dimensions."""
    every: Box = tuple((0, size) for size in shape)
    found = list[Box]()
    for view in views:
        steps = [(n - 1, step) for n, step in zip(view.shape, view.strides, strict=True) if n > 1]
        first = [int(at) for at in np.unravel_index(view.offset, shape)]
        last = [int(at) for at in np.unravel_index(view.offset + sum(n * step for n, step in steps), shape)]
        reach = [sum(n * int(np.unravel_index(step, shape)[at]) for n, step in steps) for at in range(len(shape))]
        if [begin + more for begin, more in zip(first, reach, strict=True)] != last:
            return every
        found.append(tuple((begin, end + 1) for begin, end in zip(first, last, strict=True)))
    if not found:
        return every
    return tuple(
        (min(starts), max(stops)) for starts, stops in (zip(*each, strict=True) for each in zip(*found, strict=True))
    )
