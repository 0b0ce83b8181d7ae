"""Experts on any layout: the numbers, counts and biases of one process, and of a formula in which every expert computes
every token."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from extended_family import extended
from families import ROTATION, drawn
from oracle import (
    LENGTH,
    TOLERANCE,
    Case,
    Measured,
    Run,
    buffers_of,
    check,
    deep,
    expected,
    lively,
    measured,
    relative,
    trained,
)
from pool import Pool
from test_layouts import LLAMA
from torch import Tensor

from megacore.training.states.offload import Offload
from models.assemble import Model
from models.context import CausalAttention, Context
from models.registry import FAMILIES, configure
from parallel.balance import Coefficients
from parallel.memory.recompute import Activations
from parallel.mesh import Mesh
from parallel.routing import Routing
from parallel.weights.layout import MeshShape

SEQUENCES = 12
MIXED = [name for name in FAMILIES if configure(drawn(name)).anatomy.routing is not None]
MESHES = [
    (MeshShape(ep=2), False),
    (MeshShape(ep=4), False),
    (MeshShape(ep=2, tp=2), False),
    (MeshShape(tp=2), False),
    (MeshShape(tp=2), True),
    (MeshShape(ep=2, tp=2), True),
    (MeshShape(pp=2, ep=2), False),
    (MeshShape(dp=2, ep=2), False),
    (MeshShape(ep=2, tp=2, pp=2), False),
    (MeshShape(ep=2, tp=4), False),
    (MeshShape(tp=4, dp=2), True),  # parts of experts are padded
]
# Windows that are smaller than most parts.
HOST, FILE = Offload(None, 1 << 15), Offload(Path(tempfile.gettempdir()), 1 << 15)
DRAWN = 3
"""Runs on each mesh of a family's grid."""

SIGMOID = {"top_k": 2, "score": "sigmoid", "normalised": True, "epsilon": 1e-20, "factor": 2.5}
GROUPS = SIGMOID | {"top_k": 3, "groups": 4, "kept_groups": 2, "group_score": "top2"}
BY_MAX = {"top_k": 2, "groups": 2, "group_score": "max"}
AFTERWARDS = {"top_k": 2, "weigh": "chosen"}
EXPERTS = {
    "family": "extended",
    "experts": [1, 0, 1],
    "expert_size": 10,
    "shared_expert": True,
    "correction": True,
    "routing": SIGMOID,
}
SEQUENCE = Coefficients(sequence=0.05, z_loss=1e-2, bias_rate=1e-2)
BATCH = Coefficients(batch=0.05, z_loss=1e-2, bias_rate=1e-2)


def cases_of(name: str, seed: int) -> tuple[Case, Case]:
    """A family by itself, with either balance; documents and rows that are not filled with one of them."""
    section = drawn(name, seed, vocab=101)
    return (
        Case(f"{name}-sequence", section, SEQUENCES, ignored=0.3, coefficients=SEQUENCE),
        Case(f"{name}-batch", section, SEQUENCES, ignored=0.3, documents=True, padded=True, coefficients=BATCH),
    )


PARTS = LLAMA | EXPERTS
OF_PARTS = (
    Case("starved", PARTS, SEQUENCES, ignored=0.3, padded=True, coefficients=SEQUENCE, starved=True),
    Case(
        "parts",
        PARTS | {"routing": GROUPS, "windows": [3, 0, 5], "sinks": True, "norms": True, "tie_word_embeddings": True},
        SEQUENCES,
        documents=True,
        padded=True,
        coefficients=BATCH,
    ),
    Case("few", PARTS | {"experts": [1, 0, 0]}, SEQUENCES, ignored=0.3, coefficients=BATCH),  # a stage has none
    Case(
        "side-by-side",
        PARTS | {"routing": AFTERWARDS, "expert_bias": True, "parallel": True},
        SEQUENCES,
        coefficients=SEQUENCE,
    ),
)


def run_of(case: Case, mesh: MeshShape, etp: bool, rng: Random) -> Run:
    """A run on the mesh, drawn."""
    schedule = rng.choice(("1f1b", "gpipe", "interleaved") if mesh.pp > 1 else ("1f1b", "gpipe"))
    accumulated = rng.choice([n for n in (1, 2, 3, 4) if SEQUENCES % (mesh.data * n) == 0])
    if case.coefficients.batch and accumulated > 1:
        schedule = "gpipe"  # the others begin the backward before all tokens are routed
    shard: Any = rng.choice(("none", "optimizer", "gradients", "parameters"))
    return Run(
        mesh,
        2 if schedule == "interleaved" else 1,
        schedule,
        micro=SEQUENCES // (mesh.data * accumulated),
        activations=Activations(rng.choice(("none", "selective", "full")), rng.random() < 0.2),
        loss_chunk=rng.choice((None, 5)),
        shard=shard,
        replicas=rng.choice((1, mesh.dp)),
        offload=rng.choice((None, None, HOST, FILE)),
        etp=etp,
    )


