"""`megacore diagnose`: what was made slow comes first, in traces that never ran and in runs that sleep."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import pytest
import torch
from pool import Pool
from torch import Tensor
from traced import DATA_S, TAIL_S, traced

from megacore.config import Config
from megacore.data.batches import Batches
from megacore.parallel.collectives import Pending
from megacore.parallel.gradients import buckets
from megacore.parallel.pipeline.schedules import Action, Cost, simulate
from megacore.recipe import load
from megacore.tools.diagnose import main
from megacore.training.diagnosis import split
from megacore.training.traces import TracedInterval, TracedStep, write_trace

TAKES = {"F": 0.01, "B": 0.02, "I": 0.01, "W": 0.01}


def made(
    stages: int, microbatches: int, slow: Callable[[int, Action], float] = lambda stage, action: 1.0
) -> TracedStep:
    return traced("1f1b", stages, microbatches, lambda stage, action: TAKES[action.kind] * slow(stage, action))


@pytest.mark.parametrize(
    ("step", "first", "about"),
    [
        (made(2, 8), None, ""),
        (made(4, 4), "bubble", "of 1f1b"),
        (made(2, 8, lambda stage, _: 1.0 + stage), "waiting", "for stage 1, whose actions take 2.00 times"),
        (made(3, 12, lambda _, action: 1.0 + 9 * (action.microbatch in (3, 7, 9))), "waiting", ""),
        (traced("1f1b", 2, 8, lambda _, x: TAKES[x.kind], lambda stage, _: 0.02 * stage), "host", ""),
    ],
    ids=["healthy", "few microbatches", "an uneven stage", "uneven microbatches", "a host that sleeps"],
)  # fmt: skip
def test_a_cause_comes_first(step: TracedStep, first: str | None, about: str) -> None:
    found = split([step], Config())
    assert [each.name for each in found.findings][:1] == ([first] if first else [])
    assert not first or found.findings[0].about.startswith(about)
    ends = max(each.end for row in step.ranks for each in row["host"])
    assert found.seconds == pytest.approx(ends, rel=0.001)


def test_parts_are_those_of_the_simulator() -> None:
    """Of a step as planned: the work and the idle time of the schedule, data, and the reduction of all at the end."""
    step = made(4, 8)
    plain = simulate(tuple(tuple(row) for row in schedule_of(step)), Cost(0.01, 0.01, 0.01))
    busy = 8 * 0.03
    wanted = {"products": busy, "bubble": plain.total - busy, "data": DATA_S, "optimizer": TAIL_S}
    found = {each.name: each.seconds for each in split([step], Config()).parts if each.seconds > 1e-4}
    assert found == {name: pytest.approx(seconds, abs=3e-4) for name, seconds in wanted.items()}


def test_an_evaluation_counts_as_often_as_it_is_and_recomputation_by_the_plan() -> None:
    step, config = made(2, 8), load({"evaluate": {"every": 10}})
    end = max(each.end for row in step.ranks for each in row["host"])
    rows = ({"host": (*row["host"], TracedInterval("evaluate", end, end + 0.2))} for row in step.ranks)
    found = {
        each.name: each.seconds for each in split([replace(step, ranks=tuple(rows))], config, recomputed=0.25).parts
    }
    assert found["evaluate"] == pytest.approx(0.02, rel=0.01)
    assert [found["products"], found["recomputation"]] == pytest.approx([0.75 * 0.24, 0.25 * 0.24], rel=0.01)


def schedule_of(step: TracedStep) -> Iterator[list[Action]]:
    for row in step.ranks:
        yield [Action(x.kind, x.chunk, x.microbatch) for x in row["host"] if x.kind in TAKES]  # type: ignore[arg-type]


def test_two_runs_and_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a quarter of the microbatches the bubble grows of itself; with an uneven stage, layers move."""
    steps = {"many": made(2, 8), "few": made(2, 2), "uneven": made(2, 8, lambda stage, _: 1.0 + 2 * stage)}
    for name, step in steps.items():
        write_trace(tmp_path / name, step)
        config = "model: {preset: llama-tiny, num_hidden_layers: 8}\nmesh: {pp: 2}\n"
        (tmp_path / name / "config.yaml").write_text(config)
    assert main([str(tmp_path / "few"), "--against", str(tmp_path / "many")]) == 0
    rows = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()[3:]]
    assert ["bubble", "30.0", "30.0", "+0.0", "2 microbatches, not 8"] in rows[:2]
    assert rows[0] == ["products", "60.0", "240.0", "-180.0", "2 microbatches, not 8"]
    assert {row[0]: row[1:3] for row in rows[2:] if row[0] != "waiting"} == {
        "optimizer": ["10.0", "10.0"],
        "data": ["2.0", "2.0"],
    }
    assert main([str(tmp_path / "uneven")]) == 0
    said = capsys.readouterr().out
    assert "What stands out: waiting for stage 1, whose actions take 3.00 times the others'" in said
    # The slow stage's layers take three times as long: 6 of the others and 2 of it are as fast as can be.
    assert "Advice: pipeline.layers_per_stage=6,2  (a step would take 4" in said
    assert main([str(tmp_path / "many")]) == 0 and "What stands out: none\nAdvice: none" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 1 and "config.yaml" in capsys.readouterr().err


