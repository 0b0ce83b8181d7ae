"""The lightning indexer (DeepSeek-AI 2025, arXiv 2512.02556): each token looks at a few of those before it, which a few
small heads choose.

Each rank of tp scores its own tokens' queries against all keys, and the ranks gather what was chosen: all of them look
at the same tokens, whatever rounds how. The keys of the indexer are one small head, so over cp every rank is sent those
of all tokens; so are the keys and values of the attention, for any of them may be chosen.

The indexer learns from what the attention makes of its choice (equation 4 of the report): its gradient is that of the
divergence between the softmax of its scores and the attention's weights, and the loss sends none through the choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from megacore.parallel import kernels
from megacore.parallel.collectives import all_gather, start_all_gather, start_reduce_scatter
from megacore.parallel.context_split import ContextSplit
from megacore.parallel.kernels.indexed import Reaches
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.layers.linear import ReplicatedLinear
from megacore.parallel.layers.norm import LayerNorm
from megacore.parallel.mesh import Group, Mesh
from megacore.parallel.parameters import Parameters

Learn = Callable[[Tensor, Tensor], Tensor]
"""(what attention makes of the tokens, divergences [n]) -> the first, where the gradient of the second enters."""


@dataclass(frozen=True, eq=False)
class IndexVectors:
    """What an indexer makes of tokens: the queries and weights of n of this rank's, the keys of all t of them.

    Args:
        q: [n, heads, head].
        k: [t, head].
        weights: [n, heads], of the heads.
        group: The ranks of tp, each of which has n of the t tokens.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    group: Group


class Indexer(nn.Module):
    """What makes of this rank's tokens what they choose by.

    Each rank of tp has all of it, and its own tokens (law 4 of ``docs/meshes.md`` sums the gradients).

    Args:
        q: Makes the queries of all heads of the latent of the attention's queries: q_latent -> heads * head.
        k, k_norm: Make the keys: embed -> head.
        weights: Makes the weights of the heads: embed -> heads.
        heads: How many there are.
    """

    def __init__(
        self, q: nn.Module, k: nn.Module, k_norm: nn.Module, weights: nn.Module, heads: int, mesh: Mesh
    ) -> None:
        super().__init__()
        self.q, self.k, self.k_norm, self.weights = q, k, k_norm, weights
        self.heads, self.group, self._rotate = heads, mesh.tp, kernels.rotate(mesh.device)

    @classmethod
    def of(cls, parameters: Parameters, name: str) -> Self:
        """Return the indexer of ``name.q``, ``.k``, ``.k_norm`` and ``.weights``."""
        p, mesh = parameters, parameters.mesh
        q, k, weights = (ReplicatedLinear.of(p[f"{name}.{each}.weight"], None, mesh) for each in ("q", "k", "weights"))
        norm = LayerNorm.of(p[f"{name}.k_norm.weight"], p[f"{name}.k_norm.bias"], _EPS, mesh)
        return cls(q, k, norm, weights, p.shards[f"{name}.weights.weight"].sizes["index_heads"], mesh)

    def forward(self, x: Tensor, latent: Tensor, rotation: tuple[Tensor, Tensor] | None, learns: bool) -> IndexVectors:
        """x: [tokens/tp, embed], latent: [tokens/tp, q_latent], cos, sin: [tokens, turning/2] -> an index.

        What it is given gets no gradient from it; where it does not learn, neither do its weights.
        """
        assert rotation is not None  # all layers with indexers rotate
        group, x, latent = self.group, x.detach(), latent.detach()
        own = [each.chunk(group.size)[group.index] for each in rotation]
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            q = self._rotate(self.q(latent).unflatten(-1, (self.heads, -1)), *own)
            k = self._rotate(self.k_norm(self.k(x)).unsqueeze(1), *own).squeeze(1)
            return IndexVectors(q, all_gather(k, group), self.weights(x), group)


_EPS = 1e-6
"""That of the norm of an indexer's keys in all models."""


