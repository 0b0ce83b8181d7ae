"""The messages of a schedule's stages, one after the other."""

from megacore.parallel.enum_errors import Placement
from megacore.parallel.pipeline.schedules import Direction, Message, Schedule, sent_after


def messages(schedule: Schedule, placement: Placement = "loop") -> tuple[dict[Direction, tuple[Message, ...]], ...]:
    """What each stage sends on its two channels, in the order in which it sends."""
    stages = len(schedule)
    last = max(action.chunk for row in schedule for action in row) * stages + stages - 1
    plans: list[dict[Direction, tuple[Message, ...]]] = []
    for stage, row in enumerate(schedule):
        sent = [sent_after(action, stage, stages, last, placement) for action in row]
        plans.append(
            {
                "forward": tuple(x.message for x in sent if x and x.direction == "forward"),
                "backward": tuple(x.message for x in sent if x and x.direction == "backward"),
            }
        )
    return tuple(plans)


def arrivals(schedule: Schedule, stage: int, placement: Placement = "loop") -> dict[Direction, tuple[Message, ...]]:
    """What a stage must receive from its two neighbours, in the order in which they send it."""
    plans, stages = messages(schedule, placement), len(schedule)
    return {
        "forward": plans[(stage - 1) % stages]["forward"],
        "backward": plans[(stage + 1) % stages]["backward"],
    }
