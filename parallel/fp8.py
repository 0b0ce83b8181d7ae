"""Linears whose products take fp8 (Micikevicius et al. 2022, arXiv 2209.05433): E4M3 forward, E5M2 for what comes back.

Each tensor is scaled as a whole, by the largest magnitude that it has now. The scale is a power of two: with it nothing
is rounded but to fp8 itself. It is that of the whole tensor wherever its parts are, so ranks take the maximum over
their tensor parallel group first: the quantised numbers do not depend on the layout. Tokens are gathered in fp8, which
halves what is sent; sums between ranks are in the dtype that comes in and goes out.

Products accumulate in fp32. Where the hardware has none of fp8, the same numbers are multiplied as what they are, for
every number of fp8 is one of bf16: the results differ in the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel.collectives import all_reduce_
from parallel.mesh import Group
from parallel.product import Operand, Product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The largest numbers, 448 and 57344, are 7/8 of these powers of two.
_LARGEST = {E4M3: 9, E5M2: 16}
# What the scaled product of CUDA devices takes the sizes of its operands to be multiples of.
_MULTIPLE = 16

Multiply = Callable[[Operand, Operand, torch.dtype], Tensor]
"""(a: [m, k], b: [n, k], dtype) -> a b': [m, n] in that dtype, summed in fp32."""


def units(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest magnitudes of some tensors: [...] in fp32 -> for each the smallest power of two that it can be a multiple
    of in fp8; NaN where it is not finite, so that an overflow is seen, not cut off."""
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent + (mantissa > 0.875) - _LARGEST[dtype]
    # By its bits, as powers that are computed may be rounded.
    found = ((exponent.clamp(-126, 126) + 127) << 23).view(torch.float32)
    return torch.where(torch.isfinite(largest), found, torch.nan)


def quantise(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Operand:
    """Round to nearest, ties to even; with the unit of :func:`units` nothing is too large."""
    return Operand((x * unit.reciprocal()).to(dtype), unit)


def _turned(x: Operand) -> Operand:
    """x: [..., m, n] -> [n, ... m]."""
    return Operand(x.values.flatten(0, -2).t(), x.unit)


def multiply_wide(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """The product of what the fp8 numbers are: the reference, which runs anywhere."""
    return F.linear(a.values.to(dtype), b.values.to(dtype)).mul_(a.unit).mul_(b.unit)


def multiply_scaled(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
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


@dataclass(frozen=True)
class Fp8(Product):
    """Products of fp8 numbers. The weight is kept as it is, and cast where it is multiplied.

    Args:
        multiply: What multiplies on the device.
    """

    multiply: Multiply

    @classmethod
    def on(cls, device: torch.device) -> Self:
        return cls(multiply_on(device))

    def operands(self, x: Tensor, weight: Tensor, group: Group) -> tuple[Operand, Operand]:
        x_unit, weight_unit = units(_largest(group, x, weight), E4M3)
        return quantise(x, x_unit, E4M3), Operand(weight, weight_unit)

    def gradient(self, dy: Tensor, group: Group) -> Operand:
        return quantise(dy, units(_largest(group, dy), E5M2)[0], E5M2)

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        y = self._multiply(x, self._cast(weight), weight.values.dtype)
        return y if bias is None else y.add_(bias)

    def input_gradient(self, dy: Operand, weight: Operand) -> Tensor:
        return self._multiply(dy, _turned(self._cast(weight)), weight.values.dtype)

    def weight_gradient(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor | None:
        return self.multiply(_turned(dy), _turned(x), dtype)

    def _multiply(self, x: Operand, matrix: Operand, dtype: torch.dtype) -> Tensor:
        """x: [..., n], matrix: [m, n] -> x matrix': [..., m]."""
        y = self.multiply(Operand(x.values.flatten(0, -2), x.unit), matrix, dtype)
        return y.unflatten(0, x.values.shape[:-1])

    def _cast(self, weight: Operand) -> Operand:
        assert weight.unit is not None
        return quantise(weight.values, weight.unit, E4M3)
