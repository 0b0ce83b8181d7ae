"""Loads tensors of folders into the shards of the ranks, and verifies them while they are read.

Ranks of a stage that hold the same tensor, whatever the dimension of the mesh, read it together: each slice is read by
one of them, ahead of its turn, and goes to the others over the network of their devices. However many they are, a byte
is read once.

A checkpoint's index holds the fingerprint of every piece as it was written. Each rank takes those of the slices that it
reads. Fingerprints add up over boxes, so that together the ranks know whether they have read what was written, whatever
the layout was then and is now. A Hugging Face folder has no fingerprints.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megacore.control import Control
from megacore.parallel.collectives import broadcast_
from megacore.parallel.mesh import Group
from megacore.parallel.parameters import Parameters, view
from megacore.parallel.rank_sets import copy_dims, of_copies, parts_of_dp
from megacore.parallel.weights.fingerprint import Logical, ReplicasDiffer, add_up, combined, spell
from megacore.parallel.weights.transfer import Copy, Cut, Stored, native, plan
from megacore.store.io.errors import listed
from megacore.store.io.objects import place
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.accounting import summary
from megacore.store.tensor_files.dtypes import NUMBERS
from megacore.store.tensor_files.shares import Turns, read_at_once
from megacore.store.tensor_files.stream import assemble
from megacore.store.weight_folders import audit
from megacore.store.weight_folders.folder import WeightFolder

_Found = list[tuple[str, Cut | None, dict[str, int]]]
"""(tensor, which slice of it, {label: fingerprint}) of what was read."""

_JOBS = 2
_AHEAD = 2


@dataclass(frozen=True)
class _StateRead:
    """The pieces that this rank has read of one state, and the fingerprints that are known of them."""

    folder: WeightFolder
    state: str
    written: Mapping[Logical, int]
    found: _Found = field(default_factory=list)


@dataclass(frozen=True)
class _Slice:
    """A slice of a tensor, what fills it, and which of the replicas reads it."""

    stored: Stored
    copies: Sequence[Copy]
    reader: int


@dataclass(frozen=True)
class _Target:
    """A tensor that this rank and its replicas hold, and where it comes from."""

    stored: Stored
    replicas: Group
    dtype: str
    slices: Sequence[_Slice]


class Loader:
    """Reads the tensors that this rank holds; all ranks make the same calls in one order. Those that hold the same
    tensors name the same: each reads a part of them and sends it to the others. ``share``: whether they do; else each
    rank reads for itself."""

    def __init__(self, parameters: Parameters, control: Control, share: bool = True) -> None:
        self._parameters, self._control, self._share = parameters, control, share
        if share:
            for sets in of_copies(parameters.layout):
                parameters.mesh.make_groups(sets)
        self._reads: list[_StateRead] = []

    def tensors(self, folder: WeightFolder, state: str, names: Set[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor of the shape that this rank holds) of each parameter, or of those that are named, in the
        folder's dtype; padding is zero. They count as sound only after :meth:`verify`. All of them are to be taken.
        Raises StoreError: a rank cannot read its share; on every rank, after the last tensor."""

        def begin() -> tuple[_StateRead, list[_Target]]:
            read = _StateRead(folder, state, folder.fingerprints(state))
            return read, list(self._planned(read, names))

        (read, planned), errors = self._control.attempt(begin), list[Exception]()
        self._reads.append(read)
        own = [(target, part) for target in planned for part in target.slices if part.reader == target.replicas.index]
        folder.bring(state, [copy for _, part in own for copy in part.copies])
        with ThreadPoolExecutor(1) as thread:
            coming = self._ahead(thread, own, read)
            for target in planned:
                yield target.stored.name, self._received(target, coming, errors)

        def end() -> None:
            if errors:
                raise errors[0]

        self._control.attempt(end)

    def _planned(self, read: _StateRead, names: Set[str] | None) -> Iterator[_Target]:
        """Yield the tensors with who reads what: all replicas come to the same."""
        layout, mesh, turns = self._parameters.layout, self._parameters.mesh, dict[tuple[str, ...], Turns]()
        held = native(layout, [mesh.rank])
        parts = [(target, read_at_once(target)) for target in held if names is None or target.name in names]
        stored = read.folder.stored(read.state)
        planned = plan(layout.schema, stored, [part for _, of in parts for part in of])
        for target, of in parts:
            dims = copy_dims(layout.schema[target.param], layout.split) if self._share else ()
            group, made = mesh.along(*dims), list[_Slice]()
            for part, copies in itertools.islice(planned, len(of)):
                near = read.folder.near(read.state, copies)
                among = [index for index, rank in enumerate(group.ranks) if rank in near] if near else ()
                made.append(_Slice(part, copies, turns.setdefault(dims, Turns(group.size)).next(part, among)))
            dtypes = {read.folder.dtype(read.state, copy.source) for each in made for copy in each.copies}
            # Pieces of several dtypes: the widest holds all of their numbers (fp16 and bf16 are both within fp32).
            dtype = dtypes.pop() if len(dtypes) == 1 else "F64" if "F64" in dtypes else "F32"
            yield _Target(target, group, dtype, made)

    def _ahead(
        self, thread: ThreadPoolExecutor, own: Sequence[tuple[_Target, _Slice]], read: _StateRead
    ) -> Iterator[Future[Tensor]]:
        """Yield the slices that this rank reads, some of them before they are asked for."""
        under_way = deque[Future[Tensor]]()

        def take(target: _Target, part: _Slice) -> Tensor:
            taken = dict[str, int]() if read.written else None
            source = read.folder.read_for(read.state, part.copies)
            made = assemble(part.stored, part.copies, source, target.dtype, taken)
            if taken is not None:
                read.found.append((target.stored.name, target.stored.cut(part.stored), taken))
            return torch.from_numpy(made.view(f"i{made.itemsize}")).view(getattr(torch, NUMBERS[target.dtype]))

        for each in own:
            under_way.append(thread.submit(take, *each))
            if len(under_way) > _AHEAD:
                yield under_way.popleft()
        yield from under_way

    def _received(self, target: _Target, coming: Iterator[Future[Tensor]], errors: list[Exception]) -> Tensor:
        """Return a tensor, put together from what this rank and its replicas read."""
        whole = torch.empty(target.stored.shape, dtype=getattr(torch, NUMBERS[target.dtype]))
        for part in target.slices:
            found = self._sent(part, target.replicas, whole.dtype, coming, errors)
            if len(target.slices) == 1:
                return found
            for label, piece in target.stored.inside(part.stored).items():
                view(whole, piece).copy_(view(found, part.stored.pieces[label]))
        return whole

    def _sent(
        self, part: _Slice, group: Group, dtype: torch.dtype, coming: Iterator[Future[Tensor]], errors: list[Exception]
    ) -> Tensor:
        """Return a slice in host memory, from whoever reads it."""
        device, read = self._parameters.mesh.device, None
        if part.reader == group.index:
            try:
                read = next(coming).result()
            except Exception as error:  # whatever it is: the others wait for something
                errors.append(error)
        if group.size == 1 and read is not None:
            return read
        sent = torch.zeros(part.stored.shape, dtype=dtype, device=device) if read is None else read.to(device)
        broadcast_(sent.reshape(-1).view(torch.uint8), group, part.reader)
        return sent.cpu() if read is None else read

    def verify(self) -> None:
        """Compare what all ranks have read with what was written. Raises audit.DamageError: a checkpoint is damaged; it
        names the files and the tensors; StoreError: ranks have read something else than the disk holds now."""
        gathered = self._control.gather([read.found for read in self._reads])

        def compared() -> tuple[str | None, list[str]]:
            damaged, problems = None, list[str]()
            mesh = self._control.mesh.shape
            replicas = parts_of_dp(mesh, mesh.dp // self._parameters.mesh.shape.dp)  # each has read all that it holds
            for read, *of_ranks in zip(self._reads, *gathered, strict=True) if gathered else ():  # on rank 0
                found = ([of_ranks[rank] for rank in ranks] for ranks in replicas)
                if (wrong := {piece for each in found for piece in self._wrong(read, each)}) and damaged is None:
                    damaged, said = _located(read, wrong)
                    problems += said
            return damaged, problems

        damaged, problems = self._control.tell(self._control.attempt(compared))
        if damaged is not None:
            raise audit.DamageError.of(place(damaged), problems)
        if problems:
            raise StoreError("\n".join(problems))

    def _wrong(self, read: _StateRead, of_ranks: Sequence[_Found]) -> set[Logical]:
        """Return the pieces of a state that the ranks have not read as they were written."""
        if not any(of_ranks):
            return set()
        layout, mesh = self._parameters.layout, self._parameters.layout.mesh
        places = [mesh.rank(replace(mesh.place(rank), dp=0, cp=0)) for rank in range(mesh.world)]
        held = {place: {s.name: s for s in native(layout, [place])} for place in set(places)}
        boxes = (
            (held[place][name] if cut is None else held[place][name].along(*cut), of)
            for place, found in zip(places, of_ranks, strict=True)
            for name, cut, of in found
        )
        try:
            made = add_up(layout.schema, boxes)
        except ReplicasDiffer as error:
            return error.pieces
        return {piece for piece, value in made.items() if value != read.written.get(piece, value)}


def _located(read: _StateRead, wrong: set[Logical]) -> tuple[str | None, list[str]]:
    """Return (the damaged checkpoint, which of its files hold the pieces and how that shows); None if none is damaged
    now."""
    names = {name for name, _ in wrong}
    for folder in read.folder.folders:
        try:
            damage: Sequence[object] = audit.check(folder, _JOBS, tensors={read.state: names})
        except StoreError as error:  # a file that only another machine has, say
            damage = [error]
        if damage:
            return str(folder.path), listed(damage)
    pieces = ", ".join(summary(sorted(map(spell, wrong))))
    sound = ", and on the disk they now are what they were" if read.folder.folders else ""
    return None, [
        f"{read.folder.path}: ranks have read other {read.state} than were written{sound} ({pieces}): memory, a disk "
        "or a network on the way is at fault. Start again, or on other machines"
    ]


def fingerprint(base: WeightFolder, control: Control) -> int:
    """Return the fingerprint of a model's weights: one number, the same on all ranks and for equal weights wherever
    they lie. A checkpoint knows it; of a Hugging Face folder each rank reads a part, so that together they read it
    once. Raises StoreError: one of them cannot; on every rank."""
    if known := base.fingerprints("weights"):
        return combined(known)
    rank, world = control.mesh.rank, control.mesh.shape.world
    stored = list(base.stored())
    own = control.attempt(lambda: list(audit.tensor_fingerprints(stored[rank::world], base.read(), base.schema, _JOBS)))
    gathered = control.gather(own)
    # Dealt out in turn, so taken back in turn.
    pieces = [each for each in itertools.chain(*itertools.zip_longest(*gathered)) if each is not None]
    told = combined(add_up(base.schema, zip(stored, pieces, strict=True))) if rank == 0 else 0
    return int(control.tell(f"{told:x}"), 16)
