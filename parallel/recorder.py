"""Records when a rank did what, while somebody asks for it: actions of a pipeline, and waits for messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

RECOMPUTE = "recompute"
"""What is computed in a backward that a forward has computed before."""
_NOTHING = nullcontext()


class Mark(NamedTuple):
    """A point in time: seconds of the host's clock, an event of the current stream where there is a device, and the
    seconds in which this thread could have gone on before, but others had its core."""

    host: float
    event: Any = None
    queued: float = 0.0


class NotedInterval(NamedTuple):
    """Something that a rank did; ``about`` are integers, whose meaning depends on the kind."""

    kind: str
    about: tuple[int, ...]
    since: Mark
    until: Mark


class Timed(NamedTuple):
    """Something that a rank did, on the clock of its host, in seconds; ``track``: ``host``, or ``device`` as a GPU has
    done it; ``queued``: the seconds of it in which others had the core of the host."""

    track: str
    kind: str
    about: tuple[int, ...]
    start: float
    end: float
    queued: float = 0.0


class Recorder:
    """Notes what is done between :meth:`begin` and :meth:`end`, and nothing otherwise.

    On a GPU an event of the current stream stands at either end of what is noted. Nobody waits for it before
    :meth:`read`: between the events of a wait lies the time that the stream, not the host, has waited.

    Args:
        device: The device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._on: Any = torch.get_device_module(device) if device.type == "cuda" else None
        self._noted: list[NotedInterval] | None = None
        self._under_way: list[_NotedBlock] = []
        self._queued: Callable[[], float] = float

    @property
    def on(self) -> bool:
        """Whether something is recorded."""
        return self._noted is not None

    def begin(self, queued: Callable[[], float] = float) -> None:
        """Note from here on; ``queued`` tells the seconds in which others had the core of this thread."""
        self._noted, self._queued = [], queued

    def end(self) -> list[NotedInterval]:
        """Note nothing more -> what was noted."""
        noted, self._noted = self._noted or [], None
        return noted

    def over(self, kind: str, *about: int) -> AbstractContextManager[object]:
        """Return a block whose time is noted."""
        return _NOTHING if self._noted is None else _NotedBlock(self, kind, about)

    def now(self) -> Mark:
        """Return the present."""
        event = None
        if self._on is not None:
            event = self._on.Event(enable_timing=True)
            event.record()
        return Mark(time.perf_counter(), event, self._queued())

    def note(self, kind: str, about: tuple[int, ...], since: Mark) -> None:
        """Note what began at a mark and ends now."""
        if self._noted is not None:
            self._noted.append(NotedInterval(kind, about, since, self.now()))

    def leave(self) -> list[_NotedBlock]:
        """Note the blocks that are under way, as far as they have come -> them, for :meth:`enter`."""
        left, self._under_way = self._under_way, []
        for block in reversed(left):
            block.note()
        return left

    def enter(self, left: list[_NotedBlock]) -> None:
        """Go on with blocks that were left, where none is under way; what they do from here on is noted by itself."""
        self._under_way = left
        for block in left:
            block.begin()

    def read(self, noted: list[NotedInterval]) -> list[Timed]:
        """Return what was noted in seconds of the host's clock, of a device on a track of its own; this waits for the
        device."""
        found = [
            Timed("host", kind, about, since.host, until.host, until.queued - since.queued)
            for kind, about, since, until in noted
        ]
        if self._on is None:
            return found
        last = self.now().event
        last.synchronize()
        now = time.perf_counter()

        def at(mark: Mark) -> float:
            return now - float(mark.event.elapsed_time(last)) / 1000

        return found + [Timed("device", kind, about, at(since), at(until)) for kind, about, since, until in noted]


class _NotedBlock:
    """Notes the time of a block."""

    __slots__ = ("_about", "_kind", "_recorder", "_since")

    def __init__(self, recorder: Recorder, kind: str, about: tuple[int, ...]) -> None:
        self._recorder, self._kind, self._about = recorder, kind, about

    def __enter__(self) -> None:
        self._recorder._under_way.append(self)
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.note()
        self._recorder._under_way.remove(self)

    def begin(self) -> None:
        self._since = self._recorder.now()

    def note(self) -> None:
        self._recorder.note(self._kind, self._about, self._since)


IDLE = Recorder(torch.device("cpu"))
"""The recorder of groups that no mesh has made, which nobody begins."""
