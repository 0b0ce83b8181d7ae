"""`megacore evaluate`: what transformers finds, token for token, and the same on every layout."""

import io
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from families import loaded, one_in
from hub import converted, save
from pool import Pool
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

from megacore.data import tokenizer
from megacore.data.indexed import IndexedWriter
from megacore.inference import loaded_model
from megacore.inference.evaluation_data import Document, Windows
from megacore.inference.model_loader import model_from
from megacore.inference.perplexity import PairsResult, evaluate, of_pairs
from megacore.models.assemble import Model
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.schema import EXPERT_TENSOR_PARALLEL, SPLIT, Split
from megacore.store.conversions.formats import open_folder
from megacore.tools import evaluate as command
from megacore.tools import generate

Capture = pytest.CaptureFixture[str]
their_model = lru_cache(2)(loaded)
TEXTS = ["The sun rose over the quiet harbour.", "naïve façade, 5 € and £4.99; 日本語 🎉", "x", "", "a b c d " * 7]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(params=one_in(18))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return with_text(request.param, tmp_path)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return with_text("llama", tmp_path)


def with_text(family: str, tmp_path: Path, **fields: Any) -> Path:
    made = save(family, tmp_path / "hf", vocab_size=290, **fields)
    tokenizer.train(TEXTS, 290, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def rows(path: Path, *objects: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in objects))
    return path


def losses(folder: Path, ids: list[int], length: int, stride: int) -> list[float]:
    """By transformers, of each token but the first, one after the other, from the context that its window leaves it."""
    model = their_model(folder)
    found = []
    for last in range(len(ids) - 1):
        start = math.ceil(max(0, last + 1 - length) / stride) * stride
        with torch.no_grad():
            logits = model(torch.tensor([ids[start : last + 1]])).logits[0, -1]
        found.append(-float(logits.log_softmax(-1)[ids[last + 1]]))
    return found


