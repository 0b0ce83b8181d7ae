"""A traced step and its schedule laid on each other: what took longer than the schedule alone would have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from megacore.parallel.enum_errors import Placement
from megacore.parallel.pipeline.schedules import (
    RECEIVE,
    SEND,
    Action,
    Cost,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    TimedAction,
    Timeline,
    dependencies,
    simulate,
)
from megacore.parallel.virtual_stages import placement_of
from megacore.parallel.weights.layout import MeshShape
from megacore.training.traces import ACTIONS, COMPUTE, TracedInterval, TracedStep


@dataclass(frozen=True)
class Gap:
    """Something that took a stage longer than planned, in seconds: the wait before an action, or the action itself."""

    stage: int
    action: Action
    took: float
    planned: float
    reason: str

    @property
    def seconds(self) -> float:
        return self.took - self.planned


@dataclass(frozen=True)
class ComparedSchedule:
    """A pipeline of a traced step, a rank for each stage, beside its schedule, the actions in the order in which they
    were run, which is simulated with the medians of what they took without waiting for other stages (``costs``). Times
    count from the first action of the step; a real one begins when what it waits for is there. ``received``: of each
    stage, the seconds that each action waited for others."""

    ranks: tuple[int, ...]
    schedule: Schedule
    costs: Costs
    real: Timeline
    planned: Timeline
    received: tuple[tuple[float, ...], ...]
    placement: Placement

    @classmethod
    def last(cls, traced: TracedStep) -> ComparedSchedule:
        """Lay the pipeline that was last to end on its schedule; errors are those of :meth:`of`."""
        ends = {ranks: max(_end(traced, rank) for rank in ranks) for ranks in pipelines(traced.mesh)}
        return cls.of(traced, max(ends, key=lambda ranks: ends[ranks]))

    @classmethod
    def of(cls, traced: TracedStep, ranks: tuple[int, ...]) -> ComparedSchedule:
        """Lay a pipeline, of these ranks, on its schedule. Raises ScheduleError: the actions of a trace are no
        schedule; the message names the step."""
        found = [with_waits(traced.of(rank), (RECEIVE, SEND)) for rank in ranks]
        done = [[(action, each, sum(wait.seconds for wait in own)) for action, each, own in row] for row in found]
        first = min((each.start + waited for row in done for _, each, waited in row[:1]), default=0.0)
        spans = tuple(
            tuple(TimedAction(action, each.start + waited - first, each.end - first) for action, each, waited in row)
            for row in done
        )
        schedule = tuple(tuple(span.action for span in row) for row in spans)
        chunks = 1 + max((action.chunk for row in schedule for action in row), default=0)
        costs = [[_cost(row, chunk) for chunk in range(chunks)] for row in spans]
        placement = placement_of(traced.schedule)
        try:
            planned = simulate(schedule, costs, placement)
        except ScheduleError as error:
            raise ScheduleError(f"step {traced.step}: {error}") from error
        received = tuple(tuple(waited for _, _, waited in row) for row in done)
        return cls(ranks, schedule, costs, Timeline(spans, planned.held), planned, received, placement)

    def gaps(self, most: int) -> list[Gap]:
        """Return the largest of them, largest first."""
        return sorted((each for each in self._gaps() if each.seconds > 0), key=lambda each: -each.seconds)[:most]

    def _gaps(self) -> Iterator[Gap]:
        for stage, (real, planned) in enumerate(zip(self.real.spans, self.planned.spans, strict=True)):
            pairs = zip(_idle(real), _idle(planned), real, planned, self.received[stage], strict=True)
            for idle, meant, (action, start, end), (_, start_planned, end_planned), received in pairs:
                reason = self._missing(stage, action) if received > idle / 2 else "its host did something else"
                yield Gap(stage, action, idle, meant, reason)
                yield Gap(stage, action, end - start, end_planned - start_planned, "it took longer than others like it")

    def _missing(self, stage: int, action: Action) -> str:
        """Return what an action has waited for."""
        kinds = {each.kind for each in self.schedule[stage]}
        back: Kind = "I" if "I" in kinds else "B"
        found = dependencies(action, stage, len(self.schedule), len(self.costs[0]), back, self.placement)
        return " and ".join(f"{before!r} of stage {source}" for source, before in found if source != stage)


def pipelines(mesh: MeshShape) -> list[tuple[int, ...]]:
    """Return the ranks of each pipeline, by stage."""
    return [*dict.fromkeys(mesh.along(rank, "pp") for rank in range(mesh.world))]


def _end(traced: TracedStep, rank: int) -> float:
    return max((each.end for each in traced.of(rank) if each.kind in ACTIONS), default=0.0)


def actions(row: Sequence[TracedInterval]) -> Iterator[tuple[Action, TracedInterval]]:
    """Yield each action of the step itself, not of an evaluation behind it. Two that ran in turns come one after the
    other, each as long as its turns were."""
    phase, now = next((each for each in row if each.kind == COMPUTE), None), 0.0
    turns = dict[tuple[Kind, int, int], list[TracedInterval]]()
    for each in row:
        for kind in ACTIONS:
            if each.kind == kind and phase is not None and phase.start <= each.start < phase.end:
                turns.setdefault((kind, each.chunk, each.microbatch), []).append(each)
    for key, some in turns.items():
        start = max(now, some[0].start)
        end = some[-1].end + (start - some[0].start) - sum(b.start - a.end for a, b in pairwise(some))
        now = end if len(some) > 1 else 0.0
        yield (
            Action(*key, beside=key[0] == "F" and len(some) > 1),
            some[0]._replace(start=start, end=end, queued=sum(each.queued for each in some)),
        )


def with_waits(
    row: Sequence[TracedInterval], kinds: Sequence[str]
) -> Iterator[tuple[Action, TracedInterval, Sequence[TracedInterval]]]:
    """Yield each action of the step itself, and its waits of these kinds."""
    waits = [each for each in row if each.kind in kinds]
    starts = [each.start for each in waits]
    for action, each in actions(row):
        yield action, each, waits[bisect_left(starts, each.start) : bisect_left(starts, each.end)]


def _cost(row: Sequence[TimedAction], chunk: int) -> Cost:
    """Return the medians of what the actions of a chunk took; a backward that is not split has them in one part."""

    def of(kind: Kind) -> float:
        return median(
            [end - start for action, start, end in row if (action.kind, action.chunk) == (kind, chunk)] or [0]
        )

    return Cost(of("F"), of("B") or of("I"), of("W"))


def _idle(row: Sequence[TimedAction]) -> list[float]:
    """Return the seconds before each action in which a stage did none."""
    return [row[0].start, *(after.start - before.end for before, after in pairwise(row))]
