"""Triton kernels that make fp8 numbers of a tensor: one for its largest magnitude, one for all that follows from it.

The scale goes by the largest magnitude of the whole tensor, on all ranks that hold parts of it: it must be known before
the first number is cast. So a tensor is read twice, and what follows is one pass: the unit, the numbers, and their
transposed copy, for the hardware multiplies fp8 only along rows of both operands. Rows that have a scale each are read
once. Matrices of experts, which have a scale each, are one tensor to a kernel, and so is a slice of them, wherever it
begins and ends. The same in torch's operators is :func:`parallel.layers.fp8.units` and
:func:`parallel.layers.fp8.quantise`, bit for bit.
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
def fp8_largest(
    x: tl.tensor,
    bits: tl.tensor,
    numel: tl.tensor,
    head: tl.tensor,
    each: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    programs = tl.cdiv(each, BLOCK * BLOCKS)
    matrix = tl.program_id(0) // programs
    # Of this matrix the slice has what is not before its own start, nor behind its end.
    start = matrix.to(tl.int64) * each - head
    stop = tl.minimum(start + each, numel)
    first = start + (tl.program_id(0) % programs).to(tl.int64) * BLOCK * BLOCKS
    found = tl.zeros([BLOCK], tl.int32)
    for block in range(BLOCKS):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=(at >= 0) & (at < stop), other=0).to(tl.float32)
        # Magnitudes are in the order of their bits, infinity and then NaN above all others.
        found = tl.maximum(found, tl.abs(values).to(tl.int32, bitcast=True))
    # A maximum is the same in whatever order programs come.
    tl.atomic_max(bits + matrix, tl.max(found, 0))


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
    width: tl.tensor,
    LARGEST: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    across = tl.cdiv(columns, TILE)
    tiles = tl.cdiv(rows, TILE) * across
    matrix, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    before = matrix.to(tl.int64) * rows * columns
    row = (tile // across).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tile % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    own, inverse = _unit(tl.load(bits + matrix), LARGEST)
    at = tile * TILE + tl.arange(0, TILE)  # there are as many tiles as the longer side has, or more
    tl.store(unit + matrix * width + at, tl.zeros([TILE], tl.int32) + own, mask=at < width)
    straight = before + row[:, None] * columns + column[None, :]
    wide = tl.load(x + straight, mask=here, other=0).to(tl.float32) * inverse
    if STRAIGHT:
        tl.store(values + straight, wide.to(values.dtype.element_ty), mask=here)
    if TURNED:
        narrow = tl.trans(wide.to(turned.dtype.element_ty))
        tl.store(turned + before + column[:, None] * rows + row[None, :], narrow, mask=tl.trans(here))


@triton.jit
def fp8_cast_slice(
    x: tl.tensor,
    bits: tl.tensor,
    values: tl.tensor,
    numel: tl.tensor,
    head: tl.tensor,
    each: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < numel
    _, inverse = _unit(tl.load(bits + (head + at) // each, mask=here, other=0), LARGEST)
    wide = tl.load(x + at, mask=here, other=0).to(tl.float32) * inverse
    tl.store(values + at, wide.to(values.dtype.element_ty), mask=here)


@triton.jit
def fp8_units(
    bits: tl.tensor, unit: tl.tensor, numel: tl.tensor, width: tl.tensor, LARGEST: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own, _ = _unit(tl.load(bits + at // width, mask=at < numel, other=0), LARGEST)
    tl.store(unit + at, own, mask=at < numel)


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
    found = torch.zeros(len(tensors), dtype=torch.float32, device=tensors[0].device)
    for x, own in zip(tensors, found.split(1), strict=True):
        add_largest(x.contiguous(), 0, x.numel(), own)
    return found


def add_largest(part: Tensor, start: int, each: int, largest: Tensor) -> None:
    """part: elements of matrices of ``each`` elements that follow one another, contiguous, from element ``start`` on;
    largest: [matrices] in fp32 -> the larger of that and of the magnitudes in the part, in its place."""
    number, head = divmod(start, each)
    programs = -(-(head + part.numel()) // each) * triton.cdiv(each, _BLOCK * _BLOCKS)
    given = part, largest[number:].view(torch.int32), part.numel(), head, each
    launching.launch(fp8_largest, programs, *given, BLOCK=_BLOCK, BLOCKS=_BLOCKS, num_warps=WARPS)


def cast(
    x: Tensor, largest: Tensor, dtype: torch.dtype, exponent: int, straight: bool, turned: bool, width: int = 0
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """x: [..., m, n] -> (x / unit: [..., m, n], its transposed copies: [..., n, m], unit), those that are wanted.

    Args:
        x: The numbers to cast.
        largest: The largest magnitude of each matrix, [...] in fp32 on the device.
        dtype: That of fp8.
        exponent: That of the smallest power of two above its largest number.
        straight: Whether x / unit is wanted.
        turned: Whether the transposed copies are.
        width: How often each unit is wanted, at most the longer side: [..., width]; 0: once, [...].
    """
    x = x.contiguous()
    *matrices, rows, columns = x.shape
    unit = torch.empty([*matrices, *[width] * (width > 0)], dtype=torch.int32, device=x.device)
    values = torch.empty(x.shape, dtype=dtype, device=x.device) if straight else None
    copy = torch.empty(*matrices, columns, rows, dtype=dtype, device=x.device) if turned else None
    given = x, largest.contiguous().view(torch.int32), values if straight else copy, copy if turned else values
    launching.launch(
        fp8_cast,
        math.prod(matrices) * triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE),
        *(*given, unit, rows, columns, max(width, 1)),
        LARGEST=exponent,
        STRAIGHT=straight,
        TURNED=turned,
        TILE=_TILE,
        num_warps=WARPS,
    )
    return values, copy, unit.view(torch.float32)


def cast_slice(part: Tensor, start: int, each: int, largest: Tensor, exponent: int, values: Tensor) -> None:
    """part, start, each: as of :func:`add_largest`; largest: [matrices] in fp32, exponent: as of :func:`cast` ->
    part / units in ``values``, of as many elements in fp8."""
    number, head = divmod(start, each)
    given = part, largest.reshape(-1)[number:].view(torch.int32), values, part.numel(), head, each
    programs = triton.cdiv(part.numel(), _BLOCK)
    launching.launch(fp8_cast_slice, programs, *given, LARGEST=exponent, BLOCK=_BLOCK, num_warps=WARPS)


def units(largest: Tensor, exponent: int, width: int = 0) -> Tensor:
    """largest: [...] in fp32 -> the units that :func:`cast` gives."""
    unit = torch.empty([*largest.shape, *[width] * (width > 0)], dtype=torch.int32, device=largest.device)
    given = largest.contiguous().view(torch.int32), unit, unit.numel(), max(width, 1)
    launching.launch(fp8_units, triton.cdiv(unit.numel(), _BLOCK), *given, LARGEST=exponent, BLOCK=_BLOCK)
    return unit.view(torch.float32)


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
