"""The launcher passes on the status of its processes, and leaves the talking to them."""

import subprocess
import sys
from pathlib import Path

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
