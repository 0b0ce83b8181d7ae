"""Norms in torch's operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.parallel.kernels.again import keeping_inputs


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x: [..., n], weight: [n] or [heads, n] -> x / rms(x) * (weight + offset): [..., n]; the formula is in fp32 at
    least."""
    if weight.dim() == 1 and not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _in_fp32(lambda z: F.rms_norm(z, z.shape[-1:], None, eps), x, weight, None, offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """Normalize rows as :func:`rms_norm` does, less their mean and over their deviation, plus ``bias`` (as weight)."""
    if weight.dim() == 1 and not offset:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return _in_fp32(lambda z: F.layer_norm(z, z.shape[-1:], eps=eps), x, weight, bias, offset)


Normal = Callable[[Tensor], Tensor]


def _formula(normal: Normal, offset: float, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = normal(x.to(wide)) * (weight.to(wide) + offset)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def _in_fp32(normal: Normal, x: Tensor, weight: Tensor, bias: Tensor | None, offset: float) -> Tensor:
    if torch.compiler.is_compiling():
        return _formula(normal, offset, x, weight, bias)
    # None of what the formula makes in fp32 is kept.
    (y,) = keeping_inputs(lambda *inputs: (_formula(normal, offset, *inputs),), x, weight, bias)
    return y
