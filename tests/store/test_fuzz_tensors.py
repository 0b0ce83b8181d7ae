"""Safetensors files that nobody should open: each is a StoreError, or it is sound and lies within the file."""

import json
import math
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from damage import NUMBERS, damage_bytes, damage_tree
from turns import ROTATION

from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.tensors import DTYPES, TensorFile

CASES = 800
"""Random files of each kind, others with another rotation."""
A = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}


def raw(header: object, data: int = 12) -> bytes:
    """A file with this header (as it is if it is bytes) and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(1, 1 + data))


def with_a(**changed: object) -> bytes:
    return raw({"a": A | changed}, 4)


SOUND = raw({"a": A, "b": B, "__metadata__": {"format": "pt"}})
BIG = 2**63

BAD: list[tuple[str, bytes, str]] = [
    ("empty", b"", "has 0 bytes, fewer than the 8"),
    ("seven bytes", b"1234567", "has 7 bytes, fewer than the 8"),
    ("length 2^64-1", b"\xff" * 8 + b"{}", "header of 18446744073709551615 bytes, above the limit of 33554432"),
    ("length above the limit", struct.pack("<Q", 100_000_001) + b"{}", "header of 100000001 bytes, above the limit"),
    ("length beyond the file", struct.pack("<Q", 3) + b"{}", "header of 3 bytes, and only 2 follow: it is truncated"),
    ("no header", struct.pack("<Q", 0), "header is not JSON"),
    ("not UTF-8", raw(b'{"\xff":1}'), "header is not JSON: 'utf-8' codec can't decode byte 0xff in position 2"),
    ("not JSON", raw(b'{"a":'), "header is not JSON"),
    ("a list", raw([1]), r"header is \[1\], not tensors by name"),
    ("a number", raw(b"12"), "header is 12, not tensors by name"),
    ("deep lists", raw(b"[" * 200_000), "header is not JSON"),
    ("NaN", raw(b'{"a":NaN}'), "NaN is not JSON"),
    ("a tensor twice", raw(b'{"a":{},"a":{}}'), "'a' stands twice"),
    ("a tensor that is null", raw({"a": None}), "tensor 'a' is None: it must have dtype, shape and data_offsets"),
    ("no dtype", raw({"a": {"shape": [4], "data_offsets": [0, 4]}}, 4), "tensor 'a' is {.*}: it must have dtype"),
    ("something more", with_a(scale=2), "tensor 'a' is {.*}: it must have dtype, shape and data_offsets, and nothing"),
    ("an unknown dtype", with_a(dtype="float32"), "tensor 'a' has dtype 'float32': known are BOOL"),
    ("half-byte dtypes", with_a(dtype="F4", shape=[8]), "tensor 'a' has dtype 'F4': known are BOOL"),
    ("a dtype that is a list", with_a(dtype=["U8"]), r"tensor 'a' has dtype \['U8'\]: known are"),
    ("a dtype of a page", with_a(dtype="x" * 10_000), r"has dtype 'x+\.\.\.x+': known are"),
    ("a shape that is a number", with_a(shape=4), "has shape 4: it must list integers"),
    ("a shape that is a text", with_a(shape="4"), "has shape '4': it must list integers"),
    ("a negative size", with_a(shape=[-4]), r"has shape \[-4\]: it must list integers"),
    ("two negative sizes", with_a(shape=[-2, -2]), r"has shape \[-2, -2\]"),
    ("a size that is true", with_a(shape=[4, True]), r"has shape \[4, True\]"),
    ("a size of 4.0", with_a(shape=[4.0]), r"has shape \[4.0\]"),
    ("a size of null", with_a(shape=[None]), r"has shape \[None\]"),
    ("a size in a list", with_a(shape=[[4]]), r"has shape \[\[4\]\]"),
    ("a size of 2^63", with_a(shape=[BIG]), rf"has shape \[{BIG}\]: it must list integers from 0 to {BIG - 1}"),
    ("sizes that overflow to 4", with_a(shape=[2**62, 4, 4]), r"its bytes are more than 9223372036854775807"),
    ("sizes that overflow beside a 0", with_a(shape=[2**62, 2**62, 0], data_offsets=[0, 0]), "bytes are more than"),
    ("65 dimensions", with_a(shape=[1] * 64 + [4]), "has 65 dimensions: 64 are the most"),
    ("a million dimensions", with_a(shape=[2**60] * 100_000), "has 100000 dimensions"),
    ("one offset", with_a(data_offsets=[4]), r"has data_offsets \[4\]: they must be two integers that climb"),
    ("three offsets", with_a(data_offsets=[0, 4, 4]), r"has data_offsets \[0, 4, 4\]"),
    ("offsets by name", with_a(data_offsets={"0": 4}), r"has data_offsets {'0': 4}"),
    ("offsets that are text", with_a(data_offsets=["0", "4"]), r"has data_offsets \['0', '4'\]"),
    ("a negative offset", with_a(data_offsets=[-4, 0]), r"has data_offsets \[-4, 0\]"),
    ("offsets that fall", with_a(data_offsets=[4, 0]), r"has data_offsets \[4, 0\]"),
    ("an offset that is true", with_a(shape=[1], data_offsets=[False, True]), r"has data_offsets \[False, True\]"),
    ("offsets with a point", with_a(data_offsets=[0.0, 4.0]), r"has data_offsets \[0.0, 4.0\]"),
    ("an offset of 2^63", with_a(data_offsets=[BIG, BIG + 4]), rf"has data_offsets \[{BIG}, {BIG + 4}\]"),
    ("offsets of another size", with_a(shape=[3]), r"\[3\] in U8, which takes 3 bytes, and its offsets span 4"),
    ("a wider dtype", with_a(dtype="F64"), r"\[4\] in F64, which takes 32 bytes, and its offsets span 4"),
    ("outside the file", raw({"a": A | {"data_offsets": [1, 5]}}, 4), r"ends at byte \d+ of a file of \d+"),
    ("far outside the file", with_a(data_offsets=[2**62, 2**62 + 4]), "ends at byte 46116860184273\\d+ of a file"),
    ("truncated data", SOUND[:-1], r"tensor 'b' ends at byte \d+ of a file of \d+: it is truncated"),
    ("overlapping", raw({"a": A, "b": B | {"data_offsets": [3, 11]}}, 11), r"'b' begins at byte \d+ and overlaps"),
    ("the same bytes", raw({"a": A, "b": A}, 4), "tensor 'b' begins at byte .* overlaps tensor 'a'"),
    ("one within another", raw({"a": B | {"data_offsets": [0, 8]}, "b": A | {"data_offsets": [2, 6]}}, 8), "overlaps"),
    ("empty within another", raw({"a": A, "b": {"dtype": "U8", "shape": [0], "data_offsets": [2, 2]}}, 4), "overlaps"),
    ("a hole", raw({"a": A, "b": B | {"data_offsets": [5, 13]}}, 13), "'b' begins at byte .* a hole after tensor 'a'"),
    ("a hole at the front", raw({"b": B}), "'b' begins at byte .* leaves a hole after the header"),
    ("bytes at the end", SOUND + b"1", r"tensor 'b' ends at byte \d+, and the file goes on to \d+"),
    ("bytes and no tensor", raw({}, 5), "the header ends at byte 10, and the file goes on to 15"),
    ("metadata that is a text", raw({"__metadata__": "pt"}, 0), "__metadata__ is 'pt', not strings by name"),
    ("metadata with a number", raw({"__metadata__": {"n": 1}}, 0), "__metadata__ is {'n': 1}, not strings by name"),
    ("metadata that is null", raw({"__metadata__": None}, 0), "__metadata__ is None"),
    ("a git-LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"),
    ("a torch.save file", b"PK\x03\x04\x00\x00\x08\x08" + bytes(64), "is a zip archive, as torch.save writes"),
    ("a pickle", b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00}\x94.", "is a pickle and not safetensors"),
    ("a short pickle", b"\x80\x02}.", "is a pickle and not safetensors"),
    ("a GGUF file", b"GGUF\x03\x00\x00\x00" + bytes(64), "is a GGUF file"),
    ("a web page", b"<!DOCTYPE html><html>", "is a web page"),
    ("a name of a page", raw({"x" * 10_000: None}), r"tensor 'x+\.\.\.x+' is None"),
]


@pytest.mark.parametrize(("data", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_files(tmp_path, data, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(StoreError, match=message) as raised:
        TensorFile.open(path)
    assert str(path) in str(raised.value) and len(str(raised.value)) < 1500


def test_the_sound_one_is_sound(tmp_path):
    (tmp_path / "f").write_bytes(SOUND)
    assert TensorFile.open(tmp_path / "f").array("b").shape == (2,)


def test_all_problems_at_once(tmp_path):
    (tmp_path / "f").write_bytes(raw({"a": A | {"dtype": "X"}, "b": B | {"shape": [9]}, "__metadata__": 1}))
    with pytest.raises(StoreError, match=r"__metadata__ is 1.*; tensor 'a' has dtype.*; tensor 'b' has shape \[9\]"):
        TensorFile.open(tmp_path / "f")
    (tmp_path / "g").write_bytes(raw({f"{i}": None for i in range(1000)}))
    with pytest.raises(StoreError, match=r"tensor '9' is None.*; and 990 more$"):
        TensorFile.open(tmp_path / "g")


def folder(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


PLACES: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda path: None, "No such file or directory"),
    ("folder", folder, "is a folder, and no file"),
    ("pipe", os.mkfifo, "is a pipe"),
    ("device", lambda path: path.symlink_to("/dev/zero"), "is a device or socket"),
    ("dangling link", dangling, "is a link to .*gone, which does not exist"),
    ("circular link", lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
]


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES])
def test_what_is_no_file(tmp_path, make, message):
    make(tmp_path / "f")
    with pytest.raises(StoreError, match=message) as raised:
        TensorFile.open(tmp_path / "f")
    assert str(tmp_path / "f") in str(raised.value)


@pytest.mark.parametrize("name", ["a\x00b", "\ud800", "x" * 300, "f/inside"])
def test_names_that_no_file_can_have(tmp_path, name):
    (tmp_path / "f").write_bytes(SOUND)
    with pytest.raises(StoreError):
        TensorFile.open(tmp_path / name)


def test_a_file_of_someone_else(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(SOUND)
    path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:  # to whom nothing is forbidden
            os.seteuid(65534)
        with pytest.raises(StoreError, match="f: Permission denied"):
            TensorFile.open(path)
    finally:
        os.seteuid(user)


def test_claims_allocate_nothing(tmp_path):
    """Sizes of 2^60 in a file of hundreds of bytes."""
    claims = {f"{i}": {"dtype": "U8", "shape": [2**60], "data_offsets": [i * 2**60, (i + 1) * 2**60]} for i in range(7)}
    cases = [raw(claims), struct.pack("<Q", 100_000_000) + b"{}", b"\xff" * 100]
    for case in cases:
        (tmp_path / "f").write_bytes(case)
        tracemalloc.start()
        with pytest.raises(StoreError):
            TensorFile.open(tmp_path / "f")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


# -- random files


def sound(rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a sound file."""
    header: dict[str, Any] = {}
    at = 0
    for i in range(rng.randrange(5)):
        dtype = rng.choice(sorted(DTYPES))
        shape = [rng.randrange(4) for _ in range(rng.randrange(4))]
        stop = at + DTYPES[dtype].itemsize * math.prod(shape)
        header[f"layer.{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, stop]}
        at = stop
    if rng.random() < 0.5:
        header["__metadata__"] = {"format": "pt"}
    return header, rng.randbytes(at)


def other_tree(rng: random.Random) -> bytes:
    header, data = sound(rng)
    return raw(damage_tree(header, rng), 0) + data


def other_offsets(rng: random.Random) -> bytes:
    """Offsets and sizes at the edges of what there is, and of what integers hold."""
    header, data = sound(rng)
    for record in [record for name, record in header.items() if name != "__metadata__"]:
        for key in ("shape", "data_offsets"):
            edges = (*NUMBERS, len(data), len(data) + 1, rng.randrange(len(data) + 1))
            record[key] = [rng.choice(edges) if rng.random() < 0.15 else n for n in record[key]]
    return raw(header, 0) + data


def other_bytes(rng: random.Random) -> bytes:
    header, data = sound(rng)
    return damage_bytes(raw(header, 0) + data, rng)


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(40))


