"""Our safetensors files against the safetensors library, both ways, and against bytes spelled by hand."""

import errno
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from whole import write_tensor

from megacore.parallel import limits
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.tensors import DTYPES, TensorFile, TensorWriter, lay_out, os_errors

TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
SHAPES: list[tuple[int, ...]] = [(3, 4), (), (0, 5), (7,), (2, 1, 3)]


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    ceiling = 2 if dtype == "BOOL" else 2 ** (8 * DTYPES[dtype].itemsize)
    return np.random.default_rng(seed).integers(0, ceiling, shape, DTYPES[dtype].newbyteorder("="))


def by_hand(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write(path: Path, arrays: dict[str, tuple[str, np.ndarray]], metadata: dict[str, str] | None = None) -> Path:
    declared = [(name, dtype, bits.shape) for name, (dtype, bits) in arrays.items()]
    with TensorWriter.create(path, declared, metadata) as writer:
        for name, (_, bits) in arrays.items():
            write_tensor(writer, name, bits)
    return path


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


# -- reading


@pytest.mark.quick
def test_reads_the_bytes_of_the_format(tmp_path):
    header = {
        "z": {"dtype": "U8", "shape": [3, 0], "data_offsets": [4, 4]},
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "U8", "shape": [2, 1], "data_offsets": [4, 6]},
        "b": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]},
        "s": {"dtype": "U8", "shape": [], "data_offsets": [6, 7]},
    }
    path = by_hand(tmp_path / "f", header, bytes([1, 0, 255, 255, 7, 8, 3]))
    file = TensorFile.open(path)
    assert file.size == path.stat().st_size and file.metadata == {"format": "pt"}
    found = [(name, entry.dtype, entry.shape) for name, entry in file.entries.items()]
    assert found == [("z", "U8", (3, 0)), ("a", "U8", (2, 1)), ("b", "I16", (2,)), ("s", "U8", ())]
    for entry, data in zip(file.entries.values(), (b"", b"\7\x08", b"\1\0\xff\xff", b"\3"), strict=True):
        assert path.read_bytes()[entry.start : entry.stop] == data
    for name, values in ("b", np.array([1, 65535], "<u2")), ("a", [[7], [8]]), ("s", 3), ("z", np.empty((3, 0), "u1")):
        np.testing.assert_array_equal(file.array(name), values)
    with pytest.raises(StoreError, match="holds no tensor 'w', and 4 others"):
        file.array("w")
    empty = TensorFile.open(by_hand(tmp_path / "e", b"{}"))
    assert not empty.entries and not empty.metadata


@pytest.mark.parametrize("dtype", TORCH)
def test_reads_what_the_library_writes(tmp_path, dtype):
    arrays = {f"{i}": random_bits(dtype, shape, i) for i, shape in enumerate(SHAPES)}
    given = {name: torch.from_numpy(bits).view(TORCH[dtype]) for name, bits in arrays.items()}
    safetensors.torch.save_file(given, tmp_path / "f", {"format": "pt"})
    file = TensorFile.open(tmp_path / "f")
    assert file.metadata == {"format": "pt"} and set(file.entries) == set(arrays)
    for name, bits in arrays.items():
        read = file.array(name)
        assert (file.entries[name].dtype, read.dtype) == (dtype, DTYPES[dtype])
        np.testing.assert_array_equal(read, bits)


def test_every_dtype_of_the_library_in_whole_bytes(tmp_path):
    """The library lists its dtypes when it meets an unknown one."""
    header = {"a": {"dtype": "?", "shape": [1], "data_offsets": [0, 1]}}
    with pytest.raises(safetensors.SafetensorError) as raised:
        safetensors.deserialize(by_hand(tmp_path / "f", header, b"0").read_bytes())
    known = {word for word in str(raised.value).split("`")[1::2] if word != "?"}
    assert known - set(DTYPES) == {"F4", "F6_E2M3", "F6_E3M2"} and set(DTYPES) <= known
    for name, dtype in DTYPES.items():
        header = {"a": {"dtype": name, "shape": [1], "data_offsets": [0, dtype.itemsize]}}
        safetensors.deserialize(by_hand(tmp_path / "f", header, bytes(dtype.itemsize)).read_bytes())


def test_arrays_share_one_read_only_map(tmp_path):
    path = write(tmp_path / "f", {name: ("F32", random_bits("F32", (4,))) for name in "ab"})
    file = TensorFile.open(path)
    a, again, b = file.array("a"), file.array("a"), file.array("b")
    assert np.shares_memory(a, again) and not np.shares_memory(a, b)
    assert not a.flags.writeable and not a.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 0


def test_an_unaligned_tensor_is_a_copy(tmp_path):
    """A header of the length that its text has puts the data anywhere."""
    for pad in range(8):
        text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode() + b" " * pad
        array = TensorFile.open(by_hand(tmp_path / f"{pad}", text, struct.pack("<2I", 5, 6))).array("a")
        assert array.tolist() == [5, 6] and array.flags.aligned and not array.flags.writeable
        assert array.dtype == np.dtype("<u4")


