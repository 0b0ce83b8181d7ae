"""The indexed dataset: its bytes, both ways, against a layout spelled by hand and against Megatron's own code."""

import os
import struct
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacore.data import indexed
from megacore.data.indexed import IndexedDataset, IndexedWriter
from megacore.data.samples import Samples

CORPUS = [[[1, 2, 3], [4]], [[]], [], [[5, 6]], [[7], [], [8, 9, 10]]]


def write(prefix: Path, documents, vocabulary: int = 100) -> None:
    with IndexedWriter(prefix, vocabulary) as writer:
        for document in documents:
            writer.write(*document)


def by_hand(prefix: Path, *, magic=b"MMIDIDX\0\0", version=1, code=8, lengths, pointers, bounds, data: bytes) -> None:
    index = struct.pack("<9sQBQQ", magic, version, code, len(lengths), len(bounds))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(pointers)}q{len(bounds)}q", *pointers, *bounds)
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(data)


def test_writes_the_bytes_of_the_format(tmp_path):
    write(tmp_path / "ours", [[[1, 2, 3], [4]], [[5]]], vocabulary=65499)
    data = struct.pack("<5H", *range(1, 6))
    by_hand(tmp_path / "hand", lengths=[3, 1, 1], pointers=[0, 6, 8], bounds=[0, 2, 3], data=data)
    for suffix in ("idx", "bin"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"hand.{suffix}").read_bytes()


@pytest.mark.parametrize(("vocabulary", "code", "form"), [(65499, 8, "<2H"), (65500, 4, "<2i")])
def test_token_dtype_follows_the_vocabulary(tmp_path, vocabulary, code, form):
    write(tmp_path / "a", [[[7, vocabulary - 1]]], vocabulary)
    assert (tmp_path / "a.idx").read_bytes()[17] == code
    assert (tmp_path / "a.bin").read_bytes() == struct.pack(form, 7, vocabulary - 1)


