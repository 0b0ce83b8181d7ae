"""`megacore schedule`: the numbers of the formulas, pictures, and what cannot be."""

import re
from pathlib import Path

import pytest
from traced import DATA_S, traced

from megacore.parallel.pipeline.schedules import SCHEDULES, B, Cost, F, draw, simulate
from megacore.parallel.weights.layout import MeshShape
from megacore.planning.run_plan import Plan, cluster_of
from megacore.recipe import load
from megacore.tools.schedule import main
from megacore.training.schedule_gaps import ComparedSchedule, actions
from megacore.training.traces import COMPUTE, TracedInterval, TracedStep, write_trace

SIZES = ["--stages", "4", "--microbatches", "8"]


def test_all_that_fit_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """By (p-1) / (v m), a third of it where the backward is split, and the chunks that each holds."""
    assert main([*SIZES, "--chunks", "2"]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines()[1:7]}
    assert rows == {
        "gpipe": ["28.50", "18.8%", "8.00", "8.00", "0.00"],
        "interleaved": ["28.50", "18.8%", "5.50", "2.50", "0.00"],
        "overlapped": ["28.50", "18.8%", "6.00", "3.00", "0.00"],
        "zb-interleaved": ["25.50", "6.2%", "5.50", "4.00", "2.00"],
        "zb-v": ["25.50", "6.2%", "4.00", "4.00", "3.50"],
        "dualpipe-v": ["25.50", "6.2%", "4.50", "4.50", "2.00"],
    }
    assert "1f1b runs one chunk per stage, not chunks=2" in said
    assert main(["interleaved", *SIZES, "--chunks", "2", "--group", "8"]) == 0  # four more of each chunk but the last
    assert capsys.readouterr().out.splitlines()[-1].split()[1:4] == ["28.50", "18.8%", "7.50"]


def test_one_is_drawn_and_times_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a.svg"
    assert main(["zb-h1", *SIZES, "--picture", str(picture)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(draw(SCHEDULES["zb-h1"](4, 1, 8))) and str(picture) in said.err
    assert "<svg" in picture.read_text() and "zb-h1: bubble 12.5 %" in picture.read_text()
    assert main(["1f1b", "zb-h1", *SIZES, "--times", "1,2,1"]) == 0  # with full recomputation a half is left
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:]] == ["37.5%", "18.8%"]
    assert main(["1f1b", "--stages", "2", "--microbatches", "1", "--send", "0.5"]) == 0
    assert "1f1b      7.00" in capsys.readouterr().out  # F, a message, F, B, a message, B


TAKES = {"F": 0.01, "B": 0.02, "I": 0.01, "W": 0.01}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_step_as_planned_has_no_gaps(name: str) -> None:
    found = ComparedSchedule.last(traced(name, 4, 8, lambda stage, action: TAKES[action.kind]))
    assert found.schedule == SCHEDULES[name](4, 1, 8) and not [each for each in found.gaps(5) if each.seconds > 1e-9]
    assert found.real.total == pytest.approx(simulate(found.schedule, Cost(0.01, 0.01, 0.01)).total)


def test_two_that_had_turns_have_their_time_one_after_the_other() -> None:
    """F(0,1) and B(0,0) of a stage alone, whose turns are recorded one by one; what follows is as it was."""
    turns = [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 2, 4), ("F", 1, 4, 5), ("B", 0, 5, 6), ("B", 1, 6, 9)]
    row = [TracedInterval(COMPUTE, 0.0, 9.0), *(TracedInterval(k, s, e, 0, m, queued=0.25) for k, m, s, e in turns)]
    step = TracedStep(50, MeshShape(), "overlapped", (0.0,), ({"host": tuple(row)},))
    found = ComparedSchedule.last(step)
    assert list(map(repr, found.schedule[0])) == ["F(0,0)", "F(0,1)+", "B(0,0)", "B(0,1)"]
    assert [(each.start, each.end) for each in found.real.spans[0]] == [(0, 1), (1, 3), (3, 6), (6, 9)]
    assert [each.queued for _, each in actions(row)] == [0.25, 0.5, 0.5, 0.25]


