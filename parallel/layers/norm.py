"""Norms on tokens that are split over tp, of which each rank normalises its own, and on heads that are split.

Norms of tokens communicate nothing. Their weights are held by every tp rank, and each rank's gradient covers its own
tokens: the sum over replicas is the whole (law 4 of ``docs/meshes.md``).

All is computed in fp32 at least and rounded once, after the weight, as transformers does it for Gemma, OLMo-2 and
Cohere. For LLaMA, Qwen and Granite it rounds a first time before the weight; for Nemotron it forms weight + 1 in the
weight's dtype, where bf16 has no room for what was learned. In fp32 and wider these are the same numbers.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megacore.parallel import kernels
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.kernels.upcast import wide
from megacore.parallel.mesh import Group, Mesh


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467) of the last dimension.

    x: [tokens/tp, embed] -> same; or of each head, [tokens, heads/tp, head] -> same. The mean square is taken in fp32
    at least, whatever the dtype of ``x``.

    Args:
        features: Size of the last dimension.
        eps: Added to the mean square.
        dtype: That of the parameter.
    """

    def __init__(self, features: int, *, mesh: Mesh, eps: float = 1e-6, dtype: torch.dtype | None = None) -> None:
        self._assemble(nn.Parameter(torch.ones(features, dtype=dtype, device=mesh.device)), eps, mesh)

    @classmethod
    def of(cls, weight: nn.Parameter, eps: float, mesh: Mesh, offset: float = 0.0) -> Self:
        """Return the norm of a given parameter: weight [embed], or [head] or [heads/tp, head] for heads. ``offset`` is
        what is added to the weight, in fp32 at least."""
        norm = cls.__new__(cls)
        norm._assemble(weight, eps, mesh, offset)
        return norm

    def _assemble(self, weight: nn.Parameter, eps: float, mesh: Mesh, offset: float = 0.0) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps = weight, eps
        self._norm = kernels.rms_norm(mesh.device, offset, rows=weight.dim() > 1)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm (Ba et al. 2016, arXiv 1607.06450) of the last dimension; statistics in fp32.

    x: [tokens/tp, embed] -> same; or of each head, [tokens, heads/tp, head] -> same.

    Args:
        features: Size of the last dimension.
        eps: Added to the variance.
        dtype: That of the parameters.
    """

    def __init__(self, features: int, *, mesh: Mesh, eps: float = 1e-5, dtype: torch.dtype | None = None) -> None:
        weight = nn.Parameter(torch.ones(features, dtype=dtype, device=mesh.device))
        self._assemble(weight, nn.Parameter(torch.zeros_like(weight)), eps, mesh)

    @classmethod
    def of(cls, weight: nn.Parameter, bias: nn.Parameter | None, eps: float, mesh: Mesh, offset: float = 0.0) -> Self:
        """Return the norm of given parameters, each as for :meth:`RMSNorm.of`; a bias need not be."""
        norm = cls.__new__(cls)
        norm._assemble(weight, bias, eps, mesh, offset)
        return norm

    def _assemble(
        self, weight: nn.Parameter, bias: nn.Parameter | None, eps: float, mesh: Mesh, offset: float = 0.0
    ) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.eps = weight, bias, eps
        self._norm = kernels.layer_norm(mesh.device, offset, bias=bias is not None, rows=weight.dim() > 1)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.bias, self.eps)


class PlainNorm(nn.Module):
    """Norm of the last dimension without a weight (OLMo). x: [..., n] -> same, in fp32 at least.

    Args:
        kind: Root mean square norm, or layer norm.
        eps: Added to the mean square or the variance.
    """

    def __init__(self, kind: Literal["rms", "layer"], eps: float) -> None:
        super().__init__()
        self.norm, self.eps = F.rms_norm if kind == "rms" else F.layer_norm, eps

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(wide(x), x.shape[-1:], eps=self.eps)
        return y.to(x.dtype)


class SplitRMSNorm(nn.Module):
    """Root mean square norm over all heads of all tp ranks, or over each of some groups of successive ones.
    x: [tokens, heads/tp, head] -> same.

    Where a rank has no whole group the mean square is a sum over tp, a number a token and group, forward and backward.
    Where ranks share kv heads each head is on as many ranks as any other, so that the mean over all copies is that over
    all heads, and each copy's gradient is its part of the sum that law 4 takes.

    Args:
        weight: [heads/tp * head].
        eps: Added to the mean square.
        groups: Those of all ranks, a multiple of them or a divisor.
    """

    def __init__(self, weight: nn.Parameter, eps: float, mesh: Mesh, groups: int = 1) -> None:
        super().__init__()
        self.weight, self.eps, self.group, self.groups = weight, eps, mesh.tp, groups
        self.own = groups // mesh.tp.size
        self._alone = kernels.rms_norm(mesh.device, rows=self.own > 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.own == 1:  # for which there are kernels
            return self._alone(x.flatten(1), self.weight, self.eps).view(x.shape)
        if self.own > 1:
            rows = x.reshape(len(x), self.own, -1)
            return self._alone(rows, self.weight.view(self.own, -1), self.eps).view(x.shape)
        return _NormOverRanks.apply(x, self.weight, self.eps, self.group, self.groups)


class _NormOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: Group, groups: int) -> Tensor:
        z, w = wide(x), wide(weight).view(x.shape[1:])
        ctx.group, ctx.groups = group, groups
        scale = _mean(z.square(), group, groups).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (z * scale * w).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, r = ctx.saved_tensors
        w, d = wide(weight).view(x.shape[1:]), wide(dy)
        # With n what the weight multiplies: dx = r (w dy - n mean(n w dy)), a mean over the heads of all ranks.
        n = wide(x) * r
        product = n * d
        dx = r * (w * d - n * _mean(product * w, ctx.group, ctx.groups))
        return dx.to(x.dtype), product.sum(0).view(-1).to(weight.dtype), None, None, None


def _mean(x: Tensor, group: Group, groups: int) -> Tensor:
    """x: [tokens, heads/tp, head] -> [tokens, 1, 1], the mean over the heads of this rank's group on all ranks."""
    own = group.index * groups // group.size
    sums = all_reduce_(F.pad(x.mean((1, 2))[:, None], (own, groups - 1 - own)), group)
    return sums[:, own, None, None] / (group.size // groups)
