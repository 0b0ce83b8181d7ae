"""The router: the experts that each token is sent to, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.routing import Routing

Attach = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, experts], chosen [n, k]) -> the logits, with whatever gradient enters there."""


class Router(nn.Module):
    """x: [n, embed] -> (experts [n, k], weights [n, k]), each token's best expert first, in fp32 at least.

    It is held whole by every rank, and each routes its own tokens: the sum of its gradient over replicas is the whole
    (law 4 of ``docs/meshes.md``).

    Args:
        weight: [routes, embed].
        routing: How experts are chosen and weighed.
        bias: [routes], added to the logits.
        correction: [routes], added to the scores by which experts are chosen, not to those that weigh them; it gets no
            gradient.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        routing: Routing,
        bias: nn.Parameter | None = None,
        correction: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.correction, self.routing = weight, bias, correction, routing

    def forward(self, x: Tensor, attach: Attach | None = None) -> tuple[Tensor, Tensor]:
        logits = F.linear(_wide(x), _wide(self.weight), None if self.bias is None else _wide(self.bias))
        with torch.no_grad():
            chosen = self.choose(logits)
        if attach is not None:
            logits = attach(logits, chosen)
        return chosen, self.weigh(logits, chosen)

    def choose(self, logits: Tensor) -> Tensor:
        """logits: [n, experts] -> [n, k], the best first; of equal ones the lower."""
        routing = self.routing
        scores = scores_of(logits, routing)
        if self.correction is not None:
            scores = scores + self.correction
        if routing.groups > 1:
            scores = scores.masked_fill(~self._kept(scores), -torch.inf)
        # A stable sort is the only one that says who comes first of equals.
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]

    def _kept(self, scores: Tensor) -> Tensor:
        """scores: [n, experts] -> [n, experts], whether an expert is in a group that is kept."""
        routing = self.routing
        grouped = scores.unflatten(-1, (routing.groups, -1))
        of_groups = grouped.topk(2, -1).values.sum(-1) if routing.group_score == "top2" else grouped.amax(-1)
        best = of_groups.sort(dim=-1, descending=True, stable=True).indices[:, : routing.kept_groups]
        kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, best, True)
        return kept.repeat_interleave(routing.experts // routing.groups, -1)

    def weigh(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """logits: [n, experts], chosen: [n, k] -> [n, k]."""
        routing = self.routing
        if routing.weigh == "chosen":
            weights = logits.gather(-1, chosen).softmax(-1)
        else:
            weights = scores_of(logits, routing).gather(-1, chosen)
        if routing.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
        return weights if routing.factor == 1 else weights * routing.factor


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """logits: [n, experts] -> the score of each expert."""
    return logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
