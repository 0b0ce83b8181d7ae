"""The last projection and its loss in one, a chunk of tokens at a time, so that the full logits are never there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel import kernels
from megacore.parallel.collectives import start_all_gather, start_reduce_scatter
from megacore.parallel.layers.linear import column_linear
from megacore.parallel.layers.loss import Objective
from megacore.parallel.layers.product import DENSE, Product
from megacore.parallel.mesh import Group


class _ChunkGradients:
    """The gradients of a linear, which chunks of its rows add up to: dx [t, in], dw [out, in] and db [out], in fp32 at
    least; those of them that are needed."""

    def __init__(self, x: Tensor, weight: Tensor, needs: Sequence[bool]) -> None:
        self.x, self.weight = x, weight
        wide, device = torch.promote_types(weight.dtype, torch.float32), weight.device
        self.dx = torch.empty_like(x) if needs[0] else None
        self.dw = torch.zeros(weight.shape, dtype=wide, device=device) if needs[1] else None
        self.db = torch.zeros(len(weight), dtype=wide, device=device) if needs[2] else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        if self.dx is not None:
            kernels.mm(dlogits, self.weight, out=self.dx[rows])
        if self.dw is not None:
            kernels.add_mm_(self.dw, dlogits.t(), self.x[rows])
        if self.db is not None:
            self.db += dlogits.sum(0, dtype=self.db.dtype)

    def own(self, group: Group) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dx of this rank's tokens, and the others."""
        return None if self.dx is None else start_reduce_scatter(self.dx, group).wait(), self.dw, self.db


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
        needs = [training and need for need in ctx.needs_input_grad[:3]]
        losses, gradients = [], _ChunkGradients(full, weight, needs)
        one = torch.ones((), dtype=torch.promote_types(full.dtype, torch.float32), device=full.device)
        for rows in _chunks(full, chunk):
            logits = kernels.linear(full[rows], weight, bias)
            loss, log_sum = objective.losses(logits, labels[rows])
            losses.append(loss)
            if any(needs):
                gradients.add(rows, objective.gradient_(logits, labels[rows], log_sum, one.expand_as(loss)))
        ctx.dtypes = x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        ctx.save_for_backward(*gradients.own(objective.group))
        return objective.own(torch.cat(losses)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        found = (_scaled(*each) for each in zip(ctx.saved_tensors, (dy, dy, dy), ctx.dtypes, strict=True))
        return *found, None, None, None, None


class _ChunkedLosses(torch.autograd.Function):
    """The backward computes the logits of each chunk again, as their gradient is only known there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective, chunk: int
    ) -> Tensor:
        full = start_all_gather(x, objective.group).wait()
        found = [
            objective.losses(kernels.linear(full[rows], weight, bias), labels[rows]) for rows in _chunks(full, chunk)
        ]
        losses, log_sums = (torch.cat(each) for each in zip(*found, strict=True))
        ctx.objective, ctx.chunk = objective, chunk
        ctx.save_for_backward(x, weight, bias, labels, log_sums)
        return objective.own(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, labels, log_sums = ctx.saved_tensors
        objective = ctx.objective
        full, dy = (start_all_gather(each, objective.group).wait() for each in (x, dy))
        gradients = _ChunkGradients(full, weight, ctx.needs_input_grad[:3])
        for rows in _chunks(full, ctx.chunk):
            logits = kernels.linear(full[rows], weight, bias)
            gradients.add(rows, objective.gradient_(logits, labels[rows], log_sums[rows], dy[rows]))
        dx, dw, db = gradients.own(objective.group)
        return (
            dx,
            None if dw is None else dw.to(weight.dtype),
            None if db is None else db.to(bias.dtype),
            *(None,) * 3,
        )


def _chunks(x: Tensor, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, len(x), chunk))


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
        return head_losses(x, weight, labels, objective, chunk, bias, product).sum()
    return _ChunkedLoss.apply(x, weight, bias, labels, objective, chunk, torch.is_grad_enabled())


def head_losses(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    chunk: int | None = None,
    bias: Tensor | None = None,
    product: Product = DENSE,
) -> Tensor:
    """Return the losses of this rank's tokens: [t/tp], in fp32 at least, of the arguments of :func:`head_loss`.

    With ``chunk`` the backward computes the logits again, and any gradient of the losses may come in.

    Raises:
        ValueError: t does not divide over the group.
    """
    if chunk is None:
        return objective(column_linear(x, weight, bias, objective.group, product=product), labels)
    return _ChunkedLosses.apply(x, weight, bias, labels, objective, chunk)
