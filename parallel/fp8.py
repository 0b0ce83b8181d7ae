"""Linears whose products take fp8 (Micikevicius et al. 2022, arXiv 2209.05433): E4M3 forward, E5M2 for what comes back.

Each tensor is scaled as a whole, by the largest magnitude that it has now. The scale is a power of two: with it nothing
is rounded but to fp8 itself. It is that of the whole tensor wherever its parts are, so ranks take the maximum over
their tensor parallel group first: the quantised numbers do not depend on the layout. Tokens are gathered in fp8, which
halves what is sent; sums between ranks are in the dtype that comes in and goes out.

Products accumulate in fp32. Where the hardware has none of fp8, the same numbers are multiplied as what they are, for
every number of fp8 is one of bf16: the results differ in the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel.collectives import (
    Pending,
    all_reduce_,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel.mesh import Group

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The largest numbers, 448 and 57344, are 7/8 of these powers of two.
_LARGEST = {E4M3: 9, E5M2: 16}
# What the scaled product of CUDA devices takes the sizes of its operands to be multiples of.
_MULTIPLE = 16


@dataclass(frozen=True)
class Quantised:
    """A tensor as ``values * unit``: values in fp8, and a power of two, an fp32 scalar."""

    values: Tensor
    unit: Tensor

    @property
    def t(self) -> Quantised:
        return Quantised(self.values.t(), self.unit)


Multiply = Callable[[Quantised, Quantised, torch.dtype], Tensor]
"""(a: [m, k], b: [n, k], dtype) -> a b': [m, n] in that dtype, summed in fp32."""


def units(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest magnitudes of some tensors: [...] in fp32 -> for each the smallest power of two that it can be a multiple
    of in fp8; NaN where it is not finite, so that an overflow is seen, not cut off."""
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent + (mantissa > 0.875) - _LARGEST[dtype]
    # By its bits, as powers that are computed may be rounded.
    found = ((exponent.clamp(-126, 126) + 127) << 23).view(torch.float32)
    return torch.where(torch.isfinite(largest), found, torch.nan)


def quantise(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Quantised:
    """Round to nearest, ties to even; with the unit of :func:`units` nothing is too large."""
    return Quantised((x * unit.reciprocal()).to(dtype), unit)


def multiply_wide(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """The product of what the fp8 numbers are: the reference, which runs anywhere."""
    return F.linear(a.values.to(dtype), b.values.to(dtype)).mul_(a.unit).mul_(b.unit)


def multiply_scaled(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """By the hardware's fp8 units, where they take these sizes."""
    if a.values.shape[1] % _MULTIPLE or b.values.shape[0] % _MULTIPLE:
        return multiply_wide(a, b, dtype)
    left, right = a.values.contiguous(), b.values.contiguous().t()
    return torch._scaled_mm(left, right, scale_a=a.unit, scale_b=b.unit, out_dtype=dtype)


def multiply_on(device: torch.device) -> Multiply:
    """What multiplies on a device: compute capability 8.9 (Ada, Hopper) brought fp8."""
    hardware = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return multiply_scaled if hardware else multiply_wide


def _largest(group: Group, *tensors: Tensor) -> Tensor:
    """The largest magnitude of each tensor, of all its parts: [number of tensors], in one message."""
    here = [torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32) for x in tensors]
    return all_reduce_(torch.stack(here), group, dist.ReduceOp.MAX)


def _start_gather(x: Quantised, group: Group, after: Tensor | None = None) -> Pending:
    """The values of all ranks' tokens; they travel as bytes."""
    pending = start_all_gather(x.values.view(torch.uint8), group, after)
    return Pending(pending.works, lambda: pending.finish().view(x.values.dtype))


class _Column(torch.autograd.Function):
    """x: [t/tp, in] ("sequence") or [t, in] (replicated) -> y: [t, out/tp]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool, multiply: Multiply
    ) -> Tensor:
        both = units(_largest(group, x, weight), E4M3)
        own = quantise(x, both[0], E4M3)
        full = Quantised(_start_gather(own, group).wait(), own.unit) if sequence else own
        y = multiply(full, quantise(weight, both[1], E4M3), x.dtype)
        ctx.save_for_backward(own.values, weight, both)
        ctx.group, ctx.sequence, ctx.multiply = group, sequence, multiply
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, both = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        x, group = Quantised(values, both[0]), ctx.group
        again = _start_gather(x, group, after=dy) if ctx.sequence and need_dw else None
        narrow = quantise(dy, units(_largest(group, dy), E5M2)[0], E5M2)
        dx = None
        if need_dx:
            part = ctx.multiply(narrow, quantise(weight, both[1], E4M3).t, dy.dtype)
            dx = start_reduce_scatter(part, group) if ctx.sequence else start_all_reduce(part, group)
        full = Quantised(again.wait(), x.unit) if again else x
        dw = ctx.multiply(narrow.t, full.t, weight.dtype) if need_dw else None
        db = dy.sum(0) if need_db else None
        return dx.wait() if dx else None, dw, db, None, None, None


class _Row(torch.autograd.Function):
    """x: [t, in/tp] -> y: [t/tp, out] ("sequence") or [t, out] (replicated)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, sequence: bool, multiply: Multiply) -> Tensor:
        both = units(_largest(group, x, weight), E4M3)
        own = quantise(x, both[0], E4M3)
        part = multiply(own, quantise(weight, both[1], E4M3), x.dtype)
        ctx.save_for_backward(own.values, weight, both)
        ctx.group, ctx.sequence, ctx.multiply = group, sequence, multiply
        return (start_reduce_scatter(part, group) if sequence else start_all_reduce(part, group)).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, both = ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad[:2]
        x, group = Quantised(values, both[0]), ctx.group
        own = quantise(dy, units(_largest(group, dy), E5M2)[0], E5M2)
        full = Quantised(_start_gather(own, group).wait(), own.unit) if ctx.sequence else own
        dx = ctx.multiply(full, quantise(weight, both[1], E4M3).t, dy.dtype) if need_dx else None
        dw = ctx.multiply(full.t, x.t, weight.dtype) if need_dw else None
        return dx, dw, None, None, None


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = True, *, multiply: Multiply
) -> Tensor:
    """As :func:`parallel.linear.column_linear`, in fp8."""
    y: Tensor = _Column.apply(x, weight, bias, group, sequence, multiply)
    return y


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = True, *, multiply: Multiply
) -> Tensor:
    """As :func:`parallel.linear.row_linear`, in fp8."""
    y: Tensor = _Row.apply(x, weight, group, sequence, multiply)
    return y if bias is None else y + bias


def use(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Have all parallel linears among these modules multiply in fp8."""
    multiply = multiply_on(device)
    for module in modules:
        if isinstance(module, ColumnParallelLinear):
            module.compute = partial(column_linear, multiply=multiply)
        elif isinstance(module, RowParallelLinear):
            module.compute = partial(row_linear, multiply=multiply)
