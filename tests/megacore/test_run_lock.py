"""One run in a folder at a time, on one machine and on several, with locks and without."""

import json
import multiprocessing
import os
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import train, write_recipe
from pool import Pool

from megacore import run_lock
from megacore.rank import RankPlace
from megacore.recipe import ConfigError
from megacore.run_lock import LOCK, Holder, RunLock, holder, read
from megacore.store.io import files
from megacore.store.io.strict_json import StoreError
from megacore.training import main, metrics
from megacore.training.check import check

QUICK = 0.02
"""Seconds between two heartbeats of the tests; others wait for STALE times as long."""


def silent(said: str) -> None:
    pass


def no_locks(file: object, kind: int) -> bool:
    raise files.NoLocks("no locks here")


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    out = tmp_path / "new" / "run"
    assert holder(out) is None
    with RunLock.take(out):
        held = read(out / LOCK)
        assert held is not None and f"process {held.pid} on {held.host}, since 2" in str(holder(out))
        with pytest.raises(StoreError, match=f"is held by a run, process {held.pid} on .*: wait for it or end it, or"):
            RunLock.take(out)
    assert holder(out) is None and list(out.iterdir()) == []
    with RunLock.take(out):  # and again
        pass


def hold_and_wait(out: str, ready: Any) -> None:
    RunLock.take(Path(out))
    ready.send(True)
    time.sleep(60)


def test_a_killed_holder_of_this_machine_holds_no_more(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold_and_wait, args=(str(tmp_path), theirs))
    process.start()
    assert ours.recv()
    assert holder(tmp_path) is not None
    process.kill()
    process.join()
    left = read(tmp_path / LOCK)
    assert left is not None and left.pid == process.pid and holder(tmp_path) is None
    said: list[str] = []
    with RunLock.take(tmp_path, tell=said.append):  # at once: locks of one machine are trusted
        assert not said


def elsewhere() -> Holder:
    return replace(Holder.here(), host="node7", machine="another", pid=77)


def test_containers_of_a_machine_are_not_one(tmp_path: Path) -> None:
    """They may see the same folder of an object store, and each an `out` of its own by the same name."""
    here = Holder.here("/run")
    assert here.is_as(Holder.here("/run")) and not here.is_as(Holder.here("/other"))
    assert not here.is_as(replace(here, host="pod-b")) and not here.is_as(replace(here, machine="another"))


def write(path: Path, record: Holder) -> None:
    path.write_text(json.dumps(asdict(record)))


def test_a_lock_that_can_be_had_counts_only_when_the_heartbeat_stands_still(tmp_path: Path) -> None:
    """A network file system may give a lock to two machines."""
    record = elsewhere()
    write(tmp_path / LOCK, record)
    end = threading.Event()

    def beat() -> None:
        number = 0
        while not end.wait(QUICK):
            number += 1
            write(tmp_path / LOCK, replace(record, beat=number))

    thread = threading.Thread(target=beat)
    thread.start()
    said: list[str] = []
    try:
        with pytest.raises(StoreError, match="is held by a run, process 77 on node7"):
            RunLock.take(tmp_path, QUICK, said.append, silent)
    finally:
        end.set()
        thread.join()
    assert said == [f"{tmp_path} was held by {record}; waiting for 0.12 s to see whether it still is"]
    with RunLock.take(tmp_path, QUICK, said.append):
        assert len(said) == 2
        mine = read(tmp_path / LOCK)
        assert mine is not None and mine.token != record.token


def test_without_locks_the_heartbeat_alone_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "flock", no_locks)
    monkeypatch.setattr(run_lock, "flock", no_locks)
    with RunLock.take(tmp_path, QUICK, silent), pytest.raises(StoreError, match="is held by a run"):
        RunLock.take(tmp_path, QUICK, silent)
    assert not (tmp_path / LOCK).exists()
    with RunLock.take(tmp_path, QUICK, silent):
        pass


def test_a_lock_that_is_none_is_refused_and_what_it_says_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / LOCK
    os.mkfifo(path)
    assert holder(tmp_path) is None  # and nobody waits for one that writes into the pipe
    with pytest.raises(StoreError, match=r"run\.lock|is a pipe"):
        RunLock.take(tmp_path)
    path.unlink()
    evil: dict[str, Any] = {"host": "\x1b[2J\nx", "pid": [[]], "machine": "m", "token": "t", "since": None, "beat": 1}
    path.write_text(json.dumps(evil))
    assert str(read(path)) == r"process [[]] on '\x1b[2J\nx', since None"
    path.write_text("[" * 1024)
    assert read(path) is None


def test_who_has_lost_the_folder_ends(tmp_path: Path) -> None:
    """After a sleep of the machine, say: it would write into another run's files."""
    lost = threading.Event()
    said: list[str] = []

    def end(reason: str) -> None:
        said.append(reason)
        lost.set()

    with RunLock.take(tmp_path, QUICK, silent, end):
        write(tmp_path / LOCK, elsewhere())
        assert lost.wait(10)
    assert "was taken by process 77 on node7" in said[0] and "leaves the folder to that one" in said[0]
    assert (tmp_path / LOCK).exists()  # it is the other's


# -- runs


@pytest.mark.in_turn(2, 1)
def test_a_second_run_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued job whose first process still lives: before anything starts, and if both start at once."""
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    train(recipe, [f"out={out}", "checkpoint.at_end=true"])
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    arguments = [recipe, f"out={out}", "checkpoint.resume=auto", "train.steps=9"]
    with RunLock.take(out):
        with pytest.raises(ConfigError, match=r"out \(.*\) is held by a run, process \d+ on .* choose another out="):
            check(recipe, arguments[1:], 1, 1)
        monkeypatch.setattr("megacore.checks.machine.holder", lambda out: None)
        assert main.main(arguments) == 1
        assert "is held by a run, process" in capsys.readouterr().err
        (out / LOCK).unlink()
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert main.main(arguments) == 0
    losses = metrics.curve(metrics.read(out / "metrics.jsonl"), "loss")
    assert [step for step, _ in losses] == [*range(1, 10)]
    assert not (out / LOCK).exists()


def refused(recipe: str, overrides: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megacore.checks.machine.holder", lambda out: None)  # it was taken since
        setup = check(recipe, overrides, 2, 2)
    with pytest.raises(StoreError) as error:
        main.fit(setup, torch.device("cpu"), RankPlace.of_environment())
    return str(error.value)


@pytest.mark.in_turn(2, 0)
def test_all_ranks_know_that_it_is_held(pool: Pool, tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    with RunLock.take(out):
        (said,) = {*pool.run(2, refused, recipe, [f"out={out}"])}
    assert said.startswith("rank 0 (") and "is held by a run, process" in said
