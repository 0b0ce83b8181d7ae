"""Examples in the formats that people have, beside what transformers makes of the same chats, written out by hand, and
TRL of drawn ones."""

import gzip
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import FAMILIES, TEXT, Message, Row, prepared, write_jsonl, write_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megacore.config import EXAMPLE_KEYS, Config, CorpusConfig, DataConfig
from megacore.data import text
from megacore.data.corpora import _remarks
from megacore.data.data_sets import files_of, resolved
from megacore.data.examples import ExampleFiles
from megacore.data.formats import KEYS, BadExample, example, format_of, renamed
from megacore.data.text import InputError
from megacore.parallel import limits
from megacore.recipe import load

TEMPLATES = ("chatml", "llama-3", "qwen2.5", "phi-4", "smollm3")
WITHOUT = dict.fromkeys(("chatml", "phi-4", "smollm3"), ("calls", "ShareGPT-tools")) | {"llama-3": ("ShareGPT-tools",)}
"""Cases of tools that a template writes nothing of, or not beside a system prompt."""
TOOLS = [{"type": "function", "function": {"name": "warmth", "description": "of a city", "parameters": {}}}]
CALL = {"name": "warmth", "arguments": {"city": "Rome"}}


def said(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": content} for role, content in turns]


def from_(*turns: tuple[str, str]) -> list[dict[str, str]]:
    """As ShareGPT has them."""
    return [{"from": who, "value": value} for who, value in turns]


CALLED: list[Message] = [
    *said(("user", "how warm?")),
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    *said(("tool", "21"), ("assistant", "21 degrees")),
]
ANSWERED = said(("user", "hi"), ("assistant", "hello"), ("user", "and?"), ("assistant", "so"))


@dataclass(frozen=True)
class Case:
    """A row; the messages (and tools) that it stands for, or text, of which `learned` is."""

    row: Row
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    learned: tuple[str, str] | None = None
    keys: Mapping[str, str] | None = None


CASES: Mapping[str, Case] = {
    "messages": Case({"id": 3, "messages": ANSWERED}, ANSWERED),
    "calls": Case({"messages": CALLED, "tools": TOOLS}, CALLED, TOOLS),
    "ShareGPT": Case(
        {
            "conversations": from_(
                *(("system", "be brief"), ("human", " hi\nthere"), ("gpt", "hello"), ("user", "and?")),
                *(("chatgpt", "so: ünï 🙂"), ("human", "never answered")),
            )
        },
        said(("system", "be brief"), ("user", " hi\nthere"), ("assistant", "hello"), ("user", "and?"))
        + said(("assistant", "so: ünï 🙂")),
    ),
    "ShareGPT-tools": Case(
        {
            "system": "be brief",
            "tools": json.dumps(TOOLS),
            "conversations": from_(
                *(("human", "how warm?"), ("function_call", json.dumps(CALL))),
                *(("observation", "21"), ("gpt", "21 degrees")),
            ),
        },
        [*said(("system", "be brief")), *CALLED],
        TOOLS,
    ),
    "Alpaca": Case(
        {"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "all of it once more"},
        said(("user", "Add.\n\n1 and 2"), ("assistant", "3")),
    ),
    "Alpaca-alone": Case(
        {"instruction": "Say hi.", "input": "", "output": "hi", "system": "be kind"},
        said(("system", "be kind"), ("user", "Say hi."), ("assistant", "hi")),
    ),
    "answered": Case(
        {"prompt": said(("user", "hi"), ("assistant", "x"), ("user", "and?")), "completion": said(("assistant", "so"))},
        [*said(("user", "hi"), ("assistant", "x"), ("user", "and?"), ("assistant", "so"))],
    ),
    "mapped-chat": Case(
        {"dialog": [{"speaker": "human", "text": "hi"}, {"speaker": "gpt", "text": "hello"}], "chosen": 1},
        said(("user", "hi"), ("assistant", "hello")),
        keys={"conversations": "dialog", "from": "speaker", "value": "text"},
    ),
    "chosen": Case(
        {"chosen": said(("user", "hi"), ("assistant", "hello")), "rejected": said(("user", "hi"))},
        said(("user", "hi"), ("assistant", "hello")),
        keys={"messages": "chosen"},
    ),
    "completion": Case({"prompt": "2 + 2 =", "completion": " 4"}, learned=("2 + 2 =", " 4")),
    "mapped": Case(
        {"question": "2 + 2 =", "answer": " 4", "prompt": "another thing"},
        learned=("2 + 2 =", " 4"),
        keys={"prompt": "question", "completion": "answer"},
    ),
    "text": Case({"text": "some words"}, learned=("", "some words")),
}
UNLEARNED = {"answered": 1}
"""A turn of the assistant, by its index, that is not learned."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return {name: FAMILIES[name].write(tmp_path_factory.mktemp(name)) for name in TEMPLATES}


def reference(tokenizer: Any, case: Case, unlearned: int | None) -> tuple[list[int], list[bool]]:
    """Tokens up to the last that is learned, and which are: by transformers alone."""
    if case.messages is None:
        assert case.learned is not None
        before = tokenizer(case.learned[0])["input_ids"] if case.learned[0] else []
        ids = tokenizer("".join(case.learned))["input_ids"] + [tokenizer.eos_token_id]
        first = 0 if tokenizer.bos_token is None or not ids or ids[0] != tokenizer.bos_token_id else 1
        mask = [index >= max(len(before), first, 1) for index in range(len(ids))]
        return ids, mask
    messages, tools = case.messages, case.tools

    def written(count: int, prompt: bool = False) -> list[int]:
        found = tokenizer.apply_chat_template(messages[:count], tools=tools, add_generation_prompt=prompt)
        return list(found["input_ids"])

    if "endgeneration" in tokenizer.chat_template:
        made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(made["input_ids"]), list(map(bool, made["assistant_masks"]))
        if unlearned is not None:
            mask[: len(written(unlearned + 1))] = [False] * len(written(unlearned + 1))
    else:
        ids = written(len(messages))
        mask = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant" and turn != unlearned:
                start, stop = len(written(turn, prompt=True)), len(written(turn + 1))
                while ids[stop - 1] not in tokenizer.added_tokens_decoder:  # blanks after the end of the turn
                    stop -= 1
                mask[start:stop] = [True] * (stop - start)
    size = len(mask) - mask[::-1].index(True)
    return ids[:size], mask[:size]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(folders: Mapping[str, Path], tmp_path: Path, template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders[template])
    chosen = {name: case for name, case in CASES.items() if name not in WITHOUT.get(template, ())}
    for keys in (None, *(case.keys for case in chosen.values() if case.keys)):
        here = {name: case for name, case in chosen.items() if case.keys == keys}
        path = write_jsonl(tmp_path / "a.jsonl", *(case.row for case in here.values()))
        found = prepared(ExampleFiles(str(path), [path], keys or {}), folders[template], tmp_path / "examples")
        assert found.count == len(here)
        for index, (name, case) in enumerate(here.items()):
            ids, counted = found.example(index)
            wanted, mask = reference(tokenizer, case, UNLEARNED.get(name))
            assert (ids.tolist(), counted.tolist()) == (wanted, mask), (name, tokenizer.decode(ids.tolist()))


# -- what is told


def test_what_was_recognised_is_told(folders: Mapping[str, Path], tmp_path: Path) -> None:
    rows = [CASES[name].row for name in ("ShareGPT", "Alpaca", "ShareGPT")]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    files = ExampleFiles("a.jsonl", [path])
    found = prepared(files, folders["chatml"], tmp_path / "examples").facts
    known = "a.jsonl: ShareGPT (conversations) in 2 rows, Alpaca (instruction, output) in 1 rows: 3 examples of "
    assert _remarks("a.jsonl", found, 64)[0].startswith(known)
    write_jsonl(path, rows[1])
    found = prepared(files, folders["chatml"], tmp_path / "examples").facts
    assert _remarks("a.jsonl", found, 64)[0].startswith("a.jsonl: Alpaca (instruction, output): 1 examples of ")
    assert sorted(KEYS) == sorted(EXAMPLE_KEYS)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"instruction": "a", "input": "b"}, "has 'instruction', 'input', no 'output': the nearest format is Alpaca"),
        ({"instruction": "a", "answer": "b"}, "by data.map={output: KEY}"),
        ({"conversation": []}, "no 'conversations': the nearest format is ShareGPT"),
        ({"conversation": []}, "by data.map={conversations: conversation}"),
        ({"Messages": []}, "by data.map={messages: Messages}"),
        ({"prompt": "a", "response": "b"}, "no 'completion': the nearest format is prompt and completion"),
        ({"question": "a", "answer": "b"}, "name its keys as in data.map={prompt: KEY, completion: KEY}"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "has 'chosen' and 'rejected', which are preferences"),
        ({"prompt": "a", "completion": "b", "label": False}, "has 'completion' and 'label', which are ratings"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "message 1 is from 'bot': choose from system"),
        ({"conversations": [{"from": "gpt", "text": "x"}]}, "the value of message 1 is null, not text"),
        ({"conversations": [{"who": "gpt", "says": "x"}]}, "no 'role' and no 'from' among 'who', 'says'"),
        ({"conversations": from_(("function_call", "f()"))}, "message 1 is no function call in JSON"),
        ({"conversations": from_(("function_call", "[3]"))}, "needs a 'name' and 'arguments'"),
        ({"conversations": "x"}, "conversations is a str, not a list"),
        ({"conversations": said(("system", "a")), "system": "b"}, "begin with one of their own"),
        ({"instruction": "a", "output": " \n"}, "the output is empty"),
        ({"instruction": "", "output": "b"}, "the instruction is empty"),
        ({"instruction": "a", "output": 3}, "output is a int, not text"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "has 'history' beside 'instruction'"),
        ({"completion": said(("assistant", "x")), "prompt": "a"}, "completion is a list, not text"),
        ({"x" * 99 + str(n): 1 for n in range(999)}, "of no format"),
    ],
)
def test_bad_rows_name_the_key_and_the_nearest_format(row: Row, words: str) -> None:
    with pytest.raises(BadExample) as error:
        example(row)
    assert words in str(error.value) and len(str(error.value)) < 2000


def test_a_key_that_is_mapped_and_missing_is_named() -> None:
    keys = {"prompt": "question", "completion": "answer", "content": "words"}
    with pytest.raises(BadExample, match=r"has no 'question', which data\.map names: it names 'question', 'answer'"):
        renamed({"answer": "b", "prompt": "a"}, keys)
    other = {"messages": said(("user", "a"))}
    assert renamed(other, keys) == other  # of another set of a blend
    assert format_of(renamed({"question": "a", "answer": "b", "text": "c"}, keys)).name == "prompt and completion"
    swapped = renamed({"prompt": "a", "completion": "b"}, {"prompt": "completion", "completion": "prompt"})
    assert swapped == {"prompt": "b", "completion": "a"}


def test_the_first_rows_are_looked_at_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = CASES["Alpaca"].row
    path = write_jsonl(tmp_path / "a.jsonl", *[good] * 3, {"foo": 1}, "{", *[good] * 5)
    files = ExampleFiles("own", [path])
    with pytest.raises(InputError) as error:
        files.look("stop")
    assert str(error.value).splitlines()[0].startswith("own has 2 bad line(s): mend them")
    assert [x.split(":")[0].strip() for x in str(error.value).splitlines()[1:]] == [f"{path}, line {n}" for n in (4, 5)]
    files.look("skip")
    monkeypatch.setattr("megacore.data.examples.LOOKED_AT", 4)
    with pytest.raises(InputError, match=r"own has 1 bad line\(s\) among its first rows"):
        files.look("stop")
    write_jsonl(path, {"prompt": "a", "chosen": "b", "rejected": "c"})
    for rule in ("stop", "skip"):
        with pytest.raises(InputError, match="line 1: has 'chosen' and 'rejected', which are preferences"):
            files.look(rule)


# -- files, folders, data sets

ROWS: list[Row] = [{"conversations": from_(("human", f"what is {n}?"), ("gpt", f"{n} of them"))} for n in range(40)]


def lines(rows: Sequence[Row] = ROWS) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def array(rows: Sequence[Row] = ROWS) -> bytes:
    return b"[" + b" ,\n".join(lines(rows).splitlines()) + b"\n]\n"


def zstandard(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    return bytes(pyarrow.Codec("zstd").compress(data, asbytes=True))


def table(rows: Sequence[Row] = ROWS) -> bytes:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), sink, row_group_size=16)
    return bytes(sink.getvalue().to_pybytes())


def stream(rows: Sequence[Row] = ROWS, how: str = "new_stream", **options: Any) -> bytes:
    """A table as `datasets` saves it."""
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    made, sink = pyarrow.Table.from_pylist(list(rows)), pyarrow.BufferOutputStream()
    with getattr(ipc, how)(sink, made.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        for batch in made.to_batches(max_chunksize=10):
            writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


KINDS: Mapping[str, Callable[[], bytes]] = {
    "a.jsonl": lines,
    "a.jsonl.gz": lambda: gzip.compress(lines()),
    "a.jsonl.zst": lambda: zstandard(lines()[:1000]) + zstandard(lines()[1000:]),
    "a.json": array,
    "b.json": lambda: b"\xef\xbb\xbf " + array(),
    "c.json": lines,
    "a.json.gz": lambda: gzip.compress(array()),
    "a.parquet": table,
    "a.arrow": stream,
    "b.arrow": lambda: stream(how="new_file"),
}


@pytest.mark.parametrize("name", KINDS)
def test_all_kinds_of_files_are_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever they are cut into; and each is named by its number."""
    path = tmp_path / name
    path.write_bytes(KINDS[name]())
    for size in (2**22, 500):
        monkeypatch.setattr(text, "LINES", size)
        parts = [part for piece in text.cut(path) for part in text.blocks(piece)]
        assert len(parts) > 2 if size == 500 else len(parts) < 4
        found = [row for part in parts for row in text.rows(part)]
        assert [row.values for row in found if isinstance(row, text.Record)] == ROWS
        assert sum(part.size for part in parts) == sum(piece.size for piece in text.cut(path))
    row = found[25]
    assert isinstance(row, text.Record)
    where = "line 26" if ".json" in name else "row 25"
    assert str(row.fault("why")) == f"{path}, {where}: why"


BAD: Mapping[str, tuple[str, Callable[[], bytes], str]] = {
    "gz-truncated": ("a.jsonl.gz", lambda: gzip.compress(lines())[:-20], "is no whole gzip file"),
    "gz-bomb": ("a.jsonl.gz", lambda: gzip.compress(b"\n" * 10**6), "unpacks to more than 100 times its size.*gunzip"),
    "zst-truncated": ("a.jsonl.zst", lambda: zstandard(lines())[:-5], "is no whole zstandard file"),
    "zst-garbage": ("a.jsonl.zst", lambda: bytes(99), "is no whole zstandard file"),
    "zst-bomb": ("a.jsonl.zst", lambda: zstandard(b"\n" * 10**7), "unpacks to more than 100 times its size, .*unzstd"),
    "json-truncated": ("a.json", lambda: array()[:-900], "is no JSON array of objects: .*, at byte "),
    "json-cut": ("a.json", lambda: array()[:-3], "is no JSON array of objects: no ,, at byte "),
    "json-long": ("a.json", lambda: b'[{"a": "' + bytes(5000), "is no JSON array of objects: "),
    "json-empty": ("a.json", lambda: b"[]", "is no JSON array of objects: "),
    "json-deep": ("a.json", lambda: b"[" * 10**5, "is nested too deeply, at byte "),
    "arrow-truncated": ("a.arrow", lambda: stream()[:-900], "is no arrow file that can be read"),
    "arrow-garbage": ("a.arrow", lambda: bytes(99), "is no arrow file that can be read"),
    "arrow-empty": ("a.arrow", lambda: b"", "is no arrow file that can be read"),
    "arrow-packed": ("a.arrow", lambda: stream(compression="zstd"), "is no arrow file .*: .* compressed batches"),
    "arrow-offsets": (
        "a.arrow",
        lambda: stream([{"text": "abcd"}]).replace(b"\0\0\0\0\4\0\0\0", b"\0\0\0\0\xff\xff\xff\x7f"),
        "is no arrow file that can be read",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_files_and_bombs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(limits, "LINE", 1000)
    file, content, words = BAD[name]
    path = tmp_path / file
    path.write_bytes(content())
    with pytest.raises(InputError, match=rf"{file} {words}"):
        [row for piece in text.cut(path) for row in text.rows(piece)]


def write(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def chosen(folder: Path, split: str | None = None, key: str = "train", data_split: str = "train") -> list[str]:
    corpus = CorpusConfig(str(folder), split=split)
    named: dict[str, Any] = {"train": (CorpusConfig("x"),), key: (corpus,)}
    config = resolved(Config(data=DataConfig(**named, split=data_split)))
    files = files_of(config, getattr(config.data, key)[0]).files
    return [str(file.relative_to(folder)) for file in files]


def test_splits_are_known_by_names(tmp_path: Path) -> None:
    shards = {f"data/train-0000{n}-of-00002.parquet": b"" for n in range(2)}
    a = write(tmp_path / "a", **shards, **{"data/train_sft-00000-of-00001.parquet": b"", "data/test.parquet": b""})
    assert chosen(a) == [*shards]
    assert chosen(a, "train_sft") == chosen(a, data_split="train_sft") == ["data/train_sft-00000-of-00001.parquet"]
    assert chosen(a, key="validation") == ["data/test.parquet"]
    assert len(chosen(a, "*")) == 4
    with pytest.raises(InputError, match="a has no split dev among data/test, data/train, data/train_sft: name one"):
        chosen(a, "dev")
    b = write(tmp_path / "b", **{"main/train.jsonl": b"", "other/train.jsonl": b"", "other/dev/1.jsonl": b""})
    with pytest.raises(InputError, match=r"b has train several times, main/train \(\.jsonl\), other/train \(\.jsonl\)"):
        chosen(b)
    assert chosen(b, "main/train") == chosen(b, "main/train.jsonl") == ["main/train.jsonl"]
    assert chosen(b, key="validation") == ["other/dev/1.jsonl"]
    c = write(tmp_path / "c", **{"chats.jsonl": b"", "README.md": b"", ".hidden.jsonl": b"", "dataset_infos.json": b""})
    assert chosen(c) == ["chats.jsonl"]
    with pytest.raises(InputError, match="c has no split tran among chats"):
        chosen(c, data_split="tran")
    with pytest.raises(InputError, match="no split train among test"):
        chosen(write(tmp_path / "d", **{"test.jsonl": b""}))


def test_a_folder_that_datasets_saved(folders: Mapping[str, Path], tmp_path: Path) -> None:
    """A dictionary of two splits, one of which has a file of the cache of `datasets` beside its own."""

    def state(*names: str) -> bytes:
        return json.dumps({"_data_files": [{"filename": name} for name in names], "_split": None}).encode()

    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    saved = {"dataset_dict.json": b'{"splits": ["train", "test"]}', "train/cache-1.arrow": b"other rows"}
    saved |= {f"train/{names[0]}": stream(ROWS[:25]), f"train/{names[1]}": stream(ROWS[25:])}
    saved |= {"train/state.json": state(*names), "test/state.json": state(names[0]), f"test/{names[0]}": stream()}
    folder = write(tmp_path / "saved", **saved)
    assert chosen(folder) == [f"train/{name}" for name in names]
    assert chosen(folder / "train") == names
    config = resolved(Config(data=DataConfig(train=(CorpusConfig(str(folder)),))))
    found = prepared(files_of(config, config.data.train[0]), folders["chatml"], tmp_path / "one")
    path = write_jsonl(tmp_path / "a.jsonl", *ROWS)
    other = prepared(ExampleFiles("a", [path]), folders["chatml"], tmp_path / "two")
    assert found.identity == other.identity and found.count == len(ROWS)
    assert np.array_equal(found.example(30)[0], other.example(30)[0])
    (folder / "train" / names[1]).unlink()
    with pytest.raises(InputError, match=r"train is not whole: state.json names data-00001-of-00002.arrow"):
        chosen(folder)
    (folder / "train/state.json").write_text("[]")
    with pytest.raises(InputError, match="does not say which files"):
        chosen(folder)


def test_overrides_of_the_command_line() -> None:
    config = load({}, ["data.map={prompt: question, completion: answer}", "data.split=train_sft"])
    assert config.data.map == {"prompt": "question", "completion": "answer"} and config.data.split == "train_sft"


# -- beside TRL, where it is installed


@dataclass(frozen=True)
class Written:
    """What a template of TRL's folder takes. end: the token that ends a turn; own: whether the model's own one, which
    marks nothing, is compared too; header: whether TRL counts the line's end before an answer; asks: whether chats may
    end with the user."""

    end: str
    system: bool = True
    calls: bool = False
    tools: bool = False
    own: bool = True
    header: bool = False
    asks: bool = True


TRL: Mapping[str, Written] = {
    "qwen3": Written("<|im_end|>", calls=True, tools=True, own=False),
    "qwen2_5": Written("<|im_end|>", calls=True, tools=True, header=True),
    "llama3": Written("<|eot_id|>"),
    "gemma": Written("<end_of_turn>", system=False),
    "gemma3": Written("<end_of_turn>"),
    "deepseekv3": Written("<\uff5cend▁of▁sentence\uff5c>", calls=True, own=False),
    "phi3": Written("<|endoftext|>", own=False, asks=False),
    "cohere": Written("<|END_OF_TURN_TOKEN|>"),
    "lfm2": Written("<|im_end|>"),
}
"""Not `own`: TRL's Qwen3 keeps the thoughts of all turns, which the model's drops; DeepSeek-V3's prompts with <think>,
and answers without; Phi-3's ends a chat with a second token of the end, which counts in TRL's if no user is last."""
PIECES = (" weights", "axes of a mesh", "ünïcode 🙂", "  two  blanks ", "a\nb\n\n", "\n", "\ttab", "日本語", "{{ x }}")


def drawn(rng: random.Random, takes: Written) -> Row:
    """One to four turns, half with a system, some with calls, some unanswered; what the user says may be empty."""

    def said() -> str:
        return "".join(rng.choices(PIECES, k=rng.randint(0, 4)))

    messages: list[Message] = [{"role": "system", "content": said()}] if takes.system and rng.random() < 0.5 else []
    row: Row = {"messages": messages}
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": said()})
        if takes.calls and rng.random() < 0.3:
            call = {"type": "function", "function": {"name": "warmth", "arguments": {"city": said()}}}
            before = said() if takes.tools else ""  # DeepSeek's writes no text beside a later call
            messages.append({"role": "assistant", "content": before, "tool_calls": [call]})
            messages.append({"role": "tool", "content": said()})
            row |= {"tools": TOOLS} if takes.tools else {}
        messages.append({"role": "assistant", "content": said() + "so" + said()})
    if takes.asks and rng.random() < 0.2:
        messages.append({"role": "user", "content": said()})
    return row


@pytest.mark.parametrize("name", TRL)
def test_tokens_and_masks_are_those_of_trls_trainer(tmp_path: Path, name: str) -> None:
    """200 chats, as its SFTTrainer prepares them for `assistant_only_loss`, cut at the same length: by the template
    that it takes for training, and by the model's own, of which the end of a line around an answer, which no model
    generates, does not count here. Its versions change what they call: 1.16 has been seen to agree."""
    trl = pytest.importorskip("trl", minversion="1.16")
    datasets = pytest.importorskip("datasets")
    takes, rng = TRL[name], random.Random(name)
    rows = [drawn(rng, takes) for _ in range(200)]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    kept = Path(trl.__file__).parent / "chat_templates"
    own, marking = ((kept / f"{name}{kind}.jinja").read_text("utf-8") for kind in ("", "_training"))
    special = sorted({"<s>", takes.end, *re.findall(r"<[|\uff5c]?[\w▁]+[|\uff5c]?>", own)})
    # With tokens that a prompt's end shares with an answer's start.
    write = partial(write_tokenizer, end=takes.end, special=special, text="\n\n\t" * 9 + TEXT)
    folder = write(tmp_path / "own", own)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, pad_token=takes.end)
    args = trl.SFTConfig(
        str(tmp_path), assistant_only_loss=True, max_length=901, max_steps=1, report_to=[], use_cpu=True, bf16=False
    )  # fmt: skip
    sizes: Any = {"vocab_size": 500, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    theirs = trl.SFTTrainer(
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1)),
        args=args,
        train_dataset=datasets.IterableDataset.from_generator(lambda: iter(rows)),
        processing_class=tokenizer,
    )
    made = [(np.array(each["input_ids"]), np.array(each["labels"]) >= 0) for each in theirs.train_dataset]
    assert len(made) == len(rows)
    folders = [write(tmp_path / "marking", marking), *[folder] * takes.own]
    end, line = tokenizer.convert_tokens_to_ids([takes.end, *tokenizer.tokenize("\n")])
    for folder in folders:
        found = prepared(ExampleFiles(str(path), [path]), folder, tmp_path / f"{folder.name}-examples")
        assert found.count == len(rows)
        for index, (ids, counted) in enumerate(made):
            mask = counted
            if folder.name == "own":
                before, last = np.roll(counted, 1), np.roll(ids, 1)
                mask = counted & ~((ids == line) & np.where(before, last == end, takes.header))
            size = np.flatnonzero(mask)[-1] + 1
            got = [each.tolist() for each in found.example(index)]
            assert got == [ids[:size].tolist(), mask[:size].tolist()], (folder.name, rows[index])
