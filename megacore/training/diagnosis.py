"""The time of a step, split: what its ranks have done, and for what those that waited have waited.

A step is looked at at points of time that lie evenly in it. At each a rank does one thing; where it waits for another
rank, what that one does counts, or the one for which that one waits. So the parts add up to the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from megacore.config import Config
from megacore.parallel.pipeline.schedules import RECEIVE, SEND, Action, Cost, Kind, dependencies, simulate
from megacore.parallel.virtual_stages import placement_of
from megacore.training.schedule_gaps import ComparedSchedule, actions, pipelines
from megacore.training.traces import ACTIONS, AGREE, COLLECTIVES, TracedInterval, TracedStep

POINTS = 4000
"""Points of time at which a step is looked at."""
STANDS_OUT = 0.15
"""The share of a step from which on a part of it is a finding."""
PRODUCTS, RECOMPUTATION, BUBBLE, WAITING = "products", "recomputation", "bubble", "waiting"
DATA, OPTIMIZER, HOST, SAVE, EVALUATE = "data", "optimizer", "host", "save", "evaluate"
_PHASES: Mapping[str, str] = {
    "data": DATA,
    "reduce": OPTIMIZER,
    "update": OPTIMIZER,
    "save": SAVE,
    "evaluate": EVALUATE,
}
"""{phase: what a rank does in it that waits for nothing}; in others it is its host."""
_MOSTLY = 0.7
"""The share of a part from which on it is due to one rank."""
_ROUNDED = 2e-7
"""The seconds by which what follows something may begin before its end, as traces are rounded."""
_ALIKE = 0.87
"""The share of a rank's work from which on others of its stage work as much."""


class StepPart(NamedTuple):
    """A part of a step: its seconds, the mean of all ranks, and what there is to say about it."""

    name: str
    seconds: float
    about: str = ""


@dataclass(frozen=True)
class StepSplit:
    """The parts of a step, products first and then the largest first; the mean of some traced steps."""

    parts: tuple[StepPart, ...]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.parts)

    @property
    def findings(self) -> tuple[StepPart, ...]:
        """The parts that stand out, beside products."""
        return tuple(x for x in self.parts if x.name != PRODUCTS and x.seconds >= STANDS_OUT * self.seconds)


def split(steps: Sequence[TracedStep], config: Config, recomputed: float = 0.0) -> StepSplit:
    """Return the parts of some steps of a run. Of saving and evaluation each step has its share, by how often they are.

    Args:
        config: The run's.
        recomputed: The share of recomputation in the products.

    Raises:
        ScheduleError: the actions of a trace are no schedule.
    """
    found, about = list[Mapping[str, float]](), dict[str, str]()
    for step in steps:
        seconds, said = _Split(step).parts()
        found.append(seconds)
        about |= said
    names = dict.fromkeys(name for seconds in found for name in seconds)
    means = {name: fmean(seconds.get(name, 0.0) for seconds in found) for name in names}
    often = {SAVE: config.checkpoint.every or config.train.steps, EVALUATE: config.evaluate.every or config.train.steps}
    for name, every in often.items():
        if had := [seconds[name] for seconds in found if name in seconds]:
            means[name] = fmean(had) / every
    if recomputed:
        means[RECOMPUTATION] = recomputed * means[PRODUCTS]
        means[PRODUCTS] -= means[RECOMPUTATION]
    parts = [StepPart(name, seconds, about.get(name, "")) for name, seconds in means.items() if seconds > 0]
    return StepSplit(tuple(sorted(parts, key=lambda each: (each.name != PRODUCTS, -each.seconds))))


class _Cause(NamedTuple):
    """What a rank does: the part of the step that this is, and who does it."""

    name: str
    rank: int


