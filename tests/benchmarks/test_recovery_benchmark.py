"""The benchmark of recovery: its faults, what it makes of what it has seen, and a rank of the peers."""

from pathlib import Path

import pytest

from benchmarks import recovery
from benchmarks.recovery import BATCH, FIRST, FinishedStep, RunCost, Strike

HALF = BATCH // 2


def finished(step: int, at: float, first: int = 0, end: int = BATCH) -> FinishedStep:
    """Return a step, and of its samples those from the first to the end."""
    return FinishedStep(step, at, (step - 1) * BATCH + first, (step - 1) * BATCH + end)


@pytest.mark.quick
def test_a_run_that_goes_back_does_steps_twice_and_loses_no_sample() -> None:
    """A step takes a second; after step 40 is killed at 40.5, the run is back at 30 at 50."""
    strike = Strike("node", 40, 1)
    done = [finished(step, float(step)) for step in range(1, 41)]
    done += [finished(step, step + 19.0) for step in range(31, 61)]
    cost = RunCost.of(done[::-1], [(strike, 40.5, 63.0)], 60)
    (got,) = cost.faults
    assert (got.strike, got.pause_s, got.back_s, got.again) == (strike, 9.5, 22.5, 10)
    assert cost.lost == 0 and cost.whole_s == 79.0 - FIRST
    assert cost.pace_s == 1.0 and cost.goodput == 40.0 / 59.0
    straight = RunCost.of([finished(step, step / 2) for step in range(1, 61)], [], 60)
    assert (straight.faults, straight.whole_s, straight.pace_s, straight.goodput) == ([], 20.0, 0.5, 1.0)


@pytest.mark.quick
def test_what_nobody_has_done_is_lost() -> None:
    """Each of two replicas does its half; one is gone for ten steps, which the other does at the same pace."""
    done = [finished(step, float(step), 0, HALF) for step in range(1, 61)]
    done += [finished(step, float(step), HALF) for step in range(1, 61) if not 40 < step <= 50]
    cost = RunCost.of(done, [(Strike("rank", 40, 1), 40.25, 51.0)], 60)
    assert cost.lost == 10 * HALF and cost.faults[0].again == 0 and cost.faults[0].pause_s == 0.75
    assert cost.goodput == 35 / 40


@pytest.mark.quick
def test_a_run_that_does_not_go_on_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(recovery.ByTorchrun):
        def command(self, node: int) -> list[str]:
            return ["sleep", "60"]

    monkeypatch.setattr(recovery, "LIMIT_S", 0.2)
    monkeypatch.setitem(recovery.WAYS, "silent", Silent)
    recovery.run_one(tmp_path / "silent-1", "silent", {}, 600, [])
    why = (tmp_path / "silent-1" / recovery.ENDED).read_text().partition("\n")[0]
    assert why == "all nodes did not come after step 0, for 0 s"
    rows = recovery.table([], [("silent", "1", why)]).splitlines()
    assert rows[2].startswith("| silent | - | - |") and rows[-1].endswith(f"has not come to its end: {why}")
