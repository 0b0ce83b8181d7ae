"""Collectives: results against numpy, and adjoint pairs by the dot-product identity."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from pool import Pool
from torch import Tensor

from megacore.parallel import collectives
from megacore.parallel.collectives import start_all_gather, start_all_reduce, start_all_to_all, start_reduce_scatter
from megacore.parallel.mesh import ALONE, Group, Mesh
from megacore.parallel.weights.layout import MeshShape

WORLDS = (2, 3, 4)
SHAPE = (12, 24, 5)  # whole; every world divides the first two

Call = Callable[[Tensor, Group], Tensor]


@dataclass(frozen=True)
class Pair:
    """A collective: what its input and its output are, and the dimension that is split.

    "split": each rank holds its part. "own": each rank holds a whole tensor of its own (a partial sum, or copies for
    different uses). "replicated": all hold the same, and in a dot product it counts once.
    """

    call: Call
    input: str
    output: str
    dim: int = 0


PAIRS = {
    "all_gather": Pair(collectives.all_gather, "split", "own"),
    "reduce_scatter": Pair(collectives.reduce_scatter, "own", "split"),
    "replicate": Pair(collectives.replicate, "replicated", "own"),
    "reduce": Pair(collectives.reduce, "own", "replicated"),
    "gather 0": Pair(partial(collectives.gather, dim=0), "split", "replicated", 0),
    "gather 1": Pair(partial(collectives.gather, dim=1), "split", "replicated", 1),
    "split 0": Pair(partial(collectives.split, dim=0), "replicated", "split", 0),
    "split 1": Pair(partial(collectives.split, dim=-2), "replicated", "split", 1),
}


def draw(kind: str, dim: int, rank: int, world: int, seed: int) -> np.ndarray:
    """What a rank holds of a random tensor."""
    if kind == "own":
        return np.random.default_rng([seed, rank]).standard_normal(SHAPE)
    whole = np.random.default_rng(seed).standard_normal(SHAPE)
    return whole if kind == "replicated" else np.split(whole, world, dim)[rank]


def work(pairwise: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{pair: (A x, A' y)} on this rank, for the drawn x and y."""
    group = _group(pairwise)
    results = {}
    for name, pair in PAIRS.items():
        x = torch.from_numpy(draw(pair.input, pair.dim, group.index, group.size, 1)).requires_grad_()
        result = pair.call(x, group)
        result.backward(torch.from_numpy(draw(pair.output, pair.dim, group.index, group.size, 2)))
        assert x.grad is not None
        results[name] = (result.detach().numpy(), x.grad.numpy())
    return results


def _group(pairwise: bool) -> Group:
    world = torch.distributed.get_world_size()
    return replace(Mesh.create(MeshShape(tp=world)).tp, pairwise=pairwise)


def dot(kind: str, a: list[np.ndarray], b: list[np.ndarray]) -> float:
    if kind == "replicated":
        assert all(np.array_equal(x, a[0]) for x in a) and all(np.array_equal(x, b[0]) for x in b)
        a, b = a[:1], b[:1]
    return float(sum((x * y).sum() for x, y in zip(a, b, strict=True)))


@pytest.mark.quick
@pytest.mark.parametrize("pairwise", [True, False], ids=["pairwise", "backend"])
@pytest.mark.parametrize("world", WORLDS)
def test_backward_is_the_adjoint(pool: Pool, world: int, pairwise: bool) -> None:
    """<A x, y> == <x, A' y>, and the forward is what its name says."""
    results = pool.run(world, work, pairwise)
    for name, pair in PAIRS.items():
        x = [draw(pair.input, pair.dim, rank, world, 1) for rank in range(world)]
        y = [draw(pair.output, pair.dim, rank, world, 2) for rank in range(world)]
        ax, ay = ([results[rank][name][i] for rank in range(world)] for i in (0, 1))
        np.testing.assert_allclose(dot(pair.output, ax, y), dot(pair.input, x, ay), rtol=1e-12, err_msg=name)
        whole = np.concatenate(x, pair.dim) if pair.input == "split" else sum(x) if pair.input == "own" else x[0]
        want = np.split(whole, world, pair.dim) if pair.output == "split" else [whole] * world
        for rank in range(world):
            np.testing.assert_allclose(ax[rank], want[rank], rtol=1e-12, err_msg=name)


SENT = {2: (5, 7), 3: (5, 0, 7), 4: (5, 0, 6, 1)}
"""{world: rows that a rank sends to itself, to the next one, and so on}: all get as many as they send."""


def counts(world: int, rank: int) -> tuple[list[int], list[int]]:
    """Rows for each rank, and of each."""
    sent = [SENT[world][(peer - rank) % world] for peer in range(world)]
    return sent, [SENT[world][(rank - peer) % world] for peer in range(world)]


