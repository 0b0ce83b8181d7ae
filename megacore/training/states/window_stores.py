"""Stores of the states of windows between their updates: host memory, or a file behind a bounded buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megacore.store.direct import ALIGNMENT, Bytes, aligned_memory
from megacore.store.scratch import Scratch

BUFFERS = 4
"""Windows in the buffer: one is updated, one is on its way back, and two are on their way here."""


class WindowStore(Protocol):
    """{state: host tensor} of each window, zeros at first."""

    def fetch(self, number: int) -> None:
        """Begin to bring a window; it takes the place of one that was brought BUFFERS windows before."""
        ...

    def open(self, number: int) -> Mapping[str, Tensor]:
        """Return the states of a window, there until another one takes its place; waits for them."""
        ...

    def changed(self, number: int, left: Any = None) -> None:
        """Note that what was opened has been written to.

        Args:
            number: The number of the window.
            left: An event after which nobody reads it any more.
        """
        ...

    def put_back(self, number: int) -> None:
        """Begin to put a window back that was changed."""
        ...


class HostWindows:
    """All windows in host memory.

    Args:
        sizes: Elements of each window.
        kept: {state: dtype}.
        pinned: Whether a device copies from there.
    """

    def __init__(self, sizes: Sequence[int], kept: Mapping[str, torch.dtype], pinned: bool) -> None:
        self._windows = [
            {state: torch.zeros(size, dtype=dtype, pin_memory=pinned) for state, dtype in kept.items()}
            for size in sizes
        ]

    def fetch(self, number: int) -> None:
        """Do nothing: it is there."""

    def open(self, number: int) -> Mapping[str, Tensor]:
        return self._windows[number]

    def changed(self, number: int, left: Any = None) -> None:
        """Do nothing: it is there."""

    def put_back(self, number: int) -> None:
        """Do nothing: it is there."""


@dataclass(eq=False)
class _Slot:
    """A place in the buffer.

    Args:
        memory: Its bytes.
        tensors: {state: view of them}.
        holds: The window that is there, or on its way here.
        changed: Whether it is newer than the file.
        left: The event after which nobody reads it any more.
        moving: The last read or write of it.
    """

    memory: Bytes
    tensors: Mapping[str, Tensor]
    holds: int | None = None
    changed: bool = False
    left: Any = None
    moving: Future[None] | None = None


class FileWindows:
    """All windows in a file, of which BUFFERS are in host memory. Threads read and write while others compute.

    Args:
        folder: The folder of the file.
        count: Windows.
        numel: Elements of a window.
        kept: {state: dtype}.
        device: The device that copies from the buffer.

    Raises:
        StoreError: there is no room for the file.
    """

    def __init__(
        self, folder: Path, count: int, numel: int, kept: Mapping[str, torch.dtype], device: torch.device
    ) -> None:
        sizes = {state: -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT for state, dtype in kept.items()}
        self._record = sum(sizes.values())
        self._file = Scratch(folder, count * self._record, "the optimizer's states of a rank")
        self._places = []
        for _ in range(min(count, BUFFERS)):
            memory = _bytes(self._record, device.type != "cpu")
            parts = dict(zip(sizes, memory.split(list(sizes.values())), strict=True))
            tensors = {state: part.view(kept[state])[:numel] for state, part in parts.items()}
            self._places.append(_Slot(memory.numpy(), tensors))
        self._all_here = count <= BUFFERS
        # A thread begins on GPU 0: waiting for an event there would make a context, and take memory for it.
        self._threads = ThreadPoolExecutor(2, "offload", torch.get_device_module(device).set_device, (device,))

    def fetch(self, number: int) -> None:
        place = self._place(number)
        if place.holds != number:
            if place.changed:
                self._write(place)
            place.holds = number
            place.moving = self._threads.submit(self._bring, place, place.moving, number)

    def open(self, number: int) -> Mapping[str, Tensor]:
        self.fetch(number)
        place = self._place(number)
        if place.moving is not None:
            place.moving.result()
            place.moving = None
        return place.tensors

    def changed(self, number: int, left: Any = None) -> None:
        place = self._place(number)
        place.changed = True
        place.left = left or place.left

    def put_back(self, number: int) -> None:
        place = self._place(number)
        if place.changed and not self._all_here:
            self._write(place)

    def _place(self, number: int) -> _Slot:
        return self._places[number % len(self._places)]

    def _write(self, place: _Slot) -> None:
        assert place.holds is not None
        place.changed = False
        place.moving = self._threads.submit(self._put, place, place.moving, place.holds)

    # -- in a thread; what a place did before was given to the threads before, so it is under way

    def _bring(self, place: _Slot, before: Future[None] | None, number: int) -> None:
        if before is not None:
            before.result()
        if place.left is not None:
            place.left.synchronize()
        self._file.read(place.memory, number * self._record)

    def _put(self, place: _Slot, before: Future[None] | None, number: int) -> None:
        if before is not None:
            before.result()
        self._file.write(place.memory, number * self._record)


def _bytes(size: int, pinned: bool) -> Tensor:
    """Return host memory that begins where a disk's sectors may."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else torch.from_numpy(aligned_memory(size))
