"""Traces of steps: what each rank did when, in one file that Perfetto shows. A run writes them, tools read them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megacore.parallel.pipeline.schedules import Kind
from megacore.parallel.weights.layout import MeshShape
from megacore.say import brief
from megacore.store.io.strict_json import StoreError, parse_json, short
from megacore.store.tensor_files.publish import replace_file

FOLDER = "traces"
"""The folder of traces in that of a run."""
CPU = "cpu"
"""The device of ranks that have no other."""
KEPT = 10
"""The traces of a run that are kept, the newest."""
ACTIONS: tuple[Kind, ...] = ("F", "B", "I", "W")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "exchange")
"""The kinds of waits for the ranks of a group; the last is that of keys and values along cp."""
ChromeSpan = tuple[str, str, float, float, Mapping[str, Any]]
"""(name, category, start and duration in microseconds, arguments) in Chrome's format."""
COMPUTE, AGREE = "forward and backward", "agree"
"""The phase of all actions; and, at the end of a step, the one message of all ranks about it."""


class TracedInterval(NamedTuple):
    """Something that a rank did, in seconds from the first interval of the step. ``kind``: an action; a collective;
    ``receive`` or ``send``, which are waits for another stage; or a phase; ``chunk, microbatch``: of an action, and of
    what is received or sent; ``axis``: the axes of the mesh along which the ranks of a collective lie; ``queued``: the
    seconds of it in which others had the core of the host."""

    kind: str
    start: float
    end: float
    chunk: int = -1
    microbatch: int = -1
    axis: str = ""
    queued: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def label(self) -> str:
        """The name in a picture: of an action that of its schedule's drawing, with the chunk as a letter."""
        of = f"{self.microbatch}{chr(ord('a') + self.chunk) if self.chunk else ''}"
        if self.kind in ACTIONS:
            return f"{self.kind}{of}"
        return f"{self.kind} {self.axis or (of if self.chunk >= 0 else '')}".strip()


@dataclass(frozen=True)
class TracedStep:
    """A step as its ranks have recorded it. ``errors``: the most seconds that the clock of each rank may be off that of
    rank 0; ``ranks``: of each rank, the intervals of each of its tracks: of its host, and on GPUs of its device;
    ``per_node``: the successive ranks that share a node; 0 for all of them; ``device``: what the driver calls the
    device of rank 0; ``gpus``: of each rank, its GPU's clock at the end and what holds it down, where NVML says."""

    step: int
    mesh: MeshShape
    schedule: str
    errors: tuple[float, ...]
    ranks: tuple[Mapping[str, tuple[TracedInterval, ...]], ...]
    per_node: int = 0
    device: str = CPU
    gpus: tuple[str, ...] = ()

    def of(self, rank: int) -> tuple[TracedInterval, ...]:
        """Return what a rank has done: on its device, if it has one."""
        tracks = self.ranks[rank]
        return tracks.get("device") or tracks["host"]


def align(rounds: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float]]:
    """Return, for each rank, what its clock is ahead of rank 0's, and the most by which that may be wrong; in seconds.

    A round is a message of all ranks to all: no rank leaves it before the last one has entered. So what rank 0 reads as
    it enters is no later than what another reads as it leaves, and the other way round; each round gives a bound from
    both sides. ``rounds``: of each rank, the (entered, left) of each round by its own clock."""
    found = []
    for theirs in rounds:
        pairs = [(theirs[n], rounds[0][n]) for n in range(len(theirs))]
        low = max(entered - left for (entered, _), (_, left) in pairs)
        high = min(left - entered for (_, left), (entered, _) in pairs)
        found.append(((low + high) / 2, (high - low) / 2))
    return [(0.0, 0.0), *found[1:]]


def write_trace(folder: Path, traced: TracedStep) -> Path:
    """Write a step into a run's folder -> the file, in Chrome's format: a process for each rank, a thread for each of
    its tracks. Those of older steps than the last ten are removed, and those of later ones: the run has gone back, and
    does these steps again. Raises OSError, StoreError: it cannot be written."""
    path = folder / FOLDER / f"step-{traced.step}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    other = {
        "step": traced.step,
        "mesh": {dim: traced.mesh[dim] for dim in traced.mesh.DIMS},
        "schedule": traced.schedule,
        "clock_error_us": [round(error * 1e6, 1) for error in traced.errors],
        "ranks_of_a_node": traced.per_node,
        "device": traced.device,
        "gpus": traced.gpus if any(traced.gpus) else [],
    }
    document = {"traceEvents": [*_events(traced)], "displayTimeUnit": "ms", "otherData": other}
    replace_file(path, json.dumps(document, separators=(",", ":")).encode())
    there = files(folder)
    kept = [each for each in there if _step(each) <= traced.step][-KEPT:]
    for each in there:
        if each not in kept:
            each.unlink(missing_ok=True)
    return path


