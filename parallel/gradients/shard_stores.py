"""Stores of a rank's own slice of parameters while the whole is gone, which put it into the whole again."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megacore.parallel.collectives import Pending, start_all_gather_
from megacore.parallel.mesh import Group


class ShardStore(Protocol):
    """Keeps slices."""

    @property
    def away(self) -> bool:
        """Whether even a slice that is everything lives elsewhere than the whole."""
        ...

    def keep(self, own: Tensor) -> Tensor:
        """Keep ``own``: [n/ranks] -> the same in memory of its own."""
        ...

    def gather(self, own: Tensor, whole: Tensor, group: Group) -> Pending:
        """Gather ``own``: [n/ranks] of each rank -> whole: [n], filled in place."""
        ...


class OnDevice:
    """A slice that stays on the device."""

    away = False

    def keep(self, own: Tensor) -> Tensor:
        return own.clone()

    def gather(self, own: Tensor, whole: Tensor, group: Group) -> Pending:
        whole.chunk(group.size)[group.index].copy_(own)
        return start_all_gather_(whole, group)


class OnHost:
    """A slice in host memory, pinned for a GPU; it is copied on a stream of its own, beside the computation, and
    gathered then.

    Args:
        device: The device of the whole.
    """

    away = True

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type != "cpu"
        self._on: Any = torch.get_device_module(device)
        self._stream = self._on.Stream()

    def keep(self, own: Tensor) -> Tensor:
        return torch.empty(own.shape, dtype=own.dtype, pin_memory=self._pinned).copy_(own)

    def gather(self, own: Tensor, whole: Tensor, group: Group) -> Pending:
        self._stream.wait_stream(self._on.current_stream())  # whose memory this was
        with self._on.stream(self._stream):
            whole.chunk(group.size)[group.index].copy_(own, non_blocking=True)
            pending = start_all_gather_(whole, group)
        copied = self._on.Event()
        copied.record(self._stream)

        def finish() -> Tensor:
            self._on.current_stream().wait_event(copied)
            return pending.finish()

        return pending.then(finish)
