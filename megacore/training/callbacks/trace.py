"""Traces of every so many steps: what all ranks did when, in one file."""

from __future__ import annotations

import time
from collections import deque
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
            found = run.control.gather([rounds, _packed(run.mesh.recorder.read(noted)), gpu])
            if found:  # on the first rank
                self._put(run, step, found)

    def _put(self, run: Trainer, step: int, found: list[Any]) -> None:
        shape, here = run.mesh.shape, RankPlace.of_environment()
        clocks = align([rounds for rounds, *_ in found])
        rows = [_unpacked(packed, ahead) for (_, packed, _), (ahead, _) in zip(found, clocks, strict=True)]
        first = min(each.start for row in rows for each in row)
        ranks = [
            {
                track: tuple(_interval(each, first, shape) for each in row if each.track == track)
                for track in dict.fromkeys(each.track for each in row)
            }
            for row in rows
        ]
        errors = tuple(error for _, error in clocks)
        try:
            per_node = here.local_world if here.launched else shape.world
            device = torch.cuda.get_device_name(run.mesh.device) if run.mesh.device.type == "cuda" else CPU
            schedule, gpus = run.config.pipeline.schedule, tuple(gpu for *_, gpu in found)
            traced = TracedStep(step, shape, schedule, errors, tuple(ranks), per_node, device, gpus)
            write_trace(Path(run.config.out), traced)
        except (OSError, StoreError) as error:  # on a full disk, say; the run goes on
            run.tell(f"the trace of step {step} could not be written: {error}")


def _gpu(device: torch.device) -> str:
    """Return the clock of a GPU and what holds it down, while it still works on the step that has been launched."""
    return gpu_in_words(device.index or 0) if device.type == "cuda" else ""


def _interval(each: Timed, first: float, shape: MeshShape) -> TracedInterval:
    """Return what is shown of something that a rank did."""
    start, end = each.start - first, each.end - first
    if each.kind in COLLECTIVES:
        return TracedInterval(each.kind, start, end, axis=" x ".join(differ_in(shape, each.about)), queued=each.queued)
    chunk, microbatch = each.about or (-1, -1)
    return TracedInterval(each.kind, start, end, chunk, microbatch, queued=each.queued)


def _rounds(control: Control) -> list[tuple[float, float]]:
    """Return when this rank entered and left a few messages of all ranks to all."""
    found = []
    for _ in range(ROUNDS):
        entered = time.perf_counter()
        control.largest(0.0)
        found.append((entered, time.perf_counter()))
    return found


def _packed(timed: list[Timed]) -> list[Any]:
    """Return what was recorded as few bytes of JSON, from its begin on."""
    first = min(each.start for each in timed)
    rows = [
        [
            x.track[0],
            x.kind,
            x.about,
            *(round(seconds / _UNIT) for seconds in (x.start - first, x.end - x.start, x.queued)),
        ]
        for x in timed
    ]
    return [first, rows]


def _unpacked(packed: list[Any], ahead: float) -> list[Timed]:
    """Return what a rank has recorded by rank 0's clock."""
    (first, rows), tracks = packed, {"h": "host", "d": "device"}
    found = list[Timed]()
    for track, kind, about, since, length, queued in rows:
        start = first - ahead + since * _UNIT
        found.append(Timed(tracks[track], kind, tuple(about), start, start + length * _UNIT, queued * _UNIT))
    return found
