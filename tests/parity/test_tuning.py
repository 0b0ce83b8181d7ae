"""Adapters and freezing on any layout: the numbers of one process, in float64; and what is frozen stays as it is."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from families import drawn
from oracle import Case, Measured, Run, check, deep, lively, measure, microbatches, relative
from pool import Pool
from test_layouts import BIASES, GPT2, LLAMA, NO_DROPOUT
from torch import Tensor, nn

from megacore.training.optimizer import Optimizer
from megacore.training.step import TrainStep
from models.assemble import Model
from models.lora import Lora
from models.registry import FAMILIES, configure
from models.stages import layout_of
from models.tuning import Tuning
from parallel.gradients.reduce import Gradients
from parallel.layers.linear import ColumnParallelLinear
from parallel.memory.recompute import Activations
from parallel.mesh import Mesh
from parallel.parameters import Parameters
from parallel.pipeline.run import Pipeline
from parallel.weights.layout import MeshShape

TIED = {"tie_word_embeddings": True, "intermediate_size": 27}  # padded

ALL = Case("lora-all", LLAMA, ignored=0.3, tuning=Tuning(Lora(4, 8.0, ("*",))))
SOME = Case(
    "lora-some", LLAMA | BIASES | TIED, tuning=Tuning(Lora(3, 2.0, ("q_proj", "attn.qkv.v", "mlp"), rslora=True))
)
CONV = Case("lora-gpt2", GPT2 | NO_DROPOUT, tuning=Tuning(Lora(2, 4.0, ("attn", "c_fc"))))
ENDS = Case("freeze-first", LLAMA, tuning=Tuning(freeze=("embed", "layers.0", "layers.1.mlp")))
ONLY = Case("only-attention", GPT2 | NO_DROPOUT, tuning=Tuning(only=("attn", "embed", "norm"), freeze=("attn.*.bias",)))
MIDDLE = Case("only-middle", LLAMA | TIED, tuning=Tuning(only=("layers.1",)))
MIXTRAL = drawn("mixtral", 1)
MIXED = Case("lora-experts", MIXTRAL, ignored=0.3, tuning=Tuning(Lora(4, 8.0, ("*",))))
DOWN = Case("lora-down", MIXTRAL, tuning=Tuning(Lora(3, 2.0, ("experts.down", "router"))))
ROUTERS = Case("only-routers", MIXTRAL, tuning=Tuning(only=("router", "experts"), freeze=("experts.down",)))
DRAWN = [
    Case(f"lora-{name}-drawn", drawn(name, 2), sequences=2, tuning=Tuning(Lora(4, 8.0, ("*",)))) for name in FAMILIES
]

RUNS = {
    "tp": Run(MeshShape(tp=4)),  # kv heads shared
    "interleaved": Run(MeshShape(pp=2, tp=2), chunks=2, schedule="interleaved"),
    "full": Run(MeshShape(pp=2, dp=2), activations=Activations("full")),
    "optimizer": Run(MeshShape(tp=2, dp=2), shard="optimizer"),
    "gradients": Run(MeshShape(pp=2, dp=2), shard="gradients"),
    "parameters": Run(MeshShape(tp=2, pp=2, dp=2), shard="parameters"),
    "parameters-offload": Run(MeshShape(dp=2), shard="parameters", activations=Activations("selective", True)),
    "parameters-full": Run(
        MeshShape(pp=2, dp=2), 2, "interleaved", activations=Activations("full"), shard="parameters", loss_chunk=5
    ),
}
RUNS_OF_EXPERTS = {
    "folded": Run(MeshShape(ep=2, tp=2), shard="parameters"),
    "features": Run(MeshShape(ep=2, tp=2), etp=True, activations=Activations("full")),
}
QUICK = ("tp", "parameters")
# Each case on layouts of the kinds that it could break on.
PAIRS = [
    pytest.param(
        case, (RUNS | RUNS_OF_EXPERTS)[name], id=f"{case.name}-{name}", marks=[pytest.mark.quick] * (name in QUICK)
    )
    for case, names in (
        (ALL, tuple(RUNS)),
        (SOME, ("tp", "interleaved", "parameters")),
        (CONV, ("tp", "interleaved", "gradients", "parameters")),
        (ENDS, ("tp", "interleaved", "optimizer", "parameters-full")),
        (ONLY, ("tp", "full", "parameters")),
        (MIXED, ("folded", "features", "parameters-full")),
        (DOWN, ("features",)),
        (ROUTERS, ("folded",)),
        (MIDDLE, ("full", "gradients", "parameters")),  # a stage of which nothing is trained
        *((case, ("tp",)) for case in DRAWN),
    )
    for name in names
]


@cache
def _one(pool: Pool, case: Case) -> Measured:
    return pool.run(1, measure, case, Run())[0]


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("case", "run"), PAIRS)
def test_layout_computes_what_one_process_computes(pool: Pool, case: Case, run: Run) -> None:
    case = deep(case, 5 if run.chunks > 1 else 3)
    one = _one(pool, case)
    check(case, run, one, pool.run(run.mesh.world, measure, case, run))


@pytest.mark.parametrize(
    "case", [ALL, SOME, CONV, ENDS, ONLY, MIDDLE, MIXED, DOWN, ROUTERS], ids=lambda case: case.name
)
def test_what_is_trained_learns_and_what_is_frozen_stays(pool: Pool, case: Case) -> None:
    case = deep(case, 3)
    one, frozen = _one(pool, case), case.tuning.frozen(case.config.schema)
    assert frozen and frozen < one.initial.keys()
    for name, before in one.initial.items():
        if name in frozen:
            assert np.array_equal(one.final[name], before) and not one.gradients[name].any(), name
        else:
            assert relative(one.final[name], before) > 1e-3 and one.gradients[name].any(), name


# -- the formula


def model_of(case: Case, tuning: Tuning) -> Model:
    mesh = Mesh.single()
    layout = lively(layout_of(case.config, mesh.shape, tuning=tuning))
    model = Model.create(case.config, layout, mesh, torch.float64, tuning=tuning)
    model.parameters.initialise(seed=1)
    return model


def loss_of(case: Case, model: Model) -> Tensor:
    (first, *_) = microbatches(case, Run(micro=2), 0, Mesh.single())
    loss: Tensor = model.chunks[0](None, first)
    return loss


@pytest.mark.quick
@pytest.mark.parametrize("case", [ALL, SOME, CONV, MIXED, DOWN, *DRAWN], ids=lambda case: case.name)
def test_a_step_is_that_of_the_formula(case: Case) -> None:
    """W + scale B A in place of W, multiplied out piece by piece, gives the loss and, by the chain rule, dA and dB."""
    lora = case.tuning.lora
    assert lora is not None
    adapted, plain = model_of(case, case.tuning), model_of(case, Tuning())
    found: dict[str, nn.Parameter] = {}
    with torch.no_grad():
        for name, weight in plain.parameters.items():
            weight.copy_(adapted.parameters[name])
            if name.endswith(".weight") and name.replace(".weight", ".lora_a") in adapted.parameters:
                found[name] = weight
        for name, weight in found.items():
            for a, b, rows in _pieces(adapted.parameters, name):
                weight[rows].add_(lora.scale * b @ a)
    one, other = loss_of(case, adapted), loss_of(case, plain)
    assert one.item() == pytest.approx(other.item(), rel=1e-12)
    one.backward()
    other.backward()
    assert found
    for name, weight in found.items():
        assert weight.grad is not None and adapted.parameters[name].grad is None
        gradients = adapted.parameters
        a_name, b_name = (name.replace(".weight", end) for end in (".lora_a", ".lora_b"))
        da, db = [], []
        for a, b, rows in _pieces(adapted.parameters, name):
            da.append(lora.scale * b.mT @ weight.grad[rows])
            db.append(lora.scale * weight.grad[rows] @ a.mT)
        for got, want in ((gradients[a_name].grad, da), (gradients[b_name].grad, db)):
            assert got is not None
            by_hand = torch.cat(want)
            # What cancels is rounded by the size of what is summed.
            atol = max(1e-12, 1e-11 * float(by_hand.abs().max()))
            torch.testing.assert_close(got, by_hand, rtol=1e-9, atol=atol)


def _pieces(parameters: Parameters, name: str) -> list[tuple[Tensor, Tensor, slice]]:
    """(A, B, rows of the weight) of each adapter of a weight, cut by hand."""
    a, b = (parameters[name.replace(".weight", end)].detach() for end in (".lora_a", ".lora_b"))
    rank, labels = b.shape[-1], parameters.shards[name.replace(".weight", ".lora_a")].param.sentence.labels
    sizes = parameters.shards[name].sizes
    if labels == ("",):
        return [(a, b, slice(None))]
    shared, features = "kv" if "kv" in sizes else "heads", "shared_mlp" if ".shared." in name else "mlp"
    q, kv, mlp = (
        math.prod(sizes.get(axis, 0) for axis in of) for of in (("heads", "head"), (shared, "head"), (features,))
    )
    start = {"q": 0, "k": q, "v": q + kv, "gate": 0, "up": mlp}
    rows = {"q": q, "k": kv, "v": kv, "gate": mlp, "up": mlp}
    made, at = [], 0
    for number, label in enumerate(labels):
        own = slice(start[label], start[label] + rows[label])
        made.append((a[number * rank : (number + 1) * rank], b[at : at + rows[label]], own))
        at += rows[label]
    return made


@pytest.mark.quick
def test_adapters_begin_as_nothing_and_as_linears_do() -> None:
    """B is zero; A is uniform within 1 / sqrt(in), over all ranks and layers the same numbers (the oracle's own)."""
    config = configure(LLAMA | {"hidden_size": 256, "intermediate_size": 512})
    tuning = Tuning(Lora(16, 16.0, ("*",)))
    parameters = Parameters(layout_of(config, MeshShape(), tuning=tuning), Mesh.single(), torch.float32)
    parameters.initialise(0)
    ends = {"attn.qkv": 256, "mlp.up": 256, "mlp.down": 512, "attn.out": 48}
    for name, inputs in ends.items():
        assert not parameters[f"layers.1.{name}.lora_b"].any()
        a = parameters[f"layers.1.{name}.lora_a"].detach()
        assert 0.98 < a.abs().max() * inputs**0.5 <= 1 and a.std() * (3 * inputs) ** 0.5 == pytest.approx(1, rel=0.05)


@pytest.mark.quick
def test_frozen_linears_are_left_as_they_were() -> None:
    model = model_of(SOME, SOME.tuning)
    linears = [module for module in model.chunks[0].modules() if isinstance(module, ColumnParallelLinear)]
    assert linears and not any(linear.weight.requires_grad for linear in linears)
    assert "attn.out.base" not in dict(model.chunks[0].named_modules())


# -- memory


def seen_memory() -> tuple[list[int], list[int], list[int]]:
    """Frozen buckets that are there: in each forward and backward of a block, and between steps; bytes of gradients."""
    mesh, case = Mesh.create(MeshShape(dp=2)), ALL.with_layers(6)
    layout = layout_of(case.config, mesh.shape, tuning=case.tuning)
    model = Model.create(case.config, layout, mesh, torch.float64, hollow=True, tuning=case.tuning)
    gradients = Gradients(model.parameters, model.chunks, torch.float64, "parameters")
    optimizer, seen = Optimizer(gradients, lr=0.1), list[int]()
    for name in model.parameters:
        optimizer.load_weight(name, model.parameters.drawn(name, 7))

    def there() -> int:
        return sum(flat.values.untyped_storage().size() > 0 for flat in gradients.frozen)

    for block in model.chunks[0].layers.values():
        block.register_forward_hook(lambda *_: seen.append(there()))
        next(block.children()).register_full_backward_hook(lambda *_: seen.append(there()))
    step = TrainStep(mesh, Pipeline(mesh, model.chunks, torch.float64), gradients, optimizer)
    between = [there()]
    for number in range(2):
        step(microbatches(case, Run(mesh.shape), number, mesh), 0.1)
        between.append(there())
    trained = sum(p.numel() for p in model.parameters.values() if p.requires_grad)
    held = sum(part.gradient.numel() for part in gradients.parts)
    return seen, between, [trained, held]


def test_frozen_parameters_are_there_only_while_they_are_used(pool: Pool) -> None:
    for during, between, (trained, held) in pool.run(2, seen_memory):
        assert between == [0, 0, 0]
        # Its own, the next one's that is on its way, the head's from its forward to its backward. What comes into the
        # first block needs no gradient, so its backward tells nothing.
        assert len(during) == 2 * 2 * (2 * 6 - 1) and max(during) <= 3
        assert held == pytest.approx(trained / 2, rel=0.1)
