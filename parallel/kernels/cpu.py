"""Kernels for CPUs, where torch's own are slow: few passes over memory, in blocks that stay in cache.

Each is what the formula says, with sums in fp32 at least (fp64 for fp64), and can be swapped for torch's own:
``kernels`` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.kernels.upcast import upcasts

# Elements of the rows of a block.
_CACHED = 1 << 18


class _NarrowRMSNorm(torch.autograd.Function):
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
    """Yield slices of the rows, such that a few fp32 copies of one fit in a core's cache."""
    step = max(1, _CACHED // rows.shape[1])
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x: [..., n], weight: [n] -> x / rms(x) * (weight + offset). Torch's takes 2.5 times as long (bf16, forward and
    backward)."""
    return _NarrowRMSNorm.apply(x, weight, eps, offset)


def flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's kernel for CPUs -> dq, dk, dv; heads of queries, keys and values are as many."""
    if upcasts(q):
        narrow = q.dtype
        dy, q, k, v, out = (x.float() for x in (dy, q, k, v, out))
        dq, dk, dv = flash_backward(dy, q, k, v, out, log_sum, causal=causal, scale=scale)
        return dq.to(narrow), dk.to(narrow), dv.to(narrow)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy, q, k, v, out, log_sum, 0.0, causal, scale=scale
    )
    return dq, dk, dv


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
