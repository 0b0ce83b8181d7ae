"""Attention to the last tokens and to blocks of those before (DeepSeek-V4), as ranks share it out.

Over tp each rank has some of the heads, and the keys whole; an indexer, which chooses blocks, scores each rank's own
tokens. Over cp every rank is sent the keys of all tokens and what all blocks are made of, as any may be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megacore.parallel import kernels
from megacore.parallel.collectives import all_gather, start_all_gather, start_reduce_scatter
from megacore.parallel.context_split import ContextSplit
from megacore.parallel.kernels import compressed
from megacore.parallel.kernels.compressed import TokenBlocks
from megacore.parallel.kernels.indexed import Reaches
from megacore.parallel.kernels.scoring import Scoring
from megacore.parallel.layers.indexed import IndexVectors, Learn
from megacore.parallel.mesh import Group

T = TypeVar("T")
Tables = Callable[[str, Tensor], tuple[Tensor, Tensor]]
"""(a rope, positions [m]) -> cos, sin: [m, turning/2]."""


@dataclass(frozen=True, eq=False)
class CompressedTokens:
    """The attention of a rank's tokens to the last ones of their documents, and to the blocks of these.

    Args:
        documents: The lengths of all documents.
        split: Their split over cp, where they have one.
        group: The ranks of cp.
        device: Where the tokens are.
        tables: Makes the rotations of blocks.
    """

    documents: Sequence[int]
    split: ContextSplit | None
    group: Group
    device: torch.device
    tables: Tables
    _made: dict[object, object] = field(default_factory=dict)

    def every(self, name: str, x: Tensor) -> Tensor:
        """x: [t, ...] of this rank's tokens -> those of all tokens of the documents, in their order; ``name`` says of
        what."""
        order = self._order
        return x if order is None else all_gather(x, self.group).index_select(0, order)

    @cached_property
    def own(self) -> npt.NDArray[np.int64]:
        """[t], the places of this rank's tokens among those of the documents."""
        return np.arange(sum(self.documents)) if self.split is None else self.split.indices(self.group.index)

    @cached_property
    def _order(self) -> Tensor | None:
        if self.split is None:
            return None
        ranks = [self.split.indices(rank) for rank in range(self.group.size)]
        return compressed.on(np.concatenate(ranks).argsort(), self.device)

    def blocks(self, rate: int) -> TokenBlocks:
        """Return the blocks of so many tokens."""
        return self._once(rate, lambda: TokenBlocks.of(np.array(self.documents), self.own, rate, self.device))

    def rotation(self, rope: str, rate: int) -> tuple[Tensor, Tensor]:
        """Return cos, sin: [m, turning/2] of the blocks, each at the position of its first token."""
        return self._once((rope, rate), lambda: self.tables(rope, self.blocks(rate).positions))

    def near(self, window: int) -> Reaches:
        """Return the tokens that each token looks at."""

        def reaches() -> Reaches:
            first = np.repeat(np.cumsum(self.documents) - self.documents, self.documents)[self.own]
            return Reaches(np.maximum(first, self.own - window + 1), self.own, self.device)

        return self._once(None, reaches)

    def _once(self, key: object, make: Callable[[], T]) -> T:
        """Return what layers ask for alike."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def __call__(
        self,
        name: str,
        q: Tensor,
        k: Tensor,
        means: Tensor,
        rate: int,
        scoring: Scoring,
        index: IndexVectors | None,
        top: int | None,
        learn: Learn | None,
    ) -> Tensor:
        """q: [t, heads, head], k: [t, head], means: [m, head] of blocks -> [t, heads, head].

        Args:
            name: The attention that asks.
            q, k, means: The queries of this rank's heads, and what is key and value of all of them.
            rate: The tokens of a block.
            scoring: The rule by which scores become weights.
            index: What the indexer makes of the tokens and the blocks; None: each token looks at all blocks before it.
            top: The number of blocks that it looks at, where it chooses.
            learn: What lets the divergences enter that the indexer learns from; None: it does not learn.
        """
        assert scoring.window is not None
        k, blocks, near = self.every(name, k), self.blocks(rate), self.near(scoring.window)
        if index is None or top is None:
            return compressed.attention(q, k, means, near, blocks.reaches, None, scoring)
        with torch.no_grad():
            own = kernels.choose_indexed(index.q, index.k, index.weights, self._of(index, blocks), top)
        chosen = start_all_gather(own, index.group).wait()
        y = compressed.attention(q, k, means, near, blocks.reaches, chosen, scoring)
        if learn is None or not index.q.requires_grad:
            return y
        scores = kernels.scores_of_chosen(index.q, index.k, index.weights, own)
        weights = compressed.attention_weights(q, k, means, near, blocks.reaches, chosen, scoring)
        # A rank has some of the heads of all tokens, and is to have all heads of its own.
        weights = start_reduce_scatter(weights, index.group).wait()
        return learn(y, kernels.divergence(scores, weights, own))

    def _of(self, index: IndexVectors, blocks: TokenBlocks) -> Reaches:
        """Return the blocks that this rank of tp scores for its own tokens."""
        return blocks.reaches.of(index.group.index * len(index.q), len(index.q))
