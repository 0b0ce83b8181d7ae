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
    """Elements [start, stop) of the part with this number, from ``at`` on in a window."""

    part: int
    start: int
    stop: int
    at: int

    @property
    def here(self) -> slice:
        """Its place in the window."""
        return slice(self.at, self.at + self.stop - self.start)

    @property
    def there(self) -> slice:
        """Its place in the part."""
        return slice(self.start, self.stop)

    def overlap(self, start: int, stop: int) -> tuple[slice, slice] | None:
        """Return the place of elements [start, stop) of the part in the window, and their place from ``start`` on."""
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return None
        offset = self.at - self.start
        return slice(first + offset, last + offset), slice(first - start, last - start)


@dataclass(frozen=True)
class Window:
    """Some segments, up to ``numel`` elements."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return self.segments[-1].here.stop


def cut(sizes: Sequence[int], numel: int) -> list[Window]:
    """Return the parts of these sizes in windows of at most ``numel`` elements, a multiple of ALIGNED, in order."""
    windows: list[list[Segment]] = []
    at = numel
    for part, stop in enumerate(sizes):
        start = 0
        while start < stop:
            if at >= numel:
                windows.append([])
                at = 0
            end = min(stop, start + numel - at)
            windows[-1].append(Segment(part, start, end, at))
            at += -(-(end - start) // ALIGNED) * ALIGNED
            start = end
    return [Window(number, tuple(segments)) for number, segments in enumerate(windows)]


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
    host memory while threads read and write others.

    Raises:
        StoreError: there is no room for the file.
    """

    def __init__(
        self, sizes: Sequence[int], kept: Mapping[str, torch.dtype], device: torch.device, folder: Path | None
    ) -> None:
        pinned = device.type != "cpu"
        self._passes = folder is not None and len(sizes) > BUFFERS
        self._slots = list[_Slot]()
        if folder is None or not sizes:
            for number, size in enumerate(sizes):
                tensors = {state: torch.zeros(size, dtype=kept[state], pin_memory=pinned) for state in kept}
                self._slots.append(_Slot(tensors, np.empty(0, np.uint8), number))
            return
        room = {state: -(-max(sizes) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for state, dtype in kept.items()}
        self._record = sum(room.values())
        self._file = Scratch(folder, len(sizes) * self._record, "the optimizer's states of a rank")
        for _ in sizes[:BUFFERS]:
            memory = _bytes(self._record, pinned)
            parts = dict(zip(room, memory.split(list(room.values())), strict=True))
            tensors = {state: part.view(kept[state])[: max(sizes)] for state, part in parts.items()}
            self._slots.append(_Slot(tensors, memory.numpy()))
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


def _bytes(size: int, pinned: bool) -> Tensor:
    """Return host memory that begins where a disk's sectors may."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else torch.from_numpy(aligned_memory(size))
