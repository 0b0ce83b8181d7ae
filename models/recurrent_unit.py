"""Layers with a state in place of attention: real-gated linear recurrent units (De et al. 2024, arXiv 2402.19427)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.models.blocks import Activation, column, row
from megacore.models.context import Context
from megacore.parallel.kernels.activation import FUNCTIONS
from megacore.parallel.kernels.again import keeping_inputs
from megacore.parallel.kernels.upcast import wide
from megacore.parallel.parameters import Parameters

_RATE, _LEAST = 8.0, 0.25e-6
"""The logarithm of the most that a token lets fade, of a rate of 1; and what the root is a line below, of slope
1000."""


class RecurrentUnit(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed]: the branch of a block that mixes tokens, by one number a channel.

    Heads of channels are split over tp: those of a head make its gates, of what is written and of what fades.

    Args:
        name: Prefix of ``.inner``, which makes x and what weighs the outputs; of ``.conv``, ``.gates``,
            ``.gates_bias``, ``.fade`` and ``.out``.
        activation: That of what weighs the outputs, of :data:`parallel.kernels.activation.FUNCTIONS`.
    """

    def __init__(self, parameters: Parameters, name: str, activation: str) -> None:
        super().__init__()
        self.name, self.activation = name, Activation(FUNCTIONS[activation].of)
        self.inner, self.out = column(parameters, f"{name}.inner"), row(parameters, f"{name}.out")
        self.conv, self.bias = parameters[f"{name}.conv.weight"], parameters[f"{name}.conv.bias"]
        self.gates, self.gates_bias = parameters[f"{name}.gates"], parameters[f"{name}.gates_bias"]
        self.fade = parameters[f"{name}.fade"]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, z = self.inner(x).chunk(2, 1)
        y: Tensor = self.out(self._mixed(x, context) * self.activation(z))
        return y

    @torch.compiler.disable  # which tokens are of one document is known where it runs
    def _mixed(self, x: Tensor, context: Context) -> Tensor:
        """x: [tokens, channels] -> the same."""
        states, positions = context.states, context.positions
        assert states is not None and positions is not None  # of a model that has layers with a state
        x = states.convolve(self.name, x, self.conv.flatten(1)) + self.bias
        by_head = x.unflatten(1, (len(self.gates), -1)).transpose(0, 1)
        gates = torch.baddbmm(self.gates_bias[:, None], by_head, self.gates).transpose(0, 1)
        written, g = keeping_inputs(_gated, x, gates, self.fade, positions)
        return states.linear_recurrence(self.name, written, g)


def _gated(x: Tensor, gates: Tensor, fade: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """x: [t, channels], gates: [t, heads, 2 channels of a head], fade: [channels], positions: [t] -> what is written,
    and the logarithm of what is left. A token writes the less the more is left, and the first one of a document all."""
    write, forget = (each.flatten(1) for each in wide(gates).sigmoid().chunk(2, 2))
    g = -_RATE * forget * F.softplus(wide(fade))
    rest = -torch.expm1(2 * g)
    below = rest.detach().sqrt() + (rest - rest.detach()) * (0.5 * _LEAST**-0.5)
    share = torch.where(rest > _LEAST, rest.clamp(min=_LEAST).sqrt(), below)
    return (wide(x) * write * share.masked_fill(positions[:, None] == 0, 1.0)).to(x.dtype), g
