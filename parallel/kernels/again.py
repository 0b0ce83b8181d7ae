"""Formulas of which a backward goes through the forward again, and of which nothing but the inputs is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, formula: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.formula = formula
        return formula(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        inputs = [
            each if each is None else each.detach().requires_grad_(needed)
            for each, needed in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.formula(*inputs)
        given = iter(torch.autograd.grad(outputs, [x for x in inputs if x is not None and x.requires_grad], gradients))
        return None, *(next(given) if needed else None for needed in wanted)


def keeping_inputs(formula: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Return ``formula(*inputs)``, of which autograd keeps the inputs alone; it must depend on nothing else that
    changes."""
    return _Again.apply(formula, *inputs)
