"""The protection of a run, which stands beside its loop on each rank: without it, a run trains to the same bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megacore.outcome import AGENT, PAUSE
from megacore.recovery.beat_writer import Beats
from megacore.recovery.memory_checkpoints import MemoryCheckpoints
from megacore.training.trainer import Callback, Trainer


class Pause(Callback):
    """Passes on that an agent asks its ranks to end after their step: nodes come or go."""

    def __init__(self) -> None:
        folder = os.environ.get(AGENT)
        self._file = Path(folder) / PAUSE if folder else None

    def ask(self, run: Trainer) -> Mapping[str, float]:
        asked = self._file is not None and self._file.exists()
        return {"pause": asked, "look": asked, "keep": asked}


def protection() -> list[Callback]:
    """Return the callbacks of a rank: it tells its agent where it is and heeds it, and keeps checkpoints in memory."""
    return [Beats(), Pause(), MemoryCheckpoints()]
