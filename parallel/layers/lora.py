"""Parallel linears with low-rank adapters (Hu et al. 2021, arXiv 2106.09685): W x + scale B A x.

A column-parallel linear has its B split like W, and every rank the whole A: each computes A x of its own tokens, and
what is gathered is no wider than the adapter. A row-parallel one has its A split like W, and every rank the whole B:
A x is summed over the ranks, and each goes on with its own tokens. A replicated one has both whole. The halves that all
ranks hold see other tokens on each: their gradients belong summed over tp (law 4 of ``docs/meshes.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    column_linear,
    row_linear,
)

Rows = Sequence[tuple[int, bool]]
"""Of the outputs of a linear, in turn: how many belong together, and whether they have an adapter."""


class _Adapted(nn.Module):
    """A linear and its adapters.

    Args:
        base: The linear, as it would be without.
        a: [adapters rank, in]: the As of the adapters, one below the other.
        b: [rows of those that have one, rank]: their Bs likewise.
        rows: Of the linear's outputs on this rank.
        scale: Of the product.
        dropout: Probability of dropping an element of what A is multiplied with, in training.
    """

    def __init__(
        self, base: nn.Module, a: nn.Parameter, b: nn.Parameter, rows: Rows, scale: float, dropout: float
    ) -> None:
        super().__init__()
        self.base, self.a, self.b, self.dropout = base, a, b, nn.Dropout(dropout)
        self._rows, self._scale = tuple(rows), scale

    def spread(self) -> Tensor:
        """The Bs as one: [out, adapters rank], each beside the others' columns; zero where there is no adapter."""
        held = iter(self.b.split([rows for rows, adapted in self._rows if adapted]))
        return torch.block_diag(*(next(held) if adapted else self.b.new_zeros(rows, 0) for rows, adapted in self._rows))

    def extra_repr(self) -> str:
        return f"rank {self.b.shape[1]}, scale {self._scale:g}"


class ColumnAdapted(_Adapted):
    """x: [tokens/tp, in] -> y: [tokens, out/tp], of a column-parallel linear; a whole, b split over tp."""

    base: ColumnParallelLinear

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.linear(self.dropout(x), self.a) * self._scale
        y: Tensor = self.base(x)
        return y + column_linear(narrow, self.spread(), None, self.base.group)


class RowAdapted(_Adapted):
    """x: [tokens, in/tp] -> y: [tokens/tp, out], of a row-parallel linear; a split over tp, b whole."""

    base: RowParallelLinear

    def forward(self, x: Tensor) -> Tensor:
        narrow = row_linear(self.dropout(x), self.a, None, self.base.group) * self._scale
        y: Tensor = self.base(x)
        return y + F.linear(narrow, self.spread())


class ReplicatedAdapted(_Adapted):
    """x: [tokens/tp, in] -> y: [tokens/tp, out], of a replicated linear; a and b whole."""

    base: ReplicatedLinear

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.linear(self.dropout(x), self.a) * self._scale
        y: Tensor = self.base(x)
        return y + F.linear(narrow, self.spread())
