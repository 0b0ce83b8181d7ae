"""torchrun that ends quietly: what a trainer has said is not followed by the launcher's own stack trace.

SIGUSR1, which asks the trainers for a checkpoint, is passed on to them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def _pass_on() -> None:
    while True:
        number = signal.sigwait({signal.SIGUSR1})
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, number)


def _children() -> Iterator[int]:
    """Of this process, as Linux lists them; elsewhere there is no list, and a trainer is sent the signal itself."""
    for listed in Path("/proc/self/task").glob("*/children"):
        yield from map(int, listed.read_text().split())


def main() -> int:
    """The exit status: of the first process that failed, or 128 + the signal that ended the launcher."""
    # The trainers start with it blocked: one that comes before they listen waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=_pass_on, name="pass on", daemon=True).start()
    try:
        torchrun(sys.argv[1:])
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        failure = error.get_first_failure()[1]
        if failure.exitcode not in (1, 2):  # those two have said what was wrong
            print(error, file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
