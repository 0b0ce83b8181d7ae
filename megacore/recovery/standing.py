"""Pure functions that say who stands and who waits for it, by what an agent saw while no step was done. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megacore.parallel.weights.layout import MeshShape
from megacore.places import along, listed, place
from megacore.rank import WAITING
from megacore.recovery.beats import PHASES, Phase, Place, Reading
from megacore.recovery.flight_recorder import RECEIVE, SEND, Call, GroupLog

COMPILING = (
    "torch/_dynamo/convert_frame.py",
    "torch/_dynamo/symbolic_convert.py",
    "torch/_inductor/compile_fx.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "triton/compiler/compiler.py",
)
"""The files whose calls are on the stack while code is compiled, and not while it runs."""
BACKWARD = "torch/autograd/graph.py"
"""The file in which the main thread waits for those of the backward."""
LONG: frozenset[Phase] = frozenset({"save", "evaluate", "end"})
"""The phases that may take a while, of which nothing is known before the first one has ended."""

_ORDER = {phase: number for number, phase in enumerate(PHASES)} | {
    "backward": PHASES.index("forward")
}  # they alternate
# Of a stack, the call that a thread is in; and the files of all calls.
_INNERMOST = re.compile(r'\(most recent call first\):\n  File "([^"]*)", line (\d+) in (.*)')
_FILES = re.compile(r'^  File "([^"]*)"', re.MULTILINE)


@dataclass(frozen=True)
class Awaited:
    """A collective that a rank has entered, and that has not ended."""

    group: str
    number: int
    call: Call
    ranks: tuple[int, ...]

    def lacks(self, each: Witness, unknown: bool = False) -> bool:
        """Return whether a rank has still to enter it, or ``unknown`` where it has not said."""
        return each.groups[self.group].last < self.number if self.group in each.groups else unknown

    def is_same(self, other: Awaited | None) -> bool:
        """Return whether another one is the same, on another rank."""
        return other is not None and (self.group, self.number) == (other.group, other.number)

    def words(self, shape: MeshShape | None) -> str:
        """Return "all_reduce 812 of tp"."""
        if self.call[0] in (SEND, RECEIVE):
            return f"a message from rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"{self.call[0]} {self.number} of {along(self.ranks, shape) or self.group}"


@dataclass(frozen=True)
class Witness:
    """A rank as its agent has seen it: it "works", "waits" in a call, "compiles" or "is stopped", as far as its stacks
    show that; {group: its collectives}, none where it has not answered, and the place that its GPU has come to, where
    that is known."""

    reading: Reading
    stood: float
    doing: str = "works"
    call: str = ""
    groups: Mapping[str, GroupLog] = field(default_factory=dict)
    device: Place | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether its collectives run on a GPU, which its host is ahead of."""
        return self.device is not None or self.reading.device >= 0

    @property
    def first(self) -> Awaited | None:
        """The first collective of its GPU that has not ended; a message that it receives only where there is no other,
        as a rank asks for those before it needs them."""
        logs = [(log.kind == RECEIVE, log.entered, group) for group, log in self.groups.items() if log.entered >= 0]
        if not logs:
            return None
        group = min(logs)[-1]
        log = self.groups[group]
        return Awaited(group, min(log.pending), log.pending[min(log.pending)], log.ranks)

    @property
    def has_begun(self) -> bool | None:
        """Whether its GPU has begun that, if there is one, where this is known."""
        return None if self.first is None else self.groups[self.first.group].begun

    @property
    def may_take(self) -> bool:
        """Whether it does something that may well take its time: it is told later."""
        phase = self.reading.phase
        return self.doing in ("compiles", "is stopped") or (phase in LONG and not self.reading.busy[phase])

    @property
    def pending(self) -> Iterator[Awaited]:
        """The collectives that it has entered, and that have not ended."""
        for group, log in self.groups.items():
            for number, call in log.pending.items():
                yield Awaited(group, number, call, log.ranks)

    @property
    def at(self) -> tuple[int, int]:
        return self.reading.step, _ORDER[self.reading.phase]


def doing(stacks: str) -> tuple[str, str]:
    """Return what a rank does by the stacks of its threads, of which the main one is the last, and the call in which it
    waits."""
    innermost = _INNERMOST.findall(stacks)
    if innermost and not innermost[-1][0].endswith(BACKWARD):
        innermost = innermost[-1:]
    for file, line, name in innermost:
        if file.endswith(WAITING):
            return "waits", f"`{name}` ({'/'.join(file.split('/')[-2:])}:{line})"
    main = stacks.rpartition("(most recent call first)")[2]
    return ("compiles" if any(file.endswith(COMPILING) for file in _FILES.findall(main)) else "works"), ""


