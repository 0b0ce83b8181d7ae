"""Activation functions, plain and gated, in torch's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.kernels.again import keeping_inputs


@dataclass(frozen=True)
class Function:
    """A function of each element by itself, 0 at 0, so that features that pad others add nothing.

    Args:
        of: x -> f(x), a new tensor.
        gradient: (dy, x, out) writes f'(x) dy into out.
    """

    of: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], object]


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(2).mul_(dy)


def _relu2(x: Tensor) -> Tensor:
    """So et al. 2021, arXiv 2109.08668."""
    if torch.compiler.is_compiling():
        return F.relu(x).square()
    return _ReLU2.apply(x)


def _gelu(approximate: str) -> Function:
    """Return the GELU of Hendrycks and Gimpel 2016, arXiv 1606.08415."""
    return Function(
        partial(F.gelu, approximate=approximate),
        lambda dy, x, out: torch.ops.aten.gelu_backward.grad_input(dy, x, approximate=approximate, grad_input=out),
    )


FUNCTIONS: Mapping[str, Function] = {
    "silu": Function(F.silu, lambda dy, x, out: torch.ops.aten.silu_backward.grad_input(dy, x, grad_input=out)),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "relu": Function(F.relu, lambda dy, x, out: torch.ops.aten.threshold_backward.grad_input(dy, x, 0, grad_input=out)),
    "relu2": Function(_relu2, lambda dy, x, out: torch.mul(dy, F.relu(x).mul_(2), out=out)),
}


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, function: Function) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.function = function
        gate, up = gate_up.chunk(2, -1)
        return function.of(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        gradient = torch.empty_like(gate_up)
        d_gate, d_up = gradient.chunk(2, -1)
        torch.mul(dy, ctx.function.of(gate), out=d_up)
        ctx.function.gradient(dy * up, gate, d_gate)
        return gradient, None


# The slope of the sigmoid, and the limit of gate and up.
_ALPHA, _LIMIT = 1.702, 7.0
_LOOSE_LIMIT = 10.0


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _clamped_swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gradient = torch.empty_like(gate_up)
        (gate, up), (d_gate, d_up) = gate_up.chunk(2, -1), gradient.chunk(2, -1)
        below, within = gate <= _LIMIT, up.abs() <= _LIMIT
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT).add_(1).mul_(dy)
        slope = gate.mul(_ALPHA).sigmoid_()
        torch.mul(gate, slope, out=d_up).mul_(dy).mul_(within)
        # The derivative of g s(a g): s + a g s (1 - s).
        torch.addcmul(slope, gate.mul_(slope).mul_(_ALPHA), 1 - slope, out=d_gate).mul_(up).mul_(below)
        return gradient


def _clamped_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=_LIMIT)
    return (up.clamp(-_LIMIT, _LIMIT) + 1) * gate * (gate * _ALPHA).sigmoid()


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gate_up: [..., 2 mlp] -> (up + 1) gate sigmoid(1.702 gate): [..., mlp], with gate at most 7 and up within -7 and
    7 (gpt-oss, OpenAI 2025, arXiv 2508.10925); only the input is kept for the backward."""
    if torch.compiler.is_compiling():
        return _clamped_swiglu(gate_up)
    return _ClampedSwiGLU.apply(gate_up)


def limited_swiglu(gate_up: Tensor) -> Tensor:
    """gate_up: [..., 2 mlp] -> silu(gate) up: [..., mlp], with gate at most 10 and up within -10 and 10 (DeepSeek-V4);
    only the input is kept for the backward."""
    if torch.compiler.is_compiling():
        return _limited_swiglu(gate_up)[0]
    (y,) = keeping_inputs(_limited_swiglu, gate_up)
    return y


def _limited_swiglu(gate_up: Tensor) -> tuple[Tensor]:
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate.clamp(max=_LOOSE_LIMIT)) * up.clamp(-_LOOSE_LIMIT, _LOOSE_LIMIT),)


GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"swiglu_oai": clamped_swiglu, "swiglu_limited": limited_swiglu}
"""Functions of gate and up together, gate_up: [..., 2 mlp] -> [..., mlp]; 0 where both are."""


def gated(name: str, gate_up: Tensor) -> Tensor:
    """f(gate) * up (Shazeer 2020, arXiv 2002.05202), or one of :data:`GATES`. gate_up: [..., 2 mlp] -> [..., mlp].

    Only the input is kept for the backward; the activation is computed again.
    """
    if name in GATES:
        return GATES[name](gate_up)
    function = FUNCTIONS[name]
    if torch.compiler.is_compiling():
        # The compiler fuses the formula, keeps its input alone, and cannot trace writing into halves of a tensor.
        gate, up = gate_up.chunk(2, -1)
        return function.of(gate) * up
    return _Gated.apply(gate_up, function)
