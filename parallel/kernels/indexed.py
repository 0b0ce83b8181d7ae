"""Attention to a few tokens that a small scorer chooses, the lightning indexer of DeepSeek-V3.2 (DeepSeek-AI 2025,
arXiv 2512.02556, section 2.1), in torch's operators: blocks of queries, each beside the keys that some may look at.

The score of a key is a sum over the heads of the indexer, sum of w_h relu(q_h k), and a token looks at those of its
document up to itself whose scores are the highest; of equal ones at the earlier. It is a sort, not ``torch.topk``,
whose choice among equals depends on what else stands in the row: every layout is to choose the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megacore.parallel.kernels.again import keeping_inputs
from megacore.parallel.kernels.scoring import Scoring, apply, weigh
from megacore.parallel.kernels.upcast import wide

_BLOCK = 128
"""Queries of a block."""


@dataclass(frozen=True, eq=False)
class Reaches:
    """The keys that each of n queries may look at: successive ones.

    Args:
        first, last: [n], the first and the last of them.
        device: Where the queries are.
    """

    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    device: torch.device

    def of(self, start: int, count: int) -> Self:
        """Return those of some successive queries."""
        chosen = slice(start, start + count)
        return replace(self, first=self.first[chosen], last=self.last[chosen])

    def blocks(self) -> Iterator[_QueryBlock]:
        """Yield the blocks of the queries."""
        for start in range(0, len(self.first), _BLOCK):
            queries = slice(start, start + _BLOCK)
            keys = slice(int(self.first[queries].min()), int(self.last[queries].max()) + 1)
            first, last = (each[queries] for each in self._there)
            yield _QueryBlock(queries, keys, first, last)

    @cached_property
    def _there(self) -> tuple[Tensor, Tensor]:
        both = torch.from_numpy(np.stack([self.first, self.last]))
        if self.device.type == "cuda":
            both = both.pin_memory()
        first, last = both.to(self.device, non_blocking=True)
        return first, last


@dataclass(frozen=True, eq=False)
class _QueryBlock:
    """Some queries, the keys that at least one of them looks at, and the first and the last key of each: [n]."""

    queries: slice
    keys: slice
    first: Tensor
    last: Tensor

    def may_see(self) -> Tensor:
        """Return which keys a query may look at: [n, keys]."""
        at = torch.arange(self.keys.start, self.keys.stop, device=self.first.device)
        return (at >= self.first[:, None]) & (at <= self.last[:, None])

    def sees(self, chosen: Tensor) -> Tensor:
        """chosen: [queries, top] of all -> [n, keys], whether a query of the block looks at a key."""
        count = self.keys.stop - self.keys.start
        return marked(chosen[self.queries] - self.keys.start, count)


def marked(places: Tensor, count: int) -> Tensor:
    """places: [n, top] -> [n, count], True at the places of a row; those below 0 are none."""
    beyond = places.new_full((), count)
    found = torch.zeros(len(places), count + 1, dtype=torch.bool, device=places.device)
    return found.scatter_(1, torch.where(places < 0, beyond, places).long(), True)[:, :count]


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """q: [n, heads, head], k: [m, head] or [n, m, head], weights: [n, heads] -> [n, m], in fp32 at least."""
    products = wide(q) @ wide(k).mT if k.dim() == 3 else (wide(q).flatten(0, 1) @ wide(k).T).unflatten(0, q.shape[:2])
    scores = (products * q.shape[2] ** -0.5).relu()
    return ((wide(weights) * q.shape[1] ** -0.5)[:, None] @ scores)[:, 0]


def choose(q: Tensor, k: Tensor, weights: Tensor, reaches: Reaches, top: int) -> Tensor:
    """q: [n, heads, head], k: [m, head], weights: [n, heads] -> int32 [n, min(top, m)], the keys that each query looks
    at, the best first; -1 in the places of those that there are not."""
    width, found = min(top, len(k)), list[Tensor]()
    for block in reaches.blocks():
        scores = index_scores(q[block.queries], k[block.keys], weights[block.queries])
        best = best_of(scores, block.may_see(), top)
        best = torch.where(best < 0, best, best + block.keys.start)
        found.append(torch.nn.functional.pad(best, (0, width - best.shape[1]), value=-1))
    return torch.cat(found)


def best_of(scores: Tensor, seen: Tensor, top: int) -> Tensor:
    """scores, seen: [n, m] -> int32 [n, min(top, m)], the places of the highest of those that are seen; -1 where there
    are no more."""
    best = highest(scores.masked_fill(~seen, -torch.inf), min(top, scores.shape[1]))
    return torch.where(seen.gather(1, best), best, -1).int()


def scores_of_chosen(q: Tensor, k: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Return the scores of what was chosen: [n, top], for the gradient's sake; those of -1 mean nothing. Autograd keeps
    the inputs alone."""
    found = list[Tensor]()
    for start in range(0, len(q), _BLOCK):
        rows = slice(start, start + _BLOCK)
        formula = partial(_scores_of_chosen, chosen=chosen[rows].clamp(min=0).long())
        found += keeping_inputs(formula, q[rows], k, weights[rows])
    return torch.cat(found)


