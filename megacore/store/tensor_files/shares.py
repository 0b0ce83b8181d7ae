"""The shares that ranks write: the states of a place are cut into equal ones, one for each replica that holds them.

The tensors of all states are laid end to end and cut at equal distances. Few of them are cut, as many as there are
shares at the most, each along one axis that all of its pieces have: a slice is a tensor as others, with a smaller box.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from megacore.parallel.weights.layout import Layout
from megacore.parallel.weights.transfer import Stored

SHARE_BYTES = 64 << 20
"""The least that is worth a writer of its own."""
SLICE = 16 << 20
"""Elements that are read, and sent to others, at once."""
MOST_FILES = 4096
"""The files of a checkpoint, more or less: file systems of clusters are slow to make many."""

# A share may be larger or smaller by so small a part of it for the sake of whole tensors.
_FINE = 64
# Elements: words of 64 bits, of which fingerprints are taken, stay whole whatever the dtype.
_ALIGNED = 8

States = Mapping[str, Sequence[tuple[Stored, int]]]
"""{state: (tensor, bytes of an element) of each tensor} of a place."""


@dataclass(frozen=True)
class FileContents:
    """The contents of a file. ``number``: its number among the files of that state and place; None for the only one."""

    state: str
    number: int | None
    tensors: Sequence[Stored]


def share_out(layout: Layout, states: States, replicas: int) -> list[list[FileContents]]:
    """Return the files that each replica of a place writes. Where there are fewer shares than replicas, those that
    write are far from each other, on different machines."""
    sizes = {state: sum(map(_bytes, tensors)) for state, tensors in states.items()}
    most = MOST_FILES // layout.mesh.world - len(sizes)
    shares = min(replicas, sum(sizes.values()) // SHARE_BYTES, most)
    contents = divide(states, shares, _in_several_stages(layout)) if shares > 1 else _whole(states, sizes, replicas)
    written: list[list[FileContents]] = [[] for _ in range(replicas)]
    for number, share in enumerate(_numbered(contents)):
        written[number * replicas // len(contents)] += share
    return written


def divide(states: States, shares: int, whole: Set[str] = frozenset()) -> list[dict[str, list[Stored]]]:
    """Return {state: its tensors and slices} of each share. ``whole``: parameters that are not cut."""
    total, at = sum(_bytes(each) for tensors in states.values() for each in tensors), 0
    divided: list[dict[str, list[Stored]]] = [{} for _ in range(shares)]
    for state, tensors in states.items():
        for stored, itemsize in tensors:
            # In units of which a share has ``total``: all of it is exact.
            begin, at = at * shares, at + _bytes((stored, itemsize))
            axis = None if stored.param in whole else _axis(stored, (at * shares - begin) / total)
            for share, part in _slices(stored, axis, begin, at * shares, total):
                divided[share].setdefault(state, []).append(part)
    return divided


def share_reads(targets: Iterable[Stored], replicas: int) -> Iterator[tuple[Stored, list[tuple[Stored, int]]]]:
    """Yield (tensor, [(slice of it, which of the replicas reads it)]) of each tensor that they hold."""
    turns = Turns(replicas)
    for target in targets:
        yield target, [(part, turns.next(part)) for part in read_at_once(target)]


def read_at_once(target: Stored) -> list[Stored]:
    """Return the slices of a tensor that are read, and sent to others, at once."""
    count = -(-math.prod(target.shape) // SLICE)
    return [part for _, part in _slices(target, _axis(target, count), 0, count, 1)]


class Turns:
    """The turns that replicas take, so that all read at once: each slice goes to the one that has least so far."""

    def __init__(self, replicas: int) -> None:
        self._load = [0] * replicas

    def next(self, part: Stored, among: Sequence[int] = ()) -> int:
        """Return which of the replicas reads a slice. ``among``: those that may; all, where there are none."""
        reader = min(among or range(len(self._load)), key=self._load.__getitem__)
        self._load[reader] += math.prod(part.shape)
        return reader


def _slices(stored: Stored, axis: str | None, begin: int, end: int, size: int) -> Iterator[tuple[int, Stored]]:
    """Yield (share, what it has) of a tensor that lies from ``begin`` to ``end``, where shares are ``size`` long."""
    if axis is None:
        yield (begin + end) // (2 * size), stored
        return
    first, stop = stored.box[axis]
    share, start, extent = begin // size, first, stop - first
    unit = _ALIGNED if extent >= _ALIGNED * _FINE else 1
    for boundary in range(share + 1, -(-end // size)):
        at = first + round((boundary * size - begin) * extent / ((end - begin) * unit)) * unit
        if at >= stop:
            break
        if at > start:
            yield share, stored.along(axis, start, at)
        share, start = boundary, at
    yield share, stored.along(axis, start, stop)


def _axis(stored: Stored, shares: float) -> str | None:
    """Return the axis along which a tensor of so many shares is cut: the outermost axis that is fine enough, else the
    longest. None where it is small, or its pieces have none in common."""
    if shares * _FINE < 1:
        return None
    first, *others = stored.pieces.values()
    outermost = sorted(zip(first.strides, first.axes, strict=True), reverse=True)
    common = [axis for _, axis in outermost if all(axis in other.axes for other in others)]
    fine = [axis for axis in common if stored.sizes[axis] >= shares * _FINE]
    return fine[0] if fine else max(common, key=lambda axis: stored.sizes[axis], default=None)


def _in_several_stages(layout: Layout) -> frozenset[str]:
    """Return parameters held in several stages: replicas must hold equal boxes, and stages would cut at different
    places."""
    params = layout.schema.params
    return frozenset(
        param.name
        for param in params
        if ("layer" not in param.named_axes or param.also)
        and any(len(layout.stages(param, index)) > 1 for index in layout.schema.indices(param, param.name))
    )


def _whole(states: States, sizes: Mapping[str, int], replicas: int) -> list[dict[str, list[Stored]]]:
    """Share out whole states: the largest first, each to the share that has least so far."""
    shares: list[dict[str, list[Stored]]] = [{} for _ in range(min(replicas, len(sizes)))]
    load = [0] * len(shares)
    for state in sorted(sizes, key=lambda state: -sizes[state]):
        least = load.index(min(load))
        shares[least][state] = [stored for stored, _ in states[state]]
        load[least] += sizes[state]
    return shares


def _numbered(shares: Sequence[Mapping[str, Sequence[Stored]]]) -> Iterator[list[FileContents]]:
    count = {state: sum(state in share for share in shares) for share in shares for state in share}
    next_one = dict.fromkeys(count, 0)
    for share in shares:
        parts = []
        for state, tensors in share.items():
            parts.append(FileContents(state, next_one[state] if count[state] > 1 else None, tensors))
            next_one[state] += 1
        yield parts


def _bytes(tensor: tuple[Stored, int]) -> int:
    stored, itemsize = tensor
    return math.prod(stored.shape) * itemsize
