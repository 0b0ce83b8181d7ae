"""What is told of a run from outside, while it runs and after it has died."""

import json
import os
import time
from pathlib import Path

import pytest
from engine import train, write_recipe

from megacore import incidents
from megacore.incidents import Incident
from megacore.recipe import load
from megacore.recovery.hang_report import now_of
from megacore.run_lock import RunLock
from megacore.tools.main import main
from megacore.training import metrics
from megacore.training.metrics import WallClock


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """{what: what is said of it} of ``megacore status``."""
    assert main(["status", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:13].strip() or line: line[13:] for line in lines}


def test_a_run_is_told_while_it_runs_and_after_it_has_died(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, not_durable: None
) -> None:
    out = tmp_path / "run"
    recipe, overrides = write_recipe(tmp_path), [f"out={out}", "train.steps=3", "checkpoint.every=2"]
    train(recipe, overrides)
    (out / "config.yaml").write_text(load(recipe, overrides).to_yaml())
    (record,) = [each for each in metrics.read(out / metrics.METRICS) if each["step"] == 3 and "loss" in each]
    capsys.readouterr()
    with RunLock.take(out):
        said = shown(capsys, str(out))
        assert said["held by"].startswith("process ") and "has died" not in said["held by"]
        lock = (out / "run.lock").read_bytes()
    assert main(["status", str(out), "--done"]) == 0
    (out / "config.yaml").write_text(load(recipe, [*overrides, "train.steps=4"]).to_yaml())
    assert main(["status", str(out), "--done"]) == 75
    assert shown(capsys, str(out))["left"].endswith(" s at this rate")
    looks = list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        (out / "config.yaml").write_text(load(recipe, overrides).to_yaml())

    monkeypatch.setattr("megacore.tools.watch.time.sleep", sleep)
    assert main(["watch", str(out), "--every", "7"]) == 0 and looks == [7.0]
    seen = capsys.readouterr().out
    assert "held by " in seen and f"{record['loss']:.4f}" in seen
    assert main(["watch", str(tmp_path)]) == 1 and "is not the folder of a run" in capsys.readouterr().err
    assert "left" not in shown(capsys, str(out))
    (out / "run.lock").write_bytes(lock)  # as one that was killed leaves it
    killed = Incident("killed", "restart", "SIG\x1bKILL", "restart 1 of 3", rank=1, node=0, step=4, at=0.5)
    incidents.write(out, killed)
    incidents.went_on(out, 2, 3.0)
    said = shown(capsys, str(out))
    assert said["held by"].startswith("nobody on this machine; process ") and said["held by"].endswith("runs elsewhere")
    assert said["run"] == str(out) and said["step"].startswith("3 of 3, ") and said["step"].endswith(" s ago")
    assert said["loss"].startswith(f"{record['loss']:.4f}, ") and said["loss"].endswith("on validation data at step 3")
    assert said["rate"].endswith(" tokens/s") and said["goodput"] == f"{record['goodput']:.1%} of the wall clock"
    assert said["checkpoint"].endswith("checkpoints/step-00000002")
    assert said["incidents"] == "1 incident, 1 step lost"
    assert (
        said["1970-01-01"]
        == "00:00:00 UTC  killed ('SIG\\x1bKILL'), rank 1, node 0, step 4 -> restart: restart 1 of 3; "
        "2.5 s and 1 step lost"
    )
    incidents.write(out, Incident("spike", step=5, detail="loss 9 (median 4, limit 5)", at=0.5))
    assert shown(capsys, str(out))["1970-01-01"] == ("00:00:00 UTC  spike (loss 9 (median 4, limit 5)), step 5 -> tell")


