"""The training engine from token files to metrics: the same numbers in every layout, and what ends a run early."""

import gc
from collections.abc import Sequence
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, cast

import engine
import numpy as np
import pytest
import torch
from device_store import device_store
from engine import GPT2, LLAMA, RECIPE, Result, of, same, train, trainer, weights, write_recipe
from pool import Pool

from megacore.data.batches import Batch
from megacore.models import assemble
from megacore.models.decoder import Microbatch
from megacore.parallel.gradients.buckets import WholeSpan
from megacore.parallel.memory.recompute import PLAIN, Activations, Runner
from megacore.training.callbacks.bad_steps import BadSteps, NonFinite
from megacore.training.callbacks.evaluation import Evaluation
from megacore.training.progress import Progress
from megacore.training.step import Stats

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def one(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(recipe, [f"out={tmp_path_factory.mktemp('one') / 'run'}"])


# -- any layout, the same numbers

LEAN = ["memory.offload_activations=true", "memory.loss_chunk=3"]


@pytest.mark.in_turn(8)
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        pytest.param(1, ["batch.micro_size=4"], id="one-larger-microbatches"),
        pytest.param(2, [], id="dp2"),
        pytest.param(3, ["batch.micro_size=1"], id="dp3-uneven"),
        pytest.param(4, ["mesh.cp=2", "mesh.tp=2", "batch.micro_size=1"], id="cp2-tp2"),
        pytest.param(4, ["mesh.cp=2", "mesh.pp=2", "context.exchange=heads", "batch.micro_size=1"], id="cp2-pp2-heads"),
        pytest.param(2, ["mesh.pp=2", "pipeline.chunks=2", "pipeline.schedule=interleaved"], id="pp2-interleaved"),
        pytest.param(2, ["mesh.tp=2", "memory.recompute=selective", *LEAN], id="tp2-selective"),
        pytest.param(2, ["mesh.tp=2", "memory.recompute=full", *LEAN], id="tp2-full"),
        pytest.param(4, ["mesh.pp=4", "memory.recompute=[full,selective,none,none]"], id="pp4-each-stage"),
    ],
)
def test_every_layout_logs_what_one_process_logs(
    pool: Pool, recipe: str, one: Result, tmp_path: Path, world: int, overrides: list[str]
) -> None:
    ranks = pool.run(world, train, recipe, [f"out={tmp_path / 'run'}", *overrides])
    assert [rank.last for rank in ranks] == [5] * world
    for key in ("loss", "grad_norm", "validation_loss", "lr", "tokens"):
        assert len(one.values(key)) >= 3
        np.testing.assert_allclose(ranks[0].values(key), one.values(key), rtol=TOLERANCE, err_msg=key)


def test_it_learns(one: Result) -> None:
    """Else equal losses would prove little."""
    assert one.values("loss")[-1] < one.values("loss")[0] - 0.1
    assert one.values("validation_loss")[-1] < one.values("validation_loss")[0]


def test_the_loss_is_of_other_data_in_every_step_and_validation_of_none_of_it(recipe: str) -> None:
    made = trainer(recipe, ["batch.micro_size=1"])
    seen = {bytes(b.tokens) for step in range(5) for b in made.batches.microbatches(step)}
    assert len(seen) == 5 * 8
    held_out = {bytes(b.tokens) for b in of(made, Evaluation)._held_out.microbatches(0)}
    assert held_out and not held_out & seen


# -- non-finite numbers

STOP = "optimizer.non_finite=stop"


def stop_at(recipe: str, overrides: list[str], rank: int, steps: set[int], before: int) -> tuple[str, bool, bool]:
    """(the error; whether the weights are those after ``before`` steps; whether they moved at all)."""
    made = trainer(recipe, overrides)
    start = weights(made)
    if made.mesh.rank == rank:
        engine.scale_losses(made, dict.fromkeys(steps, torch.nan))
    history = [start]
    plain = made.train_step.optimizer.update

    def recorded(lr: float, *others: torch.Tensor) -> None:
        plain(lr, *others)
        history.append(weights(made))

    made.train_step.optimizer.update = recorded  # type: ignore[assignment, method-assign]
    with pytest.raises(NonFinite) as error:
        made.fit()
    assert len(history) > before + 1
    end = weights(made)
    return str(error.value), same(end, history[before]), not same(end, start)


