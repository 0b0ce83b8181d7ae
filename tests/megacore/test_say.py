"""What files say can do nothing to a terminal, and never breaks the line that tells it."""

import io
import json
import os
import subprocess
import sys

import pytest

from megacore import say as module
from megacore.say import brief, err, harmless, say, say_data, write_out

Capture = pytest.CaptureFixture[str]
EVIL = "a\x1b[2J\x9b1m\r\x07\x00\u202eb\ud800\u2028"


def test_control_characters_are_spelled_out_and_languages_stay(capsys: Capture) -> None:
    say(f"{EVIL}\nb\tc")
    err(EVIL)
    found = capsys.readouterr()
    assert found.out == "a\\x1b[2J\\x9b1m\\r\\x07\\x00\\u202eb\\ud800\\u2028\nb\tc\n"
    assert found.err == found.out.replace("\nb\tc", "")
    text = "déjà vu, 日本\u3000語, نمی‌خواهم, 👩‍💻, 12\u202f000\u00a0€\n"
    assert harmless(text) == text


def test_data_is_json_of_printable_characters(capsys: Capture) -> None:
    value = {EVIL: [EVIL, 1, None], "é": "日\U000e0001"}
    for indent in (None, 1):
        say_data(value, indent)
        shown = capsys.readouterr().out
        assert json.loads(shown) == value and "é" in shown and "日" in shown
        assert all(char.isprintable() or char == "\n" for char in shown)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminals_that_know_fewer_characters(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    say("日")
    say_data("日")
    assert raw.getvalue() == b'\\u65e5\n"\\u65e5"\n'


def test_values_are_told_in_a_line() -> None:
    assert brief("plain é") == "plain é" and brief(7) == "7" and brief(None) == "None"
    assert brief("a\nSound: every tensor is what it was") == "'a\\nSound: every tensor is what it was'"
    assert brief("") == "''" and brief("\x1b[2J") == "'\\x1b[2J'"
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for long in ("x" * 10**6, {"x": ["y" * 10**6] * 10**4}, 10**4000, deep):
        assert len(brief(long)) < 1000


def test_a_model_s_text_is_wanted_as_it_is(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, shown in (False, "a\x1b[2J"), (True, "a\\x1b[2J"):
        monkeypatch.setattr(module.sys.stdout, "isatty", lambda terminal=terminal: terminal)
        write_out("a\x1b[2J")
        assert capsys.readouterr().out == shown


SPEAKS = """
from megacore.say import err, outlive, say

outlive()
for line in range(3):
    say(f"line {line}")
err("done")
"""


@pytest.mark.parametrize("reason", ["Broken pipe", "No space left on device"])
def test_a_run_outlives_who_reads_it_and_says_so_once(reason: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-c", SPEAKS]
    with open("/dev/full", "w") as full, os.fdopen(writes, "w") as closed:
        lost = closed if reason == "Broken pipe" else full
        done = subprocess.run(command, stdout=lost, stderr=subprocess.PIPE, text=True, check=True)
        subprocess.run(command, stdout=lost, stderr=lost, check=True)
    said = f"what is said on stdout is lost ({reason}): the run goes on, `megacore status` tells how\n"
    assert done.stderr == f"{said}done\n"


def test_what_a_run_says_is_not_kept_back() -> None:
    """Progress bars and callbacks write lines without flushing them; a kill leaves no time for that."""
    code = "import os, sys; from megacore.say import outlive; outlive()\n"
    code += "for each in (sys.stdout, sys.stderr): each.write('told\\n')\nos._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("told\n", "told\n")
