"""The launcher passes on the status of its processes, and leaves the talking to them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megacore.elastic", "--standalone", "--nproc-per-node=1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_problem_is_said_once_and_plainly() -> None:
    done = launch("-m", "megacore.pretrain", "nowhere.yaml")
    assert done.returncode == 2
    assert done.stderr.count("there is no recipe nowhere.yaml") == 1
    assert "Root Cause" not in done.stderr and "Traceback" not in done.stderr


def test_a_process_that_dies_without_a_word_is_reported(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nos._exit(77)\n")
    done = launch(str(tmp_path / "dies.py"))
    assert done.returncode == 77
    assert "exitcode  : 77" in done.stderr


# os.write, for print writes a line and its end apart where PYTHONUNBUFFERED is set, and two processes share the pipe.
LISTENS = """
import os, signal
assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "one that comes now would kill"
os.write(1, b"ready\\n")
signal.sigwait({signal.SIGUSR1})
os.write(1, b"saved\\n")
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists the children of a process")
def test_a_wish_for_a_checkpoint_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "listens.py").write_text(LISTENS)
    command = [sys.executable, "-m", "megacore.elastic", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen([*command, str(tmp_path / "listens.py")], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=60)[0] == "saved\n" * 2
    finally:
        process.kill()
    assert process.returncode == 0
