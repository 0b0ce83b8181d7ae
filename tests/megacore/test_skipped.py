"""Samples that are left out: the same order in every layout, whenever it is decided, on every later resume."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine import Result, of, path_of, problems, same, train, trainer
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool

from megacore.data.batches import TokenError
from megacore.data.skipped import SkippedSamples, in_recipe, in_words
from megacore.store.io.strict_json import StoreError
from megacore.training.callbacks.evaluation import Evaluation
from megacore.training.check import check
from megacore.training.progress import Progress
from megacore.training.resume import remarks

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda at: (at[0], at[0] + at[1])), max_size=5)
SKIP = "recovery.skip_samples=[3-5,[16,24],30-31]"
EVERY = ["train.steps=6", "checkpoint.every=3", "evaluate.every=0"]


# -- the order


@pytest.mark.quick
@given(RANGES, st.integers(0, 60), st.integers(1, 20))
def test_what_is_left_moves_up(ranges: list[tuple[int, int]], position: int, count: int) -> None:
    skipped = SkippedSamples.of(ranges)
    left_out = {sample for first, stop in ranges for sample in range(first, stop)}
    order = [sample for sample in range(200) if sample not in left_out]
    assert len(skipped) == len(left_out)
    assert [skipped.sample(n) for n in range(100)] == order[:100]
    found = skipped.samples(position, count)
    assert [n for first, stop in found for n in range(first, stop)] == order[position : position + count]
    assert SkippedSamples.read(json.loads(json.dumps([*skipped]))) == skipped
    assert (in_words([(3, 5), (7, 8)]), in_recipe([(3, 5), (7, 8)])) == ("3 to 4, 7", "3-5, 7-8")


@pytest.mark.quick
@given(RANGES, RANGES, st.integers(0, 60))
def test_a_range_is_refused_exactly_where_it_would_change_what_is_done(
    before: list[tuple[int, int]], more: list[tuple[int, int]], position: int
) -> None:
    old = SkippedSamples.of(before)
    new = old | more
    changed = {old.sample(n) for n in range(position)} - {new.sample(n) for n in range(position)}
    assert {n for first, stop in old.left_out_by(more, position) for n in range(first, stop)} == changed
    if not changed:
        assert all(old.sample(n) == new.sample(n) for n in range(position))


@pytest.mark.quick
@pytest.mark.parametrize("value", [None, 3, "3-5", [3, 5], [[3]], [[5, 3]], [[1, 4], [3, 5]], [[-1, 3]], [[0, True]]])
def test_what_is_no_list_of_ranges_is_refused(value: object) -> None:
    assert SkippedSamples.read(value) is None
    tree = {"step": 1, "consumed_samples": 8, "tokens": 64, "optimizer_steps": 1, "data_order": 2, "recipe": {}}
    assert Progress.read(tree, "x").skipped_samples == SkippedSamples()
    with pytest.raises(StoreError, match=r"x: skipped_samples are no ascending ranges"):
        Progress.read({**tree, "skipped_samples": value}, "x")


# -- runs


@pytest.fixture(scope="module")
def whole(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run that leaves samples out, with a checkpoint in its middle."""
    out = tmp_path_factory.mktemp("whole")
    return out, train(recipe, [f"out={out}", SKIP, *EVERY])


def trainer_json(out: Path, step: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((path_of(out, step) / "trainer.json").read_text())
    return found


def test_a_step_is_of_the_samples_that_are_left_and_the_batch_stays_full(recipe: str) -> None:
    plain, cut = trainer(recipe, []), trainer(recipe, [SKIP])
    source = plain.batches.source
    wanted = [[0, 1, 2, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 24, 25], [26, 27, 28, 29, 31, 32, 33, 34]]
    for step, samples in enumerate(wanted):
        tokens = np.concatenate([batch.tokens for batch in cut.batches.microbatches(step)])
        assert np.array_equal(tokens, [source.sample(n).tokens[:-1] for n in samples])
    both = (of(made, Evaluation)._held_out.microbatches(0) for made in (plain, cut))
    assert all(np.array_equal(one.tokens, other.tokens) for one, other in zip(*both, strict=True))


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("world", "overrides"),
    [(2, []), (2, ["mesh.tp=2", "batch.micro_size=4"]), (2, ["mesh.pp=2"])],
    ids=["dp2", "tp2", "pp2"],
)
def test_every_layout_leaves_out_the_same(
    pool: Pool, recipe: str, whole: tuple[Path, Result], tmp_path: Path, world: int, overrides: list[str]
) -> None:
    """Also where it goes on from the checkpoint of another layout, which says itself what is left out."""
    start = f"checkpoint.resume={path_of(whole[0], 3)}"
    for more in ([SKIP], [start]):
        found = pool.run(world, train, recipe, [f"out={tmp_path / str(len(more[0]))}", *EVERY, *overrides, *more])[0]
        losses = whole[1].values("loss")[-len(found.values("loss")) :]
        assert len(losses) == (6 if more == [SKIP] else 3)
        np.testing.assert_allclose(found.values("loss"), losses, rtol=1e-9)


def test_a_resume_in_the_middle_is_the_whole_run(recipe: str, whole: tuple[Path, Result], tmp_path: Path) -> None:
    """Whether the recipe still says it or not."""
    assert trainer_json(whole[0], 3)["skipped_samples"] == [[3, 5], [16, 24], [30, 31]]
    for name, again in (("told", [SKIP]), ("kept", [])):
        start = f"checkpoint.resume={path_of(whole[0], 3)}"
        resumed = train(recipe, [f"out={tmp_path / name}", start, *EVERY, *again])
        assert same(resumed.weights, whole[1].weights)
        assert trainer_json(tmp_path / name, 6)["skipped_samples"] == [[3, 5], [16, 24], [30, 31]]


def test_what_was_trained_on_cannot_be_left_out(recipe: str, whole: tuple[Path, Result]) -> None:
    start = f"checkpoint.resume={path_of(whole[0], 3)}"
    (problem,) = problems(recipe, start, "recovery.skip_samples=[14-33]", "train.steps=6")
    said = "recovery.skip_samples (14-33): the run has been trained on samples 14 to 15, 24 to 29, 31 to 32 by step 3"
    assert said in problem and "leave out samples from 35 on" in problem


def test_the_start_says_what_is_left_out(recipe: str, whole: tuple[Path, Result]) -> None:
    setup = check(recipe, [f"checkpoint.resume={path_of(whole[0], 3)}", "train.steps=6"], 1, 1)
    said = remarks(setup.start, setup.config, setup.model, setup.config.mesh.shape(1))
    assert said[-1] == "11 samples of the training data are left out: 3 to 4, 16 to 23, 30."
    plain = replace(setup.start, progress=Progress())
    assert not any("left out" in line for line in remarks(plain, setup.config, setup.model, setup.config.mesh.shape(1)))


def test_errors_name_the_samples_themselves(recipe: str) -> None:
    batches = replace(trainer(recipe, [SKIP]).batches, vocabulary=3)
    with pytest.raises(TokenError, match=r"sample 5 has the token id"):
        batches._sample(3)
