"""The place of each rank in its step, as it writes it and as its agent (the launcher) reads it. No torch.

A rank writes its :class:`Beat` into a page of memory that is a file in the agent's folder: no system call, no lock, and
nobody is asked. The agent reads the file when it likes, also while the rank is stopped or holds the interpreter.

The page holds doubles, each written at once: since when, the place (step and phase in one number, so that they belong
together), then the slowest, the busy and the longest seconds of each phase. Of a place and its time the time is written
first: who reads between the two takes the rank for younger than it is, and looks again.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, field
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
_DATA = _NUMBER["data"]
_STEP = 16
"""The factor of the step in a place; phases are fewer."""
_SINCE, _PLACE, _SLOWEST = 0, 1, 2
_BUSY = _SLOWEST + len(PHASES)
_LONGEST = _BUSY + len(PHASES)
_PAGE = struct.Struct(f"={_LONGEST + len(PHASES)}d")
_BREAKS_OFF = ("recover", "end")
"""The phases that a fault leads to: what was left for them was not done, or waited for who had stood still."""


def beat_of(folder: Path, life: int) -> Path:
    """Return the file in the agent's folder that a process, the number of which is unique in the run, writes its beat
    to."""
    return folder / f"beat-{life}"


class Beat:
    """The place of this rank, told to whom it may concern.

    Args:
        path: The file to make; None where nobody listens.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            memory = mmap.mmap(-1, _PAGE.size)
        else:
            with path.open("x+b") as file:
                file.truncate(_PAGE.size)
                memory = mmap.mmap(file.fileno(), _PAGE.size)
        self._page = memoryview(memory).cast("d")
        self._here = self._step = 0
        self._since, self._busy = monotonic(), thread_time()
        self._page[_SINCE] = self._since
        self._queued = 0.0
        self._longest = [0.0] * len(PHASES)
        self._forget()

    @classmethod
    def here(cls) -> Beat:
        """Return the beat of this process, which its agent reads, if there is one."""
        path = os.environ.get(BEAT)
        return cls(Path(path) if path else None)

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Leave one phase for another, or for the next part of the same one; the step stays where none is given.

        The time in a phase counts towards its slowest from its second step on: in the first, things are compiled,
        connected and allocated. Nothing of it survives a recovery, of which that is true again: there the longest time,
        in any step that was done, tells what may be waited for.
        """
        now, busy, page, here = monotonic(), thread_time(), self._page, self._here
        spent = now - self._since - (queued_s() - self._queued) if here == _DATA else busy - self._busy
        page[_BUSY + here] += max(0.0, spent)
        if phase == "data":
            self._queued = queued_s()
        if now - self._since > self._longest[here] and phase not in _BREAKS_OFF:
            page[_LONGEST + here] = self._longest[here] = now - self._since
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

    def waited(self, seconds: float) -> None:
        """Add seconds to the busy ones of this phase in which this rank waited, but for no other: for a disk, say."""
        self._page[_BUSY + self._here] += seconds

    def _forget(self) -> None:
        self._first = [-1] * len(PHASES)
        self._slowest = [0.0] * len(PHASES)
        for number in range(len(PHASES)):
            self._page[_SLOWEST + number] = 0.0


def queued_s() -> float:
    """Return the seconds in which this thread was ready and others had its core; 0 where the system does not tell.

    Without them a loaded machine would make a straggler of whichever rank it let wait.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


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
        busy: {phase: all seconds of it in which the main thread computed, rather than waited;
            of ``data`` all but those in which others had its core, for no rank is waited for in it, and of ``save``
            those of its own files}.
        longest: {phase: the most seconds in it, those of the first step and of recoveries among them}.
    """

    step: int
    phase: Phase
    since: float
    slowest: dict[Phase, float]
    busy: dict[Phase, float]
    longest: dict[Phase, float] = field(default_factory=dict)


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
    each = len(PHASES)
    slowest, busy, longest = (
        dict(zip(PHASES, seconds[at : at + each], strict=True)) for at in range(0, 3 * each, each)
    )
    return Reading(step, PHASES[number], since, _measured(slowest), busy, _measured(longest))


def _measured(seconds: dict[Phase, float]) -> dict[Phase, float]:
    return {phase: most for phase, most in seconds.items() if most}
