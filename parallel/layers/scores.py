"""The head scores each token, without gradients and without the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel import kernels
from megacore.parallel.collectives import all_reduce_, start_all_gather
from megacore.parallel.enum_errors import Score
from megacore.parallel.labels import IGNORE
from megacore.parallel.layers.loss import Objective

LOGITS = 1 << 26
"""Elements of the logits that are there at a time."""


def loss(objective: Objective, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token: [n]."""
    return objective.losses(logits, labels)[0]


def most_likely(objective: Objective, logits: Tensor, labels: Tensor) -> Tensor:
    """1 where no token is more likely than the label, and no lower id as likely, as greedy decoding chooses; else 0."""
    start, valid = objective.own_columns(logits)
    top = torch.full(labels.shape, -torch.inf, dtype=logits.dtype, device=logits.device)
    first = torch.full_like(labels, objective.vocab)
    if valid:
        top, at = objective.finish(logits[:, :valid]).max(1)
        first = at + start
    highest = all_reduce_(top.clone(), objective.group, dist.ReduceOp.MAX)
    first = all_reduce_(first.where(top == highest, objective.vocab), objective.group, dist.ReduceOp.MIN)
    return (first == labels).to(torch.promote_types(logits.dtype, torch.float32))


def logit(objective: Objective, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logit of each label: [n]; of a head of scores, the score."""
    start, valid = objective.own_columns(logits)
    here = (labels >= start) & (labels < start + valid)
    own = logits.gather(1, (labels - start).where(here, 0)[:, None])[:, 0]
    found = objective.finish(own).where(here, 0).to(torch.promote_types(logits.dtype, torch.float32))
    return all_reduce_(found, objective.group)


SCORES: Mapping[Score, Callable[[Objective, Tensor, Tensor], Tensor]] = {
    "loss": loss,
    "most_likely": most_likely,
    "logit": logit,
}
"""(objective, logits [n, padded vocab/tp], labels [n]) -> the scores: [n], the same on every rank."""


@torch.no_grad()
def token_scores(
    x: Tensor, weight: Tensor, labels: Tensor, objective: Objective, score: Score, bias: Tensor | None = None
) -> Tensor:
    """x: [t/tp, embed], weight: [padded vocab/tp, embed], labels: [t], bias: [padded vocab/tp] -> the scores of this
    rank's tokens: [t/tp], in fp32 at least, zero where the label is ignored.

    Only of tokens with a label are there logits, and no more than :data:`LOGITS` of them at a time.

    Raises:
        ValueError: t does not divide over the group.
    """
    full = start_all_gather(x, objective.group).wait()
    scores = torch.zeros(len(labels), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    counted = (labels != IGNORE).nonzero()[:, 0]
    for rows in counted.split(max(1, LOGITS // len(weight))):
        scores[rows] = SCORES[score](objective, kernels.linear(full[rows], weight, bias), labels[rows])
    return objective.own(scores)
