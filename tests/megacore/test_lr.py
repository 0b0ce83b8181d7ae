"""Learning-rate schedules against values worked out by hand."""

from typing import Literal

import pytest

from megacore.config import ScheduleConfig
from megacore.training.lr import learning_rate

Name = Literal["cosine", "linear", "wsd", "constant"]


def rates(schedule: ScheduleConfig, steps: int, base: float = 1.0) -> list[float]:
    return [learning_rate(step, schedule, base, steps) for step in range(1, steps + 1)]


BY_HAND = {
    "linear to zero": (ScheduleConfig(name="linear", warmup_steps=2, min_ratio=0.0), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
    "linear without warm-up starts at the base": (ScheduleConfig(name="linear", min_ratio=0.2), [1.0, 0.8, 0.6, 0.4]),
    "linear that ends early stays at the floor": (
        ScheduleConfig(name="linear", decay_steps=2, min_ratio=0.5),
        [1.0, 0.75, 0.5, 0.5, 0.5],
    ),
    "linear beyond the run": (ScheduleConfig(name="linear", decay_steps=10, min_ratio=0.0), [1.0, 0.9, 0.8]),
    # cos of 0, 60, 90 and 120 degrees is 1, 1/2, 0 and -1/2.
    "cosine": (
        ScheduleConfig(name="cosine", decay_steps=6, min_ratio=0.0),
        [1.0, (1 + 3**0.5 / 2) / 2, 0.75, 0.5, 0.25, (1 - 3**0.5 / 2) / 2, 0.0],
    ),
    "warm-up then cosine to a tenth": (
        ScheduleConfig(name="cosine", warmup_steps=4, min_ratio=0.1),
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.55],
    ),
    "warm-up, stable, decay": (
        ScheduleConfig(name="wsd", warmup_steps=2, decay_steps=4, min_ratio=0.0),
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25],
    ),
    "wsd decays over a tenth of the run": (ScheduleConfig(name="wsd", min_ratio=0.0), [1.0] * 18 + [1.0, 0.5]),
    "constant": (ScheduleConfig(name="constant", warmup_steps=3, min_ratio=0.1), [1 / 3, 2 / 3, 1.0, 1.0, 1.0]),
}


@pytest.mark.parametrize(("schedule", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_rates_by_hand(schedule: ScheduleConfig, expected: list[float]) -> None:
    assert rates(schedule, len(expected)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_after_the_run_the_rate_is_the_floor(name: Name) -> None:
    schedule = ScheduleConfig(name=name, warmup_steps=3, min_ratio=0.05)
    assert learning_rate(21, schedule, 2.0, 20) == pytest.approx(0.1)
    assert learning_rate(500, schedule, 2.0, 20) == pytest.approx(0.1)


def test_a_long_warmup_leaves_wsd_what_there_is_for_the_decay() -> None:
    assert ScheduleConfig(name="wsd", warmup_steps=19).length_of_decay(20) == 1
    assert ScheduleConfig(name="wsd", warmup_steps=5).length_of_decay(20) == 2
