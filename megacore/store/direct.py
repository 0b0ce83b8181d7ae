"""Writing around the page cache.

What is written now and read some other day needs no pages of it: to find, fill and write them back took the kernel 0.8
to 5 s of CPU time for 2 GiB, and 0.3 s without, and it pushes out what others read. Only whole sectors from aligned
memory can go this way; the ends of a piece are left to the other one.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 4096
"""The alignment of places in the file and in memory; disks ask for 512 or 4096."""
LEAST = 1 << 18
"""Bytes of a piece; for less it is not worth its ends."""
SCRATCH = 2 << 20
NO_SUCH_WAY = (errno.EINVAL, errno.ENOTSUP)


@dataclass
class DirectFile:
    """A second way into a file, for any number of threads."""

    _file: FileIO
    _refused: bool = False
    _memory: threading.local = field(default_factory=threading.local)

    @classmethod
    def open(cls, path: Path) -> DirectFile | None:
        """Open a file that exists; None where the system or the filesystem has no such way. Raises OSError."""
        if not hasattr(os, "O_DIRECT"):
            return None
        try:
            return cls(FileIO(path, "r+", opener=_open))
        except OSError as error:
            if error.errno in NO_SUCH_WAY:
                return None
            raise

    def write(self, data: Bytes, offset: int) -> tuple[int, int]:
        """Write data[start:stop] to where it belongs if the whole belongs at ``offset`` -> (start, stop).

        The rest is the caller's to write. Raises OSError.
        """
        if self._refused or data.size < LEAST:
            return 0, 0
        start = at = -offset % ALIGNMENT
        stop = start + (data.size - start) // ALIGNMENT * ALIGNMENT
        while at < stop:
            try:
                aligned = self._aligned(data[at : min(stop, at + SCRATCH)])
                at += os.pwrite(self._file.fileno(), aligned.data, offset + at)
            except OSError as error:
                if error.errno not in NO_SUCH_WAY:
                    raise
                self._refused = True  # it asks for more than ALIGNMENT, or a short write has left no place to go on
                break
        return start, at

    def close(self) -> None:
        self._file.close()

    def _aligned(self, data: Bytes) -> Bytes:
        if data.ctypes.data % ALIGNMENT == 0:
            return data
        if not hasattr(self._memory, "scratch"):
            self._memory.scratch = aligned_memory(SCRATCH)
        scratch: Bytes = self._memory.scratch[: data.size]
        scratch[:] = data
        return scratch


def aligned_memory(size: int) -> Bytes:
    """Return memory that begins at a multiple of ALIGNMENT."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT | os.O_NOFOLLOW)
