"""The ``megacore`` command: it finds each program, hands on its arguments and gives back its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools.main import COMMANDS, main


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the program behind ``tokenize`` was called with, instead of running."""
    calls: list[list[str]] = []
    stand_in = ModuleType("stand_in")

    def called(argv: list[str]) -> int:
        calls.append(argv)
        return 7

    stand_in.main = called  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, COMMANDS["tokenize"][0], stand_in)
    return calls


def test_arguments_go_on_as_they_are_and_the_status_comes_back(program: list[list[str]]) -> None:
    arguments = ["text", "--out", "corpus", "--help", "-x", "--", "--", "tokenize"]
    assert main(["tokenize", *arguments]) == 7
    assert main(["tokenize"]) == 7
    assert program == [arguments, []]


def test_the_command_line_is_that_of_the_process(program: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["megacore", "tokenize", "text"])
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    assert main() == 7
    assert program == [["text"]]
    assert os.environ["PYTHONSAFEPATH"] == "1", "what it starts would import from the working folder"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown and what in shown for name, (_, what) in COMMANDS.items())


@pytest.mark.parametrize("arguments", [[], ["tokenise"]], ids=["none", "misspelt"])
def test_what_is_no_command_is_refused_with_the_choices(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert "command" in shown
    assert not arguments or "tokenize" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_program_is_there_and_speaks_for_itself(command: str) -> None:
    root = Path(__file__).parents[2]
    line = [sys.executable, "-m", "tools.main", command, "--help"]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert f"megacore {command}" in done.stdout


def test_looking_for_a_command_imports_no_torch() -> None:
    root = Path(__file__).parents[2]
    code = "import sys, tools.main; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=True)
