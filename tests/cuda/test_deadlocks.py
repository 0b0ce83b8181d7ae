"""All ranks of whole runs, on simulated GPUs: nobody waits for ever; launched in another order, messages would have
somebody do so, or it makes no difference."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import astuple, replace

import pytest
import steps
from deadlocks import MODELS, Model, has_circle, stuck, swapped, swaps
from steps import CASES, Case
from test_orders import close_behind
from test_trace import in_a_process, pytestmark

from megacore.planning.trace.log import HOST, Entry, Launch, NcclMessage, RecordEvent, Wait
from megacore.planning.trace.run import between_records, trace_ranks
from megacore.planning.trace.simulated_gpu import SimulatedGpu
from megacore.recipe import load

__all__ = ["pytestmark"]

SPREAD = "experts, ep, tp, balanced"
LAYOUTS = list({case.overrides: name for name, case in CASES.items() if "mesh." in case.overrides}.values())
"""A case of each run of several ranks."""
PARTS = 8


def logs_of(case: Case, ranks: Sequence[int]) -> dict[int, list[Entry]]:
    """{rank: what it asks of its GPU in two steps}."""
    logs: dict[int, list[Entry]] = {}
    for rank in ranks:
        gpu = SimulatedGpu()
        with close_behind():
            steps.trace(replace(case, rank=rank), 2, gpu=gpu)
        logs[rank] = gpu.log
    return logs


def played(cases: Sequence[tuple[Case, Sequence[int]]]) -> list[tuple[list[str], int, list[str]]]:
    """(who waits for ever in some model; how many swaps are found in the serial one; those that are neither found nor
    harmless) of each case, of which some ranks are traced."""
    return [_played(case, ranks) for case, ranks in cases]


def _played(case: Case, ranks: Sequence[int]) -> tuple[list[str], int, list[str]]:
    try:
        logs = logs_of(case, ranks)
    except Exception:
        return [traceback.format_exc()], 0, []
    waiting = [f"{model}: {line}" for model in MODELS for line in stuck(logs, model)]
    found, open_ = 0, list[str]()
    for rank, log in logs.items():
        for swap in swaps(log):
            other = {**logs, rank: swapped(log, swap)}
            if stuck(other, "serial"):
                found += 1
            elif has_circle(other):
                open_.append(f"rank {rank}: {log[swap.first]} and {log[swap.second]}")
    return waiting, found, open_


def check(names: Sequence[str]) -> int:
    """Have all ranks of some cases played -> how many swaps are found."""
    cases = [(CASES[name], range(steps.ranks(CASES[name]))) for name in names]
    results = in_a_process(played, cases)
    wrong = [f"{name}: {line}" for name, (lines, _, _) in zip(names, results, strict=True) for line in lines]
    assert not wrong, "\n".join(wrong)
    wrong = [f"{name}: {line}" for name, (_, _, lines) in zip(names, results, strict=True) for line in lines]
    assert not wrong, "\n".join(wrong)
    return sum(found for _, found, _ in results)


@pytest.mark.in_turn(3, 2)
def test_ranks_of_a_run_with_experts_end_and_their_messages_are_in_one_order() -> None:
    assert check([SPREAD])


@pytest.mark.grid
@pytest.mark.parametrize("part", range(PARTS))
def test_all_ranks_of_all_layouts_end(part: int) -> None:
    check(LAYOUTS[part::PARTS])


LARGE = "model.preset=llama-3.1-70b mesh.tp=8 mesh.pp=4 mesh.dp=2 pipeline.schedule=interleaved pipeline.chunks=5"


@pytest.mark.grid
def test_a_rank_of_each_stage_of_70b_on_64_gpus_ends() -> None:
    """At its real size, in steps of four and of eight microbatches; one of two messages changed over is found."""
    config = load({}, ["data.train=none", "data.sequence_length=8192", *LARGE.split()])
    traced = trace_ranks(between_records(config), 64, range(0, 64, 16), (4, 8))
    logs = {rank: [entry for log in each.logs for entry in log] for rank, each in traced.items()}
    for model in MODELS:
        assert stuck(logs, model) == [], model
    between = [each for each in swaps(logs[16]) if {"send", "recv_"} <= {_name(logs[16][n]) for n in astuple(each)}]
    assert stuck({**logs, 16: swapped(logs[16], between[0])}, "serial")


def _name(entry: Entry) -> str:
    assert isinstance(entry, Launch)
    return entry.name


# -- that it can fail


def _message(name: str, what: str = "all_reduce") -> list[Entry]:
    message = NcclMessage(name, [(f"{name} #1", (0, 1))], what)
    start, end = sum(map(ord, name)), -sum(map(ord, name))
    stream = f"nccl {name}"
    launch = Launch(stream, "all_reduce", "here", message=message, work=end)
    return [RecordEvent(start, "main"), Wait(stream, start), launch, RecordEvent(end, stream)]


def _wait(name: str, stream: str = "main") -> Wait:
    return Wait(stream, -sum(map(ord, name)), "here")


def _stuck(one: Sequence[Entry], other: Sequence[Entry]) -> list[Model]:
    return [model for model in MODELS if stuck({0: one, 1: other}, model)]


A, B = _message("a"), _message("b")


def test_messages_in_another_order() -> None:
    assert _stuck([*A, *B], [*A, *B]) == []
    assert _stuck([*A, *B], [*B, *A]) == ["serial"]
    first = stuck({0: [*A, *B], 1: [*B, *A]}, "serial")[0]
    assert first == "rank 0: all_reduce of here on nccl a, a #1 has no rank 1"
    assert stuck({0: [*A, *B]}, "serial") == [], "the other rank is not there"


def test_a_stream_that_waits_and_a_host_that_does() -> None:
    both = (*A, _wait("a"), *B), (*B, _wait("b"), *A)
    assert _stuck(*both) == ["free", "serial", "queue"]
    assert _stuck((*A, _wait("a", HOST), *B), (*B, *A)) == ["serial"]
    assert _stuck((*A, _wait("a", HOST), *B), (*B, _wait("b", HOST), *A)) == ["free", "serial", "queue"]


def test_what_stands_behind_a_wait_in_the_one_queue() -> None:
    beside = Launch("beside", "copy_", "here")
    first = [*A, _wait("a", "out"), *B]
    assert _stuck(first, [*B, _wait("b", "out"), *A]) == ["serial", "queue"]
    assert _stuck([*A, _wait("a", "out"), beside], [*A]) == []


def test_ranks_that_call_different_messages_or_one_that_does_not_come() -> None:
    assert _stuck(A, _message("a", "all_gather")) == list(MODELS)
    assert "different messages" in stuck({0: A, 1: _message("a", "all_gather")}, "free")[0]
    assert _stuck(A, []) == list(MODELS)


def test_swaps() -> None:
    (swap,) = swaps([*A, *B])
    assert swapped([*A, *B], swap) == [*B, *A]
    assert swaps([*A, *A]) == []
    assert has_circle({0: [*A, *B], 1: [*B, *A]}) and not has_circle({0: [*A, *B], 1: [*A, *B]})
