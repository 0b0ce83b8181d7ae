"""The rungs of the data parallel ladder in bf16, fp16 and fp8: where sums have one order they agree bitwise, elsewhere
within a bound; and an overflow on one rank is left out by all."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from extended_family import extended
from layouts import BIASES, FP8_EXPERTS, GPT2, LLAMA, NO_DROPOUT, RUNGS
from oracle import Case, Run, lively, microbatches, relative
from pool import Pool
from torch import Tensor

from megacore.models.assemble import Model
from megacore.parallel.enum_errors import ZeroShard
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.layers.fp8 import Fp8Weight
from megacore.parallel.layers.fp8_experts import Fp8ExpertsWeight
from megacore.parallel.memory.recompute import Activations
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.weights.layout import MeshShape
from megacore.training.scaler import UNSCALED, Scaling
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import Stats, TrainStep

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# fp8 leaves out the first layer and the last.
UNTIED = Case("llama", LLAMA, sequences=8, ignored=0.3).with_layers(4)
TIED = Case("gpt2", GPT2 | NO_DROPOUT, sequences=8).with_layers(4)
BIASED = Case("llama-tied-biases", LLAMA | BIASES | {"tie_word_embeddings": True}, sequences=8).with_layers(4)
LR, CLIP, STEPS = 1e-2, 0.5, 3
SCALE = 2.0**10


def train_step(case: Case, run: Run, precision: str, once: bool = True) -> tuple[Model, TrainStep]:
    """``once``: whether weights in fp8 are cast for all their products."""
    mesh, dtype = Mesh.create(run.mesh), DTYPES[precision]
    layout = lively(run.layout(case))
    model = Model.create(case.config, layout, mesh, dtype, activations=run.kept(mesh))
    if precision == "fp8":
        model.use_fp8()
    if not once:
        model.parameters.casts.clear()
    model.parameters.initialise(seed=1)
    # Small buckets, so that there are several.
    gradients = Gradients(model.parameters, model.chunks, torch.float32, run.shard, run.replicas, bucket_bytes=20_000)
    optimizer = Optimizer(gradients, lr=LR, clip=CLIP)
    pipeline = Pipeline(mesh, model.chunks, dtype, run.schedule)
    scaling = Scaling(SCALE) if precision == "fp16" else UNSCALED
    return model, TrainStep(mesh, pipeline, gradients, optimizer, scaling)


def kept(step: TrainStep) -> dict[str, np.ndarray]:
    """Weights, masters and moments of this rank's parameters, whole, in fp32."""
    optimizer, found = step.optimizer, dict[str, Tensor]()
    for name, parameter in step.gradients.parameters.items():
        if step.gradients.parameters.shards[name].param.buffer:
            continue
        found[f"weight of {name}"] = host = torch.empty(parameter.shape)
        optimizer.read_weight(name, host)
        for state in optimizer.states():
            found[f"{state} of {name}"] = host = torch.empty(parameter.shape)
            optimizer.read_into(state, name, host)
    return {name: host.numpy() for name, host in found.items()}


def differing(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not np.array_equal(value, other[name])]


# -- rungs beside each other


@dataclass(frozen=True)
class Ended:
    """Losses and norms of the steps, and what is kept after the last."""

    losses: list[float]
    norms: list[float]
    kept: dict[str, np.ndarray]


def trained(case: Case, run: Run, precision: str) -> dict[ZeroShard, Ended]:
    """The same run on each rung."""
    found = dict[ZeroShard, Ended]()
    for shard in RUNGS:
        run = replace(run, shard=shard)
        _, step = train_step(case, run, precision)
        stats = [step(microbatches(case, run, number, step.mesh), LR) for number in range(STEPS)]
        assert not any(bool(each.overflow) for each in stats)
        losses, norms = [each.loss.item() for each in stats], [each.grad_norm.item() for each in stats]
        found[shard] = Ended(losses, norms, kept(step))
    return found


