"""Muon on the matrices of a rank's parts: one moment, and updates that are made of whole matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from megacore.parallel.gradients.buckets import OwnedShard
from megacore.parallel.gradients.matrices import Matrices
from megacore.parallel.kernels.newton_schulz import orthogonalised
from megacore.training.states.rule import Rule


class WholeMatrices:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) on the parts that are of matrices, each with
    what is updated for it, contiguous and of the dtype ``value``. Weight decay is as AdamW's."""

    def __init__(self, rule: Rule, parts: Mapping[OwnedShard, Tensor], value: torch.dtype, matrices: Matrices) -> None:
        assert rule.muon is not None
        self._section, self._weight_decay, self._parts, self._dtype = rule.muon, rule.weight_decay, parts, value
        self._lr_ratio = 1.0 if rule.muon.lr is None else rule.muon.lr / rule.lr
        self._matrices = matrices
        self.means = {part: torch.zeros_like(tensor, dtype=rule.moments or value) for part, tensor in parts.items()}

    def update(self, lr: float, go: Tensor, divisor: Tensor | None) -> None:
        """Update all parts from their gradients, which count no more then; arguments as of
        :meth:`~megacore.training.states.device_store.DeviceStore.update`.

        Matrices travel and are multiplied in bf16, those in fp64 in that.
        """
        section, flat = self._section, dict[OwnedShard, tuple[Tensor, Tensor, Tensor]]()
        goes = go.to(self._dtype)
        rate, share = goes * (lr * self._lr_ratio), goes * (1 - section.momentum)
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
            return (gradient.lerp(wide, section.momentum) if section.nesterov else wide).to(dtype)

        def write(part: OwnedShard, where: slice, values: Tensor, factor: float) -> None:
            flat[part][0][where].mul_(1 - rate * self._weight_decay).sub_(values * (rate * factor))

        self._matrices.update(dtype, read, partial(orthogonalised, steps=section.steps), self._factor, write)

    def _factor(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate: Jordan's, or that of Liu et al. 2025 (arXiv 2502.16982), with which
        updates are as large as AdamW's."""
        if self._section.scale == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))
