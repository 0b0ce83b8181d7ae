"""What lies on the device of an optimizer that keeps its states there."""

from __future__ import annotations

from megacore.optimizer import Optimizer
from megacore.states.resident import Resident


def resident(optimizer: Optimizer) -> Resident:
    assert isinstance(optimizer.home, Resident)
    return optimizer.home