def spaced(rng: random.Random) -> bytes:
    """Sound, but for the alignment: always opens."""
    header, data = sound(rng)
    return raw(json.dumps(header).encode() + b" " * rng.randrange(9), 0) + data


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("kind", [other_tree, other_offsets, other_bytes, noise, spaced])
def test_random_files(tmp_path, kind, record_property):
    """Refused, or sound: then every tensor can be read, they tile the data, and the library agrees."""
    rng, path, opened = random.Random(f"{kind.__name__} {ROTATION}"), tmp_path / "f", 0
    for _ in range(CASES):
        case = kind(rng)
        path.write_bytes(case)
        try:
            file = TensorFile.open(path)
        except StoreError as error:
            assert str(path) in str(error), case
            continue
        opened += 1
        data = 8 + struct.unpack_from("<Q", case)[0]
        assert all(data <= entry.start <= entry.stop <= len(case) for entry in file.entries.values()), case
        assert sum(entry.stop - entry.start for entry in file.entries.values()) == len(case) - data, case
        for name, entry in file.entries.items():
            array = file.array(name)
            assert array.shape == entry.shape and array.tobytes() == case[entry.start : entry.stop], case
        assert len(safetensors.deserialize(case)) == len(file.entries), case
    print(f"{kind.__name__}: {CASES} files, {opened} of them sound")
    record_property("opened", opened)
    assert opened == CASES if kind is spaced else opened < CASES