@dataclass(frozen=True, eq=False)
class Indexed(ABC):
    """The attention of a rank's t tokens to those that indexers choose.

    Args:
        shared: {layer: what its indexer chose}, where layers behind it look at that, too; kept for when a block is
            computed again.
    """

    shared: dict[int, Tensor]

    def __call__(
        self,
        name: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scoring: Scoring,
        index: IndexVectors | None,
        top: int,
        chooser: int | None,
        learn: Learn | None,
    ) -> Tensor:
        """q: [t, heads, head], k: [t, kv, head], v: [t, kv, value] -> [t, heads, value].

        Args:
            name: The attention that asks.
            q, k, v: Those of this rank's heads.
            scoring: The rule by which scores become weights.
            index: What the layer's own indexer makes of the tokens; None: it looks at what ``chooser`` chose.
            top: The number of tokens that each looks at.
            chooser: The layer whose choice several look at; None: this one alone looks at its own.
            learn: What lets the divergences enter that the indexer learns from; None: it does not learn.
        """
        if index is None:
            if chooser not in self.shared:
                raise ValueError(
                    f"{name} looks at what the indexer of layer {chooser} chooses, which is in another part of the "
                    "pipeline: keep both in one part (pipeline.layers_per_stage), or choose mesh.pp=1"
                )
            return self.attend(name, q, k, v, self.shared[chooser], scoring)
        own = self.choose(name, index, top)
        chosen = start_all_gather(own, index.group).wait()
        if chooser is not None:
            self.shared[chooser] = chosen
        y = self.attend(name, q, k, v, chosen, scoring)
        if learn is None or not index.q.requires_grad:
            return y
        return learn(y, self.divergences(index, own, q, k, chosen, scoring))

    @abstractmethod
    def choose(self, name: str, index: IndexVectors, top: int) -> Tensor:
        """Return the keys that each of the index's n tokens looks at, int32 [n, top or fewer]; -1 where there are no
        more."""

    @abstractmethod
    def attend(self, name: str, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scoring: Scoring) -> Tensor:
        """q: [t, heads, head], k: [t, kv, head], v: [t, kv, value], chosen: [t, top] -> [t, heads, value]."""

    def divergences(
        self, index: IndexVectors, own: Tensor, q: Tensor, k: Tensor, chosen: Tensor, scoring: Scoring
    ) -> Tensor:
        """Return how far each of the index's n tokens is from what the attention makes of its choice: [n]."""
        raise NotImplementedError("indexers learn in training alone")


@dataclass(frozen=True, eq=False)
class IndexedTokens(Indexed):
    """That of tokens to the ones before them in their documents.

    Args:
        documents: The lengths of all documents of the microbatch.
        split: Its split over cp, where it has one.
        group: The ranks of cp.
        device: Where the tokens are.
    """

    documents: Sequence[int]
    split: ContextSplit | None
    group: Group
    device: torch.device

    @cached_property
    def _keys(self) -> tuple[Reaches, Tensor | None]:
        """Only who asks has them made."""
        return keys_of(self.documents, self.split, self.group, self.device)

    @property
    def reaches(self) -> Reaches:
        return self._keys[0]

    def choose(self, name: str, index: IndexVectors, top: int) -> Tensor:
        reaches = self.reaches.of(index.group.index * len(index.q), len(index.q))
        with torch.no_grad():
            return kernels.choose_indexed(index.q, self._every(index.k), index.weights, reaches, top)

    def attend(self, name: str, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scoring: Scoring) -> Tensor:
        return kernels.indexed_attention(q, self._every(k), self._every(v), chosen, self.reaches, scoring)

    def divergences(
        self, index: IndexVectors, own: Tensor, q: Tensor, k: Tensor, chosen: Tensor, scoring: Scoring
    ) -> Tensor:
        scores = kernels.scores_of_chosen(index.q, self._every(index.k), index.weights, own)
        weights = kernels.indexed_weights(q, self._every(k.detach()), chosen, self.reaches, scoring)
        # A rank has some of the heads of all tokens, and is to have all heads of its own.
        return kernels.divergence(scores, start_reduce_scatter(weights, index.group).wait(), own)

    def _every(self, x: Tensor) -> Tensor:
        """x: [t, ...] -> those of all tokens of the microbatch, in the order of its documents."""
        order = self._keys[1]
        return x if order is None else all_gather(x, self.group).index_select(0, order)


def keys_of(
    documents: Sequence[int], split: ContextSplit | None, group: Group, device: torch.device
) -> tuple[Reaches, Tensor | None]:
    """Return the keys that each of this rank's tokens may look at, in the order of the documents, and where the keys of
    that order are among those that the ranks of cp gather; None: as they are."""
    first = np.repeat(np.cumsum([0, *documents])[:-1], documents)
    last = np.arange(len(first))
    if split is None:
        return Reaches(first, last, device), None
    ranks = [split.indices(rank) for rank in range(group.size)]
    own, order = ranks[group.index], torch.from_numpy(np.concatenate(ranks).argsort())
    if device.type == "cuda":
        order = order.pin_memory()
    return Reaches(first[own], last[own], device), order.to(device, non_blocking=True)