def test_nothing_is_mapped_before_it_is_asked_for(tmp_path, monkeypatch):
    path = write(tmp_path / "f", {"a": ("F32", random_bits("F32", (4,)))})
    file = TensorFile.open(path)
    assert "_map" not in vars(file)
    with path.open("ab") as more:
        more.write(b"1")
    with pytest.raises(StoreError, match=r"had \d+ bytes and now has \d+"):
        file.array("a")


@pytest.mark.parametrize("name", ["", "../x", "/etc/passwd", "a\x00b", "\ud800", "dtype", "名", "x" * 100_000])
def test_any_name_is_a_key(tmp_path, name):
    one = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    file = TensorFile.open(by_hand(tmp_path / "f", {name: one}, b"\x05"))
    assert list(file.entries) == [name] and file.array(name).tolist() == [5]


def test_links_are_followed(tmp_path):
    path = write(tmp_path / "f", {"a": ("F32", random_bits("F32", (4,)))})
    (tmp_path / "link").symlink_to(path)
    assert TensorFile.open(tmp_path / "link").array("a").tolist() == random_bits("F32", (4,)).tolist()


@pytest.mark.parametrize("length", [128, 128 + 256 * 5, 0x4B50, ord("<")])
def test_lengths_that_begin_like_another_format(tmp_path, length):
    """A header of 128 bytes begins with the byte of a pickle, one of 0x4B50 with the letters of a zip archive."""
    TensorFile.open(by_hand(tmp_path / "f", b"{}".ljust(length)))


# -- writing


MIXED = {
    "scalar": ("F32", random_bits("F32", ())),
    "half": ("BF16", random_bits("BF16", (3, 5))),
    "mask": ("BOOL", random_bits("BOOL", (3,))),
    "step": ("I64", random_bits("I64", (1,))),
    "none": ("F32", random_bits("F32", (0, 2))),
    "eighth": ("F8_E4M3", random_bits("F8_E4M3", (5,))),
    "wide": ("F64", random_bits("F64", (2, 2))),
}


@pytest.mark.quick
def test_the_library_reads_what_we_write(tmp_path):
    path = write(tmp_path / "f", MIXED, {"format": "pt", "ö": "\n"})
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == set(MIXED)
    for name, (dtype, bits) in MIXED.items():
        assert loaded[name].dtype == TORCH[dtype] and tuple(loaded[name].shape) == bits.shape
        assert bits_of(loaded[name]) == bits.tobytes()
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "ö": "\n"}
        assert bits_of(opened.get_slice("half")[1:2]) == MIXED["half"][1][1].tobytes()
    path = write(tmp_path / "g", {name: MIXED[name] for name in ("scalar", "mask", "step", "none", "wide")})
    for name, array in safetensors.numpy.load_file(path).items():
        assert array.tobytes() == MIXED[name][1].tobytes() and array.shape == MIXED[name][1].shape


def test_wider_dtypes_first_and_all_aligned(tmp_path):
    path = write(tmp_path / "f", MIXED)
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    assert length % 8 == 0
    assert list(json.loads(raw[8 : 8 + length])) == ["step", "wide", "scalar", "none", "half", "mask", "eighth"]
    file = TensorFile.open(path)
    assert all(entry.start % DTYPES[entry.dtype].itemsize == 0 for entry in file.entries.values())
    assert all(np.shares_memory(file.array(n), file.array(n)) for n in MIXED if file.array(n).size)
    # The same bytes as the library's, but for the order of equals, which it sorts by name.
    arrays = {name: MIXED[name] for name in ("half", "none", "scalar", "wide")}
    given = {name: torch.from_numpy(bits).view(TORCH[dtype]) for name, (dtype, bits) in arrays.items()}
    safetensors.torch.save_file(given, tmp_path / "library")
    assert write(tmp_path / "ours", arrays).read_bytes() == (tmp_path / "library").read_bytes()


@pytest.mark.parametrize("metadata", [None, {"a": "b"}])
@pytest.mark.parametrize("names", [[], ["half"], list(MIXED)])
def test_file_size(tmp_path, names, metadata):
    declared = [(name, MIXED[name][0], MIXED[name][1].shape) for name in names]
    with TensorWriter.create(tmp_path / "f", declared, metadata) as writer:
        assert writer.size == lay_out(declared, metadata or {})[2] == (tmp_path / "f").stat().st_size
        assert writer.entries == TensorFile.open(tmp_path / "f").entries


def test_pieces_in_any_order_from_threads(tmp_path):
    bits = random_bits("BF16", (100, 1000))
    flat = bits.reshape(-1)
    starts = list(np.random.default_rng(1).permutation(range(0, flat.size, 777)))
    declared = [("x", "U8", (3,)), ("a", "BF16", bits.shape)]
    with TensorWriter.create(tmp_path / "f", declared) as writer, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda start: write_tensor(writer, "a", flat[start : start + 777], int(start)), starts))
    file = TensorFile.open(tmp_path / "f")
    np.testing.assert_array_equal(file.array("a"), bits)
    assert file.array("x").tolist() == [0, 0, 0]  # what nobody wrote is zero


