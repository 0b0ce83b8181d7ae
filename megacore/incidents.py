"""The incidents of a run, ``incidents.jsonl`` in its folder: what befell it, what was done, what it cost. No torch.

The agent of each node that restarts ranks appends a line, and so does rank 0 for what the ranks answer by themselves, a
bad step say; rank 0 appends another one, of the same number, once the run has gone on. They take turns by a lock on the
file. Nothing is overwritten, and a line that a kill or a full disk has cut is passed over.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from io import BufferedWriter
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from megacore.store.io.files import NoLocks, append, ends_within_a_line, flock
from megacore.store.io.strict_json import StoreError, parse_json, read_file
from megacore.store.tensor_files.tensors import os_errors

Kind = Literal[
    "killed", "raised", "lost_contact", "node_lost", "node_joins", "node_leaves", "stands_still", "straggler",
    "non_finite", "spike", "unrepeatable", "bad_data", "corrupted", "save_failed",
]  # fmt: skip
KINDS: Mapping[Kind, str] = {
    "killed": "a rank was ended by a signal, or aborted",
    "raised": "a rank ended with an exception, or a status that says nothing",
    "lost_contact": "a collective failed or timed out, though nobody died here",
    "node_lost": "the node that the others meet at does not answer any more",
    "node_joins": "a node has come",
    "node_leaves": "a node says that it will go",
    "stands_still": "no step has been done for long",
    "straggler": "a rank is slower than the others",
    "non_finite": "a step's loss or gradient norm is not finite",
    "spike": "a step's loss or gradient norm is far above those before it",
    "unrepeatable": "a bad step that was repeated on the same data gave other bits",
    "bad_data": "a bad step that was repeated on the same data gave the same bits",
    "corrupted": "weights, state or what a rank computes is not what it must be",
    "save_failed": "a checkpoint could not be written",
}
"""{kind of an incident: what has happened}."""

Action = Literal["tell", "repeat", "skip", "go_back", "restart", "end"]
ACTIONS: Mapping[Action, str] = {
    "tell": "say so, and go on",
    "repeat": "do the step again on the same data",
    "skip": "leave the step's samples out, and go on from the weights before it",
    "go_back": "go back to the newest checkpoint before the step, and leave its samples out",
    "restart": "start all ranks again from the newest checkpoint, in memory or on disk",
    "end": "end the run",
}
"""{action: what is done}."""

INCIDENTS = "incidents.jsonl"
TURN_S = 1.0
"""Seconds after which another writer is not waited for any more: it may have been stopped in its turn."""


@dataclass(frozen=True)
class Incident:
    """Something that befell a run, and what was done about it.

    Args:
        detail: A few words more: the signal, the exception, who waits for whom.
        reason: Why this action, in a few words.
        rank: The rank at fault, if it is known.
        node, host: The node of it, or that comes or goes, and the name of its host.
        step: The step that was being done, as far as it is known.
        samples: The samples [first, end) of the step, of a bad one.
        at: The time, in seconds since 1970, by the clock of whoever saw it.
        launch: The launch that it befell; no two launches have the same.
        number: Counts the incidents of a run, from 1; 0 for one that is not written yet.
        recovered: The time when the run went on; None until then.
        steps_lost: Steps that were done and had to be done again; None until that is known.
        seconds_lost: Seconds from the incident to the next step that was done.
    """

    kind: Kind
    action: Action = "tell"
    detail: str = ""
    reason: str = ""
    rank: int | None = None
    node: int | None = None
    host: str = ""
    step: int | None = None
    samples: tuple[int, int] | None = None
    at: float = 0.0
    launch: str = ""
    number: int = 0
    recovered: float | None = None
    steps_lost: int | None = None
    seconds_lost: float | None = None


def read(out: Path) -> list[Incident]:
    """Return the incidents of a run, in the order in which they befell it; none where there is no file. Raises
    StoreError: it cannot be read."""
    found = dict[int, dict[str, Any]]()
    for line in _lines(out / INCIDENTS):
        found.setdefault(line["number"], {}).update(line)
    adapter, incidents = TypeAdapter(Incident), list[Incident]()
    for number in sorted(found):
        with suppress(ValidationError):  # an addition to a line that was cut, or a line of another version
            incidents.append(adapter.validate_python(found[number]))
    return incidents


class IncidentWriter:
    """One process's part of the incidents of a run. What the disk does not take is told and waits: a run does not end
    for it. ``out``: the folder of the run; ``tell``: says why the disk does not take it, once for each reason in a
    row."""

    def __init__(self, out: Path, tell: Callable[[str], object]) -> None:
        self._out, self._tell = out, tell
        self._waiting = list[Callable[[], object]]()
        self._told = ""

    def write(self, incident: Incident) -> None:
        """Add an incident to those of the run."""
        self._waiting.append(lambda: write(self._out, incident))
        self.catch_up()

    def went_on(self, after: int, at: float) -> None:
        """Add to the incidents that nothing is known of yet that the run goes on after a step, and has done another."""
        self._waiting.append(lambda: went_on(self._out, after, at))
        self.catch_up()

    def catch_up(self) -> None:
        """Write what waits, in its order."""
        try:
            while self._waiting:
                self._waiting[0]()
                del self._waiting[0]
        except StoreError as error:
            if str(error) != self._told:
                self._told = str(error)
                self._tell(self._told)
            return
        self._told = ""


def write(out: Path, incident: Incident) -> Incident:
    """Add an incident to those of a run, on the disk -> it, with its number, and the time where it has none. Raises
    StoreError: it cannot be written."""
    with os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    with _turn(out / INCIDENTS) as file:
        number = 1 + max((line["number"] for line in _lines(out / INCIDENTS)), default=0)
        written = replace(incident, number=number, at=incident.at or time.time())
        _add(file, asdict(written))
    return written


def went_on(out: Path, after: int, at: float) -> None:
    """Add to the incidents that nothing is known of yet that the run goes on after a step, and has done another. Raises
    StoreError: it cannot be read or written."""
    for each in read(out):
        if each.recovered is None and each.action != "tell":
            lost = 0 if each.step is None else max(0, each.step - 1 - after)
            known = {"recovered": at, "steps_lost": lost, "seconds_lost": max(0.0, at - each.at)}
            with _turn(out / INCIDENTS) as file:
                _add(file, {"number": each.number, **known})


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
    file.write(b"\n" * ends_within_a_line(Path(file.name)) + json.dumps(line, allow_nan=False).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
