"""Attention in bands: blocks of queries, each beside the keys that they see, so that a window costs what it sees.

What is kept for the backward is q, k, v, the output and a number for each of its rows; no scores.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.kernels import cpu, flash
from megacore.parallel.kernels.scoring import Scoring, attend
from megacore.parallel.kernels.upcast import upcasts

# Queries of a block; a GPU would wait for the next one to be launched.
_BLOCK, _BLOCK_ON_GPU = 128, 1024
# Scores of such a block at the most, or those of the smallest: 1 GiB in fp32.
_SCORES_ON_GPU = 1 << 28
# Elements of bf16 in a row of a matrix unit's tile.
_WIDTH = 32
# From this many queries on, torch's kernel takes larger blocks in its backward, and is the faster one.
_LONG = 768


# -- which keys a block of queries sees


@dataclass(frozen=True, eq=False)
class _Band:
    """A block of queries of a row of tokens, and the keys from the first that its first query sees to its last query.

    Args:
        queries, keys: Which.
        hidden: The number of those keys that the last query no longer sees.
        causal: Whether the last keys are those of the queries' own tokens; else all are before them.
    """

    queries: slice
    keys: slice
    hidden: int
    causal: bool = True

    def mask_(self, scores: Tensor, first: Tensor | None, value: float) -> None:
        """scores: [batch, queries * share, keys]: those that nobody looks at become ``value``.

        Args:
            scores: Those of all queries.
            first: [b or 1, tokens], the first key that each query sees; None if all see all before them.
            value: The number to write.
        """
        n = self.queries.stop - self.queries.start
        each = scores.unflatten(1, (n, -1))
        if self.causal:
            later = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu_(1)
            each[..., -n:].masked_fill_(later[:, None], value)
        if self.hidden and first is not None:
            keys = torch.arange(self.keys.start, self.keys.start + self.hidden, device=scores.device)
            earlier = (keys < first[:, self.queries, None])[:, None, :, None]
            each[..., : self.hidden].unflatten(0, (len(first), -1)).masked_fill_(earlier, value)


def _bands(length: int, starts: Tensor | None, window: int | None, block: int) -> Iterator[_Band]:
    """Yield the bands of documents that begin at ``starts``, or of one. A GPU is not asked where they begin."""
    begins = starts.tolist() if starts is not None and starts.device.type == "cpu" else None

    def first(token: int) -> int:
        begin = 0 if begins is None else begins[bisect_right(begins, token) - 1]
        return begin if window is None else max(begin, token - window + 1)

    for start in range(0, length, block):
        stop = min(start + block, length)
        low = first(start)
        hidden = first(stop - 1) if starts is None or begins is not None else stop
        yield _Band(slice(start, stop), slice(low, stop), hidden - low)


def _bands_before(queries: int, keys: int, band: int | None, block: int) -> Iterator[_Band]:
    """Yield the bands of queries and of keys before them, of which query i sees those from i + band on."""

    def first(query: int) -> int:
        return 0 if band is None else max(0, query + band)

    for start in range(0, queries, block):
        stop = min(start + block, queries)
        low = first(start)
        yield _Band(slice(start, stop), slice(low, keys), first(stop - 1) - low, causal=False)


def _firsts(q: Tensor, starts: Tensor | None, window: int | None) -> Tensor | None:
    """Return the first key that each query of q: [b, heads, s, head] sees in its row: [b or 1, s]; None: the first."""
    if starts is None and window is None:
        return None
    rows, length = len(q), q.shape[2]
    at = torch.arange(length, device=q.device)
    first = torch.zeros_like(at)[None]
    if starts is not None:
        every = torch.arange(rows * length, device=q.device)
        begins = starts[torch.bucketize(every, starts, right=True) - 1].view(rows, length)
        first = begins - every[::length, None]
    return first if window is None else torch.maximum(first, at - (window - 1))


# -- the kernel


def attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, starts: Tensor | None = None) -> Tensor:
    """q: [b, heads, s, head], k, v: [b, kv, s, head] -> [b, heads, s, head], without dropout.

    Args:
        q, k, v: Those of b rows of tokens; on a CPU documents are given in one.
        scoring: The rule by which they become weights.
        starts: int32 [documents + 1], where the documents of all rows begin, and their end; None where each row is one.
    """
    scale = scoring.factor(q.shape[-1])
    return forward(q, k, v, scoring.sinks, starts, scale, scoring.window, scoring.softcap)[0]


# Operators, so that torch.compile takes them as they are: unrolled, they compile for long and run slower.
@torch.library.custom_op("megacore::attention_in_bands", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    starts: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """-> out: [b, heads, s, head], log_sum: [b, heads, s], of the exponentials of the scores, in fp32 at least."""
    if _by_flash(q, softcap):
        out, log_sum = flash.forward(*map(_tokens, (q, k, v)), ends=_ends(q, starts), scale=scale, window=window)
        if sinks is not None:
            alone = log_sum
            log_sum = torch.logaddexp(alone, sinks.to(alone.dtype)[:, None])
            out = (out * (alone - log_sum).exp_().T[..., None]).to(q.dtype)
        return _rows(out, q), log_sum.unflatten(1, (len(q), -1)).transpose(0, 1)
    found = _bands(q.shape[2], starts, window, _block(q, k, window))
    return _in_blocks(q, k, v, sinks, found, _firsts(q, starts, window), scale, softcap)


def _in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    found: Iterable[_Band],
    first: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    if upcasts(q) and softcap is not None:  # torch's kernel has products of its own
        out, log_sum = _in_blocks(q.float(), k.float(), v.float(), sinks, found, first, scale, softcap)
        return out.to(q.dtype), log_sum
    (batch, heads, length, _), kv = q.shape, k.shape[1]
    share, wide = heads // kv, torch.promote_types(q.dtype, torch.float32)
    queries, keys, values = _side_by_side(q, kv), _side_by_side(k, kv), _side_by_side(v, kv)
    out, log_sum = q.new_empty(queries.shape), q.new_empty(queries.shape[:2], dtype=wide)
    by_torch = q.device.type == "cpu" and softcap is None
    for band in found:
        n, m = band.queries.stop - band.queries.start, band.keys.stop - band.keys.start
        own = slice(band.queries.start * share, band.queries.stop * share)
        if by_torch:
            mask = q.new_zeros(1, n * share, m)
            band.mask_(mask, first, float("-inf"))
            y, total = (x[:, 0] for x in _flash(queries[:, own], keys[:, band.keys], values[:, band.keys], mask, scale))
        else:
            scores = _capped(_product(queries[:, own], keys[:, band.keys].mT, wide).mul_(scale), softcap)
            band.mask_(scores, first, float("-inf"))
            total = scores.logsumexp(-1)
        log_sum[:, own] = total
        if sinks is not None:
            each = sinks.to(wide).view(kv, 1, share).expand(batch, kv, n, share).reshape(total.shape)
            torch.logaddexp(total, each, out=log_sum[:, own])
        if not by_torch:
            weights = scores.sub_(log_sum[:, own, None]).exp_()
            y = torch.bmm(weights.to(v.dtype), values[:, band.keys])
        elif sinks is not None:
            y = y * (total - log_sum[:, own]).exp_()[..., None]
        out[:, own] = y
    # Where the two orders are one, these are views, and of other strides.
    tokens = out.view(batch, kv, length, share, -1).permute(0, 2, 1, 3, 4).reshape(batch * length, heads, -1)
    log_sum = log_sum.view(batch, kv, length, share).permute(1, 3, 0, 2).reshape(heads, batch, length)
    return _rows(tokens.contiguous(), q), log_sum.contiguous().transpose(0, 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Torch's kernel for CPUs, of batches of one head each."""
    y, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x[:, None] for x in (q, k, v)), attn_mask=mask[None], scale=scale
    )
    return y, total


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


@forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, starts: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    batch, heads, length, head = q.shape
    log_sum = q.new_empty(heads, batch, length, dtype=torch.promote_types(q.dtype, torch.float32))
    return _rows(q.new_empty(batch * length, heads, head), q), log_sum.transpose(0, 1)


@torch.library.custom_op("megacore::attention_in_bands_backward", mutates_args=())
def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    starts: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv (Dao et al. 2022, arXiv 2205.14135). log_sum: [b, heads, s], of the exponentials of the scores and
    of a sink, in fp32 at least."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if _by_flash(q, softcap):
        total, ends = log_sum.transpose(0, 1).flatten(1).contiguous(), _ends(q, starts)
        dq, dk, dv = flash.backward(total, *map(_tokens, (dy, q, k, v, out)), ends=ends, scale=scale, window=window)
        return _rows(dq, q), _rows(dk, k), _rows(dv, v)
    found = _bands(q.shape[2], starts, window, _block(q, k, window))
    return _in_blocks_backward(dy, q, k, v, out, log_sum, found, _firsts(q, starts, window), scale, softcap)


def _in_blocks_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    found: Iterable[_Band],
    first: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if upcasts(q):
        narrow = q.dtype
        dy, q, k, v, out = (x.float() for x in (dy, q, k, v, out))
        dq, dk, dv = _in_blocks_backward(dy, q, k, v, out, log_sum, found, first, scale, softcap)
        return dq.to(narrow), dk.to(narrow), dv.to(narrow)
    (batch, heads, length, head), kv = q.shape, k.shape[1]
    share, wide = heads // kv, log_sum.dtype
    total, along = (_side_by_side(x, kv) for x in (log_sum.unsqueeze(-1), (dy * out).sum(-1, keepdim=True, dtype=wide)))
    # p = exp(scale q k - log_sum), ds = p (dy v - sum(dy out)): without a softcap the products subtract and scale, as
    # they sum in fp32. What comes out is rounded when it is small where it matters, and no passes over it are needed.
    less = _less if softcap is None else _as_it_is
    queries, dys = less(_side_by_side(q, kv), total / scale), less(_side_by_side(dy, kv), along)
    keys, values = (less(_side_by_side(x, kv)) for x in (k, v))
    nothing, dq = q.new_empty(()), q.new_empty(batch * kv, length * share, head)
    dk, dv = torch.zeros(2, *keys.shape[:2], head, dtype=wide, device=q.device)
    for band in found:
        own, seen = slice(band.queries.start * share, band.queries.stop * share), band.keys
        if softcap is None:
            p = torch.baddbmm(nothing, queries[:, own], keys[:, seen].mT, beta=0, alpha=scale).exp_()
            band.mask_(p, first, 0)
            ds = torch.bmm(dys[:, own], values[:, seen].mT).mul_(p)
        else:
            scores = _capped(_product(queries[:, own], keys[:, seen].mT, wide).mul_(scale), softcap)
            weights = scores.sub(total[:, own]).exp_()
            band.mask_(weights, first, 0)
            slope = scores.div_(softcap).square_().neg_().add_(1)
            ds = _product(dys[:, own], values[:, seen].mT, wide).sub_(along[:, own]).mul_(weights).mul_(slope)
            p, ds = weights.to(q.dtype), ds.to(q.dtype)
        dv[:, seen] += torch.bmm(p.mT, dys[:, own, :head])
        dk[:, seen] += torch.bmm(ds.mT, queries[:, own, :head])
        dq[:, own] = torch.bmm(ds, keys[:, seen, :head])
    return (
        _apart(dq.mul_(scale), q, share),
        dk.mul_(scale).to(k.dtype, copy=True).view(k.shape),
        dv.to(v.dtype, copy=True).view(v.shape),
    )


