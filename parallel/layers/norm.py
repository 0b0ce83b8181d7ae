"""Norms on tokens that are split over tp: each rank normalises its own, so nothing is communicated.

Their weights are held by every tp rank, and each rank's gradient covers its own tokens: the sum over replicas is the
whole (law 4 of ``docs/meshes.md``).
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from parallel import kernels
from parallel.mesh import Mesh


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467). x: [tokens/tp, embed] -> same.

    The mean square is taken in fp32 at least, whatever the dtype of ``x``.

    Args:
        features: Size of the last dimension.
        mesh: The live mesh.
        eps: Added to the mean square.
        dtype: Of the parameter.
    """

    def __init__(self, features: int, *, mesh: Mesh, eps: float = 1e-6, dtype: torch.dtype | None = None) -> None:
        self._assemble(nn.Parameter(torch.ones(features, dtype=dtype, device=mesh.device)), eps, mesh)

    @classmethod
    def of(cls, weight: nn.Parameter, eps: float, mesh: Mesh) -> Self:
        """The norm of a given parameter: weight [embed]."""
        norm = cls.__new__(cls)
        norm._assemble(weight, eps, mesh)
        return norm

    def _assemble(self, weight: nn.Parameter, eps: float, mesh: Mesh) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps = weight, eps
        self._norm = kernels.rms_norm(mesh.device)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm with bias (Ba et al. 2016, arXiv 1607.06450). x: [tokens/tp, embed] -> same; statistics in fp32.

    Args:
        features: Size of the last dimension.
        mesh: The live mesh.
        eps: Added to the variance.
        dtype: Of the parameters.
    """

    def __init__(self, features: int, *, mesh: Mesh, eps: float = 1e-5, dtype: torch.dtype | None = None) -> None:
        weight = nn.Parameter(torch.ones(features, dtype=dtype, device=mesh.device))
        self._assemble(weight, nn.Parameter(torch.zeros_like(weight)), eps, mesh)

    @classmethod
    def of(cls, weight: nn.Parameter, bias: nn.Parameter, eps: float, mesh: Mesh) -> Self:
        """The norm of given parameters: weight and bias [embed]."""
        norm = cls.__new__(cls)
        norm._assemble(weight, bias, eps, mesh)
        return norm

    def _assemble(self, weight: nn.Parameter, bias: nn.Parameter, eps: float, mesh: Mesh) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias, self.eps = weight, bias, eps
        self._norm = kernels.layer_norm(mesh.device)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.bias, self.eps)
