"""Products with matrices that are held in blocks of few bits: each is dequantised for its product and let go, in the
backward once more. Nothing trains them, so they have no gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from megacore.parallel.kernels.grouped import GroupedProducts, Groups
from megacore.parallel.layers.product import Dense, Operand
from megacore.parallel.quantised import Blocks


class QuantisedProduct(Dense):
    """Products of a linear whose weight is quantised.

    Args:
        blocks: The way in which the weight is held.
        dtype: That of the numbers that are multiplied.
    """

    def __init__(self, blocks: Blocks, dtype: torch.dtype) -> None:
        self._blocks, self._dtype = blocks, dtype

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        return super().forward(x, self._wide(weight, x.values), bias)

    def input_gradient(self, dy: Operand, weight: Operand) -> Tensor:
        return super().input_gradient(dy, self._wide(weight, dy.values))

    def _wide(self, weight: Operand, after: Tensor) -> Operand:
        return Operand(self._blocks.dequantise(weight.values, self._dtype, after))


class QuantisedGroupedProducts(GroupedProducts):
    """Products of experts whose own weights are quantised; those of their adapters are not.

    Args:
        plain: What multiplies.
        blocks, dtype: As of :class:`QuantisedProduct`.
    """

    def __init__(self, plain: GroupedProducts, blocks: Blocks, dtype: torch.dtype) -> None:
        self.needs_host = plain.needs_host
        self._plain, self._blocks, self._dtype = plain, blocks, dtype

    def forward(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        return self._plain.forward(x, self._wide(weight), groups)

    def input_gradient(self, dy: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        return self._plain.input_gradient(dy, self._wide(weight), groups)

    def weight_gradient(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
        return self._plain.weight_gradient(dy, x, groups)

    def sums(self, dy: Tensor, groups: Groups) -> Tensor:
        return self._plain.sums(dy, groups)

    def _wide(self, weight: Tensor) -> Tensor:
        return self._blocks.dequantise(weight, self._dtype) if weight.dtype == torch.uint8 else weight