def grid(name: str, cases: tuple[Case, ...], seed: int) -> list[Any]:
    """Runs on every mesh, of which one in ten is of the suite."""
    made = []
    for at, (mesh, etp) in enumerate(MESHES):
        for number in range(DRAWN):
            case = cases[(at + number) % len(cases)]
            run = run_of(case, mesh, etp, Random(f"{name} {at} {number}"))
            turn = at * DRAWN + number
            suite = (3 * turn + seed + ROTATION) % 10 == 0
            mark = [] if suite else [pytest.mark.grid]
            made.append(pytest.param(case, run, id=f"{case.name}-{run}-{run.micro}-{number}", marks=mark))
    return made


PAIRS = [
    *grid("extended", OF_PARTS[:2], 1),
    *grid("extended again", OF_PARTS[2:], 8),
    *(pair for seed, name in enumerate(MIXED) for pair in grid(name, cases_of(name, seed), seed)),
]


# Those of the suite that faults.yaml names. With three sequences the ranks of tp=2 share one.
ALWAYS = [
    (OF_PARTS[0], Run(MeshShape(tp=2, ep=2), micro=3, activations=Activations("full"))),
    (OF_PARTS[2], Run(MeshShape(pp=2, ep=2), schedule="gpipe", micro=3)),
    (
        OF_PARTS[0],
        Run(MeshShape(tp=2, ep=2), micro=3, etp=True, activations=Activations("selective"), shard="parameters"),
    ),
]
PAIRS += [pytest.param(case, run, id=f"{case.name}-{run}") for case, run in ALWAYS]


@cache
def one(pool: Pool, case: Case) -> Measured:
    """By one process, that has all tokens at once."""
    return pool.run(1, measured, case, Run(micro=SEQUENCES))[0]


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("case", "run"), PAIRS)
def test_experts_compute_what_one_process_computes(pool: Pool, case: Case, run: Run) -> None:
    with extended():
        case = deep(case, max(3, run.mesh.pp * run.chunks + 1))
        check(case, run, one(pool, case), pool.run(run.mesh.world, measured, case, run))


def test_an_expert_without_tokens_has_a_gradient_of_zeros(pool: Pool) -> None:
    """And the others learn something, else equal weights would prove nothing."""
    with extended():
        found = one(pool, deep(OF_PARTS[0], 3))
    assert found.loads[0].layers == (0, 2)
    for counts in found.loads[0].counts:
        assert counts[-1] == 0 < counts[:-1].min()
    for name, gradient in found.gradients.items():
        assert relative(found.final[name], found.initial[name]) > 1e-3
        assert gradient.any()
        if "experts" in name:
            assert not gradient[-1].any() and np.all(np.any(gradient[:-1], axis=(1, 2)))


# -- the formula


def formula(x: Tensor, p: Mapping[str, Tensor], routing: Routing) -> Tensor:
    """x: [n, embed] -> same: every expert computes every token, and a token weighs those that it has not chosen 0."""
    logits = F.linear(x, p["router.weight"], p.get("router.bias"))
    scores = logits.softmax(-1) if routing.score == "softmax" else 1 / (1 + (-logits).exp())
    bias = p.get("router.correction", torch.zeros(routing.experts))
    chooses = (logits if routing.weigh == "chosen" else scores).detach()
    choice = torch.tensor([chosen((each + bias).tolist(), routing) for each in chooses], dtype=torch.float64)
    if routing.weigh == "all":
        weights = scores * choice
    else:
        weights = logits.exp() * choice / (logits.exp() * choice).sum(-1, keepdim=True)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    y = gated(x, p, "shared") if "shared.up.weight" in p else torch.zeros_like(x)
    for expert in range(routing.experts):
        own = {name: each[expert] for name, each in p.items() if name.startswith("experts")}
        y = y + (weights * routing.factor)[:, expert, None] * gated(x, own, "experts")
    return y


