"""Triton kernels that make fp8 numbers of a tensor: one for its largest magnitude, one for all that follows from it.

The scale goes by the largest magnitude of the whole tensor, on all ranks that hold parts of it: it must be known before
the first number is cast. So a tensor is read twice, and what follows is one pass: the unit, the numbers, and their
transposed copy, for the hardware multiplies fp8 only along rows of both operands. Rows that have a scale each are read
once. The same in torch's operators is :func:`parallel.layers.fp8.units` and :func:`parallel.layers.fp8.quantise`, bit
for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.parallel.kernels.fused import launching

# Elements that a program takes the maximum of, a block after the other.
_BLOCK, _BLOCKS = 4096, 8
# Rows and columns that a program casts; the shared memory through which they are transposed has room for them.
_TILE = 128
# Elements of a row with a scale of its own that a program casts at a time.
_ROW = 8192
WARPS = 8


@triton.jit
def fp8_largest(x: tl.tensor, bits: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr, BLOCKS: tl.constexpr) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
    found = tl.zeros([BLOCK], tl.int32)
    for block in range(BLOCKS):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < numel, other=0).to(tl.float32)
        # Magnitudes are in the order of their bits, infinity and then NaN above all others.
        found = tl.maximum(found, tl.abs(values).to(tl.int32, bitcast=True))
    # A maximum is the same in whatever order programs come.
    tl.atomic_max(bits, tl.max(found, 0))


@triton.jit
def _unit(largest: tl.tensor, LARGEST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The bits of a magnitude -> those of the smallest power of two of which the largest number of fp8, 7/8 of
    2^LARGEST, is enough, and its inverse."""
    exponent = (largest >> 23) - 126 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(largest == 0, 0, exponent) - LARGEST
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    finite = largest < 0x7F800000
    inverse = tl.where(finite, (127 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    return tl.where(finite, (exponent + 127) << 23, 0x7FC00000), inverse


@triton.jit
def fp8_cast(
    x: tl.tensor,
    bits: tl.tensor,
    values: tl.tensor,
    turned: tl.tensor,
    unit: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    LARGEST: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    across = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // across).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    own, inverse = _unit(tl.load(bits), LARGEST)
    if tl.program_id(0) == 0:
        tl.store(unit, own)
    wide = tl.load(x + row[:, None] * columns + column[None, :], mask=here, other=0).to(tl.float32) * inverse
    if STRAIGHT:
        tl.store(values + row[:, None] * columns + column[None, :], wide.to(values.dtype.element_ty), mask=here)
    if TURNED:
        narrow = tl.trans(wide.to(turned.dtype.element_ty))
        tl.store(turned + column[:, None] * rows + row[None, :], narrow, mask=tl.trans(here))


@triton.jit
def fp8_cast_rows(
    x: tl.tensor,
    bits: tl.tensor,
    values: tl.tensor,
    unit: tl.tensor,
    columns: tl.tensor,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if GIVEN:
        largest = tl.load(bits + row)
    else:
        found = tl.zeros([BLOCK], tl.int32)
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            magnitude = tl.abs(tl.load(x + row * columns + at, mask=at < columns, other=0).to(tl.float32))
            found = tl.maximum(found, magnitude.to(tl.int32, bitcast=True))
        largest = tl.max(found, 0)
    own, inverse = _unit(largest, LARGEST)
    tl.store(unit + row, own)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        wide = tl.load(x + row * columns + at, mask=at < columns, other=0).to(tl.float32) * inverse
        tl.store(values + row * columns + at, wide.to(values.dtype.element_ty), mask=at < columns)


@triton.jit
def fp8_turn(x: tl.tensor, turned: tl.tensor, rows: tl.tensor, columns: tl.tensor, TILE: tl.constexpr) -> None:
    across = tl.cdiv(columns, TILE)
    tiles = tl.cdiv(rows, TILE) * across
    matrix = (tl.program_id(0) // tiles).to(tl.int64) * rows * columns
    row = (tl.program_id(0) % tiles // across).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    found = tl.load(x + matrix + row[:, None] * columns + column[None, :], mask=here, other=0)
    tl.store(turned + matrix + column[:, None] * rows + row[None, :], tl.trans(found), mask=tl.trans(here))


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """tensors: [...] each -> their largest magnitudes: [number of tensors] in fp32; NaN where there is one."""
    bits = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    for x, found in zip(tensors, bits.unbind(), strict=True):
        programs = triton.cdiv(x.numel(), _BLOCK * _BLOCKS)
        constants = {"BLOCK": _BLOCK, "BLOCKS": _BLOCKS, "num_warps": WARPS}
        launching.launch(fp8_largest, programs, x.contiguous(), found, x.numel(), **constants)
    return bits.view(torch.float32)


def cast(
    x: Tensor, largest: Tensor, dtype: torch.dtype, exponent: int, straight: bool, turned: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """x: [m, n] -> (x / unit: [m, n], its transposed copy: [n, m], unit), those of them that are wanted.

    Args:
        x: The numbers to cast.
        largest: The largest magnitude, an fp32 scalar on the device.
        dtype: That of fp8.
        exponent: That of the smallest power of two above its largest number.
        straight: Whether x / unit is wanted.
        turned: Whether the transposed copy is.
    """
    x = x.contiguous()
    rows, columns = x.shape
    unit = torch.empty((), dtype=torch.int32, device=x.device)
    values = torch.empty(rows, columns, dtype=dtype, device=x.device) if straight else None
    copy = torch.empty(columns, rows, dtype=dtype, device=x.device) if turned else None
    launching.launch(
        fp8_cast,
        triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE),
        *(x, largest.view(torch.int32), values if straight else copy, copy if turned else values, unit, rows, columns),
        LARGEST=exponent,
        STRAIGHT=straight,
        TURNED=turned,
        TILE=_TILE,
        num_warps=WARPS,
    )
    return values, copy, unit.view(torch.float32)


def cast_rows(x: Tensor, largest: Tensor | None, dtype: torch.dtype, exponent: int) -> tuple[Tensor, Tensor]:
    """x: [m, n] -> (x / units: [m, n], units: [m]), by the largest magnitudes of the rows: [m] in fp32 if given;
    ``dtype`` and ``exponent`` as of :func:`cast`."""
    x, (rows, columns) = x.contiguous(), x.shape
    values = torch.empty(rows, columns, dtype=dtype, device=x.device)
    unit = torch.empty(rows, dtype=torch.int32, device=x.device)
    bits = None if largest is None else largest.view(torch.int32)
    constants = {"LARGEST": exponent, "GIVEN": bits is not None, "num_warps": WARPS}
    block = min(triton.next_power_of_2(columns), _ROW)
    launching.launch(fp8_cast_rows, rows, x, bits, values, unit, columns, BLOCK=block, **constants)
    return values, unit.view(torch.float32)


def turn(x: Tensor) -> Tensor:
    """x: [..., m, n] of fp8, contiguous -> the transposed copies: [..., n, m]."""
    *matrices, rows, columns = x.shape
    copy = torch.empty(*matrices, columns, rows, dtype=x.dtype, device=x.device)
    programs = math.prod(matrices) * triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE)
    given = x.view(torch.uint8), copy.view(torch.uint8), rows, columns
    launching.launch(fp8_turn, programs, *given, TILE=_TILE, num_warps=WARPS)
    return copy
