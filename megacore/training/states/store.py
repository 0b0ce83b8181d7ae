"""The states that an optimizer keeps of what it updates, and the interface of their stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megacore.store.index import MASTER, MOMENTS
from parallel.gradients.buckets import Elements, OwnedShard


@dataclass(frozen=True)
class Rule:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), and in which numbers.

    Args:
        lr, betas, eps, weight_decay: The paper's; each step has a learning rate of its own.
        master_weights: Whether parameters narrower than fp32 are updated through an fp32 copy.
        moments: dtype of the moments; None for that of what is updated.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    master_weights: bool
    moments: torch.dtype | None

    def value(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of what is updated for a parameter of this one."""
        return torch.float32 if self.master_weights and parameter.itemsize < 4 else parameter

    def kept(self, parameter: torch.dtype) -> Mapping[str, torch.dtype]:
        """Return {state: dtype} of what is kept beside a parameter of this dtype: a wider master, moments."""
        value = self.value(parameter)
        moments = dict.fromkeys(MOMENTS, self.moments or value)
        return moments if value == parameter else {MASTER: value, **moments}


class StateStore(Protocol):
    """A store of masters and moments, and the updates made there."""

    @property
    def updates(self) -> int:
        """Steps taken, without those that were left out. Reading it may wait for the device."""
        ...

    @updates.setter
    def updates(self, count: int) -> None: ...

    def update(self, lr: float, go: Tensor, divisor: Tensor | None) -> None:
        """Update the values of all parts from their gradients, which count no more then.

        Args:
            lr: Learning rate.
            go: A bool scalar on the device; where it is false nothing changes.
            divisor: An fp32 scalar on the device that the update divides gradients by where it reads them; or None.
        """
        ...

    def of(self, part: OwnedShard, state: str) -> Elements:
        """Return the state of a part: a moment, or what is updated in place of the part's values."""
        ...

    @property
    def masters(self) -> bool:
        """Whether what is updated are not, or not all, the parameters themselves."""
        ...
