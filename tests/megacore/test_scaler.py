"""The loss scale: how it moves, and that an overflow anywhere makes all ranks leave out the same step."""

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import engine
import numpy as np
import pytest
import torch
from device_store import device_store
from engine import path_of, same, train, trainer, weights
from pool import Pool
from torch import Tensor

from megacore.store.io.strict_json import StoreError
from megacore.training import progress
from megacore.training.callbacks.bad_steps import NonFinite
from megacore.training.progress import is_scaler_state
from megacore.training.scaler import LARGEST, UNSCALED, Scaler, Scaling

FP16 = ["train.precision=fp16", "evaluate.every=0"]
STOP = "optimizer.non_finite=stop"
CPU = torch.device("cpu")


# -- how it moves

GOOD, OVERFLOW, BROKEN = (1.0, 1.0), (1.0, torch.inf), (torch.nan, torch.nan)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("scaling", "steps", "scales", "good"),
    [
        pytest.param(Scaling(8.0, 3), [GOOD] * 7, [8, 8, 16, 16, 16, 32, 32], 1, id="grows"),
        pytest.param(Scaling(8.0, 3), [OVERFLOW] * 5, [4, 2, 1, 1, 1], 0, id="halves-down-to-the-least"),
        pytest.param(Scaling(8.0, 2, 4.0), [OVERFLOW] * 3, [4, 4, 4], 0, id="least-of-its-own"),
        pytest.param(Scaling(2.0**23, 1), [GOOD] * 3, [2**24] * 3, 0, id="grows-up-to-the-most"),
        pytest.param(Scaling(8.0, 3), [GOOD, GOOD, OVERFLOW, GOOD, GOOD, GOOD], [8, 8, 4, 4, 4, 8], 0, id="in-a-row"),
        pytest.param(Scaling(8.0, 3), [GOOD, (1.0, torch.nan)], [8, 4], 0, id="nan-is-an-overflow"),
        pytest.param(Scaling(8.0, 3), [GOOD, GOOD, BROKEN, GOOD], [8, 8, 8, 16], 0, id="a-broken-loss-says-nothing"),
        pytest.param(UNSCALED, [GOOD, OVERFLOW, BROKEN, GOOD], [1, 1, 1, 1], 0, id="unscaled"),
    ],
)
def test_it_moves_by_the_table(
    scaling: Scaling, steps: list[tuple[float, float]], scales: list[float], good: int
) -> None:
    scaler = Scaler(scaling, CPU)
    seen = []
    for loss, norm in steps:
        scaler.update(torch.tensor(loss), torch.tensor(norm))
        seen.append(float(scaler.scale))
    assert seen == scales
    assert int(scaler.good_steps) == good


@pytest.mark.quick
@pytest.mark.parametrize(
    ("scaling", "step", "overflows"),
    [
        (Scaling(8.0), GOOD, False),
        (Scaling(8.0), OVERFLOW, True),
        (Scaling(8.0), (1.0, torch.nan), True),
        (Scaling(8.0), BROKEN, False),
        (Scaling(8.0, minimum=8.0), OVERFLOW, False),
        (UNSCALED, OVERFLOW, False),
    ],
)
def test_what_a_smaller_scale_may_mend(scaling: Scaling, step: tuple[float, float], overflows: bool) -> None:
    assert bool(Scaler(scaling, CPU).overflow(*map(torch.tensor, step))) is overflows


@pytest.mark.quick
def test_it_goes_on_as_it_was() -> None:
    scaler = Scaler(Scaling(8.0, 3), CPU)
    for loss, norm in [GOOD, OVERFLOW, GOOD, GOOD]:
        scaler.update(torch.tensor(loss), torch.tensor(norm))
    again = Scaler(Scaling(2.0**16, 3), CPU)
    again.load(scaler.state())
    assert again.state() == scaler.state() == {"scale": 4.0, "good_steps": 2}
    again.load(None)
    assert again.state() == scaler.state()
    bounded = Scaler(Scaling(2.0**16, 3, 32.0), CPU)
    bounded.load(scaler.state())
    assert bounded.state() == {"scale": 32.0, "good_steps": 2}
    unscaled = Scaler(UNSCALED, CPU)
    unscaled.load(scaler.state())
    assert unscaled.state() is None and float(unscaled.scale) == 1


