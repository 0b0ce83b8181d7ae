"""Schedules that are searched for: sound, within their room, and no slower than those with names."""

from dataclasses import replace
from random import Random

import pytest
from drawn_orders import drawn_costs, least_room
from in_flight import takes

from megacore.parallel.enum_errors import SPLIT_BACKWARD
from megacore.parallel.pipeline.schedules import SCHEDULES, Cost, Costs, check_order, simulate
from megacore.parallel.pipeline.search import fits, search
from megacore.parallel.virtual_stages import placement_of

NAMES = [name for name in SCHEDULES if name != "gpipe"]
SIZES = [(stages, chunks) for stages in (1, 2, 3, 5, 8) for chunks in (1, 2, 3)]
CASES = [(name, *sizes) for name in NAMES for sizes in SIZES if takes(name, sizes[1])]


@pytest.mark.in_turn(10)
@pytest.mark.parametrize(("name", "stages", "chunks"), CASES)
def test_what_is_found_ends_within_its_room_and_is_no_slower(name: str, stages: int, chunks: int) -> None:
    """Of drawn costs; where one microbatch has room in all chunks of each stage there is a schedule, else none."""
    rng, late, placement = Random(100 * stages + chunks), name in SPLIT_BACKWARD, placement_of(name)
    for microbatches in (1, stages + 1, 2 * stages):
        own = SCHEDULES[name](stages, chunks, microbatches)
        costs = drawn_costs(stages, chunks, rng)
        least = least_room(costs, late)
        for times in (1.0, 1.5, stages):
            room = [times * each for each in least]
            found = search(costs, microbatches, room, late, placement, [own])
            assert found is not None, (microbatches, times)
            check_order(found, own, placement)
            assert fits(found, costs, room, placement)
            if fits(own, costs, room, placement):
                assert simulate(found, costs, placement).total <= simulate(own, costs, placement).total
        one_lacks = [*least[:-1], 0.99 * least[-1]]
        assert search(costs, microbatches, one_lacks, late, placement) is None


PLAIN, RECOMPUTED = Cost(1, 1, 1, 0.02, 1.0, 1.1), Cost(1, 2, 1, 0.02, 0.1, 1.0)


def times(cost: Cost, *factors: float) -> Costs:
    """Stages that take so many times as long."""
    return [
        [replace(cost, forward=x * cost.forward, inputs=x * cost.inputs, weights=x * cost.weights)] for x in factors
    ]


@pytest.mark.parametrize(
    ("costs", "room", "named", "found"),
    [
        pytest.param(times(PLAIN, 1, 1, 1, 1), 4.2, 0.388, 0.177, id="too little for zb-h1"),
        pytest.param(times(RECOMPUTED, 1, 1, 1, 1), 2.0, 0.385, 0.254, id="recomputed"),
        pytest.param(times(PLAIN, 1, 1, 1, 1), 99.0, 0.135, 0.128, id="even, with room"),
        pytest.param(times(PLAIN, 1, 1.2, 0.9, 1.1, 1, 0.8), 7.5, 0.366, 0.332, id="uneven"),
        pytest.param(times(PLAIN, 1, 1.2, 0.9, 1.1, 1, 0.8), 6.2, 0.690, 0.394, id="uneven, too little for zb-h1"),
    ],
)
def test_bubbles_beside_the_best_with_a_name(costs: Costs, room: float, named: float, found: float) -> None:
    rooms, stages = [room] * len(costs), len(costs)
    known = [SCHEDULES[name](stages, 1, 8) for name in ("1f1b", "zb-h1")]
    best = min(simulate(each, costs).bubble for each in known if fits(each, costs, rooms))
    order = search(costs, 8, rooms, True, known=known[1:])
    assert order is not None
    assert best == pytest.approx(named, abs=1e-3)
    assert simulate(order, costs).bubble == pytest.approx(found, abs=1e-3)
