"""The number above which features of a token are kept: a quantile of them all, as if they were normal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megacore.parallel.collectives import all_reduce_
from megacore.parallel.kernels.upcast import wide
from megacore.parallel.mesh import Group


class Cutoff(nn.Module):
    """x: [tokens, features/tp] -> [tokens, 1]: mean + ``deviations`` standard deviations of a token's features on all
    ranks (statistical top-k, You et al. 2025, arXiv 2506.06644), in fp32 at least.

    That takes two sums over tp, and one in the backward, of a number a token.

    Args:
        deviations: Their number.
        features: All there are, without padding.
        own: Those of this rank, the first ones of what it is given.
        group: The tensor parallel group.
    """

    def __init__(self, deviations: float, features: int, own: int, group: Group) -> None:
        super().__init__()
        self.deviations, self.features, self.own, self.group = deviations, features, own, group

    def forward(self, x: Tensor) -> Tensor:
        return _Quantile.apply(x, self.deviations, self.features, self.own, self.group)


class _Quantile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, deviations: float, features: int, own: int, group: Group) -> Tensor:
        z = wide(x[:, :own])
        mean = all_reduce_(z.sum(-1, keepdim=True), group).div_(features)
        deviation = all_reduce_((z - mean).square_().sum(-1, keepdim=True), group).div_(features).sqrt_()
        ctx.save_for_backward(x, mean, deviation)
        ctx.deviations, ctx.features, ctx.own, ctx.group = deviations, features, own, group
        return (mean + deviations * deviation).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, mean, deviation = ctx.saved_tensors
        each = all_reduce_(wide(dy).clone(), ctx.group).div_(ctx.features)
        # Features that are all alike have no deviation that grows with one of them more than with another.
        slope = each * (ctx.deviations / deviation).masked_fill_(deviation == 0, 0)
        dx = torch.zeros_like(x)
        dx[:, : ctx.own] = torch.addcmul(each, wide(x[:, : ctx.own]) - mean, slope)
        return dx, None, None, None, None
