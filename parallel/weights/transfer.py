"""Moving weights: copying between two views of the same piece, box by box. The only program that does it.

A *format* is a list of :class:`Stored` tensors: ours on some mesh (:func:`native`), or Hugging Face's
(:func:`hugging_face`). :func:`plan` intersects their boxes; nobody writes an inverse. :func:`blocks` cuts what fills a
target into parts of bounded size, so that a transfer needs the same memory for any model.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megacore.parallel.weights.layout import Box, Layout
from megacore.parallel.weights.pattern import Pattern, Piece, Sizes
from megacore.parallel.weights.schema import Schema


class TransferError(ValueError):
    """Elements without a source, or sources without a target; the message names all of them."""


Cut = tuple[str, int, int]
"""(axis, start, stop): a part of a tensor."""


@dataclass(frozen=True)
class Stored:
    """A tensor as some format stores it.

    Args:
        where: The rank or the file that holds it.
        name: Its name there.
        param: Name of the declared parameter that it holds, or holds a piece of.
        labels: The pieces of the parameter that it holds.
        pattern: The sentence of its storage.
        box: [start, stop) of each axis, those in its name included.
        of: The tensor of all layers of which it is the part of one, and in which it lies; None: it lies by itself.
    """

    where: Hashable
    name: str
    param: str
    labels: tuple[str, ...]
    pattern: Pattern
    box: Box
    of: Stored | None = None

    @cached_property
    def sizes(self) -> Sizes:
        return {axis: stop - start for axis, (start, stop) in self.box.items()}

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.pattern.shape(self.sizes) if self.of is None else self.of.shape

    @cached_property
    def pieces(self) -> Mapping[str, Piece]:
        if self.of is not None:
            inside = self.of.inside(self).values()
            return {part.label: _view(part, [axis for axis in part.axes if axis != "layer"]) for part in inside}
        return dict(zip(self.labels, self.pattern.pieces(self.sizes), strict=True))

    def along(self, axis: str, start: int, stop: int) -> Stored:
        """Return the slice from ``start`` to ``stop`` of an axis that all pieces have: stored by the same sentence."""
        return replace(self, box={**self.box, axis: (start, stop)})

    def inside(self, part: Stored) -> Mapping[str, Piece]:
        """Return {label: where the piece of a slice of this tensor lies in it}."""
        bounds = {
            axis: (start - self.box[axis][0], stop - self.box[axis][0]) for axis, (start, stop) in part.box.items()
        }
        return {label: piece.box(bounds) for label, piece in self.pieces.items()}

    def cut(self, part: Stored) -> Cut | None:
        """Return the axis, start and stop of a slice of this tensor; None if it is all of it."""
        return next(((axis, *box) for axis, box in part.box.items() if box != self.box[axis]), None)


def by_layer(stored: Iterable[Stored]) -> Iterator[Stored]:
    """Yield tensors, of each that holds those of several layers a slice for each of them."""
    for tensor in stored:
        if tensor.sizes.get("layer", 1) == 1:
            yield tensor
        else:
            pattern, layers = tensor.pattern.without(frozenset(["layer"])), range(*tensor.box["layer"])
            yield from (replace(tensor.along("layer", i, i + 1), pattern=pattern, of=tensor) for i in layers)


@dataclass(frozen=True)
class Copy:
    """Copy ``source_view`` of one stored tensor to ``target_view`` of another: same shape, one dimension per axis.

    ``label`` and ``box`` say which elements they are: of which piece of the parameter, and [start, stop) of each of its
    axes, those in names included.
    """

    source: Stored
    source_view: Piece
    target: Stored
    target_view: Piece
    label: str
    box: Box

    def along(self, axis: str, start: int, stop: int) -> Copy:
        """Return the part from ``start`` to ``stop`` of one axis of the views, counted from their origin."""
        origin = self.box[axis][0]
        return replace(
            self,
            source_view=_cut(self.source_view, axis, start, stop),
            target_view=_cut(self.target_view, axis, start, stop),
            box={**self.box, axis: (origin + start, origin + stop)},
        )


@dataclass(frozen=True)
class TargetChunk:
    """``numel`` contiguous elements of a target from ``start`` on, and what fills them; the rest of them is padding.

    The offsets of the copies' target views count from ``start``.
    """

    start: int
    numel: int
    copies: tuple[Copy, ...]

    @property
    def is_full(self) -> bool:
        return sum(copy.target_view.numel for copy in self.copies) == self.numel


def native(layout: Layout, ranks: Iterable[int]) -> Iterator[Stored]:
    """Yield the tensors that each of the ranks holds, in our own format; ``where`` is the rank."""
    for rank in ranks:
        for shard in layout.shards(layout.mesh.place(rank)):
            param = shard.param
            yield Stored(rank, shard.name, param.name, param.sentence.labels, param.sentence, shard.box)


def hugging_face(schema: Schema, where: Hashable = "hf", copies: bool = False) -> Iterator[Stored]:
    """Yield the tensors of a Hugging Face checkpoint of the model, whole; with ``copies`` those that it stores again,
    too."""
    for param in schema.params:
        tensors: dict[tuple[str, Pattern], list[str]] = {}
        for label, tensor in param.hf_tensors.items():
            tensors.setdefault(tensor, []).append(label)
        for (template, pattern), labels in tensors.items():
            for index in schema.indices(param, template):
                box = {axis: (0, schema.sizes[axis]) for axis in sorted(pattern.axes)}
                box |= {axis: (i, i + 1) for axis, i in index.items()}
                if param.layers is not None and len(param.layers) == 1:  # theirs may not say it
                    box["layer"] = param.layers[0], param.layers[0] + 1
                for name in (template, *(param.hf_copies if copies else ())):
                    yield Stored(where, name.format(**index), param.name, tuple(labels), pattern, box)


def whole_name(schema: Schema, stored: Stored) -> str:
    """Return our name of the tensor that a stored one is a part of, its layer filled in."""
    param = schema[stored.param]
    return param.name.format(**{axis: stored.box[axis][0] for axis in param.named_axes})


def plan(schema: Schema, sources: Iterable[Stored], targets: Iterable[Stored]) -> Iterator[tuple[Stored, list[Copy]]]:
    """Yield the copies that fill each target; elements beyond an axis' size have none, they are padding.

    Raises:
        TransferError: a target element that no source holds (raised when its target is reached).
    """
    holders: dict[tuple[str, str], _Holders] = {}
    for source in sources:
        for label, piece in source.pieces.items():
            holders.setdefault((source.param, label), _Holders()).add(source, piece)
    for target in targets:
        copies, wanted = [], 0
        for label, piece in target.pieces.items():
            clipped = {a: (start, min(stop, schema.sizes[a])) for a, (start, stop) in target.box.items()}
            wanted += piece.box({a: (0, max(0, clipped[a][1] - clipped[a][0])) for a in piece.axes}).numel
            wide = {axis: clipped[axis] for axis in _axes(target, piece)}
            of = holders.get((target.param, label))
            for source, held, hit in of.overlapping(wide) if of else ():
                order = tuple(sorted(set(held.axes) & set(piece.axes)))
                views = _inside(held, hit, source, order), _inside(piece, hit, target, order)
                copies.append(Copy(source, views[0], target, views[1], label, hit))
        filled = sum(copy.target_view.numel for copy in copies)
        if filled != wanted:
            of_param = (each for (name, _), each in holders.items() if name == target.param)
            held_by = sorted({str(source.where) for each in of_param for source, _, _ in each.overlapping({})})
            raise TransferError(
                f"{target.name}: {filled} of {wanted} elements have a source (tensors of {target.param} are held by "
                f"{', '.join(held_by) or 'nobody'})"
            )
        yield target, copies


def _axes(stored: Stored, piece: Piece) -> frozenset[str]:
    """Return the axes of a piece and those in the tensor's name; not those of the pieces that are fused to it."""
    return frozenset(piece.axes) | (stored.box.keys() - stored.pattern.axes)


