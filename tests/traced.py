"""Traces of steps that never ran: of a schedule on so many stages, what its actions take, and what befalls some."""

from collections.abc import Callable, Iterable

from megacore.parallel.pipeline.schedules import SCHEDULES, Action, Kind, dependencies, simulate
from megacore.parallel.weights.layout import MeshShape
from megacore.training.traces import COMPUTE, TracedInterval, TracedStep

DATA_S, TAIL_S = 0.002, 0.01


def traced(
    name: str,
    stages: int,
    microbatches: int,
    takes: Callable[[int, Action], float],
    waits: Callable[[int, Action], float] = lambda stage, action: 0.0,
) -> TracedStep:
    """A step, after 2 ms for data: 10 ms of reduction at its end, which begin on all stages at once.

    Args:
        takes: The seconds of an action of a stage.
        waits: The seconds that the host does something else before it.
    """
    schedule = SCHEDULES[name](stages, 1, microbatches)
    back: Kind = "I" if any(action.kind == "I" for action in schedule[0]) else "B"
    order = sorted(
        (x.start, s, at, x.action) for s, row in enumerate(simulate(schedule).spans) for at, x in enumerate(row)
    )
    end, free, rows = (
        dict[tuple[int, Action], float](),
        [DATA_S] * stages,
        [list[TracedInterval]() for _ in range(stages)],
    )
    for _, stage, _, action in order:
        asked = free[stage] + waits(stage, action)
        needed = [end[each] for each in dependencies(action, stage, stages, 1, back) if each[0] != stage]
        start = max([asked, *needed])
        free[stage] = end[stage, action] = start + takes(stage, action)
        at = action.chunk, action.microbatch
        rows[stage].append(TracedInterval(action.kind, asked, free[stage], *at))
        if needed:
            rows[stage].append(TracedInterval("receive", asked, start, *at))
    last = max(free)
    ranks = []
    for row, done in zip(rows, free, strict=True):
        phases = [
            TracedInterval("data", 0.0, DATA_S),
            TracedInterval(COMPUTE, DATA_S, done),
            TracedInterval("reduce", done, last + TAIL_S),
            TracedInterval("all_reduce", done, last, axis="pp"),
        ]
        ranks.append({"host": tuple(sorted([*phases, *row], key=lambda each: (each.start, -each.end)))})
    return TracedStep(50, MeshShape(pp=stages), name, (0.0,) * stages, tuple(ranks))


def lockstep(
    shape: MeshShape,
    axis: str,
    takes: Callable[[int], float],
    message_s: float = 0.001,
    within: Callable[[int, TracedInterval], Iterable[TracedInterval]] = lambda rank, action: (),
    per_node: int = 0,
) -> TracedStep:
    """A step of four microbatches without stages, all of whose ranks send each other something at the end of each
    action.

    Args:
        axis: The axes along which they do.
        takes: The seconds that a rank computes in a forward; a backward takes twice as long.
        message_s: The seconds of a message.
        within: What else there is in an action before its message.
    """
    rows, now = [[TracedInterval("data", 0.0, DATA_S)] for _ in range(shape.world)], DATA_S
    for kind, microbatch in [(kind, m) for m in range(4) for kind in "FB"]:
        ends = [now + takes(rank) * (1 + (kind == "B")) for rank in range(shape.world)]
        for rank, (row, end) in enumerate(zip(rows, ends, strict=True)):
            action = TracedInterval(kind, now, max(ends) + message_s, 0, microbatch)
            computed = action._replace(end=end)
            row += [action, *within(rank, computed), TracedInterval("all_gather", end, action.end, axis=axis)]
        now = max(ends) + message_s
    whole = (TracedInterval(COMPUTE, DATA_S, now), TracedInterval("reduce", now, now + TAIL_S))
    ranks = tuple({"host": tuple(sorted([*whole, *row], key=lambda x: (x.start, -x.end)))} for row in rows)
    return TracedStep(50, shape, "1f1b", (0.0,) * shape.world, ranks, per_node)
