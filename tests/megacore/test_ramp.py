"""Batches that grow: sizes as Megatron-LM has them, and the same samples in the same steps on every layout."""

from pathlib import Path
from random import Random

import engine
import numpy as np
import pytest
from engine import LENGTH, path_of, same
from pool import Pool

from megacore.batch_sizes import BatchSizes, Ramp
from megacore.data.samples import Epochs


def megatron(last: int, ramp: Ramp, consumed: int) -> int:
    """The size after so many samples, as the arguments of Megatron-LM describe it: increments at even distances."""
    first, increment, samples = ramp
    if consumed > samples:
        return last
    return first + int(consumed / (samples / ((last - first) // increment))) * increment


@pytest.mark.parametrize("seed", range(20))
def test_sizes_and_counts_are_those_of_a_loop(seed: int) -> None:
    rng = Random(seed)
    first, increment, steps = rng.randint(1, 9), rng.randint(1, 5), rng.randint(1, 6)
    ramp, last = (first, increment, steps * rng.randint(1, 40)), first + steps * increment
    sizes, position, begins = BatchSizes(last, ramp), 0, [0]
    while len(begins) <= 60:
        assert sizes.at(position) == megatron(last, ramp, position)
        position += sizes.at(position)
        begins.append(position)
    assert [sizes.after(0, n) for n in range(60)] == begins[:60]
    assert all(sizes.after(begins[n], 60 - n) == begins[60] for n in range(60))
    found = [(samples, sizes.batches(samples)) for samples in range(1, begins[50])]
    assert all(begins[n - 1] < samples <= begins[n] for samples, n in found)


ENDS = [2, 4, 6, 8, 13, 18, 26, 34]
"""Samples after each step: 2 a step below 7.5, 5 below 15, then 8."""
COMMON = ["schedule.name=constant", "schedule.warmup_steps=0", "checkpoint.keep=null", "evaluate.every=0"]
RAMP = [*COMMON, "batch.global_size=8", "batch.ramp=[2,3,15]", "train.steps=8", "checkpoint.every=5"]


@pytest.fixture(scope="module")
def straight(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, engine.Result]:
    out = tmp_path_factory.mktemp("straight")
    return out, engine.train(recipe, [f"out={out}", *RAMP])


def test_the_samples_are_those_of_runs_with_each_size(
    recipe: str, straight: tuple[Path, engine.Result], tmp_path: Path
) -> None:
    """Bit for bit; and tokens and their speed are counted as they come."""
    _, found = straight
    start = list[str]()
    for size, last in ((2, 4), (5, 6), (8, 8)):
        out = tmp_path / str(size)
        own = [f"out={out}", f"batch.global_size={size}", f"train.steps={last}", "checkpoint.at_end=true"]
        piece = engine.train(recipe, [*COMMON, *own, *start])
        start = [f"checkpoint.resume={path_of(out, last)}"]
    assert same(piece.weights, found.weights)
    assert found.values("tokens") == [LENGTH * end for end in ENDS]
    done = np.array(found.values("tokens_per_second")) * found.values("seconds_per_step")
    np.testing.assert_allclose(done, np.diff([0, *found.values("tokens")]))


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("world", "overrides"), [(3, ["zero.shard=gradients"]), (4, ["mesh.pp=2", "batch.micro_size=1"])]
)
def test_another_layout_has_them_too_and_goes_on_in_the_middle(
    pool: Pool, recipe: str, straight: tuple[Path, engine.Result], tmp_path: Path, world: int, overrides: list[str]
) -> None:
    """From the start, and after step 5, the first of its size."""
    out, found = straight
    for start in ([], [f"checkpoint.resume={path_of(out, 5)}"]):
        there = [f"out={tmp_path / str(len(start))}", *RAMP, *overrides, *start]
        ranks = pool.run(world, engine.train, recipe, there)
        for key in ("loss", "tokens"):
            values = ranks[0].values(key)
            np.testing.assert_allclose(values, found.values(key)[-len(values) :], rtol=1e-9)


def test_epochs_end_with_the_last_sample(recipe: str, tmp_path: Path) -> None:
    made = engine.trainer(recipe, [f"out={tmp_path}", *RAMP, "train.epochs=1"])
    source = made.batches.source
    assert isinstance(source, Epochs)
    before, after = (made.start.at(made.last - back, made.config).samples for back in (1, 0))
    assert before < source.per_epoch <= after
    assert made.last > source.per_epoch / 8