@backward.register_fake
def _(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    starts: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if _by_flash(q, softcap):
        dq, dk, dv = (_rows(torch.empty_like(_tokens(x)), x) for x in (q, k, v))
        return dq, dk, dv
    (batch, heads, length, head), kv = q.shape, k.shape[1]
    dq = q.new_empty(batch * kv, length * heads // kv, head)
    return _apart(dq, q, heads // kv), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, starts, out, log_sum = ctx.saved_tensors
    grads = backward(dy, q, k, v, out, log_sum, starts, ctx.scale, ctx.window, ctx.softcap)
    return *grads, of_sinks(dy, out, log_sum, sinks), None, None, None, None


forward.register_autograd(_backward, setup_context=_save)


def of_sinks(dy: Tensor, out: Tensor, log_sum: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of sinks. dy, out: [b, heads, s, head], log_sum: [b, heads, s], with them -> [heads]."""
    if sinks is None:
        return None
    weights = (sinks[:, None].to(log_sum.dtype) - log_sum).exp()
    return -(weights * (dy * out).sum(-1, dtype=log_sum.dtype)).sum((0, 2)).to(sinks.dtype)


# -- keys that are all before the queries


def before(q: Tensor, k: Tensor, v: Tensor, *, band: int | None, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """q: [b, heads, n, head], k, v: [b, kv, m, head] -> out: [b, heads, n, head], log_sum: [b, heads, n]; no sinks.

    Args:
        q, k, v: Those of tokens, and of some before them.
        band: Query i sees the keys from i + band on; None: all.
        scoring: The rule by which they become weights, but for its window.
    """
    found, scale = _bands_before(q.shape[2], k.shape[2], band, _block(q, k)), scoring.factor(q.shape[-1])
    return _in_blocks(q, k, v, None, found, _firsts_before(q, band), scale, scoring.softcap)


def before_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, *, band: int | None, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv; ``out`` and ``log_sum`` are those of all keys."""
    found, scale = _bands_before(q.shape[2], k.shape[2], band, _block(q, k)), scoring.factor(q.shape[-1])
    return _in_blocks_backward(dy, q, k, v, out, log_sum, found, _firsts_before(q, band), scale, scoring.softcap)


def _firsts_before(q: Tensor, band: int | None) -> Tensor | None:
    """Return the first keys as :func:`_firsts` does."""
    return None if band is None else torch.arange(band, band + q.shape[2], device=q.device)[None]


# -- how tensors lie


def _tokens(x: Tensor) -> Tensor:
    """x: [b, heads, s, n] -> [b * s, heads, n]; a view of what came from there."""
    return x.transpose(1, 2).flatten(0, 1)


def _rows(tokens: Tensor, q: Tensor) -> Tensor:
    """tokens: [b * s, heads, n] -> [b, heads, s, n], a view; b and s are those of q: [b, heads, s, head]."""
    return tokens.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _ends(q: Tensor, starts: Tensor | None) -> tuple[Tensor, int]:
    """int32, where the documents begin on q's device, and the end; and no less than the length of the longest."""
    rows, length = len(q), q.shape[2]
    if starts is None:
        starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device)
    return starts, length


def _by_flash(q: Tensor, softcap: float | None) -> bool:
    """Return whether torch's kernel for CUDA serves: it knows windows, and no softcaps."""
    return softcap is None and flash.takes(q)


def _block(q: Tensor, k: Tensor, window: int | None = None) -> int:
    """Return the queries of a block; on a GPU fewer, the more keys there are that they may see."""
    if q.device.type == "cpu":
        return _BLOCK
    keys = k.shape[2] if window is None else min(k.shape[2], window + _BLOCK_ON_GPU)
    return min(_BLOCK_ON_GPU, max(_BLOCK, _SCORES_ON_GPU // (q.shape[0] * q.shape[1] * keys)))


def _product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """Return the batched product of two, not rounded to their dtype."""
    if a.dtype == wide:
        return torch.bmm(a, b)
    return torch.bmm(a.to(wide), b.to(wide)) if a.device.type == "cpu" else torch.bmm(a, b, out_dtype=wide)


def _side_by_side(x: Tensor, kv: int) -> Tensor:
    """x: [b, heads, s, n] -> [b * kv, s * heads/kv, n]: what belongs to a kv head, by token."""
    batch, heads, length, n = x.shape
    return x.unflatten(1, (kv, heads // kv)).transpose(2, 3).reshape(batch * kv, length * heads // kv, n)


def _apart(rows: Tensor, q: Tensor, share: int) -> Tensor:
    """rows: [b * kv, s * share, n] -> [b, heads, s, n]; with one kv head it is a view."""
    return rows.unflatten(1, (-1, share)).transpose(1, 2).reshape(q.shape)


def _less(x: Tensor, y: Tensor | None = None) -> Tensor:
    """x: [..., t, n], y: [..., t, 1] -> [..., t, m], such that _less(x, y) @ _less(z).mT == x @ z.mT - y in x's dtype.

    y stands in three more columns, each of which holds what the ones before have rounded away; without y they are ones.
    m is a multiple of what the matrix units of CPUs take at a time.
    """
    length = x.shape[-1]
    out = F.pad(x, (0, -(length + 3) % _WIDTH + 3))
    if y is None:
        out[..., length : length + 3] = 1
        return out
    rest = -y[..., 0]
    for column in range(length, length + 3):
        out[..., column] = rest
        rest = rest - out[..., column]
    return out


def _as_it_is(x: Tensor, y: Tensor | None = None) -> Tensor:
    return x


# -- on CPUs, where torch's own kernel is the slower one for short rows of narrow numbers


class _NarrowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        share = q.shape[1] // k.shape[1]
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), 0.0, True, scale=scale
        )
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *causal_backward(dy, *ctx.saved_tensors, scale=ctx.scale), None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """q: [b, heads, s, head], k, v: [b, kv, s, head] -> [b, heads, s, head]; queries see themselves and what is before.

    Torch's kernel forward. The backward is that of :func:`causal_backward`.
    """
    return _NarrowAttention.apply(q, k, v, scale)


def is_faster(q: Tensor) -> bool:
    """Return whether :func:`causal_attention` takes less time than torch's own, for q: [b, heads, s, head]."""
    return _pays(q) or upcasts(q)


def causal_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    scale: float | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv of :func:`causal_attention`, log_sum: [b, heads, s].

    Short rows of narrow numbers go in blocks of queries, all heads in one batched product: two thirds of the time of
    torch's kernel in bf16. The scores of that one are ``exact``: they stay in fp32.
    """
    if _pays(q) and not exact:
        return backward(dy, q, k, v, out, log_sum, scale=scale)
    share = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(share, 1) if share > 1 else x for x in (k, v))
    dq, *shared = cpu.flash_backward(dy, q, keys, values, out, log_sum, causal=True, scale=scale)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in shared)
    return dq, dk, dv


def _pays(q: Tensor) -> bool:
    """Return whether the backward of q: [b, heads, s, head] is faster in blocks of queries than torch's."""
    return q.dtype.itemsize < 4 and q.shape[2] < _LONG and not upcasts(q)


# -- where attention weights are dropped


def by_formula(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, starts: Tensor | None = None) -> Tensor:
    """Attend as :func:`attention` does, in torch's operators: each weight that is seen is kept for the backward."""
    length, parts = q.shape[2], []
    at, first = torch.arange(length, device=q.device), _firsts(q, starts, scoring.window)
    for band in _bands(length, None, scoring.window, _block(q, k, scoring.window)):
        own, keys = band.queries, band.keys
        seen = (at[keys] <= at[own, None])[None]
        if first is not None:
            seen = seen & (at[keys] >= first[:, own, None])
        parts.append(attend(q[:, :, own], k[:, :, keys], v[:, :, keys], seen, scoring))
    return torch.cat(parts, 2)
