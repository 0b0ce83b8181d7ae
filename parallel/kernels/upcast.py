"""Matrix products; those of bf16 on a CPU without instructions for it are multiplied in fp32 and rounded once.

There torch's own take 5 to 100 times as long as those of fp32, and the casts a tenth. The numbers are those of bf16:
what is multiplied and what comes out, while sums are in fp32, as they are in the hardware that has the instructions.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

FEW = 6
"""A product of fewer rows takes as long as its matrix is read, and a cast of the matrix takes longer."""

# Elements of a part that is there in fp32 at a time.
_WIDE = 1 << 22

# A dictionary, for the compiler takes what it finds there for a constant, and traces what a cache would hold.
_found: dict[str, bool] = {}


def upcasts(x: Tensor) -> bool:
    """Return whether products of x are multiplied in fp32."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not cpu_has_bf16()


def cpu_has_bf16() -> bool:
    """Return whether torch multiplies bf16 by instructions for it on this CPU: AVX512-BF16's, AMX's, Arm's.

    It is seen by what a product makes of a number below 2^-126, which these instructions take for zero and those of
    fp32 do not: no clock is asked, so that it is the same each time and on each rank. And it is what is really used:
    torch does not tell what ONEDNN_MAX_CPU_ISA leaves of the CPU's instructions.
    """
    if not _found:
        with _disable_current_modes():
            small = torch.full((64, 64), 2.0**-130, dtype=torch.bfloat16, device="cpu")
            large = torch.full((64, 64), 2.0**100, dtype=torch.bfloat16, device="cpu")
            _found["bf16"] = not (small @ large).any()
    return _found["bf16"]


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, unless it is wider already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [..., in], weight: [out, in], bias: [out] -> x weight' + bias: [..., out]."""
    if not upcasts(x) or (weight.is_contiguous() and x.numel() < FEW * x.shape[-1]):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a: [..., m, k], b: [k, n] or [..., k, n] -> a b: [..., m, n]."""
    if not upcasts(a):
        return a @ b
    return linear(a, b.t()) if b.dim() == 2 else (a.float() @ b.float()).to(a.dtype)


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a: [m, k], b: [k, n] -> a b: [m, n], in ``out`` where it is given; without derivatives."""
    if not upcasts(a) or (b.t().is_contiguous() and len(a) < FEW):
        return torch.mm(a, b, out=out)
    return _in_fp32(a, b, out=out)


def add_mm_(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """Add a b to ``total``, or write it there where it is the ``first``; its dtype is theirs or a wider one: on a GPU
    the product itself does so, in that dtype."""
    if total.dtype == a.dtype:
        _ = mm(a, b, total) if first else total.addmm_(a, b)
    elif total.device.type == "cuda":
        if first:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(mm(a, b))
    elif upcasts(a):
        total.addmm_(a.float(), b.float())
    else:
        total += a @ b


@torch.no_grad()
def _in_fp32(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """a: [m, k], b: [k, n], bias: [n] -> a b + bias: [m, n].

    The longest of m, k and n is taken in parts, so that of a large vocabulary little is there in fp32 at a time.
    """
    if out is None and torch.compiler.is_compiling():  # which fuses the casts, and unrolls loops
        y = a.float() @ b.float()
        return (y if bias is None else y + bias).to(a.dtype)
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty(m, n) if out is None else out
    added = None if bias is None else bias.expand(m, n)
    step = max(1, _WIDE // max(1, sorted((m, k, n))[1]))
    if k > max(m, n):
        total = torch.zeros(m, n, dtype=torch.float32) if added is None else added.float().contiguous()
        for left, right in zip(a.split(step, 1), b.split(step), strict=True):
            total.addmm_(left.float(), right.float())
        return out.copy_(total)
    if n > m:
        dim, wide = 1, a.float()
        products = (wide @ right.float() for right in b.split(step, 1))
    else:
        dim, wide = 0, b.float()
        products = (left.float() @ wide for left in a.split(step))
    more = repeat(None) if added is None else added.split(step, dim)
    for own, product, also in zip(out.split(step, dim), products, more, strict=False):
        own.copy_(product if also is None else product.add_(also))
    return out


class _Linear(torch.autograd.Function):
    """y = x W' + b in fp32, rounded once; what is kept for the backward is x and W, no wide copies of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _in_fp32(x.flatten(0, -2), weight.t(), bias).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        dx = linear(dy, weight.t()) if need_dx else None
        dw = linear(rows.t(), x.flatten(0, -2).t()) if need_dw else None
        return dx, dw, rows.sum(0) if need_db else None