ALL = (RUNGS,)
SHARED = (("optimizer", "gradients", "parameters"),)
BY_MICROBATCHES = (("none", "optimizer"), ("gradients", "parameters"))
ONE_ORDER = {
    # Two replicas: every sum is a + b.
    "dp2": (UNTIED, Run(MeshShape(dp=2), micro=4), ALL),
    "groups-of-one": (UNTIED, Run(MeshShape(dp=2), micro=2, replicas=2), ALL),
    # The lower rungs sum microbatches first, the upper ones replicas.
    "dp2-accumulation": (UNTIED, Run(MeshShape(dp=2), micro=1), BY_MICROBATCHES),
    "pp2-dp2-v2-accumulation": (
        UNTIED,
        Run(MeshShape(pp=2, dp=2), chunks=2, schedule="interleaved", micro=2),
        BY_MICROBATCHES,
    ),
    # More than two replicas, of norms at least: on `none` the backend orders their sum.
    "tp2-dp2": (UNTIED, Run(MeshShape(tp=2, dp=2), micro=4), SHARED),
    "hsdp": (TIED, Run(MeshShape(dp=4), micro=2, replicas=2), SHARED),
    "hsdp-accumulation": (UNTIED, Run(MeshShape(dp=4), micro=1, replicas=2), (("gradients", "parameters"),)),
}
# Of all rungs, beside `none`; seen: 0 and 5e-9. docs/precision.md states them.
LOSSES, MASTERS = 1e-4, 1e-4


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        *((layout, "bf16") for layout in ONE_ORDER),
        *((layout, "fp8") for layout in ("dp2", "dp2-accumulation", "tp2-dp2", "hsdp")),
        # Its gradients have 11 bits, not 8: here the order of a sum shows in fp32.
        ("dp2-accumulation", "fp16"),
    ],
)
def test_rungs_agree_bitwise_where_sums_have_one_order(pool: Pool, layout: str, precision: str) -> None:
    """Losses, the norm that clips, weights, masters and moments; elsewhere within a bound."""
    case, run, alike = ONE_ORDER[layout]
    for found in pool.run(run.mesh.world, trained, case, run, precision):
        none = found["none"]
        assert min(none.norms) > CLIP
        for first, *others in alike:
            for shard in others:
                assert found[shard].losses == found[first].losses
                assert found[shard].norms == found[first].norms
                assert differing(found[shard].kept, found[first].kept) == []
        for shard in RUNGS:
            np.testing.assert_allclose(found[shard].losses, none.losses, rtol=LOSSES)
            for name, want in none.kept.items():
                if name.startswith("master"):
                    assert relative(found[shard].kept[name], want) <= MASTERS, f"{shard}: {name}"


# -- weights in fp8


@dataclass(frozen=True)
class Cast:
    """A run whose weights are cast once a step, one that casts them for each product, and how often each cast a weight
    or a slice of one."""

    once: Ended
    each: Ended
    casts: tuple[int, int]


@contextmanager
def counted() -> Iterator[list[str]]:
    """What of a weight was cast, by the name of the method."""
    seen = list[str]()

    def watched(kind: type, name: str) -> Any:
        method = getattr(kind, name)

        def cast(weight: Any, *arguments: Any) -> Tensor | None:
            seen.append(name)
            found: Tensor | None = method(weight, *arguments)
            return found

        return patch.object(kind, name, cast)

    with ExitStack() as on:
        for kind, name in product((Fp8Weight, Fp8ExpertsWeight), ("cast", "fill")):
            on.enter_context(watched(kind, name))
        yield seen


@extended()
def cast_both_ways(case: Case, run: Run) -> Cast:
    ended, casts = list[Ended](), list[int]()
    for once in (True, False):
        _, step = train_step(case, run, "fp8", once)
        with counted() as seen:
            stats = [step(microbatches(case, run, number, step.mesh), LR) for number in range(STEPS)]
        losses, norms = [each.loss.item() for each in stats], [each.grad_norm.item() for each in stats]
        ended.append(Ended(losses, norms, kept(step)))
        casts.append(len(seen))
    return Cast(ended[0], ended[1], (casts[0], casts[1]))


