"""Linears whose products take fp8 (Micikevicius et al. 2022, arXiv 2209.05433): E4M3 forward, E5M2 for what comes back.

Each tensor is scaled as a whole, by the largest magnitude that it has now. The scale is a power of two: with it nothing
is rounded but to fp8 itself. It is that of the whole tensor wherever its parts are, so ranks take the maximum over
their tensor and context parallel groups first: the quantised numbers do not depend on the layout. Tokens are gathered
in fp8, which halves what is sent; sums between ranks are in the dtype that comes in and goes out.

Products accumulate in fp32. Where the hardware has none of fp8, the same numbers are multiplied as what they are, for
every number of fp8 is one of bf16: the results differ in the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.parallel import kernels
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.layers.product import Operand, Product
from megacore.parallel.mesh import Group

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The largest numbers, 448 and 57344, are 7/8 of these powers of two.
LARGEST = {E4M3: 9, E5M2: 16}
# What the scaled product of CUDA devices takes the sizes of its operands to be multiples of.
MULTIPLE = 16


class Multiply(Protocol):
    """(a: [m, k], b: [n, k], dtype) -> a b': [m, n] in that dtype, in ``out`` where it is given.

    It is summed in fp32. Hardware may keep fewer bits of sums while it adds where that is ``fast``, which the forward
    can bear: what it rounds is rounded to fp8 or bf16 soon; gradients are sums of many small numbers.
    """

    def __call__(
        self, a: Operand, b: Operand, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
    ) -> Tensor: ...


def units(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest magnitudes of some tensors: [...] in fp32 -> for each the smallest power of two that it can be a multiple
    of in fp8; NaN where it is not finite, so that an overflow is seen, not cut off."""
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent + (mantissa > 0.875) - LARGEST[dtype]
    # By its bits, as powers that are computed may be rounded.
    found = ((exponent.clamp(-126, 126) + 127) << 23).view(torch.float32)
    return torch.where(torch.isfinite(largest), found, torch.nan)


