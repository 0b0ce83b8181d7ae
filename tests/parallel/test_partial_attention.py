"""Attention to some of the keys: merged, it is the formula over all of them, forward and backward, in each way."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import flash_formula
import pytest
import torch
from attention_formula import attention, distances, scores_of
from operators import Operators
from torch import Tensor

from megacore.parallel import kernels
from megacore.parallel.kernels import bands, flash
from megacore.parallel.kernels import partial_attention as partial
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.kernels.scoring import Scoring

CPU = torch.device("cpu")
HEAD, VALUE = 16, 16
HEADS = [(4, 2), (3, 3), (6, 1)]


@dataclass(frozen=True)
class Case:
    """Tokens of one document of which a rank holds ``own``, [start, stop) each; it looks at the others in pieces.

    Args:
        length: Of the document.
        own: What it holds.
        window, softcap, scale: As of a scoring.
        value: Size of a head of values.
    """

    length: int
    own: tuple[tuple[int, int], ...]
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    value: int = HEAD

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.scale, self.window, self.softcap)


CASES = {
    "zigzag": Case(37, ((0, 9), (28, 37))),
    "odd": Case(31, ((3, 4), (4, 17), (30, 31)), scale=0.3),
    "softcap": Case(37, ((0, 9), (28, 37)), softcap=2.0),
    "window": Case(41, ((0, 9), (12, 14), (31, 41)), window=7),
    "wide-window": Case(41, ((5, 15), (31, 41)), window=21, softcap=3.0),
    "narrow-values": Case(37, ((0, 9), (28, 37)), value=5),
    "narrow-in-window": Case(300, ((140, 300),), window=150, value=5),
    "blocks": Case(300, ((0, 20), (140, 300)), window=200),
}


def drawn(case: Case, heads: int, kv: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    sizes = (heads, HEAD), (kv, HEAD), (kv, case.value), (heads, case.value)
    q, k, v, dy = (torch.randn(case.length, *size, generator=generator, dtype=torch.float64) for size in sizes)
    return (q * 2).to(dtype), k.to(dtype), v.to(dtype), dy.to(dtype)


def by_formula(case: Case, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """All scores of the document, of which only the own queries' gradients count -> out, log_sum, dq, dk, dv."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, [case.length], case.scoring)
    log_sum = scores_of(q, k, [case.length], case.scoring).logsumexp(-1)
    own = rows(case.own)
    out[own].backward(dy.double()[own])
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach()[own], log_sum.T.detach()[own], q.grad[own], k.grad, v.grad


def rows(spans: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in spans])