FULL = Activations(recompute="full")
# Four linears in each of the two layers between the ends.
CASTS = {
    "none-tp2-full": (UNTIED, Run(MeshShape(tp=2), micro=2, activations=FULL), 8),
    "optimizer-dp2": (UNTIED, Run(MeshShape(dp=2), micro=1, shard="optimizer"), 8),
    "gradients-pp2-dp2": (
        UNTIED,
        Run(MeshShape(pp=2, dp=2), chunks=2, schedule="interleaved", micro=2, shard="gradients"),
        4,
    ),
    # Of slices, which may have nothing of a weight.
    "parameters-dp2-full": (UNTIED, Run(MeshShape(dp=2), micro=1, shard="parameters", activations=FULL), None),
    "parameters-tp2-dp2": (UNTIED, Run(MeshShape(tp=2, dp=2), micro=2, shard="parameters"), None),
    # One layer: two linears of its attention, two weights of experts and two of the shared one.
    "optimizer-ep2-dp2": (FP8_EXPERTS, Run(MeshShape(ep=2, dp=2), micro=1, shard="optimizer"), 6),
    "parameters-etp2-dp2": (FP8_EXPERTS, Run(MeshShape(tp=2, dp=2), micro=2, shard="parameters", etp=True), None),
    "parameters-hsdp": (TIED, Run(MeshShape(dp=4), micro=1, replicas=2, shard="parameters"), None),
}


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("layout", CASTS)
def test_weights_that_are_cast_once_a_step_are_those_cast_for_each_product(pool: Pool, layout: str) -> None:
    """Bit for bit: losses, norms, weights, masters and moments."""
    case, run, weights = CASTS[layout]
    for found in pool.run(run.mesh.world, cast_both_ways, case, run):
        assert (found.once.losses, found.once.norms) == (found.each.losses, found.each.norms)
        assert differing(found.once.kept, found.each.kept) == []
        once, each = found.casts
        assert each == 0
        assert once == weights * STEPS if weights else 0 < once <= 8 * STEPS


# -- an overflow on one rank


@dataclass(frozen=True)
class Overflowed:
    """Of each step whether it was left out; what was kept before the step that overflows and after it; the losses and
    what is kept after the last; and that of a run which never saw this step, and had the scale that came of it."""

    left_out: list[bool]
    scales: list[float]
    updates: list[int]
    around: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    losses: list[float]
    ended: dict[str, np.ndarray]
    calm_losses: list[float]
    calm: dict[str, np.ndarray]


AT, AFTER = 1, 2
"""The step that overflows, and how many come after it."""


def with_overflow(case: Case, run: Run, rank: int) -> Overflowed:
    model, step = train_step(case, run, "fp16")
    armed = False

    def spoil(gradient: Tensor) -> Tensor:
        """In one microbatch, in one element."""
        nonlocal armed
        if not armed:
            return gradient
        armed, gradient = False, gradient.clone()
        gradient.view(-1)[-1] = torch.inf
        return gradient

    if step.mesh.rank == rank:
        model.parameters[next(reversed(list(model.parameters)))].register_hook(spoil)
    stats, scales, updates, before, after = list[Stats](), list[float](), list[int](), None, None
    for number in range(AT + 1 + AFTER):
        if number == AT:
            armed, before = True, kept(step)
        stats.append(step(microbatches(case, run, number, step.mesh), LR))
        if number == AT:
            after = kept(step)
        scales.append(float(stats[-1].scale))
        updates.append(step.optimizer.updates)
    assert before is not None and after is not None
    _, calm = train_step(case, run, "fp16")
    losses = []
    for number in range(AT + 1 + AFTER):
        if number == AT:
            calm.scaler.load({"scale": scales[-1], "good_steps": 0})
        else:
            losses.append(calm(microbatches(case, run, number, calm.mesh), LR).loss.item())
    return Overflowed(
        [bool(each.overflow) for each in stats],
        scales,
        updates,
        (before, after),
        [each.loss.item() for each in stats],
        kept(step),
        losses,
        kept(calm),
    )


SEEDED = {
    "dp": (UNTIED, Run(MeshShape(dp=2), micro=2), 1),
    "tp": (UNTIED, Run(MeshShape(tp=2), micro=4), 1),
    "pp": (TIED, Run(MeshShape(pp=2), micro=4), 0),
    "tp-dp-accumulation": (BIASED, Run(MeshShape(tp=2, dp=2), micro=2), 2),
    "hsdp-accumulation": (UNTIED, Run(MeshShape(dp=4), micro=1, replicas=2), 2),
}


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("shard", RUNGS)
@pytest.mark.parametrize("layout", SEEDED)
def test_an_overflow_on_one_rank_is_left_out_by_all(pool: Pool, layout: str, shard: ZeroShard) -> None:
    case, run, rank = SEEDED[layout]
    for seen in pool.run(run.mesh.world, with_overflow, case, replace(run, shard=shard), rank):
        assert seen.left_out == [False, True, False, False]
        assert seen.scales == [SCALE, SCALE, SCALE / 2, SCALE / 2]
        assert seen.updates == [1, 1, 2, 3]
        before, after = seen.around
        assert differing(before, after) == [] and all(np.isfinite(value).all() for value in after.values())
        assert [*seen.losses[:AT], *seen.losses[AT + 1 :]] == seen.calm_losses
        assert differing(seen.ended, seen.calm) == []
        assert len(differing(seen.ended, after)) > len(after) / 2  # and it goes on
