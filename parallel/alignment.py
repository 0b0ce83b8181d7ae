"""What indexers learn from (DeepSeek-AI 2025, arXiv 2512.02556, section 2.1): that their scores of the tokens that they
choose say what the attention makes of these.

It is a term of the objective and none of the loss, as the balance of experts is (:mod:`parallel.balance`): its gradient
enters in the backward, and reaches the weights of indexers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.balance import RoutedTokens
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import Mesh


class Alignment:
    """The divergences of all indexers of this rank from their attention over the steps of a run.

    Args:
        layers: The layers of this rank that have indexers.
        coefficient: The coefficient of the mean divergence of the tokens of the global batch, in each layer.
    """

    def __init__(self, layers: Sequence[int], mesh: Mesh, coefficient: float) -> None:
        self.layers, self.mesh, self.coefficient = tuple(layers), mesh, coefficient
        self.values = torch.zeros(len(self.layers), dtype=torch.float64, device=mesh.device)
        """[layers], this rank's part of the mean divergence of a step, without the coefficient."""

    def begin(self, tokens: Tensor, scale: Tensor) -> None:
        """Start a step.

        Args:
            tokens: The number of tokens of the global batch that are no padding, an fp64 scalar of at least 1.
            scale: The factor of all gradients, a scalar.
        """
        self.values.zero_()
        self._tokens, self._factor = tokens, scale.double() * self.coefficient / tokens

    def attach(self, layer: int, tokens: RoutedTokens, y: Tensor, divergences: Tensor) -> Tensor:
        """Let the gradient of the divergences enter where that of y does.

        Args:
            tokens: The n tokens.
            y: What the attention makes of them.
            divergences: [n].
        """
        if tokens.padding is not None:
            divergences = divergences.masked_fill(tokens.padding, 0)
        return _EnterDivergence.apply(y, divergences.sum(), self, self.layers.index(layer))

    @torch.no_grad()
    def read(self, layers: int) -> Tensor:
        """Return the mean divergence of the last step in each layer of a model of so many, fp64 [layers] on the host, 0
        where there is no indexer; all ranks call this, and wait for the step."""
        table = self.values.new_zeros(layers)
        for layer, value in zip(self.layers, self.values, strict=True):
            table[layer] = value
        return all_reduce_(table, self.mesh.world).cpu()


class _EnterDivergence(torch.autograd.Function):
    """y -> the same, where the gradient of a divergence enters."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, divergence: Tensor, alignment: Alignment, at: int) -> Tensor:
        ctx.save_for_backward(divergence)
        ctx.alignment, ctx.at = alignment, at
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (divergence,), alignment = ctx.saved_tensors, ctx.alignment
        alignment.values[ctx.at] += divergence / alignment._tokens
        return dy, alignment._factor.to(divergence.dtype), None, None
