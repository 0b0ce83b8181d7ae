"""`megacore diagnose`: what was made slow comes first, in traces that never ran and in runs that sleep."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pool import Pool
from slowed import CAUSES, run
from traced import DATA_S, TAIL_S, lockstep, traced

from megacore.config import Config
from megacore.devices import Device
from megacore.parallel.pipeline.schedules import SCHEDULES, Action, Cost, simulate
from megacore.parallel.weights.layout import MeshShape
from megacore.planning.run_plan import plan as planned
from megacore.recipe import load
from megacore.tools.diagnose import main
from megacore.training.advice import _of_pipelines
from megacore.training.diagnosis import split
from megacore.training.planned_parts import StepPlan, name_of
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


def test_an_evaluation_counts_as_often_as_it_is() -> None:
    step, config = made(2, 8), load({"evaluate": {"every": 10}})
    found = {each.name: each.seconds for each in split([ending(step, "evaluate", 0.2)], config).parts}
    assert found["evaluate"] == pytest.approx(0.02, rel=0.01)


def ending(step: TracedStep, phase: str, seconds: float) -> TracedStep:
    """The step, with a phase at its end."""
    end = max(each.end for row in step.ranks for each in row["host"])
    rows = ({"host": (*row["host"], TracedInterval(phase, end, end + seconds))} for row in step.ranks)
    return replace(step, ranks=tuple(rows))


def test_saves_count_as_often_as_they_are() -> None:
    """On disk every 100 steps; those in memory are in all other steps, and take 0.5 % of them at the most."""
    config, others = load({"checkpoint": {"every": 100}, "recovery": {"overhead": 0.005}}), 0.282
    for saved, wanted in (
        ({100: 2.0, 150: 0.0}, 0.02),
        ({150: 2.0}, 0.005 * others),
        ({100: 2.0, 150: 0.001, 250: 0.0}, 0.0205),
    ):
        steps = [replace(ending(made(2, 8), "save", seconds), step=step) for step, seconds in saved.items()]
        found = {each.name: each.seconds for each in split(steps, config).parts}
        assert found["save"] == pytest.approx(wanted, rel=0.02), saved


def again(share: float) -> Callable[[int, TracedInterval], Iterator[TracedInterval]]:
    """Recomputation in backwards, a share of what they compute."""

    def within(rank: int, action: TracedInterval) -> Iterator[TracedInterval]:
        if action.kind == "B":
            yield TracedInterval("recompute", action.start, action.start + share * action.seconds)

    return within


def sent_before(wait_s: float) -> TracedStep:
    """The step of two ranks of which one computes 0.1 s longer; the other has its message before it waits."""
    rows = []
    for rank, computed in enumerate((0.1, 0.2)):
        waited = 0.1 + wait_s if rank == 0 else computed
        row = [("forward and backward", 0.0, computed), ("B", 0.0, computed), ("reduce", computed, 0.21)]
        noted = [TracedInterval(kind, start, end, *((0, 0) if kind == "B" else ())) for kind, start, end in row]
        rows.append({"host": (*noted, TracedInterval("all_reduce", computed, waited, axis="dp"))})
    end = TracedInterval("all_reduce", 0.1 + wait_s, 0.2, axis="dp"), TracedInterval("all_reduce", 0.2, 0.2, axis="dp")
    ranks = tuple({"host": (*row["host"], last)} for row, last in zip(rows, end, strict=True))
    return TracedStep(50, MeshShape(dp=2), "1f1b", (0.0, 0.0), ranks)


def queued(step: TracedStep, ranks: set[int], share: float) -> TracedStep:
    """The step, in whose actions others have the core of some ranks for a share of the time that they compute."""

    def row_of(rank: int, row: Any) -> tuple[TracedInterval, ...]:
        waits = {x.end: x.seconds for x in row if x.axis}
        return tuple(
            x._replace(queued=share * (x.seconds - waits[x.end])) if x.kind in TAKES and rank in ranks else x
            for x in row
        )

    return replace(step, ranks=tuple({"host": row_of(rank, x["host"])} for rank, x in enumerate(step.ranks)))


def on_gpus(step: TracedStep, ahead_s: float) -> TracedStep:
    """The step, on devices whose hosts have launched each action so long before it is over."""
    rows = (
        {"host": tuple(x._replace(end=max(x.start, x.end - ahead_s)) for x in row["host"]), "device": row["host"]}
        for row in step.ranks
    )
    return replace(step, ranks=tuple(rows))


EP, TP, DP = MeshShape(ep=2), MeshShape(tp=4), MeshShape(dp=4)


def twice(rank: int) -> float:
    return 0.02 if rank == 0 else 0.01


def alike(rank: int) -> float:
    return 0.01


@pytest.mark.parametrize(
    ("step", "loads", "first", "about", "gain"),
    [
        (lockstep(EP, "ep", twice), (1.33, 0.67), "waiting", "for the experts of rank 0 along ep, which have", 0.06),
        (lockstep(EP, "ep", twice), (1.02, 0.98), "waiting", "for rank 0, whose actions take 2.00 times", 0.12),
        (queued(lockstep(DP, "dp", twice), {0}, 0.5), (), "waiting", "for rank 0, whose actions take 2.00 times "
         "the others'; others had the core for 50% of them", 0.12),
        (queued(lockstep(DP, "dp", alike), {0, 1, 2, 3}, 0.5), (), "queued", "for cores", 0.06),
        (lockstep(TP, "tp", alike, 0.01, per_node=2), (), "all_gather tp", "between nodes of 2 ranks", 0.08),
        (lockstep(TP, "tp", alike, 0.01, per_node=4), (), "all_gather tp", "", 0.08),
        (lockstep(DP, "dp", alike, within=again(0.4)), (), "recomputation", "", 0.032),
        (sent_before(0.06), (), "waiting", "for rank 1, whose actions take 2.00 times", 0.1),
        (on_gpus(lockstep(DP, "dp", alike), 0.0), (), "host", "launches come late", 0.12),
        (on_gpus(lockstep(DP, "dp", alike), 0.003), (), None, "", 0.0),
    ],
    ids=["experts", "even experts", "half a core", "all cores", "nodes", "a node", "recomputation", "sent before",
         "late", "ahead"],
)  # fmt: skip
def test_a_cause_comes_first_without_stages(
    step: TracedStep, loads: tuple[float, ...], first: str | None, about: str, gain: float
) -> None:
    """Each has a gain too: the seconds that a step would take less."""
    found = split([step], Config(), loads)
    assert [each.name for each in found.findings][:1] == ([first] if first else [])
    if first:
        assert found.findings[0].about.startswith(about) and bool(found.findings[0].about) == bool(about)
        assert found.findings[0].gain == pytest.approx(gain, rel=0.02)
    assert found.seconds == pytest.approx(max(x.end for n, _ in enumerate(step.ranks) for x in step.of(n)), rel=0.001)


def schedule_of(step: TracedStep) -> Iterator[list[Action]]:
    for row in step.ranks:
        yield [Action(x.kind, x.chunk, x.microbatch) for x in row["host"] if x.kind in TAKES]  # type: ignore[arg-type]


def test_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an uneven stage layers move."""
    out = wrote(tmp_path / "uneven", made(2, 8, lambda stage, _: 1.0 + 2 * stage), "mesh: {pp: 2}")
    assert main([str(out)]) == 0
    said = capsys.readouterr().out
    assert "What stands out: waiting for stage 1, whose actions take 3.00 times the others'  (without it" in said
    # The slow stage's layers take three times as long: 6 of the others and 2 of it are as fast as can be.
    assert "Advice: pipeline.layers_per_stage=6,2  (a step would take 4" in said
    assert main([str(wrote(tmp_path / "many", made(2, 8), "mesh: {pp: 2}"))]) == 0
    assert "What stands out: none\nAdvice: none" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 1 and f"{tmp_path} is not the folder of a run" in capsys.readouterr().err
    for more in ([], ["--against", str(out)]):
        assert main([str(out), "--gpu", "h100", *more]) == 1 and "`gpu` (h100) is no device" in capsys.readouterr().err


