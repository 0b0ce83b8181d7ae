"""Slow ranks are named with the cause, once, and noise never is."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megacore.gpus import GpuErrors, gpu_in_words
from megacore.incidents import Incident
from megacore.parallel.weights.layout import MeshShape
from megacore.recovery.beats import Beat, Phase, Reading, read
from megacore.recovery.stragglers import STEPS, Stragglers
from megacore.resources import queued_s
from megacore.training.callbacks.trace import _gpu

USUAL: dict[Phase, float] = {"data": 0.001, "forward": 0.1, "backward": 0.2, "update": 0.03, "save": 0.0}


def told(
    shape: MeshShape, steps: int, busy: dict[Phase, np.ndarray], stride: int = 1, queued: np.ndarray | float = 0.0
) -> list[Incident]:
    """What is told of ranks that spend busy[phase][step, rank] seconds, and in whose steps others have their core for
    queued[step, rank], looked at every ``stride`` steps."""
    incidents = list[Incident]()
    watch = Stragglers(shape, incidents.append)
    spent = {phase: np.cumsum(np.broadcast_to(each, (steps, shape.world)), axis=0) for phase, each in busy.items()}
    lost = np.cumsum(np.broadcast_to(queued, (steps, shape.world)), axis=0)
    for step in range(0, steps, stride):
        seconds = {rank: {phase: float(x[step, rank]) for phase, x in spent.items()} for rank in range(shape.world)}
        watch.see(
            {
                rank: Reading(step, "forward", 1.0, step - 1, -1, 0.1, 0.0, seconds[rank], float(lost[step, rank]))
                for rank in range(shape.world)
            }
        )
    return incidents


def series(shape: MeshShape, steps: int, noise: float = 0.0) -> dict[Phase, np.ndarray]:
    rng = np.random.default_rng(3)
    return {phase: each * np.exp(noise * rng.standard_normal((steps, shape.world))) for phase, each in USUAL.items()}


def test_a_slow_rank_is_named_once_with_its_cause() -> None:
    shape = MeshShape(dp=4)
    causes: list[tuple[Phase, float, str]] = [
        ("backward", 0.09, "compute"),
        ("data", 0.1, "data"),
        ("save", 0.1, "save"),
    ]
    for phase, more, cause in causes:
        busy = series(shape, 300, 0.1)
        busy[phase][100:, 2] += more
        (incident,) = told(shape, 300, busy)
        assert (incident.kind, incident.rank) == ("straggler", 2) and incident.detail.startswith(f"{cause}: ")
        assert 100 + STEPS <= (incident.step or 0) < 180


Slower = tuple[Phase, int, int, int, float]
"""A phase of a rank takes longer from a step on, until another: (phase, first, end, rank, more seconds)."""
OTHER_WORK: list[Slower] = [("forward", 0, 300, 2, 0.2), ("forward", 0, 300, 3, 0.2)]


@pytest.mark.parametrize(
    ("shape", "noise", "slower", "named"),
    [
        (MeshShape(dp=4), 0.0, [("backward", 100, 300, 2, 0.05)], []),  # a little
        (MeshShape(dp=4), 0.0, [("forward", 100, 100 + STEPS // 2, 1, 0.1)], []),  # not for long
        (MeshShape(dp=4), 0.1, [("data", 1, 3, 2, 2.0)], []),  # it has waited long in its first steps
        (MeshShape(dp=2), 0.0, [("forward", 50, 120, 1, 0.2), ("forward", 220, 290, 1, 0.2)], [1, 1]),  # again
        (MeshShape(pp=2, dp=2), 0.0, OTHER_WORK, []),
        (MeshShape(pp=2, dp=2), 0.0, [*OTHER_WORK, ("forward", 0, 300, 3, 0.3)], [3]),
    ],
)
def test_who_is_slow_among_peers_and_for_long_is_named(
    shape: MeshShape, noise: float, slower: list[Slower], named: list[int]
) -> None:
    busy = series(shape, 300, noise)
    for phase, first, end, rank, more in slower:
        busy[phase][first:end, rank] += more
    assert [incident.rank for incident in told(shape, 300, busy)] == named


def test_random_load_is_no_straggler_over_10_000_steps() -> None:
    shape, rng = MeshShape(dp=4), np.random.default_rng(5)
    busy = series(shape, 10_000, 0.3)
    busy["data"] += rng.exponential(0.03, (10_000, 4)) * (rng.random((10_000, 4)) < 0.1)
    busy["forward"] += rng.pareto(3.0, (10_000, 4)) * 0.01
    for stride, others in ((2, 3.0), (7, 0.1)):  # processes on all cores: each rank waits for its own at random
        assert not told(shape, 10_000, busy, stride, rng.exponential(others, (10_000, 4)))


def test_a_rank_with_half_a_core_is_named() -> None:
    """From the moment on at which others have the core of one rank alone for as long as it computes; where all share
    theirs, nobody is."""
    shape = MeshShape(dp=4)
    queued = np.full((300, 4), 0.02)
    queued[100:, 2] += 0.33
    (incident,) = told(shape, 300, series(shape, 300, 0.1), queued=queued)
    assert (incident.kind, incident.rank) == ("straggler", 2) and 100 + STEPS <= (incident.step or 0) < 180
    assert incident.detail.startswith("core: others had it for 0.") and "where 0.02 s are usual" in incident.detail
    assert not told(shape, 300, series(shape, 300, 0.1), queued=np.full((300, 4), 0.5))


def test_steps_that_are_done_again_are_measured_anew() -> None:
    """After a run has gone back the step is smaller, and the seconds go on."""
    incidents = list[Incident]()
    watch = Stragglers(MeshShape(dp=2), incidents.append)
    for look in range(200):
        at = look - 50 if look >= 100 else look
        busy = [0.1 * look + 9.0 * (look >= 100), 0.1 * look]
        watch.see({rank: Reading(at, "forward", 1.0, at, -1, 0.1, 0.0, {"forward": busy[rank]}) for rank in range(2)})
    assert not incidents


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module as NVML's package is: GPUs by number or name, with (clock, heat, what slows it down)."""

    class NVMLError(Exception):
        value = 0

    gpus = {"0": (1980, 55, 0), "1": (1005, 87, 0x41), "GPU-7": (900, 60, 0x04 | 0x80)}

    def handle(name: object) -> tuple[int, int, int]:
        if str(name) not in gpus:
            raise NVMLError("Invalid Argument")
        return gpus[str(name)]

    made = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: ["a process"],
        nvmlDeviceGetClockInfo=lambda gpu, clock: gpu[0],
        nvmlDeviceGetMaxClockInfo=lambda gpu, clock: 1980,
        nvmlDeviceGetTemperature=lambda gpu, sensor: gpu[1],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: gpu[2],
    )
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def test_the_sentence_has_the_clock_and_the_heat(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = MeshShape(dp=2)
    busy = series(shape, 200)
    busy["forward"][:, 1] *= 3
    (incident,) = told(shape, 200, busy)
    assert incident.detail.endswith("ranks 0, 1; GPU 1 at 1,005 of 1,980 MHz and 87 C, slowed down by heat")
    assert gpu_in_words(0) == "GPU 0 at 1,980 of 1,980 MHz and 55 C"
    assert [_gpu(torch.device(each)) for each in ("cpu", "cuda:1")] == ["", gpu_in_words(1)]  # of a trace of a step
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-7")
    assert gpu_in_words(0).startswith("GPU 1 at 1,005")
    slowed = "GPU GPU-7 at 900 of 1,980 MHz and 60 C, slowed down by its power limit and the power supply"
    assert gpu_in_words(1) == slowed
    assert gpu_in_words(3) == ""  # NVML knows no such one
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda gpu: []
    assert gpu_in_words(0) == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_in_words(0) == ""


def test_errors_of_gpus_are_said_once_and_told_for_a_while(
    nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a GPU that is gone by then; the thread ends where NVML does."""
    late, watched, said, over = nvml.NVMLError(), list[object](), list[str](), threading.Event()
    late.value = 10
    events = iter([late, *(SimpleNamespace(device=gpu, eventData=n) for gpu, n in [(1, 31), (1, 31), (7, 79), (0, 5)])])

    def wait(events_of: object, milliseconds: int) -> SimpleNamespace:
        event = next(events, None)
        if event is None:
            over.set()
            raise nvml.NVMLError
        if event is late:
            raise late
        return event

    def index(device: int) -> int:
        if device == 7:
            raise nvml.NVMLError
        return device

    vars(nvml).update(
        NVML_ERROR_TIMEOUT=10,
        nvmlEventTypeXidCriticalError=8,
        nvmlEventSetCreate=lambda: "events",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceRegisterEvents=lambda *arguments: watched.append(arguments[1:]),
        nvmlEventSetWait_v2=wait,
        nvmlDeviceGetIndex=index,
    )
    errors = GpuErrors(said.append)
    assert over.wait(20) and watched == [(8, "events")] * 2
    assert said == [
        "GPU 1 has reported Xid 31 (an access to memory that is not there).",
        "A GPU has reported Xid 79 (it has fallen off the bus).",
        "GPU 0 has reported Xid 5.",
    ]
    assert errors.lately().endswith("a GPU has reported Xid 79 (it has fallen off the bus); GPU 0 has reported Xid 5")
    later = time.monotonic() + 700.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not errors.lately()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not GpuErrors(said.append).lately()


def test_others_on_its_core_make_no_straggler(tmp_path: Path) -> None:
    """A rank computes in ``data``, beside a process that never sleeps, on one core."""
    cores, (core, *_) = os.sched_getaffinity(0), os.sched_getaffinity(0)
    busy_loop = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", busy_loop])
    try:
        os.sched_setaffinity(0, [core])
        before = queued_s()
        beat, began = Beat(tmp_path / "beat"), time.monotonic()
        beat.enter("data")
        waited, computed = queued_s(), time.thread_time()
        while queued_s() < waited + 0.1:
            pass
        computed = time.thread_time() - computed
        beat.enter("forward")
        reading = read(tmp_path / "beat")
        assert reading is not None and reading.busy["data"] < computed + 0.05
        assert reading.queued <= waited - before, "what it waited in `data` does not count"
        assert time.monotonic() - began > computed + 0.1
        waited = queued_s()
        while queued_s() < waited + 0.1:
            pass
        beat.enter("data")
        assert (reading := read(tmp_path / "beat")) and 0.1 <= reading.queued < time.monotonic() - began
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
