"""The rungs of the data parallel ladder hold the memory that the formula says."""

import gc
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from device_store import device_store
from layouts import ALL, LLAMA, RUNGS, SHARDED, TIED, UNTIED
from oracle import TOLERANCE, Case, Run, microbatches, snapshot
from pool import Pool
from torch import Tensor

from megacore.models.assemble import Model
from megacore.models.stages import layout_of
from megacore.parallel.enum_errors import ZeroShard
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.rank_sets import divide
from megacore.parallel.weights.layout import MeshShape
from megacore.store.weight_folders.index import MOMENTS
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import TrainStep


def compiled(shard: ZeroShard) -> tuple[list[float], list[float]]:
    """The losses of two steps, without and with torch.compile."""
    mesh, case = Mesh.create(MeshShape(dp=2)), UNTIED.with_layers(2)
    found = []
    for compiles in (False, True):
        model = Model.create(case.config, layout_of(case.config, mesh.shape), mesh, torch.float64)
        model.parameters.initialise(0)
        if compiles:
            model.compile()
        gradients = Gradients(model.parameters, model.chunks, torch.float64, shard)
        step = TrainStep(mesh, Pipeline(mesh, model.chunks, torch.float64), gradients, Optimizer(gradients, lr=0.1))
        found.append([step(microbatches(case, Run(mesh.shape), i, mesh), 0.1).loss.item() for i in range(2)])
    return found[0], found[1]


@pytest.mark.in_turn(8)
@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_blocks_can_be_compiled(pool: Pool, shard: ZeroShard) -> None:
    for plain, fast in pool.run(2, compiled, shard):
        np.testing.assert_allclose(fast, plain, rtol=TOLERANCE)


# -- memory