@pytest.mark.in_turn(4)
def test_advice_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = wrote(tmp_path / "uneven", made(2, 8, lambda stage, _: 1.0 + 2 * stage), "mesh: {pp: 2}")
    small = Device("A10G", None, 1e7, 50e9, 5e9, 1e9, 50e9)
    (tmp_path / "small.json").write_text(json.dumps({"device": vars(small)}))
    assert main([str(out), "--gpu", str(tmp_path / "small.json")]) == 0
    assert "stage 1, whose" in (said := capsys.readouterr().out) and "Advice: none" in said


def wrote(out: Path, step: TracedStep, more: str = "") -> Path:
    """The folder of a run of a tiny LLaMA that has recorded a step."""
    write_trace(out, step)
    (out / "config.yaml").write_text(f"model: {{preset: llama-tiny, num_hidden_layers: 8}}\n{more}\n")
    return out


def test_a_gpu_that_is_slowed_down_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the products, and with the rank for which others wait; not one that is slow only because it is idle."""
    capped = "GPU 0 at 1,095 of 1,980 MHz and 70 C, slowed down by its power limit"
    idle, fine = "GPU 1 at 345 of 1,980 MHz and 30 C", "GPU 2 at 1,980 of 1,980 MHz and 60 C"
    step = replace(lockstep(DP, "dp", twice), gpus=(capped, idle, fine, ""))
    assert main([str(wrote(tmp_path, step, "mesh: {dp: 4}"))]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"products .*  rank 0: {capped}\n", said) and idle not in said and fine not in said
    assert f"waiting for rank 0, whose actions take 2.00 times the others'; rank 0: {capped}  (without" in said
    both = split([replace(step, gpus=(capped, idle, capped, ""))], Config())
    assert both.parts[0].about == f"rank 0: {capped}, and 1 more"


def table_of(said: str, head: str) -> dict[str, list[str]]:
    """The rows of a table that is told, by their first cells."""
    lines = said.splitlines()
    first = next(n for n, line in enumerate(lines) if line.split()[:2] == head.split())
    rows = [re.split(r"  +", line.strip()) for line in lines[first + 1 :]]
    return {row[0]: row[1:] for row in takewhile(lambda row: row[0] and len(row) > 2, rows)}


def test_beside_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of the plan, for the device that the trace names and the peak that the run has measured against; what is
    far above is named, with where its messages go."""
    step = replace(lockstep(TP, "tp", alike, 0.01, per_node=2), device="NVIDIA H100 80GB HBM3")
    out = wrote(tmp_path, step, "mesh: {tp: 4}\nbatch: {global_size: 4, micro_size: 1}\ntrain: {precision: bf16}")
    record = {"step": 50, "loss": 1.0, "tflops_per_device": 2.0, "mfu": 0.004}
    (out / "metrics.jsonl").write_text(json.dumps(record))
    assert main([str(out)]) == 0
    said = capsys.readouterr().out
    assert "Beside the plan, on NVIDIA H100 80GB HBM3 of 500 TFLOP/s: MFU 0." in said
    rows, plan = table_of(said, "part ms"), planned(load(out / "config.yaml"), world=4, gpu="h100-80", tflops=500.0)
    rows = table_of(said[said.index("Beside") :], "part ms")
    assert rows["products"][:2] == ["120.0", f"{1e3 * plan['time']['compute']:,.1f}"]
    assert rows["messages of tp"][0] == "80.0"
    named = re.search(
        r"messages of tp: [\d,.]+ times what is planned; they reach ([\d.]+) GB/s of 100: tp crosses nodes of 2 ranks",
        said,
    )
    sent = sum(x["sent"] for x in plan["traffic"][0] if x["axis"] == "tp")
    assert named and float(named[1]) == pytest.approx(sent / 0.08 / 1e9, rel=0.01)
    advised = re.search(r"Advice: mesh.tp=1 mesh.dp=4.* \(a step would take (\d+)% less\)", said)
    assert advised and int(advised[1]) > 72  # by the links of the data sheet two thirds


