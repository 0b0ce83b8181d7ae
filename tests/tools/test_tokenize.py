"""`megacore tokenize`: from files to tokens that read back as the text, or an error that names the place."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megacore.data import grouping, stage, text, tokenizer
from megacore.data.corpus import Corpus
from megacore.data.indexed import IndexedDataset
from megacore.data.text import InputError
from megacore.parallel import limits
from megacore.store.io.strict_json import StoreError
from megacore.tools import merge_tokens
from megacore.tools.tokenize import main

TEXTS = ["def f(x):\n    return x + 1\n", "Zwölf Boxkämpfer 拳击手 🥊\r\n", "a <|endoftext|> b", "x" * 40]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a corpus of TEXTS as .jsonl, with the tokenizer trained on it."""
    source = tmp_path_factory.mktemp("source") / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    out = source.parent / "out"
    assert main([str(source), "--out", str(out), "--train-vocab", "280", "--workers", "1"]) == 0
    return out


def read(folder: Path, name: str = "corpus") -> list[str]:
    """The text of each document, decoded by transformers from the files alone."""
    from transformers import AutoTokenizer

    hugging_face = AutoTokenizer.from_pretrained(folder)
    dataset = IndexedDataset(folder / name)
    end = Corpus.read(folder).end_of_document
    documents = [dataset.document(i).tolist() for i in range(dataset.documents)]
    assert end is None or all(document.pop() == end for document in documents)
    return [str(hugging_face.decode(document)) for document in documents]


def tokenize(source: Path, trained: Path, *more: str) -> tuple[int, Path]:
    out = source.parent / "out"
    return main([str(source), "--out", str(out), "--tokenizer", str(trained), "--workers", "1", *more]), out


def test_a_trained_tokenizer_reads_back_the_text(trained):
    from transformers import AutoTokenizer

    assert read(trained) == TEXTS
    corpus = Corpus.read(trained)
    tokens = np.concatenate([IndexedDataset(trained / "corpus").document(i) for i in range(len(TEXTS))])
    shares = np.bincount(tokens) / tokens.size
    assert corpus.tokens == tokens.size and corpus.documents == len(TEXTS)
    assert corpus.unigram_entropy == pytest.approx(-sum(p * np.log(p) for p in shares if p))
    assert corpus.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert corpus.bytes_per_token == corpus.text_bytes / corpus.tokens
    assert corpus.vocabulary == 280 and corpus.end_of_document == 0
    assert (tokens == 0).sum() == len(TEXTS)  # and the text that spells the end is text
    theirs = AutoTokenizer.from_pretrained(trained)(TEXTS[0], add_special_tokens=False)["input_ids"]
    assert IndexedDataset(trained / "corpus").document(0).tolist() == [*theirs, 0]


def test_a_tokenizer_without_tokenizer_json_is_read_by_transformers(trained, tmp_path, monkeypatch):
    fast = tokenizer.load(trained)
    monkeypatch.setattr(tokenizer, "_Fast", tokenizer._Slow)
    slow = tokenizer.load(trained)
    assert (slow.vocabulary, slow.end) == (fast.vocabulary, fast.end)
    assert [each.tolist() for each in slow.encode(TEXTS)] == [each.tolist() for each in fast.encode(TEXTS)]


def test_links_out_of_a_folder_are_left_out_and_said(trained, tmp_path, capsys):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("a")
    (tmp_path / "secret").write_text("secret")
    for name in ("b.txt", "c.jsonl"):
        (source / name).symlink_to("../secret")
    status, out = tokenize(source, trained)
    assert status == 0 and read(out) == ["a"]
    assert f"{source}: 2 links that lead out of it are left out, such as {source}/b.txt" in capsys.readouterr().err


