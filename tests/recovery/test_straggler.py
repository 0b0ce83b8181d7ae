"""Slow ranks are named with the cause, once, and noise never is."""

import numpy as np

from megacore.recovery.events import Event
from megacore.recovery.phases import Phase, Reading
from megacore.recovery.straggler import STEPS, Stragglers
from parallel.weights.layout import MeshShape

USUAL: dict[Phase, float] = {"data": 0.001, "forward": 0.1, "backward": 0.2, "update": 0.03, "save": 0.0}


def told(shape: MeshShape, steps: int, busy: dict[Phase, np.ndarray], stride: int = 1) -> list[Event]:
    """What is told of ranks that spend busy[phase][step, rank] seconds, looked at every ``stride`` steps."""
    events = list[Event]()
    watch = Stragglers(shape, events.append)
    spent = {phase: np.cumsum(np.broadcast_to(each, (steps, shape.world)), axis=0) for phase, each in busy.items()}
    for step in range(0, steps, stride):
        seconds = {
            rank: {phase: float(each[step, rank]) for phase, each in spent.items()} for rank in range(shape.world)
        }
        watch.see({rank: Reading(step, "forward", 1.0, {}, seconds[rank]) for rank in range(shape.world)})
    return events


def series(shape: MeshShape, steps: int, noise: float = 0.0) -> dict[Phase, np.ndarray]:
    rng = np.random.default_rng(3)
    return {phase: each * np.exp(noise * rng.standard_normal((steps, shape.world))) for phase, each in USUAL.items()}


def test_a_slow_rank_is_named_once_with_its_cause() -> None:
    shape = MeshShape(dp=4)
    causes: list[tuple[Phase, float, str]] = [
        ("backward", 0.09, "compute"),
        ("data", 0.1, "data"),
        ("save", 0.1, "save"),
    ]
    for phase, more, cause in causes:
        busy = series(shape, 300, 0.1)
        busy[phase][100:, 2] += more
        (event,) = told(shape, 300, busy)
        assert (event.kind, event.rank) == ("straggler", 2) and event.detail.startswith(f"{cause}: ")
        assert 100 + STEPS <= (event.step or 0) < 180


def test_who_is_little_slower_or_not_for_long_is_not_named() -> None:
    shape = MeshShape(dp=4)
    busy = series(shape, 300)
    busy["backward"][100:, 2] += 0.05
    busy["forward"][100 : 100 + STEPS // 2, 1] += 0.1
    assert not told(shape, 300, busy)


def test_who_is_slow_again_is_named_again() -> None:
    busy = series(MeshShape(dp=2), 600)
    busy["forward"][100:200, 1] += 0.2
    busy["forward"][400:500, 1] += 0.2
    assert [event.rank for event in told(MeshShape(dp=2), 600, busy)] == [1, 1]


def test_places_with_other_work_are_not_compared() -> None:
    shape = MeshShape(pp=2, dp=2)
    busy = series(shape, 200)
    busy["forward"][:, 2:] *= 3
    assert not told(shape, 200, busy)
    busy["forward"][:, 3] *= 2
    assert [event.rank for event in told(shape, 200, busy)] == [3]


def test_random_load_is_no_straggler_over_10_000_steps() -> None:
    shape, rng = MeshShape(dp=4), np.random.default_rng(5)
    busy = series(shape, 10_000, 0.3)
    busy["data"] += rng.exponential(0.03, (10_000, 4)) * (rng.random((10_000, 4)) < 0.1)
    busy["forward"] += rng.pareto(3.0, (10_000, 4)) * 0.01
    for stride in (1, 7):
        assert not told(shape, 10_000, busy, stride)


def test_a_rank_that_begins_anew_is_measured_anew() -> None:
    events = list[Event]()
    watch = Stragglers(MeshShape(dp=2), events.append)
    for step in range(200):
        # A newcomer's page begins at nothing; the survivor's step goes back by one.
        seconds = [0.1 * step, 0.1 * (step - 100 if step >= 100 else step)]
        at = step - 1 if step >= 100 else step
        watch.see({rank: Reading(at, "forward", 1.0, {}, {"forward": each}) for rank, each in enumerate(seconds)})
    assert not events
