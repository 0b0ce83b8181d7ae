"""The place of each rank in its step, as it writes it and as its agent (the launcher) reads it. No torch.

A rank writes its :class:`Beat` into a page of memory that is a file in the agent's folder: no system call, no lock, and
nobody is asked. The agent reads the file when it likes, also while the rank is stopped or holds the interpreter.

The page holds doubles, each written at once: since when, the place (step and phase in one number, so that they belong
together), then the slowest and the busy seconds of each phase. Of a place and its time the time is written first: who
reads between the two takes the rank for younger than it is, and looks again.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, thread_time
from typing import Literal, get_args

Phase = Literal["start", "data", "forward", "backward", "reduce", "update", "log", "save", "evaluate", "recover", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases of a rank: ``start`` before its first step, ``data`` while it waits for a batch, ``log`` while it reads
and writes metrics, ``recover`` while groups and trainer are made anew, ``end`` after its last step."""

BEAT = "MEGACORE_BEAT"
"""The variable that names the file of a rank's beat."""

_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
_STEP = 16
"""The factor of the step in a place; phases are fewer."""
_SINCE, _PLACE, _SLOWEST = 0, 1, 2
_BUSY = _SLOWEST + len(PHASES)
_PAGE = struct.Struct(f"={_BUSY + len(PHASES)}d")


def beat_of(folder: Path, rank: int) -> Path:
    """Return the file in the agent's folder that a rank writes its beat to."""
    return folder / f"beat-{rank}"


class Beat:
    """The place of this rank, told to whom it may concern.

    Args:
        path: The file to make; None where nobody listens.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            memory = mmap.mmap(-1, _PAGE.size)
        else:
            path.unlink(missing_ok=True)  # of a rank that this one replaces
            with path.open("x+b") as file:
                file.truncate(_PAGE.size)
                memory = mmap.mmap(file.fileno(), _PAGE.size)
        self._page = memoryview(memory).cast("d")
        self._here = self._step = 0
        self._since, self._busy = monotonic(), thread_time()
        self._page[_SINCE] = self._since
        self._forget()

    @classmethod
    def here(cls) -> Beat:
        """Return the beat of this process, which its agent reads, if there is one."""
        path = os.environ.get(BEAT)
        return cls(Path(path) if path else None)

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Leave one phase for another, or for the next part of the same one; the step stays where none is given.

        The time in a phase counts towards its slowest from its second step on: in the first, things are compiled,
        connected and allocated. Nothing that was measured survives a recovery, of which that is true again.
        """
        now, busy, page, here = monotonic(), thread_time(), self._page, self._here
        page[_BUSY + here] += busy - self._busy
        if self._first[here] != self._step:
            if self._first[here] < 0:
                self._first[here] = self._step
            elif now - self._since > self._slowest[here]:
                page[_SLOWEST + here] = self._slowest[here] = now - self._since
        self._since, self._busy, self._here = now, busy, _NUMBER[phase]
        if step is not None:
            self._step = step
        page[_SINCE] = now
        page[_PLACE] = self._step * _STEP + self._here
        if phase == "recover":
            self._forget()

    def _forget(self) -> None:
        self._first = [-1] * len(PHASES)
        self._slowest = [0.0] * len(PHASES)
        for number in range(len(PHASES)):
            self._page[_SLOWEST + number] = 0.0


UNHEARD = Beat()
"""The beat of whoever has no agent."""


@dataclass(frozen=True)
class Reading:
    """A beat as it was read.

    Args:
        step: The step.
        phase: The phase of it.
        since: When it was entered, by ``time.monotonic``, which all processes of a machine share.
        slowest: {phase: the most seconds in it}; a phase that was not measured yet is not there.
        busy: {phase: all seconds of it in which the main thread computed, rather than waited}.
    """

    step: int
    phase: Phase
    since: float
    slowest: dict[Phase, float]
    busy: dict[Phase, float]


def read(path: Path) -> Reading | None:
    """Read a rank's beat; None where there is none yet."""
    try:
        page = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(page) != _PAGE.size:
        return None
    since, place, *seconds = _PAGE.unpack(page)
    if not since:
        return None
    step, number = divmod(int(place), _STEP)
    slowest, busy = (dict(zip(PHASES, part, strict=True)) for part in (seconds[: len(PHASES)], seconds[len(PHASES) :]))
    return Reading(step, PHASES[number], since, {phase: most for phase, most in slowest.items() if most}, busy)
