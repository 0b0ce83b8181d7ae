"""The launcher of ranks: what they are told, which status it passes on, what signals do, and that nobody is left over.

The ranks here are small scripts without torch; `test_start.py` starts real ones.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megacore.launcher import Node, launch, pause
from megacore.recovery import ranks
from megacore.recovery.children import BLOCKED
from megacore.recovery.events import Event

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module that ranks can run -> its name. It finds ``say``, which lets the test go on: see :func:`when`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SAID", str(tmp_path / "said"))

    def write(text: str) -> str:
        (tmp_path / "ranks.py").write_text(HEADER + text)
        return "ranks"

    yield write


HEADER = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(word):
    with open(os.environ["SAID"], "a") as file:
        file.write(f"{word}\\n")
"""
HANGS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready'); time.sleep(60)"


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().split() if (folder / "said").exists() else []


def when(folder: Path, words: int, *signals: int) -> None:
    """Sends this process, which launches, signals: each once so many words have been said, and one more each time."""

    def send() -> None:
        for wanted, number in enumerate(signals, words):
            while len(said(folder)) < wanted:
                time.sleep(0.01)
            os.kill(os.getpid(), number)
            time.sleep(0.1)  # those that are pending together arrive in the order of their numbers
            with (folder / "said").open("a") as file:
                file.write("sent\n")

    threading.Thread(target=send, daemon=True).start()


# -- what ranks are told