def test_who_stands_is_told_until_there_is_a_newer_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hangs").mkdir()
    text = "no step for 61 s: rank 3 has been in `save` of step 9 for 61 s; ranks 0-2 wait in all_reduce 9 of dp"
    now_of(tmp_path).write_text(json.dumps({"at": time.time() - 30, "step": 812, "text": text}))
    path = tmp_path / metrics.METRICS
    path.write_text(json.dumps({"step": 811, "loss": 1.0}) + "\n")
    os.utime(path, (0, time.time() - 90))
    assert shown(capsys, str(tmp_path))["stands"] == f"{text} (30 s ago)"
    os.utime(path)
    assert "stands" not in shown(capsys, str(tmp_path))


def test_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    incidents.write(tmp_path, Incident("killed", "end", rank=1, step=4, at=1.0))
    assert main(["status", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["out"] == str(tmp_path) and told["training"] is None and told["checkpoint"] is None
    assert told["incidents"][0]["kind"] == "killed" and told["incidents"][0]["action"] == "end"
    assert shown(capsys, str(tmp_path))["step"] == "none is recorded"


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 1
    assert f"{tmp_path} is not the folder of a run" in capsys.readouterr().err


# -- goodput


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be moved."""
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def records(
    clock: WallClock, now: list[float], steps: range, seconds: float, waited: float = 0.0
) -> list[metrics.Record]:
    """Records of steps that take so long each, and as much is waited between them."""
    made = list[metrics.Record]()
    for step in steps:
        now[0] += seconds + waited
        made.append({"step": step, **clock.count(step, seconds)})
    return made


def test_goodput_is_the_share_of_steps_that_count(now: list[float]) -> None:
    clock = WallClock.of([], 0, 990.0)  # 10 s of start-up
    (*_, last) = records(clock, now, range(1, 6), 6.0)
    assert last == {"step": 5, "time": 1030.0, "wall_seconds": 40.0, "goodput": 0.75}


@pytest.mark.parametrize(
    ("away", "newest", "begun", "steps", "wall", "counted"),
    [
        (20.0, 6, 1000.0, range(7, 9), 8 * 5 + 20 + 2 * 10, 6 * 5 + 2 * 10),  # another start of the same launch
        (3600.0, 8, 4630.0, range(9, 10), 8 * 5 + 10 + 10, 8 * 5 + 10),  # another launch, after an hour in a queue
    ],
)
def test_steps_done_again_and_a_restart_are_lost_and_the_time_in_a_queue_is_not_the_run_s(
    away: float, newest: int, begun: float, steps: range, wall: float, counted: float, now: list[float]
) -> None:
    done = records(WallClock.of([], 0, 1000.0), now, range(1, 9), 5.0)
    now[0] += away
    (*_, last) = records(WallClock.of(done, newest, begun), now, steps, 10.0)
    assert last["wall_seconds"] == wall and last["goodput"] == counted / wall


def test_a_record_of_several_steps_counts_them_all(now: list[float]) -> None:
    clock = WallClock.of([], 2, 980.0)
    assert clock.count(6, 2.5) == {"time": 1000.0, "wall_seconds": 20.0, "goodput": 0.5}


@pytest.mark.parametrize("jump", [-3600.0, 86400.0])
def test_a_clock_that_is_set_changes_nothing(jump: float, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WallClock.of([], 0, 990.0)  # 10 s of start-up
    records(clock, now, range(1, 3), 5.0)
    monkeypatch.setattr(time, "time", lambda: now[0] + jump)
    (*_, last) = records(clock, now, range(3, 5), 5.0)
    assert last == {"step": 4, "time": 1020.0 + jump, "wall_seconds": 30.0, "goodput": 20 / 30}
    # Another launch, by a clock that was set back, does not wait for the time of the last record.
    (again,) = records(WallClock.of([last], 4, now[0] + jump), now, range(5, 6), 5.0)
    assert again["wall_seconds"] == 35.0
    assert WallClock.of([last], 4, 0.0).before == 30.0


def test_records_of_other_kinds_are_passed_over(now: list[float]) -> None:
    strange = {"step": 1, "wall_seconds": 5.0, "goodput": None, "time": 1000.0}
    assert WallClock.of([strange], 1, 900.0) == WallClock(0.0, 0.0, 900.0, 1)