def judge(seen: Mapping[int, Witness], shape: MeshShape | None, node: str = "") -> tuple[tuple[int, ...], str]:
    """Return who stands, of ranks none of which has moved for long, and a line that says who waits for it.

    Whoever waits for no other rank stands. Where all wait, that is the rank which is ahead of a collective that it has
    left out, and where ranks have called different ones as the same, the fewer; else nobody.
    """
    for awaited in (each for witness in seen.values() for each in witness.pending):
        called = dict[Call, list[int]]()
        for rank in awaited.ranks:
            log = seen[rank].groups.get(awaited.group) if rank in seen else None
            if log is not None and log.ranks == awaited.ranks and awaited.number in log.pending and log.kind != SEND:
                called.setdefault(log.pending[awaited.number], []).append(rank)
        if len(called) > 1:
            kinds = (f"{' of '.join(filter(None, call))} on {listed(ranks)}" for call, ranks in called.items())
            text = (
                f"number {awaited.number} of {along(awaited.ranks, shape) or awaited.group} is {', but '.join(kinds)}"
            )
            return min(map(tuple, called.values()), key=len), text
    stands = [rank for rank, each in sorted(seen.items()) if each.doing != "waits"]
    # A GPU's host may stand anywhere while it waits for its device, which waits for those that come later.
    waits = {
        rank: _late_devices(rank, seen, shape) for rank, each in sorted(seen.items()) if each.is_gpu and each.first
    }
    late = {rank for ranks in waits.values() for rank in ranks if not waits.get(rank)}
    late -= {rank for rank in late if _may_wait_elsewhere(rank, seen, waits)}
    stands = sorted({*(rank for rank in stands if rank not in waits), *late})
    if not stands and shape is not None and len(seen) == shape.world:
        for _, each in sorted(seen.items()):
            for awaited, rank in _late(each, seen):
                if seen[rank].at > each.at:
                    text = f"{place(rank, shape, node)} has left out {awaited.words(shape)}"
                    return (rank,), f"{text}; {_waits(seen, (rank,), seen, shape)}"
    others = [rank for rank in sorted(seen) if rank not in stands]
    return tuple(stands), "; ".join(
        filter(None, (where(seen, stands, shape, node), _waits(seen, stands, others, shape)))
    )


def where(seen: Mapping[int, Witness], ranks: Iterable[int], shape: MeshShape | None, node: str = "") -> str:
    """Return "rank 5 (tp=2, node c) in `data` of step 40 for 61 s", for all that are to be told."""
    alike = dict[tuple[str, Phase, int, str], list[int]]()
    for rank in ranks:
        each = seen[rank]
        alike.setdefault((each.doing, each.reading.phase, each.reading.step, _on_gpu(each, shape)), []).append(rank)
    told = list[str]()
    for (does, phase, step, gpu), who in alike.items():
        named = place(who[0], shape, node) if len(who) == 1 else listed(who)
        how = {"is stopped": ", stopped by a signal", "compiles": ", compiling"}.get(does, "") + gpu
        told.append(f"{named} in `{phase}` of step {step} for {min(seen[rank].stood for rank in who):.0f} s{how}")
    return "; ".join(told)


def _on_gpu(each: Witness, shape: MeshShape | None) -> str:
    """Return ", its GPU in `backward` of step 38 before all_gather 812 of tp" of one that its host is ahead of."""
    if each.first is None:
        return ""
    at = "" if each.device is None else f" in `{each.device[2]}` of step {each.device[0]}"
    return f", its GPU{at} {'before' if each.has_begun is False else 'at'} {each.first.words(shape)}"


def _late(each: Witness, seen: Mapping[int, Witness]) -> Iterator[tuple[Awaited, int]]:
    """Yield the collectives in which a rank waits, with those that have yet to enter them."""
    for awaited in each.pending:
        yield from ((awaited, rank) for rank in awaited.ranks if rank in seen and awaited.lacks(seen[rank]))


def _late_devices(rank: int, seen: Mapping[int, Witness], shape: MeshShape | None) -> set[int]:
    """Return the ranks whose GPUs have yet to come to the first collective that a rank's GPU has not done, as far as
    that is known."""
    awaited, late = seen[rank].first, set[int]()
    assert awaited is not None
    for other in awaited.ranks:
        if other == rank or other not in seen:
            continue
        theirs, log = seen[other], seen[other].groups.get(awaited.group)
        if awaited.lacks(theirs):  # its host has not entered it
            late.add(other)
        elif log is None or not log.pending or awaited.number < min(log.pending) or theirs.first is None:
            continue  # it has ended there, or it is not known
        elif not awaited.is_same(theirs.first):
            if theirs.groups[theirs.first.group].entered < log.entered:
                late.add(other)  # it is still in an earlier one
        elif not theirs.has_begun if seen[rank].has_begun else _is_behind(other, rank, seen, shape):
            late.add(other)
    return late


def _may_wait_elsewhere(rank: int, seen: Mapping[int, Witness], waits: Mapping[int, set[int]]) -> bool:
    """Return whether a rank's GPU may wait for one of another machine, rather than be late itself."""
    awaited = seen[rank].first
    if awaited is None or seen[rank].has_begun is False or all(other in seen for other in awaited.ranks):
        return False
    same = (other for other, ranks in waits.items() if rank in ranks and awaited.is_same(seen[other].first))
    return not any(True for _ in same)


def _is_behind(one: int, other: int, seen: Mapping[int, Witness], shape: MeshShape | None) -> bool:
    """Return whether the GPU of one rank has come less far than that of another by its events, where nothing better is
    known. Those of a stage go through the same phases in a step; others are compared by the kind of the phase."""
    ours, theirs = seen[one].device, seen[other].device
    if ours is None or theirs is None or seen[one].has_begun is not None:
        return False
    if shape is not None and shape.place(one).pp == shape.place(other).pp:
        return ours[:2] < theirs[:2]
    return (ours[0], _ORDER[ours[2]]) < (theirs[0], _ORDER[theirs[2]])


def _waits(seen: Mapping[int, Witness], stands: Sequence[int], ranks: Iterable[int], shape: MeshShape | None) -> str:
    """Return "ranks 0-4 waiting in all_reduce 812 of tp": for one that stands if that is known; else in the call."""
    waiting = dict[str, list[int]]()
    for rank in sorted(ranks):
        each, pending = seen[rank], list(seen[rank].pending)
        wanted = [a for a in pending if any(a.lacks(seen[other], True) for other in stands if other in a.ranks)]
        awaited = (*wanted, *([each.first] if each.first else []), *pending)[:1]
        waiting.setdefault(awaited[0].words(shape) if awaited else each.call or "a GPU", []).append(rank)
    return "; ".join(f"{listed(who)} waiting in {what}" for what, who in waiting.items())
