"""Experts that are spread over ranks: every token is sent to those that were chosen for it, and none is dropped.

Rows are sorted by (expert, source rank, token), so that an expert multiplies the same rows in the same order however
many ranks there are, and a token's slots are summed in their order: outputs and the experts' gradients are bitwise the
same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel.collectives import all_gather, reduce_scatter
from parallel.mesh import Group


class Experts(nn.Module):
    """The feed-forward networks of all experts, of which this rank holds some, or some features of some.

    x: [n, embed], chosen: [n, k], weights: [n, k] -> [n, embed].

    Args:
        up: [experts here, inner, embed], the inner features of gate and up one after the other where they are gated.
        down: [experts here, embed, features].
        activation: [rows, inner] -> [rows, features].
        experts: The number of experts in all.
        group: The ranks over which experts are spread, in the order of their experts.
        features: The ranks over which the features of each expert are split; a group of one where they are whole.
        up_bias: [experts here, inner].
        down_bias: [experts here, embed], held by every rank of ``features``.
    """

    def __init__(
        self,
        up: nn.Parameter,
        down: nn.Parameter,
        activation: nn.Module,
        experts: int,
        group: Group,
        features: Group,
        up_bias: nn.Parameter | None = None,
        down_bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.up, self.down, self.activation, self.experts = up, down, activation, experts
        self.up_bias, self.down_bias = up_bias, down_bias
        self.group, self.features = group, features

    @torch.compiler.disable
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, beside: Callable[[], Tensor] | None = None) -> Tensor:
        """``beside``: computed while rows travel, [n, embed], and added to what comes out."""
        other = None if beside is None else beside()
        x, weights = all_gather(x, self.features), all_gather(weights, self.features)
        if self.features.size > 1:
            chosen = all_gather(chosen, self.features)
        n, k = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        sent = torch.bincount(chosen.flatten(), minlength=self.experts).view(self.group.size, -1)
        got = _swap_counts(sent, self.group)
        out_splits, in_splits = sent.sum(1).tolist(), got.sum(1).tolist()
        rows = _Exchange.apply(x[order // k], self.group, out_splits, in_splits)
        scale = _Exchange.apply(weights.flatten()[order, None], self.group, out_splits, in_splits)
        # By expert first, then by source.
        expert_of = torch.arange(got.shape[1]).repeat(got.shape[0]).repeat_interleave(got.flatten())
        by_expert = expert_of.argsort(stable=True)
        rows, scale = rows[by_expert], scale[by_expert]
        counts = got.sum(0).tolist()
        made = []
        for e, (r, w) in enumerate(zip(rows.split(counts), scale.split(counts), strict=True)):
            h = r @ self.up[e].t()
            if self.up_bias is not None:
                h = h + self.up_bias[e]
            h = self.activation(h)
            y = h @ self.down[e].t()
            if self.down_bias is not None:
                y = y + self.down_bias[e] / self.features.size
            made.append((y * w).to(x.dtype))
        y = torch.cat(made)[by_expert.argsort()]
        y = _Exchange.apply(y, self.group, in_splits, out_splits)
        y = y[order.argsort()].view(n, k, -1).sum(1)
        y = reduce_scatter(y, self.features)
        return y if other is None else y + other


def _swap_counts(sent: Tensor, group: Group) -> Tensor:
    """sent: [ranks, experts of a rank], rows for each -> [ranks, experts here], rows from each."""
    if group.size == 1:
        return sent
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent.contiguous(), group=group.process_group)
    return got


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sent: list[int], got: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.got = group, sent, got
        return _exchange(x, group, sent, got)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(dy, ctx.group, ctx.got, ctx.sent), None, None, None


def _exchange(x: Tensor, group: Group, sent: list[int], got: list[int]) -> Tensor:
    if group.size == 1:
        return x
    out = x.new_empty(sum(got), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), got, sent, group=group.process_group)
    return out
