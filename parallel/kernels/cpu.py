"""Kernels for CPUs, where torch's own are slow: few passes over memory, in blocks that stay in cache.

Each is what the formula says, with sums in fp32 at least (fp64 for fp64), and can be swapped for torch's own:
``kernels`` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of the rows of a block.
_CACHED = 1 << 18
# Queries of a block.
_BLOCK = 128
# Elements of bf16 in a row of a matrix unit's tile.
_WIDTH = 32
# From this many queries on, torch's kernel takes larger blocks in its backward, and is the faster one.
_LONG = 768


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        rows, wide = x.flatten(0, -2), _formed(weight, _wide(x.dtype), offset)
        y, scale = rows.new_empty(rows.shape), wide.new_empty(len(rows))
        for own in _in_cache(rows):
            z = rows[own].to(wide.dtype, copy=True)
            scale[own] = torch.linalg.vector_norm(z, dim=1).square_().div_(len(wide)).add_(eps).rsqrt_()
            y[own] = z.mul_(scale[own, None]).mul_(wide)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        rows, rows_dy, wide = x.flatten(0, -2), dy.flatten(0, -2), _formed(weight, scale.dtype, ctx.offset)
        dx, dw = rows.new_empty(rows.shape), torch.zeros_like(wide)
        for own in _in_cache(rows):
            z, dz, r = rows[own].to(wide.dtype), rows_dy[own].to(wide.dtype), scale[own]
            product = z * dz
            dw += r @ product
            # With n = z r: dx = r (w dy - n mean(n w dy)).
            along = (product @ wide).mul_(r.pow(3)).div_(-len(wide))
            dx[own] = torch.mul(dz, wide, out=product).mul_(r[:, None]).addcmul_(z, along[:, None])
        return dx.view(x.shape), dw.to(weight.dtype), None, None


def _formed(weight: Tensor, wide: torch.dtype, offset: float) -> Tensor:
    return weight.to(wide) + offset if offset else weight.to(wide)


def _in_cache(rows: Tensor) -> Iterator[slice]:
    """Slices of the rows, such that a few fp32 copies of one fit in a core's cache."""
    step = max(1, _CACHED // rows.shape[1])
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x: [..., n], weight: [n] -> x / rms(x) * (weight + offset). Torch's takes 2.5 times as long (bf16, forward and
    backward)."""
    y: Tensor = _RMSNorm.apply(x, weight, eps, offset)
    return y


class _CausalAttention(torch.autograd.Function):
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
        return *causal_attention_backward(dy, *ctx.saved_tensors, ctx.scale), None


# An operator, so that torch.compile takes it as it is: unrolled, it compiles for long and runs slower.
@torch.library.custom_op("megacore::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv. log_sum: [b, heads, s], of the exponentials of the scores, in fp32 at least."""
    (batch, heads, length, head), kv = q.shape, k.shape[1]
    share, wide = heads // kv, log_sum.dtype
    scale = head**-0.5 if scale is None else scale

    def rows(x: Tensor) -> Tensor:
        """[batch, heads, length, n] -> [batch * kv, length * share, n]: the queries of a kv head side by side."""
        return x.unflatten(1, (kv, share)).transpose(2, 3).reshape(batch * kv, length * share, -1)

    # p = exp(scale q k - log_sum), ds = p (dy v - sum(dy out)): the products subtract and scale, as they sum in fp32.
    # What comes out is rounded when it is small where it matters, and no passes over it are needed.
    queries = _less(rows(q), rows(log_sum.unsqueeze(-1) / scale))
    dys = _less(rows(dy), rows((dy * out).sum(-1, keepdim=True, dtype=wide)))
    keys, values = (_less(x.reshape(batch * kv, length, head)) for x in (k, v))
    nothing, dq = q.new_empty(()), torch.empty(batch * kv, length * share, head, dtype=q.dtype)
    dk, dv = torch.zeros(2, batch * kv, length, head, dtype=wide)
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        own = slice(start * share, stop * share)
        p = torch.baddbmm(nothing, queries[:, own], keys[:, :stop].mT, beta=0, alpha=scale).exp_()
        later = torch.ones(stop - start, stop - start, dtype=torch.bool).triu_(1)
        p[..., start:].unflatten(1, (-1, share)).masked_fill_(later[:, None], 0)
        ds = torch.bmm(dys[:, own], values[:, :stop].mT).mul_(p)
        dv[:, :stop] += torch.bmm(p.mT, dys[:, own, :head])
        dk[:, :stop] += torch.bmm(ds.mT, queries[:, own, :head])
        dq[:, own] = torch.bmm(ds, keys[:, :stop, :head])
    return (
        _apart(dq.mul_(scale), q, share),
        dk.mul_(scale).to(k.dtype, copy=True).view(k.shape),
        dv.to(v.dtype, copy=True).view(v.shape),
    )


@causal_attention_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, length, head), kv = q.shape, k.shape[1]
    dq = q.new_empty(batch * kv, length * heads // kv, head)
    return _apart(dq, q, heads // kv), k.new_empty(k.shape), v.new_empty(v.shape)


def _apart(rows: Tensor, q: Tensor, share: int) -> Tensor:
    """[batch * kv, length * share, head] -> [batch, heads, length, head]; with one kv head it is a view."""
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


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """q: [b, heads, s, head], k, v: [b, kv, s, head] -> [b, heads, s, head]; queries see themselves and what is before.

    Torch's kernel forward. The backward (Dao et al. 2022, arXiv 2205.14135) takes blocks of queries, all heads in one
    batched product: two thirds of the time of torch's in bf16.
    """
    y: Tensor = _CausalAttention.apply(q, k, v, scale)
    return y


def is_faster(q: Tensor) -> bool:
    """Whether :func:`causal_attention` takes less time than torch's own, for q: [b, heads, s, head]."""
    return q.dtype.itemsize < 4 and q.shape[2] < _LONG


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
