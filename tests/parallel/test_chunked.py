"""Modules that are run on some tokens at a time: gradients, dropout, what is computed again, and who is told of it."""

import pytest
import torch
from operators import kept_for_backward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.parallel.layers.chunked import in_chunks
from megacore.parallel.layers.linear import ColumnParallelLinear, hand_to
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import WeightGradient

TOKENS = 13


def made(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    up, down = (ColumnParallelLinear(*sizes, mesh=Mesh.single(), dtype=torch.float64) for sizes in ((6, 10), (10, 6)))
    return nn.Sequential(nn.LayerNorm(6, dtype=torch.float64), up, nn.GELU(), nn.Dropout(dropout), down)


def given() -> Tensor:
    return torch.randn(TOKENS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(net: nn.Module, y: Tensor, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((y * given()).sum(), [x, *net.parameters()]))


@pytest.mark.parametrize("tokens", [1, 5, 13, 20])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_those_of_the_pieces(tokens: int, dropout: float) -> None:
    net, x = made(dropout), given().requires_grad_()
    torch.manual_seed(2)
    want = gradients(net, torch.cat([net(rows) for rows in x.split(tokens)]), x)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    got = gradients(net, in_chunks(net, [net], x, tokens), x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert torch.equal(torch.get_rng_state(), after)  # the backward has drawn nothing


def test_only_the_input_is_kept() -> None:
    net, x = made(), given().requires_grad_()
    with kept_for_backward() as kept:
        in_chunks(net, [net], x, 5)
    assert [each.data_ptr() for each in kept] == [x.data_ptr()]


@pytest.mark.parametrize("around", [False, True], ids=["alone", "recomputed"])
def test_no_more_is_computed_where_the_block_is_computed_again(around: bool) -> None:
    net, x, rows = made(), given().requires_grad_(), list[int]()
    net[1].register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    before = nn.Linear(6, 6, dtype=torch.float64)

    def block(x: Tensor) -> Tensor:
        y = before(x)
        return y + in_chunks(net, [net], y, 5)

    y = checkpoint(block, x, use_reentrant=False) if around else block(x)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert rows == [5, 5, 3] * 2


def test_frozen_modules_pass_the_gradient_on() -> None:
    net, x = made().requires_grad_(False), given().requires_grad_()
    (want,) = torch.autograd.grad(net(x).sum(), x)
    (got,) = torch.autograd.grad(in_chunks(net, [net], x, 4).sum(), x)
    torch.testing.assert_close(got, want)
    last = net[4]
    assert isinstance(last, ColumnParallelLinear)
    last.weight.requires_grad_()
    (want,) = torch.autograd.grad(net(given()).sum(), last.weight)
    (got,) = torch.autograd.grad(in_chunks(net, [net], given(), 4).sum(), last.weight)
    torch.testing.assert_close(got, want)


def test_a_handed_gradient_is_told_of_once() -> None:
    """As on a GPU, where products add gradients to the sums themselves."""
    net, x, told = made(), given().requires_grad_(), list[tuple[Tensor, Tensor]]()
    want = dict(zip([x, *net.parameters()], gradients(net, net(x), x), strict=True))

    def accept(parameter: nn.Parameter, gradient: WeightGradient | Tensor) -> None:
        assert isinstance(gradient, Tensor)
        told.append((parameter, gradient))

    hand_to(accept, net.modules())
    y = in_chunks(net, [net], x, 5)
    (y * given()).sum().backward()
    assert [parameter.shape for parameter, _ in told] == [(10, 6), (6, 10)]
    for parameter, gradient in told:
        torch.testing.assert_close(gradient, want[parameter])
        assert parameter.grad is None
    for parameter in net[0].parameters():
        torch.testing.assert_close(parameter.grad, want[parameter])