def test_arrays_in_any_layout(tmp_path):
    bits = random_bits("F32", (6, 4))
    with TensorWriter.create(tmp_path / "f", [("a", "F32", (4, 6)), ("b", "F32", (3,))]) as writer:
        write_tensor(writer, "a", bits.T)
        write_tensor(writer, "b", bits[::2, 1])
        write_tensor(writer, "b", bits[:0, 0], 3)  # nothing, at the end
    file = TensorFile.open(tmp_path / "f")
    np.testing.assert_array_equal(file.array("a"), bits.T)
    np.testing.assert_array_equal(file.array("b"), bits[::2, 1])


def test_the_system_may_write_less_than_asked(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:7], offset))
    bits = random_bits("F32", (5, 5))
    path = write(tmp_path / "f", {"a": ("F32", bits)}, {"long": "header" * 10})
    np.testing.assert_array_equal(TensorFile.open(path).array("a"), bits)


@pytest.mark.parametrize(
    ("declared", "metadata", "message"),
    [
        ([("a", "F32", (1,)), ("a", "F32", (1,))], {}, "tensor 'a' is declared more than once"),
        ([("a", "F4", (2,)), ("b", "float32", (2,))], {}, "'a' has dtype 'F4'.*'b' has dtype 'float32'"),
        ([("a", "F32", (2, -1))], {}, "'a' has the negative shape"),
        ([("__metadata__", "F32", (1,))], {}, "__metadata__ names no tensor"),
        ([("\ud800", "F32", (1,))], {}, "surrogates not allowed"),
        ([("a", "U8", (2**62,))], {}, r"needs 4611686018427\d+ bytes and \d+ are free"),  # more than any disk has
        ([], {"a": 1}, "metadata {'a': 1} must be strings"),
        ([], {"a": "x" * limits.JSON}, r"a header of 335544\d+ bytes, above 33554432"),
    ],
    ids=["twice", "dtypes", "negative", "metadata name", "surrogate", "enormous", "metadata", "huge"],
)
def test_what_cannot_be_declared(tmp_path, declared, metadata, message):
    with pytest.raises(StoreError, match=message):
        TensorWriter.create(tmp_path / "f", declared, metadata)
    assert not (tmp_path / "f").exists()


def test_an_existing_file_is_not_touched(tmp_path):
    (tmp_path / "f").write_text("precious")
    with pytest.raises(StoreError, match="f: File exists"):
        TensorWriter.create(tmp_path / "f", [])
    assert (tmp_path / "f").read_text() == "precious"
    with pytest.raises(StoreError, match="No such file or directory"):
        TensorWriter.create(tmp_path / "no" / "f", [])


def refuse(code: int) -> mock.Mock:
    return mock.Mock(side_effect=OSError(code, os.strerror(code)))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(tmp_path, monkeypatch, code):
    declared = [("a", "F32", (1000,))]
    monkeypatch.setattr(os, "posix_fallocate", refuse(code))
    with pytest.raises(StoreError, match=rf"needs {lay_out(declared, {})[2]} bytes and \d+ are free in {tmp_path}"):
        TensorWriter.create(tmp_path / "f", declared)
    assert not (tmp_path / "f").exists()
    # Where nobody knows what is needed:
    with (
        pytest.raises(StoreError, match=rf"{os.strerror(code)}: \d+ bytes are free in {tmp_path}$"),
        os_errors(tmp_path / "f"),
    ):
        refuse(code)()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_filesystems_that_do_not_allocate(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "posix_fallocate", refuse(code))
    path = write(tmp_path / "f", MIXED)
    assert TensorFile.open(path).array("half").tolist() == MIXED["half"][1].tolist()


def test_a_disk_that_fills_up_while_writing(tmp_path, monkeypatch):
    with TensorWriter.create(tmp_path / "f", [("a", "F32", (4,))]) as writer:
        monkeypatch.setattr(os, "pwrite", refuse(errno.ENOSPC))
        with pytest.raises(StoreError, match=rf"needs {writer.size} bytes"):
            write_tensor(writer, "a", np.zeros(4, "<u4"))


def test_close_waits_for_the_disk_and_an_exception_does_not(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with TensorWriter.create(tmp_path / "f", []):
        assert not synced
    assert len(synced) == 1
    with pytest.raises(KeyboardInterrupt), TensorWriter.create(tmp_path / "g", []):
        raise KeyboardInterrupt
    assert len(synced) == 1


def test_a_disk_that_fails_at_the_end(tmp_path, monkeypatch):
    writer = TensorWriter.create(tmp_path / "f", [("a", "F32", (4,))])
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(StoreError, match="f: Input/output error"):
        writer.close()
    with pytest.raises(StoreError, match="closed file"):  # and not another file that has its number by now
        write_tensor(writer, "a", np.zeros(4, "<u4"))
