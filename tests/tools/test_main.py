"""The ``megacore`` command: it finds each program, hands on its arguments and gives back its exit status."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import megacore
from megacore import exits
from megacore.data.indexed import IndexedWriter
from megacore.tools.main import CLOSED_PIPE, COMMANDS, OTHER_NAMES, main


def test_arguments_go_on_as_they_are_and_the_status_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none are given, they are the process's."""
    program = mock.Mock(return_value=7)
    monkeypatch.setitem(sys.modules, COMMANDS["tokenize"][0], SimpleNamespace(main=program))
    monkeypatch.setattr(sys, "argv", ["megacore", "tokenize", "text"])
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    arguments = ["text", "--out", "corpus", "--help", "-x", "--", "--", "tokenize"]
    assert main(["tokenize", *arguments]) == main(["tokenize"]) == main() == 7
    assert [call.args[0] for call in program.call_args_list] == [arguments, [], ["text"]]
    assert os.environ["PYTHONSAFEPATH"] == "1", "what it starts would import from the working folder"


@pytest.mark.parametrize("arguments", [["--help"], []], ids=["asked", "bare"])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*arguments) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and what in shown for name, (_, what) in COMMANDS.items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("tokenise", "no command 'tokenise': did you mean tokenize?"),
        ("trian", "did you mean train?"),
        ("pretrain", "did you mean train?"),
        ("eval", "did you mean evaluate?"),
        ("xyz", "no command 'xyz'; megacore --help lists all"),
    ],
)
def test_what_is_no_command_leads_to_one(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(given) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tr", {"train"}),
        ("train llama-3.1-8b", {"llama-3.1-8b"}),
        ("train llama-3.1-8b optimizer.mo", {"optimizer.moments="}),
        ("train --dr", {"--dry-run"}),
        ("convert --ch", {"--chunks"}),
    ],
)
def test_a_shell_completes(typed: str, offered: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    line, out = f"megacore {typed}", tmp_path / "offered"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    asked |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    ended = subprocess.run([sys.executable, "-m", "megacore"], env=os.environ | asked, check=False, timeout=60)
    assert ended.returncode == 0 and {each.strip() for each in out.read_text().split("\n")} == offered


def test_other_names_lead_to_commands() -> None:
    assert set(OTHER_NAMES.values()) <= set(COMMANDS) and OTHER_NAMES.keys().isdisjoint(COMMANDS)


@contextmanager
def closed() -> Iterator[None]:
    """Standard output is a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output, redirect_stdout(output):
        yield
        output.flush()  # as at exit: nothing is raised any more


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["inspect", "--help"],
        ["plan", "launch/recipes/quickstart.yaml", "--json"],
        ["inspect", "corpus"],
        ["tokenize", "README.md", "--out", "corpus", "--train-vocab", "300", "--workers", "1", "--overwrite"],
    ],
    ids=["help", "help of a command", "plan", "inspect", "tokenize"],
)
def test_where_nobody_reads_on_nothing_is_said(
    arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if "corpus" in arguments:
        with IndexedWriter(tmp_path / "corpus", 50) as writer:
            writer.write([1])
    given = [str(tmp_path / each) if each == "corpus" else each for each in arguments]
    with closed():
        assert main(given) == 141
    assert "roken pipe" not in capfd.readouterr().err


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_program_is_there_and_speaks_for_itself(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert status(command, "--help") == 0 and f"megacore {command}" in capsys.readouterr().out
    assert status(command, "--no-such-option") == 2
    said = capsys.readouterr().err
    assert f"megacore {command}: error: " in said and len(said.splitlines()) <= 24, "more than a screen"


def status(*arguments: str) -> object:
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


STATUSES: list[tuple[str, int]] = [
    ("config", 0),
    ("inspect nowhere", 1),
    ("tokenize nowhere --out made --train-vocab 300", 1),
    ("merge-tokens nowhere", 1),
    ("status nowhere", 1),
    ("verify nowhere nowhere", 1),
    ("", 0),
    ("--version", 0),
    ("trian", 2),
    ("train", 2),
    ("train nowhere", 2),
    ("finetune quickstart --dry-run", 2),
    ("ray nowhere", 2),
    ("plan quickstart mesh.tp=3", 2),
    ("convert nowhere", 2),
    ("context --documents 8 --cp 4 --length 3", 2),
    ("config nothing", 2),
    ("models nothing", 2),
    ("status begun --done", 75),
    ("tokenize interrupted --out made --train-vocab 300", 130),
]
"""Commands and what they end with; 141 is tested above, and runs that end with 75, 76 or 143 in tests/recovery."""


@pytest.mark.parametrize(("line", "wanted"), STATUSES)
def test_a_status_says_how_it_ended(line: str, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megacore.launcher.command.prepare", lambda *_: None)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("train: {steps: 5}\n")
    if wanted == 130:
        monkeypatch.setattr("megacore.tools.tokenize.tokenize", mock.Mock(side_effect=KeyboardInterrupt))
    assert status(*line.split()) == wanted


def test_a_command_that_is_interrupted_while_it_is_imported_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megacore.tools.main.importlib.import_module", interrupted)
    assert (main(["convert", "here", "there"]), capsys.readouterr().err) == (130, "interrupted\n")


def test_a_command_that_is_run_by_its_module_says_how_it_is_run() -> None:
    """It would do nothing, and end with 0."""
    command = [sys.executable, "-m", "megacore.tools.merge_tokens"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "run it as `python -m megacore merge-tokens`\n")


def test_the_page_has_a_row_for_every_status() -> None:
    page = (Path(__file__).parents[2] / "docs/launch.md").read_text()
    page = page.partition("## Exit statuses")[2].partition("##")[0]
    rows = {int(each) for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for each in row.split(",")}
    assert rows == {*(wanted for _, wanted in STATUSES), *exits.MEANING, exits.of_signal(signal.SIGTERM), CLOSED_PIPE}


def test_the_version_is_told_by_the_module_too() -> None:
    line = [sys.executable, "-m", "megacore", "--version"]
    done = subprocess.run(line, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"megacore {megacore.__version__}\n"


def test_looking_for_a_command_imports_no_torch() -> None:
    root = Path(__file__).parents[2]
    code = "import sys, tools.main; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=True)
