"""Dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740): fp16 gradients are kept from vanishing by a factor
on the loss, which is taken out of their sums again.

The factor is a power of two, so that it changes nothing but what would have vanished or overflowed. It lives on the
device and moves there, by numbers that are the same on every rank: all ranks leave out the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST = 2.0**24


@dataclass(frozen=True)
class Scaling:
    """The course of the loss scale, from ``initial`` on between bounds: after ``growth_interval`` steps in a row
    without overflow it doubles. All scales are powers of two."""

    initial: float = 2.0**16
    growth_interval: int = 2000
    minimum: float = 1.0
    maximum: float = LARGEST

    @property
    def scales(self) -> bool:
        """Whether losses are scaled: gradients are divided by the scale, also where it has no room to move."""
        return self != UNSCALED


UNSCALED = Scaling(1.0, 1, 1.0, 1.0)


class Scaler:
    """The loss scale of a run, on its device."""

    def __init__(self, scaling: Scaling, device: torch.device) -> None:
        self.scaling = scaling
        self.scale = torch.tensor(scaling.initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def overflow(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return whether a step is to be left out for want of a smaller scale, which there is: a bool scalar.

        A loss that is not finite is not the scale's doing, nor is a gradient that is not so even at the smallest one.
        """
        return torch.isfinite(loss) & ~torch.isfinite(norm) & (self.scale > self.scaling.minimum)

    def update(self, loss: Tensor, norm: Tensor, halted: Tensor | None = None) -> None:
        """Move after a step of this loss and gradient norm: half of it after an overflow, twice after enough steps
        without one; a loss that is not finite says nothing, nor does a step that is ``halted`` (a bool scalar)."""
        if not self.scaling.scales:
            return
        finite = torch.isfinite(norm)
        good = torch.where(finite, self.good_steps + 1, 0)
        grows = good >= self.scaling.growth_interval
        moved = self.scale * torch.where(finite, 1.0 + grows, 0.5)
        counts = torch.isfinite(loss) if halted is None else torch.isfinite(loss) & ~halted
        self.scale = torch.where(counts, moved.clamp_(self.scaling.minimum, self.scaling.maximum), self.scale)
        self.good_steps = torch.where(counts, torch.where(grows, 0, good), self.good_steps)

    def state(self) -> dict[str, Any] | None:
        """Return the state for ``trainer.json``; None where losses are not scaled. Reading it waits for the device."""
        return {"scale": float(self.scale), "good_steps": int(self.good_steps)} if self.scaling.scales else None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on as :meth:`state` was, within the bounds of now; None begins anew."""
        if state is not None and self.scaling.scales:
            self.scale.fill_(min(max(state["scale"], self.scaling.minimum), self.scaling.maximum))
            self.good_steps.fill_(state["good_steps"])