def test_a_step_is_laid_on_its_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 1 takes 50 ms longer for F(0,3) and its host 30 ms before B(0,1); stage 2 waits for both."""
    made = traced(
        "1f1b",
        3,
        6,
        lambda stage, action: TAKES[action.kind] + 0.05 * ((stage, action) == (1, F(0, 3))),
        lambda stage, action: 0.03 * ((stage, action) == (1, B(0, 1))),
    )
    path, picture = write_trace(tmp_path, made), tmp_path / "a.svg"
    assert main(["--trace", str(path), "--picture", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "Step 50, 1f1b of 3 stages (ranks 0, 1, 2)" in said and "real: bubble" in picture.read_text()
    rows = [line.split(maxsplit=5) for line in said.partition("  stage  ")[2].splitlines()[1:]]
    assert ["1", "F(0,3)", "60.0", "10.0", "50.0", "it took longer than others like it"] in rows and len(rows) == 5
    assert any(row[:2] == ["1", "B(0,1)"] and row[-1] == "its host did something else" for row in rows)
    assert any(row[0] == "2" and row[-1] == "F(0,3) of stage 1" for row in rows)
    real = float(next(line.split()[1] for line in said.splitlines() if line.startswith("  real")))
    assert real == pytest.approx(1e3 * (max(x.end for x in made.of(0) if x.kind == "B") - DATA_S), abs=0.1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--trace", "a.json", "--chunks", "2"], "--trace has its own schedule and times: leave out --stages, --micro"),
        (["zbh"], "there is no schedule zbh: choose from gpipe, 1f1b"),
        (["zb-h1", "--chunks", "2"], "zb-h1 runs one chunk per stage, not chunks=2: choose zb-interleaved"),
        (["zb-v", "--chunks", "2", "--group", "4"], "zb-v has no groups of microbatches: leave out group=4, or choose"),
        (["interleaved", "--chunks", "2", "--group", "2"], "a group of 2 microbatches comes round before 4 stages"),
        (["--times", "1,0,1"], "'1,0,1' is not F,I,W, three numbers above 0"),
        (["--send", "x"], "'x' is not a number from 0 on"),
        (["--picture", "a.gif"], "'a.gif' is no name that ends in .png or .svg"),
    ],
)
def test_what_cannot_be_is_said(capsys: pytest.CaptureFixture[str], given: list[str], says: str) -> None:
    try:
        assert main([*given, *SIZES]) == 2
    except SystemExit as ended:  # of argparse
        assert ended.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--chunks 2", "--times 1,2,1", "--send 0", "--group 4"])
@pytest.mark.parametrize("given", ["--trace a.json", "--search r.yaml --to o.json"])
def test_sizes_beside_what_has_its_own(capsys: pytest.CaptureFixture[str], given: str, option: str) -> None:
    assert main([*given.split(), *option.split()]) == 2
    assert f"leave out {option.split(maxsplit=1)[0]}\n" in capsys.readouterr().err


def test_what_is_neither_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and "takes --stages and --microbatches, or --trace of a run" in capsys.readouterr().err
    assert main(["--trace", str(tmp_path / "a")]) == 2 and "a is no trace of a step" in capsys.readouterr().err


SEARCH = ["--to", "order.json", "--search", "llama-3.2-1b", "mesh.pp=4", "mesh.dp=1", "batch.global_size=16"]
SEARCH += ["batch.micro_size=1", "train.compile=false", "data.sequence_length=2048", "pipeline.schedule=1f1b"]


@pytest.mark.in_turn(3)
def test_an_order_is_searched_for_within_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With room for a bit less than ZB-H1 holds it is faster than 1F1B, and the plan of a recipe that names the file
    has the bytes and the seconds that are told."""
    monkeypatch.chdir(tmp_path)
    assert main([*SEARCH, "--memory-gb", "13.3"]) == 0
    said = capsys.readouterr().out
    cells = (re.split(" {2,}", line.strip()) for line in said.splitlines()[2:6])
    rows = {(schedule, order): rest for schedule, order, *rest in cells}
    own, found = float(rows["1f1b", "its own"][0]), float(rows["zb-h1", "searched"][0])
    assert found < own and rows["zb-h1", "its own"][3] == "does not fit"
    name = said.splitlines()[-1].split("pipeline.schedule=")[1].split()[0]
    config = load("llama-3.2-1b", [*SEARCH[4:], f"pipeline.schedule={name}", "pipeline.order=order.json"])
    cluster = cluster_of("h100-80", "bf16", None, {"memory": 13.3e9})
    plan = Plan.of(config, cluster, False, 4)
    assert plan.fits and plan.fullest.peak / 1e9 == pytest.approx(float(rows[name, "searched"][2]), abs=5e-3)
    time = plan.time
    pipeline = time.total - time.data - time.offload - time.optimizer
    assert 1e3 * pipeline == pytest.approx(float(rows[name, "searched"][0]), abs=0.1)
    assert main([*SEARCH, "--memory-gb", "1"]) == 2 and "nothing fits: the least is " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (SEARCH[2:], "--search RECIPE and --to FILE go together"),
        ([*SEARCH, "--to", "."], "--to .: give the name of a file in a folder that is there"),
        ([*SEARCH, "--to", "nowhere/order.json"], "--to nowhere/order.json: give the name"),
        ([*SEARCH, "--stages", "4"], "has the sizes and times of its recipe: leave out --stages"),
        ([*SEARCH, "mesh.pp=1"], "mesh.pp is 1: an order is one of the stages of a pipeline"),
        ([*SEARCH, "mesh.tp=5"], "tp"),
    ],
)
def test_what_cannot_be_searched(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2 and says in capsys.readouterr().err
