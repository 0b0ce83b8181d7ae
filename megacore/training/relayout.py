"""State that moves from one layout to another through the memory of the ranks that are left, without a disk.

What is left of a world is a folder of weights like any other (:class:`LiveFolder`): its index is the old layout, and
whoever loads from it asks the ranks that hold an image, or a copy of one, for the elements that it reads, and for no
others. So a run goes on as it would from a checkpoint, with the same program and the same numbers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megacore.config import Config
from megacore.control import Control
from megacore.recovery.protocol import Sources, Way
from megacore.store.folder import WeightFolder
from megacore.store.index import Index, on_disk
from megacore.store.stream import Read
from megacore.store.strict_json import StoreError
from megacore.store.tensors import DTYPES
from megacore.training import image
from megacore.training.check import Setup
from megacore.training.copies import Copies
from megacore.training.image import Bytes, ImageRange
from megacore.training.load import load
from megacore.training.resume import Start
from megacore.training.trainer import Trainer
from models.stages import layout_of
from parallel.choices import ZeroShard
from parallel.copies import identical
from parallel.mesh import Group
from parallel.rank_sets import RankSet
from parallel.weights.fingerprint import MODULUS, Logical, fingerprint
from parallel.weights.layout import Box, Layout, MeshShape, Shard
from parallel.weights.pattern import Piece
from parallel.weights.schema import split_of
from parallel.weights.transfer import Copy, Stored, strided


@dataclass(frozen=True)
class World:
    """The ranks that the state of a run is spread over, and all that its layout on them follows from.

    Args:
        formed_in: The generation of the groups in which it was formed.
        mesh: The sizes of the mesh.
        etp: The parts of each expert.
        chunks: The virtual stages of each rank.
        layers: The layers of each virtual stage; None balances them.
        shard: The states that replicas split.
        replicas: Groups of data parallel ranks that do not split with each other.
    """

    formed_in: int
    mesh: MeshShape
    etp: int
    chunks: int
    layers: tuple[int, ...] | None
    shard: ZeroShard
    replicas: int

    @classmethod
    def of(cls, config: Config, mesh: MeshShape, formed_in: int = 0) -> World:
        pipeline, zero = config.pipeline, config.zero
        return cls(
            formed_in, mesh, config.mesh.etp, pipeline.chunks, pipeline.layers_per_stage, zero.shard, zero.replicas
        )

    def layout(self, setup: Setup) -> Layout:
        """Return the layout of a run's model on it."""
        tuning = setup.config.tuning
        return layout_of(setup.model, self.mesh, self.chunks, self.layers, tuning, split_of(self.etp))

    def identical(self, setup: Setup) -> Mapping[int, RankSet]:
        """Return {rank: the ranks whose image is the same, itself among them}."""
        return identical(self.layout(setup), self.shard, self.replicas)

    def is_like(self, other: World) -> bool:
        """Return whether each rank has the same part of the run as in another world."""
        return replace(self, formed_in=0) == replace(other, formed_in=0)


# -- what is where


@dataclass(frozen=True)
class _HeldPiece:
    """Elements of a piece, in an image that one or several ranks can read.

    Args:
        image: The number of the image.
        number: The number of the extent in it.
        extent: The extent.
        view: The place of the piece among the elements that the extent counts.
        axes: The axes of the piece in the order of its sentence.
        box: [start, stop) of each of these, without padding.
        starts: The first index of each, where the view begins.
        ranks: The ranks, in the new world, that can read it.
    """

    image: int
    number: int
    extent: ImageRange
    view: Piece
    axes: tuple[str, ...]
    box: Box
    starts: Mapping[str, int]
    ranks: tuple[int, ...]


_Key = tuple[str, str, tuple[tuple[int, int], ...]]
"""(tensor, label, box) of a piece."""


