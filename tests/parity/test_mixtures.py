"""A layer of experts on any layout beside a formula in which every expert computes every token."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from extended_family import extended
from layouts import AFTERWARDS, EXPERTS, GROUPS, SIGMOID
from oracle import LENGTH, TOLERANCE, Case, Run, buffers_of, expected, lively, relative, trained
from pool import Pool
from torch import Tensor

from megacore.models.assemble import Model
from megacore.models.context import Context
from megacore.parallel.layers.whole_attention import CausalAttention
from megacore.parallel.mesh import Mesh
from megacore.parallel.routing import Routing
from megacore.parallel.weights.layout import MeshShape

BY_MAX = {"top_k": 2, "groups": 2, "group_score": "max"}


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
    case = Case("mixture", EXPERTS | {"routing": routing, "expert_bias": routing is AFTERWARDS})
    with extended():
        model = Model.create(case.config, lively(Run().layout(case)), Mesh.single(), torch.float64)
        model.parameters.initialise(seed=1)
        x, dy = given(case, run)
        whole = {name: each.requires_grad_() for name, each in trained(model.parameters).items() if LAYER in name}
        held = whole | {name: torch.from_numpy(each) for name, each in buffers_of(model.parameters).items()}
        assert case.config.anatomy.routing is not None
        own = {n.removeprefix(LAYER): p for n, p in held.items()}
        y = formula(x.requires_grad_(), own, case.config.anatomy.routing)
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
