"""The incidents of a run, ``incidents.jsonl`` in its folder: what befell it, what was done, what it cost. No torch.

The agent of node 0 appends a line for each fault that it answers, rank 0 one for each event that the ranks answer by
themselves, a bad step say; both append another one, of the same number, with what is known of it later. They take turns
by a lock on the file. Nothing is overwritten, and a line that a kill or a full disk has cut is passed over.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from io import BufferedWriter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megacore.recovery.events import Event
from megacore.recovery.policy import Decision, Incident
from megacore.store.files import append, open_file
from megacore.store.lock import NoLocks, flock
from megacore.store.strict_json import StoreError, parse_json, read_file
from megacore.store.tensors import os_errors

INCIDENTS = "incidents.jsonl"
TURN_S = 1.0
"""Seconds after which another writer is not waited for any more: it may have been stopped in its turn."""


def read(out: Path) -> list[Incident]:
    """Return the incidents of a run, in the order in which they befell it; none where there is no file.

    Raises:
        StoreError: it cannot be read.
    """
    found = dict[int, dict[str, Any]]()
    for line in _lines(out / INCIDENTS):
        found.setdefault(line["number"], {}).update(line)
    adapter, incidents = TypeAdapter(Incident), list[Incident]()
    for number in sorted(found):
        try:
            incidents.append(adapter.validate_python(found[number]))
        except ValidationError:  # an addition to a line that was cut
            continue
    return incidents


class IncidentWriter:
    """One process's part of the incidents of a run. What the disk does not take is told and waits: a run does not end
    for it.

    Args:
        out: The folder of the run.
        tell: Says why the disk does not take it, once for each reason in a row.
    """

    def __init__(self, out: Path, tell: Callable[[str], None]) -> None:
        self._out, self._tell = out, tell
        self._waiting = list[Callable[[], Incident | None]]()
        self._told = ""

    def write(self, event: Event, decision: Decision, life: str = "") -> Incident:
        """Add an incident to those of the run -> it, without a number where it waits."""
        self._waiting.append(lambda: write(self._out, event, decision, life))
        return self.catch_up() or Incident(event, decision, life)

    def went_on(self, after: int | None, at: float) -> None:
        """Add to the incidents that nothing is known of yet that the run goes on after a step, and has done another; or
        that it had not stopped."""
        self._waiting.append(lambda: went_on(self._out, after, at))
        self.catch_up()

    def catch_up(self) -> Incident | None:
        """Write what waits, in its order -> the incident that was the last of it, None where some still waits."""
        last = None
        try:
            while self._waiting:
                last = self._waiting[0]()
                del self._waiting[0]
        except StoreError as error:
            if str(error) != self._told:
                self._told = str(error)
                self._tell(self._told)
            return None
        self._told = ""
        return last


def write(out: Path, event: Event, decision: Decision, life: str = "", seen_after: float | None = None) -> Incident:
    """Add an incident to those of a run, on the disk -> it, with its number.

    Args:
        out: The folder of the run.
        event, decision, life, seen_after: The fields of the incident; no launch where rank 0 writes it.

    Raises:
        StoreError: it cannot be written.
    """
    with os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    with _turn(out / INCIDENTS) as file:
        number = 1 + max((line["number"] for line in _lines(out / INCIDENTS)), default=0)
        incident = Incident(event, decision, life, number, seen_after)
        _add(file, asdict(incident))
    return incident


def recovered(out: Path, number: int, at: float, steps_lost: int, seconds_lost: float) -> None:
    """Add to an incident that a step was done again, at this time.

    Raises:
        StoreError: it cannot be written.
    """
    known = {"number": number, "recovered": at, "steps_lost": steps_lost, "seconds_lost": seconds_lost}
    with _turn(out / INCIDENTS) as file:
        _add(file, known)


def went_on(out: Path, after: int | None, at: float) -> None:
    """Add to the incidents that nothing is known of yet that the run goes on after a step, and has done another; or
    that it had not stopped.

    Raises:
        StoreError: it cannot be read or written.
    """
    for each in read(out):
        if each.recovered is None and each.decision.action != "tell":
            lost = 0 if each.event.step is None or after is None else max(0, each.event.step - 1 - after)
            recovered(out, each.number, at, lost, max(0.0, at - each.event.at))


def summary(incidents: Sequence[Incident]) -> str:
    """Return a few words: ``3 incidents, 0 steps lost``."""
    lost = sum(each.steps_lost or 0 for each in incidents)
    return f"{counted(len(incidents), 'incident')}, {counted(lost, 'step')} lost"


def counted(count: int, what: str) -> str:
    """Return ``1 step`` or ``2 steps``."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def _lines(path: Path) -> list[dict[str, Any]]:
    if not os.path.lexists(path):
        return []
    data = read_file(path, path.parent)
    return [line for text in data.splitlines() if (line := _line(text, path)) is not None]


def _line(text: bytes, path: Path) -> dict[str, Any] | None:
    """Return what a line says; None where it is cut, or no line of ours."""
    try:
        line = parse_json(text, path)
    except StoreError:
        return None
    return line if isinstance(line, dict) and type(line.get("number")) is int else None


@contextmanager
def _turn(path: Path) -> Iterator[BufferedWriter]:
    """Open the file to add to it, in turns with its other writers where its filesystem has locks."""
    with os_errors(path), append(path) as file:
        with suppress(NoLocks):
            until = time.monotonic() + TURN_S
            while not flock(file, fcntl.LOCK_EX) and time.monotonic() < until:
                time.sleep(TURN_S / 100)
        yield file


def _add(file: BufferedWriter, line: Mapping[str, Any]) -> None:
    file.write(b"\n" * _is_cut(Path(file.name)) + json.dumps(line, allow_nan=False).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _is_cut(path: Path) -> bool:
    with open_file(path, path.parent) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")
