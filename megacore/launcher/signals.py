"""The signals that reach a launcher, noted from its first moment on. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ASKS = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def noted() -> Iterator[list[int]]:
    """Let signals within this block do no more than appear in a list; those that are ignored stay so (nohup)."""
    arrived = list[int]()
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody handle signals
        yield arrived
        return

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    heeded = [each for each in (*ENDS, *ASKS) if signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
