"""Files that one process holds at a time, until it lets go or dies."""

from __future__ import annotations

import fcntl
import os
from io import BufferedReader, BufferedWriter, FileIO
from pathlib import Path

from megacore.store.io.files import open_lock
from megacore.store.io.strict_json import StoreError


class NoLocks(StoreError):
    """A filesystem has no locks."""


def hold(path: Path) -> FileIO | None:
    """Lock a file, made if it is not there; None while someone else holds it. To hold it is to own what it stands for:
    who opened it before it was renamed or removed does not. Raises FileNotFoundError: the file or its folder has just
    gone; NoLocks: its filesystem has none."""
    lock = open_lock(path)
    try:
        if flock(lock, fcntl.LOCK_EX) and is_at(lock, path):
            return lock
    except BaseException:
        lock.close()
        raise
    lock.close()
    return None


def is_at(lock: FileIO, path: Path) -> bool:
    """Return whether the file that was opened still stands under its path."""
    return os.path.samestat(os.fstat(lock.fileno()), os.stat(path))


def flock(lock: FileIO | BufferedReader | BufferedWriter, kind: int) -> bool:
    """Take a lock of this kind -> whether it is now held. Raises NoLocks: its filesystem has none."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise NoLocks(
            f"{lock.name}: its filesystem has no locks ({error.strerror}): mount it with them, or choose another"
        ) from error
    return True
