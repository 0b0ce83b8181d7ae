"""The gated delta rule, state spaces, selective scans, linear recurrences and convolutions against their definitions,
token by token, and transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, starmap

import pytest
import torch
import torch.nn.functional as F
from families import in_float64
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from megacore.parallel.kernels.convolution import causal_convolution
from megacore.parallel.kernels.delta_rule import delta_rule, handed_on
from megacore.parallel.kernels.linear_recurrence import linear_recurrence
from megacore.parallel.kernels.selective_scan import selective_scan
from megacore.parallel.kernels.spans import Spans

CPU = torch.device("cpu")
# Spans of t tokens, and tokens of a chunk: spans that end within one, at its end, and behind several.
CASES = [((13, 13), 4), ((5, 1, 8, 3, 16), 4), ((1,), 64), ((1, 1, 1), 2), ((7, 64, 1), 16), ((130,), 64)]


Inputs = tuple[Tensor, ...]


def draw(t: int, heads: int = 2, each: int = 3, key: int = 5, value: int = 4, channels: bool = False) -> Inputs:
    """q, k, v, g, beta of t tokens, all with gradients; g of each channel or of each head."""
    generator = torch.Generator().manual_seed(t)

    def normal(*shape: int) -> Tensor:
        return torch.randn(t, *shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(heads, key), normal(heads, key), normal(heads, each, value)
    g = -F.softplus(2 * normal(heads, each, *[key] * channels))
    beta = normal(heads, each).sigmoid()
    for x in (q, k, v, g, beta):
        x.requires_grad_()
    return q, k, v, g, beta


def step_by_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, corrects: bool
) -> tuple[Tensor, Tensor]:
    """The definition: one token after the other, and one span."""
    if corrects:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q = q * q.shape[-1] ** -0.5
    outputs = []
    for i in range(len(q)):
        state = state * (g[i] if g.dim() == 4 else g[i][..., None]).exp()[..., None]
        known = torch.einsum("heav,ha->hev", state, k[i]) if corrects else 0
        state = state + torch.einsum("ha,hev->heav", k[i], (v[i] - known) * beta[i][..., None])
        outputs.append(torch.einsum("heav,ha->hev", state, q[i]))
    return torch.stack(outputs), state


def draw_scan(t: int, channels: int = 3, key: int = 5) -> Inputs:
    """c, b, x, step, rate of t tokens, all with gradients; of some steps nothing is left, of others nearly all."""
    generator = torch.Generator().manual_seed(t)
    c, b, x, step, rate = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((t, key), (t, key), (t, channels, 1), (t, channels), (channels, key))
    )
    step = F.softplus(step) * torch.tensor([1e-6, 1.0, 300.0])
    return tuple(each.requires_grad_() for each in (c, b, x, step.detach(), -rate.exp().detach()))


def scanned_step_by_step(
    c: Tensor, b: Tensor, x: Tensor, step: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition: one token after the other, and one span."""
    outputs = []
    for i in range(len(c)):
        state = (step[i, :, None] * rate).exp()[..., None] * state + (step[i, :, None] * x[i] * b[i])[..., None]
        outputs.append((state * c[i, :, None]).sum(1))
    return torch.stack(outputs), state


