"""Norms in torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x: [..., n], weight: [n] or [heads, n] -> x / rms(x) * (weight + offset): [..., n]; the formula is in fp32 at
    least."""
    if weight.dim() == 1 and not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _in_fp32(lambda z: F.rms_norm(z, z.shape[-1:], None, eps), x, weight, None, offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Normalize rows as :func:`rms_norm` does, less their mean and over their deviation, plus ``bias`` (as weight)."""
    if weight.dim() == 1 and not offset:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return _in_fp32(lambda z: F.layer_norm(z, z.shape[-1:], eps=eps), x, weight, bias, offset)


Normal = Callable[[Tensor], Tensor]


def _formula(normal: Normal, x: Tensor, weight: Tensor, bias: Tensor | None, offset: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = normal(x.to(wide)) * (weight.to(wide) + offset)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


class _Formula(torch.autograd.Function):
    """Keeps its inputs alone, none of what the formula makes in fp32, and goes through it again."""

    @staticmethod
    def forward(ctx: Any, normal: Normal, x: Tensor, weight: Tensor, bias: Tensor | None, offset: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.normal, ctx.offset = normal, offset
        return _formula(normal, x, weight, bias, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs: list[Any] = [each if each is None else each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            x, weight, bias = inputs
            y = _formula(ctx.normal, x, weight, bias, ctx.offset)
        dx, dw, *db = torch.autograd.grad(y, [each for each in inputs if each is not None], dy)
        return None, dx, dw, db[0] if db else None, None


def _in_fp32(normal: Normal, x: Tensor, weight: Tensor, bias: Tensor | None, offset: float) -> Tensor:
    if torch.compiler.is_compiling():
        return _formula(normal, x, weight, bias, offset)
    y: Tensor = _Formula.apply(normal, x, weight, bias, offset)
    return y
