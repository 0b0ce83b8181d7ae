"""The folder of an agent for temporary files, those that killed agents have left, and that of what torch compiles.
No torch.

They lie in one folder for each user. Others may make files of any name beside it, so that nothing is opened before it
is known to be this user's own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HELD = "held"
"""The file that an agent holds a lock on for as long as it lives."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that only this user can enter, and remove it after the block; what agents of this user have left
    that were killed is removed before it."""
    own = _own_folder()
    if own is not None:
        for folder in own.iterdir():
            _remove_if_left(folder)
    prefix = "agent-" if own else "megacore-"
    fresh = tempfile.TemporaryDirectory(prefix=prefix, dir=own, ignore_cleanup_errors=True)
    with fresh as made, Path(made, "new").open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Path(file.name).rename(Path(made, HELD))  # not before: nobody finds it without its lock
        yield Path(made)


def compiled(out: Path) -> Path:
    """Return the folder for what torch compiles, which it runs when it finds it again. Its own choice is a name in the
    folder for temporary files that anybody can know, and make first. Where another user has taken the name of this
    one's folder, it is in that of the run."""
    return (_own_folder() or out) / "torchinductor"


def _own_folder() -> Path | None:
    """Return the folder of this user; None where another one has taken its name."""
    path = Path(tempfile.gettempdir(), f"megacore-{os.getuid()}")
    with suppress(FileExistsError):
        path.mkdir(0o700)
    found = path.lstat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return path if own else None


def _remove_if_left(folder: Path) -> None:
    """Remove the folder of an agent that does not live any more."""
    with suppress(OSError):
        number = os.open(folder / HELD, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(number, "rb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
