"""RMSNorm and LayerNorm, one read of each row forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.kernels.fused import launching

WIDEST = 1 << 13
"""Elements of a row that a program holds in registers, at most."""
# Elements of a tile: short rows are taken together.
_TILE = 1 << 11
# Programs of a backward, each of which adds up its part of the weight's gradient: some for each multiprocessor. Not a
# property of the device, on which the order of the sum would then depend.
_PARTS = 256


@triton.jit
def norm_forward(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    here = (row < rows)[:, None] & (column < N)[None, :]
    z = tl.load(x + row[:, None] * stride + column[None, :], mask=here, other=0).to(WIDE)
    if CENTRED:
        middle = tl.sum(z, 1) / N
        tl.store(mean + row, middle, mask=row < rows)
        z = tl.where(here, z - middle[:, None], 0)
    r = tl.rsqrt(tl.sum(z * z, 1) / N + EPS)
    tl.store(scale + row, r, mask=row < rows)
    w = tl.load(weight + column, mask=column < N, other=0).to(WIDE)
    if OFFSET != 0:
        w += OFFSET
    z = z * r[:, None] * w[None, :]
    if BIAS:
        z += tl.load(bias + column, mask=column < N, other=0).to(WIDE)[None, :]
    tl.store(y + row[:, None] * N + column[None, :], z, mask=here)


@triton.jit
def norm_backward(
    dy: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    per: tl.tensor,
    stride_dy: tl.tensor,
    stride_x: tl.tensor,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    SUMS: tl.constexpr,
    WIDE: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    w = tl.load(weight + column, mask=column < N, other=0).to(WIDE)[None, :]
    if OFFSET != 0:
        w += OFFSET
    # The gradient of the weight, and of the bias.
    dw, db = tl.zeros((ROWS, COLUMNS), WIDE), tl.zeros((ROWS, COLUMNS), WIDE)
    for before in range(0, per, ROWS):
        row = part * per + before + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (column < N)[None, :]
        dz = tl.load(dy + row[:, None] * stride_dy + column[None, :], mask=here, other=0).to(WIDE)
        z = tl.load(x + row[:, None] * stride_x + column[None, :], mask=here, other=0).to(WIDE)
        r = tl.load(scale + row, mask=row < rows, other=0)[:, None]
        if CENTRED:
            z -= tl.load(mean + row, mask=row < rows, other=0)[:, None]
        if SUMS and BIAS:
            db += dz
        z *= r
        if SUMS:
            dw += dz * z
        # With n what the weight multiplies: dx = r (w dy - n mean(n w dy)), less the mean of w dy where n is centred.
        dz *= w
        along = (tl.sum(dz * z, 1) / N)[:, None]
        if CENTRED:
            dz -= (tl.sum(dz, 1) / N)[:, None]
        tl.store(dx + row[:, None] * N + column[None, :], r * (dz - z * along), mask=here)
    if SUMS:
        tl.store(parts + part * N + column, tl.sum(dw, 0), mask=column < N)
        if BIAS:
            of_bias = parts + tl.num_programs(0).to(tl.int64) * N
            tl.store(of_bias + part * N + column, tl.sum(db, 0), mask=column < N)


@triton.jit
def norm_sum_parts(
    parts: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    blocks: tl.tensor,
    WIDE: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    of = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), WIDE)
    for before in range(0, count, ROWS):
        part = before + tl.arange(0, ROWS)
        here = (part < count)[:, None] & (column < N)[None, :]
        total += tl.load(parts + (of * count + part)[:, None] * N + column[None, :], mask=here, other=0)
    tl.store(out + of * N + column, tl.sum(total, 0), mask=column < N)


class _Norm(torch.autograd.Function):
    """The norm of rows, less their mean where they are ``centred``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, centred: bool
    ) -> Tensor:
        of = _rows(x)
        count, n = of.shape
        sizes, wide = _tile(n), launching.wide(x.dtype)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kept = torch.empty(
            2 if centred else 1, count, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
        )
        launching.launch(
            norm_forward,
            triton.cdiv(count, sizes["ROWS"]),
            *(of, weight, bias, y, kept[-1], kept[0], count, of.stride(0)),
            EPS=eps,
            OFFSET=offset,
            CENTRED=centred,
            BIAS=bias is not None,
            WIDE=wide,
            **sizes,
        )
        ctx.save_for_backward(x, weight, kept)
        ctx.offset, ctx.summed = offset, 1 if bias is None else 2
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, kept = ctx.saved_tensors
        of, of_dy = _rows(x), _rows(dy)
        count, n = of.shape
        sizes, wide, sums = _tile(n), launching.wide(x.dtype), any(ctx.needs_input_grad[1:3])
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        per = triton.cdiv(triton.cdiv(count, sizes["ROWS"]), _PARTS) * sizes["ROWS"]
        programs = triton.cdiv(count, per) if count else 0
        parts = torch.empty(ctx.summed, programs, n, dtype=kept.dtype, device=x.device) if sums else None
        launching.launch(
            norm_backward,
            programs,
            *(of_dy, of, weight, kept[-1], kept[0], dx, parts, count, per, of_dy.stride(0), of.stride(0)),
            OFFSET=ctx.offset,
            CENTRED=len(kept) == 2,
            BIAS=ctx.summed == 2,
            SUMS=sums,
            WIDE=wide,
            **sizes,
        )
        if parts is None:
            return dx, None, None, None, None, None
        found = torch.empty(ctx.summed, n, dtype=weight.dtype, device=x.device)
        blocks = triton.cdiv(n, 64)
        launching.launch(
            norm_sum_parts, ctx.summed * blocks, parts, found, programs, blocks, WIDE=wide, N=n, ROWS=32, COLUMNS=64
        )
        return dx, found[0], found[1] if ctx.summed == 2 else None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """x: [..., n] -> [t, n] with elements that stand next to each other."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tile(n: int) -> dict[str, int]:
    columns = triton.next_power_of_2(n)
    return {
        "N": n,
        "ROWS": max(1, _TILE // columns),
        "COLUMNS": columns,
        "num_warps": max(4, columns // 512),
    }


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x: [..., n], weight: [n] -> x / rms(x) * (weight + offset); n is at most :data:`WIDEST`."""
    return _Norm.apply(x, weight, None, eps, offset, False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """x: [..., n], weight, bias: [n] -> (x - mean(x)) / deviation(x) * (weight + offset) + bias; n is at most
    :data:`WIDEST`."""
    return _Norm.apply(x, weight, bias, eps, offset, True)
