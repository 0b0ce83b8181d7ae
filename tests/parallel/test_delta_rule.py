"""The gated delta rule and causal convolutions against their definitions, token by token, and against transformers."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from families import in_float64
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from megacore.parallel.kernels.convolution import causal_convolution
from megacore.parallel.kernels.delta_rule import delta_rule, handed_on, transitions
from megacore.parallel.kernels.spans import Spans

CPU = torch.device("cpu")
# Spans of t tokens, and tokens of a chunk: spans that end within one, at its end, and behind several.
CASES = [((13, 13), 4), ((5, 1, 8, 3, 16), 4), ((1,), 64), ((1, 1, 1), 2), ((7, 64, 1), 16), ((130,), 64)]


def draw(t: int, heads: int = 2, each: int = 3, key: int = 5, value: int = 4) -> list[Tensor]:
    """q, k, v, g, beta of t tokens, all with gradients."""
    generator = torch.Generator().manual_seed(t)
    shapes = (heads, key), (heads, key), (heads, each, value), (heads, each), (heads, each)
    q, k, v, g, beta = (torch.randn(t, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.detach().requires_grad_() for x in (q, k, v, -F.softplus(2 * g), beta.sigmoid())]


def step_by_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: one token after the other, and one span."""
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, outputs = q * q.shape[-1] ** -0.5, []
    for i in range(len(q)):
        state = state * g[i].exp()[..., None, None]
        new = (v[i] - torch.einsum("heav,ha->hev", state, k[i])) * beta[i][..., None]
        state = state + torch.einsum("ha,hev->heav", k[i], new)
        outputs.append(torch.einsum("heav,ha->hev", state, q[i]))
    return torch.stack(outputs), state


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("lengths", "size"), CASES)
@pytest.mark.parametrize("enters", [False, True], ids=["", "with-states"])
def test_chunks_are_the_steps(lengths: tuple[int, ...], size: int, enters: bool) -> None:
    inputs, spans = draw(sum(lengths)), Spans(lengths, CPU)
    shape = len(lengths), 2, 3, 5, 4
    states = torch.randn(shape, dtype=torch.float64) if enters else torch.zeros(shape, dtype=torch.float64)
    states.requires_grad_(enters)
    each = zip(*(x.split(lengths) for x in inputs), states, strict=True)
    want, ends = zip(*(step_by_step(*some) for some in each), strict=True)
    got, last = delta_rule(*inputs, states if enters else None, spans, size)
    close(got, torch.cat(want))
    close(last, torch.stack(ends))
    close(handed_on(transitions(*inputs[1:], spans, size), states), last)

    wanted, factor = [*inputs, *[states] * enters], torch.randn(got.shape, dtype=torch.float64)
    loss = (torch.cat(want) * factor).sum() + torch.stack(ends).square().sum()
    for one, other in zip(
        torch.autograd.grad(loss, wanted, retain_graph=True),
        torch.autograd.grad((got * factor).sum() + last.square().sum(), wanted),
        strict=True,
    ):
        close(other, one)
    of_states = torch.autograd.grad(torch.stack(ends).square().sum(), [*inputs[1:], *[states] * enters])
    on = handed_on(transitions(*inputs[1:], spans, size), states).square().sum()
    for one, other in zip(of_states, torch.autograd.grad(on, [*inputs[1:], *[states] * enters]), strict=True):
        close(other, one)


def test_chunks_are_those_of_transformers() -> None:
    q, k, v, g, beta = (x.detach() for x in draw(150))
    y, last = delta_rule(q, k, v, g, beta, None, Spans((75, 75), CPU))
    rows = ((x.flatten(1, 2) if x is not q and x is not k else x).unflatten(0, (2, -1)) for x in (v, g, beta))
    values, decay, share = (x.flatten(2, 3) if x.dim() == 5 else x for x in rows)
    with in_float64():
        theirs, state = torch_chunk_gated_delta_rule(
            q.unflatten(0, (2, -1)),
            k.unflatten(0, (2, -1)),
            values,
            g=decay,
            beta=share,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    close(y.flatten(1, 2), theirs.flatten(0, 1))
    assert state is not None
    close(last.flatten(1, 2), state)


def test_narrow_numbers_are_computed_in_fp32() -> None:
    wide = [x.detach().bfloat16().double() for x in draw(40)]
    want, _ = delta_rule(*wide, None, Spans((40,), CPU), 16)
    got, last = delta_rule(*(x.bfloat16() for x in wide), None, Spans((40,), CPU), 16)
    assert (got.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert float((got - want).norm() / want.norm()) < 3e-3


@pytest.mark.parametrize(("lengths", "taps"), [((7,), 4), ((1, 2, 9, 3), 4), ((2, 5), 3), ((4, 4), 2)])
def test_a_convolution_mixes_in_what_stands_before_in_its_span(lengths: tuple[int, ...], taps: int) -> None:
    t, spans = sum(lengths), Spans(lengths, CPU)
    x, weight, before = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((t, 3), (3, taps), (len(lengths), taps - 1, 3))
    )
    rows = [torch.cat(pair) for pair in zip(before, x.split(lengths), strict=True)]
    want = torch.cat([F.conv1d(row.T, weight[:, None], groups=3).T for row in rows])
    got = causal_convolution(x, weight, before, spans)
    close(got, want)
    factor = torch.randn(t, 3, dtype=torch.float64)
    grads = [torch.autograd.grad((y * factor).sum(), (x, weight, before)) for y in (want, got)]
    for one, other in zip(*grads, strict=True):
        close(other, one)
    ends = torch.cat([x, before.flatten(0, 1)])[spans.last(taps - 1)]
    close(ends, torch.stack([row[1 - taps :] for row in rows]))
    assert [0, *accumulate(lengths)][-1] == t
