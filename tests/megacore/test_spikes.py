"""Spikes are told from noise: of many kinds of it, in a warm-up, after a shift; and real spikes are found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from megacore.config import ScheduleConfig
from megacore.training.callbacks.spikes import FIRST, WINDOW, Spike, Spikes
from megacore.training.lr import learning_rate

STEPS = 10_000
Curve = npt.NDArray[np.float64]


def alarms(losses: Iterable[float], norms: Iterable[float], lrs: Sequence[float] | None = None) -> list[int]:
    """The records, from 0, at which there is a spike."""
    spikes, found = Spikes(), list[int]()
    for at, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        record = {"loss": float(loss), "grad_norm": float(norm)}
        if spikes.found(record):
            found.append(at)
        spikes = spikes.after(at, 1.0 if lrs is None else lrs[at], record)
    return found


def noise(kind: str, steps: int, seed: int) -> Curve:
    """Noise of a standard deviation of 1."""
    rng = np.random.default_rng(seed)
    if kind == "laplace":
        return rng.laplace(size=steps) / math.sqrt(2)
    if kind == "student":
        return rng.standard_t(5, steps) / math.sqrt(5 / 3)
    drawn = rng.normal(size=steps)
    if kind == "wandering":  # data of another kind every few dozen steps
        for at in range(1, steps):
            drawn[at] = 0.95 * drawn[at - 1] + math.sqrt(1 - 0.95**2) * drawn[at]
    return drawn


def curves(kind: str, size: float, seed: int, steps: int = STEPS) -> tuple[Curve, Curve]:
    """A loss that falls from 10.5 to 2.6 with noise of this relative size, and a norm that falls and then rises, with
    three times of it."""
    at = np.arange(steps)
    loss = 2 + 8.5 * (1 + at / 30) ** -0.45
    norm = 1 + 6 * np.exp(-at / 60) + 2 * at / steps
    return loss * np.exp(size * noise(kind, steps, seed)), norm * np.exp(3 * size * noise(kind, steps, seed + 1))


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("size", [0.001, 0.02, 0.15])
@pytest.mark.parametrize("kind", ["normal", "laplace", "student", "wandering"])
def test_no_alarm_in_ten_thousand_steps(kind: str, size: float) -> None:
    assert alarms(*curves(kind, size, seed=3)) == []


@pytest.mark.quick
def test_the_quickstart_s_own_curve_has_none() -> None:
    assert len(QUICKSTART) > 100 and alarms(*zip(*QUICKSTART, strict=True)) == []


@pytest.mark.quick
@pytest.mark.parametrize("name", ["cosine", "wsd", "linear", "constant"])
def test_a_schedule_is_no_spike(name: str) -> None:
    """A norm that rises tenfold in the warm-up, twice, and a loss that follows the rate."""
    schedule = ScheduleConfig(name=name, warmup_steps=300)  # type: ignore[arg-type]
    rates = [learning_rate(step, schedule, 1e-3, 1000) for step in range(1, 1001)] * 2
    loss, _ = curves("normal", 0.002, 5, len(rates))
    norm = np.exp(0.01 * noise("normal", len(rates), 6))
    rises = np.array(rates) / 1e-3
    assert alarms(loss * (1 + 0.5 * rises), norm * (1 + 9 * rises), rates) == []
    sudden = norm * np.where(rises < 1, 1, 10)  # with the last step of the warm-up
    assert alarms(loss, sudden, rates) == [] and len(alarms(loss, sudden)) > 1


@pytest.mark.quick
@pytest.mark.parametrize("at", [400, 900, 1999])
@pytest.mark.parametrize(("kind", "size", "factor"), [("normal", 0.02, 2.0), ("student", 0.01, 2.0)])
def test_a_spike_is_found_where_it_is(at: int, kind: str, size: float, factor: float) -> None:
    loss, norm = curves(kind, size, seed=9, steps=2000)
    high, steep = loss.copy(), norm.copy()
    high[at] *= factor
    steep[at] *= 12
    assert alarms(high, norm) == [at] == alarms(loss, steep)


@pytest.mark.quick
def test_a_spike_says_what_it_is_above() -> None:
    spikes = Spikes()
    for value in range(FIRST):
        assert dict(spikes.limits) == {"loss": math.inf, "grad_norm": math.inf}
        spikes = spikes.after(value, 1.0, {"loss": 2.0 if value else 1.0, "grad_norm": 0.5})
    assert dict(spikes.limits) == pytest.approx({"loss": 2.5, "grad_norm": 1.5})
    found = spikes.found({"loss": 7.0, "grad_norm": 1.4})
    assert found == [Spike("loss", 7.0, pytest.approx(2.0), pytest.approx(2.5))]  # type: ignore[arg-type]
    assert str(found[0]) == "loss 7 (median 2, limit 2.5)"
    # What is no number has its own answer, and is no record.
    assert spikes.found({"loss": math.nan, "grad_norm": math.inf}) == []
    spikes = spikes.after(FIRST, 1.0, {"loss": math.nan, "grad_norm": math.inf})
    assert dict(spikes.limits) == pytest.approx({"loss": 2.5, "grad_norm": 1.5})


@pytest.mark.quick
def test_a_level_that_stays_becomes_the_level() -> None:
    loss, norm = curves("normal", 0.01, 1, 1000)
    loss[500:] *= 3
    found = alarms(loss, norm)
    assert found == [*range(500, 500 + len(found))] and WINDOW / 2 - 8 <= len(found) <= WINDOW / 2 + 1


# fmt: off
QUICKSTART = [
    (8.39, 4.43), (8.24, 4.35), (8.04, 3.65), (7.89, 2.88), (7.79, 2.12), (7.67, 1.72), (7.54, 1.61), (7.4, 1.28),
    (7.23, 1.47), (6.9, 1.3), (6.86, 0.976), (6.78, 1.26), (6.73, 1.91), (6.35, 5.03), (6.48, 0.783), (6.77, 1.9),
    (6.55, 2.1), (6.64, 1.21), (6.77, 3.88), (6.56, 1.49), (6.73, 1.05), (6.46, 0.992), (6.2, 2.66), (6.3, 1.6),
    (6.43, 1.19), (5.92, 1.42), (6.06, 1.82), (6.43, 1.46), (6.39, 1.47), (6.21, 1.48), (6.39, 1.05), (6.3, 1.03),
    (5.96, 1.11), (5.95, 1.59), (6.03, 1.96), (5.71, 1.1), (5.97, 0.87), (6.1, 1.13), (5.87, 0.864), (5.76, 0.815),
    (5.81, 0.967), (5.88, 0.847), (5.97, 0.831), (5.45, 0.807), (6.07, 0.784), (5.94, 0.786), (5.96, 0.823),
    (5.79, 0.998), (5.73, 0.785), (5.35, 0.841), (5.58, 1.06), (5.43, 0.692), (5.64, 0.838), (6.12, 0.988),
    (5.63, 0.748), (5.79, 0.866), (5.83, 0.905), (5.48, 0.705), (5.64, 0.85), (5.5, 0.886), (5.32, 0.74),
    (5.39, 0.807), (5.27, 0.84), (5.66, 0.848), (5.73, 0.751), (5.63, 0.784), (5.3, 0.844), (5.38, 0.78),
    (5.36, 0.865), (5.34, 0.671), (5.56, 0.656), (5.16, 0.885), (5.09, 0.741), (5.11, 0.685), (5.58, 0.826),
    (5.52, 0.807), (5.34, 1.4), (5.34, 0.722), (5.2, 0.832), (5.18, 0.816), (5.63, 0.752), (5.17, 0.687),
    (5.07, 0.673), (5.37, 0.803), (5.09, 0.804), (5.14, 0.693), (5.25, 0.678), (4.42, 0.767), (5.12, 0.629),
    (5.03, 0.633), (5.11, 0.729), (4.89, 0.661), (4.92, 0.577), (4.71, 0.697), (4.68, 0.701), (5.21, 0.613),
    (5.4, 0.617), (5.46, 0.64), (5, 0.653), (5.02, 0.658), (5.2, 0.655), (5.03, 0.584), (5.23, 0.582), (4.89, 0.674),
    (5.46, 0.684), (5.01, 0.675), (5.26, 0.687), (4.68, 0.686), (4.46, 0.68), (4.85, 0.864), (4.78, 0.608),
    (4.64, 0.63), (4.84, 0.73), (4.78, 0.667), (5.08, 0.751), (5.35, 0.675), (4.98, 0.657), (4.97, 0.637),
    (5.08, 0.575), (4.59, 0.689), (4.67, 0.596), (4.9, 0.646), (5.01, 0.713), (5.12, 0.629), (4.72, 0.631),
    (4.48, 0.64), (4.61, 0.657), (4.41, 0.628), (4.64, 0.608), (4.65, 0.558), (5, 0.627), (4.62, 0.61), (4.93, 0.624),
    (5.15, 0.597), (4.91, 0.665), (4.38, 0.668), (5.07, 0.84), (5.11, 0.687), (4.86, 0.61), (4.25, 0.603),
    (4.76, 0.681), (4.67, 0.664), (4.64, 0.711), (4.87, 0.595), (4.8, 0.69), (4.09, 0.631), (4.81, 0.725),
    (4.63, 0.633), (5.05, 0.636), (4.73, 0.665), (4.54, 0.602), (4.93, 0.757), (4.84, 0.556), (4.9, 0.64),
    (4.68, 0.586), (4.77, 0.601), (4.95, 0.659), (4.37, 0.537), (4.46, 0.66), (4.67, 0.666),
]
# fmt: on
"""(loss, gradient norm) of the steps of launch/recipes/quickstart.yaml, as they were logged."""


@pytest.mark.quick
def test_a_run_that_has_gone_back_knows_what_it_knew() -> None:
    """As many steps as the median is of; what was a spike when it was recorded is one still."""
    rng, spikes = np.random.default_rng(0), Spikes()
    known = dict[int, tuple[dict[str, float], bool]]()
    for step in range(1, 4 * WINDOW):
        value = float(rng.normal(10)) * (100 if step % 50 == 0 else 1)
        lr = 2.0 if step == 2 * WINDOW + 9 else 1.0
        spikes = spikes.after(step, lr, {"loss": value, "grad_norm": value})
        known[step] = dict(spikes.limits), spikes.spiking
    assert len(set(map(str, known.values()))) > 100 and known[350][1]
    for step in range(3 * WINDOW - 1, 4 * WINDOW):
        before = spikes.until(step)
        assert (dict(before.limits), before.spiking) == known[step]
