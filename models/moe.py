"""A mixture of experts in the place of a feed-forward network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megacore.models.blocks import FeedForward, activation_after
from megacore.models.context import Context
from megacore.parallel import kernels
from megacore.parallel.balance import Balance
from megacore.parallel.layers.experts import Experts
from megacore.parallel.layers.router import Router
from megacore.parallel.parameters import Parameters
from megacore.parallel.routing import Routing

NORMED = ("router", "experts", "experts_out", "shared", "shared_out")
"""What may have norms of its own: what a part is given, or what it gives."""


class MixtureOfExperts(nn.Module):
    """Each token goes to a few of many feed-forward networks (Shazeer et al. 2017, arXiv 1701.06538), and to a shared
    one where there is one. x: [tokens/tp, embed] -> same.

    Args:
        name: Prefix of ``.router``, ``.experts.up``, ``.experts.down`` and, where they are declared, ``.shared.up``,
            ``.shared.down`` and ``.shared_gate``.
        routing: The rule by which experts are chosen and weighed.
        activation: That of all networks, as of :func:`models.blocks.activation_after`.
        norms: Those that there are, of :data:`NORMED`.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        layer: int,
        routing: Routing,
        activation: str,
        norms: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({each: norms.get(each, nn.Identity()) for each in NORMED})
        self.layer, self.scales_inputs = layer, routing.scales_inputs
        self.balance: Balance | None = None
        p, mesh = parameters, parameters.mesh
        others = (p.get(f"{name}.router.{each}") for each in ("bias", "correction", "scale", "table"))
        self.router = Router(p[f"{name}.router.weight"], routing, *others)
        split = p.layout.split
        self.experts = Experts(
            p[f"{name}.experts.up.weight"],
            p[f"{name}.experts.down.weight"],
            activation_after(p, f"{name}.experts.up", activation),
            routing.experts - routing.idle,
            mesh.along(*split["experts"]),
            mesh.along(*split["expert_mlp"]),
            p.get(f"{name}.experts.up.bias"),
            p.get(f"{name}.experts.down.bias"),
            routing.idle,
        )
        has_shared = f"{name}.shared.up.weight" in p
        self.shared = FeedForward(p, f"{name}.shared", activation) if has_shared else None
        self.shared_gate = p.get(f"{name}.shared_gate.weight")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        attach = None if self.balance is None else partial(self.balance.attach, self.layer, context.routed)
        chosen, weights = self.router(self.norms["router"](x), attach, context.routed.tokens)
        beside = self.shared and partial(self._beside, x, context)
        x = self.norms["experts"](x)
        if self.scales_inputs:  # then what a token gives each of its experts is a token of its own
            x = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
            ones = torch.ones_like(weights).reshape(-1, 1)
            y: Tensor = self.experts(x, chosen.reshape(-1, 1), ones, known=context.counts)
            y = self.norms["experts_out"](y.unflatten(0, chosen.shape).sum(1))
            return y if beside is None else y + beside()
        y = self.experts(x, chosen, weights, beside, context.counts, self.norms["experts_out"])
        if self.experts.idle:
            y = y + x * weights.masked_fill(chosen < self.experts.experts, 0).sum(-1, keepdim=True).to(x.dtype)
        return y

    def _beside(self, x: Tensor, context: Context) -> Tensor:
        assert self.shared is not None
        y: Tensor = self.norms["shared_out"](self.shared(self.norms["shared"](x), context))
        if self.shared_gate is None:
            return y
        return y * kernels.linear(x, self.shared_gate).sigmoid()
