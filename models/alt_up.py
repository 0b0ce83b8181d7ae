"""Several streams of which a layer computes one: it predicts them all, and corrects them by what it has computed
(AltUp, Baykal et al. 2023, arXiv 2301.13310). The streams of a token stand side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.models.anatomy import AltUp
from megacore.models.blocks import Block
from megacore.models.context import Context
from megacore.models.decoder import rounded
from megacore.parallel.kernels.upcast import wide
from megacore.parallel.parameters import Parameters


class AltUpBlock(Block):
    """x: [tokens/tp, streams embed] -> same, of which one stream goes through the branches.

    Args:
        attn, mlp, norms, others: Those of :class:`~models.blocks.Block`, with ``inputs``.
        name: Prefix of ``.router`` [streams, embed], ``.predict`` [streams streams, streams], ``.correct`` [streams,
            streams] and ``.scale`` [embed].
        norm: The norm of what the router is given.
    """

    def __init__(
        self,
        attn: nn.Module | None,
        mlp: nn.Module | None,
        norms: Mapping[str, nn.Module],
        parameters: Parameters,
        name: str,
        streams: AltUp,
        norm: nn.Module,
        **others: Any,
    ) -> None:
        super().__init__(attn, mlp, norms, **others)
        self.router, self.predict, self.correct, self.told_scale = (
            parameters[f"{name}.{each}"] for each in ("router", "predict", "correct", "scale")
        )
        self.streams, self.norm = streams, norm
        self.router_scale = rounded(1 / self.router.shape[1], self.router.dtype)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        assert self.inputs is not None  # which all streams but one are told
        active = self.streams.active
        predict: Tensor = self.predict
        correct: Tensor = self.correct
        if self.training and (limit := self.streams.limit) is not None:
            # transformers cuts the weights that predict themselves, beyond which they still have gradients.
            predict = predict.detach().clamp(-limit, limit) + (predict - predict.detach())
            correct = correct.clamp(-limit, limit)
        x = x.unflatten(-1, (self.streams.count, -1))
        mix = F.linear(self.routes(x[:, active]), predict).unflatten(-1, (self.streams.count, -1))
        x = torch.baddbmm(x, mix, x)
        y = self.branches(x[:, active], context)
        x = torch.addcmul(x, (F.linear(self.routes(y), correct) + 1)[..., None], (y - x[:, active])[:, None])
        told = self.inputs(x[:, active] * self.told_scale, context)
        return torch.cat([x[:, :1], x[:, 1:] + told[:, None]], 1).flatten(1)

    def routes(self, x: Tensor) -> Tensor:
        """x: [tokens/tp, embed] -> [tokens/tp, streams], between -1 and 1."""
        return wide(F.linear(self.norm(x) * self.router_scale, self.router)).tanh().to(x.dtype)


class Spread(nn.Module):
    """microbatch -> [tokens/tp, streams embed]: the embedding and projections of it, all of one size.

    Args:
        weight: [other streams, embed, embed].
    """

    def __init__(self, embedding: nn.Module, weight: nn.Parameter) -> None:
        super().__init__()
        self.embedding, self.weight = embedding, weight

    def forward(self, microbatch: object) -> Tensor:
        x = self.embedding(microbatch)
        return torch.cat([x, *(_of_size(x, F.linear(x, each)) for each in self.weight)], -1)


class Mean(nn.Module):
    """The norm of the mean of the first stream and projections of the others, all of its size.
    x: [tokens/tp, streams embed] -> [tokens/tp, embed].

    Args:
        weight: [other streams, embed, embed].
    """

    def __init__(self, weight: nn.Parameter, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.norm = weight, norm

    def forward(self, x: Tensor) -> Tensor:
        first, *others = x.chunk(len(self.weight) + 1, -1)
        pairs = zip(others, self.weight, strict=True)
        every = torch.stack([first, *(_of_size(first, F.linear(other, each)) for other, each in pairs)])
        return self.norm(every.mean(0))


def _of_size(x: Tensor, y: Tensor) -> Tensor:
    """x, y: [tokens, embed] -> y with the root mean square of x."""
    squares = (wide(each).square().mean(-1, keepdim=True) for each in (x, y))
    # Where x is nothing, as an embedding of padding may be, the root has no gradient.
    least = torch.finfo(x.dtype).tiny, 1e-5
    size, own = (square.clamp(min=low).sqrt() for square, low in zip(squares, least, strict=True))
    return (wide(y) * (size / own)).to(x.dtype)
