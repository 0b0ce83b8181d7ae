"""What tokenizers and templates of strangers do is done elsewhere, and ends."""

import fcntl
import json
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chats import FAMILIES, chat, write_jsonl, write_tokenizer

from megacore.data.guard import Guard, GuardError
from megacore.data.model_tokenizer import GuardedTokenizer
from megacore.data.text import InputError, Record, cut, rows
from megacore.data.tokenizer import load
from megacore.parallel import limits


class Anything:
    """Does what it is told to."""

    def do(self, how: str, *arguments: object) -> object:
        return getattr(self, how)(*arguments)

    def loop(self) -> None:
        while True:
            pass

    def fill(self) -> int:
        return len(bytearray(2 * limits.MEMORY))

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def panic(self) -> None:
        raise type("PanicException", (BaseException,), {})("called `unwrap()`")

    def fail(self, kind: type[Exception]) -> None:
        raise kind("no\x1b" + "x" * 10**6)

    def process(self) -> int:
        return os.getpid()

    def give(self, what: object) -> object:
        return what

    def answer(self, *messages: bytes) -> None:
        """Say what no honest one does, as whoever has taken over the process could."""
        (connection,) = (fd for fd in range(3, 1000) if Path(f"/proc/self/fd/{fd}").exists())
        for message in messages:
            os.write(connection, struct.pack("!i", len(message)) + message)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 1)
    monkeypatch.setattr(limits, "MEMORY", 2**28)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("loop", "takes more than 1 s of computing"),
        ("fill", "takes more than 268,435,456 bytes of memory"),
        ("kill", "bytes of memory, or crashes"),
        ("panic", "called `unwrap"),
    ],
)
def test_what_comes_to_harm_is_an_error(how: str, says: str, strict: None) -> None:
    guard = Guard(Anything)
    with pytest.raises(GuardError, match=says):
        guard.call(how)
    assert guard.call("process") if how in ("fill", "panic") else True


def test_an_error_is_passed_on_and_cut(strict: None) -> None:
    guard = Guard(Anything, (InputError,))
    with pytest.raises(InputError) as passed:
        guard.call("fail", InputError)
    with pytest.raises(GuardError) as other:
        guard.call("fail", KeyError)
    assert max(len(str(passed.value)), len(str(other.value))) <= limits.MESSAGE_LINE + len(" [...] ")
    with pytest.raises(GuardError, match="takes more than"):
        Guard(lambda: Anything().fill())


def test_nothing_that_it_says_runs_here(tmp_path: Path) -> None:
    """What is said is a pickle of (None, what a call gives), and to read it is to make a folder."""
    guard = Guard(Anything)
    with pytest.raises(GuardError, match="no answer"):
        guard.call("answer", f"(Ncos\nmkdir\n(S'{tmp_path / 'ran'}'\ntRt.".encode())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "messages",
    [
        [b"3"],
        [b"[]"],
        [b"[null, 1]"],
        [b"[null, 1, [[]]]"],
        [b'[null, {"array": 0}, []]'],
        [b'[null, {"array": 0}, [["object", 1]]]', b"x" * 8],
        [b'[null, {"array": 0}, [["int64", 2]]]', b"x" * 8],
        [b'[null, {"array": 0}, [["int64", 1]]]', b"x" * 9],
        [b"[" * 10**5],
        [b"\xff"],
    ],
)
def test_what_is_no_answer_is_an_error(messages: list[bytes]) -> None:
    guard = Guard(Anything)
    with pytest.raises(GuardError, match="no answer"):
        guard.call("answer", *messages)


def test_what_is_given_comes_as_it_is() -> None:
    guard = Guard(Anything)
    for plain in (None, True, 3, 2**70, "a\ud800\x00", [1, [2.5, None]], []):
        assert guard.call("give", plain) == plain
    ids, flags = np.arange(3, dtype=np.int32), np.array([True, False])
    numbers, [empty, some] = guard.call("give", (ids, [np.empty(0, np.int64), flags]))
    assert numbers.dtype == np.int32 and numbers.tolist() == [0, 1, 2] and numbers.flags.writeable
    assert empty.dtype == np.int64 and empty.size == 0 and some.dtype == np.bool_ and some.tolist() == [True, False]
    for other in (object(), {1, 2}, np.zeros((1, 1)), np.zeros(1, np.float16)):
        with pytest.raises(GuardError, match="neither JSON nor an array"):
            guard.call("give", other)


def test_it_holds_nothing_and_ends_with_its_owner(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        guard = Guard(Anything)
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a fork shares it, unless it closes it
    process = guard.call("process")
    assert process != os.getpid()
    del guard
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


# -- tokenizers and templates that explode


def tokenizer(folder: Path, **changes: object) -> Path:
    """A folder with a tokenizer of which some parts are others."""
    write_tokenizer(folder, FAMILIES["chatml"].template)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def splitting(pattern: str) -> dict[str, object]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": split}


def replacing(times: int) -> dict[str, object]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}
    return {"normalizer": {"type": "Sequence", "normalizers": [step] * times}}


EXPLODING: dict[str, Callable[[Path], Path]] = {
    "regex": lambda folder: tokenizer(folder, **splitting("(a|a|a|a|aa)+$")),
    "replace": lambda folder: tokenizer(folder, **replacing(12)),
    "post-processor": lambda folder: tokenizer(folder, post_processor={"type": "TemplateProcessing"}),
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", EXPLODING)
def test_a_tokenizer_that_explodes_is_an_error(name: str, tmp_path: Path, strict: None) -> None:
    folder = EXPLODING[name](tmp_path)
    with pytest.raises(InputError, match=r"tokenizer"):
        load(folder).encode(["a" * 10_000 + "!"])


TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "product": "{{ 'a' * 10000000000 }}",
    "replace": "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_explodes_is_an_error(name: str, tmp_path: Path, strict: None) -> None:
    spelling = GuardedTokenizer(write_tokenizer(tmp_path, TEMPLATES[name]))
    (row,) = rows(cut(write_jsonl(tmp_path / "a.jsonl", {"messages": chat("hi", "hello")}))[0])
    assert isinstance(row, Record)
    try:
        (found,) = spelling.examples([row], "assistant")
        assert "a.jsonl, line 1: the chat template fails" in str(found)
    except InputError as error:
        assert "a.jsonl, line 1: the model's tokenizer or chat template fails on it: takes more than" in str(error)
