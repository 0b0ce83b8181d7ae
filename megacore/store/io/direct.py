"""Writing around the page cache.

What is written now and read some other day needs no pages of it: to find, fill and write them back took the kernel 0.8
to 5 s of CPU time for 2 GiB, and 0.3 s without, and it pushes out what others read. Only whole sectors from aligned
memory can go this way; the ends of a piece are left to the other one. That waits for all direct writes of the file that
are under way, and they for it: so a :class:`WriteWindow` puts pieces that adjoin together.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 4096
"""The alignment of places in the file and in memory; disks ask for 512 or 4096."""
LEAST = 1 << 18
"""Bytes of a piece; for less it is not worth its ends."""
NO_SUCH_WAY = (errno.EINVAL, errno.ENOTSUP)


@dataclass
class DirectFile:
    """A second way into a file, for any number of threads."""

    _file: FileIO
    _refused: bool = False

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
        """Write data[start:stop] to where it belongs if the whole belongs at ``offset`` -> (start, stop). The rest is
        the caller's to write: all of it where memory and file are not aligned alike. Raises OSError."""
        if self._refused or data.size < LEAST or (data.ctypes.data - offset) % ALIGNMENT:
            return 0, 0
        start = at = -offset % ALIGNMENT
        stop = start + (data.size - start) // ALIGNMENT * ALIGNMENT
        while at < stop:
            try:
                at += os.pwrite(self._file.fileno(), data[at:stop].data, offset + at)
            except OSError as error:
                if error.errno not in NO_SUCH_WAY:
                    raise
                self._refused = True  # it asks for more than ALIGNMENT, or a short write has left no place to go on
                break
        return start, at

    def close(self) -> None:
        self._file.close()


class WriteWindow:
    """Memory through which one thread writes pieces of files: those that adjoin go together. ``size``: bytes of the
    largest usual piece; beside it there is room for what is too little to be written before it."""

    def __init__(self, size: int) -> None:
        self._memory = aligned_memory(size + LEAST + 2 * ALIGNMENT)
        self._write: Callable[[Bytes, int], object] | None = None
        # Places in the file: of the memory's beginning, of the first byte that is not written, and of the end.
        self._base = self._first = self._end = 0

    def take(self, write: Callable[[Bytes, int], object], offset: int, size: int) -> Bytes:
        """Return the memory of a piece, which the caller fills before the next call. ``write``: writes bytes to a place
        in the file; the same for pieces of one file. Raises OSError: what was there could not be written."""
        if write != self._write or offset != self._end:
            self.flush()
            self._write, self._base, self._first, self._end = write, offset - offset % ALIGNMENT, offset, offset
        elif self._end + size - self._base > self._memory.size:
            whole = self._end - self._end % ALIGNMENT
            if whole > self._first:
                self._put(whole)
            kept = self._memory[whole - self._base : self._end - self._base].copy()
            self._memory[: kept.size] = kept
            self._base = whole
        if (needed := self._end + size - self._base) > self._memory.size:
            larger = aligned_memory(needed)
            larger[: self._end - self._base] = self._memory[: self._end - self._base]
            self._memory = larger
        self._end += size
        return self._memory[offset - self._base : self._end - self._base]

    def flush(self) -> None:
        """Write what is not written yet. Raises OSError."""
        if self._end > self._first:
            self._put(self._end)

    def _put(self, stop: int) -> None:
        assert self._write is not None
        self._write(self._memory[self._first - self._base : stop - self._base], self._first)
        self._first = stop


def aligned_memory(size: int) -> Bytes:
    """Return memory that begins at a multiple of ALIGNMENT."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT | os.O_NOFOLLOW)
