"""Who stands while no step is done: the beats, the judge on what it is shown, and reports on a clock that tests move.

Nobody is ended for it, and a healthy run has no report: most cases are of ranks that are slow for a good reason.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megacore.incidents import Incident
from megacore.outcome import rank_file
from megacore.parallel.weights.layout import MeshShape
from megacore.recovery import beats, flight_recorder, hang_report
from megacore.recovery.beats import PHASES, Beat, Phase, Place, Reading, read
from megacore.recovery.flight_recorder import RECEIVE, SEND, GroupLog
from megacore.recovery.hang_report import LEAST_S, START_S, Answer, HangReport, bound_s, now_of, standing
from megacore.recovery.standing import Witness, doing, judge

ROOT = Path(__file__).parents[2]


class Clock:
    """The seconds of a machine that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(beats, "monotonic", made)
    monkeypatch.setattr(beats, "thread_time", lambda: made.now / 4)
    return made


# -- beats


def test_a_beat_is_read_from_outside(tmp_path: Path, clock: Clock) -> None:
    """The first step is its slowest until there is another; saves are no part of steps."""
    path = rank_file(tmp_path, "beat", 3)
    assert read(path) is None
    beat = Beat(path)
    assert read(path) == Reading(0, "start", 100.0, -1, -1, 0.0, 0.0, dict.fromkeys(PHASES, 0.0))
    slowest = list[float]()
    for step, seconds in (7, 30.0), (8, 2.0), (9, 5.0), (10, 1.0):
        beat.enter("data", step)
        beat.enter("forward")
        clock.now += seconds
        beat.enter("update")
        beat.did(step)
        seen = read(path)
        assert seen is not None
        slowest.append(seen.slowest)
        beat.enter("save")
        clock.now += seconds / 2
    beat.enter("a phase of a user's own")
    seen = read(path)
    assert seen is not None and (seen.step, seen.phase, seen.done, seen.device) == (10, "save", 10, -1)
    assert seen.since == clock.now - 0.5 and slowest == [30.0, 2.0, 5.0, 5.0]
    assert seen.busy["forward"] == 38 / 4 and seen.longest == 15.0
    beat.device_did(9)
    seen = read(path)
    assert seen is not None and seen.busy["save"] == 18.5 / 4 and seen.device == 9


