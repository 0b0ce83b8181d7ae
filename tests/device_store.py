"""What lies on the device of an optimizer that keeps its states there."""

from megacore.training.states.device_store import DeviceStore
from megacore.training.states.optimizer import Optimizer


def device_store(optimizer: Optimizer) -> DeviceStore:
    assert isinstance(optimizer.store, DeviceStore)
    return optimizer.store
