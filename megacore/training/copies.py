"""Copies of images in host memory: of what no other rank has, at another rank, and of each rank's own.

Where such a rank dies, it comes back from the copy, and all others go back to the same step by theirs. A copy is made
beside the steps that follow; it counts once it is whole, on both sides, and the one before it stays until all ranks
have theirs (as in Gemini, Wang et al. 2023, doi 10.1145/3600006.3613145).
"""

from __future__ import annotations

import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
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
        contents: The places of what the bytes hold, as JSON.
    """

    bytes: Tensor
    checksum: int
    state: Mapping[str, Any]
    contents: Sequence[Any] = ()

    @classmethod
    def of(cls, flat: Tensor, state: Mapping[str, Any], contents: Sequence[Any]) -> CopiedImage:
        return cls(flat, checksum_of(flat), state, contents)

    @property
    def sound(self) -> bool:
        return checksum_of(self.bytes) == self.checksum


def checksum_of(flat: Tensor) -> int:
    """Return the CRC of bytes: uint8 [n]."""
    return zlib.crc32(memoryview(flat.numpy()))  # type: ignore[arg-type]  # numpy's stubs for Python 3.11


Take = Callable[[], tuple[Tensor, Mapping[str, Any], Sequence[Any]] | None]


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
            take: Gives the bytes of this rank's image, what else is known of the run, as JSON, alike on all ranks, and
                what lies where in the image; None, on all ranks, where it is not to be copied.
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
        seconds = time.monotonic() - now

        def work() -> None:
            begun = time.monotonic()
            own = CopiedImage.of(*taken)
            try:
                held = {self._rank: own, **_exchange(own, self._to, self._from, self._group)}
            except RuntimeError:  # a fault has ended the generation: those before it count
                return
            self._hold(step, held)
            cost = seconds + time.monotonic() - begun
            self._due = step + max(1, math.ceil(cost / (self._overhead * max(self._step_s, 1e-9))))

        self._work = threading.Thread(target=work, name="copies", daemon=True)
        self._work.start()

    def hand_over(self, step: int, own: CopiedImage, rank: int, holders: Mapping[int, int], group: Group) -> None:
        """Copy some images at once, and wait for them; all ranks call this.

        Args:
            step: The step that they are of.
            own: The image of this rank.
            rank: This rank.
            holders: {rank: rank that is to keep its copy}.
            group: All ranks, for tensors in host memory.
        """
        of = sorted(of for of, by in holders.items() if by == rank)
        self._hold(step, _exchange(own, holders.get(rank), of, group))

    def _hold(self, step: int, images: Mapping[int, CopiedImage]) -> None:
        with self._lock:
            for rank, image in images.items():
                self.images.setdefault(rank, {})[step] = image

    def stepped(self, seconds: float) -> None:
        """Note how long a step has taken."""
        self._step_s = seconds if not self._step_s else 0.9 * self._step_s + 0.1 * seconds


def _exchange(own: CopiedImage, to: int | None, sources: Sequence[int], group: Group) -> dict[int, CopiedImage]:
    """Send this rank's image to one rank, and receive those of others: each as whole as its sender has it."""
    sending = list[Any]()
    if to is not None:
        contents = torch.frombuffer(bytearray(json.dumps(own.contents).encode()), dtype=torch.uint8)
        head = torch.tensor([len(own.bytes), own.checksum, len(contents)])
        sending = [dist.isend(tensor, to, group=group.process_group) for tensor in (head, contents, own.bytes)]
    held = dict[int, CopiedImage]()
    for rank in sources:
        head = torch.zeros(3, dtype=torch.int64)
        dist.recv(head, rank, group=group.process_group)
        size, checksum, described = head.tolist()
        contents, received = (torch.empty(n, dtype=torch.uint8) for n in (described, size))
        dist.recv(contents, rank, group=group.process_group)
        dist.recv(received, rank, group=group.process_group)
        image = CopiedImage(received, checksum, own.state, json.loads(bytes(contents.numpy())))
        if image.sound:
            held[rank] = image
    for each in sending:
        each.wait()
    return held
