"""The logs of all ranks of a run, played against each other: who would wait for ever.

Nothing has a duration. A kernel runs when what stands before it on its stream is done, a message when all of its ranks
have come so far. Three models of a device, as nobody promises one of them:

- ``free``: kernels of different streams run beside each other;
- ``serial``: messages of one GPU run one after the other, as they were launched;
- ``queue``: there is one queue in the hardware (``CUDA_DEVICE_MAX_CONNECTIONS=1``): what cannot begin holds up all that
  was launched after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from megacore.planning.trace.log import HOST, Entry, Launch, NcclMessage, RecordEvent, StepStart, Wait

Model = Literal["free", "serial", "queue"]
MODELS: Sequence[Model] = get_args(Model)


@dataclass(frozen=True)
class _Item:
    """What stands in a stream: a launch, or a wait until so much is done on another."""

    number: int
    launch: Launch | None = None
    until: tuple[str, int] = ("", 0)


class _Rank:
    """A host that reads its log, and a device that does what it has been told."""

    def __init__(self, log: Sequence[Entry], model: Model) -> None:
        self._log = [each for each in log if isinstance(each, Launch | RecordEvent | Wait)]
        self._next = 0
        self._model = model
        self._queued: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._streams: dict[str, deque[_Item]] = {}
        self._events: dict[int, tuple[str, int]] = {}
        self._in_turn: deque[int] = deque()
        self._begun: set[int] = set()

    def issue(self) -> bool:
        """Have the host go on until it waits -> whether it has."""
        before = self._next
        while self._next < len(self._log):
            entry = self._log[self._next]
            if isinstance(entry, RecordEvent):
                self._events[entry.event] = entry.stream, self._queued.get(entry.stream, 0)
            elif isinstance(entry, Wait) and entry.stream == HOST:
                if not self._is_done(self._events.get(entry.event, ("", 0))):
                    break
            elif isinstance(entry, Wait):
                self._queue(entry.stream, _Item(self._next, until=self._events.get(entry.event, ("", 0))))
            elif entry.stream != HOST:
                self._queue(entry.stream, _Item(self._next, entry))
            self._next += 1
        return self._next > before

    def _queue(self, stream: str, item: _Item) -> None:
        self._queued[stream] = self._queued.get(stream, 0) + 1
        self._streams.setdefault(stream, deque()).append(item)
        if self._model == "queue" or (self._model == "serial" and item.launch and item.launch.message):
            self._in_turn.append(item.number)

    def _is_done(self, until: tuple[str, int]) -> bool:
        stream, count = until
        return self._done.get(stream, 0) >= count

    def advance(self, rank: int, come: _Come) -> bool:
        """Have the device do what it can -> whether there was anything."""
        moved, more = False, True
        while more:
            more = False
            for stream, items in self._streams.items():
                while items and self._step(rank, stream, items, come):
                    more = moved = True
        return moved

    def _step(self, rank: int, stream: str, items: deque[_Item], come: _Come) -> bool:
        """Do what stands first in a stream -> whether anything has changed."""
        item, message = items[0], items[0].launch.message if items[0].launch else None
        takes_its_turn = self._model == "queue" or (self._model == "serial" and message is not None)
        if takes_its_turn and item.number not in self._begun and self._in_turn[0] != item.number:
            return False
        if item.launch is None and not self._is_done(item.until):
            return False
        changed = False
        if message is not None:
            changed = come.at(rank, message)
            if self._model == "queue" and item.number not in self._begun:  # it has begun, and those behind it may
                self._begun.add(self._in_turn.popleft())
                changed = True
            if not come.all_there(message):
                return changed
        items.popleft()
        self._done[stream] = self._done.get(stream, 0) + 1
        if takes_its_turn and item.number not in self._begun:
            self._in_turn.popleft()
        return True

    def stuck(self, come: _Come) -> list[str]:
        """What does not end."""
        found = []
        for stream, items in self._streams.items():
            launch = items[0].launch if items else None
            if launch is not None and launch.message is not None:
                found.append(f"{launch.name} of {launch.place} on {stream}, {come.missing(launch.message)}")
        if self._next < len(self._log):
            found.append("the host waits")
        return found if found or not any(self._streams.values()) else ["streams wait for each other"]


class _Come:
    """Which ranks, of those that are present, have come to which messages."""

    def __init__(self, present: Collection[int]) -> None:
        self._present, self._there = present, dict[str, dict[int, str]]()

    def at(self, rank: int, message: NcclMessage) -> bool:
        """A rank has come to a message -> whether that is new."""
        new = False
        for key, _ in message.parts:
            there = self._there.setdefault(key, {})
            new |= rank not in there
            there[rank] = message.what
        return new

    def all_there(self, message: NcclMessage) -> bool:
        parts = message.parts
        return all(not self._away(key, ranks) and len({*self._there[key].values()}) == 1 for key, ranks in parts)

    def missing(self, message: NcclMessage) -> str:
        said = []
        for key, ranks in message.parts:
            there = self._there.get(key, {})
            if away := self._away(key, ranks):
                said.append(f"{key} has no rank {', '.join(map(str, away))}")
            elif len({*there.values()}) > 1:
                said.append(f"{key} has different messages: {there}")
        return "; ".join(said) or "behind others"

    def _away(self, key: str, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank in self._present and rank not in self._there.get(key, {})]


def stuck(logs: Mapping[int, Sequence[Entry]], model: Model) -> list[str]:
    """Return what never ends of a run.

    Args:
        logs: {rank: its log}. Ranks that are left out come to their messages as soon as those that are there.
        model: That of the devices.
    """
    ranks, come = {number: _Rank(log, model) for number, log in logs.items()}, _Come(logs.keys())
    moved = True
    while moved:
        moved = False
        for number, rank in ranks.items():
            moved |= rank.issue()
            moved |= rank.advance(number, come)
    return [f"rank {number}: {said}" for number, rank in ranks.items() for said in rank.stuck(come)]


# -- seeded faults


@dataclass(frozen=True)
class Swap:
    """Two messages of different communicators that one rank launches one after the other, launched the other way
    round.

    Args:
        first, second: Numbers of their launches in the log.
    """

    first: int
    second: int


def swaps(log: Sequence[Entry]) -> list[Swap]:
    """Return all that there are in the last step of a log."""
    start = max((number for number, entry in enumerate(log) if isinstance(entry, StepStart)), default=0)
    messages = [n for n, entry in enumerate(log) if n >= start and isinstance(entry, Launch) and entry.message]
    return [Swap(a, b) for a, b in pairwise(messages) if _communicator(log[a]) != _communicator(log[b])]


def _communicator(entry: Entry) -> str:
    assert isinstance(entry, Launch) and entry.message is not None
    return entry.message.communicator


def swapped(log: Sequence[Entry], swap: Swap) -> list[Entry]:
    """Return the log with the second message, and what its stream waits for, before the first."""
    (a, _), (b, c) = _block(log, swap.first), _block(log, swap.second)
    return [*log[:a], *log[b:c], *log[a:b], *log[c:]]


def _block(log: Sequence[Entry], launch: int) -> tuple[int, int]:
    """Where a message begins, with the wait of its stream for its caller's, and ends, with its event."""
    entry = log[launch]
    assert isinstance(entry, Launch)
    if entry.work is None:
        return launch, launch + 1
    start = launch
    while not isinstance(log[start], RecordEvent):
        start -= 1
    return start, launch + 2


def has_circle(logs: Mapping[int, Sequence[Entry]]) -> bool:
    """Whether no order of all messages agrees with that of each rank: then ranks that have one message after the other
    wait for ever. Where there is an order, messages alone make nobody wait."""
    after: dict[str, set[str]] = {}
    for log in logs.values():
        messages = [entry.message for entry in log if isinstance(entry, Launch) and entry.message]
        for one, other in pairwise(messages):
            for key, _ in one.parts:
                after.setdefault(key, set()).update(each for each, _ in other.parts)
    ends = {each for keys in after.values() for each in keys}
    waiting = dict.fromkeys([*after, *ends], 0)
    for keys in after.values():
        for each in keys:
            waiting[each] += 1
    free, gone = [key for key, count in waiting.items() if not count], 0
    while free:
        gone += 1
        for each in after.get(free.pop(), ()):
            waiting[each] -= 1
            if not waiting[each]:
                free.append(each)
    return gone < len(waiting)
