"""Norms with an offset, without a bias, of heads, and over heads that tp ranks share out, against their formulas."""

from itertools import product
from typing import Any

import pytest
import torch
from operators import kept_for_backward
from pool import Pool
from torch import Tensor, nn

from megacore.parallel.layers.norm import LayerNorm, RMSNorm, SplitRMSNorm
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape, split_axis

EPS = 1e-3
TOKENS, HEADS, HEAD = 6, 4, 5
SHAPES = [(HEAD,), (HEADS, HEAD)]


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def formula(x: Tensor, weight: Tensor, bias: Tensor | None, offset: float, centred: bool) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if centred else x
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight + offset)
    return y if bias is None else y + bias


def made(weight: Tensor, bias: Tensor | None, offset: float, centred: bool) -> nn.Module:
    w = nn.Parameter(weight.detach().clone())
    if not centred:
        return RMSNorm.of(w, EPS, Mesh.single(), offset)
    return LayerNorm.of(w, None if bias is None else nn.Parameter(bias.detach().clone()), EPS, Mesh.single(), offset)


KINDS = [
    (shape, offset, *kind)
    for shape, offset in product(SHAPES, (0.0, 1.0))
    for kind in ((False, False), (True, False), (True, True))
]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("shape", "offset", "centred", "biased"), KINDS)
def test_norms_of_heads(shape: tuple[int, ...], offset: float, centred: bool, biased: bool) -> None:
    """[t, heads, head], of which a part of a wider tensor is given, as attention does; every gradient."""
    x = drawn(1, TOKENS, HEADS + 3, HEAD)[:, 2 : 2 + HEADS].requires_grad_()
    weight, dy = drawn(2, *shape).requires_grad_(), drawn(3, TOKENS, HEADS, HEAD)
    bias = drawn(4, *shape).requires_grad_() if biased else None
    norm = made(weight, bias, offset, centred)
    want = formula(x, weight, bias, offset, centred)
    expected = torch.autograd.grad(want, [x, weight, *([] if bias is None else [bias])], dy)
    y = norm(x)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(y, [x, *norm.parameters()], dy)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("centred", [False, True])
def test_the_offset_is_added_in_fp32(centred: bool) -> None:
    """bf16 has no room for 1.001: the learned weights would be rounded to a multiple of 1/128."""
    x, weight = drawn(1, 300, 64).bfloat16(), (drawn(2, 64) / 1000).bfloat16()
    norm = made(weight, None, 1.0, centred)
    want = formula(x.double(), weight.double(), None, 1.0, centred)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    assert ((y.double() - want).abs() <= want.abs() * 2**-8 + 1e-6).all()
    mean = y.double().mul(want).sum() / want.square().sum()
    assert abs(mean - 1) < 1e-4  # off by 5e-4 where weight + 1 is rounded


def test_an_offset_keeps_no_more_than_the_input() -> None:
    x = drawn(1, 10, 8).bfloat16().requires_grad_()
    norm = made(torch.zeros(8, dtype=torch.bfloat16), None, 1.0, True)
    with kept_for_backward() as kept:
        norm(x)
    assert sum(tensor.numel() for tensor in kept if tensor.dtype == torch.float32) <= 2 * len(x)


# -- over all heads of all ranks


def split(cases: list[tuple[int, int]]) -> list[tuple[Tensor, ...]]:
    """y, dx and dweight of this rank's heads, for each number of heads and of their groups."""
    mesh = Mesh.create(MeshShape(tp=torch.distributed.get_world_size()))
    found = list[tuple[Tensor, ...]]()
    for heads, groups in cases:
        x, weight, dy = whole(heads)
        own = slice(*split_axis("kv", heads, mesh.shape.tp, mesh.place.tp))
        # Each copy of a head has its own part of the gradient: so much to that of the first, so much to the next.
        copies = max(1, mesh.shape.tp // heads)
        share = (mesh.place.tp % copies + 1) / (copies * (copies + 1) / 2)
        part = x[:, own].clone().requires_grad_()
        w = nn.Parameter(weight[own].reshape(-1).clone())
        y = SplitRMSNorm(w, EPS, mesh, groups)(part)
        y.backward(dy[:, own] * share)
        assert part.grad is not None and w.grad is not None
        found.append((y.detach(), part.grad, w.grad.view(-1, HEAD)))
    return found


def whole(heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(1, TOKENS, heads, HEAD), drawn(2, heads, HEAD), drawn(3, TOKENS, heads, HEAD)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_norm_over_the_heads_of_all_ranks(pool: Pool, tp: int) -> None:
    """Of heads that are split, and of fewer kv heads than ranks, whose gradients are sums over their copies; and over
    each of some groups of them, more than ranks, as many or fewer."""
    cases = [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 4), (8, 8)]
    results: list[Any] = pool.run(tp, split, cases)
    for case, (heads, groups) in enumerate(cases):
        x, weight, dy = (tensor.requires_grad_() for tensor in whole(heads))
        rows = x.reshape(TOKENS, groups, -1)
        want = formula(rows, weight.view(groups, -1), None, 0.0, False).view_as(x)
        want.backward(dy)
        assert x.grad is not None and weight.grad is not None
        sums = [torch.zeros_like(tensor) for tensor in (x, weight)]
        for rank, result in enumerate(results):
            own = slice(*split_axis("kv", heads, tp, rank))
            torch.testing.assert_close(result[case][0], want[:, own].detach(), rtol=1e-12, atol=1e-12)
            sums[0][:, own] += result[case][1]
            sums[1][own] += result[case][2]
        torch.testing.assert_close(sums[0], x.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sums[1], weight.grad, rtol=1e-12, atol=1e-12)
