"""Muon against torch.optim.Muon, on every layout: matrices are cut out by hand there, and by sentences here."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from megacore.parallel.enum_errors import ZeroShard
from megacore.parallel.gradients.matrices import Matrices
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.kernels.newton_schulz import COEFFICIENTS, EPSILON
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import Parameters, view
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import EXPERT_TENSOR_PARALLEL, SPLIT, Param, Schema
from megacore.parallel.weights.transfer import execute, native, plan
from megacore.training.states import muon
from megacore.training.states import optimizer as optimizers
from megacore.training.states.muon import Muon
from megacore.training.states.optimizer import Optimizer

SIZES = {"layer": 1, "embed": 6, "heads": 8, "kv": 2, "head": 3, "two": 2, "mlp": 10, "experts": 4, "expert_mlp": 5}
SENTENCES = {
    "layers.{layer}.qkv": "(q: heads head + k: kv head + v: kv head) embed",
    "layers.{layer}.mixed": "(heads (q: + k: + v:) head) embed",  # as GPT-NeoX stores them
    "layers.{layer}.turned": "(heads (turn: two + still: head)) embed",
    "layers.{layer}.up": "(gate: mlp + up: mlp) embed",
    "layers.{layer}.down": "embed mlp",
    "layers.{layer}.experts": "experts (gate: expert_mlp + up: expert_mlp) embed",
    "layers.{layer}.router": "routes embed",
    "layers.{layer}.norm": "embed",
    "embed": "vocab embed",
}
SCHEMA = Schema(tuple(Param(n, s, std=1.0) for n, s in SENTENCES.items()), SIZES | {"routes": 4, "vocab": 9})
STEPS, LR, DECAY = 3, 0.1, 0.3


def by_hand(name: str, whole: Tensor) -> list[Tensor]:
    """The matrices of a tensor, sharing its memory; what Muon does not update has none."""
    match name.rpartition(".")[2]:
        case "qkv":
            return [*whole.split([24, 6, 6])]
        case "mixed":
            return [whole.view(8, 3, 3, 6)[:, i] for i in range(3)]
        case "up":
            return [*whole.split(10)]
        case "experts":
            return [part for expert in whole for part in expert.split(5)]
        case "turned" | "down":
            return [whole]
        case _:
            return []


def gradient(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + len(name)), dtype=torch.float64)


def by_torch(rule: Muon, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """What torch's optimizers make of the weights."""
    parameters = on_one(dtype)
    parameters.initialise(0)
    scale = "original" if rule.original else "match_rms_adamw"
    kinds = (rule.momentum, rule.nesterov, COEFFICIENTS, EPSILON, rule.steps, scale)
    for name, parameter in parameters.items():
        whole, decay = parameter.detach(), 0.0 if name.endswith("norm") else DECAY
        parts = by_hand(name, whole)
        copies = [nn.Parameter(x.reshape(-1, x.shape[-1]).clone()) for x in parts] or [nn.Parameter(whole.clone())]
        made = (
            torch.optim.Muon(copies, LR * rule.lr_ratio, decay, *kinds)
            if parts
            else torch.optim.AdamW(copies, LR, (0.9, 0.95), 1e-8, decay)
        )
        for step in range(STEPS):
            given = gradient(name, step, tuple(whole.shape)).to(dtype)
            for copy, part in zip(copies, by_hand(name, given) or [given], strict=True):
                copy.grad = part.reshape(copy.shape)
            made.step()
        for copy, part in zip(copies, parts or [whole], strict=True):
            part.copy_(copy.detach().view(part.shape))
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def on_one(dtype: torch.dtype = torch.float64) -> Parameters:
    """The tensors, whole."""
    return Parameters(Layout(SCHEMA, MeshShape(), (1,)), Mesh.single(), dtype)


def layout_of(mesh: MeshShape, etp: bool) -> Layout:
    return Layout(SCHEMA, mesh, (1,), EXPERT_TENSOR_PARALLEL if etp else SPLIT)


