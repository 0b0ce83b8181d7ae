"""Several residual streams in place of one (manifold-constrained hyper-connections, Xie et al. 2025, arXiv 2512.24880).

The streams of a token stand side by side. What a branch is given is their weighted sum; what it gives is added to each
with a weight, and the streams are mixed by a matrix whose rows and columns each sum to about 1. The weights are made of
the token's streams themselves, in fp32 at least, by parameters that all ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.models.anatomy import Streams
from megacore.models.blocks import Block
from megacore.models.context import Context
from megacore.parallel.kernels.again import keeping_inputs
from megacore.parallel.kernels.upcast import wide
from megacore.parallel.parameters import Parameters


class _Weights(nn.Module):
    """Parameters that make weights of the streams of tokens.

    Args:
        name: Prefix of ``.mixes`` [weights, streams embed], ``.base`` [weights] and ``.scale``.
        eps: Added to the mean square of a token's streams, by whose root these are divided.
    """

    def __init__(self, parameters: Parameters, name: str, streams: Streams, eps: float) -> None:
        super().__init__()
        self.mixes, self.base, self.scale = (parameters[f"{name}.{each}"] for each in ("mixes", "base", "scale"))
        self.streams, self.eps = streams, eps

    def weights(self, x: Tensor) -> tuple[Tensor, ...]:
        """x: [tokens/tp, streams embed] -> weights of each token. Autograd keeps x and the parameters alone."""
        formula = partial(_weights, streams=self.streams, eps=self.eps)
        if torch.compiler.is_compiling():
            return formula(x, self.mixes, self.base, self.scale)
        return keeping_inputs(formula, x, self.mixes, self.base, self.scale)

    def apart(self, x: Tensor) -> Tensor:
        """x: [tokens/tp, streams embed] -> [tokens/tp, streams, embed]."""
        return x.unflatten(-1, (self.streams.count, -1))


class HyperConnection(_Weights):
    """The streams around one branch. x: [tokens/tp, streams embed] -> what the branch is given, [tokens/tp, embed], and
    what makes new streams of what it gives."""

    def forward(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        into, out, mix = self.weights(x)
        apart = self.apart(x)

        def added(y: Tensor) -> Tensor:
            return (out.to(x.dtype)[..., None] * y[:, None] + mix.to(x.dtype).mT @ apart).flatten(1)

        return (into[..., None] * apart).sum(1).to(x.dtype), added


class Collapse(_Weights):
    """One stream of several, and its norm. x: [tokens/tp, streams embed] -> [tokens/tp, embed]."""

    def __init__(self, parameters: Parameters, name: str, streams: Streams, eps: float, norm: nn.Module) -> None:
        super().__init__(parameters, name, streams, eps)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        (into,) = self.weights(x)
        return self.norm((into[..., None] * self.apart(x)).sum(1).to(x.dtype))


def _weights(
    x: Tensor, mixes: Tensor, base: Tensor, scale: Tensor, *, streams: Streams, eps: float
) -> tuple[Tensor, ...]:
    """-> [tokens, streams], by which a branch is given them; and where there are more weights than these, [tokens,
    streams], by which it gives to them, and [tokens, from streams, to streams]."""
    count, x = streams.count, wide(x)
    logits = F.linear(x, wide(mixes)) * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    sizes = [count] if len(base) == count else [count, count, count * count]
    parts = zip(logits.split(sizes, -1), wide(base).split(sizes), wide(scale), strict=True)
    into, *others = (part * factor + own for part, own, factor in parts)
    into = into.sigmoid() + streams.eps
    if not others:
        return (into,)
    mix = others[1].unflatten(-1, (count, count)).softmax(-1) + streams.eps
    for dim in (-2, *(-1, -2) * (streams.rounds - 1)):  # Sinkhorn and Knopp 1967
        mix = mix / (mix.sum(dim, keepdim=True) + streams.eps)
    return into, 2 * others[0].sigmoid(), mix


class HyperBlock(Block):
    """A block whose branches stand within several streams. x: [tokens/tp, streams embed] -> same.

    Args:
        attn, mlp, norms: Those of :class:`~models.blocks.Block`.
        around: {``attn`` or ``mlp``: the streams around that branch}.
    """

    def __init__(
        self,
        attn: nn.Module | None,
        mlp: nn.Module | None,
        norms: Mapping[str, nn.Module],
        around: Mapping[str, HyperConnection],
    ) -> None:
        super().__init__(attn, mlp, norms)
        self.around_attn, self.around_mlp = around["attn"], around["mlp"]

    def branches(self, x: Tensor, context: Context) -> Tensor:
        assert self.attn is not None and self.mlp is not None  # the streams are around both
        for around, norm, branch in (
            (self.around_attn, self.attn_norm, self.attn),
            (self.around_mlp, self.mlp_norm, self.mlp),
        ):
            given, added = around(x)
            x = added(branch(norm(given), context))
        return x


class Repeated(nn.Module):
    """microbatch -> [tokens/tp, streams embed]: every stream begins as the embedding."""

    def __init__(self, embedding: nn.Module, count: int) -> None:
        super().__init__()
        self.embedding, self.count = embedding, count

    def forward(self, microbatch: object) -> Tensor:
        return self.embedding(microbatch).repeat(1, self.count)