def _scores_of_chosen(q: Tensor, k: Tensor, weights: Tensor, *, chosen: Tensor) -> tuple[Tensor]:
    return (index_scores(q, k[chosen], weights),)


def attention(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, reaches: Reaches, scoring: Scoring) -> Tensor:
    """q: [n, heads, head], k: [m, kv, head], v: [m, kv, value], chosen: [n, top] -> [n, heads, value]; softmax in fp32
    (fp64 for fp64)."""
    found = list[Tensor]()
    for block in reaches.blocks():
        given = q[block.queries], k[block.keys], v[block.keys]
        formula = partial(_attend, seen=block.sees(chosen), scoring=scoring)
        # What is dropped is drawn once.
        found += formula(*given) if scoring.dropout else keeping_inputs(formula, *given)
    return torch.cat(found)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, scoring: Scoring) -> tuple[Tensor]:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return (apply(weigh(q, k, seen[None], scoring), v)[0].transpose(0, 1),)


def attention_weights(q: Tensor, k: Tensor, chosen: Tensor, reaches: Reaches, scoring: Scoring) -> Tensor:
    """q: [n, heads, head], k: [m, kv, head] -> [n, top], the weights of what was chosen, of these heads together; 0
    where nothing was. They have no gradient."""
    found, scoring = list[Tensor](), replace(scoring, dropout=0.0)
    with torch.no_grad():
        for block in reaches.blocks():
            queries, keys = (x.transpose(0, 1)[None] for x in (q[block.queries], k[block.keys]))
            weights = weigh(queries, keys, block.sees(chosen)[None], scoring)[0].sum((0, 1))
            own = chosen[block.queries].long()
            each = weights.gather(1, (own - block.keys.start).clamp(min=0))
            found.append(each.masked_fill(own < 0, 0))
    return torch.cat(found)


def divergence(scores: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """scores, weights, chosen: [n, top] -> [n]: of each token the Kullback-Leibler divergence of the softmax of the
    scores from the weights over their sum; 0 where nothing was chosen."""
    nothing = chosen < 0
    total = weights.sum(-1, keepdim=True)
    wanted = weights / total.masked_fill(total == 0, 1)
    found = scores.masked_fill(nothing, -torch.inf).log_softmax(-1).masked_fill(nothing, 0.0)
    return (torch.special.xlogy(wanted, wanted) - wanted * found).sum(-1)


def highest(scores: Tensor, k: int) -> Tensor:
    """scores: [n, m] -> [n, k], the places of the highest, the first of them first; of equal ones the lower place.

    ``torch.topk`` says nothing of equals, and a stable sort takes three times as long. So what is sorted are integers,
    no two of a row the same: a number's bits, turned so that they order as the number does, above the place.
    """
    if scores.dtype != torch.float32:  # of 64 bits, and none left for the place
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    bits = (scores + 0.0).view(torch.int32)  # of -0.0 those of 0.0
    ordered = bits ^ ((bits >> 31) & _ALL_BUT_SIGN)
    last = scores.shape[-1] - 1
    after = last - torch.arange(last + 1, device=scores.device)
    keys = (ordered.to(torch.int64) << 32) | after
    return last - (keys.topk(k, -1).values & _LOW)


_ALL_BUT_SIGN, _LOW = 0x7FFFFFFF, 0xFFFFFFFF
