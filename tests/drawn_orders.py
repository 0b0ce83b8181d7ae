"""Orders of pipelines that are searched for drawn costs, in as little room as there can be and in more."""

from __future__ import annotations

from random import Random

from megacore.parallel.enum_errors import SPLIT_BACKWARD
from megacore.parallel.pipeline.schedules import Cost, Costs, Schedule
from megacore.parallel.pipeline.search import search
from megacore.parallel.virtual_stages import placement_of


def drawn_costs(stages: int, chunks: int, rng: Random) -> Costs:
    """Return costs of stages that are all unlike."""
    send = rng.choice((0.0, 0.1))

    def cost() -> Cost:
        forward, inputs, weights = (rng.uniform(0.5, 1.5) for _ in range(3))
        return Cost(forward, inputs, weights, send, rng.uniform(0.1, 1), rng.uniform(0.1, 1))

    return [[cost() for _ in range(chunks)] for _ in range(stages)]


def least_room(costs: Costs, late: bool) -> list[float]:
    """Return the bytes of each stage for one microbatch in all of its chunks."""
    more = (max(0.0, *(each.waiting - each.kept for each in row)) if late else 0.0 for row in costs)
    return [sum(each.kept for each in row) + over for row, over in zip(costs, more, strict=True)]


def drawn_order(seed: int, name: str, stages: int, chunks: int, microbatches: int) -> Schedule:
    """Return an order of the actions of the schedule with this name."""
    rng, late = Random(seed), name in SPLIT_BACKWARD
    costs, times = drawn_costs(stages, chunks, rng), rng.choice((1.0, 1.3, 2.0, 99.0))
    room = [times * least for least in least_room(costs, late)]
    order = search(costs, microbatches, room, late, placement_of(name))
    assert order is not None
    return order
