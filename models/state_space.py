"""Layers with a state in place of attention: state spaces (Mamba-2, Dao and Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.models.blocks import Activation, column, row, times
from megacore.models.context import Context
from megacore.parallel.kernels.activation import FUNCTIONS
from megacore.parallel.kernels.again import keeping_inputs
from megacore.parallel.kernels.upcast import wide
from megacore.parallel.parameters import Parameters


class StateSpace(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed]: the branch of a block that mixes tokens, by one state for each head.

    Heads are split over tp, and the groups of B and C that they share with them; ranks share groups where there are
    fewer groups than ranks.

    Args:
        parameters: This rank's.
        name: Prefix of ``.inner``, which makes gates, x, B, C and the steps; of ``.conv``, ``.fade``, ``.step``,
            ``.skip`` and ``.out``.
        activation: That of the convolution, of :data:`parallel.kernels.activation.FUNCTIONS`.
        norm: That of the outputs: [tokens, heads, value] -> same; None: there is none.
        limits: The lower and the upper bound of the steps.
        factors: Those of gates, x, B, C and the steps; empty: there are none.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        activation: str,
        norm: nn.Module | None,
        limits: tuple[float, ...],
        factors: Sequence[float] = (),
    ) -> None:
        super().__init__()
        sizes = parameters.shards[f"{name}.inner.weight"].sizes
        self.heads, self.groups = sizes["state_heads"], sizes["state_groups"]
        self.key, self.value = sizes["state_key"], sizes["state_value"]
        self.name = name
        self.inner, self.out = column(parameters, f"{name}.inner"), row(parameters, f"{name}.out")
        self.conv, self.bias = parameters[f"{name}.conv.weight"], parameters.get(f"{name}.conv.bias")
        self.fade, self.step, self.skip = (parameters[f"{name}.{each}"] for each in ("fade", "step", "skip"))
        self.activation = Activation(FUNCTIONS[activation].of)
        self.norm, (self.least, self.most) = norm, limits
        self.factors = torch.tensor(factors, dtype=torch.float32, device="cpu").tolist()  # rounded, as there

    def forward(self, x: Tensor, context: Context) -> Tensor:
        y: Tensor = self.out(self._mixed(self.inner(x), context).flatten(1))
        return y

    @torch.compiler.disable  # which tokens are of one document is known where it runs
    def _mixed(self, x: Tensor, context: Context) -> Tensor:
        """x: [tokens, what is projected] -> [tokens, heads, value]."""
        states = context.states
        assert states is not None  # of a model that has layers with a state
        values, keys = self.heads * self.value, self.groups * self.key
        x = times(x, self.factors, (values, values, keys, keys, self.heads))
        z, xbc, steps = x.split([values, values + 2 * keys, self.heads], 1)
        xbc = states.convolve(self.name, xbc, self.conv.flatten(1))
        xbc = self.activation(xbc if self.bias is None else xbc + self.bias)
        x, b, c = xbc.split([values, keys, keys], 1)
        b, c = (each.unflatten(1, (self.groups, self.key)) for each in (b, c))
        x, z = (each.unflatten(1, (self.groups, -1, self.value)) for each in (x, z))
        step = F.softplus(wide(steps) + self.step).clamp(self.least, self.most)
        g, step = (each.unflatten(1, (self.groups, -1)) for each in (-wide(self.fade).exp() * step, step))
        y = states.state_space(self.name, c, b, x, g, step)
        (y,) = keeping_inputs(_weighed, y, x, z, self.skip)
        y = y.flatten(1, 2)
        return y if self.norm is None else self.norm(y)


def _weighed(y: Tensor, x: Tensor, z: Tensor, skip: Tensor) -> tuple[Tensor]:
    y = wide(y) + wide(x) * skip.view(*x.shape[1:3], 1)
    return ((y * F.silu(wide(z))).to(x.dtype),)
