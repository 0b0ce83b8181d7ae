"""Traces of steps: all ranks in one file by one clock, the schedule in its order, and a run that they do not change."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engine
import pytest
import torch
from pool import Pool

from megacore.parallel.pipeline.schedules import SCHEDULES
from megacore.parallel.recorder import Recorder
from megacore.store.io.strict_json import StoreError
from megacore.training import traces
from megacore.training.callbacks import trace
from megacore.training.traces import ACTIONS, COLLECTIVES, COMPUTE, TracedStep, align, read_trace

LAYOUT = ["mesh.pp=2", "mesh.tp=2", "batch.global_size=8", "evaluate.every=0", "pipeline.schedule=zb-h1"]
AHEAD_S = 100.0


def run_of_skewed_clocks(recipe: str, out: str, every: int) -> engine.Result:
    """Each rank's clock is another 100 s ahead, and rank 3 is slow in reading it."""
    rank, clock = torch.distributed.get_rank(), time.perf_counter

    def skewed() -> float:
        return clock() + AHEAD_S * rank

    there = mock.patch.object(trace, "_gpu", lambda device: f"GPU {rank}, slowed down by heat")
    with mock.patch.object(time, "perf_counter", skewed), there:
        return engine.train(recipe, [f"out={out}", *LAYOUT, f"log.trace={every}", "log.every=3", "train.steps=4"])


@pytest.mark.in_turn(4, 1)
def test_a_run_is_recorded_and_unchanged(pool: Pool, recipe: str, tmp_path: Path) -> None:
    """All 4 steps, two of them before there is a record, and the last when the run ends."""
    outs = {every: str(tmp_path / f"{every}") for every in (0, 1)}
    plain, traced = (pool.run(4, run_of_skewed_clocks, recipe, out, every) for every, out in outs.items())
    assert all(engine.same(one.weights, other.weights) for one, other in zip(plain, traced, strict=True))
    assert not traces.files(tmp_path / "0")
    found = [read_trace(path) for path in traces.files(tmp_path / "1")]
    assert [(x.step, x.schedule, x.mesh.pp, x.mesh.tp) for x in found] == [(n, "zb-h1", 2, 2) for n in (1, 2, 3, 4)]
    for each in found:
        check(each)
        assert each.gpus == tuple(f"GPU {rank}, slowed down by heat" for rank in range(4))


def check(traced: TracedStep) -> None:
    schedule = SCHEDULES["zb-h1"](2, 1, 4)
    for rank in range(4):
        row = traced.of(rank)
        did = [(x.kind, x.chunk, x.microbatch) for x in row if x.kind in ACTIONS]
        assert did == [(a.kind, a.chunk, a.microbatch) for a in schedule[traced.mesh.place(rank).pp]]
        phases = [x.kind for x in row if x.kind in ("data", COMPUTE, "reduce", "update", "log", "save", "evaluate")]
        assert phases[:4] == ["data", COMPUTE, "reduce", "update"] and "agree" in {x.kind for x in row}
        axes = {x.axis for x in row if x.kind in COLLECTIVES}
        assert {"tp", "pp x tp"} <= axes and {x.kind for x in row} > {"all_gather", "reduce_scatter", "all_reduce"}
    assert max(traced.errors) < 10 and traced.errors[0] == 0
    # What is received was sent before, by one clock: nobody is 100 s off.
    for tp in (0, 1):
        sent = {x.microbatch: x.start for x in traced.of(tp) if x.kind == "F"}
        got = {x.microbatch: x.end for x in traced.of(2 + tp) if x.kind == "receive"}
        assert got.keys() == sent.keys()
        assert all(got[m] > sent[m] - traced.errors[tp] - traced.errors[2 + tp] for m in got)
        assert all(got[m] < sent[m] + AHEAD_S / 2 for m in got)


def test_clocks_are_told_with_what_they_may_be_off() -> None:
    """Ranks enter rounds and leave them at random, none before the last has entered: the bound holds in all of 200."""
    rng = random.Random(5)
    for _ in range(200):
        ahead, rounds, now = [0.0, *(rng.uniform(-50, 50) for _ in range(3))], [[] for _ in range(4)], 0.0  # type: ignore[var-annotated]
        for _ in range(rng.randint(1, 8)):
            entered = [now + rng.expovariate(1000) for _ in ahead]
            left = [max(entered) + rng.expovariate(2000) for _ in ahead]
            for row, skew, e, x in zip(rounds, ahead, entered, left, strict=True):
                row.append((e + skew, x + skew))
            now = max(left)
        for skew, (found, error) in zip(ahead, align(rounds), strict=True):
            assert abs(found - skew) <= error + 1e-9 and error < 0.05


class Device:
    """A device in whose stream everything takes a second more than on the host, and for which one must wait."""

    def __init__(self) -> None:
        self.clock, self.waited = 0.0, False

    def module(self) -> Any:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                device.clock += 1.0
                self.at = device.clock

            def synchronize(self) -> None:
                device.waited = True

            def elapsed_time(self, later: Event) -> float:
                assert device.waited, "an event is read that nobody knows to be over"
                return 1000 * (later.at - self.at)

        return SimpleNamespace(Event=Event)


