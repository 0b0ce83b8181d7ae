"""kill -9 of all processes of a run while it trains and saves: it goes on as if nobody had ever killed it."""

import contextlib
import os
import random
import signal
import time
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine import RECIPE, assert_same_files, fit, path_of, write_recipe
from pool import Pool, forkserver

from megacore import checkpoints
from megacore.store.tensor_files import shares
from megacore.store.weight_folders import audit
from megacore.store.weight_folders.checkpoint import Checkpoint

PRECISE = ["train.precision=fp32", "evaluate.every=0", "log.every=1000", "schedule.name=constant"]
RANKS = 2


def endless(rank: int, store: str, recipe: str, out: str, stderr: str, mesh: str, share: int) -> None:
    """Go on with the run and save after each step, until somebody puts an end to it."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    file = dist.FileStore(store, RANKS)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    overrides = [f"out={out}", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.resume=auto"]
    with contextlib.redirect_stdout(None), mock.patch.object(shares, "SHARE_BYTES", share):
        fit(recipe, [*overrides, "train.steps=100000", mesh, *PRECISE])


def straight(recipe: str, out: str, steps: int, mesh: str, share: int) -> None:
    """The same run to a step, which nobody disturbs."""
    overrides = [f"out={out}", f"train.steps={steps}", "checkpoint.every=0", mesh, *PRECISE]
    with contextlib.redirect_stdout(None), mock.patch.object(shares, "SHARE_BYTES", share):
        fit(recipe, overrides)


def newest(out: Path) -> int:
    return max(checkpoints.complete(checkpoints.folder_of(out)), default=0)


@pytest.mark.in_turn(12)
@pytest.mark.slow
@pytest.mark.parametrize("kills", [pytest.param(12, id="some"), pytest.param(100, id="all", marks=pytest.mark.grid)])
@pytest.mark.parametrize(
    ("mesh", "share", "count"),
    [
        pytest.param("mesh.tp=2", shares.SHARE_BYTES, 3 * RANKS, id="files"),
        pytest.param("mesh.dp=2", 1, 3 + RANKS - 1, id="parts"),
    ],
)
def test_kills_while_saving(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str], mesh: str, share: int, count: int, kills: int
) -> None:
    recipe, out, rng = write_recipe(tmp_path, RECIPE | {"checkpoint": {}}), tmp_path / "run", random.Random(5)
    context = forkserver()
    before, midway = 0, 0
    for kill in range(kills):
        ranks: list[ForkServerProcess] = []
        for rank in range(RANKS):
            arguments = (rank, str(tmp_path / f"store{kill}"), recipe, str(out), str(tmp_path / "stderr"), mesh, share)
            ranks.append(context.Process(target=endless, args=arguments))
            ranks[-1].start()
        # It is alive once it has saved; then at any moment of its next steps, all at once, as a machine crashes.
        until = time.monotonic() + 60
        while newest(out) <= before and all(rank.is_alive() for rank in ranks) and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        assert all(rank.is_alive() for rank in ranks), (tmp_path / "stderr").read_text()
        for process in ranks:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.join()
        folder = checkpoints.folder_of(out)
        found = checkpoints.complete(folder)
        assert max(found) > before
        before = max(found)
        midway += any(path.name.startswith(".") for path in folder.iterdir())
        for path in found.values():
            assert not audit.check(Checkpoint.open(path), jobs=1)
    with capsys.disabled():
        print(f" {kills} kills up to step {before}, {midway} of them in the middle of a save ", end="")
    assert midway > kills // 10
    # Nothing of all that shows in the numbers: not in a bit.
    pool.run(RANKS, straight, recipe, str(tmp_path / "straight"), before, mesh, share)
    assert_same_files(path_of(out, before), path_of(tmp_path / "straight", before), count)
    # What the kills have left is known for what it is, and removed as a run does when it goes on.
    checkpoints.clean(folder)
    assert {path.name for path in folder.iterdir()} == {path.name for path in checkpoints.complete(folder).values()}
