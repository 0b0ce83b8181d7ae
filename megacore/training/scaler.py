"""Dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740): fp16 gradients are kept from vanishing by a factor
on the loss, which is taken out of their sums again.

The factor is a power of two, so that it changes nothing but what would have vanished or overflowed. It lives on the
device and moves there, by numbers that are the same on every rank: all ranks leave out the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megacore.config import LossScaleConfig

LARGEST = 2.0**24


class Scaler:
    """The loss scale of a run, on its device: after ``growth_interval`` steps in a row without overflow it doubles, up
    to ``LARGEST``. All scales are powers of two; without a section it stays 1."""

    def __init__(self, section: LossScaleConfig | None, device: torch.device) -> None:
        self.section = section
        self.scale = torch.tensor(1.0 if section is None else section.initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def overflow(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return whether a step is to be left out for want of a smaller scale, which there is: a bool scalar.

        A loss that is not finite is not the scale's doing, nor is a gradient that is not so even at the smallest one.
        """
        smallest = 1.0 if self.section is None else self.section.minimum
        return torch.isfinite(loss) & ~torch.isfinite(norm) & (self.scale > smallest)

    def update(self, loss: Tensor, norm: Tensor, halted: Tensor | None = None) -> None:
        """Move after a step of this loss and gradient norm: half of it after an overflow, twice after enough steps
        without one; a loss that is not finite says nothing, nor does a step that is ``halted`` (a bool scalar)."""
        if self.section is None:
            return
        finite = torch.isfinite(norm)
        good = torch.where(finite, self.good_steps + 1, 0)
        grows = good >= self.section.growth_interval
        moved = self.scale * torch.where(finite, 1.0 + grows, 0.5)
        counts = torch.isfinite(loss) if halted is None else torch.isfinite(loss) & ~halted
        self.scale = torch.where(counts, moved.clamp_(self.section.minimum, LARGEST), self.scale)
        self.good_steps = torch.where(counts, torch.where(grows, 0, good), self.good_steps)

    def state(self) -> dict[str, Any] | None:
        """Return the state for ``trainer.json``; None where losses are not scaled. Reading it waits for the device."""
        return None if self.section is None else {"scale": float(self.scale), "good_steps": int(self.good_steps)}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on as :meth:`state` was, within the bounds of now; None begins anew."""
        if state is not None and self.section is not None:
            self.scale.fill_(min(max(state["scale"], self.section.minimum), LARGEST))
            self.good_steps.fill_(state["good_steps"])
