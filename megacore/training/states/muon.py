"""Muon on the matrices of a rank's parts: one moment, and updates that are made of whole matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megacore.parallel.gradients.buckets import OwnedShard
from megacore.parallel.gradients.matrices import Matrices
from megacore.parallel.kernels.newton_schulz import orthogonalised


@dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), by the names of a recipe's section
    ``muon``. ``original``: whether the factor of the learning rate for a matrix [rows, columns] is Jordan's, or that of
    Liu et al. 2025 (arXiv 2502.16982), with which updates are as large as AdamW's; ``lr_ratio``: the learning rate of
    matrices over that of the rest."""

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    original: bool = False
    lr_ratio: float = 1.0

    def factor(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate."""
        if self.original:
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


class WholeMatrices:
    """The parts that are of matrices, each with what is updated for it, contiguous and of the dtype ``value``, and the
    means of their gradients, of the dtype ``moments``, if it is another. ``weight_decay`` is as AdamW's."""

    def __init__(
        self,
        rule: Muon,
        weight_decay: float,
        parts: Mapping[OwnedShard, Tensor],
        value: torch.dtype,
        moments: torch.dtype | None,
        matrices: Matrices,
    ) -> None:
        self._rule, self._weight_decay, self._parts, self._dtype = rule, weight_decay, parts, value
        self._matrices = matrices
        self.means = {part: torch.zeros_like(tensor, dtype=moments or value) for part, tensor in parts.items()}

    def update(self, lr: float, go: Tensor, divisor: Tensor | None) -> None:
        """Update all parts from their gradients, which count no more then; arguments as of
        :meth:`~megacore.training.states.device_store.DeviceStore.update`.

        Matrices travel and are multiplied in bf16, those in fp64 in that.
        """
        rule, flat = self._rule, dict[OwnedShard, tuple[Tensor, Tensor, Tensor]]()
        goes = go.to(self._dtype)
        rate, share = goes * (lr * rule.lr_ratio), goes * (1 - rule.momentum)
        for part, tensor in self._parts.items():
            gradient, mean = part.gradient, self.means[part]
            if divisor is not None:
                gradient.div_(divisor)
            gradient.masked_fill_(~go, 0)  # where it does not go nothing moves
            mean.copy_(mean.to(self._dtype).lerp_(gradient, share))
            flat[part] = tensor.view(-1), gradient.reshape(-1), mean.view(-1)
        dtype = self._dtype if self._dtype == torch.float64 else torch.bfloat16

        def read(part: OwnedShard, where: slice) -> Tensor:
            _, gradient, mean = (each[where] for each in flat[part])
            wide = mean.to(self._dtype)
            return (gradient.lerp(wide, rule.momentum) if rule.nesterov else wide).to(dtype)

        def write(part: OwnedShard, where: slice, values: Tensor, factor: float) -> None:
            flat[part][0][where].mul_(1 - rate * self._weight_decay).sub_(values * (rate * factor))

        self._matrices.update(dtype, read, partial(orthogonalised, steps=rule.steps), rule.factor, write)
