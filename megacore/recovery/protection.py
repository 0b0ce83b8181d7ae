"""The protection of a run, which stands beside its loop on each rank: without it, a run trains to the same bytes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from megacore.outcome import AGENT, PAUSE, rank_file
from megacore.recovery.beats import PHASES, UPDATED, Beat, Place, done_at
from megacore.recovery.flight_recorder import answer
from megacore.recovery.memory_checkpoints import MemoryCheckpoints
from megacore.training.step import Phase, Stats
from megacore.training.trainer import Callback, Trainer


class Beats(Callback):
    """Tells the agent of this rank where it is, if there is one; it comes first of all callbacks.

    On a GPU an event stands before each phase, and after each update; it is asked, but never waited for, whether the
    device has come to it.
    """

    def __init__(self) -> None:
        self._beat: Beat | None = None
        self._marks = deque[tuple[Place, torch.cuda.Event]]()
        self._reached: Place | None = None
        """The last place that the device was seen to have come to."""
        self._phases = 0
        """The phases of this step so far."""
        if folder := os.environ.get(AGENT):
            with suppress(OSError):
                self._beat = Beat(rank_file(Path(folder), "beat", os.getpid()))
                answer(Path(folder), self._device)

    def on_phase(self, run: Trainer, phase: Phase) -> None:
        if self._beat is not None:
            step = run.step + (phase == "data")
            self._beat.enter(phase, step)
            self._mark(run, step, phase)

    def on_step_begin(self, run: Trainer) -> None:
        if self._beat is not None and run.mesh.device.type == "cuda":
            while self._marks and self._marks[0][1].query():
                self._reached, _ = self._marks.popleft()
            begun = self._marks[0][0][0] if self._marks else run.step
            self._beat.device_did(begun - 1 if self._reached is None else done_at(self._reached))

    def on_step(self, run: Trainer, stats: Stats) -> None:
        if self._beat is not None:
            self._mark(run, run.step, UPDATED)
            self._beat.did(run.step)

    def _mark(self, run: Trainer, step: int, phase: Phase) -> None:
        """Have the device say when it has come here; not at the end, which may be that of a device with an error."""
        if run.mesh.device.type == "cuda" and phase in PHASES and phase != "end":
            self._phases = 1 if phase == "data" else self._phases + 1
            mark = torch.cuda.Event()
            mark.record()  # which may wait for room, and an event that is not recorded says that it is over
            self._marks.append(((step, self._phases, phase), mark))

    def _device(self) -> Place | None:
        """Return the last place that the device has come to.

        The thread that answers asks this, while the main thread may wait for the device.
        """
        return max((place for place, mark in list(self._marks) if mark.query()), default=self._reached)


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
