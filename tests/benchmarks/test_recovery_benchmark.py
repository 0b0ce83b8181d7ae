"""The benchmark of recovery: its faults, what it makes of what it has seen, and a rank of the peers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks import recovery
from benchmarks.recovery import BATCH, FIRST, FinishedStep, Lines, RunCost, Strike, distance, strikes

HALF = BATCH // 2


def finished(step: int, at: float, first: int = 0, end: int = BATCH) -> FinishedStep:
    """Return a step, and of its samples those from the first to the end."""
    return FinishedStep(step, at, (step - 1) * BATCH + first, (step - 1) * BATCH + end)


@pytest.mark.quick
def test_every_round_has_each_kind_of_fault_in_an_order_of_its_own() -> None:
    rounds = [strikes(number, 600) for number in range(1, 20)]
    assert rounds == [strikes(number, 600) for number in range(1, 20)]
    for faults in rounds:
        assert sorted(each.kind for each in faults) == sorted(recovery.KINDS)
        assert all(each.node == 0 for each in faults if each.kind == "lead")
        assert all(each.node > 0 for each in faults if each.kind == "node")
        apart = np.diff([FIRST, *(each.step for each in faults), 600])
        assert apart.min() > 75
    assert len({tuple(each.kind for each in faults) for faults in rounds}) > 4
    assert {each.node for faults in rounds for each in faults if each.kind == "rank"} == {0, 1}


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


def test_the_steps_of_one_fault_are_not_those_of_the_next() -> None:
    done = [finished(step, float(step)) for step in range(1, 31)]
    done += [finished(step, step + 5.0) for step in range(26, 41)]
    done += [finished(step, step + 10.0) for step in range(41, 51)]
    killed = [(Strike("rank", 30, 0), 30.25, 40.0), (Strike("lead", 40, 0), 45.25, 55.0)]
    cost = RunCost.of(done, killed, 50)
    assert [(got.pause_s, got.again) for got in cost.faults] == [(0.75, 5), (5.75, 0)]


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = Lines(path)
    assert list(lines.new()) == []
    path.write_text('{"step": 1}\n{"st')
    assert list(lines.new()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert list(lines.new()) == [{"step": 2}] and list(lines.new()) == []
    anew = tmp_path / "anew"
    anew.write_text('{"step": 1}\n{"step": 7}\n')
    anew.rename(path)
    assert list(lines.new()) == [{"step": 1}, {"step": 7}]


def test_distances_are_relative_and_of_the_same_tensors(tmp_path: Path) -> None:
    one, other, stranger = (tmp_path / name for name in ("one", "other", "stranger"))
    save_file({"a": np.array([3.0, 0.0], np.float32), "b": np.array([4.0], np.float32)}, one)
    save_file({"a": np.array([3.0, 0.5], np.float32), "b": np.array([4.0], np.float32)}, other)
    save_file({"a": np.array([3.0, 0.5], np.float32)}, stranger)
    assert distance(one, one) == 0.0 and distance(other, one) == 0.1
    with pytest.raises(ValueError, match=r"different tensors: \['b'\]"):
        distance(one, stranger)


def test_a_cost_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    got = recovery.Got(Strike("rank", 40, 1), 0.5, 2.5, 3)
    cost = RunCost([got], 8, 12.5, 0.25, 60)
    (tmp_path / recovery.COST).write_text(json.dumps(recovery.asdict(cost)))
    assert recovery.cost_in(tmp_path) == cost


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
