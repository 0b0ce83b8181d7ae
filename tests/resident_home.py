"""What lies on the device of an optimizer that keeps its states there."""

from __future__ import annotations

from megacore.run.optimizer import Optimizer
from megacore.run.states.resident import Resident


def resident(optimizer: Optimizer) -> Resident:
    assert isinstance(optimizer.home, Resident)
    return optimizer.home