def exchange(pairwise: bool) -> tuple[np.ndarray, np.ndarray]:
    group = _group(pairwise)
    x, y = (torch.from_numpy(draw("own", 0, group.index, group.size, seed)) for seed in (1, 2))
    sent, got = counts(group.size, group.index)
    there, back = start_all_to_all(x, group, sent, got), start_all_to_all(y, group, got, sent)
    return there.wait().numpy(), back.wait().numpy()


@pytest.mark.quick
@pytest.mark.parametrize("pairwise", [True, False], ids=["pairwise", "backend"])
@pytest.mark.parametrize("world", WORLDS)
def test_rows_reach_their_ranks_and_gradients_come_back(pool: Pool, world: int, pairwise: bool) -> None:
    """All-to-all of uneven counts, some of them 0: by hand, and its adjoint, the counts changed over."""
    results = pool.run(world, exchange, pairwise)
    x, y = ([draw("own", 0, rank, world, seed) for rank in range(world)] for seed in (1, 2))
    parts = [np.split(x[rank], np.cumsum(counts(world, rank)[0])[:-1]) for rank in range(world)]
    for rank, (there, _) in enumerate(results):
        assert np.array_equal(there, np.concatenate([parts[source][rank] for source in range(world)]))
    there, back = ([result[i] for result in results] for i in (0, 1))
    np.testing.assert_allclose(dot("own", there, y), dot("own", x, back), rtol=1e-12)


def asynchronous(pairwise: bool) -> dict[str, np.ndarray]:
    group = _group(pairwise)
    x = torch.from_numpy(draw("own", 0, group.index, group.size, 3))
    apart = x.transpose(0, 1)  # not contiguous
    before = x.clone()
    pending = {
        "gather": start_all_gather(x, group),
        "scatter": start_reduce_scatter(x, group),
        "gather transposed": start_all_gather(apart, group),
        "scatter transposed": start_reduce_scatter(apart, group),
        "sum": start_all_reduce(x.clone(), group),
        "max": start_all_reduce(x.clone(), group, torch.distributed.ReduceOp.MAX),
    }
    found = {name: p.wait().numpy() for name, p in reversed(pending.items())}
    assert torch.equal(x, before), "an input was overwritten"
    return found


@pytest.mark.parametrize("pairwise", [True, False], ids=["pairwise", "backend"])
@pytest.mark.parametrize("world", WORLDS)
def test_asynchronous_results(pool: Pool, world: int, pairwise: bool) -> None:
    """Several under way at a time, waited for in another order."""
    x = [draw("own", 0, rank, world, 3) for rank in range(world)]
    turned = [a.transpose(1, 0, 2) for a in x]
    for rank, found in enumerate(pool.run(world, asynchronous, pairwise)):
        assert np.array_equal(found["gather"], np.concatenate(x))
        assert np.array_equal(found["gather transposed"], np.concatenate(turned))
        np.testing.assert_allclose(found["scatter"], np.split(sum(x), world)[rank], rtol=1e-12)
        np.testing.assert_allclose(found["scatter transposed"], np.split(sum(turned), world)[rank], rtol=1e-12)
        np.testing.assert_allclose(found["sum"], sum(x), rtol=1e-12)
        assert np.array_equal(found["max"], np.max(x, axis=0))


def bf16_sum() -> tuple[Tensor, Tensor]:
    group = _group(True)
    x = torch.from_numpy(draw("own", 0, group.index, group.size, 4)).bfloat16()
    exact = start_reduce_scatter(x.float(), group).wait()
    return start_reduce_scatter(x, group).wait().float(), exact


@pytest.mark.parametrize("world", WORLDS)
def test_bf16_is_summed_in_fp32(pool: Pool, world: int) -> None:
    """The result is rounded once."""
    for got, exact in pool.run(world, bf16_sum):
        assert torch.equal(got, exact.bfloat16().float())


def indivisible() -> list[str]:
    group = _group(True)
    messages = []
    for call in (start_reduce_scatter, collectives.reduce_scatter, collectives.split):
        try:
            call(torch.zeros(7, 7), group)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_tokens_that_do_not_divide_are_an_error(pool: Pool) -> None:
    for messages in pool.run(2, indivisible):
        scatter = "cannot scatter 7 tokens over 2 ranks: choose a multiple of 2"
        last = "cannot split dimension -1 of size 7 over 2 ranks: choose a multiple of 2"
        assert messages == [scatter, scatter, last]


@pytest.mark.quick
def test_over_a_group_of_one_everything_is_the_identity() -> None:
    assert Mesh.single().tp == ALONE
    x = torch.randn(7, 5, requires_grad=True)
    for pair in PAIRS.values():
        assert pair.call(x, ALONE) is x
    for start in (start_all_gather, start_reduce_scatter, start_all_reduce):
        assert start(x, ALONE).wait() is x
