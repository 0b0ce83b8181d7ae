"""Matrices that are updated as wholes: which rank works on which, and the messages that bring them there and back.

A matrix may be split over tp, and each of its shards over replicas (ZeRO). One of the ranks that hold some of it gets
all of it, each shard from the replicas that are nearest, and sends what it makes of it to all who own elements. So each
matrix is worked on once, the same on every mesh, and ranks share out the work as they share out the states.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megacore.parallel.budgets import MATRIX_ELEMENTS
from megacore.parallel.collectives import start_all_to_all
from megacore.parallel.gradients.buckets import OwnedShard, Span
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.gradients.zero import SplitSpan
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import view
from megacore.parallel.rank_sets import RankSet, divide, matrix_dims, of_matrices
from megacore.parallel.weights.layout import Box, Layout, Shard
from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.transfer import Stored, plan

Shape = tuple[int, int]
"""Rows and columns of a matrix."""


# -- the plan, in integers


class OwnedElements(NamedTuple):
    """The elements [start, stop) of a span that a rank owns."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Part:
    """What ranks with one shard of a tensor hold of the matrices of a task, as they store it.

    Args:
        span: This rank's span of the same elements; those of other shards are laid out alike.
        start: The first of its elements in the span.
        copies: The owners of all of its elements, once for each group that splits them.
        shapes: The shapes of all matrices of the task.
    """

    span: Span
    stored: Stored
    start: int
    copies: tuple[tuple[OwnedElements, ...], ...]
    shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.stored.shape)

    def nearest(self, rank: int) -> tuple[OwnedElements, ...]:
        """Return the owners of a copy near to a rank: its own one, if it has some of it."""
        return min(self.copies, key=lambda owners: min(abs(each.rank - rank) for each in owners))


class Fill(NamedTuple):
    """A view of a part, and the view of a matrix that has the same elements."""

    part: Part
    inside: Piece
    of_matrix: Piece


@dataclass(frozen=True, eq=False)
class Task:
    """The matrices of one tensor, or of one expert of it, that one rank works on.

    Args:
        parts: Their parts.
        fills: For each of them what fills it.
    """

    parts: tuple[Part, ...]
    fills: tuple[tuple[Fill, ...], ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.parts[0].shapes

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    @property
    def work(self) -> int:
        """The multiplications of their Gram matrices."""
        return sum(min(shape) ** 2 * max(shape) for shape in self.shapes)


class MatrixMessage(NamedTuple):
    """OwnedElements [start, stop) of a part's span that go from one rank to another, or stay."""

    source: int
    target: int
    part: Part
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, flat: Tensor) -> Tensor:
        """flat: the elements of the part -> those of the message."""
        return flat[self.start - self.part.start : self.stop - self.part.start]


@dataclass(frozen=True, eq=False)
class Round:
    """Some tasks, each with the rank that works on it, in the order of all ranks."""

    tasks: tuple[tuple[Task, int], ...]

    def gathered(self, rank: int) -> list[MatrixMessage]:
        """Return the messages that bring matrices together, those that a rank sends or gets."""
        return [
            MatrixMessage(owner.rank, worker, part, owner.start, owner.stop)
            for task, worker in self.tasks
            for part in task.parts
            for owner in part.nearest(worker)
            if rank in (owner.rank, worker)
        ]

    def returned(self, rank: int) -> list[MatrixMessage]:
        """Return the messages that bring back what is made of them."""
        return [
            MatrixMessage(worker, owner.rank, part, owner.start, owner.stop)
            for task, worker in self.tasks
            for part in task.parts
            for owner in itertools.chain.from_iterable(part.copies)
            if rank in (owner.rank, worker)
        ]


def rounds_of(tasks: Iterable[Task], ranks: Sequence[int], elements: int) -> Iterator[Round]:
    """Share tasks out, the heaviest first, each to the rank that has least to do so far; so many elements a round, or
    one task."""
    together, numel = list[tuple[Task, int]](), 0
    loads = [(0, rank) for rank in ranks]
    for task in sorted(tasks, key=lambda task: -task.work):
        if together and numel + task.numel > elements:
            yield Round(tuple(together))
            together, numel = [], 0
        load, worker = loads[0]
        heapq.heapreplace(loads, (load + task.work, worker))
        together.append((task, worker))
        numel += task.numel
    if together:
        yield Round(tuple(together))