@pytest.mark.parametrize(("code", "form"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_reads_every_token_dtype_in_any_order_of_sequences(tmp_path, code, form):
    size = struct.calcsize(form)
    data = b"\xff" + struct.pack(f"<5{form}", 1, 2, 3, 4, 5)  # unaligned, out of order, overlapping
    pointers = [1 + 3 * size, 1, 1 + size]
    by_hand(tmp_path / "a", code=code, lengths=[2, 2, 1], pointers=pointers, bounds=[0, 2, 3], data=data)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.document(0).tolist() == [4, 5, 1, 2]
    assert dataset.document(1).tolist() == [2]


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_the_stream_of_tokens_begins_where_the_first_sequence_does(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(indexed, "CHUNK", chunk)
    data = b"\xff" + struct.pack("<6H", *range(6))
    by_hand(tmp_path / "a", code=8, lengths=[2, 0, 3, 1], pointers=[1, 5, 5, 11], bounds=[0, 2, 2, 3, 4, 4], data=data)
    dataset = IndexedDataset(tmp_path / "a")
    assert not dataset.scattered and [dataset.start(d) for d in range(6)] == [0, 2, 2, 5, 6, 6]
    assert dataset.tokens(1, 6).tolist() == [1, 2, 3, 4, 5]
    assert dataset.starts_within(0, 6).tolist() == [2, 2, 5] and not dataset.starts_within(2, 5).size


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("pointers", [[0, 6, 10], [0, 2, 8], [4, 0, 8], [0, 4, 6]])
def test_what_is_scattered_is_no_stream_to_train_on(tmp_path, monkeypatch, chunk, pointers):
    monkeypatch.setattr(indexed, "CHUNK", chunk)
    data = struct.pack("<6H", *range(6))
    by_hand(tmp_path / "a", code=8, lengths=[2, 2, 1], pointers=pointers, bounds=[0, 1, 3], data=data)
    with pytest.raises(ValueError, match=r"a.idx puts sequence \d at byte \d+ of a.bin, and the one before it ends at"):
        Samples(IndexedDataset(tmp_path / "a"), 2, seed=0)


documents = st.lists(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=4), max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents)
def test_any_documents_come_back(tmp_path, documents):
    write(tmp_path / "a", documents)
    dataset = IndexedDataset(tmp_path / "a")
    flat = [[token for sequence in document for token in sequence] for document in documents]
    assert [dataset.document(i).tolist() for i in range(dataset.documents)] == flat
    assert dataset.document_lengths().tolist() == [len(document) for document in flat]
    lengths = [dataset.document_lengths(first, first + 2).tolist() for first in range(dataset.documents - 1)]
    assert lengths == [[len(each) for each in flat[first : first + 2]] for first in range(dataset.documents - 1)]


BAD = {
    "truncated header": (lambda raw: raw[:20], "has 20 bytes, fewer than its header's 34"),
    "empty": (lambda raw: b"", "has 0 bytes, fewer"),
    "magic": (lambda raw: b"TNTIDX\x00\x00\x00" + raw[9:], "starts with b'TNTIDX"),
    "version": (lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:], "has version 2, and only version 1"),
    "float tokens": (lambda raw: raw[:17] + b"\x06" + raw[18:], "token dtype code 6"),
    "truncated": (lambda raw: raw[:-1], "sequences and 6 document bounds take 166"),
    "modes": (lambda raw: raw + bytes(7), "multimodal"),
    "bounds fall": (lambda raw: raw[:-16] + struct.pack("<2q", 9, 7), "do not climb from 0 to its 7"),
    "bounds end early": (lambda raw: raw[:-8] + struct.pack("<q", 6), "do not climb from 0 to its 7"),
    "pointer": (lambda raw: raw[:62] + struct.pack("<q", 2**62) + raw[70:], "0 .3 tokens of 2 bytes. at byte 4611"),
    "negative pointer": (lambda raw: raw[:62] + struct.pack("<q", -2) + raw[70:], "at byte -2 of a.bin, which has 20"),
    "overlapping": (lambda raw: raw[:34] + struct.pack("<i", 10) + raw[38:], "17 tokens in all, and a.bin holds 10:"),
    "negative length": (lambda raw: raw[:34] + struct.pack("<i", -1) + raw[38:], "sequence 0 .-1 tokens"),
}


BAD_DATA = {
    # As of a file that was made anew, and whose index is the old one.
    "more": (lambda raw: raw + b"\x05\x00", r"a\.idx tells of the first 20 bytes of a\.bin, which has 22: one of"),
    "less": (lambda raw: raw[:-1], r"sequence 6 .3 tokens of 2 bytes. at byte 14 of a.bin, which has 19"),
}


@pytest.mark.parametrize(
    ("suffix", "break_it", "message"),
    [*(("idx", *case) for case in BAD.values()), *(("bin", *case) for case in BAD_DATA.values())],
    ids=[*BAD, *BAD_DATA],
)
def test_a_bad_pair_is_named(tmp_path, suffix, break_it, message):
    write(tmp_path / "a", CORPUS)
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(break_it(file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_half_a_pair_is_named(tmp_path, suffix):
    write(tmp_path / "a", CORPUS)
    (tmp_path / f"a.{suffix}").unlink()
    with pytest.raises(FileNotFoundError, match=f"a.{suffix} is missing: a dataset is the pair a.idx and a.bin"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_outside_the_vocabulary_is_named_and_nothing_is_published(tmp_path, token):
    with pytest.raises(ValueError, match=f"document 1 has tokens from .*{token}.* vocabulary of 100"):
        write(tmp_path / "a", [[[1]], [[2, token]]])
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_no_pair_and_another_replaces_one_whole(tmp_path, monkeypatch):

    write(tmp_path / "a", CORPUS)
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "a", 100) as writer:
        assert not (tmp_path / "a.idx").exists()
        writer.write([9])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="no room"), monkeypatch.context() as full:
        full.setattr(indexed, "_copy", mock.Mock(side_effect=OSError("no room")))
        write(tmp_path / "a", CORPUS)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a", CORPUS)
    write(tmp_path / "a", [[[11]]])
    assert [IndexedDataset(tmp_path / "a").document(0).tolist()] == [[11]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_pair_is_on_the_disk_before_a_folder_with_it_is_published(tmp_path, monkeypatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    write(tmp_path / "a", CORPUS)
    assert {path.stat().st_ino for path in tmp_path.iterdir()} <= synced


def test_memory_does_not_grow_with_the_documents(tmp_path, monkeypatch):
    """Lengths and bounds of these in memory are 96 kB, and three times that while the index is made."""
    monkeypatch.setattr(indexed, "CHUNK", 256)
    document = np.array([1, 2], np.uint16)
    tracemalloc.start()
    with IndexedWriter(tmp_path / "a", 100) as writer:
        for _ in range(8000):
            writer.write(document)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80_000 and IndexedDataset(tmp_path / "a").documents == 8000


@pytest.mark.parametrize("vocabulary", [1000, 100_000])
def test_megatron_reads_ours_and_we_read_megatrons(tmp_path, vocabulary):
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    rng = np.random.default_rng(0)
    corpus = [[rng.integers(0, vocabulary, rng.integers(1, 9)) for _ in range(rng.integers(1, 4))] for _ in range(20)]

    write(tmp_path / "ours", corpus, vocabulary)
    megatron = theirs.IndexedDataset(str(tmp_path / "ours"))
    flat = [sequence for document in corpus for sequence in document]
    assert len(megatron) == len(flat)
    assert all(np.array_equal(megatron[i], sequence) for i, sequence in enumerate(flat))
    assert megatron.document_indices.tolist() == np.cumsum([0, *map(len, corpus)]).tolist()

    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=theirs.DType.optimal_dtype(vocabulary))
    for document in corpus:
        builder.add_document(torch.from_numpy(np.concatenate(document)), [len(sequence) for sequence in document])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("idx", "bin"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    ours = IndexedDataset(tmp_path / "theirs")
    assert all(np.array_equal(ours.document(i), np.concatenate(document)) for i, document in enumerate(corpus))
