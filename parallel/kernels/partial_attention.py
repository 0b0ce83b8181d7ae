"""Attention to some of the keys: what it gives, and the logarithm of the sum by which it is merged with the others'.

Chosen by the device and the numbers, as in ``choice``:

    no window, no softcap    on a CPU torch's kernel for CPUs; on CUDA, of two bytes, torch's flash attention
    a window                 the same on CUDA; else the blocks of ``bands``
    a softcap, others        the blocks of ``bands``
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.kernels import bands, cpu, flash
from megacore.parallel.kernels import documents as within
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.kernels.scoring import Scoring

# q: [n, heads, head], k: [m, kv, head], v: [m, kv, value] -> out: [n, heads, value], log_sum: [n, heads] in fp32 at
# least, without sinks. The backwards take the output and the log_sum of all keys.

aten = torch.ops.aten


def alone(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Causal attention of successive tokens that are documents by themselves."""
    if narrow := q.shape[-1] - v.shape[-1]:
        out, log_sum = alone(q, k, F.pad(v, (0, narrow)), documents, scoring)
        return out[..., :-narrow], log_sum
    scale = scoring.factor(q.shape[-1])
    if _by_kernel(q, scoring.window, scoring):
        return within.forward(q, k, v, documents.host, scale)
    out, log_sum = bands.forward(*map(_row, (q, k, v)), None, documents.device, scale, scoring.window, scoring.softcap)
    return _tokens(out), _tokens(log_sum)


def alone_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    documents: Documents,
    scoring: Scoring,
    exact: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv; ``exact`` unless the log_sums are of no other keys."""
    if narrow := q.shape[-1] - v.shape[-1]:
        dy, v, out = (F.pad(x, (0, narrow)) for x in (dy, v, out))
        dq, dk, dv = alone_backward(dy, q, k, v, out, log_sum, documents, scoring, exact)
        return dq, dk, dv[..., :-narrow]
    scale = scoring.factor(q.shape[-1])
    if _by_kernel(q, scoring.window, scoring):
        return within.backward(dy, q, k, v, out, log_sum, documents.host, scale, exact)
    rows = map(_row, (dy, q, k, v, out, log_sum))
    dq, dk, dv = bands.backward(*rows, documents.device, scale, scoring.window, scoring.softcap)
    return _tokens(dq), _tokens(dk), _tokens(dv)


def rectangle(q: Tensor, k: Tensor, v: Tensor, band: int | None, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys that are all before them.

    Args:
        q, k, v: Those of the queries and of the keys.
        band: Query i sees the keys from i + band on, which are some; None: it sees all.
        scoring: The rule by which they become weights.
    """
    if narrow := q.shape[-1] - v.shape[-1]:
        out, log_sum = rectangle(q, k, F.pad(v, (0, narrow)), band, scoring)
        return out[..., :-narrow], log_sum
    scale = scoring.factor(q.shape[-1])
    if _by_kernel(q, band, scoring):
        queries, keys, values = _by_kv(q, k), _by_kv(k, k), _by_kv(v, k)
        out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, False, scale=scale)
        return _by_token(out, q), _by_token(log_sum, q)
    if scoring.softcap is None and flash.takes(q):
        out, log_sum = flash.forward(q, k, v, scale=scale, **_places(q, k, band))
        return out, log_sum.T
    out, log_sum = bands.before(*map(_row, (q, k, v)), band=band, scoring=scoring)
    return _tokens(out), _tokens(log_sum)


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
    if narrow := q.shape[-1] - v.shape[-1]:
        dy, v, out = (F.pad(x, (0, narrow)) for x in (dy, v, out))
        dq, dk, dv = rectangle_backward(dy, q, k, v, out, log_sum, band, scoring)
        return dq, dk, dv[..., :-narrow]
    scale = scoring.factor(q.shape[-1])
    if _by_kernel(q, band, scoring):
        # In bf16 the batched products of ``bands`` take two thirds of the time, and round scores that are far from the
        # log_sum of a long document: three times the error.
        rows = (_by_kv(x, k) for x in (dy, q, k, v, out, log_sum))
        dq, dk, dv = cpu.flash_backward(*rows, causal=False, scale=scale)
        return _by_token(dq, q), _by_token(dk, k), _by_token(dv, v)
    if scoring.softcap is None and flash.takes(q):
        total = log_sum.T.contiguous()
        return flash.backward(total, dy, q, k, v, out, scale=scale, **_places(q, k, band))
    dq, dk, dv = bands.before_backward(*map(_row, (dy, q, k, v, out, log_sum)), band=band, scoring=scoring)
    return _tokens(dq), _tokens(dk), _tokens(dv)


def _by_kernel(q: Tensor, band: int | None, scoring: Scoring) -> bool:
    """Return whether torch's kernel for CPUs serves without a mask."""
    return q.device.type == "cpu" and band is None and scoring.softcap is None


def _places(q: Tensor, k: Tensor, band: int | None) -> dict[str, Any]:
    """Return what :mod:`flash` is told of one rectangle."""
    n, m = len(q), len(k)
    ends, before = (torch.arange(0, t + 1, t, dtype=torch.int32, device=q.device) for t in (n, m))
    return {"ends": (ends, n), "before": (before, m), "window": None if band is None else m - n - band + 1}


# -- how tensors lie


def _row(x: Tensor) -> Tensor:
    """x: [t, heads, ...] -> [1, heads, t, ...]."""
    return x.transpose(0, 1)[None]


def _tokens(row: Tensor) -> Tensor:
    """row: [1, heads, t, ...] -> [t, heads, ...]."""
    return row[0].transpose(0, 1)


def _by_kv(x: Tensor, k: Tensor) -> Tensor:
    """x: [t, heads, ...] -> [1, kv, heads/kv * t, ...]; kv is that of k: [m, kv, head]."""
    return x.unflatten(1, (k.shape[1], -1)).movedim(0, 2).flatten(1, 2)[None]


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """x: [1, kv, heads/kv * t, ...] -> [t, heads, ...], where ``like`` is [t, heads, head]."""
    return x[0].unflatten(1, (-1, len(like))).movedim(2, 0).flatten(1, 2)
