"""The gated activation, one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.kernels.fused import launching

_BLOCK = 1024


@triton.jit
def swiglu_forward(
    gate_up: tl.tensor, y: tl.tensor, width: tl.tensor, blocks: tl.tensor, WIDE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    source = gate_up + row * 2 * width + column
    gate = tl.load(source, mask=here, other=0).to(WIDE)
    up = tl.load(source + width, mask=here, other=0).to(WIDE)
    tl.store(y + row * width + column, gate / (1 + tl.exp(-gate)) * up, mask=here)


@triton.jit
def swiglu_backward(
    dy: tl.tensor,
    gate_up: tl.tensor,
    gradient: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    source, target = gate_up + row * 2 * width + column, gradient + row * 2 * width + column
    d = tl.load(dy + row * stride + column, mask=here, other=0).to(WIDE)
    gate = tl.load(source, mask=here, other=0).to(WIDE)
    up = tl.load(source + width, mask=here, other=0).to(WIDE)
    sigmoid = 1 / (1 + tl.exp(-gate))
    tl.store(target, d * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=here)
    tl.store(target + width, d * gate * sigmoid, mask=here)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        *leading, both = gate_up.shape
        width = both // 2
        y = torch.empty(*leading, width, dtype=gate_up.dtype, device=gate_up.device)
        rows, blocks = gate_up.numel() // both, triton.cdiv(width, _BLOCK)
        wide = launching.wide(gate_up.dtype)
        launching.launch(swiglu_forward, rows * blocks, gate_up, y, width, blocks, WIDE=wide, BLOCK=_BLOCK)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        width = dy.shape[-1]
        rows = dy.reshape(-1, width)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        gradient, blocks = torch.empty_like(gate_up), triton.cdiv(width, _BLOCK)
        launching.launch(
            swiglu_backward,
            len(rows) * blocks,
            *(rows, gate_up, gradient, rows.stride(0), width, blocks),
            WIDE=launching.wide(dy.dtype),
            BLOCK=_BLOCK,
        )
        return gradient


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [..., 2 mlp] -> [..., mlp]; only the input is kept for the backward."""
    y: Tensor = _Gated.apply(gate_up)
    return y
