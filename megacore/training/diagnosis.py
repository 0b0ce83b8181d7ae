"""The time of a step, split: what its ranks have done, and for what those that waited have waited.

A step is looked at at points of time that lie evenly in it. At each a rank does one thing; where it waits for another
rank, what that one does counts, or the one for which that one waits. So the parts add up to the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import fmean, median
from typing import NamedTuple

from megacore.config import Config
from megacore.gpus import SLOWED
from megacore.parallel.pipeline.schedules import RECEIVE, SEND, Action, Cost, Kind, dependencies, simulate
from megacore.parallel.recorder import RECOMPUTE
from megacore.parallel.virtual_stages import placement_of
from megacore.parallel.weights.layout import MeshShape
from megacore.training.schedule_gaps import ComparedSchedule, actions, pipelines, with_waits
from megacore.training.traces import ACTIONS, AGREE, COLLECTIVES, TracedInterval, TracedStep

POINTS = 4000
"""Points of time at which a step is looked at."""
STANDS_OUT = 0.15
"""The share of a step from which on a part of it is a finding."""
PRODUCTS, RECOMPUTATION, QUEUED = "products", "recomputation", "queued"
BUBBLE, WAITING = "bubble", "waiting"
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
_WORK = (PRODUCTS, RECOMPUTATION)
"""The parts that a rank computes; who waits for one that does waits for a stage, or for a rank that has more to do."""
_ROUNDED = 2e-7
"""The seconds by which what follows something may begin before its end, as traces are rounded."""
_ALIKE = 0.87
"""The share of a rank's work from which on others work as much."""
_AHEAD = 0.05
"""The share of an action of a device by which its host has launched it before it is over, if the host is ahead."""


class StepPart(NamedTuple):
    """A part of a step: its seconds, the mean of all ranks; what there is to say about it; and the seconds that a step
    would take less without it."""

    name: str
    seconds: float
    about: str
    gain: float


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


def split(steps: Sequence[TracedStep], config: Config, loads: Sequence[float] = ()) -> StepSplit:
    """Return the parts of some steps of a run. Of saving and evaluation each step has its share, by how often they are.
    ``config``: the run's; ``loads``: of each rank along ep, the rows that its experts are sent, over the mean. Raises
    ScheduleError: the actions of a trace are no schedule."""
    found, about, gains = list[Mapping[str, float]](), dict[str, str](), list[float]()
    for step in steps:
        looked = _Split(step, loads)
        seconds, said = looked.parts()
        found.append(seconds)
        gains.append(looked.culprit[1])
        about |= said
    names = dict.fromkeys(name for seconds in found for name in seconds)
    means = {name: fmean(seconds.get(name, 0.0) for seconds in found) for name in names}
    if had := [seconds[EVALUATE] for seconds in found if EVALUATE in seconds]:
        means[EVALUATE] = fmean(had) / (config.evaluate.every or config.train.steps)
    if SAVE in means:
        others = sum(seconds for name, seconds in means.items() if name != SAVE)
        means[SAVE] = _saves(
            config, [(x.step, seconds.get(SAVE, 0.0)) for x, seconds in zip(steps, found, strict=True)], others
        )
    gone = means | {WAITING: fmean(gains) or means.get(WAITING, 0.0)}
    parts = [StepPart(name, seconds, about.get(name, ""), gone[name]) for name, seconds in means.items() if seconds > 0]
    return StepSplit(tuple(sorted(parts, key=lambda each: (each.name != PRODUCTS, -each.seconds))))


def axes_of(part: str) -> list[str]:
    """Return the axes of the mesh along which the messages of a part go; none of what are no messages."""
    return [word for word in part.split(" ")[1:] if word in MeshShape.DIMS]


def _saves(config: Config, had: Sequence[tuple[int, float]], others: float) -> float:
    """Return the seconds of saves in a mean step, of (step, its seconds of them): those on disk come at their interval,
    and checkpoints in memory, which the other steps have, take no more than they may of what else there is."""
    steps, section = config.train.steps, config.checkpoint
    every = section.every or (config.evaluate.every if section.best else 0) or steps
    disk = [seconds for step, seconds in had if step % every == 0 or step == steps]
    memory = [seconds for step, seconds in had if step % every and step != steps]
    most = config.recovery.overhead * others
    return (fmean(disk) / every if disk else 0.0) + (min(fmean(memory), most) if memory else 0.0)


