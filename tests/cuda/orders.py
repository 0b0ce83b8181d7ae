"""What a rank asks of its GPU, as data, and what is not ordered in it: races, and memory that is let go too early.

A log says what the host does, one thing after the other: it launches on streams, has one wait for an event of another,
takes memory and lets it go. The device follows as it likes, as far as events allow. Each stream, and the host, has a
vector clock: how far it knows the others to be. What two of them do with the same memory, at least one of them writing,
must be known to the later one. No torch here, and no numbers.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ordered_gpu import Allocate, Entry, Free, MemoryLaunch, MemorySpan, RecordStream

from megacore.planning.trace.log import HOST, RecordEvent, StepStart, Wait

Clock = dict[str, int]


@dataclass
class _Use:
    at: int
    launch: MemoryLaunch


@dataclass
class _Memory:
    owner: str
    born: int
    written: dict[tuple[int, int], _Use] = field(default_factory=dict)
    read: dict[tuple[int, int, str], _Use] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)


class Clocks:
    """How far each stream knows the others to be, after some entries."""

    def __init__(self) -> None:
        self.at: Clock = {}
        self._known: dict[str, Clock] = {}
        self._events: dict[int, Clock] = {}

    def knows(self, stream: str, other: str, at: int) -> bool:
        return stream == other or self._known.get(stream, {}).get(other, 0) >= at

    def behind(self, stream: str, clock: Mapping[str, int]) -> bool:
        """Whether a stream does not know all that a clock does."""
        return any(not self.knows(stream, other, at) for other, at in clock.items())

    def of(self, stream: str) -> Clock:
        return {**self._known.get(stream, {}), stream: self.at.get(stream, 0)}

    def event(self, event: int) -> Clock:
        """Return what who waits for an event knows then; nothing where it has never been recorded."""
        return self._events.get(event, {})

    def launch(self, stream: str) -> int:
        """A stream has one thing more to do, and begins after all that the host has done -> which one it is."""
        if stream != HOST:
            self._learn(stream, self.of(HOST))
        self.at[stream] = self.at.get(stream, 0) + 1
        return self.at[stream]

    def record(self, event: int, stream: str) -> None:
        self._events[event] = self.of(stream)

    def wait(self, stream: str, event: int) -> None:
        self._learn(stream, self.event(event))

    def _learn(self, stream: str, clock: Mapping[str, int]) -> None:
        known = self._known.setdefault(stream, {})
        for other, at in clock.items():
            if at > known.get(other, 0):
                known[other] = at


class Run:
    """A log gone through, entry by entry.

    Args:
        log: The entries.
        without: Numbers of those that are left out.

    Attributes:
        found: What is not ordered, in words, each once.
        covers: {number of a wait that is left out: the number of the first entry after which its stream knows what it
            would have known, or None}; its own where the stream knew all of that.
    """

    def __init__(self, log: Sequence[Entry], without: Container[int] = ()) -> None:
        self.found: dict[str, None] = {}
        self.covers: dict[int, int | None] = {}
        self._clocks, self._memories = Clocks(), dict[int, _Memory]()
        self._missing: dict[int, tuple[str, Clock]] = {}
        self._unwaited = {each.event for i, each in enumerate(log) if isinstance(each, Wait) and i in without}
        for number, entry in enumerate(log):
            if number in without:
                if isinstance(entry, Wait):
                    self.covers[number] = None
                    self._missing[number] = entry.stream, self._clocks.event(entry.event)
            else:
                self._enter(entry)
            if self._missing:
                self._covered(number)

    def _covered(self, number: int) -> None:
        for left_out, (stream, clock) in list(self._missing.items()):
            if not self._clocks.behind(stream, clock):
                self.covers[left_out] = number
                del self._missing[left_out]

    def _enter(self, entry: Entry) -> None:
        match entry:
            case MemoryLaunch():
                self._launch(entry)
            case RecordEvent():
                self._clocks.record(entry.event, entry.stream)
            case Wait():
                self._clocks.wait(entry.stream, entry.event)
            case Allocate():
                born = self._clocks.at.get(entry.stream, 0)
                self._memories[entry.memory] = _Memory(entry.stream, born)
            case RecordStream():
                self._memories[entry.memory].kept.add(entry.stream)
            case Free():
                self._free(self._memories.pop(entry.memory))

    def _launch(self, launch: MemoryLaunch) -> None:
        at = self._clocks.launch(launch.stream)
        for span in dict.fromkeys((*launch.reads, *launch.writes)):
            memory, (_, start, stop) = self._memories[span.memory], span
            self._is_ordered(memory, launch, span)
            if span in launch.writes:  # what comes is compared with this alone
                memory.written = {key: use for key, use in memory.written.items() if not _within(key, span)}
                memory.read = {key: use for key, use in memory.read.items() if not _within(key, span)}
                memory.written[start, stop] = _Use(at, launch)
            else:
                memory.read[start, stop, launch.stream] = _Use(at, launch)

    def _is_ordered(self, memory: _Memory, launch: MemoryLaunch, span: MemorySpan) -> None:
        def unknown(uses: Mapping[Any, _Use]) -> Iterator[MemoryLaunch]:
            for (start, stop, *_), use in uses.items():
                overlaps = start < span.stop and span.start < stop
                if overlaps and not self._clocks.knows(launch.stream, use.launch.stream, use.at):
                    yield use.launch

        who, how = f"{launch.name} of {launch.place} on {launch.stream}", "reads"
        if not self._clocks.knows(launch.stream, memory.owner, memory.born):
            self._say(f"{who} uses memory that {memory.owner} has been given, before what used it there has ended")
        if span in launch.writes:
            how = "writes"
            for other in unknown(memory.read):
                self._say(f"{who} writes what {other.name} of {other.place} reads on {other.stream}, in no order")
        for other in unknown(memory.written):
            self._say(f"{who} {how} what {other.name} of {other.place} writes on {other.stream}, in no order")

    def _free(self, memory: _Memory) -> None:
        if memory.owner == HOST:
            return  # pinned memory is not given out before the copies are made
        for use in (*memory.written.values(), *memory.read.values()):
            stream, launch = use.launch.stream, use.launch
            held = stream in memory.kept or (launch.work is not None and launch.work in self._unwaited)
            known = any(self._clocks.knows(each, stream, use.at) for each in (memory.owner, HOST))
            if not held and not known:
                who = f"{launch.name} of {launch.place}"
                self._say(f"memory of {memory.owner} is free again while {who} may use it on {stream}")

    def _say(self, text: str) -> None:
        self.found[text] = None


def _within(key: Sequence[Any], span: MemorySpan) -> bool:
    return bool(span.start <= key[0] and key[1] <= span.stop)


def findings(log: Sequence[Entry], without: Container[int] = ()) -> list[str]:
    """Return what is not ordered in a log."""
    return list(Run(log, without).found)


# -- what is left out


BEFORE = "waits before it"


@dataclass(frozen=True)
class LeftOut:
    """A wait, an event or a ``record_stream`` that is left out of a log. ``entry``: the entry; ``caught``: what is not
    ordered then; ``covers``: who orders it after all, where that is nothing: the places of later waits, :data:`BEFORE`
    where those before tell as much, "nobody" where the log ends."""

    entry: Wait | RecordEvent | RecordStream
    caught: Sequence[str]
    covers: frozenset[str]


def left_out(log: Sequence[Entry], step: int) -> Iterator[LeftOut]:
    """Yield what comes of leaving out, one at a time, each that may be left out in a step, the first being 1."""
    starts = [number for number, entry in enumerate(log) if isinstance(entry, StepStart)]
    stop = starts[step] if step < len(starts) else len(log)
    for number in range(starts[step - 1], stop):
        entry = log[number]
        if isinstance(entry, Wait | RecordEvent | RecordStream) and entry.place:
            run = Run(log, {number})
            yield LeftOut(entry, list(run.found), frozenset() if run.found else _covers(log, number, run))


def _covers(log: Sequence[Entry], number: int, run: Run) -> frozenset[str]:
    entry, covers = log[number], run.covers
    if isinstance(entry, RecordEvent):
        covers = Run(log, set(_waits_for(log, number, entry.event))).covers
    return frozenset(
        "nobody" if cover is None else BEFORE if cover == number else _who(log, cover)
        for number, cover in covers.items()
    )


def _waits_for(log: Sequence[Entry], number: int, event: int) -> Iterator[int]:
    """Yield the waits for what a record has recorded."""
    for later in range(number + 1, len(log)):
        entry = log[later]
        if isinstance(entry, RecordEvent) and entry.event == event:
            return
        if isinstance(entry, Wait) and entry.event == event:
            yield later


def _who(log: Sequence[Entry], number: int) -> str:
    """The place of a wait; of torch's own, that of its message; of what comes after the host's, that of the host."""
    entry = log[number]
    if isinstance(entry, Wait):
        return entry.place or next(each.place for each in log[number:] if isinstance(each, MemoryLaunch))
    return next(
        (each.place or "the host reads" for each in log[number::-1] if isinstance(each, Wait) and each.stream == HOST),
        "nobody",
    )
