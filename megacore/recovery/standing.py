"""Pure functions of what an agent has seen while no step was done: they say who stands and who waits for it. No torch.

A rank stands while its stack waits for no other rank. Where all wait, in a circle, the one stands that is ahead of a
collective that it has left out; and where ranks have called different ones as the same, they wait for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megacore.places import along, listed, place
from megacore.rank import WAITING
from megacore.recovery.beats import PHASES, Phase, Reading
from megacore.recovery.flight_recorder import GroupLog
from parallel.weights.layout import MeshShape

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
ONCE: frozenset[Phase] = frozenset({"save", "evaluate", "end"})
"""The phases that may take a while, of which nothing is known before the first one has ended."""

_ORDER: Mapping[Phase, int] = {phase: number for number, phase in enumerate(PHASES)} | {
    "backward": PHASES.index("forward")  # they alternate
}
# Of a stack, the call that a thread is in; and the files of all calls.
_INNERMOST = re.compile(r'\(most recent call first\):\n  File "([^"]*)", line (\d+) in (.*)')
_FILES = re.compile(r'^  File "([^"]*)"', re.MULTILINE)

Doing = Literal["works", "waits", "compiles", "is stopped"]


@dataclass(frozen=True)
class Witness:
    """A rank as its agent has seen it.

    Args:
        reading: Its beat.
        stood: Seconds for which it has been seen there.
        doing: What it does, as far as its stacks show that.
        call: The call in which it waits, or nothing.
        groups: {group: its collectives}; empty where it has not answered.
    """

    reading: Reading
    stood: float
    doing: Doing = "works"
    call: str = ""
    groups: Mapping[str, GroupLog] = field(default_factory=dict)

    @property
    def may_take(self) -> bool:
        """Whether it does something that may well take its time: it is told later."""
        first = self.reading.phase in ONCE and not self.reading.busy[self.reading.phase]
        return self.doing in ("compiles", "is stopped") or first

    @property
    def pending(self) -> Iterator[Awaited]:
        """The collectives that it has entered, and that have not ended."""
        for group, log in self.groups.items():
            for number, call in log.pending.items():
                yield Awaited(group, number, call, log.ranks)

    @property
    def at(self) -> tuple[int, int]:
        return self.reading.step, _ORDER[self.reading.phase]


@dataclass(frozen=True)
class Awaited:
    """A collective that a rank has entered, (kind, size), and that has not ended."""

    group: str
    number: int
    call: tuple[str, str]
    ranks: tuple[int, ...]

    def lacks(self, each: Witness, unknown: bool = False) -> bool:
        """Return whether a rank has still to enter it, or ``unknown`` where it has not said."""
        return each.groups[self.group].last < self.number if self.group in each.groups else unknown

    def words(self, shape: MeshShape | None) -> str:
        """Return "all_reduce 812 of tp"."""
        return f"{self.call[0]} {self.number} of {along(self.ranks, shape) or self.group}"


@dataclass(frozen=True)
class Verdict:
    """The ranks that stand, in their order; what they have left out, if that is why; and who has called what, where
    ranks have called different collectives as the same: {(kind, size): ranks}."""

    stands: tuple[int, ...] = ()
    left_out: Awaited | None = None
    mismatched: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)


def doing(stacks: str) -> tuple[Doing, str]:
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


def judge(seen: Mapping[int, Witness], whole: bool) -> Verdict:
    """Return who stands, of ranks none of which has moved for long; nobody, where all wait and none is to blame.

    Args:
        seen: {rank: what was seen of it}, of all living ranks of this agent.
        whole: Whether these are all ranks of the run: others may be waited for, and wait.
    """
    for awaited in (each for witness in seen.values() for each in witness.pending):
        called = dict[tuple[str, str], tuple[int, ...]]()
        for rank in sorted({*awaited.ranks} & {*seen}):
            log = seen[rank].groups.get(awaited.group)
            if log is not None and log.ranks == awaited.ranks and awaited.number in log.pending:
                call = log.pending[awaited.number]
                called[call] = (*called.get(call, ()), rank)
        if len(called) > 1:
            odd = min(called.values(), key=len)
            return Verdict(odd, awaited, called)
    others = [rank for rank, each in sorted(seen.items()) if each.doing != "waits"]
    # A GPU's host may stand anywhere while it waits for its device, which waits for those that have yet to enter.
    sure = [rank for rank in others if seen[rank].reading.device < 0 or not _waits_for_others(rank, seen)]
    if others:
        return Verdict(tuple(sure or others))
    return (_left_out(seen) if whole else None) or Verdict()


def _waits_for_others(rank: int, seen: Mapping[int, Witness]) -> bool:
    return any(awaited.lacks(seen[other]) for awaited in seen[rank].pending for other in awaited.ranks if other in seen)


def _left_out(seen: Mapping[int, Witness]) -> Verdict | None:
    """Return who is further in its step than a rank that waits for it in a collective."""
    for _, each in sorted(seen.items()):
        for awaited in each.pending:
            for rank in awaited.ranks:
                if rank in seen and awaited.lacks(seen[rank]) and seen[rank].at > each.at:
                    return Verdict((rank,), awaited)
    return None


def sentence(verdict: Verdict, seen: Mapping[int, Witness], shape: MeshShape | None, node: str = "") -> str:
    """Return who stands and who waits for it, in one line.

    Args:
        verdict: The one of :func:`judge`.
        seen: What it was given.
        shape: The mesh of the run, where it is known.
        node: The name of this machine, where there are several.
    """
    stands, left_out, parts = verdict.stands, verdict.left_out, list[str]()

    def named(ranks: Sequence[int]) -> str:
        return place(ranks[0], shape, node) if len(ranks) == 1 else listed(ranks)

    if verdict.mismatched and left_out is not None:
        at = f"as number {left_out.number} of {along(left_out.ranks, shape) or left_out.group}"
        called = verdict.mismatched.items()
        return " while ".join(
            f"{named(ranks)} called {kind}{size and f' of {size}'} {at}" for (kind, size), ranks in called
        )
    if left_out is not None:
        parts.append(f"{named(stands)} has left out {left_out.words(shape)}, and waits too")
    else:
        alike = dict[tuple[Doing, Phase, int], list[int]]()
        for rank in stands:
            alike.setdefault((seen[rank].doing, seen[rank].reading.phase, seen[rank].reading.step), []).append(rank)
        for (does, phase, step), who in alike.items():
            how = {"is stopped": ", stopped by a signal", "compiles": ", compiling"}.get(does, "")
            stood = min(seen[rank].stood for rank in who)
            has = "has" if len(who) == 1 else "have"
            parts.append(f"{named(who)} {has} been in `{phase}` of step {step} for {stood:.0f} s{how}")
    waiting = dict[str, list[int]]()
    for rank, each in sorted(seen.items()):
        if rank not in stands or left_out is not None:
            waiting.setdefault(_where(each, stands, seen, shape), []).append(rank)
    parts += [f"{listed(who)} wait{'s' * (len(who) == 1)} in {where}" for where, who in waiting.items()]
    return "; ".join(parts)


def _where(each: Witness, stands: tuple[int, ...], seen: Mapping[int, Witness], shape: MeshShape | None) -> str:
    """Return the collective in which a rank waits, for one that stands if that is known; else the call."""
    pending = list(each.pending)
    for awaited in pending:
        if any(awaited.lacks(seen[rank], unknown=True) for rank in stands if rank in awaited.ranks):
            return awaited.words(shape)
    return pending[0].words(shape) if pending else each.call or f"`{each.reading.phase}`"
