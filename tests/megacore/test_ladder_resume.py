"""A run that is saved on one rung of the data parallel ladder goes on on any other."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import LLAMA, RECIPE, Result, train, write_recipe
from pool import Pool

from megacore import checkpoints
from megacore.checks.rules import problems
from megacore.config import Config, MeshConfig, ZeroConfig
from megacore.models.registry import configure
from megacore.training.callbacks.signals import Signals

RUNGS = ("none", "optimizer", "gradients", "parameters")
ROUND = ("none", "parameters", "optimizer", "gradients", "none")


def climb(
    pool: Pool, tmp_path: Path, world: int, recipe: str, overrides: list[str]
) -> tuple[list[Result], list[Result]]:
    """Ten steps on the lowest rung, and two on each in turn, each from the checkpoint of the one before."""
    common = ["train.steps=10", "checkpoint.every=2", "checkpoint.keep=null", "evaluate.every=5", *overrides]
    straight = pool.run(world, train, recipe, [f"out={tmp_path / 'straight'}", *common])
    start, step, found = list[str](), 0, list[Result]()
    for number, shard in enumerate(ROUND):
        out, step = tmp_path / f"rung{number}", step + 2
        # The schedule is that of ten steps: a signal would end it so.
        found = pool.run(world, stopped, recipe, [f"out={out}", f"zero.shard={shard}", *start, *common], step)
        start = [f"checkpoint.resume={path_of(out, step)}"]
    return straight, found


def stopped(recipe: str, overrides: list[str], last: int) -> Result:
    """A run that is asked to end after a step."""
    from engine import of, result, trainer

    made = trainer(recipe, overrides, log=True)
    plain, count = made.train_step.backward, made.start.step

    def backward(*given: Any) -> Any:
        nonlocal count
        count += 1
        of(made, Signals).stop = count == last
        return plain(*given)

    made.train_step.backward = backward  # type: ignore[assignment, method-assign]
    return result(made, made.fit())


def path_of(out: Path, step: int) -> Path:
    return checkpoints.path_of(checkpoints.folder_of(out), step)


def test_from_rung_to_rung_bitwise(pool: Pool, tmp_path: Path) -> None:
    """Two replicas with a microbatch each: every sum is a + b. Clipping goes by the norm, which is the same on each."""
    recipe = write_recipe(tmp_path)
    overrides = ["train.precision=bf16", "batch.micro_size=4", "optimizer.clip=0.5"]
    straight, found = climb(pool, tmp_path, 2, recipe, overrides)
    assert [result.last for result in found] == [10, 10]
    for key in ("loss", "validation_loss"):
        assert found[0].values(key) == straight[0].values(key)[-len(found[0].values(key)) :], key
    for one, other in zip(straight, found, strict=True):
        assert all(np.array_equal(value, other.weights[name]) for name, value in one.weights.items())
    ends = path_of(tmp_path / "straight", 10), path_of(tmp_path / f"rung{len(ROUND) - 1}", 10)
    files = [path.relative_to(ends[0]) for path in ends[0].rglob("*.safetensors")]
    assert len(files) == 4
    for file in files:
        assert filecmp.cmp(ends[0] / file, ends[1] / file, shallow=False), file


@pytest.mark.in_turn(3, 0)
def test_from_rung_to_rung_on_any_layout(pool: Pool, tmp_path: Path) -> None:
    """Shared kv heads, tied tables on both ends, uneven gradients accumulated over microbatches."""
    recipe = write_recipe(tmp_path, RECIPE | {"model": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1}})
    straight, found = climb(pool, tmp_path, 8, recipe, ["mesh.tp=2", "mesh.pp=2"])
    for one, other in zip(straight, found, strict=True):
        for name, value in one.weights.items():
            np.testing.assert_allclose(other.weights[name], value, rtol=1e-8, atol=1e-11, err_msg=name)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shard", "replicas", "said"),
    [
        ("none", 1, None),
        ("parameters", 2, None),
        ("optimizer", 3, "cannot divide dp=4 data parallel ranks into zero.replicas=3 groups: choose from 1, 2, 4"),
        ("none", 2, "zero.replicas (2) groups share nothing out where zero.shard is none"),
        ("gradients", 0, "zero.replicas (0): must be at least 1"),
    ],
)
def test_what_cannot_be_shared_is_refused(shard: Any, replicas: int, said: str | None) -> None:
    config = Config(zero=ZeroConfig(shard, replicas), mesh=MeshConfig(tp=2))
    found = [problem for problem in problems(config, 8, configure({"preset": "llama-tiny"})) if "replicas" in problem]
    assert [problem[: len(said or "")] for problem in found] == ([said] if said else [])