SIZES = LLAMA | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "head_dim": 16}
SIZES |= {"num_key_value_heads": 4}


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages, each once."""
    return sum({s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def held(mesh: MeshShape, shard: ZeroShard, replicas: int) -> tuple[dict[str, int], int]:
    """(bytes of each kind between two steps, of all that is held of the parameters' number)."""
    live = Mesh.create(mesh)
    case = Case("memory", SIZES)
    model = Model.create(case.config, layout_of(case.config, mesh), live, torch.bfloat16)
    model.parameters.initialise(0)
    sizes = sum(p.numel() for p in model.parameters.values())
    gradients = Gradients(model.parameters, model.chunks, torch.float32, shard, replicas)
    optimizer = Optimizer(gradients, lr=1e-3)
    step = TrainStep(live, Pipeline(live, model.chunks, torch.bfloat16), gradients, optimizer)
    for number in range(2):
        step(microbatches(case, Run(mesh), number, live), 1e-3)
    gc.collect()
    parameters = [p.detach() for p in model.parameters.values()]
    if gradients.values:
        for flat in gradients.values.values():
            flat.wait()
        parameters += [run.data for run in gradients.parts]
    store = device_store(optimizer)
    return {
        "parameters": nbytes(parameters),
        "gradients": nbytes(part.gradient for part in gradients.parts),
        "masters": nbytes(target.tensor for target in store.targets),
        "moments": nbytes(store.adamw.state[t.tensor][moment] for t in store.targets for moment in MOMENTS),
    }, sizes


# Bytes of each parameter that lie with each rank: (of all of them, of a rank's share).
FORMULA: dict[str, dict[ZeroShard, tuple[int, int]]] = {
    "parameters": {"none": (2, 0), "optimizer": (2, 0), "gradients": (2, 0), "parameters": (0, 2)},
    "gradients": {"none": (4, 0), "optimizer": (4, 0), "gradients": (0, 4), "parameters": (0, 4)},
    "masters": {"none": (4, 0), "optimizer": (0, 4), "gradients": (0, 4), "parameters": (0, 4)},
    "moments": {"none": (8, 0), "optimizer": (0, 8), "gradients": (0, 8), "parameters": (0, 8)},
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("shard", RUNGS)
@pytest.mark.parametrize(("mesh", "replicas"), [(MeshShape(dp=4), 1), (MeshShape(dp=4), 2), (MeshShape(tp=2, dp=2), 1)])
def test_what_is_held_is_what_the_formula_says(pool: Pool, mesh: MeshShape, replicas: int, shard: ZeroShard) -> None:
    shares = mesh.dp // replicas if shard != "none" else 1
    for found, numel in pool.run(4, held, mesh, shard, replicas if shard != "none" else 1):
        for kind, rungs in FORMULA.items():
            whole, share = rungs[shard]
            assert found[kind] == pytest.approx(numel * (whole + share / shares), rel=0.02), kind


def seen_memory(case: Case, shard: ZeroShard) -> tuple[list[int], list[int], float]:
    """Units whose parameters are there, frozen ones where some are: while each block computes, forward and backward;
    and between steps. The share of the gradients that is held."""
    mesh, case = Mesh.create(MeshShape(dp=2)), case.with_layers(6)
    layout = layout_of(case.config, mesh.shape, tuning=case.tuning)
    model = Model.create(case.config, layout, mesh, torch.float64, tuning=case.tuning)
    model.parameters.initialise(0)
    gradients = Gradients(model.parameters, model.chunks, torch.float64, shard)
    seen = list[int]()

    def there() -> int:
        flats = gradients.frozen or gradients.values.values()
        return sum(flat.values.untyped_storage().size() > 0 for flat in flats)

    for block in model.chunks[0].layers.values():
        block.register_forward_hook(lambda *_: seen.append(there()))
        next(block.children()).register_full_backward_hook(lambda *_: seen.append(there()))
    step = TrainStep(mesh, Pipeline(mesh, model.chunks, torch.float64), gradients, Optimizer(gradients, lr=0.1))
    batch = microbatches(case, Run(mesh.shape), 0, mesh)
    between = [there()]
    for _ in range(2):
        step(batch, 0.1)
        between.append(there())
    step.pipeline.evaluate(batch, torch.tensor(1.0))
    trained = sum(p.numel() for p in model.parameters.values() if p.requires_grad)
    return seen, [*between, there()], sum(part.gradient.numel() for part in gradients.parts) / trained


def test_parameters_are_there_only_while_they_are_used(pool: Pool) -> None:
    for during, between, held in pool.run(2, seen_memory, UNTIED, "parameters"):
        assert between == [0, 0, 0, 0] and held == pytest.approx(0.5, rel=0.1)
        # Its own, the next one's that is on its way, the head's from its forward to its backward.
        assert len(during) == 2 * 2 * 2 * 6 + 2 * 6 and max(during) <= 3
    for _, between, _ in pool.run(2, seen_memory, UNTIED, "gradients"):
        assert set(between) == {between[0]} and between[0] > 0


def test_frozen_parameters_are_there_only_while_they_are_used(pool: Pool) -> None:
    for during, between, held in pool.run(2, seen_memory, ALL, "parameters"):
        assert between == [0, 0, 0, 0] and held == pytest.approx(0.5, rel=0.1)
        # What comes into the first block needs no gradient, so its backward tells nothing.
        assert len(during) == 2 * 2 * (2 * 6 - 1) + 2 * 6 and max(during) <= 3


def from_hollow() -> tuple[int, int, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(bytes of the parameters before and after they are filled, what they are filled with, what is there)."""
    mesh = Mesh.create(MeshShape(dp=2, tp=4))
    case = TIED.with_layers(3)
    layout = layout_of(case.config, mesh.shape)
    model = Model.create(case.config, layout, mesh, torch.float64, hollow=True)
    before = nbytes(model.parameters.values())
    gradients = Gradients(model.parameters, model.chunks, torch.float64, "parameters")
    optimizer, drawn = Optimizer(gradients, lr=0.1), dict[str, np.ndarray]()
    for name in model.parameters:
        values = model.parameters.drawn(name, 7)
        drawn[name] = values.numpy()
        optimizer.load_weight(name, values)
    after = nbytes([*model.parameters.values(), *(flat.values for flat in gradients.values.values())])
    return before, after, drawn, snapshot(gradients)


def test_a_rank_need_never_hold_all_parameters(pool: Pool) -> None:
    for before, after, drawn, found in pool.run(8, from_hollow):
        assert before == after == 0
        assert all(np.array_equal(found[name], want) for name, want in drawn.items())
        assert all(want.any() for name, want in drawn.items() if "bias" not in name)


# -- who shares


@pytest.mark.quick
def test_stages_and_replicas_divide_a_set() -> None:
    shape = MeshShape(pp=2, dp=4, tp=2)
    tied = shape.ranks(tp=(1,))
    assert divide(shape, tied, 1) == [(1, 3, 5, 7), (9, 11, 13, 15)]
    assert divide(shape, tied, 2) == [(1, 3), (5, 7), (9, 11), (13, 15)]
    assert divide(shape, (2, 3), 1) == [(2, 3)]
    for replicas in (1, 2, 4):
        parts = divide(shape, tied, replicas)
        assert sorted(rank for part in parts for rank in part) == sorted(tied)
        assert {len(part) for part in parts} == {4 // replicas}


def norms_are_shared() -> list[str]:
    mesh = Mesh.create(MeshShape(tp=2))
    case = UNTIED.with_layers(3)
    model = Model.create(case.config, layout_of(case.config, mesh.shape), mesh, torch.float64)
    gradients = Gradients(model.parameters, model.chunks, torch.float64, "optimizer")
    return sorted({place.span.name for b in gradients.buckets if b.group.size > 1 for place in b.flat.places})


def test_tensor_parallel_ranks_share_out_what_they_all_hold(pool: Pool) -> None:
    for names in pool.run(2, norms_are_shared):
        assert "norm.weight" in names and all("norm" in name for name in names) and len(names) == 7


def read_twice(shard: ZeroShard) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The weights that were filled in, and those that come back."""
    mesh = Mesh.create(MeshShape(dp=2, tp=4))
    case = TIED.with_layers(3)
    model = Model.create(case.config, layout_of(case.config, mesh.shape), mesh, torch.float64)
    gradients = Gradients(model.parameters, model.chunks, torch.float64, shard)
    optimizer = Optimizer(gradients, lr=0.1)
    filled = {}
    for name, parameter in model.parameters.items():
        filled[name] = np.random.default_rng(7).normal(size=tuple(parameter.shape))
        optimizer.load_weight(name, torch.from_numpy(filled[name]))
    return filled, snapshot(gradients)


@pytest.mark.parametrize("shard", SHARDED)
def test_weights_come_back_as_they_were_filled_in(pool: Pool, shard: ZeroShard) -> None:
    for filled, found in pool.run(8, read_twice, shard):
        for name, want in filled.items():
            assert np.array_equal(found[name], want), name
