"""Opening and replacing files: what others may have put in the way, a link, a pipe or a device, is not followed.

Errors are OSErrors, some in words of their own: :func:`~megacore.store.tensor_files.tensors.os_errors` makes
StoreErrors of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader, BufferedWriter, FileIO
from pathlib import Path, PurePosixPath

from megacore.store.io.errors import StoreError
from megacore.store.io.objects import ObjectPath

_FOLDER: int = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe"}
_REPOSITORY = re.compile("(?:model|dataset|space)s--")
_SHARED = re.compile("([0-9a-f]{2})/\\1[0-9a-f]{62}")
"""The name of a file that repositories in the hub's cache share: the hash of what it holds."""


# -- to read


def open_file(path: Path, root: Path | None = None) -> BufferedReader:
    """Open a regular file for reading. Raises OSError: it is not there or no file, or its links lead out, so that
    whoever made the folder would have us read what is not theirs. ``root``: the folder of whoever made it, which its
    links may not leave; None where the user has named the file. The hub's cache counts as one: there, files in
    ``snapshots/REVISION`` are links to those in ``blobs`` of the repository, which may be links to those that all
    repositories share."""
    if isinstance(path, ObjectPath):
        return path.open()
    real = Path(os.path.realpath(path))
    home = real.parent if root is None else _home(real, root)
    if home is None:
        why = f"leads to {real}, outside of {os.path.realpath(root or '.')}: put the file itself there"
        raise PermissionError(errno.EACCES, why, str(path))
    *way, name = real.relative_to(home).parts or (".",)
    folder = None
    try:
        folder = os.open(home, _FOLDER)
        # What was resolved has no links: one that is met now was put there in between, and is not followed.
        for part in way:
            outer, folder = folder, os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(outer)
        # Looked at before it is opened: a device may act.
        _check_regular(os.stat(name, dir_fd=folder, follow_symlinks=False), path)
        return BufferedReader(FileIO(path, opener=lambda _, flags: _opened(path, flags, name, folder)))
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        if folder is not None:
            os.close(folder)


def leaves(path: Path, root: Path) -> bool:
    """Return whether the links of a path lead out of a folder, as :func:`open_file` has it."""
    return _home(Path(os.path.realpath(path)), root) is None


def is_inside(name: str) -> bool:
    """Return whether a name in a file of strangers stays in the folder. Links there may lead out, as in the hub's
    cache."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and name.isprintable() and "\\" not in name


def _home(real: Path, root: Path) -> Path | None:
    folder = Path(os.path.realpath(root))
    homes = [folder]
    if folder.parent.name == "snapshots":
        repository = folder.parent.parent
        homes.append(repository / "blobs")
        shared = repository.parent / "blobs"
        if _REPOSITORY.match(repository.name) and _SHARED.fullmatch(os.path.relpath(real, shared)):
            homes.append(shared)
    return next((home for home in homes if real.is_relative_to(home)), None)


def _opened(path: Path, flags: int, name: str | None = None, folder: int | None = None) -> int:
    """Open a regular file that is no link -> its descriptor; a pipe is not waited for."""
    file = os.open(name or path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666, dir_fd=folder)
    try:
        _check_regular(os.fstat(file), path)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "device or socket")
        raise OSError(errno.EINVAL, f"is a {kind}, and no file", str(path))


# -- to write: beside these, only open(path, "x"), which takes no name that is there


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BufferedWriter]:
    """Open a file to write into, which takes its name at the end: under it stands what was there, or all of the new
    one. ``path``: its name; a link of this name is replaced, not followed. Raises OSError: it cannot be written."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)  # what a kill has left
    with open(new, "xb") as file:
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            new.replace(path)
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise


def append(path: Path) -> BufferedWriter:
    """Open a file of ours to add to, which is made if it is not there. Raises OSError: its name is taken by a link, by
    what is no file, or by a file of somebody else or of two names."""
    file = FileIO(path, "a", opener=lambda name, flags: _opened(path, flags))
    status = os.fstat(file.fileno())
    if status.st_uid != os.geteuid() or status.st_nlink != 1:
        file.close()
        why = "has another name too" if status.st_uid == os.geteuid() else "belongs to somebody else"
        raise PermissionError(errno.EPERM, f"{why}, and nothing is added to it: move it away", str(path))
    return BufferedWriter(file)


def ends_within_a_line(path: Path) -> bool:
    """Return whether the last line of a file of ours has been cut, by a kill or a full disk."""
    with open_file(path, path.parent) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


# -- to lock: one process holds a file at a time, until it lets go or dies


class NoLocks(StoreError):
    """A filesystem has no locks."""


def open_lock(path: Path) -> FileIO:
    """Open a file to lock, which is made if it is not there. Raises OSError: its name is taken by a link or by what is
    no file, or its folder has just gone."""
    return FileIO(path, "r+", opener=lambda name, flags: _opened(path, flags | os.O_CREAT))


def hold(path: Path) -> FileIO | None:
    """Lock a file, made if it is not there; None while someone else holds it. To hold it is to own what it stands for:
    who opened it before it was renamed or removed does not. Raises FileNotFoundError: the file or its folder has just
    gone; NoLocks: its filesystem has none."""
    with ExitStack() as stack:
        lock = stack.enter_context(open_lock(path))
        if flock(lock, fcntl.LOCK_EX) and is_at(lock, path):
            stack.pop_all()
            return lock
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