def test_ranks_of_one_machine_meet_in_a_folder_of_their_own(
    module: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    text = """
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "EXTRA")
folder = os.path.dirname(os.environ["MEGACORE_STORE"])
say(",".join([*(os.environ[name] for name in names), oct(os.stat(folder).st_mode), *sys.argv[1:]]))
sys.exit(folder in sys.path or "" in sys.path or os.getcwd() in sys.path)
"""
    assert launch(module(text), ["a b"], Node(2), {"EXTRA": "more"}) == 0
    mode = oct(stat.S_IFDIR | 0o700)
    here = [f"{rank},2,{rank},2,lo,lo,more,{mode},a" for rank in range(2)]
    assert sorted(line for line in said(tmp_path) if line != "b") == here


def test_ranks_of_several_machines_are_told_of_node_0(tmp_path: Path) -> None:
    node = Node(2, 3, 1, ("host", 1234))
    told = [{**node.network, **node.environment(rank), **node.meeting(tmp_path)} for rank in node.ranks]
    assert [each["RANK"] for each in told] == ["2", "3"] and [each["LOCAL_RANK"] for each in told] == ["0", "1"]
    assert all(each["WORLD_SIZE"] == "6" and each["LOCAL_WORLD_SIZE"] == "2" for each in told)
    assert all(each["MASTER_ADDR"] == "host" and each["MASTER_PORT"] == "1234" for each in told)
    assert not any("GLOO_SOCKET_IFNAME" in each or "MEGACORE_STORE" in each for each in told)


# -- how they end


@pytest.mark.parametrize(
    ("text", "status", "told", "fault"),
    [
        ("", 0, "", ()),
        ("sys.exit(2)", 2, "", ()),  # it has said what was wrong
        (
            "if rank == 1: os._exit(77)\ntime.sleep(60)",
            77,
            "Rank 1 (process {}) ended with status 77.",
            ("raised", 1, "ended with status 77"),
        ),
        (
            "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)",
            137,
            "was ended by SIGKILL: where memory ran out",
            ("killed", 1, "SIGKILL"),
        ),
        ("if rank == 1: {}[3]\ntime.sleep(60)", 1, "KeyError: 3", ("raised", 1, "KeyError: 3")),
        (
            "if rank == 1: os.abort()\ntime.sleep(60)",
            1,
            "Rank 1 has waited too long for rank 0",
            ("aborted", 1, "Rank 1 has waited too long for rank 0, which did not arrive"),
        ),
    ],
    ids=["well", "said", "status", "killed", "raised", "aborted"],
)
def test_the_first_that_fails_ends_all(
    module: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    text: str,
    status: int,
    told: str,
    fault: tuple[str, int, str] | tuple[()],
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    faults, before = list[Event](), time.time()
    assert launch(module(text), [], Node(2), on_fault=faults.append) == status
    assert [(each.kind, each.rank, each.detail) for each in faults] == [fault] * bool(fault)
    assert all(before <= each.at <= time.time() and each.node == 0 for each in faults)
    shown = capfd.readouterr().err
    assert all(part in shown for part in told.split("{}")) and bool(told) == bool(shown), shown


def test_those_that_wait_for_one_that_died_say_nothing(
    module: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    text = WAITING + "if rank == 1: time.sleep(0.3); os.kill(os.getpid(), 9)\nwait('Connection closed by peer')"
    faults = list[Event]()
    assert launch(module(text), [], Node(3), on_fault=faults.append) == 137
    assert [(each.kind, each.rank) for each in faults] == [("killed", 1)]
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("Rank 1 ")


def test_contact_that_is_lost_though_nobody_died_here_is_a_fault(module: Callable[[str], str]) -> None:
    faults = list[Event]()
    assert launch(module(WAITING + "wait('Connection closed by peer')"), [], Node(2), on_fault=faults.append) == 1
    assert [(each.kind, each.detail) for each in faults] == [("lost_contact", "Connection closed by peer")]


# A call that waits for other ranks is known by the file that it stands in.
WAITING = """
def at(file, text):
    there = dict(globals())
    exec(compile(text, file, "exec"), there)
    return there
wait = at("/x/parallel/collectives.py", '''
def wait(text):
    error = RuntimeError(text)
    error.add_note("at step 7")
    raise error
''')["wait"]
still = at("/x/parallel/pipeline/run.py", '''
def still():
    say("waits")
    time.sleep(60)
''')["still"]
def reads_from_a_dead_disk():
    say("stands")
    time.sleep(60)
"""


def test_a_rank_that_stands_still_is_named_with_the_stacks_of_all(
    module: Callable[[str], str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = WAITING + (
        "if rank == 1: reads_from_a_dead_disk()\n"
        "if rank == 2: still()\n"
        "while open(os.environ['SAID']).read().count('\\n') < 2: time.sleep(0.01)\n"
        "wait('[gloo] Timed out waiting 50ms for recv')"
    )
    (tmp_path / "said").touch()
    faults = list[Event]()
    assert launch(module(text), [], Node(3), way_out="Buy a disk.", on_fault=faults.append) == 1
    assert [(each.kind, each.rank) for each in faults] == [("hung", 1)]
    shown = capfd.readouterr().err
    first, *_ = shown.split("Rank 1 (process")
    assert first.startswith("\nRank 0 (process") and "in wait" in first
    assert "in reads_from_a_dead_disk" in shown and "in still" in shown
    *_, last = shown.splitlines()
    assert last == ("Rank 0 has waited too long for rank 1, which did not arrive at step 7: all are ended. Buy a disk.")


# -- signals


def test_ctrl_c_asks_each_rank_once_to_end(
    module: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a terminal does it, to all of the group at once; and a wrapper passes it on, so that it comes twice."""
    text = """
def end(*_):
    say("asked")
    time.sleep(0.2)  # the step
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
say("ready")
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""
    when(tmp_path, 2, signal.SIGINT, signal.SIGINT)
    assert launch(module(text), [], Node(2)) == 130
    assert sorted(said(tmp_path)) == ["asked"] * 2 + ["ready"] * 2 + ["sent"] * 2
    assert capfd.readouterr().err == ""


def test_a_second_ctrl_c_ends_ranks_that_hang(
    module: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.0)
    when(tmp_path, 2, signal.SIGTERM, signal.SIGTERM, signal.SIGINT)  # SIGTERM, however often, is no haste
    started = time.monotonic()
    assert launch(module(HANGS), [], Node(2)) == 130
    assert time.monotonic() - started < 30
    assert capfd.readouterr().err == "\nInterrupted again: ended at once, without a checkpoint.\n"


def test_ranks_that_do_not_end_in_time_are_ended(
    module: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    when(tmp_path, 2, signal.SIGTERM)
    started = time.monotonic()
    faults = list[Event]()
    assert launch(module(HANGS), [], Node(2), shutdown_s=0.2, on_fault=faults.append) == 143 and not faults
    assert time.monotonic() - started < 15
    assert "Ranks 0, 1 did not end within 0.2 s of the signal: killed." in capfd.readouterr().err


def test_ranks_that_the_signal_itself_ends_are_no_fault(module: Callable[[str], str], tmp_path: Path) -> None:
    when(tmp_path, 2, signal.SIGTERM)
    faults = list[Event]()
    assert launch(module("say('ready'); time.sleep(60)"), [], Node(2), on_fault=faults.append) == 143 and not faults


def test_a_wish_for_a_checkpoint_is_passed_on(module: Callable[[str], str], tmp_path: Path) -> None:
    """Also one that comes before the rank listens; and SIGUSR2 only looks."""
    text = """
assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "one that comes now would kill"
say("ready")
signal.sigwait({signal.SIGUSR1})
say("saved")
"""
    when(tmp_path, 2, signal.SIGUSR2, signal.SIGUSR1)
    assert launch(module(text), [], Node(2)) == 0
    assert said(tmp_path).count("saved") == 2


def test_handlers_are_what_they_were(module: Callable[[str], str]) -> None:
    before = [signal.getsignal(number) for number in ranks.ENDS]
    launch(module(""), [], Node(1))
    assert [signal.getsignal(number) for number in ranks.ENDS] == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*BLOCKED}


def test_a_pause_between_launches_ends_with_the_signal_to_end() -> None:
    assert pause(0.01) == 0
    before, started = signal.getsignal(signal.SIGUSR1), time.monotonic()

    def send() -> None:
        while signal.getsignal(signal.SIGUSR1) is before:
            time.sleep(0.01)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
            time.sleep(0.05)

    threading.Thread(target=send, daemon=True).start()
    assert pause(30) == signal.SIGTERM
    assert time.monotonic() - started < 15


ORPHAN = """
import os, signal, sys, time
from megacore import rank
rank.sys.platform = sys.argv[1]
parent = os.getpid()
if os.fork():
    time.sleep(float(sys.argv[2]))
    os.kill(parent, signal.SIGKILL)
if sys.argv[2] == "0":
    while os.getppid() == parent:
        time.sleep(0.01)
rank.die_with(parent)
print("alive", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("platform", ["linux", "another"])
@pytest.mark.parametrize(("after", "lived"), [("0.3", "alive\n"), ("0", "")], ids=["later", "before it looked"])
def test_nobody_outlives_a_launcher_that_was_killed(platform: str, after: str, lived: str) -> None:
    started = time.monotonic()
    command = [sys.executable, "-c", ORPHAN, platform, after]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=50, check=False)  # till EOF
    assert done.stdout == lived and time.monotonic() - started < 30
