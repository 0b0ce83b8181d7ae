"""Folders that appear under their name all at once: what a kill leaves is the old state or nothing, never a half.

A folder is written as its hidden sibling ``.NAME.partial``, which nobody else may enter, made durable, and renamed. Who
writes it holds the flock on the file ``.lock`` inside, which ends with the process however it dies: a partial folder of
ours that no one holds is a leftover, and the next writer of the same name takes it over.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import ClassVar

from megacore.store.io.files import flock, hold, is_at, open_file, replacing
from megacore.store.io.objects import ObjectPath
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.tensors import free_bytes, os_errors

LOCK = ".lock"
PARTIAL = ".{}.partial"
_DOOMED = PARTIAL + ".{}.doomed"
"""The name under which a partial folder is removed."""
_PARTIALS = PARTIAL.format("*"), _DOOMED.format("*", "*")


@dataclass(frozen=True)
class Publication:
    """A folder on its way: files are written into ``folder``, durably, and :meth:`finish` makes it ``target``."""

    unseen: ClassVar[str] = "out must lie on a file system that all nodes share"

    target: Path
    folder: Path
    _lock: FileIO

    @classmethod
    def begin(cls, target: str | Path, needed_bytes: int = 0) -> Publication:
        """Make and hold the partial folder, empty; a leftover of the same name is removed first. StoreError if the
        target is there already and is no empty folder, if someone else is writing it, or if its disk has no room for
        `needed_bytes`."""
        folder = partial(target)
        target = _resolved(target)
        with os_errors(target):
            _refuse_taken(target)
            _make_folders(target.parent)
            publication = cls(target, folder, make_and_hold(folder))
            try:
                _refuse_taken(target)  # again: its last writer may just have published it
                remove_leftovers(target.parent, _DOOMED.format(glob.escape(target.name), "*"))
                empty(folder)
                if needed_bytes > (free := free_bytes(folder)):
                    raise StoreError(
                        f"{target}: needs {spelled(needed_bytes)} and {spelled(free)} are free in {target.parent}: "
                        "make room, or choose another disk"
                    )
            except BaseException:
                publication.abandon()
                raise
        return publication

    def finish(self) -> None:
        """Rename the folder to its target. Its files are durable already (:func:`write_file`); its folders are now."""
        with os_errors(self.target):
            self.folder.chmod(_usual_mode(self.folder))
            for folder, _, _ in os.walk(self.folder, topdown=False):
                sync(Path(folder))
            _refuse_taken(self.target)
            os.rename(self.folder, self.target)
            # Last: without its lock, a folder of this name would be another writer's to empty.
            (self.target / LOCK).unlink()
            sync(self.target)
            sync(self.target.parent)
        self._lock.close()

    def sizes(self) -> dict[str, int]:
        """Return {path in the folder: bytes} of the files that this process sees."""
        with os_errors(self.folder):
            files = (path for path in self.folder.rglob("*") if path.is_file())
            return {str(path.relative_to(self.folder)): path.stat().st_size for path in files}

    def abandon(self) -> None:
        """Remove the folder, unless it is published; what cannot be removed stays behind as a leftover."""
        if not self._lock.closed:
            with suppress(OSError):
                discard(self.folder, self._lock)


@dataclass(frozen=True)
class Upload:
    """A folder on its way into an object store, as :class:`Publication` is: it is one from its last object on."""

    unseen: ClassVar[str] = "the store has lost it, or something else writes to this folder"

    folder: ObjectPath
    last: str

    def finish(self) -> None:
        """Do nothing: whoever has written the last object has published it."""

    def sizes(self) -> dict[str, int]:
        return self.folder.objects()

    def abandon(self) -> None:
        """Remove what is there, unless it is published; what cannot be stays behind, for the next run."""
        with suppress(StoreError):
            if not (self.folder / self.last).exists():
                self.folder.remove()


@contextmanager
def publish(target: str | Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Make the folder to write into; it is published at the end, and removed on any exception. Errors as
    `Publication.begin`."""
    publication = Publication.begin(target, needed_bytes)
    try:
        yield publication.folder
        publication.finish()
    finally:
        publication.abandon()


