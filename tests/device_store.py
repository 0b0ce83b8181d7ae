"""What lies on the device of an optimizer that keeps its states there."""

from megacore.training.optimizer import Optimizer
from megacore.training.states.device_store import DeviceStore


def device_store(optimizer: Optimizer) -> DeviceStore:
    assert isinstance(optimizer.store, DeviceStore)
    return optimizer.store
