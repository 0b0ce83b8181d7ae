"""The router: the experts that each token is sent to, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megacore.parallel.kernels.indexed import highest
from megacore.parallel.kernels.upcast import wide
from megacore.parallel.routing import Routing

Attach = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, experts], chosen [n, k]) -> the logits, with whatever gradient enters there."""


class Router(nn.Module):
    """x: [n, embed] -> (experts [n, k], weights [n, k]), each token's best expert first, in fp32 at least.

    It is held whole by every rank, and each routes its own tokens: the sum of its gradient over replicas is the whole
    (law 4 of ``docs/meshes.md``).

    Args:
        weight: [routes, embed].
        routing: The rule by which experts are chosen and weighed.
        bias: [routes], added to the logits.
        correction: [routes] or [1, routes], added to the scores by which experts are chosen, not to those that weigh
            them; it gets no gradient.
        scale: [routes], by which the weights are multiplied in the end, each expert's by its own.
        table: [words, k], the experts of each token of the vocabulary, where no score chooses them (hash layers, Roller
            et al. 2021, arXiv 2106.04426).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        routing: Routing,
        bias: nn.Parameter | None = None,
        correction: nn.Parameter | None = None,
        scale: nn.Parameter | None = None,
        table: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.correction, self.routing = weight, bias, correction, routing
        self.scale, self.table = scale, table

    def forward(self, x: Tensor, attach: Attach | None = None, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """tokens: [n], which a table is asked for."""
        logits = self.logits(x)
        if self.routing.logit_factor != 1:
            logits = logits * self.routing.logit_factor
        with torch.no_grad():
            chosen = self.choose(logits) if self.table is None else self.table[tokens].long()
        if attach is not None:
            logits = attach(logits, chosen)
        return chosen, self.weigh(logits, chosen)

    def logits(self, x: Tensor) -> Tensor:
        """x: [n, embed] -> [n, experts]."""
        return wide_linear(x, self.weight, self.bias)

    def choose(self, logits: Tensor) -> Tensor:
        """logits: [n, experts] -> [n, k], the best first; of equal ones the lower."""
        routing = self.routing
        # Where nobody weighs by the scores of all, the logits choose: scores of two of them may be the same number.
        by_scores = routing.weigh == "all" and routing.choose == "scores"
        scores = scores_of(logits, routing) if by_scores else logits
        if self.correction is not None:
            scores = scores + self.correction
        if routing.groups > 1:
            scores = scores.masked_fill(~self._kept(scores), -torch.inf)
        return highest(scores, routing.top_k)

    def _kept(self, scores: Tensor) -> Tensor:
        """scores: [n, experts] -> [n, experts], whether an expert is in a group that is kept."""
        routing = self.routing
        grouped = scores.unflatten(-1, (routing.groups, -1))
        of_groups = grouped.topk(2, -1).values.sum(-1) if routing.group_score == "top2" else grouped.amax(-1)
        kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, highest(of_groups, routing.kept_groups), True)
        return kept.repeat_interleave(routing.experts // routing.groups, -1)

    def weigh(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """logits: [n, experts], chosen: [n, k] -> [n, k]."""
        routing = self.routing
        if routing.weigh == "chosen":
            weights = logits.gather(-1, chosen).softmax(-1)
        elif routing.weigh == "close":
            weights = among_close(logits, chosen, routing.reach)
        else:
            weights = scores_of(logits, routing).gather(-1, chosen)
        if routing.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
        weights = weights if routing.factor == 1 else weights * routing.factor
        return weights if self.scale is None else weights * wide(self.scale)[chosen]


def among_close(logits: Tensor, chosen: Tensor, reach: float) -> Tensor:
    """logits: [n, experts], chosen: [n, k], the best first -> [n, k]: the softmax of each among those not chosen before
    it whose logits are within its reach."""
    weights, left = list[Tensor](), logits
    for best in chosen.split(1, -1):
        highest_left = logits.detach().gather(-1, best)
        far = (highest_left - logits.detach()) > reach * logits.detach().abs().clamp(min=highest_left)
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, best))
        left = left.scatter(-1, best, -torch.inf)
    return torch.cat(weights, -1)


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """logits: [n, experts] -> the score of each expert."""
    if routing.score == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [n, in], weight: [out, in], bias: [out] -> [n, out], in fp32 at least."""
    return _WideLinear.apply(x, weight, bias)


class _WideLinear(torch.autograd.Function):
    """logits = x W' + b in fp32 at least. x: [n, embed], W: [routes, embed], b: [routes] -> [n, routes].

    What is kept of x for the backward is x, not a wide copy of it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(wide(x), wide(weight), None if bias is None else wide(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad
        dx = (dy @ wide(weight)).to(x.dtype) if need_dx else None
        dw = (dy.t() @ wide(x)).to(weight.dtype) if need_dw else None
        return dx, dw, dy.sum(0).to(weight.dtype) if need_db else None
