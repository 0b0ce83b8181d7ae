"""A run that a fault has ended goes on by itself from its newest checkpoint, and its weights do not show it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine import train, write_recipe

from megacore import checkpoints, exits
from megacore.data.skipped import SkippedSamples
from megacore.recipe import load
from megacore.recovery import incidents
from megacore.recovery.events import Event
from megacore.training import launch as program
from megacore.training import metrics
from megacore.training.progress import Progress, document
from parallel.weights.layout import MeshShape

LAST = 200
STEPS = [f"train.steps={LAST}", "checkpoint.every=8", "evaluate.every=0", "checkpoint.at_end=true"]
KILLED = Event("killed", 1, 0, detail="SIGKILL", at=1e9)
Launched = Callable[..., tuple[int, list[list[str]]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    """``launched(faults, override, ...)`` -> (exit status, the arguments of each launch): of launches that end with
    these faults one after another, and then well."""
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    monkeypatch.setattr(program, "pause", lambda seconds: 0)

    def run(faults: list[Event], *overrides: str, status: int = exits.DONE) -> tuple[int, list[list[str]]]:
        calls, left = list[list[str]](), list(faults)

        def launch(module: str, arguments: list[str], *more: Any) -> int:
            calls.append(arguments[1:])
            if left:
                more[4](left.pop(0))
                return 137
            return status

        monkeypatch.setattr(program, "launch", launch)
        return program.run("train", [recipe, f"out={out}", "mesh.dp=2", *overrides]), calls

    return run


def made(out: Path) -> list[tuple[str, int | None, str]]:
    return [(each.event.kind, each.event.step, each.decision.action) for each in incidents.read(out)]


def test_a_fault_is_told_written_down_and_got_over(
    launched: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, calls = launched([KILLED, KILLED])
    assert status == exits.DONE
    assert calls == [calls[0], *[[*calls[0], "checkpoint.resume=auto"]] * 2]
    assert made(tmp_path / "run") == [("killed", None, "restart")] * 2
    assert capsys.readouterr().err.splitlines() == [
        f"killed rank 1 before the first step (SIGKILL) -> restart: restart {number} of 3" for number in (1, 2)
    ]


@pytest.mark.parametrize(
    ("overrides", "launches", "told"),
    [
        (["recovery.max_restarts=1"], 2, "all 1 restarts are spent (recovery.max_restarts)"),
        (["recovery.max_restarts=0"], 1, "it may not restart (recovery.max_restarts=0)"),
        (["checkpoint.every=0", "checkpoint.at_end=false"], 1, "it writes no checkpoints to restart from"),
    ],
)
def test_what_cannot_go_on_by_itself_is_for_the_scheduler(
    launched: Launched, capsys: pytest.CaptureFixture[str], overrides: list[str], launches: int, told: str
) -> None:
    status, calls = launched([KILLED] * 9, *overrides)
    assert (status, len(calls)) == (exits.RETRY, launches)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"-> end: {told}; ends with status 75: start again, with --resume auto")


@pytest.mark.parametrize("status", [exits.FAILED, exits.MISUSED, 143])
def test_what_has_been_said_or_asked_for_is_no_fault(launched: Launched, tmp_path: Path, status: int) -> None:
    assert launched([], status=status) == (status, [[f"out={tmp_path / 'run'}", "mesh.dp=2"]])
    assert not (tmp_path / "run").exists()


def test_a_signal_between_launches_ends_the_run(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "pause", lambda seconds: signal.SIGTERM)
    status, calls = launched([KILLED])
    assert (status, len(calls)) == (143, 1)


def test_restarts_wait_longer_each_time(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()

    def pause(seconds: float) -> int:
        waited.append(seconds)
        return 0

    monkeypatch.setattr(program, "pause", pause)
    launched([KILLED] * 8, "recovery.max_restarts=8")
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_step_that_kills_is_known_to_later_launches(
    launched: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheduler that starts the run again, and again, does not try it for ever."""
    train(write_recipe(tmp_path), [f"out={tmp_path / 'run'}", "train.steps=3", "checkpoint.every=2"])
    later = time.time() + 60
    os.utime(tmp_path / "run" / metrics.METRICS, (later, later))  # as if ranks had gone on with it
    again = ["--resume", "auto", "recovery.max_restarts=1"]
    assert launched([KILLED] * 9, *again)[0] == exits.RETRY
    status, calls = launched([KILLED] * 9, *again)
    assert (status, len(calls)) == (exits.FAILED, 1)
    assert made(tmp_path / "run") == [
        ("killed", 4, "restart"),
        ("killed", 4, "end"),
        ("killed", 4, "end"),
    ]
    assert "step 4 (samples 24 to 31) has ended the run 3 times" in capsys.readouterr().err


def test_a_launch_that_came_to_no_step_tells_against_none(launched: Launched, tmp_path: Path) -> None:
    train(write_recipe(tmp_path), [f"out={tmp_path / 'run'}", "train.steps=3", "checkpoint.every=2"])
    assert launched([KILLED] * 3, "--resume", "auto")[0] == exits.DONE
    assert made(tmp_path / "run") == [("killed", None, "restart")] * 3