@pytest.mark.in_turn(4, 1)
def test_a_gpu_that_only_waits_for_its_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device that the table lacks is named too; then nothing is planned."""
    step = on_gpus(lockstep(TP, "tp", alike, 0.01, per_node=2), 0.0)
    for device, planned_for in (
        ("NVIDIA H100 80GB HBM3", "Beside the plan"),
        ("Abacus", "No plan of it: the table has no"),
    ):
        out = wrote(tmp_path / device, replace(step, device=device), "mesh: {tp: 4}\nmemory: {recompute: full}")
        assert main([str(out)]) == 0
        said = capsys.readouterr().out
        assert planned_for in said and "What stands out: host launches come late  (without it" in said


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("here", "takes", "batch", "scaling", "of_itself"),
    [
        (MeshShape(dp=4), 0.012, (32, 8), "Strong scaling, the same batch on other ranks", 0.5),
        (MeshShape(dp=4), 0.022, (64, 16), "Weak scaling, the same batch of each rank", 1.0),
        (MeshShape(dp=4), 0.022, (128, 32), "Neither strong nor weak scaling", 2.0),
        (MeshShape(dp=2), 0.012, (16, 8), "The same number of ranks", 0.5),
    ],
    ids=["strong", "weak", "neither", "same"],
)
def test_two_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    here: MeshShape,
    takes: float,
    batch: tuple[int, int],
    scaling: str,
    of_itself: float,
) -> None:
    """What changed of itself comes first, as much as the plan has it, and what is left over."""
    steps = {"one": (lockstep(here, "dp", lambda _: takes, 0.002, per_node=2), batch)}
    steps["other"] = lockstep(MeshShape(dp=2), "dp", lambda _: 0.02, 0.001, per_node=2), (32, 16)
    outs = [
        str(
            wrote(
                tmp_path / name,
                step,
                f"batch: {{global_size: {size}, micro_size: {micro}}}\ndata: {{sequence_length: 512}}",
            )
        )
        for name, (step, (size, micro)) in steps.items()
    ]
    assert main([outs[0], "--against", outs[1]]) == 0
    said = capsys.readouterr().out
    rows = table_of(said, "part ms")
    reasons = [bool(row[6:]) for row in rows.values()]
    assert scaling in said and reasons == sorted(reasons, reverse=True)
    ms, against, itself, rest = (float(each) for each in rows["products"][:4])
    assert [ms, against] == pytest.approx([12e3 * takes, 240.0], rel=0.01)
    assert itself == pytest.approx(of_itself * against, rel=0.05) and rest == pytest.approx(ms - itself, abs=0.11)
    tokens = batch[0] / 32 / (here.world / 2) * (0.24 + 0.008 + 0.012) / (12 * takes + 0.016 + 0.012)
    told = re.search(r"a rank does ([\d.]+)% of the tokens per second", said)
    assert told and float(told[1]) == pytest.approx(100 * tokens, rel=0.01)
    if here.world == 4:
        assert "4 ranks, not 2, 2 nodes, not 1" in rows["all_gather dp"][-1]


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


# -- runs of four processes, whose blocks sleep


@pytest.mark.in_turn(len(CAUSES))
@pytest.mark.parametrize("cause", CAUSES)
def test_of_a_run_too(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: str) -> None:
    """Whatever the ranks of other tests, and all else on this machine, take of its cores."""
    out = run(pool, tmp_path, CAUSES[cause])
    assert main([str(out)]) == 0
    said = capsys.readouterr().out
    found = [each for each in re.findall(r"What stands out: (.*)", said) if not each.startswith(("queued", "none"))]
    assert found[0].startswith(CAUSES[cause].found) if CAUSES[cause].found else not found, said
    assert not found or f"Advice: {CAUSES[cause].advice}" in said, said
    shares = [float(row[1].rstrip("%")) for row in table_of(said, "part ms").values()]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_what_other_stages_promise_is_that_of_all_pipelines() -> None:
    """Of two, the stages of one are even and those of the other are not, which is the last to end: with what would be
    right for that one, the first one ends later."""
    even, uneven = made(2, 8), made(2, 8, lambda stage, _: 1.0 + 0.5 * stage)
    rows = [row for pair in zip(even.ranks, uneven.ranks, strict=True) for row in pair]
    step = replace(even, mesh=MeshShape(pp=2, dp=2), errors=(0.0,) * 4, ranks=tuple(rows))
    found = split([step], Config())
    layout = SimpleNamespace(chunk_layers=lambda stage, chunk: range(4))
    plan: Any = SimpleNamespace(setting=SimpleNamespace(layout=layout))
    advice = {each.overrides: each.gain for each in _of_pipelines(step, Config(), found, plan)}

    def seconds(*times: float) -> float:
        costs = [[Cost(0.01 * time, 0.02 * time, 0.0)] for time in times]
        return simulate(SCHEDULES["1f1b"](2, 1, 8), costs).total

    now, then = seconds(1, 1.5), max(seconds(5 / 4, 3 / 4), seconds(5 / 4, 1.5 * 3 / 4))
    assert seconds(5 / 4, 3 / 4) < seconds(1, 1.5)
    assert advice["pipeline.layers_per_stage=5,3"] == pytest.approx((now - then) / found.seconds)
    # A slower first stage of the even pipeline counts too.
    slow = made(2, 8, lambda stage, _: 1.45 - 0.45 * stage)
    rows = [row for pair in zip(slow.ranks, uneven.ranks, strict=True) for row in pair]
    step = replace(step, ranks=tuple(rows))
    advice = {each.overrides: each.gain for each in _of_pipelines(step, Config(), split([step], Config()), plan)}
    assert advice["pipeline.layers_per_stage=4,4"] == pytest.approx(0.0)


def test_sums_over_stages_are_none_of_dp() -> None:
    assert [name_of(each) for each in ("all_reduce pp", "send pp", "all_reduce dp", "all_reduce pp x dp")] == [
        *("messages of pp", "bubble", "messages of dp", "messages of dp")
    ]
    config = load("llama-3.2-1b", ["mesh.pp=2", "mesh.dp=1", "batch.global_size=8"])
    for tied in (True, False):
        own = load(config, [f"model.tie_word_embeddings={str(tied).lower()}"])
        parts = StepPlan.of(own, replace(made(2, 8), device="NVIDIA H100 80GB")).parts
        assert (parts["messages of pp"] > 0) == tied and parts["messages of dp"] == 0
