"""The launch scripts: what they make of their arguments, with a Python that only writes down how it is called."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = "launch/recipes/quickstart.yaml"
PYTHON = """#!/usr/bin/env bash
printf '%q ' "$@" >>"{log}"; echo >>"{log}"
if [[ "$*" == *" processes "* ]]; then echo 2; elif [[ "$1" == -c ]]; then echo 0; fi
"""


def launch(folder: Path, *arguments: str, script: str = "pretrain") -> tuple[list[list[str]], str]:
    """(the arguments of each call of Python, what was said)."""
    log = folder / "calls"
    log.unlink(missing_ok=True)
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "python").write_text(PYTHON.format(log=log))
    (folder / "bin" / "python").chmod(0o755)
    environment = os.environ | {"MEGACORE_VENV": str(folder)}
    # As if Megacore had been installed there.
    install = f'source launch/lib.sh && fingerprint >"{folder}/.megacore-run"'
    subprocess.run(["bash", "-c", install], cwd=ROOT, env=environment, check=True)
    done = subprocess.run(
        [f"launch/{script}.sh", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return [shlex.split(line) for line in log.read_text().splitlines()] if log.exists() else [], done.stderr


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["train.steps=3"], ["train.steps=3"]),
        (["--init", "a b", "train.steps=3"], ["train.steps=3", "checkpoint.init=a b"]),
        (["--resume=auto", "--init=x=y"], ["checkpoint.resume=auto", "checkpoint.init=x=y"]),
    ],
)
def test_options_become_overrides_everywhere(tmp_path: Path, given: list[str], passed: list[str]) -> None:
    calls, _ = launch(tmp_path, RECIPE, *given)
    processes, check, run = calls[-3:]
    assert processes[:3] == ["-m", "megacore.config", "processes"]
    assert check[:3] == ["-m", "megacore.pretrain", "--check"]
    assert run[:2] == ["-m", "megacore.elastic"]
    for call in (processes, check, run):
        assert call[-1 - len(passed) :] == [RECIPE, *passed]
    assert "--shutdown-timeout=600" in run


def test_an_option_may_come_first(tmp_path: Path) -> None:
    assert launch(tmp_path, "--resume", "auto", RECIPE)[0][-1][-2:] == [RECIPE, "checkpoint.resume=auto"]


def test_fine_tuning_is_the_same_run_with_an_export(tmp_path: Path) -> None:
    given = [RECIPE, "--init", "a", "--export=b c", "train.steps=3"]
    calls, _ = launch(tmp_path, *given, script="finetune")
    passed = [RECIPE, "train.steps=3", "checkpoint.init=a", "checkpoint.export=b c"]
    assert calls == launch(tmp_path, *passed)[0]
    assert calls[-1][-4:] == passed
    assert "usage: launch/finetune.sh" in launch(tmp_path, script="finetune")[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "usage: "),
        (["--resume"], "--resume needs a folder"),
        (["--resume", "auto"], "usage: "),
        (["--x"], "usage: "),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, given: list[str], said: str) -> None:
    calls, errors = launch(tmp_path, *given)
    assert said in errors and not calls