def test_a_scale_that_cannot_move_is_a_scale() -> None:
    """Else losses would be multiplied by it, and gradients never divided."""
    fixed = Scaler(Scaling(LARGEST, minimum=LARGEST), CPU)
    fixed.update(torch.tensor(1.0), torch.tensor(torch.inf))
    assert fixed.scaling.scales and fixed.state() == {"scale": LARGEST, "good_steps": 0}


@pytest.mark.quick
@pytest.mark.parametrize(
    "broken",
    [
        3,
        {},
        {"scale": 3.0, "good_steps": 1},
        {"scale": 0.0, "good_steps": 1},
        {"scale": 4.0, "good_steps": -1},
        {"scale": 4.0, "good_steps": True},
        {"scale": "4", "good_steps": 1},
        {"scale": float("inf"), "good_steps": 1},
    ],
)
def test_what_is_no_state_is_refused(broken: object) -> None:
    assert not is_scaler_state(broken)
    counts = {"step": 1, "consumed_samples": 8, "tokens": 64, "optimizer_steps": 1, "data_order": 2, "recipe": {}}
    assert progress.Progress.read({**counts, "scaler": None}, "t").scaler is None
    with pytest.raises(StoreError, match="scaler is no state of a loss scale"):
        progress.Progress.read({**counts, "scaler": broken}, "t")


# -- in training


