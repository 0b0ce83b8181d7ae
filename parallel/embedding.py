"""Token embedding split over the vocabulary."""

from __future__ import annotations

import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.collectives import reduce_scatter
from parallel.layout import split_axis
from parallel.mesh import Mesh


class VocabParallelEmbedding(nn.Module):
    """Embedding whose rows are split over tp. tokens: [tokens, ...] -> [tokens/tp, ..., embed].

    Any vocabulary size will do: it is padded to a multiple of tp by rows of zeros, which no token names, so they get no
    gradient; they have no place in a checkpoint.

    Args:
        vocab: Number of tokens.
        embed: Size of an embedding.
        mesh: The live mesh.
        dtype: Of the parameter.
    """

    def __init__(self, vocab: int, embed: int, *, mesh: Mesh, dtype: torch.dtype | None = None) -> None:
        start, stop = split_axis("vocab", vocab, mesh.shape.tp, mesh.place.tp)
        weight = torch.zeros(stop - start, embed, dtype=dtype, device=mesh.device)
        # Drawn in full and then cut: ranks that are seeded alike hold parts of one table, never the same part twice.
        whole = torch.empty(vocab, embed, dtype=dtype, device=mesh.device).normal_(std=1 / math.sqrt(embed))
        weight[: max(0, vocab - start)] = whole[start:stop]
        self._assemble(nn.Parameter(weight), vocab, mesh)

    @classmethod
    def of(cls, weight: nn.Parameter, vocab: int, mesh: Mesh) -> Self:
        """The layer of a parameter that a layout has cut: weight [padded vocab/tp, embed]."""
        layer = cls.__new__(cls)
        layer._assemble(weight, vocab, mesh)
        return layer

    def _assemble(self, weight: nn.Parameter, vocab: int, mesh: Mesh) -> None:
        nn.Module.__init__(self)
        self.weight, self.vocab, self.group = weight, vocab, mesh.tp
        self.start, self.stop = split_axis("vocab", vocab, mesh.shape.tp, mesh.place.tp)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        mine = (tokens >= self.start) & (tokens < self.stop)
        rows = F.embedding((tokens - self.start) * mine, self.weight)
        return reduce_scatter(rows * mine[..., None], self.group)

    def extra_repr(self) -> str:
        return f"{self.vocab} -> {self.weight.shape[1]}, rows [{self.start}, {self.stop})"
