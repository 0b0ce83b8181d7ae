"""Copies of images in host memory: of what no other rank has, at another rank, and of each rank's own.

Where such a rank dies, it comes back from the copy, and all others go back to the same step by theirs. A copy is made
beside the steps that follow; it counts once it is whole, on both sides, and the one before it stays until all ranks
have theirs (as in Gemini, Wang et al. 2023, doi 10.1145/3600006.3613145).
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Group


@dataclass(frozen=True)
class CopiedImage:
    """An image as it was after a step, in host memory.

    Args:
        bytes: The bytes of its tensors, one after the other: uint8 [n].
        checksum: Theirs.
        state: The rest of what is known of the run at that step, as JSON.
    """

    bytes: Tensor
    checksum: int
    state: Mapping[str, Any]

    @property
    def sound(self) -> bool:
        return checksum_of(self.bytes) == self.checksum


def checksum_of(flat: Tensor) -> int:
    """Return the CRC of bytes: uint8 [n]."""
    return zlib.crc32(memoryview(flat.numpy()))  # type: ignore[arg-type]  # numpy's stubs for Python 3.11


Take = Callable[[], tuple[Tensor, Mapping[str, Any]] | None]


def _nothing() -> None:
    """Take nothing: there is no trainer."""


class Copies:
    """The copies that a process holds, over all generations of a run.

    Args:
        overhead: The share of a step's time that copies may take, if they were not beside it.
    """

    def __init__(self, overhead: float = 0.01) -> None:
        self.images: dict[int, dict[int, CopiedImage]] = {}
        """{rank: {step: its image}}."""
        self._overhead = overhead
        self._take: Take = _nothing
        self._rank, self._group = 0, Group((0,), 0, None)
        self._to: int | None = None
        self._from: list[int] = []
        self._active = False
        self._work: threading.Thread | None = None
        self._due, self._step_s = 0, 0.0
        self._lock = threading.Lock()

    def join(self, rank: int, holders: Mapping[int, int], group: Group, take: Take) -> None:
        """Begin a generation.

        Args:
            rank: This rank.
            holders: {rank: rank that keeps its copy}.
            group: All ranks, for tensors in host memory; its messages are those of copies alone.
            take: Gives the bytes of this rank's image, and what else is known of the run, as JSON, alike on all ranks;
                None, on all ranks, where it is not to be copied.
        """
        self._take = take
        self._rank, self._group, self._work = rank, group, None
        self._to, self._from = holders.get(rank), sorted(of for of, by in holders.items() if by == rank)
        self._active = bool(holders)
        self._due = 0

    def leave(self) -> None:
        """End a generation: what is under way is given up, and what is damaged is dropped."""
        if self._work is not None:
            self._work.join()
        self._take = _nothing
        for versions in self.images.values():
            for step in [step for step, image in versions.items() if not image.sound]:
                del versions[step]

    def due(self, step: int) -> int:
        """Return the first step that this rank can copy next."""
        return max(self._due, step + 1) if self._work is not None and self._work.is_alive() else self._due

    @property
    def whole(self) -> int:
        """The newest step that all that this rank is to hold is whole of; -1 if there is none."""
        with self._lock:
            held = [set(self.images.get(rank, ())) for rank in (self._rank, *self._from)]
        return max(set.intersection(*held), default=-1)

    def settle(self, step: int) -> None:
        """Drop what is older than a step that all ranks have whole copies of."""
        self._keep(lambda version: version >= step)

    def drop_after(self, step: int) -> None:
        """Drop what is newer than a step that the run has gone back to."""
        self._keep(lambda version: version <= step)

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        with self._lock:  # a copy may just have become whole
            for rank, versions in self.images.items():
                self.images[rank] = {version: image for version, image in versions.items() if wanted(version)}

    def begin(self, step: int) -> None:
        """Begin to copy the image of the last step that is done, if there is anything to copy; all ranks do so at the
        same steps."""
        if not self._active:
            return
        now = time.monotonic()
        taken = self._take()
        if taken is None:
            return
        flat, state = taken
        seconds = time.monotonic() - now

        def work() -> None:
            begun = time.monotonic()
            own = CopiedImage(flat, checksum_of(flat), state)
            try:
                held = {self._rank: own, **self._exchange(own)}
            except RuntimeError:  # a fault has ended the generation: those before it count
                return
            with self._lock:
                for rank, image in held.items():
                    self.images.setdefault(rank, {})[step] = image
            cost = seconds + time.monotonic() - begun
            self._due = step + max(1, math.ceil(cost / (self._overhead * max(self._step_s, 1e-9))))

        self._work = threading.Thread(target=work, name="copies", daemon=True)
        self._work.start()

    def stepped(self, seconds: float) -> None:
        """Note how long a step has taken."""
        self._step_s = seconds if not self._step_s else 0.9 * self._step_s + 0.1 * seconds

    def _exchange(self, own: CopiedImage) -> dict[int, CopiedImage]:
        """Send this rank's image, and receive those that it is to hold: each as whole as its sender has it."""
        sending, group = list[Any](), self._group.process_group
        if self._to is not None:
            head = torch.tensor([len(own.bytes), own.checksum])
            sending = [dist.isend(tensor, self._to, group=group) for tensor in (head, own.bytes)]
        held = dict[int, CopiedImage]()
        for rank in self._from:
            head = torch.zeros(2, dtype=torch.int64)
            dist.recv(head, rank, group=group)
            size, checksum = head.tolist()
            received = torch.empty(size, dtype=torch.uint8)
            dist.recv(received, rank, group=group)
            image = CopiedImage(received, checksum, own.state)
            if image.sound:
                held[rank] = image
        for each in sending:
            each.wait()
        return held