def chosen(scores: list[float], routing: Routing) -> list[int]:
    """1 for each expert that is chosen by the scores of one token, 0 for the others."""
    size = routing.experts // routing.groups
    groups = [range(size * group, size * (group + 1)) for group in range(routing.groups)]
    best = {"max": 1, "top2": 2}[routing.group_score]
    groups.sort(key=lambda group: -sum(sorted((scores[e] for e in group), reverse=True)[:best]))
    there = sorted(e for group in groups[: routing.kept_groups] for e in group)
    kept = sorted(there, key=lambda e: -scores[e])[: routing.top_k]
    return [int(e in kept) for e in range(routing.experts)]


def gated(x: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
    left, right = F.linear(x, p[f"{name}.up.weight"], p.get(f"{name}.up.bias")).chunk(2, -1)
    return F.linear(F.silu(left) * right, p[f"{name}.down.weight"], p.get(f"{name}.down.bias"))


LAYER = "layers.0.mlp."


def given(case: Case, run: Run) -> tuple[Tensor, Tensor]:
    """What comes into a layer, and the gradient of what comes out, of all tokens of a mesh: [n, embed] each."""
    rng = torch.Generator().manual_seed(3)
    shape = (2, LENGTH * run.mesh.data, case.config.sizes["embed"])
    x, dy = torch.randn(shape, generator=rng, dtype=torch.float64)
    return x, dy


def mixture(case: Case, run: Run) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(y, dx, its gradients) of this rank, which are not summed."""
    with extended():
        mesh, (x, dy) = Mesh.create(run.mesh), given(case, run)
        model = Model.create(case.config, lively(run.layout(case)), mesh, torch.float64)
        model.parameters.initialise(seed=1)
        own, gradient = (each.chunk(mesh.shape.world)[mesh.rank] for each in (x, dy))
        own.requires_grad_()
        y = model.chunks[0].layers["0"].get_submodule("mlp")(own, Context(CausalAttention(1)))
        y.backward(gradient)
        assert own.grad is not None
        parameters = {name: p for name, p in model.parameters.items() if name.startswith(LAYER)}
        assert all((p.grad is None) == model.parameters.shards[n].param.buffer for n, p in parameters.items())
        found = {name: p.grad.numpy() for name, p in parameters.items() if p.grad is not None}
        return y.detach().numpy(), own.grad.numpy(), found


@pytest.mark.parametrize("run", [Run(MeshShape(ep=2, tp=2)), Run(MeshShape(ep=2, tp=2), etp=True)], ids=str)
@pytest.mark.parametrize("routing", [SIGMOID, GROUPS, BY_MAX, AFTERWARDS], ids=["sigmoid", "groups", "max", "chosen"])
def test_a_mixture_is_the_formula_of_all_experts_for_all_tokens(pool: Pool, routing: dict[str, Any], run: Run) -> None:
    case = Case("mixture", PARTS | {"routing": routing, "expert_bias": routing is AFTERWARDS})
    with extended():
        model = Model.create(case.config, lively(Run().layout(case)), Mesh.single(), torch.float64)
        model.parameters.initialise(seed=1)
        x, dy = given(case, run)
        whole = {name: each.requires_grad_() for name, each in trained(model.parameters).items() if LAYER in name}
        held = whole | {name: torch.from_numpy(each) for name, each in buffers_of(model.parameters).items()}
        assert case.config.anatomy.routing is not None
        y = formula(
            x.requires_grad_(), {n.removeprefix(LAYER): p for n, p in held.items()}, case.config.anatomy.routing
        )
        y.backward(dy)
        ones = {name: each.grad.numpy() for name, each in whole.items() if each.grad is not None}
        assert ones.keys() == whole.keys() and x.grad is not None
        found = pool.run(run.mesh.world, mixture, case, run)
        assert relative(np.concatenate([each for each, _, _ in found]), y.detach().numpy()) <= TOLERANCE
        assert relative(np.concatenate([each for _, each, _ in found]), x.grad.numpy()) <= TOLERANCE
        layout = run.layout(case)
        for rank, (_, _, gradients) in enumerate(found):
            wanted = expected(case, run, rank, ones)
            assert wanted.keys() == gradients.keys()
            for shard in layout.shards(run.mesh.place(rank)):
                if shard.name in wanted:
                    (replicas,) = {layout.replicas(shard, label) for label in shard.param.sentence.labels}
                    total = sum(found[other][2][shard.name] for other in replicas)
                    assert relative(total, wanted[shard.name]) <= TOLERANCE, (rank, shard.name)
