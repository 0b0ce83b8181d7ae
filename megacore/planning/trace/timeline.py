"""The logs of some ranks, played against each other in time on devices of the table: when what runs.

A host launches one thing after the other, and goes on until it waits for an event. On its stream a kernel begins after
what stands before it; a message, once all of its ranks that are there have come to it. Beside messages kernels are
slower, by what a :class:`~megacore.planning.step_time.Cluster` says that those are not hidden. No torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megacore.parallel.weights.layout import MeshShape
from megacore.places import differ_in
from megacore.planning import efficiency
from megacore.planning.costs import ALL_REDUCE, REDUCE_SCATTER, MatMul
from megacore.planning.step_time import Cluster
from megacore.planning.trace.log import HOST, Entry, Launch, NcclMessage, RecordEvent, Wait
from megacore.planning.traffic import Traffic

Kind = Literal["products", "attention", "memory", "copies", "messages"]
WIDE = ("float32", "float64")


@dataclass(frozen=True)
class Interval:
    """What runs on a stream of a rank, from a second of the step to another. ``kind``: what bounds it; ``launched``:
    when the host has launched it; ``axis``: of a message, the dimensions of the mesh that its ranks lie along."""

    launch: Launch
    kind: Kind
    start: float
    end: float
    launched: float
    axis: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Costs:
    """How long things take. ``cluster``: the devices; ``mesh``: the ranks."""

    cluster: Cluster
    mesh: MeshShape

    def kernel(self, launch: Launch) -> tuple[float, Kind]:
        """Return the seconds of what is no message, alone on its device, and what bounds it."""
        device = self.cluster.device
        if launch.crosses:
            return launch.moved / device.host, "copies"
        memory = launch.moved / (device.bandwidth * efficiency.MEMORY) + efficiency.KERNEL_S
        if launch.product is None:
            return memory, "memory"
        product, count = launch.product
        seconds = count * self._multiplied(product)
        return max(seconds, memory), "attention" if product.attention or "attention" in launch.name else "products"

    def _multiplied(self, product: MatMul) -> float:
        narrow = product.dtype.startswith("float8")
        peak = self.cluster.tflops if narrow or product.dtype in WIDE else self.cluster.wide_tflops
        return self.cluster.multiplied_s(product, peak)

    def pieces(self, launch: Launch) -> int:
        """Return the products that a launch is made of, each of the tokens of one rank, if it also sends them through
        memory that ranks map of each other; else 1."""
        return len(launch.message.parts[0][1]) if launch.message and launch.product else 1

    def product_and_message(self, launch: Launch) -> tuple[float, float, float, str]:
        """Return the seconds of a launch that multiplies and sends, those of its products and of its message alone, and
        the axis of its ranks.

        As torch does it (torch/distributed/_symmetric_memory): engines copy the tokens of a rank while those of two
        others are multiplied, on a stream each, all but the first ones that are gathered, or the last of a sum. What a
        rank sends goes through memory once more before, the parts of a sum after it.
        """
        assert launch.message is not None and launch.product is not None
        pieces, ((product, count), size) = self.pieces(launch), (launch.product, launch.message.size)
        products = count * pieces / 2 * self._multiplied(replace(product, m=2 * product.m // pieces))
        message, axis = self.message(launch.message)
        again = size * (1 + 1 / pieces) if launch.message.kind == REDUCE_SCATTER else 2 * size / pieces
        copies = again / (self.cluster.device.bandwidth * efficiency.MEMORY) + 3 * efficiency.KERNEL_S
        return max(products, message + products / pieces) + copies, products + copies, message, axis

    def message(self, message: NcclMessage) -> tuple[float, str]:
        """Return the seconds of a message, once all have come, and the axis of its ranks."""
        ranks = max((ranks for _, ranks in message.parts), key=len)
        axis = " x ".join(differ_in(self.mesh, tuple(ranks)))
        sent = Traffic(message.kind or ALL_REDUCE, axis, "", len(ranks), 1, message.size, True)
        return (self.cluster.seconds(self.mesh, [sent]) if len(ranks) > 1 else 0.0), axis

    def slower(self, message: Interval) -> float:
        """Return the share of the speed that kernels lose beside a message, which takes some of the units."""
        (_, ranks), *_ = message.launch.message.parts if message.launch.message else [("", ())]
        between = len({rank // self.cluster.device.per_node for rank in ranks}) > 1
        return 1 - (self.cluster.overlap_between if between else self.cluster.overlap)


class _Player:
    """A rank's host, which reads its log, and its streams."""

    def __init__(self, log: Sequence[Entry], costs: Costs) -> None:
        self._log, self._costs, self._next, self._host = log, costs, 0, 0.0
        self._events: dict[int, tuple[str, int]] = {}
        self._queued: dict[str, int] = {}
        self._ends: dict[str, list[float]] = {}
        self.streams: dict[str, deque[tuple[float, Launch | tuple[str, int]]]] = {}
        self.ran: list[Interval] = []
        self._messages: list[Interval] = []

    def issue(self) -> bool:
        """Have the host go on until it waits for something that is still to come -> whether it has."""
        before = self._next
        while self._next < len(self._log):
            entry = self._log[self._next]
            if isinstance(entry, RecordEvent):
                self._events[entry.event] = entry.stream, self._queued.get(entry.stream, 0)
            elif isinstance(entry, Wait):
                # An event of the step before is past.
                until = self._events.get(entry.event, (entry.stream, 0))
                if entry.stream != HOST:
                    self._queue(entry.stream, until)
                elif (end := self._end(until)) is None:
                    break
                else:
                    self._host = max(self._host, end + efficiency.LAUNCH_S)
            elif isinstance(entry, Launch) and entry.stream == HOST:
                self._host += entry.moved / self._costs.cluster.device.cpu
            elif isinstance(entry, Launch):
                self._host += efficiency.LAUNCH_S
                self._queue(entry.stream, entry)
                if (pieces := self._costs.pieces(entry)) > 1:  # a copy and a product each
                    self._host += (2 * pieces - 1) * efficiency.LAUNCH_S
            self._next += 1
        return self._next > before

    def _queue(self, stream: str, item: Launch | tuple[str, int]) -> None:
        self.streams.setdefault(stream, deque()).append((self._host, item))
        self._queued[stream] = self._queued.get(stream, 0) + 1

    def _end(self, until: tuple[str, int]) -> float | None:
        stream, count = until
        ends = self._ends.get(stream, [])
        return None if len(ends) < count else ends[count - 1] if count else 0.0

    def settle(self) -> bool:
        """Have streams go on that wait for nothing any more -> whether there were any."""
        moved = False
        for stream, items in self.streams.items():
            while items and isinstance(items[0][1], tuple) and (end := self._end(items[0][1])) is not None:
                self._done(stream, max(end, self._last(stream)))
                moved = True
        return moved

    def heads(self) -> Iterator[tuple[str, float, Launch]]:
        """Yield the streams whose next launch may begin, with when that is, and it."""
        for stream, items in self.streams.items():
            if items and isinstance(items[0][1], Launch):
                yield stream, max(items[0][0], self._last(stream)), items[0][1]

    def _last(self, stream: str) -> float:
        ends = self._ends.get(stream)
        return ends[-1] if ends else 0.0

    def _done(self, stream: str, end: float) -> None:
        self.streams[stream].popleft()
        self._ends.setdefault(stream, []).append(end)

    def run(self, stream: str, start: float) -> None:
        """Have the first launch of a stream run."""
        launched, launch = self.streams[stream][0]
        assert isinstance(launch, Launch)
        if launch.message is None:
            seconds, kind = self._costs.kernel(launch)
            interval = Interval(launch, kind, start, self._stretched(start, seconds), launched)
        elif launch.product is None:
            seconds, axis = self._costs.message(launch.message)
            interval = Interval(launch, "messages", start, start + seconds, launched, axis)
            self._messages.append(interval)
        else:
            seconds, products, sent, axis = self._costs.product_and_message(launch)
            end = self._stretched(start, seconds)
            self.ran.append(Interval(launch, "products", start, start + products, launched))
            copies = replace(launch, stream=launch.message.communicator, product=None)
            interval = Interval(copies, "messages", max(start, end - sent), end, launched, axis)
        self.ran.append(interval)
        self._done(stream, interval.end)

    def _stretched(self, start: float, seconds: float) -> float:
        """Return the end of a kernel that would take so many seconds alone."""
        self._messages = [each for each in self._messages if each.end > start]
        beside, now, left = sorted(self._messages, key=lambda each: each.end), start, seconds
        for number, message in enumerate(beside):
            speed = 1 - max(map(self._costs.slower, beside[number:]))
            if left <= (message.end - now) * speed:
                return now + left / speed
            left -= (message.end - now) * speed
            now = message.end
        return now + left

    def waits(self) -> bool:
        return self._next < len(self._log) or any(self.streams.values())


