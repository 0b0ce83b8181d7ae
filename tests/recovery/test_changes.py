"""Who takes part in a run changes between two of its steps: none is lost, and none is done twice."""

from __future__ import annotations

from pathlib import Path

import engine
import numpy as np
import pytest
from engine import write_recipe
from families import ROTATION
from pool import Pool
from worlds import World, take_part

from megacore import checkpoints
from megacore.training import lock, metrics

COMMON = ["train.steps=6", "checkpoint.at_end=true", "checkpoint.every=3", "checkpoint.keep=null", "evaluate.every=3"]
PLACES = ["wall_seconds", "goodput", "time", "seconds_per_step", "tokens_per_second", "tflops_per_device", "mfu"]
PLACES += ["peak_memory_gib"]
"""What a record says of the machine."""
Run = tuple[list[dict[str, object]], dict[str, bytes], Path]
"""The records of a run, its files of weights, and its folder."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


def run(pool: Pool, recipe: str, out: Path, processes: int, worlds: list[World], overrides: list[str]) -> list[object]:
    out.parent.mkdir(exist_ok=True)
    return pool.run(processes, take_part, recipe, [f"out={out}", *COMMON, *overrides], out.parent, worlds)


def left_by(out: Path) -> Run:
    """The numbers and the weights of a run."""
    records = [{k: v for k, v in each.items() if k not in PLACES} for each in metrics.read(out / metrics.METRICS)]
    saved = checkpoints.complete(checkpoints.folder_of(out))
    files = {f"{n} {each.name}": each.read_bytes() for n in saved for each in saved[n].rglob("*.safetensors")}
    return records, files, out


@pytest.fixture(scope="module")
def plain(pool: Pool, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("plain") / "run"
    assert run(pool, recipe, out, 2, [World({0: 0, 1: 1})], []) == [6, 6]
    return left_by(out)


BOTH = {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("worlds", "ends"),
    [
        ([World(BOTH, 2), World(BOTH, 3), World(BOTH)], [6, 6]),
        ([World(BOTH, 3), World({1: 0, 2: 1})], ["dismissed", 6, 6]),
        ([World(BOTH, 2), World({1: 0, 0: 1}, 3, over=True), World({0: 0, 1: 1})], [6, 6]),
        ([World(BOTH, 6), World({0: 0})], [6, 6]),
    ],
    ids=["the same ranks", "the first leaves, another comes", "they change places", "the last step is the end"],
)
def test_no_step_is_lost_and_none_is_done_twice(
    pool: Pool,
    recipe: str,
    plain: Run,
    tmp_path: Path,
    worlds: list[World],
    ends: list[object],
) -> None:
    out = tmp_path / "run"
    assert run(pool, recipe, out, len(ends), worlds, []) == ends
    records, files, _ = left_by(out)
    assert records == plain[0] and files == plain[1]
    assert lock.holder(out) is None and not (out / lock.LOCK).exists()


def ranks(*processes: int) -> dict[int, int]:
    return {process: rank for rank, process in enumerate(processes)}


TP2 = ["mesh.tp=2"]


MANY: dict[str, tuple[list[str], list[World], list[object]]] = {
    "dp 4, 3, 2, 4": (
        [],
        [
            World(ranks(0, 1, 2, 3), 2, ["mesh.dp=4"]),
            World(ranks(3, 1, 0), 3, ["mesh.dp=3"]),
            World(ranks(1, 0), 4, ["mesh.dp=2"]),
            World(ranks(0, 1, 4, 5), None, ["mesh.dp=4"]),
        ],
        [6, 6, "dismissed", "dismissed", 6, 6],
    ),
    "tp2 x dp2, dp3, tp2": (
        [],
        [World(ranks(0, 1, 2, 3), 2, TP2), World(ranks(1, 3, 2), 3, ["mesh.tp=1"]), World(ranks(1, 3), None, TP2)],
        ["dismissed", 6, "dismissed", 6],
    ),
    "what only those have who leave": (
        ["zero.shard=optimizer"],
        [World(ranks(0, 1, 2), 2), World(ranks(2), 4), World(ranks(2, 3))],
        ["dismissed", "dismissed", 6, 6],
    ),
}
TURN = ROTATION % 2
"""One of the first two is of each session; ``-m grid`` runs the other."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] if at == 1 - TURN else []) for at, name in enumerate(MANY)]
)
def test_a_run_over_many_worlds_is_the_one_that_nothing_befell(
    pool: Pool,
    recipe: str,
    plain: Run,
    tmp_path: Path,
    name: str,
) -> None:
    out, (overrides, worlds, ends) = tmp_path / "run", MANY[name]
    assert run(pool, recipe, out, len(ends), worlds, overrides) == ends
    records, _, _ = left_by(out)
    assert [(each["step"], sorted(each)) for each in records] == [(each["step"], sorted(each)) for each in plain[0]]
    for one, other in zip(records, plain[0], strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    for step in (3, 6):
        mine, theirs = (weights(recipe, each, step) for each in (out, plain[2]))
        for name, want in theirs.items():
            assert np.linalg.norm(mine[name] - want) <= 1e-9 * np.linalg.norm(want), (step, name)


def weights(recipe: str, out: Path, step: int) -> dict[str, np.ndarray]:
    """Those of a checkpoint, whole."""
    saved = checkpoints.path_of(checkpoints.folder_of(out), step)
    return engine.weights(engine.trainer(recipe, [f"checkpoint.init={saved}", f"out={out / 'read'}"]))