def overflow(made: engine.Trainer, steps: set[int], name: str | None = None) -> None:
    """A gradient of this rank overflows in some steps: in one microbatch, in one element."""
    name = name or next(reversed(list(made.model.parameters)))
    each, count = len(made.batches.microbatches(0)), 0

    def spoil(gradient: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if (count - 1) // each + 1 in steps and (count - 1) % each == 0:
            gradient = gradient.clone()
            gradient.view(-1)[0] = torch.inf
        return gradient

    made.model.parameters[name].register_hook(spoil)


@dataclass(frozen=True)
class Seen:
    """A run in which one rank's gradient overflows: its end, and whether this rank's weights moved in each step."""

    place: tuple[int, int]
    last: int
    records: list[dict[str, float | None]]
    moved: list[bool]
    weights: dict[str, np.ndarray]


def with_overflow(recipe: str, overrides: list[str], rank: int, steps: set[int]) -> Seen:
    made = trainer(recipe, overrides, log=True)
    if made.mesh.rank == rank:
        overflow(made, steps)
    moved, before = [], weights(made)
    plain = made.train_step.gradients.updated

    def noted() -> None:
        nonlocal before
        plain()
        after = weights(made)
        moved.append(not same(after, before))
        before = after

    made.train_step.gradients.updated = noted  # type: ignore[method-assign]
    last = made.fit()
    place = made.mesh.place
    return Seen((place.pp, place.tp), last, engine.result(made, last).records, moved, before)


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(
    ("mesh", "rank", "world"),
    [
        pytest.param(["mesh.tp=2"], 1, 2, id="tp"),
        pytest.param(["mesh.pp=2"], 0, 2, id="pp-first"),
        pytest.param(["mesh.pp=2", "pipeline.chunks=2", "pipeline.schedule=interleaved"], 1, 2, id="pp-interleaved"),
        pytest.param([], 1, 2, id="dp"),
        pytest.param(["mesh.tp=2", "mesh.pp=2"], 5, 8, id="tp-pp-dp"),
        pytest.param(["zero.shard=optimizer"], 1, 2, id="zero1"),
        pytest.param(["zero.shard=gradients", "mesh.tp=2"], 2, 4, id="zero2-tp"),
    ],
)
def test_an_overflow_on_one_rank_skips_on_all(
    pool: Pool, recipe: str, tmp_path: Path, mesh: list[str], rank: int, world: int
) -> None:
    overrides = [f"out={tmp_path / 'run'}", "train.steps=6", "loss_scale.growth_interval=2", *FP16, *mesh]
    ranks = pool.run(world, with_overflow, recipe, overrides, rank, {2, 5})
    for seen in ranks:
        assert seen.last == 6
        assert seen.moved == [True, False, True, True, False, True]
        assert all(np.isfinite(value).all() for value in seen.weights.values())
        assert same(seen.weights, next(other for other in ranks if other.place == seen.place).weights)
    records = ranks[0].records
    assert [record["skipped_steps"] for record in records] == [0, 1, 1, 1, 2, 2]
    assert [record["loss_scale"] for record in records] == [2**16, 2**16, 2**15, 2**15, 2**16, 2**15]
    assert [record["grad_norm"] is None for record in records] == [False, True, False, False, True, False]
    assert None not in [record["loss"] for record in records]


def test_a_gradient_that_is_never_finite_stops_at_the_smallest_scale(recipe: str) -> None:
    made = trainer(recipe, [*FP16, STOP, "loss_scale.initial=4", "loss_scale.minimum=2", "train.steps=10"])
    start = weights(made)
    overflow(made, set(range(1, 11)))
    with pytest.raises(NonFinite, match=r"step 2, .*the gradient is not even at loss_scale\.minimum \(2\)"):
        made.fit()
    assert same(weights(made), start)


@pytest.mark.parametrize(("smallest", "told"), [(LARGEST, {"non_finite"}), (1.0, set())], ids=["fixed", "moves"])
def test_a_step_is_told_that_is_left_out_for_no_want_of_a_smaller_scale(
    recipe: str, tmp_path: Path, smallest: float, told: set[str]
) -> None:
    scale = [f"out={tmp_path / 'run'}", f"loss_scale.initial={LARGEST}", f"loss_scale.minimum={smallest}"]
    made = trainer(recipe, [*FP16, *scale, "optimizer.non_finite=skip", "train.steps=3"], log=True)
    overflow(made, {2}, "layers.0.attn_norm.weight")
    with mock.patch.object(made, "report") as report:
        made.fit()
    assert {call.args[0].kind for call in report.call_args_list} == told


@pytest.mark.in_turn(2, 1)
def test_the_scale_changes_nothing_but_what_would_have_vanished(recipe: str) -> None:
    """Gradients are scaled, and the norm, the clipping and the update do not see it."""

    def after(scale: float, *overrides: str) -> tuple[list[Tensor], dict[str, np.ndarray]]:
        made = trainer(recipe, [*FP16, f"loss_scale.initial={scale}", *overrides])
        stats = [made.train_step(made.upload(made.batches.microbatches(step), 1), 1e-2) for step in range(3)]
        return [value for each in stats for value in (each.loss, each.grad_norm)], weights(made)

    for clip in ("0.1", "null"):
        (numbers, one), (other_numbers, other) = (after(2**power, f"optimizer.clip={clip}") for power in (14, 16))
        np.testing.assert_allclose(other_numbers, numbers, rtol=2e-4)
        for name, value in one.items():
            np.testing.assert_allclose(other[name], value, atol=2e-3, err_msg=name)
    (_, norm, *_), _ = after(2.0**-20, f"loss_scale.minimum={2.0**-24}")
    assert norm < 0.5 * numbers[1]


@pytest.mark.parametrize("clip", ["0.1", "null"])
def test_the_optimizer_sees_gradients_without_the_scale(recipe: str, clip: str) -> None:
    """By its first moments: AdamW's update itself would hardly tell."""
    found = []
    for precision in ("fp16", "fp32"):
        made = trainer(recipe, [f"train.precision={precision}", f"optimizer.clip={clip}"])
        made.train_step(made.upload(made.batches.microbatches(0), 1), 1e-2)
        store = device_store(made.train_step.optimizer)
        found.append([store.adamw.state[target.tensor]["exp_avg"].clone() for target in store.targets])
    for narrow, wide in zip(*found, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=0, atol=0.01 * float(wide.abs().max()))


# -- resuming


def test_a_run_of_another_precision_begins_anew(recipe: str, tmp_path: Path) -> None:
    common = ["evaluate.every=0", "train.steps=4", "checkpoint.every=2", "checkpoint.at_end=false"]
    train(recipe, [f"out={tmp_path / 'bf16'}", "train.precision=bf16", *common])
    made = trainer(recipe, [f"checkpoint.resume={path_of(tmp_path / 'bf16', 2)}", "train.precision=fp16", *common])
    assert made.train_step.scaler.state() == {"scale": 2.0**16, "good_steps": 0}
