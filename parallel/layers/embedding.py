"""Token embedding split over the vocabulary."""

from __future__ import annotations

import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.collectives import reduce_scatter
from megacore.parallel.mesh import Mesh


class VocabParallelEmbedding(nn.Module):
    """Embedding whose rows are split over tp. tokens: [tokens, ...] -> [tokens/tp, ..., embed].

    Any vocabulary size will do: it is padded to a multiple of tp by rows of zeros, which no token names, so they get no
    gradient; they have no place in a checkpoint.

    Args:
        vocab: Number of tokens.
        embed: Size of an embedding.
        padding_idx: That of ``nn.Embedding``: a token whose row starts as zeros and gets no gradient from being looked
            up; negative ones count from the end of the vocabulary.
        dtype: That of the parameter.

    Raises:
        ValueError: ``padding_idx`` is not in the vocabulary.
    """

    def __init__(
        self,
        vocab: int,
        embed: int,
        *,
        mesh: Mesh,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        start, stop = mesh.rows(vocab)
        weight = torch.zeros(stop - start, embed, dtype=dtype, device=mesh.device)
        # Drawn in full and then cut: ranks that are seeded alike hold parts of one table, never the same part twice.
        whole = torch.empty(vocab, embed, dtype=dtype, device=mesh.device).normal_(std=1 / math.sqrt(embed))
        weight[: max(0, vocab - start)] = whole[start:stop]
        self._assemble(nn.Parameter(weight), vocab, mesh, padding_idx)
        if self.padding is not None:
            weight[self.padding] = 0

    @classmethod
    def of(cls, weight: nn.Parameter, vocab: int, mesh: Mesh, padding_idx: int | None = None) -> Self:
        """Return the layer of a parameter that a layout has cut: weight [padded vocab/tp, embed], whose values stay."""
        layer = cls.__new__(cls)
        layer._assemble(weight, vocab, mesh, padding_idx)
        return layer

    def _assemble(self, weight: nn.Parameter, vocab: int, mesh: Mesh, padding_idx: int | None) -> None:
        if padding_idx is not None and not -vocab <= padding_idx < vocab:
            raise ValueError(f"padding_idx is {padding_idx}: it must be below vocab ({vocab}), or None")
        nn.Module.__init__(self)
        self.weight, self.vocab, self.group = weight, vocab, mesh.tp
        self.start, self.stop = mesh.rows(vocab)
        row = None if padding_idx is None else padding_idx % vocab
        self.padding = row - self.start if row is not None and self.start <= row < self.stop else None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(tokens, self.weight, self.padding)
        mine = (tokens >= self.start) & (tokens < self.stop)
        # The others' tokens look up row 0, and what comes of it is dropped.
        rows = F.embedding((tokens - self.start) * mine, self.weight, self.padding)
        return reduce_scatter(rows * mine[..., None], self.group)

    def extra_repr(self) -> str:
        return f"{self.vocab} -> {self.weight.shape[1]}, rows [{self.start}, {self.stop})"