class _Split:
    """A traced step at points of time."""

    def __init__(self, step: TracedStep) -> None:
        self.step, self.mesh = step, step.mesh
        rows = [step.of(rank) for rank in range(self.mesh.world)]
        self.leaves = [[*_leaves(row)] for row in rows]
        self.starts = [[start for start, _ in leaves] for leaves in self.leaves]
        self.first = min(row[0].start for row in rows)
        self.end = max(each.end for row in rows for each in row)
        self.last = dict(self._last_to_come(rows))
        """{(rank, wait for others): (who is the last of them to wait, since when)}."""
        self.ended = [dict(_ends(row)) for row in rows]
        self.pipelines = {rank: ranks for ranks in pipelines(self.mesh) for rank in ranks}

    def parts(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the seconds of each part, the mean of all ranks, and what there is to say."""
        counts, waited, pooled = defaultdict[str, Counter[int]](Counter), 0, 0
        for point in range(POINTS):
            at = self.first + (point + 0.5) / POINTS * (self.end - self.first)
            own = [self._cause(rank, at, ()) for rank in range(self.mesh.world)]
            busy = {cause.rank for rank, cause in enumerate(own) if cause == (PRODUCTS, rank)}
            for rank, cause in enumerate(own):
                if cause.name != PRODUCTS or cause.rank == rank:
                    counts[cause.name][cause.rank] += 1
                elif busy & {*self.pipelines[rank]}:
                    pooled += 1
                else:
                    waited += 1
        unit = (self.end - self.first) / POINTS / self.mesh.world
        seconds = {name: ranks.total() * unit for name, ranks in counts.items()}
        even = min(self.bubble, pooled * unit)
        about = {name: self._whose(ranks) for name, ranks in counts.items() if name != PRODUCTS}
        about |= {BUBBLE: f"of {self.step.schedule}, with stages that are all alike", WAITING: self._culprit()}
        return {PRODUCTS: 0.0, **seconds, BUBBLE: even, WAITING: (pooled + waited) * unit - even}, about

    def _whose(self, ranks: Counter[int]) -> str:
        """Return the rank that most of a part is due to, if there is one."""
        ((rank, count),) = ranks.most_common(1)
        return f"due to rank {rank}" if self.mesh.world > 2 and count > _MOSTLY * ranks.total() else ""

    @cached_property
    def compared(self) -> list[ComparedSchedule]:
        return [ComparedSchedule.of(self.step, ranks) for ranks in pipelines(self.mesh)]

    @cached_property
    def bubble(self) -> float:
        """The seconds that a stage would wait for others if all took the same."""
        if self.mesh.pp == 1:
            return 0.0
        costs = [cost for each in self.compared for row in each.costs for cost in row]
        mean = Cost(**{x.name: fmean(getattr(cost, x.name) for cost in costs) for x in fields(Cost)})
        timeline = simulate(self.compared[0].schedule, mean, placement_of(self.step.schedule))
        return timeline.total * timeline.bubble / (1 + timeline.bubble)

    @cached_property
    def busy(self) -> list[float]:
        """The seconds of each rank's actions, as long as they usually are."""
        found = [0.0] * self.mesh.world
        for each in self.compared:
            for rank, row in zip(each.ranks, each.planned.spans, strict=True):
                found[rank] = sum(span.end - span.start for span in row)
        return found

    def _culprit(self) -> str:
        """Return whose products take longest."""
        stages = [self.mesh.place(rank).pp for rank in range(self.mesh.world)]
        slow = max(range(self.mesh.world), key=lambda rank: self.busy[rank])
        alike = [x for rank, x in enumerate(self.busy) if stages[rank] == stages[slow] and rank != slow]
        one = self.mesh.pp == 1 or any(x < _ALIKE * self.busy[slow] for x in alike)
        rest = [x for rank, x in enumerate(self.busy) if (rank != slow if one else stages[rank] != stages[slow])]
        if not rest or self.busy[slow] < fmean(rest) / _ALIKE:
            return ""
        whose = f"rank {slow}" if one else f"stage {stages[slow]}"
        return f"for {whose}, whose actions take {self.busy[slow] / fmean(rest):.2f} times the others'"

    def _cause(self, rank: int, at: float, asked: tuple[int, ...]) -> _Cause:
        """Return what a rank does at a time, or who it waits for, in the end; ``asked``: the ranks that wait for it."""
        chain = self._chain(rank, at)
        phase, here = (chain[0].kind, chain[-1]) if chain else ("", None)
        name = _PHASES.get(phase, HOST)
        if name in (SAVE, EVALUATE) or here is None or rank in asked:
            return _Cause(name, rank)
        other = rank
        if here.kind in (*COLLECTIVES, AGREE):
            name = HOST if here.kind == AGREE else f"{here.kind} {here.axis}"
            late, since = self.last.get((rank, here), (rank, at))
            other = late if at < since else rank
        elif here.kind in (RECEIVE, SEND):
            name, action = f"{SEND} pp", chain[-2] if len(chain) > 1 else here
            for source, before in self._awaited(rank, action):
                other = source if at < self.ended[source].get(before, at) else rank
        elif here.kind in ACTIONS:
            name = PRODUCTS
        return _Cause(name, rank) if other == rank else self._cause(other, at, (*asked, rank))

    def _awaited(self, rank: int, action: TracedInterval) -> Iterator[tuple[int, Action]]:
        """Yield whose action an action has received something of."""
        if action.kind not in ("F", "B", "I"):
            return
        stage, ranks = self.mesh.place(rank).pp, self.pipelines[rank]
        chunks = 1 + max((each.chunk for each in self.ended[rank]), default=0)
        back: Kind = "I" if action.kind == "I" else "B"
        own = Action(action.kind, action.chunk, action.microbatch)  # type: ignore[arg-type]
        placement = placement_of(self.step.schedule)
        for source, before in dependencies(own, stage, self.mesh.pp, chunks, back, placement):
            if source != stage:
                yield ranks[source], before

    def _chain(self, rank: int, at: float) -> tuple[TracedInterval, ...]:
        """Return what a rank is in at a time, from the phase inwards."""
        number = bisect_right(self.starts[rank], at) - 1
        return self.leaves[rank][number][1] if number >= 0 else ()

    def _last_to_come(
        self, rows: Sequence[Sequence[TracedInterval]]
    ) -> Iterator[tuple[tuple[int, TracedInterval], tuple[int, float]]]:
        """Yield, for each wait for the ranks of a group, which of them is the last to wait, and since when. Who has
        gone on before has waited for a message that had been sent before."""
        waits = [defaultdict[tuple[str, str], list[TracedInterval]](list) for _ in rows]
        for rank, row in enumerate(rows):
            for each in row:
                if each.kind in (*COLLECTIVES, AGREE):
                    waits[rank][each.kind, each.axis].append(each)
        for rank, kinds in enumerate(waits):
            for (kind, axis), own in kinds.items():
                group = self.mesh.along(rank, *(axis.split(" x ") if axis else self.mesh.DIMS))
                theirs = [waits[other][kind, axis] for other in group]
                if len({len(each) for each in theirs}) > 1:  # of groups that are not all along these axes
                    continue
                for number, each in enumerate(own):
                    since, late = max((row[number].start, other) for row, other in zip(theirs, group, strict=True))
                    if each.end >= since - self.step.errors[rank] - self.step.errors[late]:
                        yield (rank, each), (late, since)


def _leaves(row: Sequence[TracedInterval]) -> Iterator[tuple[float, tuple[TracedInterval, ...]]]:
    """Yield (since when, what a rank is in from the phase inwards), one after the other."""
    chain, now = list[TracedInterval](), row[0].start
    for each in (*row, None):
        while chain and (each is None or chain[-1].end <= each.start + _ROUNDED):
            now = max(now, chain.pop().end)
            yield now, tuple(chain)
        if each is not None:
            now = max(now, each.start)
            chain.append(each)
            yield now, tuple(chain)


def _ends(row: Sequence[TracedInterval]) -> Iterator[tuple[Action, float]]:
    """Yield when each action of the step itself has ended."""
    for kind, each in actions(row):
        yield Action(kind, each.chunk, each.microbatch), each.end
