"""kill -9 while a run trains and saves: what was published stays whole, and the run goes on as if never killed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from engine import train, write_recipe
from pool import forkserver

from megacore import checkpoints
from megacore.store import audit
from megacore.store.checkpoint import Checkpoint

KILLS = 30
PRECISE = ["train.precision=fp32", "evaluate.every=0", "log.every=1000"]


def endless(recipe: str, out: str, stderr: str) -> None:
    """Go on with the run and save after each step, until somebody puts an end to it."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    steps = ["train.steps=100000", "schedule.name=constant"]
    train(recipe, [f"out={out}", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.resume=auto", *steps, *PRECISE])


def newest(out: Path) -> int:
    return max(checkpoints.complete(checkpoints.folder_of(out)), default=0)


@pytest.mark.slow
def test_kills_while_saving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out, rng = write_recipe(tmp_path), tmp_path / "run", random.Random(5)
    context = forkserver()
    before, midway = 0, 0
    for _ in range(KILLS):
        process = context.Process(target=endless, args=(recipe, str(out), str(tmp_path / "stderr")))
        process.start()
        # It is alive once it has saved; then at any moment of its next steps.
        until = time.monotonic() + 60
        while newest(out) <= before and process.is_alive() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        assert process.pid is not None and process.is_alive(), (tmp_path / "stderr").read_text()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        folder = checkpoints.folder_of(out)
        found = checkpoints.complete(folder)
        assert max(found) > before
        before = max(found)
        midway += any(path.name.startswith(".") for path in folder.iterdir())
        for path in found.values():
            assert not audit.check(Checkpoint.open(path), jobs=1)
    with capsys.disabled():
        print(f" {KILLS} kills up to step {before}, {midway} of them in the middle of a save ", end="")
    assert midway > KILLS // 10
    # Nothing of all that shows in the numbers.
    straight = tmp_path / "straight"
    steps = [f"train.steps={before}", "schedule.name=constant", "checkpoint.at_end=true", "checkpoint.every=0"]
    train(recipe, [f"out={straight}", *steps, *PRECISE])
    one, other = (Checkpoint.open(checkpoints.path_of(checkpoints.folder_of(o), before)) for o in (out, straight))
    for state in one.index.states:
        assert one.fingerprints(state) == other.fingerprints(state), state
    # What the kills have left is known for what it is, and removed as a run does when it goes on.
    checkpoints.clean(folder)
    assert {path.name for path in folder.iterdir()} == {path.name for path in checkpoints.complete(folder).values()}