def test_on_a_gpu_events_are_recorded_and_read_later() -> None:
    """With a double for the device: there was no GPU."""
    device = Device()
    with mock.patch.object(torch, "get_device_module", lambda _: device.module()):
        recorder = Recorder(torch.device("cuda"))
    with recorder.over("F", 0, 0):
        pass
    assert device.clock == 0  # nobody records
    recorder.begin()
    with recorder.over("F", 0, 0), recorder.over("receive", 0, 0):
        pass
    noted = recorder.end()
    assert not device.waited and device.clock == 4
    found = recorder.read(noted)
    assert [(x.track, x.kind) for x in found] == [(t, k) for t in ("host", "device") for k in ("receive", "F")]
    assert [round(x.end - x.start, 6) for x in found[2:]] == [1.0, 3.0] and found[3].start < found[2].start
    assert abs(found[3].end + 1.0 - found[1].end) < 0.5  # an event before the one that was waited for


def test_the_seconds_in_which_others_had_the_core_are_of_what_was_done_then() -> None:
    recorder, queued = Recorder(torch.device("cpu")), iter([0.0, 0.5, 0.75, 1.0])
    recorder.begin(lambda: next(queued))
    with recorder.over("F", 0, 0), recorder.over("receive", 0, 0):
        pass
    assert [(x.kind, x.queued) for x in recorder.read(recorder.end())] == [("receive", 0.25), ("F", 1.0)]


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_is_computed_again_is_recorded(recipe: str, tmp_path: Path, recompute: str) -> None:
    """In backwards alone: of all four blocks, or of what is cheap in them."""
    given = [f"out={tmp_path}", f"memory.recompute={recompute}", "batch.global_size=4", "evaluate.every=0"]
    engine.train(recipe, [*given, "log.trace=1", "train.steps=1", "schedule.warmup_steps=0"])
    (step,) = (read_trace(path) for path in traces.files(tmp_path))
    again = [x for x in step.of(0) if x.kind == "recompute"]
    backwards = [x for x in step.of(0) if x.kind == "B"]
    assert all(any(b.start <= x.start and x.end <= b.end + 1e-6 for b in backwards) for x in again)
    assert len(backwards) == 2 and (len(again) == 8 if recompute == "full" else len(again) > 8)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "{", "[" * 100_000, json.dumps({"traceEvents": [], "otherData": {"step": 1, "mesh": {"pp": 2}}})],
)
def test_what_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "step-1.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"step-1\.json"):
        read_trace(path)


def write(folder: Path, steps: Iterable[int]) -> list[int]:
    """Write traces of these steps -> those that are there then."""
    interval: Mapping[str, Any] = {"host": (traces.TracedInterval("F", 0.0, 1.0, 0, 0),)}
    for step in steps:
        traces.write_trace(folder, TracedStep(step, traces.MeshShape(), "1f1b", (0.0,), (interval,)))
    return [read_trace(path).step for path in traces.files(folder)]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert write(tmp_path, range(1, 14)) == [*range(4, 14)]


def test_a_run_that_goes_back_keeps_what_it_records_then(tmp_path: Path) -> None:
    """Steps that it does once more were those of another start, perhaps on another mesh."""
    assert write(tmp_path, range(50, 750, 50)) == [*range(250, 750, 50)]
    assert write(tmp_path, [50, 100]) == [50, 100]


DAMAGES: dict[str, Callable[[Any, Any], object]] = {
    "a mesh of more ranks": lambda other, _: other["mesh"].update(dp=10**9),
    "GPUs of fewer ranks": lambda other, _: other.update(gpus=["GPU 0"] * 7),
    "a mesh of fewer ranks": lambda other, _: other["mesh"].update(dp=0),
    "clocks of others": lambda other, _: other.update(clock_error_us=[0, 0]),
    "a chunk beyond what a file can name": lambda _, event: event["args"].update(chunk=10**9),
    "a microbatch that is no number": lambda _, event: event["args"].update(microbatch="first"),
    "an axis that no mesh has": lambda _, event: event.update(args={"axis": "pp x up"}),
    "an end before its begin": lambda _, event: event.update(dur=-1.0),
    "a kind that is no text": lambda _, event: event.update(cat=["F"]),
    "a time that is none": lambda _, event: event.update(ts=float("nan")),
    "a core that others had for less than no time": lambda _, event: event["args"].update(queued=-1.0),
    "nodes of no number of ranks": lambda other, _: other.update(ranks_of_a_node="two"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_trace_is_named(tmp_path: Path, damage: Callable[[Any, Any], object]) -> None:
    write(tmp_path, [1])
    (path,) = traces.files(tmp_path)
    document = json.loads(path.read_text())
    damage(document["otherData"], document["traceEvents"][-1])
    path.write_text(json.dumps(document))
    with pytest.raises(StoreError, match=r"step-1\.json"):
        read_trace(path)