_Hit = tuple[Stored, Piece, Box]
"""(a source, its piece, what of a box it holds)."""


class _Holders:
    """The sources that hold one piece of a parameter, found by a box: a tree with a level for each axis.

    So a target looks at those that it overlaps, and not at all the experts of all layers.
    """

    def __init__(self) -> None:
        self._trees: dict[tuple[str, ...], _Level] = {}

    def add(self, source: Stored, piece: Piece) -> None:
        axes = tuple(sorted(_axes(source, piece)))
        level = self._trees.setdefault(axes, _Level())
        for axis in axes:
            level = level.below.setdefault(source.box[axis], _Level())
        level.held = source, piece  # replicas hold equal boxes: one of them will do

    def overlapping(self, box: Box) -> Iterator[_Hit]:
        """Yield what holds some of a box, which may leave axes out."""
        for axes, tree in self._trees.items():
            yield from tree.overlapping(axes, box, {})


class _Level:
    """Things by their bounds along one axis: below each, those of the next axis, or what is held where none is left."""

    def __init__(self) -> None:
        self.below: dict[tuple[int, int], _Level] = {}
        self.held: tuple[Stored, Piece] | None = None

    @cached_property
    def _bounds(self) -> tuple[list[tuple[int, int]], list[int]]:
        """All bounds, ascending, and how far those up to each of them reach."""
        bounds = sorted(self.below)
        return bounds, [*itertools.accumulate((stop for _, stop in bounds), max)]

    def overlapping(self, axes: Sequence[str], box: Box, hit: dict[str, tuple[int, int]]) -> Iterator[_Hit]:
        if self.held is not None:
            yield *self.held, dict(hit)
            return
        axis, *others = axes
        if axis not in box:
            for level in self.below.values():
                yield from level.overlapping(others, box, hit)
            return
        (start, stop), (bounds, reach) = box[axis], self._bounds
        for first, last in bounds[bisect_right(reach, start) : bisect_left(bounds, (stop,))]:
            hit[axis] = max(first, start), min(last, stop)
            if hit[axis][0] < hit[axis][1]:
                yield from self.below[first, last].overlapping(others, box, hit)


