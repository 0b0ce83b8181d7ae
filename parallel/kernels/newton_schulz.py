"""The orthogonal factor of matrices, nearly, by products alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Those of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon): singular values come to 0.7 to 1.2, small
ones in the fewest steps."""
EPSILON = 1e-7
"""The norm that a matrix is taken to have at least."""


def orthogonalised(matrices: Sequence[Tensor], steps: int) -> list[Tensor]:
    """Return for each matrix U S V^T [rows, columns], in its own dtype, about U V^T by so many steps of Newton and
    Schulz. Those of one shape are multiplied together."""
    alike: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        alike.setdefault(matrix.shape, []).append(number)
    made = [*matrices]
    for shape, numbers in alike.items():
        x = torch.stack([matrices[number] for number in numbers])
        wide = x.mT if shape[0] > shape[1] else x
        wide = wide / wide.flatten(1).norm(dim=1).clamp(min=EPSILON)[:, None, None]
        a, b, c = COEFFICIENTS
        for _ in range(steps):
            gram = wide @ wide.mT
            wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
        for number, each in zip(numbers, wide.mT if shape[0] > shape[1] else wide, strict=True):
            made[number] = each
    return made