GOOD, OUT = object(), object()
"""A file of the trained tokenizer, copied or linked to."""
NO_TOKENIZER = [
    *(
        (dict.fromkeys(names, "{}"), "there is no tokenizer in {folder}: name a folder with a tokenizer.json")
        for names in ([], ["config.json"], ["tokenizer_config.json"], ["generation_config.json"])
    ),
    ({"tokenizer.json": OUT}, "tokenizer.json: leads to"),
    ({"tokenizer.json": "{}"}, "tokenizer.json is not one that"),
    ({"tokenizer.json": "\x1b[2J"}, "tokenizer.json"),
    ({"tokenizer.json": GOOD}, "has no end-of-document token"),
    *(
        ({"tokenizer.json": GOOD, "tokenizer_config.json": config}, "tokenizer_config.json")
        for config in ("[]", "[" * 99_999, '{"eos_token": {}}', '{"eos_token": "\\ud800"}')
    ),
    ({"tokenizer.json": GOOD, "special_tokens_map.json": '{"eos_token": ["\\u001b[2J"]}'}, "special_tokens_map.json"),
]


@pytest.mark.parametrize(("files", "says"), NO_TOKENIZER)
def test_what_is_no_tokenizer_is_refused_in_words(trained, tmp_path, monkeypatch, capsys, files, says):
    """Without a look at the hub."""
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    (tmp_path / "a.txt").write_text("a")
    folder = tmp_path / "stranger"
    folder.mkdir()
    for name, content in files.items():
        if content is OUT:
            (folder / name).symlink_to(trained / name)
        else:
            (folder / name).write_text((trained / name).read_text() if content is GOOD else content)
    status, out = tokenize(tmp_path / "a.txt", folder)
    said = capsys.readouterr().err
    assert status == 1 and says.format(folder=folder) in said and "\x1b" not in said and not out.exists()


def test_a_tokenizer_that_is_nowhere_is_named(tmp_path, monkeypatch, capsys):
    """Without a look at the hub."""
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    (tmp_path / "a.txt").write_text("a")
    for name in (f"{tmp_path}/nowhere", f"{tmp_path}/no/where", "./nowhere", "tests/nowhere", "a/b/c"):
        assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--tokenizer", name]) == 1
        assert f"there is no folder {name}: name one with a tokenizer.json" in capsys.readouterr().err


def test_files_that_a_tokenizer_names_are_not_read(tmp_path, monkeypatch):
    """transformers is shown what is read of a folder, which names no file wherever it is, and no class of its own."""
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "secret.py").touch()
    settings = '{"vocab_file": "/etc/passwd", "init_inputs": ["x"], "eos_token": "x"}'
    (tmp_path / "tokenizer_config.json").write_text(settings)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "auto_map": {"AutoTokenizer": "secret.T"}}')

    def look(folder):  # in another process, which gives back what it says
        raise StoreError(json.dumps({path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}))

    monkeypatch.setattr(tokenizer.pretrained, "tokenizer", look)
    for use in (tokenizer.load, lambda folder: tokenizer.fetch(str(folder), tmp_path / "out")):
        with pytest.raises(InputError) as told:
            use(tmp_path)
        files = {"config.json": {"model_type": "gpt2"}, "tokenizer_config.json": {"eos_token": "x"}, "vocab.json": {}}
        assert json.dumps(files) in str(told.value)


def test_names_that_are_no_text_are_told(trained, tmp_path, capsys):
    source = tmp_path / "in"
    source.mkdir()
    with open(os.fsencode(source) + b"/\xff\x1b[2J\n.txt", "wb") as file:
        file.write(b"\xff")
    assert tokenize(source, trained)[0] == 1
    assert r"\udcff\x1b[2J" in capsys.readouterr().err


