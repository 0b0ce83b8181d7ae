"""Replicas that compute the same microbatch find who computes wrong, and leave no trace in the run."""

from collections.abc import Callable
from pathlib import Path

import engine
import numpy as np
import pytest
import torch
from engine import GPT2, RECIPE, Result, of, trainer, write_recipe
from pool import Pool

from megacore.corruption import Corrupted, at_fault
from megacore.models.decoder import Microbatch
from megacore.parallel.pipeline.schedules import Kind
from megacore.training.callbacks import recompute
from megacore.training.callbacks.recompute import Recompute
from megacore.training.trainer import Trainer

EXPERTS = {**RECIPE["model"], "family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
DROPS = {**GPT2, "resid_pdrop": 0.3, "embd_pdrop": 0.1, "attn_pdrop": 0.2}
EVERY = [
    "recovery.recompute_every=1",
    "batch.global_size=8",
    "evaluate.every=0",
    "train.steps=2",
    "schedule.warmup_steps=0",
]


def run(recipe: str, overrides: list[str]) -> tuple[Result, int]:
    """What a run comes to, and the microbatches that were computed for comparison."""
    made, count = trainer(recipe, overrides, log=True), [0]
    computed = recompute.computed

    def counted(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        count[0] += 1
        loss, gradients = computed(*given)  # type: ignore[arg-type]
        assert int(gradients)
        return loss, gradients

    recompute.computed = counted  # type: ignore[assignment]
    try:
        return engine.result(made, made.fit()), count[0]
    finally:
        recompute.computed = computed


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(
    ("world", "model", "overrides"),
    [
        (1, DROPS, []),
        (2, DROPS, ["mesh.dp=2"]),
        (2, DROPS, ["mesh.dp=2", "train.precision=bf16", "memory.recompute=full", "zero.shard=optimizer"]),
        (2, DROPS, ["mesh.dp=2", "zero.shard=gradients", "train.precision=fp16"]),
        (2, DROPS, ["mesh.dp=2", "zero.shard=parameters"]),
        (4, None, ["mesh.tp=2", "mesh.cp=2", "batch.micro_size=1"]),
        (4, None, ["mesh.dp=2", "mesh.pp=2", "pipeline.chunks=2", "pipeline.schedule=interleaved"]),
        (2, None, ["mesh.pp=2", "pipeline.schedule=zb-h1"]),
        (4, None, ["mesh.dp=2", "mesh.pp=2", "pipeline.schedule=zb-h1", "zero.shard=parameters"]),
        (4, EXPERTS, ["mesh.dp=2", "mesh.ep=2", "experts.sequence_balance=0.1", "experts.z_loss=0.1"]),
    ],
    ids=["one", "dp2", "zero-1", "zero-2", "zero-3", "tp2-cp2", "pp2-dp2", "zb", "zb-zero-3", "ep2-dp2"],
)
def test_it_leaves_no_trace(
    pool: Pool, tmp_path: Path, world: int, model: dict[str, object] | None, overrides: list[str]
) -> None:
    recipe = write_recipe(tmp_path, RECIPE | {"model": model or RECIPE["model"]})
    on = [f"out={tmp_path / 'on'}", *EVERY, *overrides]
    off = [f"out={tmp_path / 'off'}", *EVERY, *overrides, "recovery.recompute_every=0"]
    found, plain = (pool.run(world, run, recipe, each) for each in (on, off))
    for (one, count), (other, none) in zip(found, plain, strict=True):
        assert count == (2 if "mesh.dp=2" in overrides else 4) and none == 0
        for key in ("loss", "grad_norm"):
            assert one.values(key) == other.values(key)
        assert all(np.array_equal(value, other.weights[name]) for name, value in one.weights.items())


def broken(made: Trainer, calls: Callable[[int], bool], where: str) -> None:
    """Have this rank compute wrong by a bit in some of the calls of its pipeline, counted from 1."""
    plain, count = made.train_step.pipeline.train, 0
    parameter = next(each for name, each in made.model.parameters.items() if "down" in name)
    bad = [False]

    def train(microbatches: list[Microbatch], scale: torch.Tensor, enter: Callable[[Kind], object]) -> torch.Tensor:
        nonlocal count
        count += 1
        bad[0] = calls(count)
        loss = plain(microbatches, scale, enter)
        if where == "noise":
            return loss * (1 + count * 1e-9)
        return torch.nextafter(loss, loss + 1) if bad[0] and where == "loss" else loss

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        wrong = gradient.clone()
        wrong.view(-1)[7] = torch.nextafter(wrong.view(-1)[7], wrong.new_tensor(1.0))
        return wrong if bad[0] and where == "gradients" else gradient

    made.train_step.pipeline.train = train  # type: ignore[assignment, method-assign]
    parameter.register_hook(hook)


def said(recipe: str, overrides: list[str], rank: int, first: int, every: int, where: str) -> list[str]:
    """What this rank says, where calls from ``first`` on go wrong: each ``every``th of ``rank``, or of all if < 0."""
    made, heard = trainer(recipe, overrides), list[str]()
    callback = of(made, Recompute)
    compare = callback._compare

    def noted(run: Trainer) -> None:
        try:
            compare(run)
        except Corrupted as error:
            heard.append(f"{error.rank}: {error}")

    callback._compare = noted  # type: ignore[method-assign]
    if rank in (made.mesh.rank, -1):
        broken(made, lambda call: call >= first and (call - first) % every == 0, where)
    made.fit()
    return heard


@pytest.mark.parametrize("where", ["loss", "gradients"])
def test_of_three_replicas_the_one_that_computes_wrong_is_named(
    pool: Pool, recipe: str, tmp_path: Path, where: str
) -> None:
    given = [f"out={tmp_path / 'run'}", *EVERY, "mesh.dp=3", "batch.global_size=6", "recovery.recompute_every=2"]
    found = pool.run(3, said, recipe, given, 1, 2, 1, where)
    assert found[0] == found[2] == []
    text = f"computed other bits of the {where} of a microbatch of step 2 (of dp=1)"
    assert found[1] == [f"1: rank 1 {text} than its replicas, ranks 0, 2"]


def test_of_two_replicas_one_that_does_not_repeat_itself_is_named(pool: Pool, recipe: str, tmp_path: Path) -> None:
    given = [f"out={tmp_path / 'run'}", *EVERY, "mesh.dp=2", "recovery.recompute_every=2"]
    found = pool.run(2, said, recipe, given, 1, 2, 10, "gradients")
    text = "computed other bits of the gradients of a microbatch of step 2 (of dp=1)"
    assert found == [[], [f"1: rank 1 {text} than its replicas, rank 0"]]
    found = pool.run(2, said, recipe, [*given, f"out={tmp_path / 'again'}"], 1, 2, 1, "gradients")
    assert found == [[f"None: ranks 0-1 each {text}, and nobody knows which is right"]] * 2


def test_without_a_replica_a_rank_is_compared_with_itself(recipe: str, tmp_path: Path) -> None:
    given = [f"out={tmp_path / 'run'}", *EVERY, "recovery.recompute_every=2"]
    text = "computed other bits of the loss of a microbatch of step 2 (of dp=0) when it was computed again"
    assert said(recipe, given, 0, 3, 10, "loss") == [f"0: rank 0 {text}"]


def test_kernels_that_do_not_repeat_are_told_once(
    recipe: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said(recipe, [f"out={tmp_path / 'run'}", *EVERY], 0, 1, 1, "noise") == []
    told = "no rank comes to the same bits twice, for which kernels must repeat bitwise: recovery.recompute_every"
    assert capfd.readouterr().err.count(told) == 1


def test_who_is_at_fault() -> None:
    assert at_fault({0: "aa", 1: "bb", 2: "aa"}) == [1]
    assert at_fault({0: "aa", 1: "ba"}) == [1] and at_fault({0: "aa", 1: "bc"}) == [1]
    assert at_fault({0: "aa", 1: "bb"}) == [0, 1] and at_fault({0: "aba"}) == [0]
