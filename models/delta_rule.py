"""Layers with a state in place of attention: the gated delta rule (arXiv 2412.06464), as Qwen3-Next has it."""

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


class GatedDeltaRule(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed]: the branch of a block that mixes tokens, by one state for each head.

    Queries, keys and values are projections of x that a short convolution has mixed. Heads are split over tp, those of
    values with those of keys that they share, and the convolution's channels with them.

    Args:
        parameters: This rank's.
        name: Prefix of ``.inner``, which makes queries, keys, values, gates of the outputs, and for each head of values
            the share that is written and what fades; of ``.conv``, ``.fade``, ``.fade_bias`` and ``.out``.
        activation: That of the convolution, of :data:`parallel.kernels.activation.FUNCTIONS`.
        norm: That of each head's outputs: [tokens, heads, value] -> same.
    """

    def __init__(self, parameters: Parameters, name: str, activation: str, norm: nn.Module) -> None:
        super().__init__()
        sizes = parameters.shards[f"{name}.inner.weight"].sizes
        self.heads, self.each = sizes["state_heads"], sizes["each"]
        self.key, self.value = sizes["state_key"], sizes["state_value"]
        self.name = name
        self.inner, self.out = column(parameters, f"{name}.inner"), row(parameters, f"{name}.out")
        self.conv = parameters[f"{name}.conv.weight"]
        self.fade, self.fade_bias = parameters[f"{name}.fade"], parameters[f"{name}.fade_bias"]
        self.activation = Activation(FUNCTIONS[activation].of)
        self.norm = norm

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y: Tensor = self.out(self._mixed(self.inner(x), context).flatten(1))
        return y

    @torch.compiler.disable  # which tokens are of one document is known where it runs
    def _mixed(self, x: Tensor, context: Context) -> Tensor:
        """x: [tokens, what is projected] -> [tokens, heads of values, value]."""
        states = context.states
        assert states is not None  # of a model that has layers with a state
        keys, values = self.heads * self.key, self.heads * self.each
        qkv, z, share, fades = x.split([2 * keys + values * self.value, values * self.value, values, values], 1)
        qkv = self.activation(states.convolve(self.name, qkv, self.conv.flatten(1)))
        q, k, v = qkv.split([keys, keys, values * self.value], 1)
        q, k = (each.unflatten(1, (self.heads, self.key)) for each in (q, k))
        v, z = (each.unflatten(1, (self.heads, self.each, self.value)) for each in (v, z))
        g = -wide(self.fade).exp() * F.softplus(wide(fades) + self.fade_bias)
        g, beta = (each.unflatten(1, (self.heads, self.each)) for each in (g, wide(share).sigmoid()))
        y = self.norm(states.delta_rule(self.name, q, k, v, g, beta))
        (y,) = keeping_inputs(_weighed, y, z)
        return y.flatten(1, 2)


def _weighed(y: Tensor, z: Tensor) -> tuple[Tensor]:
    return ((wide(y) * F.silu(wide(z))).to(y.dtype),)
