"""Nothing that protects a run ends, slows or changes a healthy one: slow, uneven, stopped and interrupted runs end as
the undisturbed one does, without a restart and without an incident."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from live import Live, calm, live, shared_folder


def long(seconds: float, grid: float) -> Any:
    return [seconds, pytest.param(grid, marks=pytest.mark.grid)]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory)


def ends_well(run: Live, recipe: str, cache: Path, layout: str) -> None:
    assert run.wait() == 0, run.said[-3000:]
    assert run.starts() == [0] and run.incidents == [], (run.incidents, run.said[-3000:])
    assert run.state() == calm(recipe, cache, layout)


SLOW: Mapping[str, tuple[int, dict[str, Any]]] = {
    "dp": (
        1,
        {
            "slow": {"data": {"10": 3.0, "20": 3.0}, "log": {"7": 3.0}, "update": {"2": 3.0}, "end": {"30": 5.0}},
            "rank": 1,
        },
    ),
    "pp": (4, {"slow": {"forward": {"2": 3.0, "3": 3.0, "4": 3.0}, "backward": {"every": 0.1}}, "rank": 1}),
    "tp pp": (11, {"slow": {"forward": {"1": 5.0}, "log": {"7": 3.0}}, "rank": 3}),
    "zero 3": (3, {"slow": {"reduce": {"5": 3.0}, "save": {"10": 3.0, "20": 3.0}}, "rank": 0}),
}
"""{layout: (its day of two weeks, a rank, and the phases that are slow there)}."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.in_turn(14, day)) for name, (day, _) in SLOW.items()]
)
def test_what_is_slow_is_waited_for(recipe: str, cache: Path, tmp_path: Path, layout: str) -> None:
    run = live(recipe, tmp_path / "run", layout, SLOW[layout][1])
    with run.running():
        ends_well(run, recipe, cache, layout)


@pytest.mark.grid
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "reduce", "update", "log", "save"])
def test_a_stall_of_30_s_in_any_phase_is_waited_for(recipe: str, cache: Path, tmp_path: Path, phase: str) -> None:
    run = live(recipe, tmp_path / "run", "pp", {"slow": {phase: {"10": 30.0}}, "rank": 1})
    with run.running():
        ends_well(run, recipe, cache, "pp")


@pytest.mark.in_turn(14, 12)
@pytest.mark.parametrize("seconds", long(4.0, 60.0))
def test_processes_that_are_stopped_for_a_while_lose_nothing(
    recipe: str, cache: Path, tmp_path: Path, seconds: float
) -> None:
    """The launcher, a rank, all ranks, and everything, one after the other."""
    run = live(recipe, tmp_path / "run", "dp", {"slow": {"forward": {"every": 0.3}}})
    with run.running():
        run.until(lambda: run.step >= 3)
        launcher, ranks = [run.process.pid], [run.pid(rank) for rank in range(run.world)]
        assert all(ranks), run.said[-3000:]  # 0 is this process and its own
        for number, stopped in enumerate((launcher, ranks[1:], ranks, launcher + ranks)):
            run.until(lambda after=3 + 3 * number: run.step >= after)  # type: ignore[misc]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert run.step < 30, "it was over before all had been stopped"
        ends_well(run, recipe, cache, "dp")


@pytest.mark.in_turn(14, 1)
@pytest.mark.parametrize("seconds", long(4.0, 70.0))
def test_a_terminal_that_takes_nothing_for_a_while_is_waited_for(
    recipe: str, cache: Path, tmp_path: Path, seconds: float
) -> None:
    """As after Ctrl-S, or in a pager."""
    screen, run = os.openpty(), live(recipe, tmp_path / "run", "dp", {"slow": {"forward": {"every": 0.2}}})
    run.terminal = screen[1]
    with run.running():
        os.close(screen[1])
        run.until(lambda: run.step >= 1)
        time.sleep(seconds)
        seen = run.step
        threading.Thread(target=drain, args=(screen[0],), daemon=True).start()
        ends_well(run, recipe, cache, "dp")
    assert seen < 30, "the terminal has taken all"


def drain(file: int) -> None:
    try:
        while os.read(file, 1 << 16):
            pass
    except OSError:  # whoever wrote there is gone
        pass


@pytest.mark.in_turn(14, 8)
def test_a_folder_that_is_away_for_a_while_ends_nothing(recipe: str, cache: Path, tmp_path: Path) -> None:
    """Renamed, and back before the last save: saves that fail are told, and tried again."""
    run = live(recipe, tmp_path / "run", "dp", {"slow": {"forward": {"every": 0.1}}})
    with run.running():
        run.until(lambda: run.step >= 8)
        run.out.rename(tmp_path / "away")
        time.sleep(1.5)
        if run.out.exists():  # what was made in its place
            shutil.rmtree(run.out)
        (tmp_path / "away").rename(run.out)
        assert run.wait() == 0, run.said[-3000:]
    assert run.starts() == [0] and {each.kind for each in run.incidents} <= {"save_failed"}, run.incidents
    assert run.state() == calm(recipe, cache, "dp")


@pytest.mark.grid
def test_a_machine_that_is_busy_slows_and_ends_nobody(recipe: str, cache: Path, tmp_path: Path) -> None:
    run = live(recipe, tmp_path / "run", "pp")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(20)]
    try:
        with run.running():
            ends_well(run, recipe, cache, "pp")
    finally:
        for each in busy:
            each.kill()


# -- signals


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param("forward", signal.SIGTERM, marks=pytest.mark.in_turn(14, 5)),
        pytest.param("save", signal.SIGINT, marks=pytest.mark.in_turn(14, 10)),
        pytest.param("data", signal.SIGHUP, marks=pytest.mark.in_turn(14, 13)),
    ],
)
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(
    recipe: str, cache: Path, tmp_path: Path, phase: str, number: signal.Signals
) -> None:
    """In whatever phase; and what goes on from there ends as if nothing had been."""
    run = live(recipe, tmp_path / "run", "dp", {"slow": {phase: {"10": 1.0, "11": 1.0}}})
    with run.running():
        run.until(lambda: run.step >= 10)
        run.process.send_signal(number)
        assert run.wait() == 128 + number, run.said[-3000:]
    assert run.starts() == [0] and run.incidents == []
    run.start("checkpoint.resume=auto")
    assert run.wait() == 0 and run.incidents == [], run.said[-3000:]
    assert run.starts()[1] >= 9
    assert run.state() == calm(recipe, cache, "dp")


@pytest.mark.in_turn(14, 4)
def test_questions_of_the_first_seconds_end_nothing(recipe: str, cache: Path, tmp_path: Path) -> None:
    run, numbers = live(recipe, tmp_path / "run", "dp"), (signal.SIGUSR1, signal.SIGUSR2)
    with run.running():
        run.until(lambda: all(map(run.heeds, numbers)))  # Python itself needs a moment before it can take any
        asking = threading.Event()

        def ask() -> None:
            while not asking.wait(0.05) and run.process.poll() is None:
                for number in numbers:
                    run.process.send_signal(number)

        thread = threading.Thread(target=ask)
        thread.start()
        run.until(lambda: run.step >= 3)
        asking.set()
        thread.join()
        ends_well(run, recipe, cache, "dp")
