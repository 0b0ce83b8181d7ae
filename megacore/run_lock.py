"""One run at a time in a folder.

Rank 0 of a run holds ``run.lock`` in its folder, from before it writes anything until it ends. The file says who holds
it, and a heartbeat counts up in it: locks of network file systems may not reach other machines, and some have none, so
that there a lock that can be had counts only when the heartbeat has stood still. The other way round, a holder that
finds somebody else's name in its file ends at once. A folder of checkpoints in an object store is held likewise.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from megacore.say import brief, err
from megacore.store.io.files import NoLocks, flock, hold, open_file, open_lock
from megacore.store.io.objects import ObjectPath
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.publish import write_file
from megacore.store.tensor_files.tensors import os_errors

LOCK = "run.lock"
INTERVAL_S = 5.0
"""Between two heartbeats."""
STALE = 6
"""So many intervals without a heartbeat, and a holder on another machine counts as gone."""

_BYTES = 1024  # of a record, with room to spare: it is overwritten in place
_LONGEST = 256  # characters of a path in it
_TRIES = 20  # to have the lock while somebody just looks at it


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as its file says."""

    host: str
    pid: int
    machine: str
    """The start of the machine that it is on."""
    token: str
    """No two holders have the same."""
    since: str
    """The time when it was taken, in UTC."""
    beat: int = 0
    """Counts up at each heartbeat."""
    out: str = ""
    """The folder of its run, where the lock is not in it."""

    def is_as(self, other: Holder) -> bool:
        """Return whether both are of one machine, or container of it, and one folder."""
        return (self.host, self.machine, self.out) == (other.host, other.machine, other.out)

    @classmethod
    def here(cls, out: str = "") -> Holder:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return cls(platform.node(), os.getpid(), _machine(), uuid.uuid4().hex, now, out=out)

    def __str__(self) -> str:
        return f"process {brief(self.pid)} on {brief(self.host)}, since {brief(self.since)}"


def _machine() -> str:
    """Return what tells this start of this machine apart: hosts may share a name; a machine's containers may not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    except OSError:
        return platform.node()


def read(path: Path) -> Holder | None:
    """Return the holder that a lock's file names; None where it names none."""
    try:
        with open_file(path, path.parent) as file:
            found = Holder(**json.loads(file.read(_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):  # not there, or just being written
        return None
    return found


def holder(out: Path) -> str | None:
    """Return the holder of a folder, as far as this machine's locks tell; None if there is none. Takes no lock."""
    path = out / LOCK
    try:
        with open_file(path, out) as file:
            return None if flock(file, fcntl.LOCK_SH) else str(read(path) or "another process")
    except (OSError, StoreError):
        return None


class RunLock:
    """A folder that is held, as a context manager: :meth:`take` makes one, leaving it lets go. Its file is open, and
    locked where its filesystem has locks; in an object store there is none."""

    def __init__(
        self, path: Path, file: FileIO | None, holder: Holder, interval_s: float, lost: Callable[[str], object]
    ) -> None:
        self._path, self._file, self._holder, self._lost = path, file, holder, lost
        self._write()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(interval_s,), name="run lock", daemon=True)
        self._thread.start()

    @classmethod
    def take(
        cls,
        out: Path,
        interval_s: float = INTERVAL_S,
        tell: Callable[[str], object] = err,
        lost: Callable[[str], object] | None = None,
        by: Path | None = None,
    ) -> RunLock:
        """Hold a folder, which is made if it is not there. ``interval_s``: between two heartbeats; ``tell``: is told
        why this takes a while; ``lost``: is told when somebody else has taken the folder; by default the process says
        so and ends; ``by``: the folder of the run, held already, where it is another one. Raises StoreError: another
        run holds it; it says who."""
        path, here = out / LOCK, Holder.here(str(by.resolve())[-_LONGEST:] if by else "")
        with os_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            file, local = _open(path)
            found = read(path)
            if found is not None and not (local and found.is_as(here)):
                tell(f"{out} was held by {found}; waiting for {STALE * interval_s:g} s to see whether it still is")
                if _is_alive(path, found, STALE * interval_s, interval_s / 4):
                    if file is not None:
                        file.close()
                    raise StoreError(held(out, str(found)))
            return cls(path, file, here, interval_s, lost or _end_at_once)

    def release(self) -> None:
        """Let go of the folder."""
        self._end.set()
        self._thread.join()
        with suppress(OSError, StoreError):
            if self._is_ours():
                self._path.unlink()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _beat(self, interval_s: float) -> None:
        while not self._end.wait(interval_s):
            with suppress(OSError, StoreError):  # a file server that is away for a while; the lock is no reason to end
                if not self._is_ours():
                    self._lost(
                        f"{self._path.parent} was taken by {read(self._path) or 'another process'} while this run held "
                        "it: this run ends, and leaves the folder to that one"
                    )
                    return
                self._holder = replace(self._holder, beat=self._holder.beat + 1)
                self._write()

    def _is_ours(self) -> bool:
        """Return whether nobody else holds the file; one that is gone, with the folder say, is nobody's."""
        other = read(self._path)
        return other is None or other.token == self._holder.token

    def _write(self) -> None:
        data = json.dumps(asdict(self._holder)).encode().ljust(_BYTES)
        if self._file is None:
            write_file(self._path, data)
        else:
            os.pwrite(self._file.fileno(), data, 0)
            os.fsync(self._file.fileno())  # what others read of a network file system


def _open(path: Path) -> tuple[FileIO | None, bool]:
    """Return the file, and whether it is locked; without locks it is merely open. An object store has no files to lock,
    and needs none against runs of this machine in the same out, which is held already. Raises StoreError: somebody else
    holds it."""
    if isinstance(path, ObjectPath):
        return None, True
    for _ in range(_TRIES):
        try:
            with suppress(FileNotFoundError):  # its holder has just let go
                if file := hold(path):
                    return file, True
        except NoLocks:
            return open_lock(path), False
        time.sleep(0.05)
    raise StoreError(held(path.parent, str(read(path) or "another process")))


def held(out: Path, who: str) -> str:
    """Return the message for a second run."""
    key = "checkpoint.folder" if isinstance(out, ObjectPath) else "out"
    return f"{key} ({out}) is held by a run, {who}: wait for it or end it, or choose another {key}="


def _is_alive(path: Path, other: Holder, seconds: float, step: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(step)
        now = read(path)
        if now is not None and (now.token, now.beat) != (other.token, other.beat):
            return True
        if now is None and not path.exists():
            return False  # let go
    return False


def _end_at_once(said: str) -> None:
    # Whatever this process writes from here on, it would write into another run's folder.
    err(said)
    os._exit(1)
