"""Attention scores its tokens by a rule; here it is, and the formula itself in torch's operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.kernels.upcast import matmul


@dataclass(frozen=True, eq=False)
class Scoring:
    """The rule by which a layer's queries and keys become weights, beside that a token looks at none after it.

    Args:
        scale: Factor of the scores; None for head**-0.5.
        window: The number of tokens that a token looks at, itself and those right before it; None for all.
        softcap: Scores s become softcap * tanh(s / softcap) before any are masked, which keeps them between both signs
            of it (Bello et al. 2016, arXiv 1611.09940).
        sinks: [heads], of this rank: a logit of each head that takes part in the softmax and stands for no token, so
            that a head may look at nothing (gpt-oss).
        dropout: Probability of dropping an attention weight.
        chunk: A document is cut into pieces of so many tokens, and a token looks at none before its piece; None: it
            does.
        both_ways: Whether tokens of one image look at each other whatever their order: in the window, or anywhere.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    chunk: int | None = None
    both_ways: Literal["in the window", "anywhere"] | None = None

    @property
    def plain(self) -> bool:
        """Whether every kernel knows it: nothing but a scale and dropout."""
        return self.window is None and self.chunk is None and self.softcap is None and self.sinks is None

    def factor(self, head: int) -> float:
        """Return the factor of scores of heads of so many numbers."""
        return head**-0.5 if self.scale is None else self.scale


PLAIN = Scoring()


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    """q: [b, heads, n, head], k, v: [b, kv, m, head] -> [b, heads, n, head], by the formula; softmax in fp32 (fp64).

    Args:
        q, k, v: The queries, and the keys and values that some of them see.
        seen: [b or 1, n, m], True where a query looks at a key; the window and the chunk are in it.
        scoring: The rule by which they become weights.
    """
    return apply(weigh(q, k, seen, scoring), v)


def weigh(q: Tensor, k: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    """Return the weights of :func:`attend`: [b, kv, heads/kv, n, m], in fp32 (fp64), some of them dropped."""
    scores = _scores(q, k, seen, scoring)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores).view(k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    return F.dropout(scores.softmax(-1)[..., : seen.shape[-1]], scoring.dropout)


def apply(weights: Tensor, v: Tensor) -> Tensor:
    """weights: [b, kv, heads/kv, n, m], v: [b, kv, m, value] -> [b, heads, n, value]."""
    n = weights.shape[3]
    return matmul(weights.to(v.dtype).flatten(2, 3), v).unflatten(2, (-1, n)).flatten(1, 2)


def attend_partly(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Attend as :func:`attend` does; k and v are of some tokens, maybe of none that a query sees, and sinks come later.

    Returns:
        [b, heads, n, value] and the logarithms of the sums of their softmax, [b, heads, n], in fp32 (fp64).
    """
    scores = _scores(q, k, seen, scoring)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.masked_fill(log_sum.isneginf(), 0.0)[..., None]).exp()
    y = (weights.flatten(2, 3) @ v.to(weights)).unflatten(2, weights.shape[2:4])
    return y.flatten(1, 2), log_sum.flatten(1, 2)


def _scores(q: Tensor, k: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    """Return the scores: [b, kv, heads/kv, n, m], in fp32 (fp64), those of keys that are not seen minus infinity."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3).to(wide)
    scores = (queries @ k.to(wide).mT).unflatten(2, (-1, q.shape[2])) * scoring.factor(q.shape[-1])
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    return scores.masked_fill(~seen[:, None, None], float("-inf"))
