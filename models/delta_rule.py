"""Layers with a state in place of attention: the gated delta rule (arXiv 2412.06464), as Qwen3-Next has it, and Kimi
Linear's, whose gates are of each channel and of low rank (arXiv 2510.26692)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megacore.models.blocks import Activation, column, replicated, row
from megacore.models.context import Context
from megacore.parallel.kernels.activation import FUNCTIONS
from megacore.parallel.kernels.again import keeping_inputs
from megacore.parallel.kernels.delta_rule import GATES, left, weighed
from megacore.parallel.kernels.upcast import wide
from megacore.parallel.parameters import Parameters


class GatedDeltaRule(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed]: the branch of a block that mixes tokens, by one state for each head.

    Queries, keys and values are projections of x that a short convolution has mixed. Heads are split over tp, those of
    values with those of keys that they share, and the convolution's channels with them.

    Args:
        name: Prefix of ``.inner``, which makes queries, keys, values, gates of the outputs, and for each head of values
            the share that is written and what fades; of ``.conv``, ``.fade``, ``.fade_bias`` and ``.out``. Where there
            is ``.gates_a``, gates are made by it and ``.gates_b``, and what fades by ``.fades_a`` and ``.fades_b``: of
            latents, which each rank makes of its own tokens.
        activation: That of the convolution, of :data:`parallel.kernels.activation.FUNCTIONS`.
        gate: That of the gates, of :data:`parallel.kernels.delta_rule.GATES`.
        norm: That of each head's outputs: [tokens, heads, value] -> same.
        most: The largest share that is written.
        least: That of :func:`parallel.kernels.delta_rule.left`.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        activation: str,
        gate: str,
        norm: nn.Module,
        most: float = 1.0,
        least: float | None = None,
    ) -> None:
        super().__init__()
        sizes = parameters.shards[f"{name}.inner.weight"].sizes
        self.heads, self.each = sizes["state_heads"], sizes["each"]
        self.key, self.value = sizes["state_key"], sizes["state_value"]
        self.name = name
        self.inner, self.out = column(parameters, f"{name}.inner"), row(parameters, f"{name}.out")
        self.of_latents = nn.ModuleList(
            nn.Sequential(replicated(parameters, f"{name}.{each}_a"), column(parameters, f"{name}.{each}_b"))
            for each in ("gates", "fades")
            if f"{name}.{each}_a.weight" in parameters
        )
        self.conv = parameters[f"{name}.conv.weight"]
        self.fade, self.fade_bias = parameters[f"{name}.fade"], parameters[f"{name}.fade_bias"]
        self.activation = Activation(FUNCTIONS[activation].of)
        self.weighed, self.norm, self.most = partial(weighed, gate=GATES[gate]), norm, most
        self.left = partial(left, least=least)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        inner = self.inner(x)
        keys, values = self.heads * self.key, self.heads * self.each
        qkv, width = 2 * keys + values * self.value, values * self.value
        if self.of_latents:
            (qkv, share), (z, fades) = inner.split([qkv, values], 1), (of(x) for of in self.of_latents)
        else:
            qkv, z, share, fades = inner.tensor_split([qkv, qkv + width, qkv + width + values], 1)
        return self.out(self._mixed(qkv, z, share, fades, context).flatten(1))

    @torch.compiler.disable  # which tokens are of one document is known where it runs
    def _mixed(self, qkv: Tensor, z: Tensor, share: Tensor, fades: Tensor, context: Context) -> Tensor:
        """qkv, z, share, fades: [tokens, what is projected] -> [tokens, heads of values, value]."""
        states = context.states
        assert states is not None  # of a model that has layers with a state
        keys, values = self.heads * self.key, self.heads * self.each
        qkv = self.activation(states.convolve(self.name, qkv, self.conv.flatten(1)))
        q, k, v = qkv.split([keys, keys, values * self.value], 1)
        q, k = (each.unflatten(1, (self.heads, self.key)) for each in (q, k))
        v, z = (each.unflatten(1, (self.heads, self.each, self.value)) for each in (v, z))
        (g,) = keeping_inputs(self.left, fades, self.fade.flatten(), self.fade_bias)
        share = wide(share).sigmoid()
        beta = share if self.most == 1 else self.most * share
        g, beta = (each.unflatten(1, (self.heads, self.each)) for each in (g, beta))
        y = self.norm(states.delta_rule(self.name, q, k, v, g, beta))
        (y,) = keeping_inputs(self.weighed, y, z)
        return y.flatten(1, 2)