@dataclass(frozen=True)
class Owners:
    """The owners of the elements of spans.

    Args:
        flat: {span: (its first element in flat memory, the elements of that)}, where replicas split flat memory.
        replicas: Groups of data parallel ranks that do not split with each other; None where nobody splits.
    """

    layout: Layout
    flat: Mapping[Span, tuple[int, int]]
    replicas: int | None

    def tasks(self, spans: Sequence[Span], shard: Shard, rank: int) -> Iterator[Task]:
        """Yield the tasks of the spans of one tensor, of which a rank holds a shard: the same ones on every rank that
        holds some of their matrices."""
        param, schema = shard.param, self.layout.schema
        for numbers in itertools.product(*(range(*shard.box[axis]) for axis in param.leading)):
            fixed = {axis: (i, i + 1) for axis, i in zip(param.leading, numbers, strict=True)}
            parts = [part for span in spans for part in self._parts(span, shard, fixed, rank)]
            of = {id(part.stored): part for part in parts}
            fixed |= {axis: shard.box[axis] for axis in param.named_axes}
            whole = [
                Stored(None, shard.name, param.name, labels, pattern, _whole(pattern.axes, schema.sizes) | fixed)
                for labels, pattern in param.matrices.items()
            ]
            copies = plan(schema, (part.stored for part in parts), whole)
            fills = (tuple(Fill(of[id(c.source)], c.source_view, c.target_view) for c in each) for _, each in copies)
            yield Task(tuple(parts), tuple(fills))

    def _parts(self, span: Span, shard: Shard, index: Box, rank: int) -> Iterator[Part]:
        """Yield the parts, of the span on all shards, at an index of the leading axes."""
        param, layout, labels, pattern = shard.param, self.layout, shard.param.sentence.labels, shard.param.sentence
        if span.piece is not None:
            labels, pattern = (span.piece.label,), pattern.select(span.piece.label)
        whole = (each.shape(layout.schema.sizes)[-2:] for each in param.matrices.values())
        shapes = tuple((rows, columns) for rows, columns in whole)
        before = 0
        for axis, (first, _) in index.items():
            before = before * shard.sizes[axis] + first - shard.box[axis][0]
        stage = {*layout.mesh.ranks(pp=[layout.mesh.place(rank).pp])}
        splits, seen = {*matrix_dims(param, layout.split)} - {"dp", "cp"}, set[tuple[int, ...]]()
        for other in layout.mesh.along(rank, *splits):
            here = {axis: layout.box(axis, layout.mesh.place(other)) for axis in param.sentence.axes}
            held = replace(shard, box={**shard.box, **here})
            # What layers of several stages share each of these makes by itself, of the same sums.
            replicas = tuple(each for each in layout.replicas(held, labels[0]) if each in stage)
            if replicas not in seen:
                seen.add(replicas)
                box = {axis: held.box[axis] for axis in (*pattern.axes, *param.named_axes)}
                stored = Stored(other, shard.name, param.name, labels, pattern, {**box, **index})
                numel = math.prod(stored.shape)
                copies = tuple(self._copies(span, replicas, before * numel, numel))
                yield Part(span, stored, before * numel, copies, shapes)

    def _copies(
        self, span: Span, replicas: Sequence[int], start: int, numel: int
    ) -> Iterator[tuple[OwnedElements, ...]]:
        for group in divide(self.layout.mesh, replicas, self.replicas):
            bounds = {rank: self._bounds(span, index, len(group)) for index, rank in enumerate(group)}
            owned = (OwnedElements(rank, max(a, start), min(b, start + numel)) for rank, (a, b) in bounds.items())
            yield tuple(each for each in owned if each.start < each.stop)

    def _bounds(self, span: Span, index: int, ranks: int) -> tuple[int, int]:
        """Return [start, stop) of what one of the ranks that split a span owns of it, and of what lies beside it."""
        if span not in self.flat:
            return 0, span.numel
        start, numel = self.flat[span]
        return index * (numel // ranks) - start, (index + 1) * (numel // ranks) - start


def _whole(axes: Iterable[str], sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {axis: (0, sizes[axis]) for axis in axes}


# -- live

Read = Callable[[OwnedShard, slice], Tensor]
Make = Callable[[list[Tensor]], list[Tensor]]
Factor = Callable[[int, int], float]
Write = Callable[[OwnedShard, slice, Tensor, float], None]


class _Exchange:
    """The messages of a round that go one way, those that a rank sends or gets."""

    def __init__(self, messages: Sequence[MatrixMessage], ranks: RankSet, mesh: Mesh) -> None:
        self._group, rank = mesh.group(ranks), mesh.rank
        self.sent = sorted((each for each in messages if each.source == rank), key=lambda each: each.target)
        self.got = sorted((each for each in messages if each.target == rank), key=lambda each: each.source)
        to, of = Counter[int](), Counter[int]()
        for each in self.sent:
            to[each.target] += each.numel
        for each in self.got:
            of[each.source] += each.numel
        self._to, self._of = ([count[each] for each in ranks] for count in (to, of))

    def __call__(self, values: Iterable[Tensor], like: Tensor) -> Iterator[tuple[MatrixMessage, Tensor]]:
        """Send the values of each message -> each that comes, with its own."""
        came = start_all_to_all(torch.cat([like, *values]), self._group, self._to, self._of).wait()
        return zip(self.got, came.split([each.numel for each in self.got]), strict=True)


class Matrices:
    """The matrices of which a rank owns elements; every rank of the world makes one.

    Args:
        gradients: The parts of the rank.
        elements: The elements of a round, for each of the ranks that split a state.
    """

    def __init__(self, gradients: Gradients, elements: int = MATRIX_ELEMENTS) -> None:
        shards, mesh, layout = gradients.parameters.shards, gradients.parameters.mesh, gradients.parameters.layout
        self._rank, self._device = mesh.rank, mesh.device
        owned = [each for each in gradients.owned_spans() if each.span.is_matrix]
        self._places = {each.span: [*each.overlaps()] for each in owned}
        flat = {each.span: (each.place.start, each.values.flat.numel) for each in owned if isinstance(each, SplitSpan)}
        owners = Owners(layout, flat, gradients.replicas)
        spans, tasks = dict[str, list[Span]](), dict[RankSet, list[Task]]()
        for sets in of_matrices(layout):
            mesh.make_groups(sets)
        for held in owned:
            spans.setdefault(held.span.name, []).append(held.span)
        for name, own in spans.items():
            ranks = mesh.shape.along(mesh.rank, *matrix_dims(shards[name].param, layout.split))
            tasks.setdefault(ranks, []).extend(owners.tasks(own, shards[name], mesh.rank))
        splitting = mesh.shape.data * mesh.shape.cp // gradients.replicas if gradients.replicas else 1
        self._rounds = [
            (
                [task for task, worker in each.tasks if worker == mesh.rank],
                _Exchange(each.gathered(mesh.rank), ranks, mesh),
                _Exchange(each.returned(mesh.rank), ranks, mesh),
            )
            for ranks, own_tasks in tasks.items()
            for each in rounds_of(own_tasks, ranks, elements * splitting)
        ]

    def update(self, dtype: torch.dtype, read: Read, make: Make, factor: Factor, write: Write) -> None:
        """Bring matrices together, and what is made of them to the owners of their elements.

        Args:
            dtype: The dtype of all that travels.
            read: Returns elements of a part, flat.
            make: Is given whole matrices [rows, columns], and returns others of their shapes.
            factor: Returns the factor of what is made of a matrix of so many rows and columns.
            write: Is given what was made of elements of a part, and its factor: where matrices of one task have various
                ones it is the largest, and the others have their share of it already.
        """
        nothing = torch.empty(0, dtype=dtype, device=self._device)
        for tasks, gather, give_back in self._rounds:
            flat = {part: nothing.new_empty(part.numel) for task in tasks for part in task.parts}
            for message, values in gather((read(*self._own(each)) for each in gather.sent), nothing):
                message.of(flat[message.part]).copy_(values)
            matrices = [(shape, fills) for task in tasks for shape, fills in zip(task.shapes, task.fills, strict=True)]
            whole = [nothing.new_empty(shape) for shape, _ in matrices]
            for matrix, (_, fills) in zip(whole, matrices, strict=True):
                for fill in fills:
                    view(matrix, fill.of_matrix).copy_(view(flat[fill.part], fill.inside))
            for matrix, (shape, fills) in zip(make(whole), matrices, strict=True):
                scaled = (matrix * (factor(*shape) / _largest(factor, fills[0].part))).contiguous()
                for fill in fills:
                    view(flat[fill.part], fill.inside).copy_(view(scaled, fill.of_matrix))
            for message, values in give_back((each.of(flat[each.part]) for each in give_back.sent), nothing):
                write(*self._own(message), values, _largest(factor, message.part))

    def _own(self, message: MatrixMessage) -> tuple[OwnedShard, slice]:
        """Return the elements of a message in the part of this rank that owns them."""
        return next(
            (part, slice(message.start + there.start - here.start, message.stop + there.start - here.start))
            for part, there, here in self._places[message.part.span]
            if here.start <= message.start and message.stop <= here.stop
        )


def _largest(factor: Factor, part: Part) -> float:
    return max(factor(*shape) for shape in part.shapes)
