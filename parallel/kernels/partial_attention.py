"""Attention to some of the keys: what it gives, and the logarithm of the sum by which it is merged with the others'."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.kernels.documents import Documents
from parallel.kernels.scoring import Scoring

# q: [n, heads, head], k: [m, kv, head], v: [m, kv, value] -> out: [n, heads, value], log_sum: [n, heads] in fp32 at
# least. The backwards take the output and the log_sum of all keys.


def alone(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Causal attention of successive tokens that are documents by themselves."""
    return _forward(q, k, v, _within(documents, scoring.window), scoring)


def alone_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    documents: Documents,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv."""
    return _backward(dy, q, k, v, out, log_sum, _within(documents, scoring.window), scoring)


def rectangle(q: Tensor, k: Tensor, v: Tensor, band: int | None, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys that are all before them."""
    return _forward(q, k, v, _seen(len(q), len(k), band, q.device), scoring)


def rectangle_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    band: int | None,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv."""
    return _backward(dy, q, k, v, out, log_sum, _seen(len(q), len(k), band, q.device), scoring)


def _within(documents: Documents, window: int | None) -> Tensor:
    t = int(documents.host[-1])
    at = torch.arange(t, device=documents.device.device)
    number = torch.bucketize(at, documents.device, right=True)
    seen = (number[:, None] == number) & (at[:, None] >= at)
    return seen if window is None else seen & (at[:, None] - at < window)


def _seen(n: int, m: int, band: int | None, device: torch.device) -> Tensor:
    if band is None:
        return torch.ones(n, m, dtype=torch.bool, device=device)
    return torch.arange(m, device=device) >= torch.arange(n, device=device)[:, None] + band


def _scores(q: Tensor, k: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    share = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhd,mhd->hnm", q.to(wide), k.to(wide).repeat_interleave(share, 1))
    scores = scores * scoring.factor(q.shape[-1])
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    return scores.masked_fill(~seen, float("-inf"))


def _forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, seen, scoring)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum[..., None]).exp()
    values = v.to(weights.dtype).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hnm,mhd->nhd", weights, values).to(q.dtype), log_sum.T


def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, seen: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    wide = log_sum.dtype
    share = q.shape[1] // k.shape[1]
    scores = _scores(q, k, seen, scoring)
    weights = (scores - log_sum.T[..., None]).exp()
    values = v.to(wide).repeat_interleave(share, 1)
    dv = torch.einsum("hnm,nhd->mhd", weights, dy.to(wide))
    along = (dy.to(wide) * out.to(wide)).sum(-1).T
    ds = weights * (torch.einsum("nhd,mhd->hnm", dy.to(wide), values) - along[..., None])
    if scoring.softcap is not None:
        ds = ds * (1 - (scores.masked_fill(~seen, 0) / scoring.softcap).square())
    ds = ds * scoring.factor(q.shape[-1])
    keys = k.to(wide).repeat_interleave(share, 1)
    dq = torch.einsum("hnm,mhd->nhd", ds, keys)
    dk = torch.einsum("hnm,nhd->mhd", ds, q.to(wide))
    dk, dv = (x.unflatten(1, (-1, share)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
