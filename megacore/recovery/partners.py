"""Files between the memories of machines: to a partner beside the steps, to whoever lacks them at a start."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megacore import checkpoints
from megacore.checks.capacity import free_memory
from megacore.control import Control
from megacore.store.files import open_file
from megacore.store.index import INDEX, read_index
from megacore.store.publish import spelled
from megacore.store.strict_json import StoreError, read_file
from megacore.store.tensors import free_bytes, os_errors
from parallel.mesh import Group

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


def exchange(folder: Path, own: Sequence[str], rank: int, group: Group, there: Sequence[range]) -> None:
    """Send the files that this rank has written to the rank that keeps them, and take those of others; all ranks of a
    set do so, each in a thread of its own.

    Raises:
        StoreError: a file could not be read or written, here.
        RuntimeError: the other one is gone.
    """
    problems = list[str]()
    for sender in group.ranks:
        to = keeper(sender, group.ranks, there)
        if rank == sender != to:
            problems += send(folder, own, to, group)
        elif rank == to != sender:
            problems += receive(folder, sender, group)
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


@dataclass(frozen=True)
class HeldFiles:
    """The part of a checkpoint that a machine has.

    Args:
        step: Its step.
        name: The name of its folder.
        index: A digest of its index, which tells it from others of that step.
        files: {file that is there: its bytes}.
        lacking: Those that the index names, and that are not.
    """

    step: int
    name: str
    index: str
    files: Mapping[str, int]
    lacking: Sequence[str]


def held(folder: Path) -> list[HeldFiles]:
    """Return what a folder has of checkpoints."""
    found = list[HeldFiles]()
    for step, path in checkpoints.complete(folder).items():
        with suppress(StoreError, OSError):
            records = read_index(path / INDEX).files
            there = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
            lacking = [name for name, record in records.items() if there.get(name) != record.size]
            digest = hashlib.sha256(read_file(path / INDEX, path)).hexdigest()[:_SHORT]
            found.append(
                HeldFiles(step, path.name, digest, {name: there[name] for name in there.keys() - {*lacking}}, lacking)
            )
    return found


def whole(told: Sequence[Sequence[HeldFiles]]) -> list[tuple[int, str]]:
    """Return (step, index) of the checkpoints of which the machines have all files between them, the newest first."""
    found = []
    for step, index in sorted({(each.step, each.index) for of in told for each in of}, reverse=True):
        alike = [each for of in told for each in of if (each.step, each.index) == (step, index)]
        there = {name for each in alike for name in each.files}
        if all(there.issuperset(each.lacking) for each in alike):
            found.append((step, index))
    return found


def bring(
    path: Path, index: str, held: Sequence[Sequence[HeldFiles]], there: Sequence[range], control: Control
) -> None:
    """Bring to each machine the files of a checkpoint that it lacks, from one that has them; all ranks call this.

    Args:
        path: Its folder on this machine.
        index: The digest of its index, as of :func:`whole`.
        held: The parts of checkpoints that each machine has.
        there: The ranks of each.
        control: The messages between the ranks.

    Raises:
        StoreError: a machine has no room, say; on all ranks.
    """
    alike = [[each for each in of if (each.name, each.index) == (path.name, index)] for of in held]
    sizes = {name: size for of in alike for each in of for name, size in each.files.items()}
    names = [{name for each in of for name in each.files} for of in alike]
    moves = dict[tuple[int, int], list[str]]()
    for number, name in enumerate(sorted(sizes, key=lambda name: (name == INDEX, name))):
        having = [machine for machine, files in enumerate(names) if name in files]
        for machine in range(len(there)):
            if machine not in having:
                moves.setdefault((having[number % len(having)], machine), []).append(name)
    if not moves:
        return
    first, rank = [ranks[0] for ranks in there], control.mesh.rank
    group = control.mesh.host_group([tuple(first)])

    def make_room() -> None:
        if rank not in first:
            return
        lacking = sizes.keys() - names[first.index(rank)]
        needed, free = sum(sizes[name] for name in lacking), free_memory()
        if needed > (room := min(free_bytes(path.parent), needed if free is None else free)):
            raise StoreError(f"{path}: needs {spelled(needed)}, and {spelled(max(0, room))} of memory are to spare")
        if INDEX in lacking:
            with os_errors(path):
                shutil.rmtree(path, ignore_errors=True)  # another one of this step
                path.mkdir(0o700)

    control.attempt(make_room)
    problems = list[str]()
    # In one order everywhere: whoever sends is waited for. The index goes last, and makes a checkpoint of the folder.
    for (source, target), files in sorted(moves.items(), key=lambda move: (INDEX in move[1], move[0])):
        if rank == first[source]:
            problems += send(path, files, first[target], group)
        elif rank == first[target]:
            problems += receive(path, first[source], group)

    def end() -> None:
        if problems:
            raise StoreError("\n".join(problems))

    control.attempt(end)
