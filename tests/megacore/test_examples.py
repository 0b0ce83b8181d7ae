"""Files of examples: what is kept, cut, dropped and skipped, in words and numbers; made once, whoever asks."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import FAMILIES, chat, write_jsonl, write_tokenizer

from megacore.config import ChatConfig
from megacore.data import examples as module
from megacore.data import text
from megacore.data.examples import ExampleFiles, Examples, Preparation
from megacore.data.model_tokenizer import ModelFiles
from megacore.data.text import InputError
from megacore.store.tensor_files.companions import Companion

VOCABULARY = 400


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    family = FAMILIES["chatml"]
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), family.template, family.end)
    return ModelFiles({path.name: Companion(path) for path in folder.iterdir()}, {"model_type": "llama"}, VOCABULARY)


def prepared(path: Path, files: ModelFiles, length: int = 200, **rules: Any) -> Examples:
    source = ExampleFiles(str(path), [path])
    return Preparation(source, path.parent / "examples", ChatConfig(**rules), length, files).examples()


def turns(*words: str) -> dict[str, Any]:
    return {"messages": chat(*words)}


SIZES = [turns("hi", "yes"), {"prompt": "two ", "completion": "three"}, {"text": "something"}]


def test_examples_come_back_with_what_counts(tmp_path: Path, files: ModelFiles) -> None:
    found = prepared(write_jsonl(tmp_path / "a.jsonl", "", *SIZES, "  "), files)
    assert found.count == 3 and found.facts.examples == 3
    tokens = [found.example(index) for index in range(3)]
    for ids, counted in tokens:
        assert counted.dtype == bool and ids.shape == counted.shape
        assert not counted[0] and counted[-1]  # nothing after the last that counts is kept
        assert len(set(ids[~counted].tolist())) > 0
    assert tokens[2][1].sum() == tokens[2][0].size - 1
    assert found.facts.tokens == sum(ids.size for ids, _ in tokens) == found.lengths.sum()
    assert found.facts.counted == sum(counted.sum() for _, counted in tokens)
    assert found.facts.vocabulary == max(int(ids.max()) for ids, _ in tokens) + 1
    assert (found.facts.cut, found.facts.dropped, found.facts.skipped) == (0, 0, 0)


def test_prepared_examples_of_others_are_told(tmp_path: Path, files: ModelFiles) -> None:
    """In the folder of a run that somebody else has made."""
    path = write_jsonl(tmp_path / "a.jsonl", *SIZES)
    prepared(path, files)
    (folder,) = (tmp_path / "examples").glob("a-*")
    for said in ("[]", '{"faults": 1}', '{"faults": [], "x": 1}', "[" * 9999):
        (folder / module.FACTS).write_text(said)
        with pytest.raises(InputError, match="is not as it was prepared: remove it"):
            prepared(path, files)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a link"):
        prepared(path, files)


def test_what_is_too_long_is_cut_to_its_beginning(tmp_path: Path, files: ModelFiles) -> None:
    """A line keeps its first tokens while one of them counts; what would keep none that counts is dropped."""
    long = turns("hi", "a b c d e f g", "more", "never seen " * 20)
    buried = turns("never answered " * 30, "yes")
    path = write_jsonl(tmp_path / "a.jsonl", long, buried, SIZES[0])
    whole, short = prepared(path, files, length=400), prepared(path, files, length=40)
    assert (short.facts.examples, short.facts.cut, short.facts.dropped) == (2, 1, 1)
    cut, counted = short.example(0)
    kept, counts = whole.example(0)
    assert cut.tolist() == kept[: cut.size].tolist() and counted.tolist() == counts[: cut.size].tolist()
    assert counted[-1] and cut.size <= 41 and not counts[cut.size : 41].any()
    dropped = prepared(path, files, length=40, too_long="drop")
    assert (dropped.facts.examples, dropped.facts.cut, dropped.facts.dropped) == (1, 0, 2)
    exact = int(whole.lengths[0]) - 1  # the last token is predicted alone
    assert prepared(path, files, length=exact, too_long="drop").facts.dropped == int(whole.lengths[1] > exact + 1)
    with pytest.raises(InputError, match=r"no examples to train on: 0 bad lines, 3 dropped .*sequence_length=3"):
        prepared(path, files, length=3, too_long="drop")


BAD: list[object] = [
    "{not json",
    "[1, 2]",
    {"messages": []},
    {"messages": [{"role": "bot", "content": "x"}]},
    {"messages": [{"role": "user", "content": "x"}]},
    turns("x", "  "),
    turns("x", "y") | {"tools": 3},
    {"text": 5},
    {"other": "x"},
]


def test_bad_lines_stop_with_the_first_ten_by_number_and_reason(tmp_path: Path, files: ModelFiles) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", SIZES[0], *BAD, SIZES[1], *BAD)
    with pytest.raises(InputError) as error:
        prepared(path, files)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{path} has 18 bad line(s): mend them, or leave them out by chat.bad_lines=skip"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        *(f"{path}, line {number}" for number in [*range(2, 11), 12]),
        "and 8 more",
    ]
    said = "not JSON, a JSON list, no messages, role 'bot', no turn of the assistant, says nothing, tools is"
    assert all(words in line for line, words in zip(lines[1:], said.split(", "), strict=False))
    assert not list((tmp_path / "examples").glob("[!.]*")), "nothing is left that looks prepared"


def test_bad_lines_are_skipped_and_counted_by_choice(tmp_path: Path, files: ModelFiles) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", SIZES[0], *BAD, SIZES[1])
    path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n' + b"[" * 100_000 + b"\n")
    found = prepared(path, files, bad_lines="skip")
    faults = found.facts.faults
    assert (found.count, found.facts.skipped, len(faults)) == (2, 11, 10)
    assert faults[0].startswith(f"{path}, line 2: not JSON") and faults[9].startswith(f"{path}, line 12: not UTF-8")
    with path.open("wb") as file:
        file.write(b"[" * 100_000 + b"\n")
    with pytest.raises(InputError, match="line 1: not JSON that can be read: it is nested too deeply"):
        prepared(path, files)
    good = prepared(write_jsonl(tmp_path / "b.jsonl", SIZES[0], SIZES[1]), files)
    for index in range(2):
        assert all(np.array_equal(a, b) for a, b in zip(found.example(index), good.example(index), strict=True))
    with pytest.raises(InputError, match="no examples to train on: 9 bad lines"):
        prepared(write_jsonl(tmp_path / "c.jsonl", *BAD), files, bad_lines="skip")


def test_an_example_of_which_nothing_counts_is_a_bad_line(tmp_path: Path, files: ModelFiles) -> None:
    marks = tmp_path / "chat_template.jinja"
    marks.write_text("{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}")
    files = replace(files, files={**files.files, marks.name: Companion(marks)})
    with pytest.raises(InputError, match="line 1: the loss would count none of its tokens"):
        prepared(write_jsonl(tmp_path / "a.jsonl", SIZES[0]), files)


def same(one: Examples, two: Examples) -> bool:
    pairs = [(one.example(index), two.example(index)) for index in range(one.count)]
    return one.count == two.count and all(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]) for a, b in pairs)


def write_parquet(path: Path, rows: Sequence[object], group: int) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=group)
    return path


def test_rows_of_tables_are_the_same_examples_and_are_named_by_number(tmp_path: Path, files: ModelFiles) -> None:
    rows: list[Any] = [turns("hi", "yes"), turns("so", "what", "then", "this"), turns("a", "b")]
    rows[1]["messages"][1]["note"] = "kept apart"  # a field of one message is null in all others
    path = write_parquet(tmp_path / "a.parquet", rows, group=2)
    assert len(text.cut(path)) == 2
    assert same(prepared(path, files), prepared(write_jsonl(tmp_path / "b.jsonl", *rows), files))
    rows[2]["messages"][1]["content"] = " "
    bad = write_parquet(tmp_path / "c.parquet", rows, group=2)
    with pytest.raises(InputError, match=r"c\.parquet, row 2: message 2: the assistant says nothing"):
        prepared(bad, files)


def test_calls_in_tables_have_no_arguments_of_other_calls(tmp_path: Path) -> None:
    calls = [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "sum", "arguments": {"of": [1, 2]}}]
    rows = [{"messages": [{"role": "assistant", "tool_calls": [{"function": call}]}]} for call in calls]
    (piece,) = text.cut(write_parquet(tmp_path / "a.parquet", rows, group=2))
    assert [row.values for row in text.rows(piece) if isinstance(row, text.Record)] == rows


# -- once


@pytest.mark.in_turn(2, 1)
def test_they_are_made_once_and_again_when_something_has_changed(
    tmp_path: Path, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = write_jsonl(tmp_path / "a.jsonl", *SIZES), list[Path]()
    original = Preparation._prepare

    def counted(self: Preparation, target: Path) -> None:
        calls.append(target)
        original(self, target)

    monkeypatch.setattr(Preparation, "_prepare", counted)
    marks = tmp_path / "chat_template.jinja"
    marks.write_text(FAMILIES["marks"].template)
    for number, (other, rules) in enumerate(
        [
            (files, {}),
            (files, {"train_on": "last"}),
            (files, {"too_long": "drop"}),
            (files, {"bad_lines": "skip"}),
            (files, {"length": 150}),
            (replace(files, files={**files.files, marks.name: Companion(marks)}), {}),
        ],
        start=1,
    ):
        for _ in range(2):
            prepared(path, other, **rules)  # type: ignore[arg-type]
            assert len(set(calls)) == len(calls) == number
    prepared(path, files, pack=False)
    assert len(calls) == number, "packing comes later"
    write_jsonl(path, *SIZES[:2], {"text": "different"})  # as long as it was
    prepared(path, files)
    assert len(calls) == number + 1
    write_jsonl(path, *SIZES, *SIZES)
    assert prepared(path, files).count == 6


def test_who_comes_second_waits_for_the_first(
    tmp_path: Path, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = write_jsonl(tmp_path / "a.jsonl", *SIZES), []
    original, begun, go = Preparation._prepare, threading.Event(), threading.Event()

    def slow(self: Preparation, target: Path) -> None:
        calls.append(target)
        begun.set()
        assert go.wait(10)
        original(self, target)

    monkeypatch.setattr(Preparation, "_prepare", slow)
    found: list[Examples] = []
    threads = [threading.Thread(target=lambda: found.append(prepared(path, files))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(calls) == 1 and len(found) == 3


@pytest.mark.in_turn(6, 2)
@pytest.mark.slow
def test_several_processes_make_the_same_bytes(
    tmp_path: Path, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [turns(f"question {number} " * 5, f"answer {number} " * (number % 7 + 1)) for number in range(300)]
    path = write_jsonl(tmp_path / "a.jsonl", *rows, "{")
    made = []
    for size, worker in ((2**22, 2**23), (4096, 4096)):
        monkeypatch.setattr(text, "LINES", size)
        monkeypatch.setattr("megacore.data.grouping.AT_ONCE", size)
        monkeypatch.setattr(module, "WORKER", worker)
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        folder = tmp_path / f"by-{size}"
        Preparation(ExampleFiles(str(path), [path]), folder, ChatConfig(bad_lines="skip"), 200, files).examples()
        (target,) = folder.glob("[!.]*")
        made.append({file.name: file.read_bytes() for file in target.iterdir()})
    assert made[0] == made[1] and made[0].keys() == {"examples.bin", "examples.idx", "examples.json"}
