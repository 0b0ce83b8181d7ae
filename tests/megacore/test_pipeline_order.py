"""Files with an order of a pipeline: written, read, trained by, and refused with what is wrong and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn_orders import drawn_order
from engine import apart, assert_near, problems, train, trainer
from pool import Pool

from megacore.parallel.pipeline.schedules import Schedule
from megacore.planning.pipeline_order import order_of, order_text
from megacore.recipe import ConfigError, load

PIPELINE = ["mesh.pp=2", "pipeline.schedule=zb-h1", "batch.global_size=8", "batch.micro_size=2"]
ORDER: Schedule = drawn_order(3, "zb-h1", 2, 1, 4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "order.json").write_bytes(order_text("zb-h1", ORDER))
    return tmp_path / "order.json"


def test_what_is_written_is_read(recipe: str, file: Path) -> None:
    config = load(recipe, [*PIPELINE, f"pipeline.order={file}"])
    assert order_of(config, 2) == ORDER
    assert order_of(load(recipe, PIPELINE), 2) is None


def row(stage: int, change: Callable[[list[str]], object]) -> Callable[[dict[str, Any]], object]:
    """A change of the actions of a stage."""

    def changed(data: dict[str, Any]) -> None:
        words = data["rows"][stage].split()
        change(words)
        data["rows"][stage] = " ".join(words)

    return changed


def swap(words: list[str], one: str, other: str) -> None:
    a, b = words.index(one), words.index(other)
    words[a], words[b] = other, one


def to_the_front(words: list[str], action: str) -> None:
    words.insert(0, words.pop(words.index(action)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("rows"), "rows is None, and is to be a list of texts"),
        (lambda data: data.update(stages=True), "stages is True, and is to be a whole number"),
        (lambda data: data.update(v=1), "nothing is known of v"),
        (lambda data: data.update(schedule="1f1b"), "it is for schedule 1f1b, and the recipe has zb-h1"),
        (lambda data: data.update(stages=3), "it is for stages 3, and the recipe has 2"),
        (lambda data: data.update(chunks=2), "it is for chunks 2, and the recipe has 1"),
        (lambda data: data.update(microbatches=8), "it is for microbatches 8, and the recipe has 4"),
        (lambda data: data["rows"].pop(), "it has 1 rows for 2 stages"),
        (lambda data: data.update(rows=[3, 3]), "stage 0, action 0: 3 is none of F, B, I, W"),
        (row(1, lambda words: words.__setitem__(2, "F(0)")), "stage 1, action 2: F(0) is none of F, B, I, W"),
        (row(1, lambda words: words.remove("I(0,2)")), "stage 1 lacks I(0,2)"),
        (row(0, lambda words: words.append("W(0,9)")), "stage 0, action 12: W(0,9) is not one of the schedule"),
        (row(0, lambda words: words.append("B(0,1)")), "stage 0, action 12: B(0,1) is not one of the schedule"),
        (row(0, lambda words: words.append("W(0,0)")), "W(0,0) is there 2 times"),
        pytest.param(
            row(0, lambda words: swap(words, "W(0,1)", "W(0,2)")),
            "W(0,1) comes after microbatch 2: those of a chunk ascend",
            id="descending",
        ),
        (
            row(1, lambda words: to_the_front(words, "I(0,0)")),
            "deadlocks: stage 0 cannot run I(0,0) before stage 1 has",
        ),
    ],
)
def test_bad_files_are_refused(recipe: str, file: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as error:
        order_of(load(recipe, [*PIPELINE, f"pipeline.order={file}"]), 2)
    assert f"pipeline.order ({file}): " in str(error.value) and says in str(error.value)


def test_a_run_is_refused_before_it_starts(recipe: str, file: Path) -> None:
    for overrides, says in (
        (["pipeline.order=nowhere.json"], "pipeline.order (nowhere.json): cannot read nowhere.json: No such file"),
        ([f"pipeline.order={file}", "pipeline.schedule=gpipe"], "runs all forwards before all backwards"),
        ([f"pipeline.order={file}", "batch.ramp=[4,4,8]"], "changes the number of microbatches"),
        ([f"pipeline.order={file}", "batch.micro_size=4"], "microbatches 4, and the recipe has 2"),
    ):
        assert says in "\n".join(problems(recipe, *PIPELINE, *overrides, world=2))


def built(recipe: str, overrides: list[str]) -> Schedule | None:
    return trainer(recipe, overrides).train_step.pipeline.order


def test_each_rank_runs_it_and_all_have_the_same(pool: Pool, recipe: str, file: Path, tmp_path: Path) -> None:
    other = next(each for seed in range(9) if (each := drawn_order(seed, "zb-h1", 2, 1, 4)) != ORDER)
    (tmp_path / "other.json").write_bytes(order_text("zb-h1", other))
    both = [[*PIPELINE, f"pipeline.order={tmp_path / name}"] for name in ("order.json", "other.json")]
    assert pool.run(2, built, recipe, both[0]) == [ORDER] * 2
    for said in pool.run(2, apart, recipe, both):
        assert "is not the same on all nodes: give all of them one file" in said


@pytest.mark.in_turn(4)
def test_a_run_has_the_numbers_of_1f1b(pool: Pool, recipe: str, file: Path) -> None:
    whole = [*PIPELINE, "pipeline.schedule=1f1b"]
    outs = [f"out={file.parent / name}" for name in ("whole", "ordered")]
    plain = pool.run(2, train, recipe, [*whole, outs[0]])
    found = pool.run(2, train, recipe, [*PIPELINE, f"pipeline.order={file}", outs[1]])
    for one, other in zip(plain, found, strict=True):
        assert_near(one.weights, other.weights, 1e-12)