@dataclass(frozen=True)
class StepTimeline:
    """What runs when on each rank that was traced: {rank: in the order of starts}."""

    ran: Mapping[int, Sequence[Interval]]

    @cached_property
    def seconds(self) -> float:
        """The seconds of the step."""
        return max((each.end for ran in self.ran.values() for each in ran), default=0.0)


def play(logs: Mapping[int, Sequence[Entry]], costs: Costs) -> StepTimeline:
    """Play a step of some ranks; ranks that are left out come to their messages as soon as those that are there. Raises
    RuntimeError: some wait for ever."""
    players = {rank: _Player(log, costs) for rank, log in logs.items()}
    come: dict[str, dict[int, float]] = {}
    while True:
        moved = [player.issue() or player.settle() for player in players.values()]
        if any(moved):
            continue
        found = [
            (start, rank, stream)
            for rank, player in players.items()
            for stream, ready, launch in player.heads()
            for start in _starts(ready, launch, rank, players, come)
        ]
        if not found:
            break
        start, rank, stream = min(found)
        players[rank].run(stream, start)
    if stuck := [rank for rank, player in players.items() if player.waits()]:
        raise RuntimeError(f"ranks {', '.join(map(str, stuck))} of the trace wait for ever: please report the recipe")
    return StepTimeline({rank: player.ran for rank, player in players.items()})


def _starts(
    ready: float, launch: Launch, rank: int, players: Mapping[int, _Player], come: dict[str, dict[int, float]]
) -> Iterator[float]:
    """Yield when a launch begins, if that is known: a message, when the last of its ranks has come."""
    if launch.message is None:
        yield ready
        return
    for key, _ in launch.message.parts:
        come.setdefault(key, {})[rank] = ready
    there = [come[key].get(other) for key, ranks in launch.message.parts for other in ranks if other in players]
    if None not in there:
        yield max(each for each in there if each is not None)


# -- what a step is made of


def covered(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the times that some intervals cover, each once, in their order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def beside(intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that some times, each of which counts once, have in common with others; both are covered."""
    total, j = 0.0, 0
    for start, end in intervals:
        while j < len(others) and others[j][1] <= start:
            j += 1
        k = j
        while k < len(others) and others[k][0] < end:
            total += min(end, others[k][1]) - max(start, others[k][0])
            k += 1
    return total


def length(intervals: Sequence[tuple[float, float]]) -> float:
    return math.fsum(end - start for start, end in intervals)