def pieces(case: Case) -> list[tuple[slice, slice, int | None]]:
    """(own queries, keys of the document, band) of every rectangle; keys of others as they lie between the own ones."""
    found = []
    places = [0, *accumulate(stop - start for start, stop in case.own)]
    for (start, stop), place in zip(case.own, places, strict=False):
        cuts = sorted({0, start // 2, start, *(end for span in case.own for end in span if end < start)})
        for first, last in pairwise(cuts):
            n, band = stop - start, None
            if case.window is None and any(first >= low and last <= high for low, high in case.own):
                continue  # without a window the own ones are in ``alone``
            if case.window is not None:
                band = start - first - case.window + 1
                n = min(n, last - first - band)
                band = None if n - 1 + band <= 0 else band
            if n > 0:
                found.append((slice(place, place + n), slice(first, last), band))
    return found


def merged(case: Case, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """What a rank makes of its queries and all keys, in pieces -> out, log_sum, dq, dk, dv."""
    own, scoring = rows(case.own), case.scoring
    lengths = [len(own)] if case.window is None else [stop - start for start, stop in case.own]
    documents = Documents.of(lengths, CPU)
    queries, keys, values, dys = (x[own] for x in (q, k, v, dy))
    y, log_sum = partial.alone(queries, keys, values, documents, scoring)
    out = y.to(log_sum.dtype)
    for some, others, band in pieces(case):
        y, more = partial.rectangle(queries[some], k[others], v[others], band, scoring)
        total = torch.logaddexp(log_sum[some], more)
        out[some] = out[some] * (log_sum[some] - total).exp()[..., None] + y * (more - total).exp()[..., None]
        log_sum[some] = total
    out = out.to(q.dtype)
    dq, *own_gradients = partial.alone_backward(dys, queries, keys, values, out, log_sum, documents, scoring)
    dq, dk, dv = dq.to(log_sum.dtype), *(torch.zeros_like(x, dtype=log_sum.dtype) for x in (k, v))
    dk[own], dv[own] = (x.to(log_sum.dtype) for x in own_gradients)
    for some, others, band in pieces(case):
        here = dys[some], queries[some], k[others], v[others], out[some], log_sum[some]
        found = partial.rectangle_backward(*here, band, case.scoring)
        for whole, where, part in zip((dq, dk, dv), (some, others, others), found, strict=True):
            whole[where] += part
    return out, log_sum, dq, dk, dv


@pytest.mark.parametrize(("heads", "kv"), HEADS)
@pytest.mark.parametrize("name", CASES)
def test_pieces_merged_are_the_formula(name: str, heads: int, kv: int) -> None:
    given = drawn(CASES[name], heads, kv)
    assert max(distances(merged(CASES[name], *given), by_formula(CASES[name], *given))) < 1e-12


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_in_fewer_bits(name: str, dtype: torch.dtype, error: float) -> None:
    given = drawn(CASES[name], 4, 2, dtype)
    got = merged(CASES[name], *given)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    assert max(distances(got, by_formula(CASES[name], *given))) < error


@pytest.mark.parametrize(("length", "count"), [(600, 2), (1600, 4)])
def test_in_bf16_as_near_as_one_call(length: int, count: int) -> None:
    """All parts of a zigzag beside the kernel that computes all at once."""
    whole, step = Case(length, ((0, length),)), length // count // 2
    q, *others = drawn(whole, 4, 2)
    given = [x.bfloat16() for x in (q / 2, *others)]
    want = without_sum(by_formula(whole, *given))
    queries, keys, values = (x.transpose(0, 1)[None].detach().requires_grad_() for x in given[:3])
    y = kernels.causal_attention(queries, keys, values)
    found = y.detach(), *torch.autograd.grad(y, (queries, keys, values), given[3].transpose(0, 1)[None])
    errors = [float((x[0].transpose(0, 1) - exact).norm()) for x, exact in zip(found, want, strict=True)]
    pairs = [(start, length - start - step) for start in range(0, length // 2, step)]
    cases = [Case(length, tuple((start, start + step) for start in each)) for each in pairs]
    parts = [without_sum(merged(case, *given)) for case in cases]
    order = torch.cat([rows(case.own) for case in cases]).argsort()
    out, dq, dk, dv = (list(each) for each in zip(*parts, strict=True))
    got = torch.cat(out)[order], torch.cat(dq)[order], sum(dk), sum(dv)
    for error, some, exact in zip(errors, got, want, strict=True):
        assert float((some - exact).norm()) < 1.2 * error


def without_sum(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results[0], *results[2:]


# -- torch's kernel for CUDA, which is not here


@pytest.mark.parametrize("name", ["zigzag", "odd", "window", "softcap", "narrow-in-window", "blocks"])
def test_torchs_kernel_for_cuda_is_asked_for_this(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = CASES[name]
    monkeypatch.setattr(flash, "aten", flash_formula.STAND_IN)
    monkeypatch.setattr(flash, "shares", lambda: True)
    given, asked = drawn(case, 4, 2), list[Tensor]()

    def takes(q: Tensor) -> bool:
        asked.append(q)
        return True

    def by_rectangles(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def with_flash(*inputs: Any) -> Any:
            with monkeypatch.context() as inside:
                inside.setattr(flash, "takes", takes)
                inside.setattr(partial, "_by_kernel", lambda *_: False)
                return kernel(*inputs)

        return with_flash

    for kernel in ("rectangle", "rectangle_backward"):
        monkeypatch.setattr(partial, kernel, by_rectangles(getattr(partial, kernel)))
    assert max(distances(merged(case, *given), by_formula(case, *given))) < 1e-12
    assert bool(asked) == (case.softcap is None)


@pytest.mark.parametrize("band", [None, 3])
def test_torchs_operators_take_it(monkeypatch: pytest.MonkeyPatch, band: int | None) -> None:
    """As far as shapes go."""
    q, k, v = (torch.empty(t, h, HEAD, dtype=torch.bfloat16, device="meta") for t, h in ((5, 4), (9, 2), (9, 2)))
    monkeypatch.setattr(flash, "takes", lambda q: True)
    y, log_sum = partial.rectangle(q, k, v, band, Scoring())
    assert y.shape == q.shape and log_sum.shape == (5, 4) and log_sum.dtype == torch.float32
    dq, dk, dv = partial.rectangle_backward(y, q, k, v, y, log_sum, band, Scoring())
    assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape


def elements(operator: Any, arguments: Any, y: Any) -> int:
    return y.numel() if isinstance(y, Tensor) else 0


@pytest.mark.parametrize(("keys", "queries"), [(1 << 10, 1024), (1 << 17, 128)])
def test_scores_of_a_softcap_are_bounded_on_a_gpu(keys: int, queries: int) -> None:
    """By blocks of fewer queries, forward and backward: 16 heads of 1,024 queries and 128k keys are 8 GiB in fp32."""
    q, k, v = (torch.empty(1, h, t, HEAD, device="meta") for t, h in ((4096, 16), (keys, 2), (keys, 2)))
    with Operators(elements, max) as forward:
        y, log_sum = bands.before(q, k, v, band=None, scoring=Scoring(softcap=30.0))
    with Operators(elements, max) as backward:
        bands.before_backward(y, q, k, v, y, log_sum, band=None, scoring=Scoring(softcap=30.0))
    assert forward.found == backward.found == 16 * queries * keys
