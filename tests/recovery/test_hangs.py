"""Who stands still: the judge on what it is shown, and the watch over beats that a test writes.

A false alarm is the worse mistake: most cases are of ranks that are slow for a good reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacore.recovery import collectives, phases, watch
from megacore.recovery.collectives import Call, GroupLog
from megacore.recovery.hangs import LET_GO_S, Doing, Verdict, Witness, doing, judge, limits, listed, sentence
from megacore.recovery.phases import PHASES, UNHEARD, Beat, Phase, Reading, beat_of, read
from megacore.recovery.watch import HangWatch
from parallel.weights.layout import MeshShape

TIMEOUT = 600.0
KNOWN: dict[Phase, float] = {
    "data": 0.01, "forward": 0.2, "backward": 0.3, "reduce": 0.1, "update": 0.1, "log": 0.1, "save": 3.0
}  # fmt: skip


def rank(
    phase: Phase,
    stood: float,
    does: Doing = "works",
    step: int = 40,
    groups: Mapping[str, GroupLog] | None = None,
    slowest: dict[Phase, float] = KNOWN,
) -> Witness:
    call = "`take` (pipeline/run.py:84)" if does == "waits" else ""
    return Witness(Reading(step, phase, 1.0, slowest, {}), stood, does, call, groups or {})


def stands(*ranks: Witness, whole: bool = True) -> tuple[int, ...]:
    verdict = judge(dict(enumerate(ranks)), TIMEOUT, whole)
    return verdict.stands if verdict else ()


# -- beats


class Clock:
    """The seconds of a machine that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_a_beat_is_read_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first step and a recovery take is not its slowest."""
    clock = Clock()
    monkeypatch.setattr(phases, "monotonic", clock.monotonic)
    monkeypatch.setattr(phases, "thread_time", lambda: clock.now / 4)
    path = beat_of(tmp_path, 3)
    assert read(path) is None
    beat = Beat(path)
    assert read(path) == Reading(0, "start", 100.0, {}, dict.fromkeys(PHASES, 0.0))
    for step, seconds in (7, 30.0), (8, 2.0), (9, 1.0):
        beat.enter("data", step)
        for _ in range(2):
            beat.enter("forward")
            clock.now += seconds
            beat.enter("backward")
    seen = read(path)
    assert seen is not None and (seen.step, seen.phase, seen.since) == (9, "backward", 166.0)
    assert seen.slowest == {"forward": 2.0} and seen.busy["forward"] == 16.5
    clock.now += 31.0  # in which somebody stood still
    beat.enter("recover")
    again = read(path)
    assert again is not None and again.phase == "recover" and not again.slowest


def test_a_beat_within_a_step_makes_four_calls_and_opens_no_file() -> None:
    """Two clocks, a maximum and itself; only before the data is it asked what others took of this core. Where no agent
    is, it is no file and costs the same. What it takes in a step is told by benchmarks/protection.py."""
    called = list[str]()

    def profile(frame: FrameType, event: str, value: object) -> None:
        if event in ("call", "c_call"):
            called.append(frame.f_code.co_name if event == "call" else str(getattr(value, "__name__", value)))

    UNHEARD.enter("forward", 1)
    sys.setprofile(profile)
    try:
        UNHEARD.enter("backward")
    finally:
        sys.setprofile(None)
    assert called == ["enter", "monotonic", "thread_time", "max", "setprofile"]


def test_a_rank_answers_for_its_collectives_while_it_waits(tmp_path: Path) -> None:
    """In a thread; who does not listen is not waited for."""
    collectives.answer(beat_of(tmp_path, 14))
    began = time.monotonic()
    assert set(collectives.ask(tmp_path, {rank: beat_of(tmp_path, rank + 10) for rank in (4, 5)}, patience_s=30)) == {4}
    assert time.monotonic() - began < 20


def test_of_the_recorder_the_newest_groups_count(tmp_path: Path) -> None:
    """It forgets none, and groups that are made anew have the names and numbers of those before."""
    told = list[tuple[list[int], int, str, list[Any]]]()
    for generation, sizes in enumerate(((1, 2, 5, 1, 2), (1, 2, 1, 7))):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{generation}", rank=0, world_size=1)
        for size in sizes:
            dist.all_reduce(torch.ones(size))
        told.append(collectives.groups()["0"])
        dist.destroy_process_group()
    assert [(ranks, last, kind) for ranks, last, kind, _ in told] == [([0], 5, "all_reduce"), ([0], 4, "all_reduce")]


def entry(size: Sequence[int], kind: str = "all_reduce") -> dict[str, object]:
    return {"profiling_name": f"gloo:{kind}", "input_sizes": [size], "input_dtypes": ["Double"]}


def test_a_call_is_usual_where_it_has_followed_the_same_before() -> None:
    sizes = [(), (2,), (3,), (), (2,), (3,), (2,), (3, 2)]
    calls = [Call(*call) for _, call in collectives._calls([entry(size) for size in sizes])]
    assert [each.size for each in calls] == [f"{n} Double" for n in (1, 2, 3, 1, 2, 3, 2, 6)]
    assert [each.usual for each in calls] == [False] * 4 + [True] * 2 + [False] * 2
    (gathered,) = collectives._calls([entry((5,), "all_gather")])
    assert gathered[1] == ("all_gather", "", False)  # ranks may have more or fewer


# -- the judge


@pytest.mark.parametrize(
    ("found", "ranks"),
    [
        ((), (rank("data", 1.0), rank("forward", 1.5, "waits"))),  # within a second
        ((0,), (rank("data", 1.06), rank("forward", 1.5, "waits"))),
        ((), (rank("forward", 1.9), rank("forward", 5, "waits"))),
        ((0,), (rank("forward", 2.1), rank("forward", 5, "waits"))),
        # the slowest of all ranks counts
        ((), (rank("forward", 2.1), rank("forward", 5, "waits", slowest={"forward": 1.0}))),
        ((), (rank("forward", 31, "compiles"), rank("forward", 31, "waits"))),
        ((0,), (rank("forward", 601, "compiles"), rank("forward", 601, "waits"))),
        # not measured yet: the first evaluation
        ((), (rank("evaluate", 500), rank("evaluate", 500, "waits"))),
        ((0,), (rank("evaluate", 601), rank("evaluate", 601, "waits"))),
        # disks
        ((), (rank("save", 590), rank("data", 590, "waits"))),
        ((0,), (rank("save", 601), rank("data", 601, "waits"))),
        ((), (rank("log", 590), rank("log", 590, "waits"))),
        ((), (rank("start", 590, step=0), rank("start", 590, "waits", step=0))),
        # what all do takes as long as it takes
        ((), (rank("data", 500), rank("data", 500))),
        ((0, 1), (rank("data", 601), rank("data", 601))),
        ((), (rank("start", 9000, step=0), rank("start", 9000, step=0))),
        ((), (rank("save", 9000), rank("save", 9000))),
        ((), (rank("end", 9000),)),
        ((), (rank("evaluate", 9000),)),
        ((0,), (rank("forward", 601),)),
        ((), (rank("forward", 601), rank("forward", 1))),
        # two stand, two wait
        ((1, 2), (rank("update", 9, "waits"), rank("data", 9), rank("forward", 9), rank("reduce", 9, "waits"))),
        # one that works between two looks, in a phase that is no longer than it may be
        ((2,), (rank("update", 9, "waits"), rank("backward", 2), rank("data", 9))),
        # all wait for another machine, or for a slow network
        ((), (rank("forward", 99, "waits"), rank("forward", 99, "waits"))),
    ],
)  # fmt: skip
def test_who_stands_still(found: tuple[int, ...], ranks: tuple[Witness, ...]) -> None:
    assert stands(*ranks) == found


def group(last: int, *pending: int, ranks: tuple[int, ...] = (0, 1)) -> dict[str, GroupLog]:
    return {"7": GroupLog(ranks, last, "all_reduce", dict.fromkeys(pending, Call("all_reduce", "1 Double")))}


def test_who_has_left_out_a_collective() -> None:
    behind, ahead = rank("update", 9, "waits", groups=group(812, 812)), rank("forward", 9, "waits", 41, group(811))
    assert stands(behind, ahead) == (1,) and stands(ahead, behind) == (0,)
    assert not stands(behind, ahead, whole=False)  # another machine may come
    assert not stands(behind, replace(ahead, stood=0.5))
    assert not stands(replace(behind, stood=0.5), ahead)
    # It has still to come: another message is slow.
    late = rank("backward", 9, "waits", groups=group(811))
    assert not stands(behind, late)
    # A long transfer: both are in it.
    assert not stands(behind, rank("forward", 9, "waits", 41, group(812, 812)))
    # Not known: the recorder has forgotten the group.
    assert not stands(behind, rank("forward", 9, "waits", 41))


def called(call: Call, step: int = 40, ranks: tuple[int, ...] = (0, 1)) -> Witness:
    return rank("reduce", 9, "waits", step, {"7": GroupLog(ranks, 812, call.kind, {812: call})})


def test_who_has_called_another_collective() -> None:
    """Of three the odd one; of two the one that is further, or that has never called such a one there."""
    loss, norm = Call("all_reduce", "1 Double"), Call("all_reduce", "2 Double")
    of_all = [called(loss, ranks=(0, 1, 2)), called(norm, ranks=(0, 1, 2)), called(loss, ranks=(0, 1, 2))]
    assert stands(*of_all) == (1,)
    assert stands(of_all[0], called(norm, 41, (0, 1, 2)), rank("data", 1)) == (1,)  # who works has still to call it
    assert stands(called(loss), called(replace(norm, usual=False))) == (1,)
    assert stands(called(replace(loss, usual=False)), called(norm)) == (0,)
    assert stands(called(replace(loss, usual=False)), called(norm, step=41)) == (1,)
    other = judge({0: called(Call("barrier", usual=False)), 1: called(loss)}, TIMEOUT, whole=False)
    assert other is not None and other.stands == (0,)  # whatever other machines do
    assert other.left_out is not None and other.left_out.kind == "all_reduce"
    assert not stands(called(loss), called(replace(loss, usual=False)))
    assert not stands(called(loss), called(norm, ranks=(1, 2)))  # another group, of the same name
    verdict = judge(dict(enumerate([called(loss), called(replace(norm, usual=False))])), TIMEOUT, True)
    assert verdict is not None and sentence(verdict, MeshShape(tp=2)) == (
        "rank 1 (tp=1) has left out all_reduce 812 of tp, and waits in `take` (pipeline/run.py:84); rank 0 waits for "
        "it in all_reduce 812 of tp"
    )


def test_limits_come_from_all_ranks_and_end_with_the_timeout() -> None:
    first, second = (Reading(4, "data", 1.0, {"data": slow}, {}) for slow in (0.1, 2.0))
    found = limits([first, second], TIMEOUT)
    assert found["data"] == 11.0 and found["forward"] == TIMEOUT == found["save"]
    assert limits([Reading(4, "save", 1.0, {"save": 300.0}, {})], TIMEOUT)["save"] == 1501.0


def test_after_a_recovery_what_was_before_it_counts() -> None:
    """Nothing of what follows is measured yet; and who has let go of its groups waits for who has not."""
    new = Reading(40, "forward", 1.0, {}, {})
    before: dict[Phase, float] = {"start": 2.0, "recover": 0.5, "forward": 0.6, "save": 4.0, "evaluate": 500.0}
    found = limits([new], TIMEOUT, before=before)
    assert found["forward"] == 4.0 and found["recover"] == LET_GO_S == found["start"]
    assert found["save"] == found["data"] == TIMEOUT == found["evaluate"]
    measured = limits([replace(new, slowest={"forward": 0.1})], TIMEOUT, before={**before, "start": 20.0})
    assert measured["forward"] == 1.5 and measured["recover"] == 101.0
    stopped, late = rank("forward", 4.1, slowest={}), rank("recover", 15.1, slowest={})
    importing = Witness(Reading(0, "start", 0.0, {}, {}), 2 * TIMEOUT)
    for each, waits in (stopped, "forward"), (late, "recover"):
        seen = {0: each, 1: rank("forward", 40, "waits", slowest={}), 2: importing}
        assert judge({**seen, 2: replace(importing, stood=30.0)}, TIMEOUT, True) is None, waits
        verdict = judge(seen, TIMEOUT, True, before=before)
        assert verdict is not None and verdict.stands == (0,), waits


def test_the_longest_time_survives_a_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not that of a phase which a fault has ended: the others stood for as long as it took to be seen."""
    clock = Clock()
    monkeypatch.setattr(phases, "monotonic", clock.monotonic)
    beat = Beat(beat_of(tmp_path, 0))
    steps: tuple[phases.Phase, ...] = ("data", "forward", "data", "forward", "end")
    for seconds, phase in zip((5.0, 1.0, 3.0, 0.5, 60.0), steps, strict=True):
        clock.now += seconds
        beat.enter(phase)
    beat.enter("recover", 3)
    eye = HangWatch(tmp_path / "run", MeshShape(dp=2), TIMEOUT)
    assert eye.poll(tmp_path, {0: beat_of(tmp_path, 0)}, dict) is None
    assert eye._before == {"start": 5.0, "data": 1.0, "forward": 3.0}