class _Cause(NamedTuple):
    """What a rank does: the part of the step that this is, and who does it."""

    name: str
    rank: int


class _Split:
    """A traced step at points of time."""

    def __init__(self, step: TracedStep, loads: Sequence[float]) -> None:
        self.step, self.mesh, self.loads = step, step.mesh, loads
        rows = [step.of(rank) for rank in range(self.mesh.world)]
        self.leaves = [[*_leaves(row)] for row in rows]
        self.starts = [[start for start, _ in leaves] for leaves in self.leaves]
        self.first = min(row[0].start for row in rows)
        self.end = max(each.end for row in rows for each in row)
        self.last = dict(self._last_to_come(rows))
        """{(rank, wait for others): (who is the last of them to wait, since when)}."""
        self.ended = [dict(_ends(row)) for row in rows]
        self.work = [_Work.of(row) for row in rows]
        self.pipelines = {rank: ranks for ranks in pipelines(self.mesh) for rank in ranks}

    def parts(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the seconds of each part, the mean of all ranks, and what there is to say."""
        counts, waited, pooled = defaultdict[str, Counter[int]](Counter), 0, 0
        for point in range(POINTS):
            at = self.first + (point + 0.5) / POINTS * (self.end - self.first)
            own = [self._cause(rank, at, ()) for rank in range(self.mesh.world)]
            busy = {cause.rank for rank, cause in enumerate(own) if cause.name in _WORK and cause.rank == rank}
            for rank, cause in enumerate(own):
                if cause.name not in _WORK or cause.rank == rank:
                    counts[cause.name][cause.rank] += 1
                elif busy & {*self.pipelines[rank]}:
                    pooled += 1
                else:
                    waited += 1
        unit = (self.end - self.first) / POINTS / self.mesh.world
        seconds = {PRODUCTS: 0.0} | {name: ranks.total() * unit for name, ranks in counts.items()}
        even = min(self.bubble, pooled * unit)
        queued = min(fmean(each.queued for each in self.work), seconds[PRODUCTS])
        seconds |= {PRODUCTS: seconds[PRODUCTS] - queued, QUEUED: queued}
        about = {name: self._about(name, ranks) for name, ranks in counts.items() if name != PRODUCTS}
        about |= {BUBBLE: f"of {self.step.schedule}, with stages that are all alike", WAITING: self.culprit[0]}
        about |= {QUEUED: "for cores that others had"}
        about |= {PRODUCTS: slowed} if (slowed := self._slowed(range(self.mesh.world))) else {}
        return {**seconds, BUBBLE: even, WAITING: (pooled + waited) * unit - even}, about

    def _about(self, name: str, ranks: Counter[int]) -> str:
        """Return what there is to say about a part that is due to these ranks."""
        said = [self._between(name), self._whose(ranks), "launches come late" * (name == HOST and any(self.behind))]
        return "; ".join(filter(None, said))

    def _between(self, name: str) -> str:
        """Return whether the ranks of some messages lie on several nodes."""
        dims = axes_of(name)
        nodes = {rank // (self.step.per_node or self.mesh.world) for rank in self.mesh.along(0, *dims)} if dims else {0}
        return f"between nodes of {self.step.per_node} ranks" if len(nodes) > 1 else ""

    def _whose(self, ranks: Counter[int]) -> str:
        """Return the rank that most of a part is due to, if there is one."""
        ((rank, count),) = ranks.most_common(1)
        return f"due to rank {rank}" if self.mesh.world > 2 and count > _MOSTLY * ranks.total() else ""

    def _slowed(self, ranks: Iterable[int]) -> str:
        """Return the first of some ranks whose GPU something slowed down, with its clock, and how many more there
        are."""
        there = dict(enumerate(self.step.gpus))
        found = [(rank, there[rank]) for rank in ranks if SLOWED in there.get(rank, "")]
        others = f", and {len(found) - 1} more" if len(found) > 1 else ""
        return "rank {}: {}".format(*found[0]) + others if found else ""

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
    def culprit(self) -> tuple[str, float]:
        """Whose products take longest, and the seconds by which they are above what they would be if all were alike; 0
        where it is nobody."""
        ranks, busy = range(self.mesh.world), [each.seconds for each in self.work]
        slow = max(ranks, key=lambda rank: busy[rank])
        place = self.mesh.place(slow)
        stage = [rank for rank in ranks if self.mesh.place(rank).pp == place.pp]
        experts = [rank for rank in stage if self.mesh.place(rank).ep == place.ep]
        load = self.loads[place.ep] if self.loads else 1.0
        whose, own, others = f"rank {slow}", [slow], [rank for rank in stage if rank != slow]
        if load > 1 / _ALIKE:
            whose = f"the experts of rank {place.ep} along ep, which have {load:.2f} times the mean's rows"
            own, others = experts, [rank for rank in stage if rank not in experts]
        elif self.mesh.pp > 1 and all(busy[rank] >= _ALIKE * busy[slow] for rank in stage):
            whose, own, others = f"stage {place.pp}", stage, [rank for rank in ranks if rank not in stage]
        here, there = (fmean(busy[rank] for rank in some) if some else 0.0 for some in (own, others))
        if not others or here < there / _ALIKE:
            return "", 0.0
        about = f"for {whose}, whose actions take {here / there:.2f} times the others'"
        if (queued := fmean(self.work[rank].queued for rank in own)) > (1 - _ALIKE) * here:
            about += f"; others had the core for {queued / here:.0%} of them"
        about = "; ".join(filter(None, (about, self._slowed(own))))
        # A rank can be as fast as those that do the same; what stages and experts do is only shared out otherwise.
        even = there if whose == f"rank {slow}" else fmean(busy[rank] for rank in (*own, *others))
        return about, here - even

    @cached_property
    def behind(self) -> list[frozenset[Action]]:
        """Of each rank, the actions for whose launches its device waits: the host is not ahead of it when they end."""
        found = []
        for tracks in self.step.ranks:
            launched = dict(_ends(tracks["host"])) if "device" in tracks else {}
            did = actions(tracks.get("device", ()))
            late = (action for action, x in did if x.end - launched.get(action, x.start) < _AHEAD * x.seconds)
            found.append(frozenset(late))
        return found

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
            name, action = f"{SEND} pp", next((each for each in reversed(chain) if each.kind in ACTIONS), here)
            for source, before in self._awaited(rank, action):
                other = source if at < self.ended[source].get(before, at) else rank
        elif here.kind in (*ACTIONS, RECOMPUTE):
            own = next(each for each in chain if each.kind in (*ACTIONS, RECOMPUTE))
            is_late = Action(own.kind, own.chunk, own.microbatch) in self.behind[rank]  # type: ignore[arg-type]
            name = HOST if is_late else RECOMPUTATION if here.kind == RECOMPUTE else PRODUCTS
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
        """Yield, for each wait for the ranks of a group, which of them is the last to wait, and since when. Who goes on
        before has waited until that one had sent its message, and would wait for it later if not here."""
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
                    yield (rank, each), (late, since)


class _Work(NamedTuple):
    """The seconds that a rank computes in the actions of a step, as long as they usually are, and those of them in
    which others had its core."""

    seconds: float
    queued: float

    @classmethod
    def of(cls, row: Sequence[TracedInterval]) -> _Work:
        took = defaultdict[tuple[str, int], list[_Work]](list)
        for action, each, within in with_waits(row, (RECEIVE, SEND, *COLLECTIVES)):
            queued = each.queued - sum(wait.queued for wait in within)
            took[action.kind, each.chunk].append(cls(each.seconds - sum(wait.seconds for wait in within), queued))
        usual = (len(some) * median(each.seconds for each in some) for some in took.values())
        return cls(sum(usual), sum(each.queued for some in took.values() for each in some))


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
    for action, each in actions(row):
        yield action, each.end
