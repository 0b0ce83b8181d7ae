"""A run that is saved on one rung of the data parallel ladder goes on on any other."""

from pathlib import Path

import engine
import numpy as np
import pytest
from engine import LLAMA, RECIPE, Result, path_of, same, train, write_recipe
from pool import Pool

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
        found = pool.run(world, engine.stopped, recipe, [f"out={out}", f"zero.shard={shard}", *start, *common], step)
        start = [f"checkpoint.resume={path_of(out, step)}"]
    return straight, found


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("optimizer", ["name=adamw", "name=muon", "moments=bf16"])
def test_from_rung_to_rung_bitwise(pool: Pool, tmp_path: Path, optimizer: str) -> None:
    """Two replicas with a microbatch each: every sum is a + b. Clipping goes by the norm, which is the same on each."""
    recipe = write_recipe(tmp_path)
    overrides = ["train.precision=bf16", "batch.micro_size=4", "optimizer.clip=0.5", f"optimizer.{optimizer}"]
    straight, found = climb(pool, tmp_path, 2, recipe, overrides)
    assert [result.last for result in found] == [10, 10]
    for key in ("loss", "validation_loss"):
        assert found[0].values(key) == straight[0].values(key)[-len(found[0].values(key)) :], key
    for one, other in zip(straight, found, strict=True):
        assert same(one.weights, other.weights)
    engine.assert_same_files(path_of(tmp_path / "straight", 10), path_of(tmp_path / f"rung{len(ROUND) - 1}", 10), 4)


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_from_rung_to_rung_on_any_layout(pool: Pool, tmp_path: Path, name: str) -> None:
    """Shared kv heads, tied tables on both ends, uneven gradients accumulated over microbatches."""
    recipe = write_recipe(tmp_path, RECIPE | {"model": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1}})
    straight, found = climb(pool, tmp_path, 8, recipe, ["mesh.tp=2", "mesh.pp=2", f"optimizer.name={name}"])
    for one, other in zip(straight, found, strict=True):
        for name, value in one.weights.items():
            np.testing.assert_allclose(other.weights[name], value, rtol=1e-8, atol=1e-11, err_msg=name)