LATER = "is not finite on rank 3 ("
"""Of tp=2 x pp=2 it is on the last stage, where losses are."""
FOUR = ["mesh.tp=2", "mesh.pp=2"]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("world", "overrides", "bad", "before", "words"),
    [
        (1, [STOP], {3}, 2, ["step 3, samples 16 to 23 of ", "is not finite on rank 0 (", "optimizer.non_finite=skip"]),
        (1, [STOP, "log.every=4"], {3}, 2, ["step 3, samples 16 to 23 of "]),
        (4, [STOP, "log.every=2", *FOUR], {3}, 2, ["step 3, samples 16 to 23 of ", LATER, "pp=1", "tp=1"]),
        # After step 4 the weights do not change any more, although step 5 is sound and nobody looks before step 6.
        (
            4,
            ["train.steps=8", "log.every=6", "optimizer.non_finite=skip", "optimizer.max_skipped=2", *FOUR],
            {1, 2, 4},
            3,
            ["step 4, samples 24 to 31 of ", LATER, "raise optimizer.max_skipped (2): with this one 3 of the last 100"],
        ),
    ],
    ids=["at-once", "at-the-next-record", "of-four", "too-many-skipped"],
)
def test_a_loss_that_is_no_number_stops_and_the_weights_are_those_before(
    pool: Pool, recipe: str, world: int, overrides: list[str], bad: set[int], before: int, words: list[str]
) -> None:
    """On all ranks, which name the one. Later steps are finite again: they must not move the weights either."""
    arguments = recipe, overrides, world - 1, bad, before
    for message, untouched, moved in [stop_at(*arguments)] if world == 1 else pool.run(world, stop_at, *arguments):
        assert message.startswith(words[0]) and all(word in message for word in words), message
        assert untouched and moved


def test_a_gradient_alone_is_told_from_a_loss(recipe: str) -> None:
    made = trainer(recipe, [STOP])
    name, parameter = next(iter(made.model.parameters.items()))
    parameter.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(NonFinite, match=r"step 1, .*the loss is finite on every rank, the gradient is not"):
        made.fit()
    assert torch.isfinite(parameter).all(), name


def test_a_loss_alone_does_not_update_either(recipe: str) -> None:
    """A loss can be infinite where its gradient is finite."""
    made = trainer(recipe, [STOP, "train.steps=3"])
    start = weights(made)
    plain = made.train_step.backward

    def infinite(*given: Any) -> Stats:
        stats = plain(*given)
        stats.loss.fill_(torch.inf)
        stats.own_loss.fill_(torch.inf)
        return stats

    made.train_step.backward = infinite  # type: ignore[assignment, method-assign]
    with pytest.raises(NonFinite, match=r"step 1, .*rank 0"):
        made.fit()
    assert same(weights(made), start)


def stats_of(loss: float, overflow: bool = False) -> Stats:
    norm = torch.tensor(torch.inf if overflow else 1.0)
    one = torch.tensor(loss)
    return Stats(one, norm, torch.tensor(1), one, torch.tensor(1.0), torch.tensor(overflow), norm**2, torch.empty(0))


@pytest.mark.quick
def test_skipped_steps_are_forgotten_after_a_hundred_and_overflows_do_not_count() -> None:
    def ended(allowed: int | None, period: int, overflow: bool = False) -> tuple[int, int]:
        steps, mesh = BadSteps(allowed), SimpleNamespace(device=torch.device("cpu"))
        run = SimpleNamespace(start=Progress(step=7), mesh=mesh, step=0, halt=lambda flag: None)
        steps.on_start(cast(engine.Trainer, run))
        for run.step in range(1, 1001):
            bad = run.step % period == 0
            stats = stats_of(torch.nan if bad and not overflow else 1.0, bad and overflow)
            steps.on_gradients(cast(engine.Trainer, run), stats)
        return int(steps._first), int(steps._skipped) - 7

    assert ended(10, 10) == (0, 100)  # 10 of any 100, for ever
    assert ended(10, 9) == (99, 111)  # the 11th, 88 steps after the first
    assert ended(None, 2) == (0, 500)
    assert ended(1, 2, overflow=True) == (0, 500)
    assert ended(0, 700) == (700, 1)


def test_a_skipped_step_changes_nothing(recipe: str) -> None:
    """Neither weights nor moments: going on with the data of the steps that were not skipped gives the same."""

    def batches(made: engine.Trainer, step: int) -> list[Microbatch]:
        return made.upload(made.batches.microbatches(step), 1)

    with_gap, without = trainer(recipe, []), trainer(recipe, [])
    engine.scale_losses(with_gap, {2: torch.nan})
    for step in range(4):
        with_gap.train_step(batches(with_gap, step), 1e-2)
        if step != 1:
            without.train_step(batches(without, step), 1e-2)
    assert same(weights(with_gap), weights(without))


# -- what is recorded


