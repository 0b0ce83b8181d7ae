"""Files of texts that are tokenized beside training: the samples of token files, in an order that layouts share."""

import gzip
import json
import os
import random
import re
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import yaml
from engine import RECIPE, Result, assert_near, problems
from pool import Pool

from megacore.data import text, text_streams, tokenizer
from megacore.data.batches import Batches, TokenError
from megacore.data.blend import Blend
from megacore.data.indexed import IndexedDataset
from megacore.data.model_tokenizer import ModelFiles
from megacore.data.samples import Sample, Samples
from megacore.data.text import FileRange, InputError
from megacore.data.text_streams import AHEAD, CHUNK, Chunk, Place, StreamedTexts, TextFiles
from megacore.store.tensor_files.companions import TEXT, companions
from megacore.tools.tokenize import main

LENGTH, VOCAB = 16, 300


def lines(number: int, count: int = 30) -> str:
    """A file of .jsonl, some of whose documents are empty."""
    rng = random.Random(number)
    texts = (" ".join(f"{number}-{index}" for _ in range(rng.randrange(8))) for index in range(count))
    return "".join(json.dumps({"text": each}) + "\n" for each in texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts in files of several kinds, and beside them their token files."""
    made = tmp_path_factory.mktemp("streams")
    source = made / "texts"
    (source / "more").mkdir(parents=True)
    for name in ("a.jsonl", "more/b.jsonl", "more/c.jsonl"):
        (source / name).write_text(lines(ord(name[-7])))
    (source / "more/d.jsonl.gz").write_bytes(gzip.compress(lines(9).encode()))
    (source / "e.md").write_text("# A document\n\nof its own\n")
    if pyarrow := _pyarrow():
        table = pyarrow.table({"text": [f"row {index}" for index in range(20)], "id": list(range(20))})
        pyarrow.parquet.write_table(table, source / "f.parquet", row_group_size=6)
    assert main([str(source), "--out", str(made), "--train-vocab", str(VOCAB), "--workers", "1"]) == 0
    return made


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        return None
    return pyarrow


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many pieces and parts, and processes that are none."""
    monkeypatch.setattr(text, "LINES", 500)
    monkeypatch.setattr(text_streams, "CHUNK", 1000)
    monkeypatch.setattr(text_streams, "_Worker", Here)
    monkeypatch.setattr(TextFiles, "load", lambda texts: loaded(texts.model.files["tokenizer.json"].path.parent))


loaded = lru_cache(tokenizer.load)


class Here:
    """What a worker is to a rank, in its process."""

    def __init__(self, texts: TextFiles) -> None:
        self._texts, self._loaded = texts, texts.load()
        self._chunks: dict[int, Iterator[Chunk]] = {}

    def ask(self, stream: int, place: Place | None = None) -> mock.Mock:
        if place is not None:
            self._chunks[stream] = self._texts.chunks(self._loaded, stream, place)
        return mock.Mock(result=partial(next, self._chunks[stream]))


def texts_of(folder: Path, count: int = 1, name: str = "texts", **given: Any) -> TextFiles:
    files = {each: file.held() for each, file in companions(folder, folder, TEXT).items()}
    path = folder / name
    return TextFiles(name, tuple(text.find_files([path])), count, ModelFiles(files, {}, VOCAB), **given)


def streamed(texts: TextFiles) -> StreamedTexts:
    return StreamedTexts(texts, LENGTH, 12, 1)


def assert_same(one: Sample, other: Sample) -> None:
    for name in ("tokens", "documents", "counted"):
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype and left.tolist() == right.tolist(), name


@pytest.mark.quick
def test_in_the_order_of_the_files_they_are_those_of_the_token_file(folder: Path) -> None:
    """Bit by bit and over the end, by another process."""
    one, prepared = streamed(texts_of(folder, seed=None)), Samples(IndexedDataset(folder / "corpus"), LENGTH, None)
    for index in range(2 * prepared.per_epoch + 3):
        assert_same(one.sample(index), prepared.sample(index))


@pytest.mark.quick
@pytest.mark.usefixtures("small")
def test_documents_of_a_least_length_alone(folder: Path) -> None:
    tokens = IndexedDataset(folder / "corpus")
    long = [each for index in range(tokens.documents) if (each := tokens.document(index)).size >= 20]
    stream = np.concatenate(long * 2)
    some = streamed(texts_of(folder, seed=None, least=20))
    for index in range(sum(each.size for each in long) // LENGTH):
        assert some.sample(index).tokens.tolist() == stream[index * LENGTH :][: LENGTH + 1].tolist()


@pytest.mark.quick
@pytest.mark.usefixtures("small")
def test_streams_share_out_the_documents_of_an_epoch_in_another_order_each(folder: Path, tmp_path: Path) -> None:
    """And a sample is one of the token file of the documents of its stream, in the order that this has them."""
    texts = texts_of(folder, 3)
    every = sorted(each for _, each in _epoch(texts_of(folder, 1, seed=None), 0, 0) if each)
    epochs = [[_epoch(texts, stream, epoch) for stream in range(3)] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(each for stream in epoch for _, each in stream if each) == every
    other = _epoch(texts_of(folder, 3, seed=1), 0, 0)
    assert epochs[0][0] != epochs[1][0] and len({tuple(each) for each in (epochs[0][0], epochs[1][0], other)}) == 3
    kept = [[each for _, each in epochs[epoch][1]] for epoch in (0, 1)]
    assert sorted(kept[0]) == sorted(kept[1]) != kept[1] != kept[0]
    one = [[document for _, document in _epoch(texts_of(folder, 1, "texts/a.jsonl"), 0, epoch)] for epoch in (0, 1)]
    assert one[0] != one[1] and sorted(one[0]) == sorted(one[1])
    # A run that is resumed years later must see the same data.
    pinned = "97-12 97-11 97-2 97-17 97-15 97-14 97-0 97-16"
    assert " ".join(each.split()[0] for each in one[0] if each).startswith(pinned)
    source = tmp_path / "stream.jsonl"
    source.write_text("".join(json.dumps({"text": each}) + "\n" for each in [*kept[0], *kept[1]]))
    assert main([str(source), "--out", str(tmp_path), "--tokenizer", str(folder), "--workers", "1"]) == 0
    prepared, samples = Samples(IndexedDataset(tmp_path / "corpus"), LENGTH, None), streamed(texts)
    for index in range(prepared.per_epoch - 1):
        assert_same(samples.sample(3 * index + 1), prepared.sample(index))


def _epoch(texts: TextFiles, stream: int, epoch: int) -> list[tuple[Place, str]]:
    found = list[tuple[Place, str]]()
    for place, document in texts.documents(stream, Place(epoch, 0, 0, 0, 0)):
        if place.epoch > epoch:
            return found
        assert isinstance(document, str)
        found.append((place, document))
    raise AssertionError("it has an end")


@pytest.mark.parametrize(("dp", "then", "count"), [(1, 2, 3), (2, 3, 3), (3, 1, 2)])
@pytest.mark.usefixtures("small")
def test_a_layout_goes_on_where_another_one_was(folder: Path, dp: int, then: int, count: int) -> None:
    """From what its ranks know together, as JSON, at the samples that follow; also where ranks read ahead of it, and
    where a rank reads all streams, for they are not shared out evenly."""
    texts = texts_of(folder, count, "texts/more")
    whole = [streamed(texts).sample(index).tokens.tolist() for index in range(96)]

    def batches(rank: int, size: int, source: StreamedTexts) -> Batches:
        return Batches(source, 12, 1, rank, size)

    sources = [streamed(texts) for _ in range(dp)]
    for rank, source in enumerate(sources):
        for step in range(5):
            batches(rank, dp, source).microbatches(step)
    known = sources[0].merged([each.state(36, rank == 0) for rank, each in enumerate(sources)])
    assert {stream: place[0] for stream, place in known["places"].items()} == {
        str(stream): -(-(36 - stream) // count) for stream in range(count)
    }, "each stream is known at the very sample"
    found = dict[int, list[int]]()
    for rank in range(then):
        resumed = streamed(texts)
        resumed.resume(**json.loads(json.dumps(known)))
        for step in range(3, 8):
            for number, batch in enumerate(batches(rank, then, resumed).microbatches(step)):
                found[12 * step + number * then + rank] = batch.tokens[0].tolist()
    assert [found[index] for index in range(36, 96)] == [each[:-1] for each in whole[36:]]
    assert resumed.sample(1).tokens.tolist() == whole[1], "it goes back to the beginning"


@pytest.mark.quick
def test_a_position_of_a_billion_samples_is_reached_by_reading_a_part_of_a_file(
    folder: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = texts_of(folder, 8, "texts/a.jsonl")
    texts = replace(texts, files=texts.files * 20_000)
    read, lines_of = list[FileRange](), text._lines

    def noted(piece: FileRange, file: Any) -> Any:
        read.append(piece)
        return lines_of(piece, file)

    monkeypatch.setattr(text, "_lines", noted)
    state = {str(stream): [125_000_000, 3, 17_000 + stream, 1, 0, 7, 2] for stream in range(8)}
    source = streamed(texts)
    source.resume(streams=8, places=state)
    samples = [source.sample(10**9 + index) for index in range(8)]
    assert len(read) <= 8 * 5, "pieces that a first chunk is made of"
    for stream, sample in enumerate(samples):
        place = Place(3, 17_000 + stream, 1, 0, 7)
        chunk = next(texts.chunks(texts.load(), stream, place))
        assert sample.tokens.tolist() == chunk.tokens[2 : 3 + LENGTH].tolist()


@pytest.mark.usefixtures("small")
def test_what_cannot_be_read_is_named_or_left_out(folder: Path, tmp_path: Path) -> None:
    for name, file in companions(folder, folder, TEXT).items():
        (tmp_path / name).write_bytes(file.read())
    (tmp_path / "texts").mkdir()
    good = [json.dumps({"text": f"good {index}"}) for index in range(40)]
    bad = [*good[:30], '{"text": 3}', "{", *good[30:]]
    (tmp_path / "texts/a.jsonl").write_text("\n".join(bad))
    with pytest.raises(InputError, match=r"a.jsonl, line 31: 'text' is a int, not text \(.*chat.bad_lines=skip"):
        texts_of(tmp_path).look()
    source = streamed(texts_of(tmp_path, skip=True, seed=None))
    source.sample(30)
    assert source.skipped and source.skipped % 2 == 0
    (tmp_path / "texts/a.jsonl").write_text("\n".join(good))
    (tmp_path / "texts/b.txt").write_text("one")
    with pytest.raises(InputError, match=r"texts has 3 pieces \(.*\), too few for 9 streams: set streams to 2"):
        texts_of(tmp_path, 9).look()
    (tmp_path / "texts/a.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"a.jsonl, line 1: no key 'text' among : .*\(data.map=\{text: KEY\}"):
        texts_of(tmp_path).look()
    (tmp_path / "texts/b.txt").write_text("")
    for given in ({"skip": True}, {"skip": True, "least": 5}):
        with pytest.raises(InputError, match="stream 0 of 1 of texts has no text"):
            streamed(texts_of(tmp_path, **given)).sample(0)
    with pytest.raises(InputError, match=r"ids up to 299, and the model's vocabulary ends at 98: set model.vocab"):
        streamed(replace(texts_of(tmp_path), model=replace(texts_of(tmp_path).model, vocabulary=99)))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"streams": 2, "places": {}}, "has been read as 2 streams, and the recipe has 1: set streams as it was"),
        ({"streams": 1, "places": {"0": [1, 0, 0, 0, 0, 0, -1]}}, "the state of stream '0' of texts is none"),
        ({"streams": 1, "places": {"1": [1, 0, 0, 0, 0, 0, 0]}}, "the state of stream '1'"),
        ({"streams": 1, "places": [1]}, "the state of stream ''"),
        ({"streams": 1}, "the state of stream ''"),
    ],
)
def test_a_state_of_another_stream_is_refused(folder: Path, state: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        streamed(texts_of(folder)).resume(**state)


@pytest.mark.usefixtures("small")
def test_what_is_needed_later_is_asked_for_with_every_sample(folder: Path) -> None:
    """So that a rank waits for a process only where that is slower than the steps."""
    source = streamed(texts_of(folder))
    source.sample(0)  # who resumes waits for no more than it takes
    (reader,) = source._readers.values()
    assert len(reader.coming) <= 1
    for index in range(1, 300):
        source.sample(index)
        assert len(reader.coming) == AHEAD


@pytest.mark.in_turn(4, 0)
def test_a_slow_process_is_waited_for_and_one_that_dies_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "z.jsonl").write_text(lines(3, 1).replace('""', '"one"') + "{\n")
    damaged = streamed(replace(texts_of(folder), files=(tmp_path / "z.jsonl",)))
    source = streamed(texts_of(folder))
    source.sample(0)
    (worker,) = source._workers
    assert worker is not None and worker._process.pid is not None
    children = Path(f"/proc/{worker._process.pid}/task/{worker._process.pid}/children").read_text().split()
    os.kill(worker._process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        far = threads.submit(source.sample, 3_000)
        with pytest.raises(TimeoutError):
            far.result(2.5)
        for number in (worker._process.pid, *map(int, children)):
            os.kill(number, signal.SIGTERM)  # which a scheduler sends to all; the rank alone ends, and after its step
        os.kill(worker._process.pid, signal.SIGCONT)
        assert far.result(60).tokens.size == LENGTH + 1
    with pytest.raises(TokenError, match=r"z.jsonl, line 2: not JSON.*\(leave out what cannot be read by chat.bad"):
        damaged.sample(20)
    with pytest.raises(TokenError, match=r"z.jsonl, line 2"):
        damaged.sample(0)
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"tokenizes texts has ended by SIGKILL, likely for memory: give the node"):
        source.sample(3_000 + 2 * AHEAD * CHUNK // LENGTH)  # beyond what it may have tokenized before


def test_an_answer_that_cannot_be_received_is_told() -> None:
    """There is no memory for it, say: who waits for it would wait for ever."""
    found, process = Future[Chunk](), mock.Mock(exitcode=-signal.SIGKILL)
    text_streams._receive(mock.Mock(**{"recv.side_effect": MemoryError}), deque([found]), process, "texts")
    process.kill.assert_called_once_with()
    with pytest.raises(RuntimeError, match="tokenizes texts has ended by SIGKILL, likely for memory"):
        found.result(1)


def run(recipe: Path, overrides: Sequence[str]) -> Result:
    """A run on this rank, of files of many pieces."""
    with mock.patch.multiple(text_streams, _Worker=Here, CHUNK=1000), mock.patch.object(text, "LINES", 500):
        return engine.train(str(recipe), overrides)


@pytest.mark.in_turn(2, 0)
def test_a_run_goes_on_with_its_streams_on_another_layout(folder: Path, tmp_path: Path, pool: Pool) -> None:
    """In a blend with a token file, like one process that is not interrupted; and it exports the token that ends."""
    blend: list[dict[str, Any]] = [
        {"path": str(folder / "texts/more"), "streams": 3, "weight": 9},
        {"path": str(folder / "corpus"), "weight": 4},
    ]
    data = {"train": blend, "validation": str(folder / "corpus"), "sequence_length": LENGTH, "temperature": 2}
    recipe = tmp_path / "recipe.yaml"
    model = RECIPE["model"] | {"vocab_size": VOCAB, "max_position_embeddings": LENGTH}
    recipe.write_text(yaml.safe_dump(RECIPE | {"model": model, "data": data | {"tokenizer": str(folder)}}))
    ways: dict[str, tuple[int, list[str]]] = {"one": (1, []), "two": (2, ["mesh.dp=2"])}
    found = {}
    for name, (world, given) in ways.items():
        more = [*given, f"out={tmp_path / name}", "train.steps=4", "checkpoint.every=2"]
        found[name] = pool.run(world, run, recipe, more)[0]
    held = engine.path_of(tmp_path / "two", 2)
    states = json.loads((held / "trainer.json").read_text())["data_states"]
    ((name, state),) = states.items()
    taken = Blend([mock.Mock(length=1)] * 2, [3, 2]).counts(16)[0]
    assert name == blend[0]["path"] and state["streams"] == 3
    assert {stream: place[0] for stream, place in state["places"].items()} == {
        str(stream): -(-(taken - stream) // 3) for stream in range(3)
    }
    assert f'"eos_token_id": {tokenizer.load(folder).end}' in (held / "index.json").read_text()
    more = [f"out={tmp_path / 'again'}", "train.steps=4", f"checkpoint.resume={held}"]
    found["again"] = pool.run(1, run, recipe, more)[0]
    for name, first in (("two", 0), ("again", 2)):
        wanted = found["one"].values("loss")[first:]
        assert len(wanted) == 4 - first
        np.testing.assert_allclose(found[name].values("loss"), wanted, rtol=1e-9)
        assert_near(found[name].weights, found["one"].weights, 1e-9)
    told = problems(str(recipe), "data.train[0].streams=99", f"out={tmp_path / 'three'}")
    assert len(told) == 1 and "too few for 99 streams: set streams to 3" in told[0]
