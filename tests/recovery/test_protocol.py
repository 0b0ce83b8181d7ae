"""What the ranks agree on after a fault, and what the agent does until they can."""

from __future__ import annotations

import math

import pytest

from megacore.recovery.protocol import (
    Died,
    Faulted,
    Generations,
    Go,
    Limits,
    Over,
    Ready,
    Recovered,
    Resolution,
    Spawn,
    Status,
    Way,
    resolve,
)

DP2 = {0: (0, 1), 1: (0, 1)}
ALONE = {0: (0,), 1: (1,)}


def ways(resolution: Resolution | None) -> list[Way]:
    assert resolution is not None
    return list(resolution.ways.values())


@pytest.mark.quick
def test_who_has_the_commit_lets_the_others_roll_forward() -> None:
    contributed = [Status(rank, 4).contribute(1) for rank in (0, 1)]
    statuses = [contributed[0], contributed[1].commit(1, [2.5, math.nan])]
    found = resolve(statuses, ALONE)
    assert ways(found) == [Way("forward", 0, 0), Way("keep", 1, 1)]
    assert found == resolve(statuses[::-1], ALONE) and found is not None and found.version == 5
    assert ways(resolve(contributed, ALONE)) == [Way("keep", 0, 0), Way("keep", 1, 1)]


def test_a_status_travels_exactly() -> None:
    status = Status(3, 6, copies={1: frozenset({4, 6}), 3: frozenset({4})}).contribute(2)
    status = status.commit(2, [0.1, math.nan, math.inf, -0.0])
    back = Status.from_json(status.to_json())
    assert repr(back) == repr(status)


@pytest.mark.quick
def test_a_dead_rank_is_replaced_before_the_next_generation() -> None:
    agent = Generations({0: 0, 1: 0}, lambda cause, before: "", Limits())
    assert agent.begin(0) == [Spawn(0, 1, 0), Spawn(1, 1, 0)]
    assert agent.on(Ready(1, 0, 1, 0)) == []
    assert agent.on(Ready(1, 1, 1, 0)) == [Go(0, 1), Go(1, 1)]
    assert agent.on(Recovered(2, 0, 1, 1, 0)) + agent.on(Recovered(2, 1, 1, 1, 0)) == [] and agent.trains
    assert agent.on(Died(3, 1, 1, -9)) == [Over(0, 1), Spawn(1, 2, 0)]
    assert agent.on(Faulted(3, 0, 1, 1)) == agent.on(Ready(3, 1, 1, 0)) == agent.on(Ready(4, 0, 1, 1)) == []
    assert agent.on(Ready(4, 1, 2, 0)) == [Go(0, 2), Go(1, 2)]
