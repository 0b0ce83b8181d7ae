"""The folder of an agent for temporary files, and those that agents which were killed have left. No torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "megacore-"
HELD = "held"
"""The file that an agent holds a lock on for as long as it lives."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that only this user can enter, and remove it after the block; what agents of this user have left
    that were killed is removed before it."""
    for held in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{HELD}"):
        _remove_if_left(held)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as made, Path(made, "new").open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Path(file.name).rename(Path(made, HELD))  # not before: nobody finds it without its lock
        yield Path(made)


def _remove_if_left(held: Path) -> None:
    with suppress(OSError), held.open() as file:
        if os.lstat(held.parent).st_uid == os.fstat(file.fileno()).st_uid == os.getuid():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(held.parent, ignore_errors=True)
