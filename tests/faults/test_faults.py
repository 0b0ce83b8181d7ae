"""Faults on live runs: all ranks start again from the newest checkpoint, in memory or on disk, and end bit for bit as
the undisturbed run. In two weeks all have had their turn, those of one layout on one day, for they are held against
one undisturbed run; what is drawn turns with MEGACORE_ROTATION, and ``-m grid`` is the campaign at full size."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from live import LAYOUTS, TWO_NODES, Live, calm, live, shared_folder
from turns import ROTATION, TURN

KILLS = 300
"""The kills of the campaign."""
EACH = 6
"""The kills of a run."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory)


def disturb(run: Live, draw: random.Random, kills: int) -> int:
    """Kill ranks, all of them, or the launcher, wherever they are -> how many were killed."""
    done, launches = 0, 1
    while done < kills and run.process.poll() is None:
        time.sleep(draw.uniform(0.2, 1.5))
        ranks = [pid for rank in range(run.world) if (pid := run.pid(rank))]
        if not ranks:
            continue
        kind = draw.choice(["one", "one", "one", "two", "all", "launcher", *["node"] * (run.nodes > 1)])
        if kind == "node":
            run.lose(draw.randrange(run.nodes))
        elif kind == "launcher" and launches < 3:
            run.kill()
            launches += 1
            run.start("checkpoint.resume=auto")
        else:
            for pid in {"one": [draw.choice(ranks)], "two": ranks[:2]}.get(kind, ranks):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        done += 1
    return done


def survives(recipe: str, cache: Path, out: Path, layout: str, seed: int, kills: int) -> None:
    run = live(recipe, out, layout, {"slow": {"forward": {"every": 0.05}}}, "recovery.max_restarts=20")
    with run.running():
        done = disturb(run, random.Random(seed), kills)
        assert done and run.wait() == 0, run.said[-4000:]
    assert run.state() == calm(recipe, cache, layout), run.said[-4000:]
    assert all(each.action != "end" for each in run.incidents)


@pytest.mark.in_turn(14, 5)
def test_random_kills_leave_no_trace(recipe: str, cache: Path, tmp_path: Path) -> None:
    layout = [*LAYOUTS][TURN // 14 % len(LAYOUTS)]
    survives(recipe, cache, tmp_path / "run", layout, TURN, 3)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(KILLS // EACH))
def test_many_random_kills_leave_no_trace(recipe: str, cache: Path, tmp_path: Path, seed: int) -> None:
    survives(recipe, cache, tmp_path / "run", [*LAYOUTS][seed % len(LAYOUTS)], 1000 + seed, EACH)


@pytest.mark.parametrize("node", [pytest.param(node, marks=pytest.mark.in_turn(14, 7 * node)) for node in (0, 1)])
def test_a_node_that_is_lost_takes_nothing_along(recipe: str, cache: Path, tmp_path: Path, node: int) -> None:
    """The second one, or the one that the others meet at: its memory is gone, and its partner has a copy."""
    run = live(recipe, tmp_path / "run", TWO_NODES, {"slow": {"forward": {"every": 0.2}}}, "recovery.overhead=0.5")
    with run.running():
        run.until(lambda: run.step >= 8)
        run.lose(node)
        assert run.wait() == 0, run.said[-4000:]
    assert run.state() == calm(recipe, cache, TWO_NODES), run.said[-4000:]
    first, after = run.starts()
    assert first == 0 and 0 < after < 10, "there is no checkpoint on disk before step 10"


@pytest.mark.in_turn(14, 2)
def test_a_restart_goes_on_from_memory(recipe: str, cache: Path, tmp_path: Path) -> None:
    """And not from the disk, whose checkpoint is ten steps old; nothing is left there in the end."""
    what = {"die": {"19": 1}, "once": str(tmp_path / "once"), "slow": {"forward": {"every": 0.1}}}
    run = live(recipe, tmp_path / "run", "zero 1", what, "recovery.overhead=0.5")
    with run.running():
        assert run.wait() == 0, run.said[-3000:]
    assert run.state() == calm(recipe, cache, "zero 1")
    first, after = run.starts()
    assert first == 0 and 10 < after < 19, run.said[-3000:]
    (incident,) = run.incidents
    assert (incident.kind, incident.action, incident.rank) == ("killed", "restart", 1)
    assert incident.recovered is not None and incident.steps_lost == 18 - after
    known = (run.out / "run.id").read_text().strip()
    assert not list(Path("/dev/shm").glob(f"megacore-*/{known}"))


@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 1 else pytest.mark.grid) for n in range(8)])
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.in_turn(14, on)) for name, on in (("dp", 9), ("zero 1", 2), ("tp pp", 11))],
)
def test_a_bit_that_flips_leaves_no_trace(recipe: str, cache: Path, tmp_path: Path, layout: str, seed: int) -> None:
    """It is found before anything is kept that was built on it, and all go back."""
    what = {"flip": {"17": 1}, "seed": ROTATION + seed, "once": str(tmp_path / "once")}
    watched = ["recovery.checksums=0.99", "recovery.compare_every=5", "recovery.overhead=0.5"]
    run = live(recipe, tmp_path / "run", layout, what | {"slow": {"forward": {"every": 0.05}}}, *watched)
    with run.running():
        assert run.wait() == 0, run.said[-3000:]
    assert run.state() == calm(recipe, cache, layout), run.said[-3000:]
    (incident,) = run.incidents
    assert (incident.kind, incident.action) == ("corrupted", "restart"), incident


@pytest.mark.in_turn(14, 3)
def test_every_step_may_be_the_one(recipe: str, cache: Path, tmp_path: Path) -> None:
    """The first, one while a checkpoint is written, one right after it, the last."""
    steps = {"1": 0, "10": 1, "11": 0, "12": 1, "30": 0}
    what = {"die": steps, "once": str(tmp_path / "once")}
    run = live(recipe, tmp_path / "run", "zero 3", what)
    with run.running():
        assert run.wait() == 0, run.said[-3000:]
    assert run.state() == calm(recipe, cache, "zero 3")
    assert len(run.incidents) == len(steps)
