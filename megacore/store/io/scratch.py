"""Room on a disk for what memory does not hold: files without a name.

The system frees such a file when its last process ends, however it ends: there is never anything to clean up. Its room
is reserved when it is made, so that a disk that is too small says so before training starts, and not in a step.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megacore.store.io.direct import NO_SUCH_WAY, Bytes
from megacore.store.io.strict_json import StoreError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Scratch:
    """A file of zeros for any number of threads; where the filesystem can, it goes around the page cache. Raises
    StoreError: there is no room, or no such file can be made there."""

    def __init__(self, folder: Path, size: int, what: str) -> None:
        self.size, self._file = size, _reserve(folder, size, what)
        weakref.finalize(self, os.close, self._file)
        self._set_direct(True)

    def read(self, into: Bytes, offset: int) -> None:
        """Read ``into``, [n] bytes, all of which are there. Raises OSError."""
        self._move(into, lambda rest, at: os.preadv(self._file, [rest], at), offset)

    def write(self, data: Bytes, offset: int) -> None:
        """Write ``data``, [n] bytes. Raises OSError."""
        self._move(data, lambda rest, at: os.pwrite(self._file, rest, at), offset)

    def _move(self, data: Bytes, some: Callable[[memoryview, int], int], offset: int) -> None:
        at = 0
        while at < data.size:
            try:
                count = some(data[at:].data, offset + at)
            except OSError as error:
                # Direct reads and writes must suit the disk in memory, place and size, and it may ask for more.
                if error.errno not in NO_SUCH_WAY or not self.direct:
                    raise
                self._set_direct(False)
                continue
            if not count:
                raise EOFError(f"offload file: {data.size} bytes at {offset} are beyond its {self.size}")
            at += count

    @property
    def direct(self) -> bool:
        """Whether it goes around the page cache."""
        return bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & _DIRECT)

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_DIRECT
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (_DIRECT if on else 0))
        except OSError as error:
            if error.errno not in NO_SUCH_WAY:
                raise


_DIRECT: int = getattr(os, "O_DIRECT", 0)


def mapped(folder: Path, size: int, what: str) -> Bytes:
    """Return zeros [size] that look like memory and lie in a file: the system writes them out where memory is short.
    Raises StoreError: as :class:`Scratch`."""
    file = _reserve(folder, size, what)
    try:
        return np.frombuffer(mmap.mmap(file, size), np.uint8)
    finally:
        os.close(file)


def _reserve(folder: Path, size: int, what: str) -> int:
    """Return a descriptor of a file that has no name and all of its room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, "no room")
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            # Other ranks reserve at the same time: only the system knows whether there is room for all.
            os.posix_fallocate(file.fileno(), 0, size)
            return os.dup(file.fileno())
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise StoreError(f"{folder}: cannot make a file for {what}: {error.strerror or error}") from error
        free = shutil.disk_usage(folder).free
        raise StoreError(
            f"{folder}: no room for {what}: {size / 1e9:,.2f} GB are needed and {free / 1e9:,.2f} GB are free"
        ) from error