@pytest.mark.parametrize("peak", ["1e-12", "1"], ids=["exceeded", "above"])
def test_the_utilisation_is_never_above_1_without_a_word(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], peak: str
) -> None:
    records = train(recipe, [f"out={tmp_path / 'run'}", f"log.peak_tflops={peak}"]).records
    known = [record["mfu"] for record in records if "loss" in record]
    said = capsys.readouterr().err.count("mfu is null from here on")
    if peak == "1":
        assert not said and all(mfu is not None and 0 < mfu < 1 for mfu in known)
    else:
        assert said == 1 and known == [None] * 5


# -- dropout


@pytest.fixture(scope="module")
def dropout(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_recipe(tmp_path_factory.mktemp("dropout"), RECIPE | {"model": GPT2})


def loss_of(made: engine.Trainer, batch: Sequence[Batch], seed: int) -> float:
    return made.train_step.backward(made.upload(batch, seed), made.enter).loss.item()


def test_evaluation_drops_nothing_and_training_goes_on_dropping(dropout: str) -> None:
    made = trainer(dropout, [])
    evaluation = of(made, Evaluation)
    assert evaluation.losses(made) == evaluation.losses(made)
    plain = trainer(dropout, ["model.resid_pdrop=0.0", "model.embd_pdrop=0.0", "model.attn_pdrop=0.0"])
    assert evaluation.losses(made) == of(plain, Evaluation).losses(plain)
    batch = made.batches.microbatches(0)
    assert loss_of(made, batch, 1) != loss_of(plain, batch, 1)


# -- the optimizer as the recipe describes it


def test_norms_and_biases_do_not_decay(recipe: str) -> None:
    overrides = ["model.attention_bias=true", "model.mlp_bias=true", "optimizer.weight_decay=0.25"]
    made = trainer(recipe, overrides)
    decays = {
        id(tensor): group["weight_decay"]
        for group in device_store(made.train_step.optimizer).adamw.param_groups
        for tensor in group["params"]
    }
    names = {id(part): part.span.name for part in made.train_step.gradients.parts if isinstance(part, WholeSpan)}
    found = {names[id(t.part)]: decays.pop(id(t.tensor)) for t in device_store(made.train_step.optimizer).targets}
    assert not decays
    assert len(found) == len(made.model.parameters)
    for name, decay in found.items():
        assert decay == (0.0 if "norm" in name or name.endswith("bias") else 0.25), name
    assert set(found.values()) == {0.0, 0.25}


def test_clipping_bounds_the_norm_that_the_optimizer_sees(recipe: str) -> None:
    def gradient_norms(clip: str) -> tuple[float, float]:
        """(as logged, as AdamW has used it)."""
        made = trainer(recipe, [f"optimizer.clip={clip}"])
        adamw, seen = device_store(made.train_step.optimizer).adamw, list[torch.Tensor]()

        def spy(*_: object) -> None:
            gradients = [p.grad for group in adamw.param_groups for p in group["params"]]
            seen.append(torch.stack([gradient.norm() for gradient in gradients]).norm())

        adamw.register_step_post_hook(spy)
        stats = made.train_step(made.upload(made.batches.microbatches(0), 1), 1e-2)
        return stats.grad_norm.item(), seen[0].item()

    logged, seen = gradient_norms("null")
    assert seen == pytest.approx(logged, rel=TOLERANCE)
    assert gradient_norms(str(logged * 2)) == pytest.approx((logged, logged), rel=TOLERANCE)
    assert gradient_norms(str(logged / 10)) == pytest.approx((logged, logged / 10), rel=1e-5)  # torch adds 1e-6


def test_the_schedule_arrives_in_the_optimizer(recipe: str) -> None:
    made = trainer(recipe, [])
    plain, seen = made.train_step.optimizer.update, list[float]()

    def recorded(lr: float, *others: torch.Tensor) -> None:
        plain(lr, *others)
        seen.append(device_store(made.train_step.optimizer).adamw.param_groups[0]["lr"])
        assert len({group["lr"] for group in device_store(made.train_step.optimizer).adamw.param_groups}) == 1

    made.train_step.optimizer.update = recorded  # type: ignore[assignment, method-assign]
    made.fit()
    # Two steps of warm-up, then half a cosine from 1e-2 towards a tenth of it over three.
    np.testing.assert_allclose(seen, [0.005, 0.01, 0.01, 0.00775, 0.00325], rtol=1e-12)


# -- precision


FP32, BF16 = "train.precision=fp32", "train.precision=bf16"
PRECISIONS = {
    "masters": ([BF16], FP32, 0.0, 0.003),
    "pure": ([BF16, "optimizer.master_weights=false"], FP32, 0.003, 0.02),
    "moments": ([BF16, "optimizer.moments=bf16"], BF16, 0.0, 0.001),
    "fp16": (["train.precision=fp16"], FP32, 0.0, 0.0005),
}
"""{name: (overrides, the wider run, the bounds of the largest difference of 20 losses, relative)}. Seen: 0.05 %, 0.6 %
(more is lost without masters than with them), 0.014 % and 0.004 %."""


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("name", PRECISIONS)
def test_fewer_bits_train_as_more_do(recipe: str, tmp_path: Path, name: str) -> None:
    overrides, wider, least, most = PRECISIONS[name]
    common = ["train.steps=20", "evaluate.every=0", "model.hidden_size=32", "optimizer.lr=3e-3"]
    common += ["model.initializer_range=0.05"]
    wide, narrow = (
        train(recipe, [f"out={tmp_path / out}", *common, *own])
        for out, own in (("wide", [wider]), ("narrow", overrides))
    )
    losses = np.array(wide.values("loss"))
    assert losses[0] - losses[-1] > 0.3
    assert least < np.abs(narrow.values("loss") / losses - 1).max() < most
    np.testing.assert_allclose(narrow.values("grad_norm"), wide.values("grad_norm"), rtol=5 * most)
    assert narrow.values("skipped_steps")[-1] == 0
    assert {*narrow.values("loss_scale")} == ({2.0**16} if name == "fp16" else set()) and not wide.values("loss_scale")


# -- memory


def kept_by(recipe: str, overrides: list[str]) -> tuple[list[Activations], list[int | None]]:
    """What this rank keeps of each of its chunks, and the tokens whose logits its heads have at a time."""
    arrived: list[Activations] = []

    def note(activations: Activations, *others: object) -> Runner:
        arrived.append(activations)
        return PLAIN

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "runner", note)
        chunks = trainer(recipe, overrides).model.chunks
    return arrived, [chunk.head.losses.chunk for chunk in chunks if chunk.head is not None]


