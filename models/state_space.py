"""Layers with a state in place of attention: state spaces of heads (Mamba-2, Dao and Gu 2024, arXiv 2405.21060) and of
channels (Mamba, Gu and Dao 2023, arXiv 2312.00752)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.models.blocks import Activation, column, row, times
from megacore.models.context import Context
from megacore.parallel.collectives import all_gather
from megacore.parallel.kernels.activation import FUNCTIONS
from megacore.parallel.kernels.again import keeping_inputs
from megacore.parallel.kernels.upcast import wide
from megacore.parallel.parameters import Parameters


class StateSpace(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed]: the branch of a block that mixes tokens, by one state for each head.

    Heads are split over tp, and the groups of B and C that they share with them; ranks share groups where there are
    fewer groups than ranks.

    Args:
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
        return self.out(self._mixed(self.inner(x), context).flatten(1))

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


class SelectiveScan(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed]: the branch of a block that mixes tokens, by one state a channel.

    Channels are split over tp. B, C and what steps are made of are sums over all of them: each rank has those of its
    own tokens, and is told the others.

    Args:
        name: Prefix of ``.inner``, which makes x and gates; of ``.conv``; of ``.select``, which makes B, C and what
            ``.dt`` makes steps of; of ``.step``, ``.fade``, ``.skip`` and ``.out``.
        activation: That of the convolution, of :data:`parallel.kernels.activation.FUNCTIONS`.
        norms: Those of what steps are made of, of B and of C; None: there are none.
    """

    def __init__(
        self, parameters: Parameters, name: str, activation: str, norms: Sequence[nn.Module] | None = None
    ) -> None:
        super().__init__()
        sizes = parameters.shards[f"{name}.select.weight"].sizes
        self.pieces, self.name, self.group = (sizes["dt_latent"], *[sizes["state_key"]] * 2), name, parameters.mesh.tp
        self.inner, self.dt = column(parameters, f"{name}.inner"), column(parameters, f"{name}.dt")
        self.select, self.out = row(parameters, f"{name}.select"), row(parameters, f"{name}.out")
        self.conv, self.bias = parameters[f"{name}.conv.weight"], parameters.get(f"{name}.conv.bias")
        self.fade, self.step, self.skip = (parameters[f"{name}.{each}"] for each in ("fade", "step", "skip"))
        self.activation = Activation(FUNCTIONS[activation].of)
        self.norms = nn.ModuleList(norms or [nn.Identity()] * 3)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, z = self.inner(x).chunk(2, 1)
        x = self._convolved(x, context)
        dt, b, c = (norm(each) for norm, each in zip(self.norms, self.select(x).split(self.pieces, 1), strict=True))
        bc = all_gather(torch.cat([b, c], 1), self.group)
        return self.out(self._scanned(x, z, self.dt(dt), bc, context))

    @torch.compiler.disable  # which tokens are of one document is known where it runs
    def _convolved(self, x: Tensor, context: Context) -> Tensor:
        assert context.states is not None  # of a model that has layers with a state
        x = context.states.convolve(self.name, x, self.conv.flatten(1))
        return self.activation(x if self.bias is None else x + self.bias)

    @torch.compiler.disable
    def _scanned(self, x: Tensor, z: Tensor, steps: Tensor, bc: Tensor, context: Context) -> Tensor:
        """x, z, steps: [tokens, channels], bc: [tokens, 2 key] -> [tokens, channels]."""
        assert context.states is not None
        (b, c), (x, z) = bc.chunk(2, 1), (each[..., None] for each in (x, z))
        step, rate = F.softplus(wide(steps) + self.step), -wide(self.fade).exp()
        y = context.states.selective_scan(self.name, c, b, x, step, rate)
        (y,) = keeping_inputs(_weighed, y, x, z, self.skip)
        return y.flatten(1)


def _weighed(y: Tensor, x: Tensor, z: Tensor, skip: Tensor) -> tuple[Tensor]:
    y = wide(y) + wide(x) * skip.view(*x.shape[1:-1], 1)
    return ((y * F.silu(wide(z))).to(x.dtype),)