def data(capsys: Capture, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert command.main([*map(str, arguments), "--json", "--dtype", "float64"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- what transformers finds


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("length", "stride"), [(32, None), (12, None), (12, 5), (7, 1)])
def test_the_loss_is_that_of_transformers(
    folder: Path, length: int, stride: int | None, tmp_path: Path, capsys: Capture
) -> None:
    path = rows(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))
    words: Any = AutoTokenizer.from_pretrained(folder)
    wanted = [losses(folder, words(text)["input_ids"], length, stride or length) for text in TEXTS]
    given = ["--stride", stride] if stride else []
    given += ["--sequence-length", length, "--by-position", 8, "--picture", tmp_path / "x.png"]
    found = data(capsys, folder, "--data", path, *given)
    tokens, total = sum(map(len, wanted)), sum(map(sum, wanted))
    size = sum(len(text.encode()) for text in TEXTS if len(text) > 1)
    # The first token of the second text is two characters and a half.
    size -= sum(len(words.decode(words(text)["input_ids"][:1]).rstrip("\ufffd")) for text in TEXTS if len(text) > 1)
    assert (found["documents"], found["tokens"], found["bytes"]) == (3, tokens, size)
    assert found["loss"] == pytest.approx(total / tokens, abs=5e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=5e-5)
    assert found["loss_per_byte"] == pytest.approx(total / size, abs=5e-5)
    assert found["bits_per_byte"] == pytest.approx(total / size / math.log(2), abs=5e-5)
    # Of each 8 successive positions: the number of tokens before a label.
    buckets: dict[int, list[float]] = {}
    for each in wanted:
        for before, loss in enumerate(each, 1):
            buckets.setdefault(before // 8, []).append(loss)
    assert len(buckets) > 3 and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert [each["from"] for each in found["by_position"]] == [8 * number for number in range(len(buckets))]
    for number, each in enumerate(found["by_position"]):
        assert each["tokens"] == len(buckets[number])
        assert each["loss"] == pytest.approx(sum(buckets[number]) / len(buckets[number]), abs=5e-5)
    whole = sum(each["loss"] * each["tokens"] for each in found["by_position"])
    assert found["loss"] * found["tokens"] == pytest.approx(whole, rel=1e-12)


def test_short_documents_have_the_loss_that_transformers_returns(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """The obvious call, in the model's own dtype."""
    path = tmp_path / "text.txt"
    path.write_text("The sun rose over the harbour.")
    ids = AutoTokenizer.from_pretrained(llama)(path.read_text(), return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(llama)
    wanted = float(model(ids, labels=ids).loss.detach())
    for folder in (llama, converted(llama, tmp_path / "checkpoint", "--tp", "2")):
        assert command.main([str(folder), "--data", str(path)]) == 0
        assert f"loss {wanted:.4f}  perplexity" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_who_watches_sees_documents_go_by(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rows(tmp_path / "texts.jsonl", *({"text": f"The sun {number}"} for number in range(3)))
    for screen in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", screen)
        assert command.main([str(llama), "--data", str(path)]) == 0
        assert (" documents [" in screen.getvalue()) == screen.isatty()


def test_a_begin_token_lets_every_byte_count(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    fast = json.loads((llama / "tokenizer.json").read_text())
    special = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    fast["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (llama / "tokenizer.json").write_text(json.dumps(fast))
    words: Any = AutoTokenizer.from_pretrained(llama)
    assert words("The sun")["input_ids"][0] == 0
    path = rows(tmp_path / "texts.jsonl", {"content": "The sun €"})
    found = data(capsys, llama, "--data", path, "--text-key", "content")
    wanted = losses(llama, words("The sun €")["input_ids"], 32, 32)
    assert found["bytes"] == len("The sun €".encode()) and found["tokens"] == len(wanted)
    assert found["loss"] == pytest.approx(sum(wanted) / len(wanted), abs=5e-5)


def test_token_files_are_documents_too(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    words: Any = AutoTokenizer.from_pretrained(llama)
    documents = [words(text)["input_ids"] + [0] for text in TEXTS[:2]]
    with IndexedWriter(tmp_path / "corpus", 290) as writer:
        for ids in documents:
            writer.write(np.array(ids, np.uint16))
    wanted = [loss for ids in documents for loss in losses(llama, ids, 32, 32)]
    found = data(capsys, llama, "--data", tmp_path / "corpus")
    assert found["tokens"] == len(wanted) and found["loss"] == pytest.approx(sum(wanted) / len(wanted), abs=5e-5)
    assert found["bytes"] == sum(len(words.decode(ids[1:], skip_special_tokens=True).encode()) for ids in documents)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (llama / file).unlink()
    unknown = dict.fromkeys(("bytes", "loss_per_byte", "perplexity_per_byte", "bits_per_byte"))
    assert data(capsys, llama, "--data", tmp_path / "corpus") == found | unknown


@pytest.mark.parametrize("count", ["assistant", "last", "all"])
def test_of_chats_the_answers_count(count: str, llama: Path, tmp_path: Path, capsys: Capture) -> None:
    turns = [("user", "a b"), ("assistant", "The sun"), ("user", "c"), ("assistant", "5 €")]
    chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
    path = rows(tmp_path / "chats.jsonl", chat, {"prompt": "a", "completion": "€"})
    words: Any = AutoTokenizer.from_pretrained(llama)
    parts = [(f"<{role}>", f"{content}<|endoftext|>") for role, content in turns]
    counted = {"assistant": (1, 3), "last": (3,), "all": (0, 1, 2, 3)}[count]
    ids, mask = list[int](), list[bool]()
    for number, (head, body) in enumerate(parts):
        for text, counts in ((head, count == "all"), (body, number in counted)):
            more = words(text)["input_ids"]
            ids, mask = ids + more, mask + [counts] * len(more)
    wanted = [loss for loss, counts in zip(losses(llama, ids, 32, 32), mask[1:], strict=True) if counts]
    ids = words("a")["input_ids"] + words("€")["input_ids"] + [0]
    rest = losses(llama, ids, 32, 32)
    wanted += rest if count == "all" else rest[-len(words("€")["input_ids"]) - 1 :]
    found = data(capsys, llama, "--data", path, "--count", count)
    assert found["tokens"] == len(wanted) and found["bytes"] is None
    assert found["loss"] == pytest.approx(sum(wanted) / len(wanted), abs=5e-5)


PAIRS = [("The sun ", "rose over", "x"), ("a b", " c d a b", " quiet harbour"), ("4", ".99", "façade, 5 €")]


def test_pairs_are_told_apart_by_log_probabilities(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    """As transformers has them, of the tokens behind those of the prompt; a pair that is too long is counted."""
    model, tokens = their_model(llama), AutoTokenizer.from_pretrained(llama)
    found, counts = list[list[float]](), list[list[int]]()
    for prompt, *answers in PAIRS:
        texts = [tokens(prompt + answer)["input_ids"] + [0] for answer in answers]
        begin = tokens(prompt)["input_ids"]
        first = min(next((at for at, one in enumerate(begin) if one != ids[at]), len(begin)) for ids in texts)
        sums = [losses(llama, ids, 32, 32)[max(0, first - 1) :] for ids in texts]
        found.append([-sum(each) for each in sums])
        counts.append([len(each) for each in sums])
    assert model.config.vocab_size == 290
    margins = {"": [a - b for a, b in found]}
    margins["_per_token"] = [a / n - b / m for (a, b), (n, m) in zip(found, counts, strict=True)]
    given = [*PAIRS, ("a", " b" * 40, "b")]
    path = rows(tmp_path / "pairs.jsonl", *({"prompt": a, "chosen": b, "rejected": c} for a, b, c in given))
    got = data(capsys, llama, "--data", path)
    assert (got["pairs"], got["too_long"]) == (3, 1)
    for name, values in margins.items():
        assert got[f"margin{name}"] == pytest.approx(sum(values) / 3, abs=5e-5)
        assert got[f"accuracy{name}"] == pytest.approx(sum(each > 0 for each in values) / 3)
    assert command.main([str(llama), "--data", str(path), "--tokens", "7"]) == 0
    assert "3 pairs, 1 others are too long" in capsys.readouterr().out


# -- every layout

IDS = [np.random.default_rng(n).integers(290, size=length) for n, length in enumerate((21, 2, 1, 9, 33, 14, 5, 26, 3))]


def measured(folder: Path, shape: MeshShape | None, together: int = 40) -> dict[str, Any]:
    """On this rank."""
    model = model_from(open_folder(folder), Mesh.create(shape) if shape else Mesh.single(), torch.float64)
    counted = [np.random.default_rng(ids.size).random(ids.size) < 0.8 for ids in IDS]
    documents = [Document(ids, mask, ids.size) for ids, mask in zip(IDS, counted, strict=True)]
    return asdict(evaluate(model, documents, Windows(12, 7, 6), together))


@pytest.mark.in_turn(5)
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", MeshShape(tp=2, pp=2)),
        ("llama", MeshShape(tp=2, dp=2)),
        ("gpt2", MeshShape(tp=2)),
        ("gpt2", MeshShape(pp=3)),
        ("mixtral", MeshShape(ep=4)),
        ("mixtral", MeshShape(tp=2, ep=2)),
        ("mixtral", MeshShape(pp=2, dp=2, ep=2)),
        ("gemma2", MeshShape(cp=2, tp=2)),
        ("mixtral", MeshShape(cp=2, ep=2)),
    ],
    ids=["tp2-pp2", "tp2-dp2", "tp2", "pp3", "ep4", "tp2-ep2", "pp2-dp2-ep2", "cp2-tp2", "cp2-ep2"],
)
def test_every_layout_finds_the_same(family: str, shape: MeshShape, tmp_path: Path, pool: Pool) -> None:
    """Seven packs of windows: with experts, ranks that have none of the last ones compute for those that do."""
    folder = with_text(family, tmp_path)
    wanted = measured(folder, None, 25)
    assert wanted["loss"] > 100 and len(wanted["buckets"]) == 6
    for together in (1, 10_000):  # however many windows are computed at once
        assert measured(folder, None, together)["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
    for found in pool.run(shape.world, measured, folder, shape, 25):
        buckets = [(tokens, pytest.approx(loss, rel=1e-9)) for tokens, loss in wanted["buckets"]]
        assert found == wanted | {"loss": pytest.approx(wanted["loss"], rel=1e-9), "buckets": tuple(buckets)}


def measured_pairs(folder: Path, shape: MeshShape | None) -> PairsResult:
    model = model_from(open_folder(folder), Mesh.create(shape) if shape else Mesh.single(), torch.float64)
    documents = [Document(ids, np.arange(ids.size) > ids.size // 2, None) for ids in IDS if ids.size > 1]
    return of_pairs(model, zip(documents[::2], documents[1::2], strict=True), 40)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("shape", [MeshShape(tp=2, pp=2), MeshShape(cp=2, dp=2)], ids=["tp2-pp2", "cp2-dp2"])
@pytest.mark.parametrize("labels", [0, 1])
def test_every_layout_finds_the_same_of_pairs(labels: int, shape: MeshShape, tmp_path: Path, pool: Pool) -> None:
    """Of log-probabilities, and of the scores of a head of one row, which tp pads."""
    folder = with_text("llama", tmp_path)
    if labels:
        made = LlamaForSequenceClassification.from_pretrained(folder, num_labels=1)
        torch.nn.init.normal_(made.score.weight)
        made.save_pretrained(folder)
    wanted = measured_pairs(folder, None)
    if labels:
        ids = [IDS[number] for number in (0, 1, 3, 4, 5, 6, 7, 8)]
        made.double()
        scores = [made(torch.from_numpy(each)[None]).logits.item() for each in ids]
        np.testing.assert_allclose(wanted.rewards.ravel(), scores, rtol=1e-5, atol=1e-6)
    assert wanted.rewards.shape == (4, 2) and np.unique(wanted.rewards).size == 8
    for found in pool.run(shape.world, measured_pairs, folder, shape):
        np.testing.assert_allclose(found.rewards, wanted.rewards, rtol=1e-9)
        np.testing.assert_array_equal(found.counted, wanted.counted)


@pytest.mark.in_turn(12, 11)
@pytest.mark.slow
def test_the_command_starts_ranks_of_cp(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    given = [llama, "--data", rows(tmp_path / "x.jsonl", {"text": TEXTS[0]}, {"text": "a b c"}), "--by-position", 8]
    asked = [Path(sys.executable).parent / "megacore", "evaluate", *given, "--dtype", "float64", "--json", "--cp", 2]
    done = subprocess.run([*map(str, asked)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found, wanted = json.loads(done.stdout), data(capsys, *given)
    near = [each | {"loss": pytest.approx(each["loss"], rel=1e-9)} for each in wanted["by_position"]]
    assert found["by_position"] == near


@pytest.mark.parametrize("tool", [command, generate], ids=["evaluate", "generate"])
@pytest.mark.parametrize(("etp", "split"), [("1", SPLIT), ("2", EXPERT_TENSOR_PARALLEL)])
def test_the_commands_split_experts_as_they_are_told(
    tool: ModuleType, etp: str, split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two processes, on a mesh of its own."""
    folder, made = with_text("mixtral", tmp_path), []

    def kept(*arguments: Any, **options: Any) -> Model:
        made.append(model_from(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("megacore.inference.model_loader.model_from", kept)
    monkeypatch.setattr(loaded_model, "live", lambda *_: nullcontext(Mesh.single()))
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    given = ["--prompt", "a"] if tool is generate else ["--data", str(rows(tmp_path / "x.jsonl", {"text": "a b c"}))]
    assert tool.main([str(folder), *given, "--tp", "2", "--etp", etp]) == 0
    assert made[0].parameters.layout.split == split


# -- windows


@pytest.mark.quick
@pytest.mark.parametrize("size", [0, 1, 2, 6, 7, 8, 20, 21])
@pytest.mark.parametrize(("length", "stride"), [(6, 6), (6, 4), (6, 1), (100, 100)])
def test_each_token_but_the_first_is_predicted_once(size: int, length: int, stride: int) -> None:
    document = Document(np.arange(size), np.ones(size, np.bool_), None)
    predicted: list[int] = []
    for tokens, labels, _ in Windows(length, stride).of(document):
        assert 1 <= len(tokens) == len(labels) <= length
        first = int(np.flatnonzero(labels >= 0)[0])
        assert not predicted or first + 1 > length - stride
        assert (labels[first:] == tokens[first:] + 1).all() and (labels[:first] < 0).all()
        predicted += labels[first:].tolist()
    assert predicted == list(range(1, size))


def test_of_a_folder_one_split_is_read(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "set/data").mkdir(parents=True)
    rows(tmp_path / "set/data/train-00000-of-00001.jsonl", {"text": "The moon set"})
    rows(tmp_path / "set/data/test-00000-of-00002.jsonl", {"text": "The sun"})
    rows(tmp_path / "set/data/test-00001-of-00002.jsonl", {"text": "rose over"})
    alone = rows(tmp_path / "alone.jsonl", {"text": "The sun"}, {"text": "rose over"})
    found = data(capsys, llama, "--data", tmp_path / "set", "--split", "test")
    assert found == data(capsys, llama, "--data", alone) and found["documents"] == 2
    assert data(capsys, llama, "--data", tmp_path / "set")["documents"] == 3


# -- what is wrong


def test_what_cannot_be_evaluated(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    good = rows(tmp_path / "good.jsonl", {"text": "The sun"})
    with IndexedWriter(tmp_path / "foreign", 70_000) as writer:
        writer.write(np.array([1, 60_000], np.int32))
    with IndexedWriter(tmp_path / "negative", 70_000) as writer:
        writer.write(np.array([1, 2], np.int32))
    (tmp_path / "negative.bin").write_bytes(np.array([1, -7], np.int32).tobytes())
    bare = save("gpt2", tmp_path / "bare")
    cases: Sequence[tuple[Path, Path, list[str], str]] = [
        (llama, tmp_path / "nowhere", [], "nowhere does not exist"),
        (llama, tmp_path / "foreign", [], "60000, and the model's vocabulary goes from 0 to 289"),
        (llama, tmp_path / "negative", [], "has the token -7, and the model's vocabulary"),
        (llama, rows(tmp_path / "bad.jsonl", {"text": "a b"}, {"body": "c"}), [], "bad.jsonl, line 2: no key 'text'"),
        (llama, rows(tmp_path / "chat.jsonl", {"messages": []}), [], "chat.jsonl, line 1: has no messages"),
        (llama, rows(tmp_path / "one.jsonl", {"text": ""}), [], "no token to predict"),
        (llama, rows(tmp_path / "empty.jsonl"), [], "there are no documents"),
        (bare, good, [], "has no tokenizer"),
        (llama, good, ["--picture", "x.png"], "--picture is of --by-position"),
        (llama, good, ["--sequence-length", "64"], "the model has 32 positions"),
        (llama, good, ["--sequence-length", "8", "--stride", "9"], "would leave out tokens"),
        (llama, good, ["--tp", "3"], "cannot split heads (4) over tp=3"),
        (llama, good, ["--exchange", "gather"], "--exchange gather: --cp is 1, and no text is split: leave it out"),
        (llama, good, ["--cp", "3", "--exchange", "heads"], "4 heads (2 of keys) over 3 ranks of cp: choose from 1, 2"),
        (llama, good, ["--split", "test"], "good.jsonl has no splits: they are of folders and of data sets of the hub"),
        (llama, tmp_path, ["--split", "dev"], "has no split dev among "),
        (
            llama,
            rows(tmp_path / "p.jsonl", {"prompt": "c", "chosen": "a", "rejected": "b"}),
            ["--stride", "9"],
            "the data has pairs, ",
        ),
        (
            llama,
            rows(tmp_path / "q.jsonl", {"prompt": "c", "chosen": "a", "rejected": "b"}, {"text": "a"}),
            [],
            "q.jsonl, line 2: ",
        ),
        (llama, tmp_path / "p.jsonl", ["--sequence-length", "1"], "no pair of the data has at most 1 tokens in each"),
        (llama, good, ["--ep", "2"], "ep=2: the model has no experts to split, set ep=1"),
    ]
    for folder, path, arguments, says in cases:
        assert command.main([str(folder), "--data", str(path), *arguments]) == 1, says
        assert says in capsys.readouterr().err