def cut(layout: Layout, rank: int, whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a rank holds of whole tensors."""
    held = {}
    for target, copies in plan(SCHEMA, native(Layout(SCHEMA, MeshShape(), (1,)), [0]), native(layout, [rank])):
        held[target.name] = np.zeros(target.shape, whole[target.name].dtype)
        for copy in copies:
            execute(copy, whole[copy.source.name], held[target.name])
    return held


def stepped(
    mesh_shape: MeshShape, shard: ZeroShard, replicas: int, etp: bool, rule: Muon, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, np.ndarray], dict[str, list[str]], int]:
    """(the weights of this rank, the names of what has each state, the matrices that it has worked on)."""
    mesh, worked = Mesh.create(mesh_shape), []
    layout = layout_of(mesh_shape, etp)
    parameters = Parameters(layout, mesh, dtype)
    parameters.initialise(0)
    modules = nn.ModuleList(nn.ParameterList([parameter]) for parameter in parameters.values())
    gradients = Gradients(parameters, [modules], dtype, shard, replicas, 600, matrices=True)

    def counted(matrices: list[Tensor], steps: int) -> list[Tensor]:
        worked.extend(matrices)
        return orthogonalised(matrices, steps)

    orthogonalised = muon.orthogonalised
    with (
        patch.object(muon, "orthogonalised", counted),
        patch.object(optimizers, "Matrices", lambda gradients: Matrices(gradients, 200)),
    ):
        optimizer = Optimizer(gradients, lr=LR, weight_decay=DECAY, clip=None, muon=rule)
        for step in range(STEPS):
            whole = {name: gradient(name, step, tuple(p.shape)).numpy() for name, p in on_one().items()}
            gradients.begin(1)
            for name, part in cut(layout, mesh.rank, whole).items():
                own = torch.from_numpy(part)
                for piece in parameters.shards[name].pieces:  # of ranks that hold the same the last one alone has it
                    if mesh.rank != layout.replicas(parameters.shards[name], piece.label)[-1]:
                        view(own, piece).zero_()
                (parameters[name] * own.to(dtype)).sum().backward()
            gradients.finish()
            optimizer.update(LR, gradients.norm())
            gradients.updated()
    final = {name: torch.empty(parameters.shards[name].shape, dtype=dtype) for name in parameters}
    for name, host in final.items():
        gradients.read_weight(name, host)
    states = {state: sorted(names) for state, names in optimizer.states().items()}
    return {name: host.numpy() for name, host in final.items()}, states, len(worked)


RUNS: list[tuple[MeshShape, ZeroShard, int, bool]] = [
    (MeshShape(), "none", 1, False),
    (MeshShape(tp=4), "none", 1, False),  # kv heads shared, features padded
    (MeshShape(tp=4), "gradients", 1, True),
    (MeshShape(dp=2, tp=2), "optimizer", 1, False),
    (MeshShape(dp=2, ep=2), "none", 1, False),
    (MeshShape(dp=4), "gradients", 2, False),
    (MeshShape(cp=2, ep=2), "gradients", 1, False),
    (MeshShape(dp=2, tp=4), "optimizer", 2, True),
]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("rule", [Muon(), Muon(0.9, False, 3, True, 0.3)], ids=["muon", "original"])
@pytest.mark.parametrize(("mesh", "shard", "replicas", "etp"), RUNS, ids=str)
def test_every_layout_updates_as_torch_does(
    pool: Pool, mesh: MeshShape, shard: ZeroShard, replicas: int, etp: bool, rule: Muon
) -> None:
    """torch multiplies in bf16 whatever it is given: here that is made to leave its numbers alone."""
    with patch.object(Tensor, "bfloat16", Tensor.clone):
        want = by_torch(rule, torch.float64)
    found = pool.run(mesh.world, stepped, mesh, shard, replicas, etp, rule)
    for rank, (weights, states, _) in enumerate(found):
        for name, held in cut(layout_of(mesh, etp), rank, want).items():
            np.testing.assert_allclose(weights[name], held, rtol=1e-9, atol=1e-11, err_msg=f"{name} of rank {rank}")
        one_moment = sorted({*states["exp_avg"]} - {*states["exp_avg_sq"]})
        assert one_moment == sorted(name for name, each in want.items() if by_hand(name, torch.from_numpy(each)))
    matrices = sum(len(by_hand(name, torch.from_numpy(each))) for name, each in want.items())
    work = [count for _, _, count in found]
    assert sum(work) == STEPS * matrices and max(work) <= STEPS * (matrices / mesh.world + 4)


def test_fp32_is_multiplied_in_bf16_as_torch_does(pool: Pool) -> None:
    ((weights, _, _),) = pool.run(1, stepped, MeshShape(), "none", 1, False, Muon(), torch.float32)
    for name, want in by_torch(Muon(), torch.float32).items():
        # Five steps of three products, each rounded to 2^-9 of numbers up to 1.2; the factor is up to 0.2 sqrt(40).
        np.testing.assert_allclose(weights[name], want, atol=STEPS * LR * 0.2 * 40**0.5 * 15 * 2**-9)