class Directory:
    """The ranks that can read each element of the old world's state.

    Args:
        layout: The old layout.
        images: {number of an image: (the rank whose it is, its extents, the new ranks that can read it)}.
    """

    def __init__(self, layout: Layout, images: Mapping[int, tuple[Sequence[ImageRange], Sequence[int]]]) -> None:
        self._held: dict[_Key, dict[tuple[int, int], list[_HeldPiece]]] = {}
        self._extents = {image: extents for image, (extents, _) in images.items()}
        self.dtypes: dict[str, dict[str, str]] = {}
        """{state: {tensor: dtype}}."""
        for of, (extents, ranks) in images.items():
            shards = {shard.name: shard for shard in layout.shards(layout.mesh.place(of))}
            for number, extent in enumerate(extents):
                if extent.name not in shards:  # a frozen model beside its adapters
                    continue
                for held in _pieces(layout, shards[extent.name], of, number, extent, tuple(ranks)):
                    key = _key(extent.name, held.view.label, shards[extent.name].box, held.axes)
                    self._held.setdefault(key, {}).setdefault((extent.start, extent.stop), []).append(held)
                for state, (dtype, _) in extent.at.items():
                    self.dtypes.setdefault(state, {})[extent.name] = dtype

    def of(self, source: Stored, label: str) -> Iterator[list[_HeldPiece]]:
        """Yield what together is a piece of a tensor: each time all that hold the same of it."""
        key = _key(source.name, label, source.box, source.pattern.piece_axes(label))
        for _, held in sorted(self._held.get(key, {}).items()):
            yield held

    def extent(self, of: int, number: int) -> ImageRange:
        return self._extents[of][number]

    def once(self) -> Iterator[_HeldPiece]:
        """Yield what together is all of the state, each element once."""
        return (held[0] for of_piece in self._held.values() for held in of_piece.values())


def _key(name: str, label: str, box: Box, axes: Sequence[str]) -> _Key:
    return name, label, tuple(box[axis] for axis in axes)


def _pieces(
    layout: Layout, shard: Shard, image: int, number: int, extent: ImageRange, ranks: tuple[int, ...]
) -> Iterator[_HeldPiece]:
    for piece in shard.pieces:
        if extent.label not in (None, piece.label):
            continue
        view = piece if extent.label is None else _flat(piece)
        starts = {axis: shard.box[axis][0] for axis in piece.axes}
        sizes = layout.schema.sizes
        box = {axis: (0, max(0, min(shard.box[axis][1], sizes[axis]) - shard.box[axis][0])) for axis in piece.axes}
        axes = shard.param.sentence.piece_axes(piece.label)
        yield _HeldPiece(image, number, extent, view, axes, box, starts, ranks)


def _flat(piece: Piece) -> Piece:
    """Return a piece as it lies in memory of its own."""
    strides = itertools.accumulate(reversed(piece.shape[1:]), int.__mul__, initial=1)
    return replace(piece, strides=tuple(strides)[::-1][: len(piece.shape)], offset=0)