def test_each_stage_keeps_what_the_recipe_says_of_it(pool: Pool, recipe: str) -> None:
    """All of its chunks do, there and back; numbers cannot tell."""
    all_alike = ["memory.recompute=selective", "memory.offload_activations=true", "memory.loss_chunk=3"]
    assert kept_by(recipe, all_alike) == ([Activations("selective", offload=True)], [3])
    each = ["memory.recompute=[full,none]", "memory.offload_activations=[false,true]"]
    found = pool.run(2, kept_by, recipe, ["mesh.pp=2", "pipeline.schedule=zb-v", "pipeline.chunks=2", *each])
    assert found == [([Activations("full")] * 2, [None]), ([Activations(offload=True)] * 2, [])]


# -- the host


def test_all_ranks_collect_garbage_at_the_same_steps(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = trainer(recipe, ["train.steps=5", "evaluate.every=0"]), list[bool | int]()
    backward = made.train_step.backward

    def noted(*given: Any) -> Stats:
        seen.append(gc.isenabled())
        return backward(*given)

    monkeypatch.setattr(made.train_step, "backward", noted)
    monkeypatch.setattr("megacore.training.callbacks.garbage.EVERY", 2)
    monkeypatch.setattr(gc, "collect", seen.append)
    made.fit()
    assert seen == [False, False, 1, False, False, 1, False] and gc.isenabled()


# -- compiled blocks


@pytest.mark.in_turn(12, 0)
@pytest.mark.slow
def test_compiled_blocks_give_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, RECIPE | {"model": LLAMA | {"num_hidden_layers": 2}})
    common = ["train.steps=2", "schedule.warmup_steps=1", "mesh.tp=2", "evaluate.every=0"]
    plain, fast = (
        pool.run(2, train, path, [f"out={tmp_path / compiled}", f"train.compile={compiled}", *common])[0]
        for compiled in ("false", "true")
    )
    for key in ("loss", "grad_norm"):
        assert len(fast.values(key)) == 2
        np.testing.assert_allclose(fast.values(key), plain.values(key), rtol=TOLERANCE, err_msg=key)


def test_compile_reaches_every_block(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every chunk, once; the numbers are the slow one's."""
    compiled: list[torch.nn.Module] = []

    def note(forward: MethodType, options: object) -> MethodType:
        assert isinstance(forward.__self__, torch.nn.Module)
        compiled.append(forward.__self__)
        return forward

    monkeypatch.setattr(torch, "compile", note)
    made = trainer(recipe, ["train.compile=true", "pipeline.schedule=interleaved", "pipeline.chunks=2"])
    made.model.compile()
    assert compiled == [block for chunk in made.model.chunks for block in chunk.layers.values()]
    assert (len(made.model.chunks), len(compiled)) == (2, 4)
