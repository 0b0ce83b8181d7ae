"""Python's garbage, collected after the same steps on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from megacore.training.trainer import Callback, Trainer

EVERY = 50
"""Steps between collections."""


class Garbage(Callback):
    """Lets Python collect no garbage by itself: a host stands still for it, each at another time, and all wait."""

    _enabled = False

    def on_start(self, run: Trainer) -> None:
        self._enabled = gc.isenabled()
        gc.disable()

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        if run.step % EVERY == 0:
            gc.collect(1)

    def on_end(self, run: Trainer) -> None:
        if self._enabled:
            gc.enable()

    def on_error(self, run: Trainer, error: BaseException) -> None:
        self.on_end(run)
