"""Layers that mix tokens by a gated short convolution, as LFM2 has them (Liquid AI 2025, arXiv 2511.23404)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacore.models.blocks import column, row
from megacore.models.context import Context
from megacore.parallel.parameters import Parameters


class ShortConvolution(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed]: a convolution of each channel, which one gate opens and another one
    closes. Channels are split over tp.

    Args:
        name: Prefix of ``.inner``, which makes the two gates and what is mixed; of ``.conv`` and ``.out``.
    """

    def __init__(self, parameters: Parameters, name: str) -> None:
        super().__init__()
        self.name = name
        self.inner, self.out = column(parameters, f"{name}.inner"), row(parameters, f"{name}.out")
        self.conv, self.bias = parameters[f"{name}.conv.weight"], parameters.get(f"{name}.conv.bias")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.out(self._mixed(self.inner(x), context))

    @torch.compiler.disable  # which tokens are of one document is known where it runs
    def _mixed(self, x: Tensor, context: Context) -> Tensor:
        """x: [tokens, 3 channels] -> [tokens, channels]."""
        assert context.states is not None  # of a model that has layers with a state
        before, after, x = x.chunk(3, 1)
        y = context.states.convolve(self.name, before * x, self.conv.flatten(1))
        return after * (y if self.bias is None else y + self.bias)