def test_every_kind_of_file_in_sorted_order_without_hidden_and_excluded(trained, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    source = tmp_path / "in"
    for folder in ("b", "b/deep", ".hidden", "node_modules"):
        (source / folder).mkdir(parents=True)
    (source / "z.md").write_bytes("\ufeffz".encode())
    (source / "a.txt").write_text("a\r\n", newline="")
    (source / "b" / "m.py").write_text("m = 1")
    (source / "b" / "deep" / "n.jsonl").write_text('{"text": "n0"}\n\n{"text": ""}\n{"text": "n1", "id": 3}')
    table = pyarrow.table({"id": range(5), "text": [f"p{i}" for i in range(5)]})
    parquet.write_table(table, source / "p.parquet", row_group_size=2)
    (source / "q.jsonl.gz").write_bytes(gzip.compress(b'{"text": "q0"}\n{"text": "q1"}'))
    for ignored in ("b/config.json", ".hidden/x.txt", "node_modules/x.txt", "b/x.csv", "skip_me.txt"):
        (source / ignored).write_text("ignored")
    (source / "empty.txt").touch()
    (source / "link.txt").symlink_to(source / "a.txt")
    (source / "b" / "early.txt").symlink_to(source / "b" / "late.txt")
    (source / "b" / "late.txt").write_text("late")
    status, out = tokenize(source, trained, "--exclude", "node_modules", "--exclude", "skip_*")
    assert status == 0
    assert read(out) == ["a\r\n", "n0", "n1", "late", "m = 1", "p0", "p1", "p2", "p3", "p4", "q0", "q1", "z"]
    assert Corpus.read(out).empty == 2
    (tmp_path / "named.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    _, out = tokenize(tmp_path / "named.json", trained, "--name", "n", "--overwrite", "--no-append-eod")
    assert read(out, "n") == ["one", "two"] and Corpus.read(out).end_of_document is None


@pytest.mark.in_turn(3, 2)
def test_the_bytes_do_not_depend_on_the_workers(tmp_path, monkeypatch):
    source = tmp_path / "in"
    source.mkdir()
    for i in range(30):
        (source / f"{i}.txt").write_text(f"file {i} " * 10_000)
    (source / "lines.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(300)))
    for workers in ("1", "2"):
        out = str(tmp_path / workers)
        assert main([str(source), "--out", out, "--train-vocab", "300", "--workers", workers]) == 0
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert files == ["corpus.bin", "corpus.idx", "corpus.json", "tokenizer.json", "tokenizer_config.json"]
    for file in files:
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()


@pytest.mark.parametrize("size", [1, 2, 7, 16, 1000])
def test_lines_belong_to_one_piece_however_they_are_cut(tmp_path, monkeypatch, size):
    rows = [json.dumps({"text": "x" * (i % 5) + str(i)}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n\n\n")
    monkeypatch.setattr(text, "LINES", size)
    pieces = text.cut(tmp_path / "a.jsonl")
    assert sum(piece.size for piece in pieces) == (tmp_path / "a.jsonl").stat().st_size
    found = [document for piece in pieces for document in text.documents(piece, "text")]
    assert found == [json.loads(row)["text"] for row in rows]


def test_a_long_document_is_encoded_in_parts(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(tokenizer, "LONGEST", 10)
    long = "short\nand a line longer than ten\n\n" + "x" * 25
    assert "".join(tokenizer.parts_of(long)) == long
    assert tokenizer.parts_of(long)[0] == "short\n" and max(map(len, tokenizer.parts_of(long))) == 10
    source = tmp_path / "a.txt"
    source.write_text(long)
    _, out = tokenize(source, trained)
    assert read(out) == [long]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "b.jsonl"])
def test_a_document_that_is_too_long_is_one_that_cannot_be_read(tmp_path, trained, monkeypatch, capsys, name):
    for limit in ("DOCUMENT", "LINE"):
        monkeypatch.setattr(limits, limit, 30)
    monkeypatch.setattr(text, "LINES", 50)  # pieces that begin within the line, and end within it
    lines = ['{"text": "one"}\n', '{"text": "' + "x" * 200 + '"}\n', '{"text": "three"}\n']
    (tmp_path / name).write_text("".join(lines if name != "b.jsonl" else [lines[0], lines[1].strip()]))
    status, out = tokenize(tmp_path / name, trained, "--on-error", "skip")
    if name == "a.txt":
        assert status == 1 and "0 documents are empty and 1 unreadable" in capsys.readouterr().err
        return
    assert status == 0 and f"{name}, line 2: longer than 30 bytes" in capsys.readouterr().out
    assert read(out) == (["one", "three"] if name == "a.jsonl" else ["one"])


BAD = {
    "encoding.txt": (b"good\xe9bad", "encoding.txt: not UTF-8: byte 0xe9 at 4"),
    "json.jsonl": (b'{"text": "a"}\n\n{"text": \n', "json.jsonl, line 3: not JSON"),
    "line_encoding.jsonl": (b'{"text": "a"}\n{"text": "\xff"}\n', "line_encoding.jsonl, line 2: not UTF-8"),
    "key.jsonl": (b'{"text": "a"}\n{"body": 1, "id": 2}', "line 2: no key 'text' among 'body', 'id': name the one"),
    "array.jsonl": (b'["a"]', "line 1: a JSON list, not an object"),
    "null.jsonl": (b"null", "line 1: null, not an object"),
    "number.jsonl": (b'{"text": 3}', "line 1: 'text' is a int, not text"),
    "surrogate.jsonl": (b'{"text": "ab\\ud800"}', r"line 1: 'text' has the lone surrogate '\ud800' at 2"),
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", BAD)
def test_a_document_that_cannot_be_read_stops_or_is_skipped(tmp_path, trained, capsys, name):
    content, message = BAD[name]
    source = tmp_path / "in"
    source.mkdir()
    (source / name).write_bytes(content)
    (source / "zz.txt").write_text("fine")
    status, out = tokenize(source, trained)
    assert status == 1 and message in capsys.readouterr().err
    assert not out.exists()
    status, out = tokenize(source, trained, "--on-error", "skip")
    assert status == 0 and message in capsys.readouterr().out
    assert read(out)[-1] == "fine" and Corpus.read(out).skipped == 1


def test_bad_tables_are_named(tmp_path, trained, capsys, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["a", None]}), table)
    assert tokenize(table, trained)[0] == 1
    assert "no column 'text' among 'body': name the one with --text-key" in capsys.readouterr().err
    assert tokenize(table, trained, "--text-key", "body")[0] == 1
    assert "a.parquet, row 1: 'body' is null, not text" in capsys.readouterr().err
    table.write_bytes(b"PAR1 no parquet")
    assert tokenize(table, trained)[0] == 1
    assert "is no parquet file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert tokenize(table, trained)[0] == 1
    assert "pip install 'megacore[data]'" in capsys.readouterr().err


def test_bad_inputs_are_named(tmp_path, trained, capsys):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    for source, message in {
        "none": "none does not exist",
        "a.csv": "a.csv is not of a known type: .txt .md .py .jsonl .jsonl.gz",
        "folder": "folder has no file of a known type",
        "empty.txt": "no text in the input: 1 documents are empty and 0 unreadable",
    }.items():
        status, out = tokenize(tmp_path / source, trained)
        assert status == 1 and message in capsys.readouterr().err and not out.exists()


def test_a_vocabulary_too_small_or_too_large_for_the_text_is_said(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab ab ab")
    given = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--workers", "1", "--train-vocab"]
    assert main([*given, "256"]) == 1 and "choose 257 or more" in capsys.readouterr().err
    assert main([*given, "10000000"]) == 0
    found = Corpus.read(tmp_path / "out").vocabulary
    assert f"vocabulary {found:,} (not 10,000,000: the text has no more pairs to join)" in capsys.readouterr().out
    assert main([*given, str(found), "--overwrite"]) == 0
    assert f"vocabulary {found:,}, unigram" in capsys.readouterr().out


def test_an_existing_output_is_kept_unless_told(tmp_path, trained, capsys):
    source = tmp_path / "a.txt"
    source.write_text("first")
    _, out = tokenize(source, trained)
    (out / "merges.txt").write_text("of an older tokenizer")
    source.write_text("second")
    assert tokenize(source, trained)[0] == 1
    assert "corpus.idx, corpus.bin, corpus.json, tokenizer.json" in capsys.readouterr().err
    assert read(out) == ["first"]
    source.write_bytes(b"\xff")
    assert tokenize(source, trained, "--overwrite")[0] == 1
    assert read(out) == ["first"]
    source.write_text("second")
    assert tokenize(source, trained, "--overwrite")[0] == 0
    assert read(out) == ["second"] and not (out / "merges.txt").exists()
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_a_termination_leaves_nothing(tmp_path, trained, monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("megacore.tools.tokenize.load", lambda stage: os.kill(os.getpid(), signal.SIGTERM))
    (tmp_path / "a.txt").write_text("text")
    status, out = tokenize(tmp_path / "a.txt", trained)
    assert status == 130 and "interrupted" in capsys.readouterr().err and not out.exists()
    assert signal.getsignal(signal.SIGTERM) == handler


# -- interruptions

KILLED = """
import os, signal, sys
from megacore.data import grouping, stage, text
from megacore.tools.tokenize import main
grouping.AT_ONCE = text.LINES = stage.KEPT = 100
real, kept = stage.Stage.keep, []
def keep(self, progress):
    real(self, progress)
    kept.append(progress)
    if len(kept) == 3:
        with open(self.folder / "corpus.bin", "ab") as file:
            file.write(b"half a document")
        os.kill(os.getpid(), signal.SIGKILL)
stage.Stage.keep = keep
main(sys.argv[1:])
"""


@pytest.fixture
def lines(tmp_path, monkeypatch) -> Path:
    """Documents in several pieces, each of which is kept when it is finished."""
    for module, name in ((grouping, "AT_ONCE"), (text, "LINES"), (stage, "KEPT")):
        monkeypatch.setattr(module, name, 100)
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text("".join(json.dumps({"text": f"line {i} " * (i % 5)}) + "\n" for i in range(40)))
    for name in "bcd":
        (source / f"{name}.txt").write_text(name * 50)
    packed = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(40))
    (source / "c.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    (source / "empty.txt").touch()
    return source


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def stop_after(monkeypatch, target: object, name: str, calls: int) -> None:
    """Ctrl-C after so many calls."""
    real, left = getattr(target, name), [calls]

    def counted(*given):
        real(*given)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(target, name, counted)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("more", [[], ["--shuffle", "3"]])
@pytest.mark.parametrize(
    ("where", "name", "calls"),
    [(stage.Stage, "keep", 1), (stage.Stage, "keep", 4), (Corpus, "write", 1), (stage, "publish", 3)],
)
def test_a_resume_makes_the_bytes_of_an_undisturbed_run(lines, trained, monkeypatch, capsys, where, name, calls, more):
    whole = lines.parent / "whole"
    given = [str(lines), "--tokenizer", str(trained), "--workers", "1", *more]
    assert main([*given, "--out", str(whole)]) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, where, name, calls)
        status, out = tokenize(lines, trained, *more)
    assert status == 130 and f"is kept in {out}/.corpus.partial: go on with --resume" in capsys.readouterr().err
    assert not (out / "corpus.idx").exists()
    assert tokenize(lines, trained, *more)[0] == 1
    assert "of an interrupted run: go on with --resume, or begin anew with --over" in capsys.readouterr().err
    monkeypatch.setattr(grouping, "AT_ONCE", 70)
    real, done = text.documents, []

    def documents(piece, text_key):
        done.append(piece)
        return real(piece, text_key)

    monkeypatch.setattr(text, "documents", documents)
    assert tokenize(lines, trained, *more, "--resume")[0] == 0
    assert contents(out) == contents(whole) and [*out.glob(".*")] == []
    pieces = [piece for file in text.find_files([lines]) for piece in text.cut(file)]
    assert len(done) < len([part for piece in pieces for part in text.blocks(piece)])


@pytest.mark.in_turn(2, 1)
def test_what_a_kill_leaves_is_gone_on_with(lines, trained):
    out, whole = lines.parent / "out", lines.parent / "whole"
    given = [str(lines), "--tokenizer", str(trained), "--workers", "1", "--out"]
    command = [sys.executable, "-c", KILLED, *given, str(out)]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -signal.SIGKILL and not (out / "corpus.bin").exists()
    assert main([*given, str(out), "--resume"]) == 0 and main([*given, str(whole)]) == 0
    assert contents(out) == contents(whole)


@pytest.fixture
def interrupted(lines, trained, monkeypatch, capsys) -> Path:
    """The folder of a run that was stopped in its middle."""
    with monkeypatch.context() as patch:
        stop_after(patch, stage.Stage, "keep", 2)
        status, out = tokenize(lines, trained)
    assert status == 130 and capsys.readouterr()
    return out / ".corpus.partial"


CHANGES = {
    "--text-key": "had --text-key 'text', and this one has 'body'",
    "--no-append-eod": "had --append-eod True, and this one has False",
    "tokenizer": "the digest of tokenizer.json",
    "grown": "a.jsonl has changed since the interrupted run",
    "more": "c.jsonl.gz where the input now has .*bb.txt",
    "fewer": "empty.txt where the input now ends",
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_resume_of_something_else_is_refused(interrupted, lines, trained, tmp_path, capsys, change):
    before = contents(interrupted)
    more = {"--text-key": ["--text-key", "body"], "--no-append-eod": ["--no-append-eod"]}.get(change, [])
    if change == "tokenizer":
        other = tmp_path / "other"
        other.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (other / name).write_text((trained / name).read_text() + "\n")
        trained = other
    elif change == "grown":
        (lines / "a.jsonl").write_text((lines / "a.jsonl").read_text() + "\n")
    elif change == "more":
        (lines / "bb.txt").write_text("more")
    elif change == "fewer":
        (lines / "empty.txt").unlink()
    assert tokenize(lines, trained, "--resume", *more)[0] == 1
    assert re.search(CHANGES[change], capsys.readouterr().err)
    assert contents(interrupted) == before
    assert tokenize(lines, trained, "--overwrite", *more)[0] == (change == "--text-key")


def test_a_folder_in_the_way_that_is_another_s_is_kept(lines, trained, tmp_path, capsys):
    (tmp_path / "out" / ".corpus.partial").mkdir(parents=True)
    (tmp_path / "out" / ".corpus.partial" / "theirs").touch()
    assert tokenize(lines, trained, "--overwrite")[0] == 1
    assert "is in the way and was not made here" in capsys.readouterr().err
    assert (tmp_path / "out" / ".corpus.partial" / "theirs").exists()


@pytest.mark.parametrize("name", ["progress.json", "files.jsonl", "corpus.bin", "corpus.lengths"])
def test_a_resume_follows_no_link(interrupted, lines, trained, tmp_path, capsys, name):
    file, theirs = interrupted / name, tmp_path / "theirs"
    theirs.write_bytes(before := file.read_bytes() + b"more")
    file.unlink()
    file.symlink_to(theirs)
    assert tokenize(lines, trained, "--resume")[0] == 1
    said = capsys.readouterr().err
    assert name in said and ("leads to" in said or "symbolic links" in said) and theirs.read_bytes() == before


@pytest.mark.parametrize("name", ["progress.json", "files.jsonl", "corpus.bin"])
def test_a_resume_of_what_is_damaged_is_refused(interrupted, lines, trained, capsys, name):
    file = interrupted / name
    with open(file, "r+b") as cut:
        cut.truncate(file.stat().st_size // 4)
    assert tokenize(lines, trained, "--resume")[0] == 1
    said = capsys.readouterr().err
    assert name in said and "is damaged" in said


# -- parts and orders


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("count", "more"), [(1, []), (3, ["--shuffle", "5"]), (24, [])])
def test_merged_parts_are_the_bytes_of_one_run(lines, trained, tmp_path, capsys, count, more):
    """Of 24 one has none of the 23 blocks."""
    whole = tmp_path / "whole"
    given = [str(lines), "--tokenizer", str(trained), "--workers", "1", "--out"]
    assert main([*given, str(whole), *more]) == 0
    for number in range(count, 0, -1):
        assert tokenize(lines, trained, "--part", f"{number}/{count}")[0] == 0
    capsys.readouterr()
    assert merge_tokens.main([str(tmp_path / "out"), *more]) == 0
    assert contents(tmp_path / "out") == contents(whole)
    size = sum((whole / f"corpus{end}").stat().st_size for end in (".bin", ".idx"))
    assert f"tokens in {Corpus.read(whole).documents} documents, {size:,} bytes\n" in capsys.readouterr().out
    assert merge_tokens.main([str(tmp_path / "out"), *more]) == 1
    assert "corpus.idx, corpus.bin, corpus.json" in capsys.readouterr().err


def test_parts_that_do_not_belong_together_are_not_merged(lines, trained, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert tokenize(lines, trained, "--part", "1/2")[0] == 0
    assert merge_tokens.main([out]) == 1
    assert "1 of 2 parts are not finished, such as corpus.part-2-of-2" in capsys.readouterr().err
    assert tokenize(lines, trained, "--part", "2/2", "--no-append-eod")[0] == 0 and merge_tokens.main([out]) == 1
    assert "corpus.part-1-of-2 has --append-eod True, and corpus.part-2-of-2 False" in capsys.readouterr().err
    assert tokenize(lines, trained, "--part", "3/3")[0] == 0 and merge_tokens.main([out]) == 1
    assert f"{out} has parts of 2 and of 3" in capsys.readouterr().err


def test_a_part_that_is_not_what_it_says_is_not_merged(lines, trained, tmp_path, capsys):
    assert tokenize(lines, trained, "--part", "1/1")[0] == 0
    file = tmp_path / "out" / "corpus.part-1-of-1" / "part.json"
    sound = json.loads(file.read_text())
    for key, value, message in [
        ("tally", sound["tally"] | {"documents": 1}, "corpus.idx holds other documents than part.json says"),
        ("tally", sound["tally"] | {"counts": [-1]}, "part.json is damaged"),
        ("tally", [], "part.json is damaged"),
        ("extent", {}, "part.json is damaged"),
        ("outputs", 1, "part.json is damaged"),
        ("end", True, "part.json is damaged"),
    ]:
        file.write_text(json.dumps(sound | {key: value}))
        assert merge_tokens.main([str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
    assert not [*(tmp_path / "out").glob(".*")]
    (tmp_path / "out" / f"corpus.part-1-of-{10**200}").mkdir()
    shutil.rmtree(file.parent)
    assert merge_tokens.main([str(tmp_path / "out")]) == 1
    assert f"{10**200} of {10**200} parts are not finished" in capsys.readouterr().err


def test_what_parts_cannot_have_is_refused(lines, trained, tmp_path, capsys):
    given = [str(lines), "--out", str(tmp_path / "out"), "--part", "1/2"]
    assert main([*given, "--train-vocab", "300"]) == 1
    assert "train one first" in capsys.readouterr().err
    assert main([*given, "--tokenizer", str(trained), "--shuffle", "1"]) == 1
    assert "give --shuffle to megacore merge-tokens" in capsys.readouterr().err
    for part in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(SystemExit):
            tokenize(lines, trained, "--part", part)
        assert f"{part} is not I/N with I from 1 to N" in capsys.readouterr().err


def test_a_shuffled_corpus_has_each_document_once(lines, trained, tmp_path):
    given = [str(lines), "--tokenizer", str(trained), "--workers", "1", "--out"]
    orders = {}
    for seed in ("none", "1", "2"):
        more = [] if seed == "none" else ["--shuffle", seed]
        assert main([*given, str(tmp_path / seed), *more]) == 0
        orders[seed] = read(tmp_path / seed)
    plain = orders.pop("none")
    assert all(sorted(order) == sorted(plain) and order != plain for order in orders.values())
    assert orders["1"] != orders["2"]
