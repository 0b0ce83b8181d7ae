"""The signals by which a run is asked to end, or to save."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """SIGINT and SIGTERM ask for an end after the current step, SIGUSR1 for a checkpoint after it.

    Another SIGINT, ``patience_s`` later, ends at once: under torchrun one Ctrl-C arrives twice, from the terminal and
    from torchrun, which passes it on. Our own launcher lets no SIGINT through.
    """

    asked: bool = False
    save: bool = False
    patience_s: float = 2.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        first: list[float] = []

        def ask(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if number == signal.SIGINT and first and now - first[0] > self.patience_s:
                raise KeyboardInterrupt
            first.append(now)
            self.asked = True

        def ask_to_save(number: int, frame: FrameType | None) -> None:
            self.save = True

        handlers = {signal.SIGINT: ask, signal.SIGTERM: ask, signal.SIGUSR1: ask_to_save}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        # The launcher has blocked the one, and of who takes the place of another rank both, so that none was lost.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGTERM})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for number, handler in before.items():
                signal.signal(number, handler)
