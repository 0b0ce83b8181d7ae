"""Files between the memories of machines: to a partner beside the steps, to whoever lacks what it reads at a start."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megacore import checkpoints
from megacore.control import Control
from megacore.parallel.mesh import Group
from megacore.parallel.weights.transfer import Copy, Stored
from megacore.resources import free_memory
from megacore.store.io.files import open_file
from megacore.store.io.strict_json import StoreError, read_file
from megacore.store.tensor_files.publish import spelled
from megacore.store.tensor_files.tensors import TensorFile, free_bytes, os_errors
from megacore.store.weight_folders.audit import DamageError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.index import INDEX, FileRecord, read_index

_CHUNK = 16 << 20
_SHORT = 16
"""Characters that tell one index from another of the same step."""


def machines(world: int, node: int) -> list[range]:
    """Return the ranks of each machine, of which ``node`` successive ones share one."""
    return [range(first, min(first + node, world)) for first in range(0, world, node)]


def partners(there: Sequence[range]) -> list[tuple[int, ...]]:
    """Return sets of ranks that keep each other's files: those of the same number on two machines, or on the last three
    of an odd number; where one has fewer ranks, some of its have more to keep."""
    found = list[tuple[int, ...]]()
    while there:
        together, there = (there, ()) if len(there) <= 3 else (there[:2], there[2:])
        width = min(map(len, together))
        found += [tuple(rank for ranks in together for rank in ranks[k::width]) for k in range(width)]
    return found


def keeper(rank: int, group: Sequence[int], there: Sequence[range]) -> int:
    """Return the rank of a set that keeps the files of another one of it: the first on the next machine."""
    of = {each: next(number for number, ranks in enumerate(there) if each in ranks) for each in group}
    numbers = sorted({*of.values()})
    following = numbers[(numbers.index(of[rank]) + 1) % len(numbers)]
    return next(each for each in group if of[each] == following)


def exchange(folder: Path, own: Sequence[str], group: Group, there: Sequence[range]) -> None:
    """Send the files that this rank has written to the rank that keeps them, and take those of others; all ranks of a
    set do so, each in a thread of its own. Raises StoreError: a file could not be read or written, here; RuntimeError:
    the other one is gone."""
    problems, rank = list[str](), group.ranks[group.index]
    for sender in group.ranks:
        to = keeper(sender, group.ranks, there)
        if rank == sender != to:
            problems += send(folder, own, to, group)
        elif rank == to != sender:
            problems += receive(folder, sender, group)
    _tell(problems)


def _tell(problems: Sequence[str]) -> None:
    if problems:
        raise StoreError("\n".join(problems))


def send(folder: Path, names: Sequence[str], to: int, group: Group) -> list[str]:
    """Send files of a folder -> what went wrong with them here; the other one does not keep those."""
    problems, sizes = list[str](), dict[str, int]()
    for name in names:
        with suppress(OSError):
            sizes[name] = (folder / name).stat().st_size
    head = torch.frombuffer(bytearray(json.dumps(sizes).encode()), dtype=torch.uint8)
    dist.send(torch.tensor(len(head)), to, group=group.process_group)
    dist.send(head, to, group=group.process_group)
    buffer = torch.zeros(_CHUNK, dtype=torch.uint8)
    for name, size in sizes.items():
        left = size
        try:
            with os_errors(folder / name), open_file(folder / name, folder) as file:
                for part in _parts(buffer, size):
                    if file.readinto(part.numpy()) < len(part):  # type: ignore[arg-type]  # a numpy array is a buffer
                        raise StoreError(f"{folder / name}: has fewer than its {size} bytes")
                    dist.send(part, to, group=group.process_group)
                    left -= len(part)
        except StoreError as error:
            problems.append(str(error))
            for part in _parts(buffer, left):
                dist.send(part, to, group=group.process_group)
        dist.send(torch.tensor(left), to, group=group.process_group)
    return problems


def receive(folder: Path, sender: int, group: Group) -> list[str]:
    """Take the files that another rank sends -> what went wrong with them here; each gets its name when it is whole."""
    problems, length = list[str](), torch.tensor(0)
    dist.recv(length, sender, group=group.process_group)
    head, buffer = torch.empty(int(length), dtype=torch.uint8), torch.empty(_CHUNK, dtype=torch.uint8)
    dist.recv(head, sender, group=group.process_group)
    for name, size in json.loads(head.numpy().tobytes()).items():
        path, left = folder / name, size
        new = path.with_name(f".{path.name}.new")
        try:
            with os_errors(path, size):
                path.parent.mkdir(0o700, parents=True, exist_ok=True)
                new.unlink(missing_ok=True)
                with open(new, "xb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(1, size))
                    file.truncate(size)
                    for part in _parts(buffer, size):
                        dist.recv(part, sender, group=group.process_group)
                        left -= len(part)
                        file.write(part.numpy())  # type: ignore[arg-type]  # a numpy array is a buffer
        except StoreError as error:
            problems.append(str(error))
            for part in _parts(buffer, left):
                dist.recv(part, sender, group=group.process_group)
        dist.recv(length, sender, group=group.process_group)
        with suppress(OSError):
            if length or problems:
                new.unlink()
            else:
                new.replace(path)
    return problems


def _parts(buffer: Tensor, size: int) -> Iterator[Tensor]:
    """Yield what of a buffer each message of so many bytes takes."""
    for at in range(0, size, len(buffer)):
        yield buffer[: size - at]


# -- at a start


TensorTypes = tuple[int, str, Mapping[str, str]]
"""The bytes of a tensor file, the dtype of its tensors, and {tensor: dtype} of those that have another one."""


@dataclass(frozen=True)
class HeldFiles:
    """The part of a checkpoint that a machine has: a digest of its index, which tells it from others of that step,
    {tensor file that is there, and whose header is whole: what is in it}, {other file: its bytes}, and the tensor files
    that it lacks of those that the index names."""

    step: int
    index: str
    tensors: Mapping[str, TensorTypes]
    others: Mapping[str, int]
    lacking: Sequence[str]


def held(folder: Path) -> list[HeldFiles]:
    """Return what a folder has of checkpoints."""
    found = list[HeldFiles]()
    for step, path in checkpoints.complete(folder).items():
        with suppress(StoreError, OSError):
            records = read_index(path / INDEX).files
            there = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
            types = {name: of for name, record in records.items() if (of := _types(path, name, record))}
            others = {name: size for name, size in there.items() if name not in records}
            digest = hashlib.sha256(read_file(path / INDEX, path)).hexdigest()[:_SHORT]
            found.append(HeldFiles(step, digest, types, others, sorted(records.keys() - types)))
    return found


def _types(folder: Path, name: str, record: FileRecord) -> TensorTypes | None:
    """Return what is in a tensor file; None where it is not there, or not as it was written."""
    try:
        file = TensorFile.open(folder / name, folder)
    except StoreError:
        return None
    if file.size != record.size or file.entries.keys() != record.fingerprints.keys():
        return None
    types = {tensor: entry.dtype for tensor, entry in file.entries.items()}
    most = Counter(types.values()).most_common(1)[0][0]
    return file.size, most, {tensor: dtype for tensor, dtype in types.items() if dtype != most}


def whole(told: Sequence[Sequence[HeldFiles]]) -> list[tuple[int, list[HeldFiles | None]]]:
    """Return (step, what each machine has of it) of the checkpoints of which the machines have all files between them,
    the newest first."""
    found = []
    for step, index in sorted({(each.step, each.index) for of in told for each in of}, reverse=True):
        alike = [next((each for each in of if (each.step, each.index) == (step, index)), None) for of in told]
        there = {name for each in alike if each for name in each.tensors}
        if all(there.issuperset(each.lacking) for each in alike if each):
            found.append((step, alike))
    return found


class Machines:
    """The machines of a run, of ``node`` successive ranks each, and each with files of its own, which the first rank of
    one sends to that of another."""

    def __init__(self, control: Control, node: int) -> None:
        self.control = control
        self.ranks = machines(control.mesh.shape.world, node)
        self.here = control.mesh.rank // node

    @cached_property
    def _group(self) -> Group:
        return self.control.mesh.host_group([tuple(ranks[0] for ranks in self.ranks)])

    def bring(self, folder: Path, there: Sequence[Mapping[str, int]], wanted: Sequence[Collection[str]]) -> None:
        """Bring to each machine the files that it lacks, from one that has them: {file: bytes} of those that are there.
        All ranks call this. Raises StoreError: a machine has no room, say; on all ranks."""
        moves, sizes = dict[tuple[int, int], list[str]](), {name: of[name] for of in there for name in of}
        for number, name in enumerate(sorted(sizes)):
            having = [machine for machine, files in enumerate(there) if name in files]
            for machine, names in enumerate(wanted):
                if name in names and machine not in having:
                    moves.setdefault((having[number % len(having)], machine), []).append(name)
        if not moves:
            return
        first, rank, group = [ranks[0] for ranks in self.ranks], self.control.mesh.rank, self._group

        def make_room() -> None:
            coming = [name for (_, target), names in moves.items() if first[target] == rank for name in names]
            needed, free = sum(sizes[name] for name in coming), free_memory()
            if needed and needed > (room := min(free_bytes(folder.parent), needed if free is None else free)):
                raise StoreError(
                    f"{folder}: needs {spelled(needed)}, and {spelled(max(0, room))} of memory are to spare"
                )
            if coming:
                with os_errors(folder):
                    folder.mkdir(0o700, exist_ok=True)

        self.control.attempt(make_room)
        problems = list[str]()
        for (source, target), names in sorted(moves.items()):  # in one order everywhere: whoever sends is waited for
            if rank == first[source]:
                problems += send(folder, names, first[target], group)
            elif rank == first[target]:
                problems += receive(folder, first[source], group)

        self.control.attempt(partial(_tell, problems))


@dataclass(frozen=True)
class SpreadCheckpoint(Checkpoint):
    """A checkpoint of which each machine has some of the files: ``held``, {tensor file: what is in it} of each. A slice
    is read where it lies; a file that lies on none of the machines that are to read it is brought to them."""

    held: Sequence[Mapping[str, TensorTypes]]
    machines: Machines

    @cached_property
    def _types(self) -> Mapping[str, TensorTypes]:
        return {name: types for of in self.held for name, types in of.items()}

    def dtype(self, state: str, stored: Stored) -> str:
        file, name = self.location(state, stored)
        _, dtype, others = self._types[file]
        return others.get(name, dtype)

    def near(self, state: str, copies: Sequence[Copy]) -> Set[int]:
        wanted = self._files(state, copies)
        having = [ranks for ranks, files in zip(self.machines.ranks, self.held, strict=True) if wanted <= files.keys()]
        return {rank for ranks in having for rank in ranks}

    def bring(self, state: str, copies: Sequence[Copy]) -> None:
        lacking = self._files(state, copies) - self.held[self.machines.here].keys()
        told = self.machines.control.exchange(sorted(lacking))
        wanted = [{name for rank in ranks for name in told[rank]} for ranks in self.machines.ranks]
        there = [{name: size for name, (size, *_) in of.items()} for of in self.held]
        try:
            self.machines.bring(self.path, there, wanted)
        except StoreError as error:  # on all ranks
            raise DamageError.of(self.path, [error]) from error

    def _files(self, state: str, copies: Sequence[Copy]) -> set[str]:
        return {self.location(state, copy.source)[0] for copy in copies}
