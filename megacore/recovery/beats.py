"""The place of each rank in its step, as it writes it and as its agent reads it. No torch.

A rank writes its :class:`Beat` into a page of memory that is a file in the agent's folder: no system call, no lock, and
nobody is asked. The agent reads the file when it likes, also while the rank is stopped or holds the interpreter.

The page holds doubles, each written at once: since when, the place (step and phase in one number, so that they belong
together), and what was done and measured. Of a place and its time the time is written first: who reads between the two
takes the rank for younger than it is, and looks again.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, thread_time
from typing import Final, Literal, get_args

from megacore.resources import queued_s

Phase = Literal["start", "data", "forward", "backward", "reduce", "update", "log", "save", "evaluate", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases of a rank: ``start`` before its first step, ``data`` while it waits for a batch, ``log`` while it reads
and writes metrics, ``end`` after its last step."""

Place = tuple[int, int, Phase]
"""The place that a device has come to: the step, the number of the phase in it, and the phase."""
UPDATED: Final = "log"
"""The phase of a device that has just done the update of its step."""

_NUMBER: Mapping[str, int] = {phase: number for number, phase in enumerate(PHASES)}
_DATA = _NUMBER["data"]
_ASIDE = _NUMBER["save"], _NUMBER["evaluate"]
_STEP = 16
"""The factor of the step in a place; phases are fewer."""
_SINCE, _PLACE, _DONE, _DEVICE, _SLOWEST, _LONGEST, _QUEUED, _BUSY = range(8)
_PAGE = struct.Struct(f"={_BUSY + len(PHASES)}d")


class Beat:
    """The page in which this rank says where it is. Raises OSError: it cannot be made."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        with path.open("x+b") as file:
            file.write(bytes(_PAGE.size))  # a page that the disk has no room for would end this process
            file.flush()
            self._page = memoryview(mmap.mmap(file.fileno(), _PAGE.size)).cast("d")
        self._here = self._step = self._steps = 0
        self._queued, self._spent_aside = queued_s(), 0.0
        self._busy = thread_time()
        self._since = self._did = monotonic()
        self._page[_DONE] = self._page[_DEVICE] = -1
        self._page[_SINCE] = self._since

    def enter(self, phase: str, step: int | None = None) -> None:
        """Leave one phase for another, or for the next part of the same one; the step stays where none is given.

        A name that is none of :data:`PHASES` changes nothing.
        """
        if (number := _NUMBER.get(phase)) is None:
            return
        now, busy, page, here = monotonic(), thread_time(), self._page, self._here
        spent = busy - self._busy
        if _DATA in (here, number):
            queued = queued_s()
            if here == _DATA:
                spent = now - self._since - (queued - self._queued)
            else:
                page[_QUEUED] += queued - self._queued
            self._queued = queued
        page[_BUSY + here] += max(0.0, spent)
        if here in _ASIDE:
            self._spent_aside += now - self._since
            page[_LONGEST] = max(page[_LONGEST], now - self._since)
        self._since, self._busy, self._here = now, busy, number
        if step is not None:
            self._step = step
        page[_SINCE] = now
        page[_PLACE] = self._step * _STEP + number

    def did(self, step: int) -> None:
        """Say that the update of a step is in, as far as the host knows.

        The time of the first step counts until there is another one: in it things are compiled and connected.
        """
        now, page = monotonic(), self._page
        spent = now - self._did - self._spent_aside
        page[_SLOWEST] = max(spent, page[_SLOWEST]) if self._steps > 1 else spent
        self._steps, self._did, self._spent_aside = self._steps + 1, now, 0.0
        page[_DONE] = step

    def device_did(self, step: int) -> None:
        """Say which step the device has done; the host may be ahead of it."""
        self._page[_DEVICE] = step


@dataclass(frozen=True)
class Reading:
    """A beat as it was read.

    Args:
        since: When it was entered, by ``time.monotonic``, which all processes of a machine share.
        done: The last step whose update is in, as far as the host knows; -1 before the first one.
        device: The last step that the device has done, as far as that was looked at; -1 where nobody does.
        slowest: Seconds of the slowest step; those of the first one only until there is another. 0 before.
        longest: The most seconds that a save, or a batch of an evaluation, has taken; 0 before the first.
        busy: {phase: all seconds of it in which the main thread computed, rather than waited; of ``data`` all but those
            in which others had its core, for no rank is waited for in it}.
        queued: All seconds, from each batch to the wait for the next one, in which others had the core of the main
            thread.
    """

    step: int
    phase: Phase
    since: float
    done: int
    device: int
    slowest: float
    longest: float
    busy: Mapping[Phase, float]
    queued: float = 0.0


def done_at(place: Place) -> int:
    """Return the last step that a device has done which has come to a place."""
    step, _, phase = place
    return step if _NUMBER[phase] >= _NUMBER[UPDATED] else step - 1


UNBORN = Reading(0, "start", 0.0, -1, -1, 0.0, 0.0, dict.fromkeys(PHASES, 0.0))
"""The reading of a rank that has no beat yet."""


def read(path: Path) -> Reading | None:
    """Read a rank's beat; None where there is none."""
    try:
        page = path.read_bytes()
    except OSError:
        return None
    if len(page) != _PAGE.size:
        return None
    since, place, done, device, slowest, longest, queued, *busy = _PAGE.unpack(page)
    if not since:
        return None
    step, number = divmod(int(place), _STEP)
    seconds = dict(zip(PHASES, busy, strict=True))
    return Reading(step, PHASES[number], since, int(done), int(device), slowest, longest, seconds, queued)
