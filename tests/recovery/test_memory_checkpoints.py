"""Checkpoints in memory: what a run finds when it is started again, where it may not look, and what it leaves behind."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import torch
from engine import write_recipe
from pool import Pool

from megacore import checkpoints
from megacore.control import Control
from megacore.recovery import memory_checkpoints, partners
from megacore.recovery.memory_checkpoints import MemoryCheckpoints, private, sweep
from megacore.store.audit import DamageError
from megacore.store.strict_json import StoreError
from megacore.training import build, capacity
from megacore.training import train as pretrain
from megacore.training.resume import Damaged
from megacore.training.trainer import Trainer
from parallel.mesh import Mesh

QUIET = ["evaluate.every=0", "checkpoint.every=0", "recovery.overhead=1e9"]
AGAIN = "checkpoint.resume=auto"


@dataclass
class Run:
    """The loop around a trainer, as far as a callback sees it."""

    made: Trainer
    config: Any
    callback: MemoryCheckpoints
    pausing: bool = False
    stopping: bool = False
    vetoed: Any = None
    told: list[str] = field(default_factory=list)
    step: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made, name)

    @property
    def contents(self) -> Any:
        return self.made.saver._contents

    @property
    def is_last(self) -> bool:
        return self.step == self.config.train.steps

    @property
    def lr(self) -> float:
        return self.made.lr(self.step)

    @property
    def progress(self) -> Any:
        return self.made.start.at(
            self.step, self.config, self.made.step.optimizer.updates, self.made.step.scaler.state()
        )

    def call(self, hook: str, *arguments: object) -> None:
        pass

    def enter(self, phase: str) -> None:
        pass

    def tell(self, text: str) -> None:
        self.told.append(text)


def begun(recipe: str, overrides: list[str], root: Path, node: int | None = None) -> Run:
    """A run on this rank that has looked into its memory, and into another folder on each machine."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    setup = pretrain.check(recipe, [*QUIET, *overrides], world, world)
    mesh = Mesh.create(setup.config.mesh.shape(world))
    control = Control.create(mesh, node or world)
    root = root / str(mesh.rank // (node or world))
    root.mkdir(exist_ok=True)
    callback = MemoryCheckpoints(setup.config, ["data"], node or world, root)
    start = callback.on_find(setup.start, control)
    while True:
        try:
            with mock.patch.object(build, "_agree"):
                made = build.trainer_of(setup.at(start), mesh, control)
            break
        except DamageError as error:
            path = control.tell(str(error.path))
            start = callback.on_find(replace(setup.start, damaged=(Damaged(Path(path), "bits have flipped"),)), control)
    run = Run(made, setup.config, callback, step=start.progress.step, told=list(start.said))
    callback.on_start(run)
    return run


def train(run: Run, last: int, pause: bool = False) -> dict[str, np.ndarray]:
    """Train to a step -> the weights; ``pause``: the ranks are about to be started again."""
    made, callback, control = run.made, run.callback, run.made.control
    for batch in itertools.islice(made.batches.steps(run.progress.samples), last - run.step):
        run.step += 1
        stats = made.step.backward(made._microbatches(batch, run.step))
        made.step.update(stats, run.lr)
        callback.on_step(run, stats)  # type: ignore[arg-type]
        made.step.gradients.updated()
        run.pausing = pause and run.step == last
        asked = dict(callback.ask(run))  # type: ignore[arg-type]
        callback.on_answers(run, dict(zip(asked, control.largest(*asked.values()), strict=True)))  # type: ignore[arg-type]
    return engine.weights(made)


def steps(run: Run) -> list[int]:
    assert run.callback.folder is not None
    return list(checkpoints.complete(run.callback.folder))


def calm(recipe: str, overrides: list[str], root: Path, node: int | None = None) -> dict[str, np.ndarray]:
    return train(begun(recipe, overrides, root, node), 6)


def first_life(
    recipe: str, overrides: list[str], root: Path, node: int | None = None, last: int = 4
) -> tuple[list[int], list[str]]:
    run = begun(recipe, overrides, root, node)
    train(run, last, pause=True)
    return steps(run), run.told


def second_life(
    recipe: str, overrides: list[str], root: Path, node: int | None = None
) -> tuple[int, dict[str, np.ndarray], list[str]]:
    run = begun(recipe, [*overrides, AGAIN], root, node)
    first = run.step
    return first, train(run, 6), run.told


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.mark.parametrize("layout", ["mesh.dp=2 zero.shard=optimizer", "mesh.tp=2", "mesh.pp=2 zero.shard=none"])
def test_a_run_that_is_started_again_ends_as_if_nothing_had_been(
    layout: str, pool: Pool, recipe: str, tmp_path: Path
) -> None:
    overrides = [f"out={tmp_path / 'run'}", "train.steps=6", *layout.split()]
    undisturbed = pool.run(2, calm, recipe, [f"out={tmp_path / 'calm'}", *overrides[1:]], tmp_path)
    kept = pool.run(2, first_life, recipe, overrides, tmp_path)
    assert [each[0][-1] for each in kept] == [4, 4]
    for (step, weights, _), expected in zip(
        pool.run(2, second_life, recipe, overrides, tmp_path), undisturbed, strict=True
    ):
        assert step == 4
        assert all(np.array_equal(weights[name], expected[name]) for name in expected)