def test_what_began_elsewhere_is_not_begun_anew(launched: Launched, tmp_path: Path) -> None:
    """From its own newest checkpoint there is a way on; where it has none, `auto` would start from nothing."""
    train(write_recipe(tmp_path), [f"out={tmp_path / 'other'}", "train.steps=3", "checkpoint.every=2"])
    status, calls = launched([KILLED] * 3, "--resume", str(tmp_path / "other"))
    assert (status, len(calls)) == (exits.RETRY, 1)


def weights(out: Path) -> dict[str, bytes]:
    folder = checkpoints.path_of(checkpoints.folder_of(out), LAST)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.slow
def test_a_rank_is_killed_twice_and_the_weights_do_not_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    monkeypatch.setattr(program, "BACKOFF_S", 0.0)
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    ended = threading.Event()

    def kill() -> None:
        """Kill a rank some steps after the start, and again after the restart."""
        for number in range(2):
            while len([each for each in incidents.read(out) if each.recovered]) < number or not any(
                each["step"] >= 20 * (number + 1) for each in metrics.newest(out / metrics.METRICS)
            ):
                if ended.wait(0.005):
                    return
            os.kill(children()[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        status = program.run("train", [recipe, f"out={out}", *STEPS, "recovery.in_place=false"])
    finally:
        ended.set()
        killer.join()
    shown = capfd.readouterr()
    assert status == exits.DONE, shown.err
    found = incidents.read(out)
    assert [(each.event.kind, each.decision.action) for each in found] == [("killed", "restart")] * 2
    assert all(each.recovered and each.seconds_lost and each.steps_lost is not None for each in found)
    assert [record["step"] for record in metrics.read(out / metrics.METRICS)] == list(range(1, LAST + 1))
    assert "2 incidents, " in shown.out and "goodput" in shown.out
    train(recipe, [f"out={tmp_path / 'straight'}", *STEPS])
    assert weights(out) == weights(tmp_path / "straight")
    assert not children()


def children() -> list[int]:
    """The ranks of this process's launcher."""
    pids = [int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    return [pid for pid in pids if b"megacore.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_run_that_gets_on_between_faults_does_not_wait_longer(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = list[float]()

    def noted(seconds: float) -> int:
        waited.append(seconds)
        return 0

    monkeypatch.setattr(program, "pause", noted)
    launched([replace(KILLED, step=step) for step in (5, 9, 9, 20)], "recovery.max_restarts=8")
    assert waited == [1, 1, 2, 1]


def test_a_fault_of_steps_that_are_done_again_is_where_the_ranks_are(tmp_path: Path) -> None:
    """Of these there are records already; of what comes after them the newest record tells."""
    config = load(write_recipe(tmp_path), [f"out={tmp_path / 'run'}"])
    (tmp_path / "run").mkdir()
    records = tmp_path / "run" / "metrics.jsonl"

    def has_come_to(step: int) -> None:
        with records.open("a") as file:
            file.write(f'{{"step": {step}, "loss": 2.0}}\n')

    for step in range(1, 37):
        has_come_to(step)
    answers = program._Answers(config, 0, {0: 2}, 1)
    answers.began = 0.0
    for after, at, located in (36, 30, 37), (31, 20, 32), (31, 33, 33), (31, 35, 35):
        answers.step_now = partial(int, at)
        answers.went_on(after)
        answers.answer(replace(KILLED, step=None))
        assert incidents.read(tmp_path / "run")[-1].event.step == located
    has_come_to(37)
    answers.answer(replace(KILLED, step=None))
    assert incidents.read(tmp_path / "run")[-1].event.step == 38


def test_faults_between_two_records_are_where_the_ranks_are(tmp_path: Path) -> None:
    """Three at other steps do not end the run; the samples are those of the step, without those that are left out."""
    config = load(write_recipe(tmp_path), [f"out={tmp_path / 'run'}", "log.every=10"])
    folder = checkpoints.path_of(checkpoints.folder_of(tmp_path / "run"), 1)
    folder.mkdir(parents=True)
    (folder / "index.json").touch()
    progress = Progress(1, 8, 64, 1, skipped_samples=SkippedSamples.of([(10, 110)]))
    (folder / "trainer.json").write_text(json.dumps(document(progress, 0.1, config, MeshShape())))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 10, "loss": 2.0}\n')
    answers = program._Answers(config, 0, {0: 2}, 1)
    answers.began = 0.0
    for at, first in (12, 188), (15, 212), (19, 244):
        answers.step_now = partial(int, at)
        assert answers.answer(replace(KILLED, step=None)).action == "replace"
        event = incidents.read(tmp_path / "run")[-1].event
        assert (event.step, event.samples) == (at, (first, first + 8))


def test_the_node_that_leads_is_not_left_out(tmp_path: Path) -> None:
    config = load(write_recipe(tmp_path), [f"out={tmp_path / 'run'}"])
    for node, action, most in (1, "evict", 2), (0, "end", 2), (0, "replace", 3), (0, "replace", None):
        config = replace(
            config, recovery=replace(config.recovery, node_failures=most), out=f"{tmp_path / 'run'}-{node}{most}"
        )
        answers = program._Answers(config, 0, {0: 1, 1: 1}, 1)
        answers.hosts.update({0: "a", 1: "b"})
        events = [replace(KILLED, rank=node, node=node, step=step) for step in (3, 8)]
        assert [answers.answer(event).action for event in events] == ["replace", action]
        assert [each.event.host for each in incidents.read(Path(config.out))] == ["ab"[node]] * 2
