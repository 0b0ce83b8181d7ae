"""The lightning indexer (DeepSeek-AI 2025, arXiv 2512.02556): each token looks at a few of those before it, which a few
small heads choose.

Each rank of tp scores its own tokens' queries against all keys, and the ranks gather what was chosen: all of them look
at the same tokens, whatever rounds how. The keys of the indexer are one small head, so over cp every rank is sent those
of all tokens; so are the keys and values of the attention, for any of them may be chosen.

The indexer learns from what the attention makes of its choice (equation 4 of the report): its gradient is that of the
divergence between the softmax of its scores and the attention's weights, and the loss sends none through the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from megacore.parallel import kernels
from megacore.parallel.collectives import all_gather, start_all_gather, start_reduce_scatter
from megacore.parallel.context_split import ContextSplit
from megacore.parallel.kernels.indexed import Reaches
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.mesh import Group


@dataclass(frozen=True, eq=False)
class Index:
    """What an indexer makes of tokens: the queries and weights of n of this rank's, the keys of all t of them.

    Args:
        q: [n, heads, head].
        k: [t, head].
        weights: [n, heads], of the heads.
        start: The first of the n tokens among the t.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    start: int = 0


class Indexer(nn.Module):
    """(x: [tokens/tp, embed], latent: [tokens/tp, q_latent], cos, sin: [tokens, turning/2]) -> :class:`Index`.

    It sends no gradient into what it is given.

    Args:
        q: Makes the queries of all heads of the latent: q_latent -> heads * head.
        k, k_norm: Make the keys: embed -> head.
        weights: Makes the weights of the heads: embed -> heads.
        heads: How many there are.
        group: The ranks of tp, of which each has the whole indexer and its own tokens.
        device: The device.
    """

    def __init__(
        self,
        q: nn.Module,
        k: nn.Module,
        k_norm: nn.Module,
        weights: nn.Module,
        heads: int,
        group: Group,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.q, self.k, self.k_norm, self.weights, self.heads, self.group = q, k, k_norm, weights, heads, group
        self._rotate = kernels.rotate(device)

    def forward(self, x: Tensor, latent: Tensor, rotation: tuple[Tensor, Tensor]) -> Index:
        x, latent = x.detach(), latent.detach()
        own = [each.chunk(self.group.size)[self.group.index] for each in rotation]
        q = self._rotate(self.q(latent).unflatten(-1, (self.heads, -1)), *own)
        k = self._rotate(self.k_norm(self.k(x)).unsqueeze(1), *own).squeeze(1)
        return Index(q, all_gather(k, self.group), self.weights(x), len(x) * self.group.index)


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """The attention of this rank's t tokens to those that indexers choose among the ones before them in their
    documents.

    Args:
        reaches: The keys that each may look at, in the order of the documents.
        order: Where the keys of that order are among those that the ranks of cp gather; None: as they are.
        group: The ranks of cp.
    """

    reaches: Reaches
    order: Tensor | None
    group: Group

    @classmethod
    def of(cls, documents: Sequence[int], split: ContextSplit | None, group: Group, device: torch.device) -> Self:
        """Make it of the lengths of all documents of a microbatch, and of its split over cp, where it has one."""
        first = np.repeat(np.cumsum([0, *documents])[:-1], documents)
        last = np.arange(len(first))
        if split is None:
            return cls(Reaches(first, last, device), None, group)
        ranks = [split.indices(rank) for rank in range(group.size)]
        own, order = ranks[group.index], torch.from_numpy(np.concatenate(ranks).argsort())
        return cls(Reaches(first[own], last[own], device), order.to(device), group)

    def choose(self, name: str, index: Index, top: int, scored: bool) -> tuple[Tensor, Tensor | None]:
        """Return the keys that each of the index's n tokens looks at, int32 [n, top or fewer], and where they are to be
        ``scored`` their scores, [n, top or fewer], through which its gradient goes; -1 in the places of those that
        there are not. ``name`` is the attention that asks."""
        keys, reaches = self._every(index.k), self.reaches.of(index.start, len(index.q))
        with torch.no_grad():
            chosen = kernels.choose_indexed(index.q, keys, index.weights, reaches, top)
        return chosen, kernels.scores_of_chosen(index.q, keys, index.weights, chosen) if scored else None

    def attend(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scoring: Scoring, weighed: bool
    ) -> tuple[Tensor, Tensor | None]:
        """q: [t, heads, head], k: [t, kv, head], v: [t, kv, value], chosen: [t, top] -> [t, heads, value], and where
        they are to be ``weighed`` the weights of what was chosen, of this rank's heads together: [t, top]."""
        k, v = self._every(k), self._every(v)
        y = kernels.indexed_attention(q, k, v, chosen, self.reaches, scoring)
        return y, kernels.indexed_weights(q, k, chosen, self.reaches, scoring) if weighed else None

    def _every(self, x: Tensor) -> Tensor:
        """x: [t, ...] -> those of all tokens of the microbatch, in the order of its documents."""
        return x if self.order is None else all_gather(x, self.group).index_select(0, self.order)


def of_all(chosen: Tensor, group: Group) -> Tensor:
    """chosen: [n, top] of each rank of tp -> [t, top] of all of them."""
    return start_all_gather(chosen, group).wait()


def divergences(scores: Tensor, weights: Tensor, chosen: Tensor, group: Group) -> Tensor:
    """scores, chosen: [n, top] of this rank's own tokens, weights: [t, top] of its own heads -> [n]: the divergence of
    each token, of the heads of all ranks of tp together."""
    return kernels.divergence(scores, start_reduce_scatter(weights, group).wait(), chosen)
