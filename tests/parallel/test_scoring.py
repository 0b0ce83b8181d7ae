"""Windows, softcaps, sinks and scales: every way of computing them is the dense formula, gradients and all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel import kernels
from parallel.kernels import bands
from parallel.kernels.documents import Documents
from parallel.kernels.scoring import Scoring

CPU = torch.device("cpu")
SEQUENCES, LENGTHS = 2, (3, 1, 26, 1, 1, 16, 12)
TOKENS, HEADS, KV, HEAD = sum(LENGTHS), 4, 2, 8
SCORINGS: dict[str, dict[str, Any]] = {
    "window": {"window": 5},
    "itself": {"window": 1},
    "wide": {"window": 30},
    "wider": {"window": 1000},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.7},
    "all": {"scale": 0.7, "window": 9, "softcap": 3.0, "sinks": True},
}
Attend = Callable[[Tensor, Tensor, Tensor, Scoring], Tensor]


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scoring: Scoring) -> Tensor:
    """All scores of all tokens: q: [t, heads, head], k, v: [t, kv, head] -> [t, heads, head]."""
    share, t = q.shape[1] // k.shape[1], torch.arange(len(q))
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen = (document[:, None] == document) & (t[:, None] >= t)
    if scoring.window is not None:
        seen &= t[:, None] - t < scoring.window
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    exponentials = torch.where(seen, scores.exp(), 0)
    total = exponentials.sum(-1, keepdim=True)
    if scoring.sinks is not None:
        total = total + scoring.sinks[:, None, None].exp()
    return torch.einsum("hqk,khd->qhd", exponentials / total, v)


def scored(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> Scoring:
    given = SCORINGS[name] | more
    if given.get("sinks"):
        given["sinks"] = torch.linspace(-1, 2, HEADS, dtype=torch.float64).to(dtype).requires_grad_()
    return Scoring(**given)


def drawn(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(tokens, HEADS + 2 * KV, HEAD, generator=generator, dtype=torch.float64) * 1.5
    return qkv.to(dtype).requires_grad_()


def results(attend: Attend, qkv: Tensor, scoring: Scoring) -> list[Tensor]:
    """The output and the gradients of q, k and v together, and of the sinks."""
    leaves = [qkv] if scoring.sinks is None else [qkv, scoring.sinks]
    q, k, v = qkv.split([HEADS, KV, KV], 1)
    y = attend(q, k, v, scoring)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    return [x.double() for x in (y.detach(), *torch.autograd.grad(y, leaves, dy))]


def distances(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


def in_sequences(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """As the model has it where no documents are told apart."""
    q, k, v = (x.unflatten(0, (SEQUENCES, -1)).transpose(1, 2) for x in (q, k, v))
    return kernels.causal_attention(q, k, v, scoring).transpose(1, 2).flatten(0, 1)


def in_documents(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    return kernels.documents_attention(q, k, v, Documents.of(LENGTHS, CPU), SEQUENCES, scoring)


WAYS: dict[str, tuple[Attend, Sequence[int]]] = {
    "sequences": (in_sequences, (TOKENS // SEQUENCES,) * SEQUENCES),
    "documents": (in_documents, LENGTHS),
}


@pytest.mark.parametrize("block", [1, 7, 128])
@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("way", WAYS)
def test_the_formula(monkeypatch: pytest.MonkeyPatch, way: str, name: str, block: int) -> None:
    monkeypatch.setattr(bands, "_BLOCK", block)
    (attend, lengths), qkv = WAYS[way], drawn()
    want = results(lambda q, k, v, scoring: dense(q, k, v, lengths, scoring), qkv, scored(name))
    assert max(distances(results(attend, qkv, scored(name)), want)) < 1e-12
    # Dropping next to nothing goes another way.
    assert max(distances(results(attend, qkv, scored(name, dropout=1e-30)), want)) < 1e-12