def write_file(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a new file, which is on the disk afterwards if that is asked for; StoreError if it exists or has no
    room. An object of this name is replaced."""
    if isinstance(path, ObjectPath):
        path.write(data)
        return
    with os_errors(path, len(data)), open(path, "xb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, or write it anew: under its name stands the old one or the new one. StoreError as above."""
    with os_errors(path, len(data)), replacing(path) as file:
        file.write(data)


def partial(target: str | Path) -> Path:
    """Return the hidden sibling that is written before it becomes the target; ranks but the first write there."""
    resolved = _resolved(target)
    if not resolved.name:
        raise StoreError(f"{resolved}: has no folder around it: choose one inside it")
    return resolved.with_name(PARTIAL.format(resolved.name))


def leftovers(folder: Path, *patterns: str) -> list[Path]:
    """Return the partial folders within a folder whose writers are gone, those too that were being removed; if not all,
    those of some patterns."""
    with os_errors(folder):
        found = (sorted(folder.glob(pattern)) for pattern in patterns or _PARTIALS)
        return [path for paths in found for path in paths if _is_leftover(path)]


def remove_leftovers(folder: Path, *patterns: str) -> list[Path]:
    """Remove the partial folders within a folder whose writers are gone -> those that are removed."""
    partials = leftovers(folder, *patterns)
    for path in partials:
        with os_errors(path), suppress(FileNotFoundError):
            if lock := hold(path / LOCK):
                discard(path, lock)
    return [path for path in partials if not path.exists()]


# -- the target


def _resolved(target: str | Path) -> Path:
    """Return the path without links, for the folder is made beside what they lead to."""
    with os_errors(Path(target)):
        try:
            return Path(target).resolve()
        except RuntimeError as error:  # Python 3.11 and 3.12
            raise StoreError(f"{target}: {error}") from error


def _refuse_taken(target: Path) -> None:
    way_out = "choose another name, or remove it"
    if target.is_dir():
        if os.path.ismount(target):
            raise StoreError(f"{target}: is where a disk is mounted, and cannot be renamed to: choose a folder in it")
        if count := len(os.listdir(target)):
            raise StoreError(f"{target}: exists and holds {count} files or folders: {way_out}")
    elif os.path.lexists(target):
        raise StoreError(f"{target}: exists and is no folder: {way_out}")


def _make_folders(folder: Path) -> None:
    """Make the missing ones, durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Put a file or folder on the disk as it is now, whatever happens then."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems know no fsync of folders
            raise
    finally:
        os.close(file)


def spelled(size: int) -> str:
    """Return a number of bytes as people read it: in the largest unit of which there is at least one."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


# -- partial folders and their locks


def make_and_hold(folder: Path) -> FileIO:
    """Make the folder, if it is not there, and take its lock; StoreError if another writer holds it."""
    while True:
        made = False
        with suppress(FileExistsError):
            folder.mkdir(0o700)
            made = True
        # A folder that has just gone was published or abandoned: then it is this one's turn.
        with suppress(FileNotFoundError):
            # What was just made is ours, even where a filesystem gives all files one owner and one mode.
            if not (made or _is_ours(folder)):
                raise StoreError(f"{folder}: is in the way and was not made here: remove it")
            if lock := hold(folder / LOCK):
                return lock
            raise StoreError(f"{folder}: another process is writing it: wait for it, or choose another name")


def _is_ours(folder: Path) -> bool:
    """Return whether this is a real folder, not a link, that is this user's, that nobody else may write to, and that is
    empty or has the lock: nothing else is ever emptied or published. Raises FileNotFoundError: it is not there."""
    status = folder.lstat()
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not mine or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    names = os.listdir(folder)
    return not names or LOCK in names


def _usual_mode(folder: Path) -> int:
    """Return the mode of a folder that is made in this one: the system tells the umask only by changing it."""
    inner = folder / ".mode"
    inner.mkdir()
    mode = stat.S_IMODE(inner.lstat().st_mode)
    inner.rmdir()
    return mode


def _is_leftover(folder: Path) -> bool:
    try:
        if not _is_ours(folder):
            return False
        with open_file(folder / LOCK, folder) as lock:
            return flock(lock, fcntl.LOCK_SH)
    except FileNotFoundError:  # killed before it could make the lock
        return folder.exists()


def empty(folder: Path) -> None:
    """Remove all but the lock; links are removed, not followed."""
    with os.scandir(folder) as entries:
        doomed = [entry for entry in entries if entry.name != LOCK]
    for entry in doomed:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def discard(folder: Path, lock: FileIO) -> None:
    """Remove a folder whose lock was held, if it still is, and let go of the lock. It loses its name first: what
    another process that still writes there would make anew would be in the way for ever."""
    with lock:
        if is_at(lock, folder / LOCK):
            if not folder.match(_DOOMED.format("*", "*")):
                folder = folder.rename(f"{folder}.{uuid.uuid4().hex[:8]}.doomed")
            empty(folder)
            (folder / LOCK).unlink()
            folder.rmdir()
