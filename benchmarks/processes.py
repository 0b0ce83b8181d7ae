"""What a command takes: wall time, CPU time and memory, of all its processes together."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL_S = 0.01
_PROC = Path("/proc")


@dataclass(frozen=True)
class Usage:
    """Seconds from the start to the end, of user and of system CPU time; the most memory at once, in bytes."""

    seconds: float
    user: float
    system: float
    peak: int


def run(command: Sequence[str], folder: Path) -> Usage:
    """Run a command in a folder.

    Its memory is what its processes hold beside the file cache, looked at every 10 ms; 0 where there is no ``/proc``.

    Raises:
        RuntimeError: it fails; with the end of what it printed.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL_S):
            peak[0] = max(peak[0], sum(map(_memory, family(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stdout is not None
    with process.stdout as output:
        printed = output.read()  # until its last process has closed it
    # Not Popen.wait: this one also tells the CPU time of the process and its children.
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    done.set()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}: {printed.decode(errors='replace')[-500:].strip()}")
    return Usage(seconds, usage.ru_utime, usage.ru_stime, peak[0])


def family(process: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield process
    try:
        for thread in os.listdir(_PROC / str(process) / "task"):
            for child in (_PROC / str(process) / "task" / thread / "children").read_text().split():
                yield from family(int(child))
    except OSError:  # it has ended
        return


def _memory(process: int) -> int:
    """Anonymous and shared memory of a process, in bytes: all that is not the cache of a file."""
    try:
        lines = (_PROC / str(process) / "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