def within(view: Piece, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes, counted from a view's origin, of its elements that lie in [start, stop), in their order; few."""
    order = sorted(range(len(view.axes)), key=lambda i: -view.strides[i])
    yield from _within(view, order, view.offset, start, stop, {})


def _within(
    view: Piece, order: Sequence[int], offset: int, start: int, stop: int, box: dict[str, tuple[int, int]]
) -> Iterator[Box]:
    if not view.numel:
        return
    if not order:
        if start <= offset < stop:
            yield dict(box)
        return
    at, *inner = order
    axis, size, step = view.axes[at], view.shape[at], view.strides[at]
    last = offset + sum((view.shape[i] - 1) * view.strides[i] for i in inner)  # of the first index
    everything = {view.axes[i]: (0, view.shape[i]) for i in inner}
    first = min(size, max(0, -(-(start - offset) // step)))  # those that begin after the start
    end = max(first, min(size, (stop - 1 - last) // step + 1))  # those that end before the stop
    for index in range(max(0, (start - last + step - 1) // step), first):
        yield from _within(view, inner, offset + index * step, start, stop, box | {axis: (index, index + 1)})
    if first < end:
        yield {**box, axis: (first, end), **everything}
    for index in range(end, min(size, max(end, -(-(stop - offset) // step)))):
        yield from _within(view, inner, offset + index * step, start, stop, box | {axis: (index, index + 1)})


# -- the folder

_Request = tuple[int, int, tuple[int, ...], tuple[int, ...], int]
"""Elements of an image: (its number, the number of the extent; shape, strides and offset, in what the extent holds)."""


@dataclass(frozen=True)
class _Brought:
    """Elements that have come, and where they lie in the tensor that they are of, as it was stored."""

    view: Piece
    elements: Tensor


@dataclass(frozen=True)
class LiveFolder(WeightFolder):
    """The state of a world in the memory of those that are left of it; all ranks of the next ask together.

    Args:
        directory: The ranks that can read each element.
        images: {number of an image: what reads it} of those that this rank can read.
        version: The step that they are of.
        group: All ranks, for tensors in host memory.
        given: Bytes that this rank has given to each other.
    """

    directory: Directory
    images: Mapping[int, Bytes]
    version: int
    group: Group
    sums: Mapping[str, Mapping[Logical, int]] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    _brought: dict[object, list[_Brought]] = field(default_factory=dict)
    _problems: list[str] = field(default_factory=list)

    @classmethod
    def open(
        cls, index: Index, directory: Directory, images: Mapping[int, Bytes], group: Group, control: Control
    ) -> LiveFolder:
        """Return the folder of a state that is held; all ranks call this.

        Args:
            index: The index, of the layout that the state has been in.
            directory, images, group: Those of the folder.
            control: The messages between the ranks.
        """
        assert index.step is not None
        folder = cls(Path("the memory of the ranks"), index, directory, images, index.step, group)
        own = {state: folder._taken(state) for state in index.states}
        spelled = [[state, *piece, f"{value:x}"] for state, of in own.items() for piece, value in of.items()]
        sums = dict[str, dict[Logical, int]]()
        for state, name, label, value in itertools.chain(*control.exchange(spelled)):
            of = sums.setdefault(state, {})
            of[name, label] = (of.get((name, label), 0) + int(value, 16)) % MODULUS
        return replace(folder, sums=sums)

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        return self.index.stored(state) if state in self.states else iter(())

    def dtype(self, state: str, stored: Stored) -> str:
        return self.directory.dtypes[state][stored.name]

    def read(self, state: str = "weights") -> Read:
        raise NotImplementedError("what is in the memory of other ranks is brought first, and read by its copies")

    def fingerprints(self, state: str) -> Mapping[Logical, int]:
        return self.sums.get(state, {})

    def bring(self, state: str, copies: Sequence[Copy]) -> None:
        """Ask the ranks that have them for the elements that some copies take, each of one rank, and give others
        theirs. What is wrong with them is raised where they are read: others would wait for a rank that does it here.
        """
        asked: dict[int, list[tuple[_Request, object, Piece]]] = {rank: [] for rank in self.group.ranks}
        load = dict.fromkeys(self.group.ranks, 0)
        for copy in copies:
            for held, request, view in self._requests(copy):
                ranks = {rank: each for each in held for rank in each.ranks}
                rank = min(ranks, key=lambda rank: self._cost(rank, load))
                load[rank] += view.numel
                each = ranks[rank]
                asked[rank].append(((each.image, each.number, *request), _key_of(state, copy), view))
        told = {rank: json.dumps([request for request, _, _ in requests]).encode() for rank, requests in asked.items()}
        wanted = {
            rank: json.loads(bytes(found.numpy()))
            for rank, found in _swapped(self.group, lambda rank: _as_tensor(told[rank]))
        }
        for rank, found in _swapped(self.group, lambda rank: self._packed(state, wanted[rank], rank)):
            self._take(state, rank, asked[rank], found)

    def read_for(self, state: str, copies: Sequence[Copy]) -> Read:
        if self._problems:
            raise StoreError(f"{self.path}: {self._problems[0]}")
        made = dict[tuple[object, str], tuple[str, np.ndarray]]()
        for copy in copies:
            stored = copy.source
            dtype = self.dtype(state, stored)
            _, array = made.setdefault((stored.where, stored.name), (dtype, np.empty(stored.shape, DTYPES[dtype])))
            for each in self._brought.pop(_key_of(state, copy)):
                strided(array, each.view)[...] = each.elements.numpy().view(array.dtype).reshape(each.view.shape)
        return lambda stored: made[stored.where, stored.name]

    def _requests(
        self, copy: Copy
    ) -> Iterator[tuple[list[_HeldPiece], tuple[tuple[int, ...], tuple[int, ...], int], Piece]]:
        """Yield (all that have them; elements of a copy's source; where they lie in it)."""
        source, piece = copy.source, copy.source.pieces[copy.label]
        first_of = {axis: source.box[axis][0] for axis in piece.axes}
        local = {axis: (copy.box[axis][0] - start, copy.box[axis][1] - start) for axis, start in first_of.items()}
        inside, found = piece.box(local), 0
        for held in self.directory.of(source, copy.label):
            first = held[0]
            there = first.view.box(local)
            for box in within(there, first.extent.start, first.extent.stop):
                part = there.box(box)
                found += part.numel
                yield held, (part.shape, part.strides, part.offset - first.extent.start), inside.box(box)
        if found != inside.numel:
            self._problems.append(f"{found} of {inside.numel} elements of {source.name} are held")

    def _cost(self, rank: int, load: Mapping[int, int]) -> tuple[bool, int, int]:
        """Return what comes first for the least: what is here, who gives least, and the next rank."""
        return rank != self.group.index, load[rank], (rank - self.group.index) % self.group.size

    def _packed(self, state: str, requests: Sequence[_Request], rank: int) -> Tensor:
        """Return the elements that a rank asks for, after the step that they are of: uint8 [n]."""
        found = [torch.tensor([self.version]).view(torch.uint8)]
        for of, number, shape, strides, offset in requests:
            found.append(_bytes(self._elements(state, of, number, shape, strides, offset)))
        packed = torch.cat(found)
        self.given[rank] = self.given.get(rank, 0) + packed.nbytes - 8
        return packed

    def _elements(
        self, state: str, of: int, number: int, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> Tensor:
        """Return elements of an image as integers."""
        extent = self.directory.extent(of, number)
        dtype, start = extent.at[state]
        width = DTYPES[dtype].itemsize
        flat = self.images[of](start, start + (extent.stop - extent.start) * width)
        if flat.storage_offset() % width:
            flat = flat.clone()
        return flat.view(_INTEGERS[width]).as_strided(shape, strides, flat.storage_offset() // width + offset)

    def _take(self, state: str, rank: int, asked: Sequence[tuple[_Request, object, Piece]], found: Tensor) -> None:
        version, at = int(found[:8].clone().view(torch.int64)), 8
        if version != self.version:
            self._problems.append(f"rank {rank} has given what it had at step {version}, not {self.version}")
        for (of, number, *_), key, view in asked:
            width = DTYPES[self.directory.extent(of, number).at[state][0]].itemsize
            size = view.numel * width
            self._brought.setdefault(key, []).append(_Brought(view, found[at : at + size].clone()))
            at += size
        if at != len(found):
            self._problems.append(f"rank {rank} has given {len(found)} bytes, and was asked for {at}")

    def _taken(self, state: str) -> dict[Logical, int]:
        """Return the fingerprints of what this rank is the first that can read."""
        sums, names = dict[Logical, int](), self.names(state)
        for held in self.directory.once():
            if held.ranks[0] != self.group.index or state not in held.extent.at or held.extent.name not in names:
                continue
            view = held.view.box(held.box)
            for box in within(view, held.extent.start, held.extent.stop):
                part = view.box(box)
                elements = self._elements(
                    state, held.image, held.number, part.shape, part.strides, part.offset - held.extent.start
                )
                bits = elements.cpu().numpy()
                array = bits.view(f"u{bits.itemsize}").transpose([part.axes.index(axis) for axis in held.axes])
                starts = {axis: held.starts[axis] + box[axis][0] for axis in held.axes}
                piece = held.extent.name, part.label
                sums[piece] = (sums.get(piece, 0) + fingerprint(array, held.axes, starts)) % MODULUS
        return sums


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _key_of(state: str, copy: Copy) -> object:
    return state, copy.source.where, copy.source.name, copy.label, tuple(sorted(copy.box.items()))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _swapped(group: Group, give: Callable[[int], Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Give each rank bytes, and yield (rank, the bytes that it gives): one rank after the other, its own first."""
    yield group.index, give(group.index)
    for step in range(1, group.size):
        to, source = (group.index + step) % group.size, (group.index - step) % group.size
        gives = give(to)
        size, coming = torch.tensor(len(gives)), torch.zeros((), dtype=torch.int64)
        sent: list[Any] = [dist.isend(each, to, group=group.process_group) for each in (size, gives)]
        dist.recv(coming, source, group=group.process_group)
        found = torch.empty(int(coming), dtype=torch.uint8)
        dist.recv(found, source, group=group.process_group)
        for each in sent:
            each.wait()
        yield source, found


# -- from one world to another


@dataclass(frozen=True)
class Left:
    """The rest of a world, as one of the ranks of the next knows it.

    Args:
        world: The world.
        sources: The version that is taken, and the places of its images.
        readers: {rank of that world: rank of the new one} of those that are left.
        own: The rank of this process in that world, if it had one.
        trainer: The trainer that it had.
        copies: The copies that it holds.
    """

    world: World
    sources: Sources
    readers: Mapping[int, int]
    own: int | None
    trainer: Trainer | None
    copies: Copies

    def read(self, way: Way) -> tuple[Bytes, Sequence[Any], Callable[[int], Tensor]]:
        """Return what reads the image that a way of this process leads to, what lies where, and its last bytes."""
        if way.kind == "copy":
            copied = self.copies.images[way.image][self.sources.version]
            return lambda start, stop: copied.bytes[start:stop], copied.contents, lambda n: copied.bytes[-n:]
        trainer = self.trainer
        assert trainer is not None
        return image.reader(trainer), image.contents(trainer), lambda n: image.common_to_bytes(trainer)


def move(trainer: Trainer, setup: Setup, control: Control, group: Group, left: Left) -> LiveFolder:
    """Give the trainer of a new world the state of another; all ranks call this -> what it was read from.

    Args:
        trainer: The trainer, whose tensors are still to come.
        setup: The run.
        control: The messages between the ranks.
        group: All ranks, for tensors in host memory.
        left: The rest of the other world.

    Raises:
        StoreError: what was read is not what is held; on every rank.
    """
    found, tuning = left.sources, setup.config.tuning
    mine = {
        number: left.read(way)
        for number, ways in found.images.items()
        for way in [next((way for way in ways if way.source == left.own), None)]
        if way is not None
    }
    firsts = {number: left.readers[ways[0].source] for number, ways in found.images.items()}
    described = {number: mine[number][1] for number, rank in firsts.items() if rank == group.index}
    told = {int(number): each for of_rank in control.exchange(described) for number, each in of_rank.items()}
    layout = replace(left.world.layout(setup), schema=tuning.kept(setup.model.schema))
    images = {
        number: ([ImageRange.from_json(*each) for each in told[number]], [left.readers[way.source] for way in ways])
        for number, ways in found.images.items()
    }
    index = replace(trainer.saver.index, layout=on_disk(layout), step=found.version, files={})
    readers = {number: read for number, (read, _, _) in mine.items()}
    folder = LiveFolder.open(index, Directory(layout, images), readers, group, control)
    start = Start(folder, {}, trainer.start)
    if index.adapters is not None:
        start = replace(start, source=setup.start.source, adapters=folder)
    step, seed = trainer.step, setup.config.train.seed
    load(start, trainer.model.parameters, step.optimizer, seed, control)
    number, rank = min(firsts.items())
    common = torch.empty_like(image.common_to_bytes(trainer))
    if rank == group.index:
        common.copy_(mine[number][2](len(common)))
    if group.size > 1:
        dist.broadcast(common, rank, group=group.process_group)
    image.restore_common(trainer, common)
    return folder
