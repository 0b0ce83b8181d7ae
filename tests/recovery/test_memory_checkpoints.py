"""Checkpoints in memory: what a run finds when it is started again, where it may not look, and what it leaves behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine import write_recipe
from pool import Pool

from megacore import checkpoints
from megacore.rank import Here
from megacore.recovery import memory_checkpoints, partners
from megacore.recovery.memory_checkpoints import LEFTOVER_S, RUN_ID, MemoryCheckpoints, private, sweep
from megacore.recovery.partners import HeldFiles
from megacore.store.strict_json import StoreError
from megacore.training import build, capacity, main, save
from megacore.training.check import check
from megacore.training.trainer import Callback, Trainer

QUIET = ["train.steps=6", "evaluate.every=0", "checkpoint.every=0", "recovery.overhead=1e9"]
AGAIN = "checkpoint.resume=auto"


class Killed(Exception):
    pass


class Ends(Callback):
    """Ends this life of a run after a step: by a pause, or as a kill does; and keeps what it has come to."""

    def __init__(self, at: int = 0, pauses: bool = False) -> None:
        self.at, self.pauses = at, pauses
        self.first, self.told = 0, list[str]()
        self.weights: dict[str, np.ndarray] = {}

    def on_start(self, run: Trainer) -> None:
        self.first, plain = run.step, run.tell

        def tell(text: str) -> None:
            self.told.append(text)
            plain(text)

        run.tell = tell  # type: ignore[method-assign]

    def ask(self, run: Trainer) -> Mapping[str, float]:
        ends = self.pauses and run.step == self.at
        return {"pause": ends, "look": ends, "keep": ends}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        self.weights = engine.weights(run)
        if run.step == self.at and not self.pauses:
            raise Killed


Told = tuple[int, list[int], dict[str, np.ndarray], list[str]]
"""The step that a life began after, the steps in memory after it, the weights at its end, what it told."""


def live(recipe: str, overrides: list[str], root: Path, at: int = 0, pauses: bool = False, node: int = 8) -> Told:
    """A life of a run on this rank; each machine of ``node`` ranks has a folder of its own."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    node = min(node, world)
    root = root / f"machine-{rank // node}"
    root.mkdir(exist_ok=True)
    memory, ends = MemoryCheckpoints(node, root), Ends(at, pauses)
    here = Here(rank, world, rank % node, node, True)
    # Machines of one name each have it at the same path.
    with mock.patch.object(build, "_agree"):
        try:
            main.fit(check(recipe, [*QUIET, *overrides], world, node), torch.device("cpu"), here, [memory, ends])
        except Killed:
            assert memory._saver is not None
            memory._saver.abandon()  # by now a kill has ended what was under way
    assert memory.folder is not None
    if world > 1:
        dist.barrier()
    return ends.first, list(checkpoints.complete(memory.folder)), ends.weights, ends.told


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.mark.parametrize("layout", ["mesh.dp=2 zero.shard=optimizer", "mesh.tp=2", "mesh.pp=2"])
def test_a_run_that_is_started_again_ends_as_if_nothing_had_been(
    layout: str, pool: Pool, recipe: str, tmp_path: Path
) -> None:
    """Whether its ranks were paused, and lose nothing, or killed."""
    run = [f"out={tmp_path / 'run'}", *layout.split()]
    undisturbed = pool.run(2, live, recipe, [*run, f"out={tmp_path / 'calm'}"], tmp_path)
    assert [each[:2] for each in undisturbed] == [(0, [])] * 2
    assert [each[1][-1] for each in pool.run(2, live, recipe, run, tmp_path, 3, True)] == [3, 3]
    killed = pool.run(2, live, recipe, [*run, AGAIN], tmp_path, 5)
    assert [each[0] for each in killed] == [3, 3] and killed[0][1] in ([3], [3, 4], [3, 5])
    ended = pool.run(2, live, recipe, [*run, AGAIN], tmp_path)
    for (first, kept, weights, _), (_, _, expected, _) in zip(ended, undisturbed, strict=True):
        assert first == killed[0][1][-1] and kept == [] and same(weights, expected)
    assert not [*(tmp_path / "machine-0").glob(f"*/{(tmp_path / 'run' / RUN_ID).read_text().strip()}")]
