"""Pure functions of what an agent has seen: they say who stands still and who waits for it. No torch.

A rank stands still that has been in one phase for longer than its limit, while its stack waits for no other rank. The
limit comes from what was measured. Where all wait, in a circle, the one stands still that is ahead of a collective that
it has left out; and where ranks have called different ones as the same, the one that has called what others have not,
or what it has never called there before.

A false alarm costs more than a late one: what writes files or compiles, and what nobody here waits for, has
``train.timeout`` at least.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from megacore.rank import WAITING
from megacore.recovery.collectives import Call, GroupLog
from megacore.recovery.phases import PHASES, Phase, Reading
from parallel.weights.layout import MeshShape

FACTOR = 5.0
SLACK_S = 1.0
PATIENT: frozenset[Phase] = frozenset({"start", "log", "save", "recover", "end"})
"""The phases that wait for disks, or that come once."""
OUTSIDE: frozenset[Phase] = frozenset({"start", "recover"})
LET_GO_S = 15.0
"""The seconds that a recovery may take at least: a save that a fault has cut has some of them to end by itself."""
_IDLE = "megacore/recovery/channel.py", "ready"
"""The call in which a rank that has let go of its groups waits for those that have not."""
COMPILING = (
    "torch/_dynamo/convert_frame.py",
    "torch/_dynamo/symbolic_convert.py",
    "torch/_inductor/compile_fx.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "triton/compiler/compiler.py",
)
"""The files whose calls are on the stack while code is compiled, and not while it runs."""

NOTHING: Mapping[Phase, float] = MappingProxyType({})

_ORDER: Mapping[Phase, int] = {phase: number for number, phase in enumerate(PHASES)} | {
    "backward": PHASES.index("forward")  # they alternate
}
# Of a stack, the call that a thread is in; and the files of all calls.
_INNERMOST = re.compile(r'\(most recent call first\):\n  File "([^"]*)", line (\d+) in (.*)')
_FILES = re.compile(r'^  File "([^"]*)"', re.MULTILINE)

Doing = Literal["works", "waits", "compiles"]


@dataclass(frozen=True)
class Witness:
    """A rank as its agent has seen it.

    Args:
        reading: Its beat.
        stood: Seconds for which it has been seen there.
        doing: "waits" or "compiles" where its stacks show that; else "works".
        call: The call in which it waits, or nothing.
        groups: {group: its collectives}; empty where it has not answered.
    """

    reading: Reading
    stood: float
    doing: Doing = "works"
    call: str = ""
    groups: Mapping[str, GroupLog] = field(default_factory=dict)


@dataclass(frozen=True)
class Awaited:
    """A collective that a rank has entered, and that has not ended."""

    group: str
    number: int
    kind: str
    ranks: tuple[int, ...]

    def lacks(self, each: Witness, unknown: bool) -> bool:
        """Return whether a rank has still to enter it, or ``unknown`` where it has not said."""
        return each.groups[self.group].last < self.number if self.group in each.groups else unknown


@dataclass(frozen=True)
class Verdict:
    """The ranks that stand still, in their order; all that was seen; and what was left out, if that is why."""

    stands: tuple[int, ...]
    seen: Mapping[int, Witness]
    left_out: Awaited | None = None


def limits(
    readings: Collection[Reading], timeout_s: float, factor: float = FACTOR, before: Mapping[Phase, float] = NOTHING
) -> dict[Phase, float]:
    """Return the seconds that each phase may take while others wait: ``factor`` times the most that any rank here has
    taken and a second more, or ``timeout_s`` where none was measured.

    Args:
        readings: The beats of the ranks here.
        timeout_s: ``train.timeout``.
        factor: ``recovery.hang_factor``.
        before: {phase: the most seconds in it before the last recovery, first steps among them}: what counts where
            nothing was measured since, and for a recovery too. Empty where there was none.
    """
    found = dict[Phase, float]()
    for phase in PHASES:
        slowest = max((reading.slowest.get(phase, 0.0) for reading in readings), default=0.0)
        limit = factor * slowest + SLACK_S if slowest else timeout_s
        if phase in OUTSIDE and before:
            most = max(before.get(each, 0.0) for each in OUTSIDE)
            found[phase] = min(timeout_s, max(LET_GO_S, factor * most + SLACK_S))
        elif phase in PATIENT:
            found[phase] = max(limit, timeout_s)
        else:
            known = before.get(phase, 0.0) if not slowest else 0.0
            found[phase] = min(timeout_s, factor * known + SLACK_S) if known else limit
    return found


def doing(stacks: str) -> tuple[Doing, str]:
    """Return what a rank does by the stacks of its threads, and the call in which it waits."""
    for file, line, name in _INNERMOST.findall(stacks):
        if file.endswith(WAITING) or (file.endswith(_IDLE[0]) and name == _IDLE[1]):
            return "waits", f"`{name}` ({'/'.join(file.split('/')[-2:])}:{line})"
    return ("compiles" if any(file.endswith(COMPILING) for file in _FILES.findall(stacks)) else "works"), ""


def judge(
    seen: Mapping[int, Witness],
    timeout_s: float,
    whole: bool,
    factor: float = FACTOR,
    before: Mapping[Phase, float] = NOTHING,
) -> Verdict | None:
    """Return who stands still; None where nobody does, or where it cannot be told.

    Args:
        seen: {rank: what was seen of it}, of all living ranks of this agent.
        timeout_s: ``train.timeout``.
        whole: Whether these are all ranks of the run: others may be waited for, and wait.
        factor: ``recovery.hang_factor``.
        before: The argument of :func:`limits`.
    """
    allowed = limits([each.reading for each in seen.values()], timeout_s, factor, before)
    waiting = {rank: each for rank, each in seen.items() if each.doing == "waits"}
    others = {rank: each for rank, each in seen.items() if rank not in waiting}

    def late(each: Witness, least: float = 0.0) -> bool:
        if before and not each.reading.since:
            return False  # who takes another's place imports, for which it has a time of its own
        patience = timeout_s if each.doing == "compiles" else least
        return each.stood > max(allowed[each.reading.phase], patience)

    if (found := _mismatched(seen)) is not None:
        return found
    if waiting and others:
        stands = tuple(sorted(rank for rank, each in others.items() if late(each)))
        return Verdict(stands, seen) if stands else None
    if others:
        # What all do takes as long as it takes, unless it was done faster before.
        known = all(each.reading.phase not in PATIENT and _measured(each.reading.phase, seen) for each in seen.values())
        stand = known and all(late(each, timeout_s) for each in others.values())
        return Verdict(tuple(sorted(others)), seen) if stand else None
    return _left_out({rank: each for rank, each in waiting.items() if late(each)}, seen) if whole else None


def _measured(phase: Phase, seen: Mapping[int, Witness]) -> bool:
    return any(phase in each.reading.slowest for each in seen.values())


def _mismatched(seen: Mapping[int, Witness]) -> Verdict | None:
    """Return who has called another collective than those that it is to be one with: it never ends, whatever others
    do."""
    for awaited in itertools.chain.from_iterable(map(_awaited, seen.values())):
        number, calls = awaited.number, dict[int, Call]()
        for rank in awaited.ranks:
            log = seen[rank].groups.get(awaited.group) if rank in seen else None
            if log is not None and log.ranks == awaited.ranks and number in log.pending:
                calls[rank] = log.pending[number]
        alike = {rank: sum(map(call.fits, calls.values())) for rank, call in calls.items()}
        if min(alike.values(), default=0) < len(calls):
            stands = max(calls, key=lambda rank: (-alike[rank], _at(seen[rank]), not calls[rank].usual))
            other = min(rank for rank in calls if rank != stands)
            return Verdict((stands,), seen, replace(awaited, kind=calls[other].kind))
    return None


def _left_out(late: Mapping[int, Witness], seen: Mapping[int, Witness]) -> Verdict | None:
    """Return who is further in its step than a rank that waits for it in a collective."""
    for _, each in sorted(late.items()):
        for awaited in _awaited(each):
            for rank in awaited.ranks:
                if rank in late and awaited.lacks(late[rank], unknown=False) and _at(late[rank]) > _at(each):
                    return Verdict((rank,), seen, awaited)
    return None


def _awaited(each: Witness) -> Iterator[Awaited]:
    for group, log in each.groups.items():
        for number, call in log.pending.items():
            yield Awaited(group, number, call.kind, log.ranks)


def _at(each: Witness) -> tuple[int, int]:
    return each.reading.step, _ORDER[each.reading.phase]


# -- in words


def sentence(verdict: Verdict, shape: MeshShape, node: str = "") -> str:
    """Return who stands still and who waits for it, in one line.

    Args:
        verdict: The one of :func:`judge`.
        shape: The mesh of the run.
        node: The name of this machine, where there are several.
    """
    seen, stands = verdict.seen, verdict.stands
    waiting = dict[str, list[int]]()
    for rank, each in sorted(seen.items()):
        if each.doing == "waits" and rank not in stands:
            waiting.setdefault(_where(each, verdict, shape), []).append(rank)
    waits = ", ".join(f"{listed(ranks)} wait{'s' * (len(ranks) == 1)} for it in {at}" for at, ranks in waiting.items())
    if verdict.left_out is not None:
        (rank,) = stands
        left_out = _words(verdict.left_out, shape)
        return f"{place(rank, shape, node)} has left out {left_out}, and waits in {seen[rank].call}; {waits}"
    stood = (
        f"{place(rank, shape, node)} has stood in `{seen[rank].reading.phase}` for {seen[rank].stood:.0f} s"
        for rank in stands
    )
    return f"{', '.join(stood)}; {waits or 'no rank here waits for another'}"


def _where(each: Witness, verdict: Verdict, shape: MeshShape) -> str:
    """Return the collective in which a rank waits, for one that stands if that is known; else the call."""
    found = list(_awaited(each))
    for awaited in found:
        stands = (verdict.seen[rank] for rank in verdict.stands if rank in awaited.ranks)
        if any(awaited.lacks(other, unknown=True) for other in stands):
            return _words(awaited, shape)
    return _words(found[0], shape) if found else each.call


def _words(awaited: Awaited, shape: MeshShape) -> str:
    """Return "all_reduce 812 of tp"."""
    return f"{awaited.kind} {awaited.number} of {along(awaited.ranks, shape) or awaited.group}"


def along(ranks: Sequence[int], shape: MeshShape) -> str:
    """Return the dimensions along which ranks lie, "dp x tp" or "all"; without a name, the ranks."""
    split = [dim for dim in shape.DIMS if shape[dim] > 1]
    for size in range(1, len(split) + 1):
        for dims in itertools.combinations(split, size):
            if ranks and shape.along(ranks[0], *dims) == tuple(ranks):
                return " x ".join(dims) if size < len(split) or size == 1 else "all"
    return listed(ranks) if ranks else ""


def place(rank: int, shape: MeshShape, node: str = "") -> str:
    """Return "rank 5 (pp=1 tp=1, node c)"; dimensions of size 1 say nothing."""
    at = shape.place(rank)
    parts = [" ".join(f"{dim}={getattr(at, dim)}" for dim in shape.DIMS if shape[dim] > 1), node and f"node {node}"]
    told = ", ".join(filter(None, parts))
    return f"rank {rank} ({told})" if told else f"rank {rank}"


def listed(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-4, 7"."""
    runs = list[list[int]]()
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {told}"
