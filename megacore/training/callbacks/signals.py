"""The signals by which a run is asked to end, or to save."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from megacore.training.trainer import Callback, Trainer

PATIENCE_S = 2.0
"""Another SIGINT ends at once, so many seconds after the first: under torchrun one Ctrl-C arrives twice, from the
terminal and from torchrun, which passes it on. Our own launcher lets no SIGINT through."""


class Signals(Callback):
    """SIGINT and SIGTERM ask for an end after the current step, SIGUSR1 for a checkpoint after it."""

    def __init__(self) -> None:
        self.stop = self.save = False
        self._first: float | None = None
        self._before = dict[signal.Signals, Any]()
        self._blocked = set[signal.Signals]()

    def on_start(self, run: Trainer) -> None:
        handlers = {signal.SIGINT: self._ask, signal.SIGTERM: self._ask, signal.SIGUSR1: self._ask_to_save}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        # The launcher has blocked them until here, so that none was lost, and none has ended the rank.
        self._blocked = {*signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGTERM})}  # type: ignore[arg-type]

    def ask(self, run: Trainer) -> Mapping[str, float]:
        save, self.save = self.save, False
        asked = self.stop or save
        return {"stop": self.stop, "save.wanted": save, "look": asked, "keep": asked}

    def on_end(self, run: Trainer) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_error(self, run: Trainer, error: BaseException) -> None:
        self.on_end(run)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self._first is not None and now - self._first > PATIENCE_S:
            raise KeyboardInterrupt
        self._first = now if self._first is None else self._first
        self.stop = True

    def _ask_to_save(self, number: int, frame: FrameType | None) -> None:
        self.save = True