def quantise(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Operand:
    """Round to nearest, ties to even; with the unit of :func:`units` nothing is too large."""
    return Operand((x * unit.reciprocal()).to(dtype), unit)


def multiply_wide(a: Operand, b: Operand, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None) -> Tensor:
    """Multiply what the fp8 numbers stand for: the reference, which runs anywhere."""
    assert a.scale is not None and b.scale is not None
    y = kernels.linear(a.values.to(dtype), b.values.to(dtype)).mul_(a.scale).mul_(b.scale)
    return y if out is None else out.copy_(y)


def multiply_scaled(
    a: Operand, b: Operand, dtype: torch.dtype, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """Multiply by the hardware's fp8 units, where they take these sizes."""
    if a.values.shape[1] % MULTIPLE or b.values.shape[0] % MULTIPLE:
        return multiply_wide(a, b, dtype, out=out)
    assert a.scale is not None and b.scale is not None
    left, right = a.values.contiguous(), b.values.contiguous().t()
    named: dict[str, Any] = {"scale_a": a.scale, "scale_b": b.scale, "out_dtype": dtype, "use_fast_accum": fast}
    if out is not None:  # the compiler knows no product that is given None
        named["out"] = out
    return torch._scaled_mm(left, right, **named)


def multiply_on(device: torch.device) -> Multiply:
    """Return what multiplies on a device: compute capability 8.9 (Ada, Hopper) brought fp8; ``meta`` plans for it."""
    hardware = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return multiply_scaled if hardware or device.type == "meta" else multiply_wide


@dataclass(eq=False)
class Fp8(Product):
    """Products of fp8 numbers. The weight is kept as it is, and cast once for all its products until it changes, where
    somebody says when that is (:class:`Fp8Weight`); else beside its largest magnitude, and cast for each.

    Args:
        multiply: The device's product of fp8 numbers.
        kernels: :mod:`parallel.kernels.fused.cast_transpose`, where it runs; None for torch's operators. The compiler
            is always given these, and fuses them with what comes before.
        across: The ranks that hold parts of the tokens of a microbatch, or of features; None: those of the linear.
        narrow: The weight in fp8, if it is cast once for all.
    """

    multiply: Multiply
    kernels: ModuleType | None
    across: Group | None = None
    narrow: Operand | None = None

    @classmethod
    def on(cls, device: torch.device, across: Group | None = None) -> Self:
        return cls(multiply_on(device), kernels.cast_transpose(device), across)

    def operands(self, x: Tensor, weight: Tensor, group: Group, whole: bool) -> tuple[Operand, Operand]:
        largest = self._largest(group, *([x, weight] if self.narrow is None else [x]))
        weight_largest = largest[1] if self.narrow is None else None
        return self._cast(x, largest[0], E4M3, turned=whole), Operand(weight, weight_largest)

    def gradient(self, dy: Tensor, group: Group, whole: bool) -> Operand:
        return self._cast(dy, self._largest(group, dy)[0], E5M2, turned=whole)

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        matrix = self._cast(weight.values, weight.scale, E4M3) if self.narrow is None else self.narrow
        y = self._multiply(x, matrix, weight.values.dtype, fast=True)
        return y if bias is None else y.add_(bias)

    def input_gradient(self, dy: Operand, weight: Operand) -> Tensor:
        if self.narrow is None:
            matrix = self._cast(weight.values, weight.scale, E4M3, straight=False, turned=True)
        else:
            matrix = self._with_turned(self.narrow)
        return self._multiply(dy, _turned(matrix), weight.values.dtype, fast=False)

    def weight_gradient(self, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        return self.multiply(_turned(dy), _turned(x), dtype)

    def add_weight_gradient(self, dy: Operand, x: Operand, dtype: torch.dtype, total: Tensor, first: bool) -> None:
        """Write the first on a GPU in the dtype of the sum: it is never rounded to a narrow one, nor copied."""
        if first and total.device.type == "cuda" and total.dtype != dtype:
            self.multiply(_turned(dy), _turned(x), total.dtype, out=total)
        else:
            super().add_weight_gradient(dy, x, dtype, total, first)

    def _multiply(self, x: Operand, matrix: Operand, dtype: torch.dtype, fast: bool) -> Tensor:
        """x: [..., n], matrix: [m, n] -> x matrix': [..., m]."""
        y = self.multiply(Operand(x.values.flatten(0, -2), x.scale), matrix, dtype, fast)
        return y.unflatten(0, x.values.shape[:-1])

    def _largest(self, group: Group, *tensors: Tensor) -> Tensor:
        """Return the largest magnitude of each tensor, of all its parts: [number of tensors], in one message."""
        return all_reduce_(self.largest(tensors), self.across or group, dist.ReduceOp.MAX)

    def largest(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the largest magnitude of each tensor: [number of tensors]."""
        if self.kernels is None or torch.compiler.is_compiling():
            wide = torch.promote_types(tensors[0].dtype, torch.float32)
            return torch.stack([torch.linalg.vector_norm(x, torch.inf, dtype=wide) for x in tensors])
        return self.kernels.largest(tensors)

    def _cast(
        self, x: Tensor, largest: Tensor | None, dtype: torch.dtype, straight: bool = True, turned: bool = False
    ) -> Operand:
        """x: [..., n] in fp8. A kernel also makes its transposed copy where it is ``turned``, or that alone."""
        assert largest is not None
        if self.kernels is None or torch.compiler.is_compiling():
            return quantise(x, units(largest, dtype), dtype)
        rows = x.flatten(0, -2)
        values, copy, unit = self.kernels.cast(rows, largest, dtype, LARGEST[dtype], straight, turned)
        return Operand(copy.t() if values is None else values.view(x.shape), unit, copy)

    def _with_turned(self, x: Operand) -> Operand:
        """x: [m, n] in fp8 -> the same, with its transposed copy where a kernel makes one."""
        if x.turned is not None or self.kernels is None or torch.compiler.is_compiling():
            return x
        return x._replace(turned=self.kernels.turn(x.values))


class Fp8Linear(Protocol):
    """A linear that multiplies in fp8."""

    weight: nn.Parameter
    product: Product


@dataclass(eq=False)
class Fp8Weight:
    """The :class:`~parallel.parameters.CastWeight` of a linear that multiplies in fp8; of a copy on a GPU for each way
    to multiply it, if its owner has it whole."""

    linear: Fp8Linear
    dtype = E4M3
    scales: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        self.linear.product = copy(self.linear.product)

    @property
    def _product(self) -> Fp8:
        assert isinstance(self.linear.product, Fp8)
        return self.linear.product

    @property
    def made(self) -> Operand | None:
        return self._product.narrow

    def largest(self, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
        found = self._product.largest([part for _, part in parts])
        return found[0] if len(parts) == 1 else found.max()

    def cast(self, largest: Tensor) -> None:
        self._product.narrow = self._product._cast(self.linear.weight, largest, E4M3, turned=True)

    def fill(self, narrow: Tensor, part: Tensor, start: int, largest: Tensor) -> None:
        if (kernels := self._product.kernels) is None:
            narrow.copy_(quantise(part, units(largest, E4M3), E4M3).values)
        else:
            kernels.cast_slice(part, 0, part.numel(), largest, LARGEST[E4M3], narrow)

    def give(self, values: Tensor, largest: Tensor) -> None:
        kernels = self._product.kernels
        unit = units(largest, E4M3) if kernels is None else kernels.units(largest, LARGEST[E4M3])
        self._product.narrow = Operand(values, unit)


def _turned(x: Operand) -> Operand:
    """x: [..., m, n] -> [n, ... m]."""
    return Operand(x.kept.flatten(0, -2).t(), x.scale)
