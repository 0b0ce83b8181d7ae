"""Norms on tokens that are split over tp: each rank normalises its own, so nothing is communicated.

Their weights are held by every tp rank, and each rank's gradient covers its own tokens: the sum over replicas is the
whole (law 4 of ``docs/meshes.md``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallel import kernels
from parallel.mesh import Mesh


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467). x: [tokens/tp, embed] -> same.

    The mean square is taken in fp32 at least, whatever the dtype of ``x``.
    """

    def __init__(self, weight: nn.Parameter | int, eps: float, mesh: Mesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(weight, device=mesh.device)) if isinstance(weight, int) else weight
        self.eps = eps
        self._norm = kernels.rms_norm(mesh.device)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm with bias (Ba et al. 2016, arXiv 1607.06450). x: [tokens/tp, embed] -> same; statistics in fp32."""

    def __init__(self, weight: nn.Parameter | int, bias: nn.Parameter | None, eps: float, mesh: Mesh) -> None:
        super().__init__()
        if isinstance(weight, int):
            bias = nn.Parameter(torch.zeros(weight, device=mesh.device))
            weight = nn.Parameter(torch.ones(weight, device=mesh.device))
        if bias is None:
            raise ValueError("LayerNorm of a given weight needs its bias")
        self.weight, self.bias, self.eps = weight, bias, eps
        self._norm = kernels.layer_norm(mesh.device)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.bias, self.eps)
