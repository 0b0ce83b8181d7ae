"""The launcher of ranks: what they are told, which status it passes on, and that nobody is left over.

`tests/recovery/test_agent.py` tells what becomes of ranks that can be started again.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacore.launcher.node import Node
from megacore.launcher.processes import launch
from megacore.launcher.signals import ASKS, ENDS

ROOT = Path(__file__).parents[2]
HEADER = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(word):
    with open(os.environ["SAID"], "a") as file:
        file.write(f"{word}\\n")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module that ranks can run -> its name. It finds ``say``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SAID", str(tmp_path / "said"))

    def write(text: str) -> str:
        (tmp_path / "some_ranks.py").write_text(HEADER + text)
        return "some_ranks"

    return write


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().split() if (folder / "said").exists() else []


def test_nothing_is_left_of_a_launcher_that_ends_at_once(tmp_path: Path) -> None:
    """As one that refuses its config: what ranks would be forked from goes on with no import, and says nothing."""
    (tmp_path / "slow.py").write_text("import time; time.sleep(0.5); open('ran', 'w'); 1 / 0")
    script = "import os; from megacore.launcher.processes import prepare; prepare(['slow'], {}); os._exit(0)"
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and not (tmp_path / "ran").exists()


def test_ranks_of_one_machine_meet_on_loopback(module: Callable[[str], str], tmp_path: Path) -> None:
    text = """
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "EXTRA")
say(",".join([*(os.environ[name] for name in names), os.environ["MEGACORE_STORE"][:16], *sys.argv[1:]]))
sys.exit("" in sys.path or (os.getcwd() in sys.path and os.getcwd() not in os.environ.get("PYTHONPATH", "")))
"""
    assert launch(module(text), ["a b"], Node(2), {"EXTRA": "more"}) == 0
    here = [f"{rank},2,{rank},2,lo,lo,more,tcp://127.0.0.1:,a" for rank in range(2)]
    assert sorted(line for line in said(tmp_path) if line != "b") == here


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        ("", 0, ""),
        ("sys.exit(2)", 2, ""),  # it has said what was wrong
        ("if rank == 1: os._exit(77)\ntime.sleep(60)", 77, "Rank 1 (process {}) ended: ended with status 77."),
        ("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)", 137, "Rank 1 (process {}) ended: SIGKILL"),
        ("if rank == 1: {}[3]\ntime.sleep(60)", 1, ""),
    ],
    ids=["well", "said", "status", "killed", "raised"],
)
def test_the_first_that_fails_ends_all(
    module: Callable[[str], str], capfd: pytest.CaptureFixture[str], text: str, status: int, told: str
) -> None:
    started = time.monotonic()
    assert launch(module(text), [], Node(2)) == status and time.monotonic() - started < 30
    shown = capfd.readouterr().err
    assert all(part in shown for part in told.split("{}"))


def test_ctrl_c_asks_each_rank_once_to_end(module: Callable[[str], str], tmp_path: Path) -> None:
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

    def send() -> None:
        while len(said(tmp_path)) < 2:
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    assert launch(module(text), [], Node(2)) == 130
    assert sorted(said(tmp_path)) == ["asked"] * 2 + ["ready"] * 2


def test_handlers_and_environment_are_what_they_were(module: Callable[[str], str]) -> None:
    def state() -> object:
        handlers = [signal.getsignal(number) for number in (*ENDS, *ASKS)]
        return handlers, signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.environ.get("EXTRA"), sys.modules["__main__"]

    before = state()
    launch(module(""), [], Node(1), {"EXTRA": "more"})
    assert state() == before


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


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("platform", ["linux", "another"])
@pytest.mark.parametrize(("after", "lived"), [("0.3", "alive\n"), ("0", "")], ids=["later", "before it looked"])
def test_nobody_outlives_a_launcher_that_was_killed(platform: str, after: str, lived: str) -> None:
    started = time.monotonic()
    command = [sys.executable, "-c", ORPHAN, platform, after]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=50, check=False)  # till EOF
    assert done.stdout == lived and time.monotonic() - started < 30
