"""Layers with a state in place of attention: lightning attention (Qin et al. 2024, arXiv 2405.17381), as MiniMax-01 has
it (arXiv 2501.08313)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacore.models.blocks import Activation, column, row
from megacore.models.context import Context
from megacore.parallel.kernels.activation import FUNCTIONS
from megacore.parallel.kernels.again import keeping_inputs
from megacore.parallel.kernels.delta_rule import weighed
from megacore.parallel.kernels.upcast import wide
from megacore.parallel.parameters import Parameters


class LightningAttention(nn.Module):
    """x: [tokens/tp, embed] -> [tokens/tp, embed]: the branch of a block that mixes tokens, by one state for each head,
    of which every token leaves the same share. Heads are split over tp.

    Args:
        name: Prefix of ``.inner``, which makes queries, keys, values and gates of the outputs, and of ``.out``.
        activation: That of queries, keys and values, of :data:`parallel.kernels.activation.FUNCTIONS`.
        norm: That of all outputs: [tokens, heads, value] -> same.
        depth: The layers before this one, as a part of those before the last one.
    """

    def __init__(self, parameters: Parameters, name: str, activation: str, norm: nn.Module, depth: float) -> None:
        super().__init__()
        sizes, tp = parameters.shards[f"{name}.inner.weight"].sizes, parameters.mesh.tp
        self.heads, self.key, self.value = (sizes[f"state_{each}"] for each in ("heads", "key", "value"))
        self.name = name
        self.inner, self.out = column(parameters, f"{name}.inner"), row(parameters, f"{name}.out")
        self.activation, self.norm = Activation(FUNCTIONS[activation].of), norm
        # In fp32, in the order of operations of transformers.
        numbers = torch.arange(1, self.heads * tp.size + 1, dtype=torch.float32, device="cpu")
        rates = (1 / 2 ** (8 / len(numbers))) ** numbers * (1 - depth + 1e-5)
        self.rates = rates.chunk(tp.size)[tp.index].to(parameters.mesh.device)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.out(self._mixed(self.inner(x), context))

    @torch.compiler.disable  # which tokens are of one document is known where it runs
    def _mixed(self, x: Tensor, context: Context) -> Tensor:
        """x: [tokens, what is projected] -> [tokens, heads value]."""
        states = context.states
        assert states is not None  # of a model that has layers with a state
        keys, values = self.heads * self.key, self.heads * self.value
        qkv, gates = x.split([2 * keys + values, values], 1)
        q, k, v = (each.unflatten(1, (self.heads, -1)) for each in self.activation(qkv).split([keys, keys, values], 1))
        g = -self.rates.to(wide(x[:0]).dtype).expand(len(x), -1)[..., None]
        y = self.norm(states.state_space(self.name, q, k, v[:, :, None], g, torch.ones_like(g)).flatten(1, 2))
        (y,) = keeping_inputs(_gated, y.flatten(1), gates)
        return y


def _gated(y: Tensor, gates: Tensor) -> tuple[Tensor]:
    return weighed(y, gates, torch.sigmoid)