def draw_recurrence(t: int) -> Inputs:
    """x, g of t tokens and three channels; of one nearly all is left, of another nothing."""
    generator = torch.Generator().manual_seed(t)
    x, g = (torch.randn(t, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    g = -F.softplus(g) * torch.tensor([1e-6, 1.0, 300.0])
    return x.requires_grad_(), g.requires_grad_()


def recurred_step_by_step(x: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: one token after the other, and one span."""
    outputs = []
    for i in range(len(x)):
        state = g[i, :, None, None].exp() * state + x[i, :, None, None]
        outputs.append(state.flatten())
    return torch.stack(outputs), state


def same_gradients(made: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor]) -> None:
    factor = torch.randn(made[0][0].shape, dtype=torch.float64)
    each = [torch.autograd.grad((y * factor).sum() + end.square().sum(), wanted) for y, end in made]
    for one, other in zip(*each, strict=True):
        close(other, one)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@dataclass(frozen=True)
class Rule:
    """A recurrence: what draws its inputs, of which the first ``split`` have tokens, its definition, what computes it,
    and the shape of its state."""

    draw: Callable[[int], Inputs]
    step_by_step: Callable[..., tuple[Tensor, Tensor]]
    computed: Callable[..., tuple[Tensor, Tensor]]
    split: int = 5
    state: tuple[int, ...] = (2, 3, 5, 4)


RULES = {
    name: Rule(
        partial(draw, channels=channels),
        partial(step_by_step, corrects=corrects),
        partial(delta_rule, corrects=corrects),
    )
    for name, corrects, channels in (
        ("delta", True, False),
        ("state-space", False, False),
        ("channels", True, True),
        ("channels-state-space", False, True),
    )
} | {
    "scan": Rule(draw_scan, scanned_step_by_step, selective_scan, 4, (3, 5, 1)),
    "recurrence": Rule(draw_recurrence, recurred_step_by_step, lambda *a: linear_recurrence(*a[:-1]), 2, (3, 1, 1)),
}
OF_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.mark.in_turn(3)
@OF_RULES
@pytest.mark.parametrize(("lengths", "size"), CASES)
@pytest.mark.parametrize("enters", [False, True], ids=["", "with-states"])
def test_chunks_are_the_steps(rule: Rule, lengths: tuple[int, ...], size: int, enters: bool) -> None:
    inputs = rule.draw(sum(lengths))
    states = (torch.randn(len(lengths), *rule.state, dtype=torch.float64) * enters).requires_grad_(enters)
    of_spans = [x.split(lengths) for x in inputs[: rule.split]] + [[x] * len(lengths) for x in inputs[rule.split :]]
    found = starmap(rule.step_by_step, zip(*of_spans, states, strict=True))
    want, ends = (torch.cat(x) for x in zip(*((y, end[None]) for y, end in found), strict=True))
    got, last = rule.computed(*inputs, states if enters else None, Spans(lengths, CPU), size)
    close(got, want)
    close(last, ends)
    same_gradients([(want, ends), (got, last)], [*inputs, *[states] * enters])


@OF_RULES
@pytest.mark.parametrize(("lengths", "size"), CASES)
def test_spans_of_a_document_hand_their_states_on(rule: Rule, lengths: tuple[int, ...], size: int) -> None:
    inputs, nothing = rule.draw(sum(lengths)), torch.zeros(rule.state, dtype=torch.float64)

    def enter(transitions: Tensor) -> Tensor:
        return torch.stack([*accumulate(transitions[:-1], lambda state, each: handed_on(each, state), initial=nothing)])

    want, end = rule.step_by_step(*inputs, nothing)
    got, last = rule.computed(*inputs, enter, Spans(lengths, CPU), size)
    close(got, want)
    close(last[-1], end)
    same_gradients([(want, end), (got, last[-1])], inputs)


@pytest.mark.parametrize(
    ("channels", "of_transformers"), [(False, torch_chunk_gated_delta_rule), (True, chunk_kimi_delta_attention)]
)
def test_chunks_are_those_of_transformers(
    channels: bool, of_transformers: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    q, k, v, g, beta = (x.detach() for x in draw(150, each=1 if channels else 3, channels=channels))
    y, last = delta_rule(q, k, v, g, beta, None, Spans((75, 75), CPU))
    with in_float64():
        theirs, state = of_transformers(
            *(x.unflatten(0, (2, 75)) for x in (q, k)),
            *(x.flatten(1, 2).unflatten(0, (2, 75)) for x in (v, g, beta)),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    close(y.flatten(1, 2), theirs.flatten(0, 1))
    assert state is not None
    close(last.flatten(1, 2), state)


@pytest.mark.parametrize("size", [4, 48, 64])
def test_channels_that_fade_at_once_are_exact(size: int) -> None:
    """Of some channels nothing is left from one token to the next, of others nearly all, and what is left of a chunk is
    below all that a number can be: none of it overflows, or loses the other ones."""
    q, k, v, g, beta = draw(64, channels=True)
    g = (g.detach() * torch.tensor([200.0, 1e-6, 1.0, 30.0, 0.1])).requires_grad_()
    nothing = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    want = step_by_step(q, k, v, g, beta, nothing, True)
    got, last = delta_rule(q, k, v, g, beta, None, Spans((64,), CPU), size)
    close(got, want[0])
    same_gradients([want, (got, last[0])], (q, k, v, g, beta))


def test_a_scan_is_that_of_transformers() -> None:
    c, b, x, step, rate = (each.detach() for each in draw_scan(75))
    y, last = selective_scan(c, b, x, step, rate, None, Spans((75,), CPU))
    with in_float64():
        of = (each.T[None] for each in (x.squeeze(2), step, rate.T, b, c))
        theirs, state = mamba_selective_scan(
            *(each[0] if n == 2 else each for n, each in enumerate(of)), return_last_state=True
        )
    close(y.squeeze(2), theirs[0].T)
    close(last.squeeze(-1), state)


def test_narrow_numbers_are_computed_in_fp32() -> None:
    q, k, v, g, beta = (x.detach().bfloat16().double() for x in draw(40))
    want, _ = delta_rule(q, k, v, g, beta, None, Spans((40,), CPU), 16)
    q, k, v, g, beta = (x.bfloat16() for x in (q, k, v, g, beta))
    got, last = delta_rule(q, k, v, g, beta, None, Spans((40,), CPU), 16)
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