def _inside(piece: Piece, hit: Box, stored: Stored, order: tuple[str, ...]) -> Piece:
    local = {a: (hit[a][0] - stored.box[a][0], hit[a][1] - stored.box[a][0]) for a in piece.axes}
    # An axis that lives in the other side's name has one index here: fix it, rather than keep a dimension of size one.
    return _view(piece.box(local), order)


def _view(piece: Piece, order: Sequence[str]) -> Piece:
    """Return the view with its axes in an order, less those of one index that it does not name."""
    keep = [piece.axes.index(axis) for axis in order]
    shape, strides = (tuple(each[i] for i in keep) for each in (piece.shape, piece.strides))
    return Piece(piece.label, tuple(order), shape, strides, piece.offset)


def blocks(copies: Sequence[Copy], limit: int) -> Iterator[TargetChunk]:
    """Yield the parts of one target, in ascending order, of at most ``limit`` elements each where its sentence allows
    that.

    Padding that no copy touches is in no block.
    """
    for together in _interleaved(copies):
        yield from _divide(together, limit)


def _interleaved(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Yield groups of copies whose elements lie between each other's in the target, as columns of a matrix do."""
    together, end = list[Copy](), 0
    for copy in sorted(copies, key=lambda copy: copy.target_view.offset):
        if together and copy.target_view.offset >= end:
            yield together
            together = []
        together.append(copy)
        end = max(end, _end(copy.target_view))
    if together:
        yield together


def _divide(copies: list[Copy], limit: int) -> Iterator[TargetChunk]:
    start, end = min(c.target_view.offset for c in copies), max(_end(c.target_view) for c in copies)
    axis = _outermost(copies) if end - start > limit else None
    if axis is None:
        yield TargetChunk(start, end - start, tuple(_from(copy, start) for copy in copies))
        return
    view = copies[0].target_view
    at = view.axes.index(axis)
    length, step = view.shape[at], max(1, limit // view.strides[at])
    for first in range(0, length, step):
        # One index alone may still be too large: its parts are divided along the next axis.
        yield from blocks([copy.along(axis, first, min(first + step, length)) for copy in copies], limit)


def _outermost(copies: list[Copy]) -> str | None:
    """Return the axis with the largest stride of all copies, if they have the same extent along it."""

    def largest(view: Piece) -> tuple[int, int, str]:
        return max(((n, size, a) for a, n, size in zip(view.axes, view.strides, view.shape, strict=True) if size > 1))

    if any(copy.target_view.numel == 1 for copy in copies):
        return None
    found = {(*largest(c.target_view), c.target_view.offset // largest(c.target_view)[0]) for c in copies}
    return found.pop()[2] if len(found) == 1 else None


def _end(view: Piece) -> int:
    """Return the offset one past the last element."""
    return view.offset + 1 + sum((size - 1) * n for size, n in zip(view.shape, view.strides, strict=True))


def _cut(view: Piece, axis: str, start: int, stop: int) -> Piece:
    bounds = {a: (0, size) for a, size in zip(view.axes, view.shape, strict=True)}
    return view.box({**bounds, axis: (start, stop)})


def _from(copy: Copy, start: int) -> Copy:
    return replace(copy, target_view=replace(copy.target_view, offset=copy.target_view.offset - start))


def execute(copy: Copy, source: np.ndarray, target: np.ndarray) -> None:
    """Carry out one copy between contiguous arrays that hold its two tensors, converting the dtype if they differ."""
    strided(target, copy.target_view)[...] = strided(source, copy.source_view)


def strided(array: np.ndarray, piece: Piece) -> np.ndarray:
    """Return a piece of a contiguous array, one dimension per axis, sharing its memory."""
    strides = [stride * array.itemsize for stride in piece.strides]
    # In a tenth of the time of numpy's as_strided, and held against the bounds.
    return np.ndarray(piece.shape, array.dtype, array, piece.offset * array.itemsize if piece.numel else 0, strides)