STACKS = '''Thread 0x01 (most recent call first):
  File "/x/threading.py", line 327 in wait
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
        ("/x/a.py", "/x/parallel/pipeline/run.py", ("works", "")),  # its own chunk
        ("/x/megacore/recovery/channel.py", "/x/a.py", ("works", "")),  # the thread that listens
        ("/x/torch/_inductor/codegen/cpp.py", "/x/torch/_inductor/graph.py", ("compiles", "")),
        ("/x/a.py", "/x/torch/_dynamo/eval_frame.py", ("works", "")),  # runs what was compiled
    ],
)
def test_what_stacks_show(file: str, outer: str, found: tuple[str, str]) -> None:
    assert doing(STACKS.format(file=file, outer=outer, name="f")) == found
    assert doing("") == ("works", "")
    assert doing(STACKS.format(file="/x/megacore/recovery/channel.py", outer="/x/a.py", name="ready"))[0] == "waits"


def test_the_sentence() -> None:
    """As the issue has it."""
    shape = MeshShape(pp=2, tp=3)
    waits = {
        each: rank("reduce", 30, "waits", groups=group(812, 812, ranks=(3, 4, 5) if each > 2 else (0, 1, 2)))
        for each in range(5)
    }
    seen = {**waits, 5: rank("data", 31)}
    assert sentence(Verdict((5,), seen), shape, "c") == (
        "rank 5 (pp=1 tp=2, node c) has stood in `data` for 31 s; ranks 0-4 wait for it in all_reduce 812 of tp"
    )
    left = judge(
        {0: rank("update", 9, "waits", groups=group(812, 812)), 1: rank("data", 9, "waits", 41, group(811))},
        TIMEOUT,
        True,
    )
    assert left is not None and sentence(left, MeshShape(dp=2)) == (
        "rank 1 (dp=1) has left out all_reduce 812 of dp, and waits in `take` (pipeline/run.py:84); rank 0 waits for "
        "it in all_reduce 812 of dp"
    )
    alone = Verdict((0,), {0: rank("forward", 700)})
    assert sentence(alone, MeshShape()) == (
        "rank 0 has stood in `forward` for 700 s; no rank here waits for another"
    )  # fmt: skip
    assert listed([7, 0, 2, 1]) == "ranks 0-2, 7" and listed([3]) == "rank 3"


# -- the watch


def test_a_machine_that_slept_has_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has one on which this process did not get its turn. Stacks are asked for ever more seldom."""
    clock, asked = Clock(), list[float]()
    monkeypatch.setattr(watch.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(watch, "ask", lambda *_: {})
    files = {each: beat_of(tmp_path, each + 5) for each in range(2)}
    beats = [Beat(file) for file in files.values()]
    for step in range(1, 4):
        for beat in beats:
            for phase in ("data", "forward", "backward"):
                beat.enter(phase, step)

    def stacks() -> dict[int, str]:
        asked.append(clock.now)
        return {each: STACKS.format(file="/x/a.py", outer="/x/a.py", name="f") for each in range(2)}

    eye = HangWatch(tmp_path / "run", MeshShape(dp=2), TIMEOUT)
    assert eye.poll(tmp_path, files, stacks) is None
    clock.now += 3600.0
    assert eye.poll(tmp_path, files, stacks) is None and not asked
    for _ in range(400):
        clock.now += watch.POLL_S
        assert eye.poll(tmp_path, files, stacks) is None
    assert 2 <= len(asked) <= 8, asked

    def waits() -> dict[int, str]:
        return stacks() | {0: STACKS.format(file="/x/parallel/collectives.py", outer="/x/a.py", name="f")}

    def goes_on() -> dict[int, str]:
        beats[1].enter("forward", 4)
        return waits()

    clock.now += 1000.0
    for _ in range(1000):  # the one that is late has moved while its stack was written
        clock.now += watch.POLL_S
        assert eye.poll(tmp_path, files, goes_on) is None
    for _ in range(1000):
        clock.now += watch.POLL_S
        if found := eye.poll(tmp_path, files, waits):
            break
    assert found is not None and found.stands == (1,) and found.report is not None
    assert found.text in found.report.read_text() and "rank 1 does not answer" in found.report.read_text()