def _events(traced: TracedStep) -> Iterator[dict[str, Any]]:
    for rank, tracks in enumerate(traced.ranks):
        place, error = traced.mesh.place(rank), traced.errors[rank]
        at = ", ".join(f"{dim} {getattr(place, dim)}" for dim in traced.mesh.DIMS if traced.mesh[dim] > 1)
        name = f"rank {rank}{': ' if at else ''}{at} (clock to {error * 1e6:.0f} us)"
        yield from chrome_events(rank, name, {track: map(_span, row) for track, row in tracks.items()})


def _span(each: TracedInterval) -> ChromeSpan:
    given: dict[str, Any] = {"chunk": each.chunk, "microbatch": each.microbatch} if each.chunk >= 0 else {}
    given = {"axis": each.axis} if each.axis else given
    given |= {"queued": round(each.queued, 7)} if each.queued > 0 else {}
    return each.label, each.kind, round(each.start * 1e6, 1), round(each.seconds * 1e6, 1), given


def chrome_events(process: int, name: str, tracks: Mapping[str, Iterable[ChromeSpan]]) -> Iterator[dict[str, Any]]:
    """Yield a process and its tracks in Chrome's format."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for number, (track, spans) in enumerate(tracks.items()):
        where = {"pid": process, "tid": number}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": track}}
        for label, kind, start, lasted, given in spans:
            yield {"ph": "X", "name": label, "cat": kind, **where, "ts": start, "dur": lasted, "args": given}


def files(folder: Path) -> list[Path]:
    """Return the traces of a run, oldest first."""
    found = (folder / FOLDER).glob("step-*.json")
    return sorted((path for path in found if path.stem.removeprefix("step-").isdecimal()), key=_step)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def read_trace(path: Path) -> TracedStep:
    """Read a step that a run has recorded. Raises StoreError: it is none, or cannot be read."""
    try:
        document = parse_json(path.read_bytes(), path)
        other, events = document["otherData"], document["traceEvents"]
        mesh = MeshShape(**{dim: int(other["mesh"][dim]) for dim in MeshShape.DIMS})
        errors = tuple(error / 1e6 for error in other["clock_error_us"])
        found = sum(event["name"] == "process_name" for event in events)
        if not mesh.world == found == len(errors):  # before room is made for so many
            raise ValueError(f"its mesh has {mesh.world} ranks, and it has {found} and {len(errors)} clocks")
        names = dict[tuple[int, int], str]()
        ranks: list[dict[str, list[TracedInterval]]] = [{} for _ in range(mesh.world)]
        for event in events:
            key = event["pid"], event.get("tid", 0)
            if event["ph"] == "M":
                if event["name"] == "thread_name":
                    names[key] = event["args"]["name"]
                    ranks[key[0]][names[key]] = []
                continue
            ranks[key[0]][names[key]].append(_interval(event, len(events)))
        rows = tuple({track: tuple(sorted(row, key=_outer_first)) for track, row in each.items()} for each in ranks)
        if not all(each.get("host") for each in rows):
            raise StoreError(f"{path}: a rank has recorded nothing")
        per_node, device = max(0, int(other.get("ranks_of_a_node", 0))), str(other.get("device", CPU))
        gpus = tuple(brief(each) if each else "" for each in other.get("gpus", ()))
        if len(gpus) not in (0, mesh.world):
            raise ValueError(f"its mesh has {mesh.world} ranks, and it has the GPUs of {len(gpus)}")
        return TracedStep(int(other["step"]), mesh, str(other["schedule"]), errors, rows, per_node, device, gpus)
    except StoreError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is no trace of a step that log.trace records: {error}") from error


def _interval(event: Mapping[str, Any], most: int) -> TracedInterval:
    """Return the interval of an event; its chunk and its microbatch are below ``most``, for each has events. Raises
    ValueError: it is none."""
    start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
    found = TracedInterval(event["cat"], start, start + seconds, **event["args"])
    numbers, axes = (found.chunk, found.microbatch), found.axis.split(" x ") if found.axis else []
    sound = isinstance(found.kind, str) and seconds >= 0 and {*axes} <= {*MeshShape.DIMS}
    sound &= math.isfinite(found.queued) and found.queued >= 0
    if not sound or not all(isinstance(each, int) and -1 <= each < most for each in numbers):
        raise ValueError(f"{short(dict(event))} is nothing that a rank does")
    return found


def _outer_first(each: TracedInterval) -> tuple[float, float]:
    return each.start, -each.end
