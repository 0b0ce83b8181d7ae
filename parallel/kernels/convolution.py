"""Causal convolutions of each channel by itself, over few tokens: what stands shortly before a token is mixed in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.parallel.kernels.spans import Spans
from megacore.parallel.kernels.upcast import wide


def causal_convolution(x: Tensor, weight: Tensor, before: Tensor, spans: Spans) -> Tensor:
    """x: [t, channels] -> the same: the sum of a token's and the taps - 1 before it in its span, each times its tap.

    It is summed in fp32 at least, and x, ``before`` and the weight are all that is kept.

    Args:
        x: The tokens.
        weight: [channels, taps], the last for the token itself.
        before: [spans, taps - 1, channels], what stands before each span; zeros at the beginning of a document.
        spans: Those of the tokens.
    """
    return _Convolution.apply(x, weight, before, spans.earlier(weight.shape[1] - 1))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, before: Tensor, earlier: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, before, earlier)
        rows, taps = torch.cat([x, before.flatten(0, 1)]), wide(weight).unbind(1)
        y = wide(x) * taps[-1]
        for places, tap in zip(earlier, taps[-2::-1], strict=True):
            y += wide(rows.index_select(0, places)) * tap
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, before, earlier = ctx.saved_tensors
        rows, taps, dy = torch.cat([x, before.flatten(0, 1)]), wide(weight).unbind(1), wide(dy)
        drows = dy.new_zeros(rows.shape)
        drows[: len(x)] = dy * taps[-1]
        dtaps = [(dy * wide(x)).sum(0)]
        for places, tap in zip(earlier, taps[-2::-1], strict=True):
            drows.index_add_(0, places, dy * tap)  # no place twice
            dtaps.insert(0, (dy * wide(rows.index_select(0, places))).sum(0))
        dx, dbefore = drows.to(x.dtype).split([len(x), len(rows) - len(x)])
        return dx, torch.stack(dtaps, 1).to(weight.dtype), dbefore.view(before.shape), None
