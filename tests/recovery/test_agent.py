"""The agent of one node: faults, words, signals; with ranks that do no more than sum a number."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from toy import launch, notes

from megacore import exits, incidents
from megacore.recovery import agent

HERE = Path(__file__).parent
STEPS = ["8", "0.02"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find the toy, and nothing says that there are several nodes."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(agent, "BACKOFF_S", 0.05)
    monkeypatch.delenv("NNODES", raising=False)


def befell(out: Path) -> list[tuple[str, int | None, int | None, str]]:
    return [(each.kind, each.rank, each.step, each.action) for each in incidents.read(out)]


def steps(out: Path) -> list[int]:
    return [int(line.split()[1]) for line in notes(out) if line.startswith("step")]


def when(condition: Callable[[], bool], *signals: int) -> threading.Thread:
    """Send this process, which launches, signals one after another, once a condition holds."""

    def send() -> None:
        until = time.monotonic() + 60
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def parents() -> dict[int, int]:
    """{each process of the machine: its parent}."""
    found = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    return found


def test_ranks_that_are_killed_go_on_from_what_was_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each start has a place of its own to meet: in the first one are the addresses of the dead."""
    assert launch(tmp_path, 2, [*STEPS, "3:1:kill", "5:0:kill"]) == exits.DONE
    assert steps(tmp_path) == [*range(1, 9)]
    assert befell(tmp_path) == [("killed", 1, 3, "restart"), ("killed", 0, 5, "restart")]
    told = capfd.readouterr().err
    assert "killed rank 1 at step 3 (SIGKILL) -> restart: restart 1 of 3" in told
    assert told.count("->") == 2, "what the others had of it is no news"


@pytest.mark.in_turn(2, 1)
def test_restarts_in_vain_are_counted_and_those_between_steps_are_not(tmp_path: Path) -> None:
    assert launch(tmp_path, 2, ["6", "0", *(f"{step}:1:kill" for step in range(1, 7))]) == exits.DONE
    assert len(befell(tmp_path)) == 6
    other = tmp_path / "other"
    other.mkdir()
    assert launch(other, 2, ["6", "0", "2:1:kill!"]) == exits.RETRY
    assert befell(other) == [*[("killed", 1, 2, "restart")] * 3, ("killed", 1, 2, "end")]


def test_the_same_exception_at_the_same_step_is_no_accident(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU has reported lately stands beside it."""
    monkeypatch.setattr(agent.GpuErrors, "lately", lambda self: "GPU 1 has reported Xid 31")
    assert launch(tmp_path, 2, [*STEPS, "3:1:raise!"]) == exits.FAILED
    assert befell(tmp_path) == [("raised", 1, 3, "restart"), ("raised", 1, 3, "end")]
    assert [each.detail for each in incidents.read(tmp_path)] == ["KeyError: 3; GPU 1 has reported Xid 31"] * 2
    told = "raised rank 1 at step 3 (KeyError: 3; GPU 1 has reported Xid 31) -> end: the same exception"
    assert told in capfd.readouterr().err


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("stop", [False, True], ids=["done", "stopped"])
def test_done_is_done_whatever_a_library_does_at_the_exit(tmp_path: Path, stop: bool) -> None:
    """All ranks abort after they have left their groups."""
    if stop:
        when(lambda: "step 2" in notes(tmp_path), signal.SIGTERM)
    status = launch(tmp_path, 2, ["300" if stop else "3", "0.02", "abort"])
    assert status == (143 if stop else exits.DONE) and not befell(tmp_path)
    assert sum(line.startswith("start") for line in notes(tmp_path)) == 1


def test_a_word_of_one_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "SPEAKS_S", 0.5)
    assert launch(tmp_path, 2, [*STEPS, "3:1:fail"]) == exits.FAILED and not befell(tmp_path)


def test_ranks_that_do_not_end_in_time_are_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    when(lambda: "hangs" in notes(tmp_path), signal.SIGTERM)
    assert launch(tmp_path, 2, [*STEPS, "2:1:hang"], shutdown_s=0.5) == 143 and not befell(tmp_path)
    assert "did not end within 0.5 s of the signal: killed." in capfd.readouterr().err


def test_a_second_ctrl_c_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "PATIENCE_S", 0.1)
    when(lambda: "hangs" in notes(tmp_path), signal.SIGINT, signal.SIGUSR1, signal.SIGINT)
    assert launch(tmp_path, 2, [*STEPS, "2:1:hang"]) == 130
    assert "Interrupted again: ended at once" in capfd.readouterr().err


def test_a_wish_for_a_checkpoint_is_passed_on_and_ends_nothing(tmp_path: Path) -> None:
    when(lambda: "step 2" in notes(tmp_path), signal.SIGUSR1, signal.SIGUSR2)
    assert launch(tmp_path, 2, ["60", "0.02"]) == exits.DONE and notes(tmp_path).count("save") == 2


def test_a_file_asks_a_node_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "DRAIN_LOOK_S", 0.1)
    (file := tmp_path / f"drain-{os.uname().nodename}").touch()
    assert launch(tmp_path, 2, ["500", "0.02"]) == 143 and not file.exists()


@pytest.mark.in_turn(4, 3)
def test_after_ten_restarts_nothing_has_grown(tmp_path: Path) -> None:
    """Counted in each restart, before the ranks are there."""
    others = set(multiprocessing.active_children())  # the pool that other tests of this process have left running
    seen = list[tuple[int, int, int]]()
    begin = agent.Agent._start_workers

    def counted(self: agent.Agent, group: object) -> object:
        gc.collect()
        seen.append((threading.active_count(), len(os.listdir("/proc/self/fd")), len(list(self._folder.iterdir()))))
        return begin(self, group)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent.Agent, "_start_workers", counted)
        assert launch(tmp_path, 2, ["12", "0", *(f"{step}:1:kill" for step in range(1, 12))]) == exits.DONE
    assert len(seen) == 12 and all(last <= first for last, first in zip(seen[-1], seen[1], strict=True)), seen
    assert not set(multiprocessing.active_children()) - others


# -- launchers as processes of their own


def started(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    return subprocess.Popen(
        [sys.executable, "-m", "toy", str(folder), *arguments], env={**os.environ, "PYTHONPATH": path}
    )


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.in_turn(4, 3)
def test_nobody_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    process = started(tmp_path, "2", "3000", "0.02")
    until(lambda: "step 3" in notes(tmp_path))
    found = parents()
    servers = {pid for pid, parent in found.items() if parent == process.pid}
    own = servers | {pid for pid, parent in found.items() if parent in servers}
    process.kill()
    process.wait()
    until(lambda: not own & parents().keys(), 20)
    assert len(own - servers) >= 2