def test_steps_of_another_layout_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that went on with other ranks or another schedule: its last layout is what is diagnosed. Nor do the
    microbatches of an evaluation count as a step's."""
    step, split_backward = made(2, 8), traced("zb-h1", 2, 8, lambda stage, action: TAKES[action.kind])
    end = max(each.end for row in step.ranks for each in row["host"])
    evaluated = (TracedInterval("evaluate", end, end + 0.1), TracedInterval("F", end, end + 0.1, 0, 20))
    rows = tuple({"host": (*row["host"], *evaluated)} for row in step.ranks)
    for number, each in ((10, made(4, 4)), (20, split_backward), (30, replace(step, ranks=rows)), (40, step)):
        write_trace(tmp_path, replace(each, step=number))
    write_trace(tmp_path, replace(step, step=50, ranks=rows))
    (tmp_path / "config.yaml").write_text("model: {preset: llama-tiny}\nmesh: {pp: 2}\n")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "(pp=2, 8 microbatches; steps 30, 40, 50; not 10, 20, of another layout): " in said
    assert "products   240.0" in said


def test_a_trace_that_lacks_an_action_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = made(2, 8)
    rows = [[x for x in row["host"] if (x.kind, x.microbatch) != ("F", 3)] for row in step.ranks]
    write_trace(tmp_path, replace(step, step=40))
    write_trace(tmp_path, replace(step, ranks=tuple({"host": tuple(row)} for row in rows)))
    (tmp_path / "config.yaml").write_text("model: {preset: llama-tiny}\nmesh: {pp: 2}\n")
    assert main([str(tmp_path)]) == 1
    assert "step 50: stage 0 lacks ['F(0,3)']" in capsys.readouterr().err


# -- runs of four processes, whose chunks sleep


class Nap(torch.autograd.Function):
    """The identity, which takes so many seconds, and twice as many backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return dy.clone(), None


class SlowWork:
    """The work of a message over a slow link."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        time.sleep(1.5)
        self.work.wait()


def sleeps(recipe: str, overrides: list[str], cause: str) -> None:
    """Stages 0 and 1 are ranks 0, 1 and 2, 3: a run of two steps, in which something is slow."""
    rank, nap = torch.distributed.get_rank(), 0.0 if cause in ("data", "collective") else 0.06
    if (cause, rank) == ("rank", 3) or (cause == "stage" and rank >= 2):
        nap *= 3
    start, steps = buckets.start_all_reduce, Batches.steps

    def slow(*arguments: Any) -> Pending:
        pending = start(*arguments)
        return Pending([SlowWork(work) for work in pending.works], pending.finish, pending.kind, pending.group)  # type: ignore[misc]

    def late(self: Batches, first: int) -> Iterator[Any]:
        for batch in steps(self, first):
            time.sleep(2.5)
            yield batch

    trainer = engine.trainer(recipe, overrides, log=True)
    pipeline = trainer.train_step.pipeline
    chunks = [lambda x, batch, chunk=chunk: Nap.apply(chunk(x, batch), nap) for chunk in pipeline.chunks]
    pipeline.chunks = chunks if nap else pipeline.chunks
    with mock.patch.object(engine.metrics, "ProgressBar"):
        if cause == "collective":
            with mock.patch.object(buckets, "start_all_reduce", slow):
                trainer.fit()
        elif (cause, rank) == ("data", 1):
            with mock.patch.object(Batches, "steps", late):
                trainer.fit()
        else:
            trainer.fit()


CAUSES = {
    "none": None,
    "data": ("data", "due to rank 1"),
    "stage": ("waiting", "for stage 1"),
    "rank": ("waiting", "for rank 3"),
    "few": ("bubble", "of 1f1b"),
    "collective": ("all_reduce dp", ""),
}


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("cause", CAUSES)
def test_of_a_run_too(pool: Pool, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: str) -> None:
    size = 4 if cause == "few" else 16
    overrides = [f"out={tmp_path / 'run'}", "mesh.pp=2", "mesh.dp=2", "evaluate.every=0", "train.steps=2"]
    overrides += ["log.trace=2", f"batch.global_size={size}", "model.num_hidden_layers=2", "schedule.warmup_steps=1"]
    pool.run(4, sleeps, recipe, overrides, cause)
    (tmp_path / "run" / "config.yaml").write_text(load(recipe, overrides).to_yaml())
    assert main([str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    expected = CAUSES[cause]
    found = said.partition("What stands out: ")[2].splitlines()[0]
    assert found.startswith("none" if expected is None else f"{expected[0]} {expected[1]}".strip()), said
    shares = [float(share) for share in re.findall(r"([\d.]+)%", said.partition("What stands out: ")[0])]
    assert sum(shares) == pytest.approx(100, abs=1)
