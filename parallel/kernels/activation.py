"""The gated activation in torch's operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        gradient = torch.empty_like(gate_up)
        d_gate, d_up = gradient.chunk(2, -1)
        torch.mul(dy, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
        return gradient


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202). gate_up: [..., 2 mlp] -> [..., mlp].

    Only the input is kept for the backward; the activation is computed again.
    """
    if torch.compiler.is_compiling():
        # The compiler fuses the formula, keeps its input alone, and cannot trace writing into halves of a tensor.
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
    y: Tensor = _SwiGLU.apply(gate_up)
    return y
