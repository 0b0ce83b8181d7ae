"""Spikes are told from noise: of many kinds of it, in a warm-up, after a shift; and real spikes are found."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from megacore.config import ScheduleConfig
from megacore.training.callbacks.spikes import FIRST, WINDOW, Spikes
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


@pytest.mark.in_turn(8)
@pytest.mark.parametrize("size", [0.001, 0.02, 0.15])
@pytest.mark.parametrize("kind", ["normal", "laplace", "student", "wandering"])
def test_no_alarm_in_ten_thousand_steps(kind: str, size: float) -> None:
    assert alarms(*curves(kind, size, seed=3)) == []


@pytest.mark.in_turn(2)
@pytest.mark.in_turn(2)
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


@pytest.mark.in_turn(2)
@pytest.mark.quick
@pytest.mark.parametrize(("kind", "size"), [("normal", 0.02), ("student", 0.01)])
def test_spikes_are_found_where_they_are(kind: str, size: float) -> None:
    loss, norm = curves(kind, size, seed=9, steps=2000)
    high, steep, places = loss.copy(), norm.copy(), [400, 900, 1999]
    high[places] *= 2
    steep[places] *= 12
    assert alarms(high, norm) == places == alarms(loss, steep)


@pytest.mark.quick
def test_a_spike_says_what_it_is_above() -> None:
    spikes = Spikes()
    for value in range(FIRST):
        assert dict(spikes.limits) == {"loss": math.inf, "grad_norm": math.inf}
        spikes = spikes.after(value, 1.0, {"loss": 2.0 if value else 1.0, "grad_norm": 0.5})
    assert dict(spikes.limits) == pytest.approx({"loss": 2.5, "grad_norm": 1.5})
    assert spikes.found({"loss": 7.0, "grad_norm": 1.4}) == ["loss 7 (median 2, limit 2.5)"]
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