def test_the_recorder_s_newest_collectives_are_answered(tmp_path: Path) -> None:
    """From a thread, and again."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        flight_recorder.answer(tmp_path, lambda: (41, 2, "forward"))
        for last in (2, 4):
            dist.all_reduce(torch.ones(2))
            dist.barrier()
            assert flight_recorder.ask(tmp_path, os.getpid())
            deadline = time.monotonic() + 20
            while (told := flight_recorder.read(tmp_path, os.getpid())) is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert told[1] == (41, 2, "forward")
            (log,) = [log for log in told[0].values() if log.ranks == (0,)]
            assert log.kind == "barrier" and log.last % 2 == 0 and log.last >= last and not log.pending
    finally:
        dist.destroy_process_group()
    assert not flight_recorder.ask(tmp_path, 1)


def entry(number: int, kind: str, state: str, group: str = "3", **more: object) -> dict[str, object]:
    """An entry of the recorder of NCCL as torch documents it; a message where it names two ranks."""
    pair = kind.startswith(("send", "recv"))
    return {
        "record_id": number,
        "process_group": [group, "tp"],
        "collective_seq_id": number,
        "profiling_name": f"nccl:{kind}",
        "input_sizes": [[3, 2]],
        "input_dtypes": ["BFloat16"],
        "state": state,
        "retired": state == "completed" and number < 810,
        "time_discovered_started_ns": 0,
        "is_p2p": pair,
    } | more


def test_the_recorder_of_nccl_has_what_a_host_is_ahead_with() -> None:
    """A thread retires what has ended later. Of messages in a batch it notes no end."""
    ahead = [
        entry(809, "all_reduce", "completed"),
        entry(810, "all_reduce", "completed"),
        entry(812, "all_gather", "scheduled"),
        *(entry(number, "all_reduce", "scheduled") for number in range(813, 820)),
        entry(811, "recv 0<-1", "completed", "5"),
        entry(820, "send 0->1", "scheduled", "5"),
        entry(821, "send 1->0", "scheduled", "6"),
        entry(822, "coalesced", "completed", "6", is_p2p=True),
    ]
    ranks = {"3": [4, 6], "5": [4, 8], "6": [4, 8]}
    calls = {812: ("all_gather", ""), **dict.fromkeys((813, 814, 815), ("all_reduce", "6 BFloat16"))}
    assert flight_recorder.logs(ahead, ranks) == {
        "3": ((4, 6), 819, "all_reduce", calls, 812, None),
        "5 8>4": ((8, 4), 0, RECEIVE, {}, -1, None),
        "5 4>8": ((4, 8), 1, SEND, {1: (SEND, "")}, 820, None),
    }
    timed = [entry(809, "all_reduce", "completed", time_discovered_started_ns=5), ahead[2]]
    for state, begun in ("scheduled", False), ("started", True):
        assert flight_recorder.logs([timed[0], timed[1] | {"state": state}], ranks)["3"].begun is begun


# -- the judge


def rank(
    phase: Phase, does: str = "works", step: int = 40, groups: Mapping[str, GroupLog] | None = None, device: int = -1
) -> Witness:
    call = "`take` (pipeline/run.py:84)" if does == "waits" else ""
    return Witness(Reading(step, phase, 1.0, step - 1, device, 0.2, 0.0, {}), 61.0, does, call, groups or {})


def group(last: int, *pending: int, ranks: tuple[int, ...] = (0, 1), size: str = "") -> dict[str, GroupLog]:
    return {"7": GroupLog(ranks, last, "all_reduce", dict.fromkeys(pending, ("all_reduce", size)))}


def said(*ranks: Witness, shape: MeshShape, node: str = "") -> str:
    return judge(dict(enumerate(ranks)), shape, node)[1]


def stands(*ranks: Witness, world: int = 2) -> tuple[int, ...]:
    return judge(dict(enumerate(ranks)), MeshShape(dp=world))[0]


def test_who_waits_for_nobody_stands_whatever_its_phase() -> None:
    waits = [rank("reduce", "waits", groups=group(812, 812, ranks=(3, 4, 5) if i > 2 else (0, 1, 2))) for i in range(5)]
    for phase in PHASES:
        assert said(*waits, rank(phase), shape=MeshShape(pp=2, tp=3), node="c") == (
            f"rank 5 (pp=1 tp=2, node c) in `{phase}` of step 40 for 61 s; ranks 0-4 waiting in all_reduce 812 of tp"
        )
    some = rank("update", "waits"), rank("data"), rank("forward", "compiles"), rank("data"), rank("log", "is stopped")
    assert said(*some, shape=MeshShape(dp=5)) == (
        "ranks 1, 3 in `data` of step 40 for 61 s; rank 2 (dp=2) in `forward` of step 40 for 61 s, compiling; rank 4 "
        "(dp=4) in `log` of step 40 for 61 s, stopped by a signal; rank 0 waiting in `take` (pipeline/run.py:84)"
    )


def test_who_has_left_out_a_collective() -> None:
    behind, ahead = rank("update", "waits", groups=group(812, 812)), rank("forward", "waits", 41, group(811))
    assert said(behind, ahead, shape=MeshShape(dp=2)) == (
        "rank 1 (dp=1) has left out all_reduce 812 of dp; rank 0 waiting in all_reduce 812 of dp; "
        "rank 1 waiting in `take` (pipeline/run.py:84)"
    )
    for other in (
        rank("backward", "waits", groups=group(811)),  # it has still to come: another message is slow
        rank("forward", "waits", 41, group(812, 812)),  # both are in it
        rank("forward", "waits", 41),  # the recorder has forgotten the group
    ):
        assert stands(behind, other) == ()
    assert stands(behind, ahead, world=4) == ()  # other machines may come
    assert said(behind, behind, shape=MeshShape(dp=4)) == "ranks 0-1 waiting in all_reduce 812 of ranks 0-1"


def test_who_has_called_another_collective() -> None:
    ranks = (0, 1, 2)
    loss, norm = (rank("reduce", "waits", groups=group(812, 812, ranks=ranks, size=f"{n} Double")) for n in (1, 2))
    assert said(loss, norm, loss, shape=MeshShape(dp=3)) == (
        "number 812 of dp is all_reduce of 1 Double on ranks 0, 2, but all_reduce of 2 Double on rank 1"
    )
    assert stands(loss, norm, loss) == (1,)
    assert stands(loss, rank("data"), loss) == (1,)  # who works has still to call it


def gpu(
    *pending: tuple[str, int, tuple[int, ...]], at: Place | None = (40, 3, "backward"), begun: bool | None = None
) -> Witness:
    """A rank with a GPU that has these collectives still to do, in this order: (group, number, ranks)."""
    groups = dict[str, GroupLog]()
    for order, (name, number, ranks) in enumerate(pending):
        kind = (SEND if name.startswith("to") else RECEIVE) if ">" in name else "all_reduce"
        calls = {number: (kind, "")} if number > 0 else {}
        log = GroupLog(ranks, abs(number), kind, calls, order if calls else -1, begun)
        groups.setdefault(name.removeprefix("to "), log)
    return replace(rank("log", step=42, groups=groups), device=at)


TP, DP, DP_ABROAD = ("tp", 812, (0, 1)), ("dp", 9, (0, 2)), ("dp", 9, (0, 5))
ALL_3 = [("tp", 5, (0, 1, 2))]
FROM_1, TO_0 = ("pp 1>0", 1, (1, 0)), ("to pp 1>0", 1, (1, 0))
BEHIND: Place = (40, 2, "forward")


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([gpu(TP), gpu(("tp", -811, (0, 1)))], (1,)),  # its host has not entered it
        ([gpu(TP), gpu(TP, at=BEHIND)], (1,)),  # its events tell
        ([gpu(TP, begun=True), gpu(TP, begun=False)], (1,)),
        ([gpu(*ALL_3, begun=True), gpu(*ALL_3, begun=False), gpu(*ALL_3, at=BEHIND, begun=False)], (1, 2)),
        ([gpu(TP, begun=True), gpu(TP, begun=True)], ()),  # both are in it, and it does not end
        ([gpu(TP), gpu(TP)], ()),  # which one stands is not known
        ([gpu(TP, DP), gpu(TP, at=BEHIND), gpu(DP)], (1,)),  # who waits for one that waits is healthy
        ([gpu(DP_ABROAD), gpu(("dp", 9, (1, 4)))], ()),  # for ranks of other machines
        ([gpu(DP_ABROAD, TP), gpu(TP)], ()),  # who waits for one that waits there
        ([gpu(DP_ABROAD, TP, begun=False), gpu(TP, begun=True)], (0,)),
        ([gpu(FROM_1), gpu(("tp", 812, (1, 2)), TO_0), gpu(("tp", -811, (1, 2)))], (2,)),
        ([gpu(FROM_1), gpu(("to pp 1>0", 0, (1, 0)))], (1,)),  # it has yet to send
        ([gpu(("to pp 0>1", 1, (0, 1)), FROM_1), gpu(("pp 0>1", 1, (0, 1)), TO_0)], (0,)),  # a stage before its send
    ],
)
def test_of_gpus_that_their_hosts_are_ahead_of_the_one_that_others_wait_for_stands(
    ranks: list[Witness], found: tuple[int, ...]
) -> None:
    """Hosts stand wherever they next read a number."""
    assert stands(*ranks, world=len(ranks)) == found


def test_a_gpu_that_stands_in_words() -> None:
    shape = MeshShape(tp=2)
    assert said(gpu(TP, begun=True), gpu(TP, at=BEHIND, begun=False), shape=shape) == (
        "rank 1 (tp=1) in `log` of step 42 for 61 s, its GPU in `forward` of step 40 before all_reduce 812 of tp; "
        "rank 0 waiting in all_reduce 812 of tp"
    )
    assert said(gpu(TP), gpu(TP), shape=shape) == "ranks 0-1 waiting in all_reduce 812 of tp"


STACKS = '''Thread 0x01 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 327 in wait
  File "/x/queue.py", line 140 in put

Current thread 0x02 (most recent call first):
  File "{file}", line 84 in {name}
  File "{outer}", line 319 in _take
  File "/x/megacore/training/trainer.py", line 12 in run
'''  # fmt: skip


@pytest.mark.parametrize(
    ("file", "outer", "found"),
    [
        ("/x/parallel/pipeline/run.py", "/x/a.py", ("waits", "`f` (pipeline/run.py:84)")),
        ("/x/torch/distributed/distributed_c10d.py", "/x/a.py", ("waits", "`f` (distributed/distributed_c10d.py:84)")),
        ("/x/torch/autograd/graph.py", "/x/a.py", ("waits", "`wait` (distributed/distributed_c10d.py:327)")),
        ("/x/a.py", "/x/parallel/pipeline/run.py", ("works", "")),  # its own chunk; another thread waits
        ("/x/torch/_inductor/codegen/cpp.py", "/x/torch/_inductor/graph.py", ("compiles", "")),
        ("/x/a.py", "/x/torch/_dynamo/eval_frame.py", ("works", "")),  # runs what was compiled
    ],
)
def test_what_stacks_show(file: str, outer: str, found: tuple[str, str]) -> None:
    assert doing(STACKS.format(file=file, outer=outer, name="f")) == found
    assert doing("") == ("works", "")


# -- when


def test_the_bound_comes_from_what_was_measured() -> None:
    def reading(slowest: float, longest: float = 0.0) -> Reading:
        return Reading(4, "data", 1.0, 3, -1, slowest, longest, {})

    assert bound_s([reading(0.1), reading(0.2)]) == LEAST_S
    assert bound_s([reading(0.1), reading(20.0)]) == 200.0
    assert bound_s([reading(0.1, longest=50.0)]) == 100.0
    assert bound_s([reading(0.1), reading(0.0)]) == START_S
    assert bound_s([reading(90.0)], timeout_s=600.0) == 450.0  # before the stacks are gone


class Scene:
    """Ranks that a test moves, and the report on them, polled on the test's clock."""

    def __init__(self, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> None:
        self.clock, self.incidents, self.lines = clock, list[Incident](), list[str]()
        self.stacks = dict.fromkeys(range(ranks), STACKS.format(file="/x/a.py", outer="/x/a.py", name="f"))
        self.answers = dict[int, Answer]()
        self.asks = 0
        self.out = folder / "run"
        monkeypatch.setattr(hang_report.time, "monotonic", clock)
        monkeypatch.setattr(hang_report, "err", self.lines.append)
        self.report = HangReport(self.out, folder, MeshShape(dp=ranks), "", self.incidents.append)
        monkeypatch.setattr(self.report, "_asked", self._asked)
        self.ranks = {each: each + 5 for each in range(ranks)}
        self.beats = [Beat(rank_file(folder, "beat", pid)) for pid in self.ranks.values()]
        self.step = 0

    def _asked(self, ranks: Mapping[int, int]) -> tuple[dict[int, str], dict[int, Answer]]:
        self.asks += 1
        return dict(self.stacks), dict(self.answers)

    def waits(self, rank: int) -> None:
        self.stacks[rank] = STACKS.format(file="/x/parallel/collectives.py", outer="/x/a.py", name="all_reduce_")

    def passes(self, seconds: float, poll_s: float = 0.25) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += poll_s
            self.report.poll(self.ranks)
            if (looking := self.report._looking) is not None:
                looking.join()

    def enter(self, phase: Phase, rank: int | None = None) -> None:
        for beat in self.beats if rank is None else [self.beats[rank]]:
            beat.enter(phase)

    def does(self, seconds: float = 0.3, last: Phase = "update") -> None:
        """Do a step."""
        self.step += 1
        for beat in self.beats:
            beat.enter("data", self.step)
        for phase in ("forward", "backward", last):
            self.enter(phase)
            self.passes(seconds / 3)
        for beat in self.beats:
            beat.did(self.step)

    def steps(self, count: int, seconds: float = 0.3) -> None:
        for _ in range(count):
            self.does(seconds)


@pytest.fixture
def scene(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, clock, monkeypatch)


def evaluates(scene: Scene, batches: int, seconds: float) -> None:
    for _ in range(3):
        scene.steps(5)
        for _ in range(batches):
            scene.enter("evaluate")
            scene.passes(seconds)


def saves(scene: Scene) -> None:
    """While one of them waits for the other."""
    for _ in range(3):
        scene.steps(5)
        scene.enter("save")
        scene.passes(0.5)
        scene.enter("data", 0)
        scene.waits(0)
        scene.passes(70.0)


def it_loads(scene: Scene) -> None:
    scene.passes(590.0)
    scene.does()


def compiles_in_the_middle(scene: Scene) -> None:
    scene.steps(5)
    scene.enter("forward")
    scene.stacks[1] = STACKS.format(file="/x/a.py", outer="/x/torch/_inductor/graph.py", name="f")
    scene.waits(0)
    scene.passes(110.0)


def the_agent_is_stopped(scene: Scene) -> None:
    scene.steps(5)
    for _ in range(3):
        scene.clock.now += 3600.0
        scene.passes(15.0)


def the_agent_starves(scene: Scene) -> None:
    scene.steps(5)
    scene.passes(590.0, poll_s=5.0)


def stalls(scene: Scene) -> None:
    for phase in PHASES[1:-1]:
        for step in range(10):
            scene.does(30.0 if step == 5 else 0.4, last=phase)


HEALTHY: Mapping[str, Callable[[Scene], object]] = {
    "slow steps": lambda scene: scene.steps(3, 180.0),
    "one step in fifty": lambda scene: [scene.does(30.0 if step % 50 == 49 else 0.5) for step in range(120)],
    "an evaluation": lambda scene: evaluates(scene, 12, 10.0),
    "an evaluation of one batch": lambda scene: evaluates(scene, 1, 115.0),
} | {
    each.__name__: each
    for each in (saves, it_loads, compiles_in_the_middle, the_agent_is_stopped, the_agent_starves, stalls)
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_report(name: str, scene: Scene) -> None:
    HEALTHY[name](scene)
    assert not scene.incidents and not scene.lines and not scene.out.exists()


def test_who_stands_is_told_at_doubled_times_until_a_step_is_done(scene: Scene) -> None:
    scene.steps(5)
    scene.enter("log", 1)
    scene.enter("reduce", 0)
    scene.waits(0)
    scene.passes(59.0)
    assert not scene.asks
    scene.passes(500.0)
    times = [int(time) for line in scene.lines for time in re.findall(r"No step for (\d+) s", line)]
    assert times == [60, 120, 240, 480]
    assert scene.lines[0].startswith(
        "\nNo step for 60 s: rank 1 (dp=1) in `log` of step 5 for 60 s; rank 0 waiting in `all_reduce_` "
        "(parallel/collectives.py:84)"
    )
    assert [(x.kind, x.action, x.rank, x.step) for x in scene.incidents] == [("stands_still", "tell", 1, 5)] * 4
    ((_, text),) = standing(scene.out)
    assert scene.lines[-1].startswith(f"\nN{text[1:]}")
    reports = sorted((scene.out / "hangs").glob("2*.txt"))
    assert reports and "The stacks of rank 1:\nThread 0x01" in reports[0].read_text()
    scene.enter("data", 1)
    scene.passes(1.0)
    deadline = time.time() + 20
    while standing(scene.out) and time.time() < deadline:
        time.sleep(0.01)
    assert not standing(scene.out)
    scene.passes(59.5)
    assert len(scene.lines) == 5 and "step 6" not in scene.lines[-1]


def test_other_processes_are_looked_at_anew(scene: Scene, tmp_path: Path) -> None:
    scene.steps(5)
    scene.passes(50.0)
    scene.ranks = {0: 15, 1: 16}  # which are yet to begin
    scene.passes(START_S - 1)
    assert not scene.asks
    scene.passes(2.0)
    assert "ranks 0-1 in `start` of step 0" in scene.lines[0]


def test_who_moves_while_it_is_asked_is_not_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.steps(5)
    asked = scene._asked

    def goes_on(ranks: Mapping[int, int]) -> object:
        scene.enter("log", 1)
        return asked(ranks)

    monkeypatch.setattr(scene.report, "_asked", goes_on)
    scene.passes(70.0)
    assert scene.asks == 1 and not scene.lines


def test_a_device_that_its_host_is_ahead_of_may_go_on(scene: Scene) -> None:
    """It has done steps since the host stood, and then since it was last asked."""
    scene.steps(5)
    for beat in scene.beats:
        beat.device_did(3)
    scene.answers = {0: ({}, (4, 1, "data")), 1: ({}, None)}
    scene.passes(61.0)
    scene.answers[1] = ({}, (4, 2, "forward"))
    scene.passes(60.0)
    assert scene.asks == 2 and not scene.lines
    scene.passes(120.0)
    assert scene.asks == 3 and len(scene.lines) == 1


def test_a_device_that_stands_is_named_though_all_hosts_are_far_ahead(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's stands before a collective that both hosts have entered, as others after it."""
    monkeypatch.setattr(hang_report, "gpu_in_words", lambda number: f"GPU {number} at 55 C")
    scene.steps(5)
    ahead = [entry(number, "all_reduce", "scheduled") for number in range(812, 830)]
    for rank, state, at in (0, "started", (3, 9, "backward")), (1, "scheduled", (3, 8, "forward")):
        dump = [entry(811, "all_reduce", "completed", time_discovered_started_ns=5), ahead[0] | {"state": state}]
        told = {"device": at, "groups": flight_recorder.logs([*dump, *ahead[1:]], {"3": [0, 1]})}
        rank_file(tmp_path, "answer", scene.ranks[rank]).write_text(json.dumps(told))
        scene.answers[rank] = flight_recorder.read(tmp_path, scene.ranks[rank]) or ({}, None)
        scene.beats[rank].device_did(2)
    scene.enter("log")
    scene.passes(121.0)  # where they have come to is known after the first look
    (incident,) = scene.incidents
    assert (incident.rank, incident.step) == (1, 5)
    assert incident.detail == (
        "no step for 120 s: rank 1 (dp=1) in `log` of step 5 for 120 s, its GPU in `forward` of step 3 before "
        "all_reduce 812 of dp; rank 0 waiting in all_reduce 812 of dp; rank 1 has GPU 1 at 55 C"
    )
    (path,) = (scene.out / "hangs").glob("2*.txt")
    report = path.read_text()
    assert (
        "rank 0, dp (ranks 0-1): all_reduce 829; not ended: all_reduce 812 of 6 BFloat16, which its GPU has begun, "
        in report
    )
    assert re.search(r"rank 1 \(dp=1\) +5  log +2 .*; its GPU is in `forward` of step 3\n", report)


def test_a_disk_that_does_not_answer_is_not_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(hang_report, "WRITE_S", 0.1)
    monkeypatch.setattr(hang_report, "replacing", lambda *_, **__: nullcontext(BytesIO()) if answers.wait(20) else None)
    scene.steps(5)
    began = time.time()
    scene.passes(61.0)
    answers.set()
    (line,) = scene.lines
    assert "stacks" not in line and len(scene.incidents) == 1 and time.time() < began + 10


def test_a_slow_rank_is_told_of_by_its_beat(scene: Scene) -> None:
    for step in range(80):
        for beat, seconds in zip(scene.beats, (0.1, 0.3), strict=True):
            beat.enter("forward", step)
            scene.clock.now += 4 * seconds
            beat.enter("log")
        scene.report.poll(scene.ranks)
    assert [(each.kind, each.action, each.rank) for each in scene.incidents] == [("straggler", "tell", 1)]


def test_where_the_ranks_are_in_one_line(scene: Scene) -> None:
    assert scene.report.brief() == "no rank runs here"
    scene.does()
    scene.enter("log", 1)
    scene.passes(3.0)
    assert (
        scene.report.brief()
        == "step 1 is done; rank 0 (dp=0) in `update` of step 1 for 3 s; rank 1 (dp=1) in `log` of step 1 for 3 s"
    )


# -- real processes

TOY = """
import faulthandler, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from megacore.outcome import rank_file
from megacore.recovery import flight_recorder
from megacore.recovery.beats import Beat

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
faulthandler.register(signal.SIGUSR2, rank_file(folder, "stacks", os.getpid()).open("x"), all_threads=True)
beat = Beat(rank_file(folder, "beat", os.getpid()))
flight_recorder.answer(folder)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

def sleeps():
    time.sleep(600)

for step in range(1, 4):
    beat.enter("forward", step)
    if rank and step == 3:
        sleeps()
    beat.enter("reduce")
    dist.all_reduce(torch.ones(3))
    beat.did(step)
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = {
        rank: subprocess.Popen([sys.executable, "-c", TOY, str(tmp_path), str(rank)], env=environment)
        for rank in range(2)
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.in_turn(4, 2)
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")
def test_ranks_that_stand_are_told_and_live(
    tmp_path: Path,
    processes: dict[int, subprocess.Popen[bytes]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In order: asleep, stopped."""
    monkeypatch.setattr(hang_report, "LEAST_S", 0.5)
    incidents, ranks = list[Incident](), {rank: process.pid for rank, process in processes.items()}
    report = HangReport(tmp_path / "run", tmp_path, MeshShape(dp=2), "", incidents.append)

    def told(times: int, stopped: bool = False) -> str:
        deadline, longest = time.monotonic() + 60, 0.0
        while len(incidents) < times and time.monotonic() < deadline:
            began = time.monotonic()
            report.poll(ranks)
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.05)
        assert len(incidents) == times and longest < 0.5
        return incidents[-1].detail

    sleeps = r"no step for \d s: rank 1 \(dp=1\) in `forward` of step 3 for \d s"
    assert re.fullmatch(f"{sleeps}; rank 0 waiting in all_reduce 3 of dp", told(1))
    (path,) = (tmp_path / "run" / "hangs").glob("*.txt")
    text = path.read_text()
    assert re.search(r"The stacks of rank 1:\n(.*\n)*.* in sleeps\n", text), text
    assert "rank 0, dp (ranks 0-1): all_reduce 3; not ended: all_reduce 3 of 3 Float" in text
    assert "rank 1, dp (ranks 0-1): all_reduce 2\n" in text
    report.show()
    deadline = time.monotonic() + 20
    shown = ""
    while shown.count("stands here:\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        shown += capfd.readouterr().err
    assert f"\nrank 1 (dp=1) (process {ranks[1]}) stands here:\n" in shown and " in sleeps\n" in shown
    os.kill(ranks[1], signal.SIGSTOP)
    assert told(2).endswith("stopped by a signal; rank 0 waiting in all_reduce 3 of dp")
    assert [process.poll() for process in processes.values()] == [None, None]


def test_who_is_not_ready_for_the_signal_does_not_end_by_it(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        report = HangReport(tmp_path / "run", tmp_path, None, "", lambda incident: None)
        assert report._asked({0: process.pid}) == ({}, {})
        assert not rank_file(tmp_path, "stacks", process.pid).exists() and process.poll() is None
        process.kill()


def test_what_a_killed_launcher_says_of_now_is_read_or_passed_over(tmp_path: Path) -> None:
    for node, text in ("a", json.dumps({"at": 5.0, "step": 3, "text": "no step\n for 60 s"})), ("b", "{"), ("", "[1]"):
        now_of(tmp_path, node).parent.mkdir(exist_ok=True)
        now_of(tmp_path, node).write_text(text)
    assert standing(tmp_path) == [(5.0, "no step for 60 s")]
