"""The elements of parts in windows of one size, which fit into a bounded buffer whatever the size of a part; and the
store of the windows' states between their updates: host memory, or a file behind such a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megacore.store.io.direct import ALIGNMENT, Bytes, aligned_memory
from megacore.store.io.scratch import Scratch

ALIGNED = 64
"""Elements: segments begin on cache lines, and are cut where no kernel sees it, whatever the dtype."""
BUFFERS = 4
"""Windows in the buffer: one is updated, one is on its way back, and two are on their way here."""


@dataclass(frozen=True)
class Segment:
    """Elements of a part in a window, by the numbers of the two: where they are in the window (``here``), and where in
    the part (``there``)."""

    window: int
    here: slice
    part: int
    there: slice


def cut(sizes: Sequence[int], numel: int) -> list[list[Segment]]:
    """Return the segments of each window, of parts of these sizes that lie one after the other in windows of ``numel``
    elements, a multiple of ALIGNED."""
    windows, at = list[list[Segment]](), 0
    for part, size in enumerate(sizes):
        start = 0
        while start < size:
            number, place = divmod(at, numel)
            if not place:
                windows.append([])
            count = min(size - start, numel - place)
            windows[number].append(Segment(number, slice(place, place + count), part, slice(start, start + count)))
            start += count
            at += -(-count // ALIGNED) * ALIGNED
    return windows


@dataclass(eq=False)
class _Slot:
    """A place for a window in host memory: {state: tensor}, and the bytes of all of them as a file has them; without a
    file it has none."""

    tensors: Mapping[str, Tensor]
    record: Bytes
    holds: int | None = None
    """The window that is there, or on its way here."""
    changed: bool = False
    """Whether it is newer than the file."""
    left: Any = None
    """The event after which nobody reads it any more."""
    moving: Future[None] | None = None
    """The last read or write of it."""


class WindowStore:
    """{state: host tensor} of each window, zeros at first: all in host memory; or in a file, of which BUFFERS are in
    host memory while threads read and write others. Raises StoreError: there is no room for the file."""

    def __init__(
        self, sizes: Sequence[int], kept: Mapping[str, torch.dtype], device: torch.device, folder: Path | None
    ) -> None:
        self._passes, pinned = folder is not None and len(sizes) > BUFFERS, device.type != "cpu"
        self._slots = list[_Slot]()
        for number, size in enumerate(sizes if folder is None else [max(sizes, default=0)] * len(sizes[:BUFFERS])):
            room = {state: -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT for state, dtype in kept.items()}
            if folder is None:  # each by itself: pinned memory is given out in powers of two, as windows are
                parts, record = [_zeros(each, pinned) for each in room.values()], np.empty(0, np.uint8)
            else:
                memory = _zeros(sum(room.values()), pinned)
                parts, record = [*memory.split([*room.values()])], memory.numpy()
            tensors = {state: part.view(kept[state])[:size] for state, part in zip(room, parts, strict=True)}
            self._slots.append(_Slot(tensors, record, number if folder is None else None))
        if folder is None or not sizes:
            return
        self._record = self._slots[0].record.size
        self._file = Scratch(folder, len(sizes) * self._record, "the optimizer's states of a rank")
        # A thread begins on GPU 0: waiting for an event there would make a context, and take memory for it.
        self._threads = ThreadPoolExecutor(2, "offload", torch.get_device_module(device).set_device, (device,))

    def fetch(self, number: int) -> None:
        """Begin to bring a window; in a file it takes the place of one that was brought BUFFERS windows before."""
        place = self._place(number)
        if place.holds != number:
            if place.changed:
                self._write(place)
            place.holds = number
            place.moving = self._threads.submit(self._bring, place, place.moving, number)

    def open(self, number: int) -> Mapping[str, Tensor]:
        """Return the states of a window, there until another one takes its place; this waits for them."""
        self.fetch(number)
        place = self._place(number)
        if place.moving is not None:
            place.moving.result()
            place.moving = None
        return place.tensors

    def changed(self, number: int, left: Any = None) -> None:
        """Note that what was opened has been written to; ``left``: an event after which nobody reads it any more."""
        place = self._place(number)
        place.changed = True
        place.left = left or place.left

    def put_back(self, number: int) -> None:
        """Begin to put a window back that was changed, where the file has more than the buffer."""
        place = self._place(number)
        if place.changed and self._passes:
            self._write(place)

    def _place(self, number: int) -> _Slot:
        return self._slots[number % len(self._slots)]

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
        self._file.read(place.record, number * self._record)

    def _put(self, place: _Slot, before: Future[None] | None, number: int) -> None:
        if before is not None:
            before.result()
        self._file.write(place.record, number * self._record)


def _zeros(size: int, pinned: bool) -> Tensor:
    """Return host memory of so many bytes that begins where a disk's sectors may."""
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True) if pinned else torch.from_numpy(aligned_memory(size))
