"""The last projection and its loss in one, a chunk of tokens at a time, so that the full logits are never there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel import kernels
from megacore.parallel.collectives import start_all_gather, start_reduce_scatter
from megacore.parallel.layers.linear import column_linear
from megacore.parallel.layers.loss import Objective
from megacore.parallel.layers.product import DENSE, Product


class _ChunkedLoss(torch.autograd.Function):
    """The gradients are made in the forward, beside the logits that they are made of; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        objective: Objective,
        chunk: int,
        training: bool,
    ) -> Tensor:
        full = start_all_gather(x, objective.group).wait()
        need_dx, need_dw, need_db = (training and need for need in ctx.needs_input_grad[:3])
        losses = []
        dx = torch.empty_like(full) if need_dx else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        dw = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_dw else None
        db = torch.zeros(len(weight), dtype=wide, device=weight.device) if need_db else None
        one = torch.ones((), dtype=torch.promote_types(full.dtype, torch.float32), device=full.device)
        for start in range(0, len(full), chunk):
            rows = slice(start, start + chunk)
            logits = kernels.linear(full[rows], weight, bias)
            loss, log_sum = objective.losses(logits, labels[rows])
            losses.append(loss)
            if dx is None and dw is None and db is None:
                continue
            dlogits = objective.gradient_(logits, labels[rows], log_sum, one.expand_as(loss))
            if dx is not None:
                kernels.mm(dlogits, weight, out=dx[rows])
            if dw is not None:
                kernels.add_product_(dw, dlogits.t(), full[rows])
            if db is not None:
                db += dlogits.sum(0, dtype=wide)
        ctx.dtypes = x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        ctx.save_for_backward(start_reduce_scatter(dx, objective.group).wait() if dx is not None else None, dw, db)
        return objective.own(torch.cat(losses)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        found = (_scaled(*each) for each in zip(ctx.saved_tensors, (dy, dy, dy), ctx.dtypes, strict=True))
        return *found, None, None, None, None


def _scaled(gradient: Tensor | None, dy: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the gradient times dy, in its memory where it can be; dy is not rounded to a narrow type."""
    return None if gradient is None else gradient.to(dy.dtype).mul_(dy).to(dtype)


def head_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    chunk: int | None = None,
    bias: Tensor | None = None,
    product: Product = DENSE,
) -> Tensor:
    """x: [t/tp, embed], weight: [padded vocab/tp, embed], labels: [t], bias: [padded vocab/tp] -> the sum of this
    rank's tokens' losses, a scalar, in fp32 at least.

    Without ``chunk`` the ``product`` makes the logits [t, padded vocab/tp], which are kept for the backward. With it,
    no more than [chunk, padded vocab/tp] of them are there at a time, and nothing is computed twice; instead the
    gradients are kept, from the forward until the backward has scaled them: that of x, and that of the weight in fp32
    (fp64 for fp64), where the chunks are added up. The gradient that comes in must then be the same on every rank of
    the group, as one over the global number of tokens is.

    Raises:
        ValueError: t does not divide over the group.
    """
    if chunk is None:
        return objective(column_linear(x, weight, bias, objective.group, product=product), labels).sum()
    loss: Tensor = _ChunkedLoss.apply(x, weight, bias, labels, objective, chunk, torch.is_grad_enabled())
    return loss
