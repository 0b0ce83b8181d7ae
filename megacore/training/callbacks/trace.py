"""Traces of every so many steps: what all ranks did when, in one file."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megacore.control import Control
from megacore.gpus import gpu_in_words
from megacore.parallel.recorder import Mark, NotedInterval, Timed
from megacore.parallel.weights.layout import MeshShape
from megacore.places import differ_in
from megacore.rank import RankPlace
from megacore.resources import queued_s
from megacore.store.io.strict_json import StoreError
from megacore.training.step import Phase
from megacore.training.traces import (
    AGREE,
    COLLECTIVES,
    COMPUTE,
    CPU,
    KEPT,
    TracedInterval,
    TracedStep,
    align,
    write_trace,
)
from megacore.training.trainer import Callback, Trainer

ROUNDS = 8
"""Messages of all ranks to all by which clocks are compared."""
_UNIT = 1e-7
"""Seconds of the smallest part of what ranks tell each other."""


class Trace(Callback):
    """Records every ``log.trace``-th step, from its wait for data to the next one's, saving and evaluation included.

    Ranks bring together what they have recorded at the next record of metrics, where they wait for each other anyway;
    nothing is read from a device before. It comes first of the callbacks that ask, so that the message of all ranks
    at the end of a step lies between its question and its answer.
    """

    def __init__(self) -> None:
        self._phase: tuple[str, Mark] | None = None
        """The phase that is being recorded, and its begin."""
        self._asked: Mark | None = None
        self._done = deque[tuple[int, list[NotedInterval], str]](maxlen=KEPT)

    def on_phase(self, run: Trainer, phase: Phase) -> None:
        recorder = run.mesh.recorder
        kind = COMPUTE if phase in ("forward", "backward") else phase
        if self._phase is not None:
            if kind == self._phase[0]:
                return
            recorder.note(self._phase[0], (), self._phase[1])
            self._phase = kind, recorder.now()
            if phase == "data":
                self._end(run)
        every = run.config.log.trace
        if phase == "data" and every and (run.step + 1) % every == 0:
            recorder.begin(queued_s)
            self._phase = kind, recorder.now()

    def ask(self, run: Trainer) -> Mapping[str, float]:
        self._asked = run.mesh.recorder.now() if self._phase is not None else None
        return {}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        if self._asked is not None:
            run.mesh.recorder.note(AGREE, (), self._asked)

    def on_log(self, run: Trainer, record: dict[str, Any]) -> None:
        self._write(run)

    def on_rewind(self, run: Trainer) -> None:
        self._drop(run)
        self._done = deque((each for each in self._done if each[0] <= run.step), KEPT)

    def on_error(self, run: Trainer, error: BaseException) -> None:
        self._drop(run)

    def on_end(self, run: Trainer) -> None:
        if self._phase is not None:
            run.mesh.recorder.note(self._phase[0], (), self._phase[1])
            self._end(run)
        self._write(run)

    def _end(self, run: Trainer) -> None:
        self._done.append((run.step, run.mesh.recorder.end(), _gpu(run.mesh.device)))
        self._phase = None

    def _drop(self, run: Trainer) -> None:
        run.mesh.recorder.end()
        self._phase = self._asked = None

    def _write(self, run: Trainer) -> None:
        """Write the steps that are done."""
        if not self._done:
            return
        rounds = _rounds(run.control)
        while self._done:
            step, noted, gpu = self._done.popleft()
            packed = _packed(run.mesh.recorder.read(noted), run.mesh.shape)
            found = run.control.gather([rounds, packed, gpu])
            if found:  # on the first rank
                self._put(run, step, found)

    def _put(self, run: Trainer, step: int, found: list[Any]) -> None:
        shape, here = run.mesh.shape, RankPlace.of_environment()
        clocks = align([rounds for rounds, *_ in found])
        begins = [first - ahead for (_, (first, _), _), (ahead, _) in zip(found, clocks, strict=True)]
        ranks = tuple(
            _unpacked(rows, begin - min(begins)) for (_, (_, rows), _), begin in zip(found, begins, strict=True)
        )
        errors = tuple(error for _, error in clocks)
        try:
            per_node = here.local_world if here.launched else shape.world
            device = torch.cuda.get_device_name(run.mesh.device) if run.mesh.device.type == "cuda" else CPU
            schedule, gpus = run.config.pipeline.schedule, tuple(gpu for *_, gpu in found)
            traced = TracedStep(step, shape, schedule, errors, ranks, per_node, device, gpus)
            write_trace(Path(run.config.out), traced)
        except (OSError, StoreError) as error:  # on a full disk, say; the run goes on
            run.tell(f"the trace of step {step} could not be written: {error}")


def _gpu(device: torch.device) -> str:
    """Return the clock of a GPU and what holds it down, while it still works on the step that has been launched."""
    return gpu_in_words(device.index or 0) if device.type == "cuda" else ""


def _rounds(control: Control) -> list[tuple[float, float]]:
    """Return when this rank entered and left a few messages of all ranks to all."""
    found = []
    for _ in range(ROUNDS):
        entered = time.perf_counter()
        control.largest(0.0)
        found.append((entered, time.perf_counter()))
    return found


def _packed(timed: list[Timed], shape: MeshShape) -> list[Any]:
    """Return what was recorded as few bytes of JSON: its begin, and of each interval what :func:`_unpacked` takes."""
    first, rows = min(each.start for each in timed), list[list[Any]]()
    for each in timed:
        is_collective = each.kind in COLLECTIVES
        axis = " x ".join(differ_in(shape, each.about)) if is_collective else ""
        chunk, microbatch = (-1, -1) if is_collective or not each.about else each.about
        seconds = each.start - first, each.end - each.start, each.queued
        rows.append([each.track, each.kind, chunk, microbatch, axis, *(round(x / _UNIT) for x in seconds)])
    return [first, rows]


def _unpacked(rows: list[list[Any]], begin: float) -> Mapping[str, tuple[TracedInterval, ...]]:
    """Return the intervals of each track of a rank whose first one begins at a time."""
    tracks = defaultdict[str, list[TracedInterval]](list)
    for track, kind, chunk, microbatch, axis, since, length, queued in rows:
        start, end = (begin + at * _UNIT for at in (since, since + length))
        tracks[track].append(TracedInterval(kind, start, end, chunk, microbatch, axis, queued * _UNIT))
    return {track: tuple(row) for track, row in tracks.items()}
