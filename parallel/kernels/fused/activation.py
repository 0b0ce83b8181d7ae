"""Gated activations, one pass forward and one backward."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.kernels.fused import launching

FUNCTIONS = ("silu", "gelu_tanh")
"""Those that are x sigmoid(f(x)): with f(x) = x, and with f(x) = x (_GELU + _CUBIC x^2), for (1 + tanh(f / 2)) / 2 is
sigmoid(f)."""
_GELU = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBIC = tl.constexpr(0.044715 * 2 * math.sqrt(2 / math.pi))
_BLOCK = 1024


@triton.jit
def gated_forward(
    gate_up: tl.tensor,
    y: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    GELU: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    source = gate_up + row * 2 * width + column
    gate = tl.load(source, mask=here, other=0).to(WIDE)
    up = tl.load(source + width, mask=here, other=0).to(WIDE)
    inner = gate
    if GELU:
        inner = gate * (_GELU + _CUBIC * gate * gate)
    tl.store(y + row * width + column, gate / (1 + tl.exp(-inner)) * up, mask=here)


@triton.jit
def gated_backward(
    dy: tl.tensor,
    gate_up: tl.tensor,
    gradient: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    blocks: tl.tensor,
    GELU: tl.constexpr,
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
    # With s the sigmoid of f(gate): the derivative is s (1 + gate f'(gate) (1 - s)).
    inner, along = gate, gate
    if GELU:
        square = gate * gate
        inner, along = gate * (_GELU + _CUBIC * square), gate * (_GELU + 3 * _CUBIC * square)
    sigmoid = 1 / (1 + tl.exp(-inner))
    tl.store(target, d * up * sigmoid * (1 + along * (1 - sigmoid)), mask=here)
    tl.store(target + width, d * gate * sigmoid, mask=here)


class _FusedGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, name: str) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.gelu = name == "gelu_tanh"
        *leading, both = gate_up.shape
        width = both // 2
        y = torch.empty(*leading, width, dtype=gate_up.dtype, device=gate_up.device)
        rows, blocks = gate_up.numel() // both, triton.cdiv(width, _BLOCK)
        launching.launch(
            gated_forward,
            rows * blocks,
            *(gate_up, y, width, blocks),
            GELU=ctx.gelu,
            WIDE=launching.wide(gate_up.dtype),
            BLOCK=_BLOCK,
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        width = dy.shape[-1]
        rows = dy.reshape(-1, width)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        gradient, blocks = torch.empty_like(gate_up), triton.cdiv(width, _BLOCK)
        launching.launch(
            gated_backward,
            len(rows) * blocks,
            *(rows, gate_up, gradient, rows.stride(0), width, blocks),
            GELU=ctx.gelu,
            WIDE=launching.wide(dy.dtype),
            BLOCK=_BLOCK,
        )
        return gradient, None


def gated(name: str, gate_up: Tensor) -> Tensor:
    """f(gate) * up, with f of :data:`FUNCTIONS`. gate_up: [..., 2 mlp] -> [..., mlp]; only the input is kept for the
    backward."""
    return _FusedGated.apply(gate_up, name)
