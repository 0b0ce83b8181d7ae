"""The safetensors format, read and written as bits: no torch, and nothing in memory but the header.

    header length u64, little-endian | header, JSON | data

The header is ``{name: {"dtype", "shape", "data_offsets": [start, stop]}, "__metadata__": {str: str}}``, its offsets
count from the end of the header, and the tensors tile the data without overlap, hole or rest. A file that says anything
else is a :class:`StoreError`; nothing is allocated by what a header claims.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import operator
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megacore.parallel import limits
from megacore.parallel.weights.pattern import Piece
from megacore.store.io.direct import Bytes, DirectFile
from megacore.store.io.files import open_file
from megacore.store.io.objects import place
from megacore.store.io.strict_json import StoreError, parse_json, short

Bits = npt.NDArray[np.unsignedinteger[Any]]
Declared = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape

WIDTHS: Mapping[int, str] = {
    1: "BOOL U8 I8 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0",
    2: "U16 I16 F16 BF16",
    4: "U32 I32 F32",
    8: "U64 I64 F64 C64",
}
DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(f"<u{width}") for width, names in WIDTHS.items() for name in names.split()
}
"""Safetensors dtype -> unsigned little-endian integers as wide: bits are moved, never numbers."""

METADATA = "__metadata__"
KEYS = {"dtype", "shape", "data_offsets"}
LENGTH = struct.Struct("<Q")
MAX_DIMENSIONS = 64  # of a numpy array
MAX_INTEGER = 2**63 - 1
LISTED = 10  # problems of one file that are spelled out

OTHERS: Mapping[bytes, str] = {
    b"version https://git-lfs": "a git-LFS pointer in place of the file: fetch it with `git lfs pull`",
    b"PK": "a zip archive, as torch.save writes, and not safetensors: it is never loaded",
    b"\x80": "a pickle and not safetensors: it is never loaded",
    b"GGUF": "a GGUF file and not safetensors",
    b"<": "a web page or XML and not safetensors: download the file again",
}
"""The first bytes of files that are no safetensors, and what those files are."""


# -- errors


@contextmanager
def os_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn what the operating system refuses within into a StoreError about the path. ``needed``: bytes that its file
    takes in all, for the message about a full disk."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{path}: {_reason(path, error, needed)}") from error
    except ValueError as error:  # a name that no file can have, or a file that is closed
        raise StoreError(f"{str(path)!r}: {error}") from error


def _reason(path: Path, error: OSError, needed: int) -> str:
    words = error.strerror or str(error)
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"is a link to {os.readlink(path)}, which does not exist"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        there = next(folder for folder in (path, *path.parents) if folder.is_dir())
        free = f"it needs {needed} bytes and {free_bytes(there)}" if needed else f"{free_bytes(there)} bytes"
        return f"{words}: {free} are free in {there}"
    at = f" at {error.filename}" if error.filename and str(error.filename) != str(path) else ""
    return f"{words}{at}"


def free_bytes(folder: Path) -> int:
    """Return the room for an ordinary user on the folder's filesystem."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


# -- reading


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: bytes [start, stop), counted from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file, checked; its tensors are views of one map of the file."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    size: int
    root: Path | None = None

    @classmethod
    def open(cls, path: str | Path, root: Path | None = None) -> Self:
        """Read and check the header, and nothing else; StoreError names all that is wrong with it. Its links may not
        leave `root`, see :func:`~megacore.store.io.files.open_file`."""
        path = place(path)
        with os_errors(path), open_file(path, root) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            start = LENGTH.size + _header_length(path, file.read(64), size)
            file.seek(LENGTH.size)
            header = parse_json(file.read(start - LENGTH.size), f"{path}: the header")
        if not isinstance(header, dict):
            raise StoreError(f"{path}: the header is {short(header)}, not tensors by name")
        metadata = header.pop(METADATA, {})
        problems = [] if _is_strings(metadata) else [f"{METADATA} is {short(metadata)}, not strings by name"]
        entries = {}
        for name, record in header.items():
            try:
                entries[name] = _entry(record, start, size)
            except StoreError as error:
                problems.append(f"tensor {short(name)} {error}")
        if problems or (problems := list(_gaps(entries, start, size))):
            rest = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
            raise StoreError(f"{path}: {'; '.join(problems[:LISTED])}{rest}")
        return cls(path, entries, metadata, size, root)

    def array(self, name: str, view: Piece | None = None) -> Bits:
        """Return the bits of one tensor, [shape] in DTYPES[dtype]: a read-only view of the file, a copy if unaligned.
        Where only a view of it is asked for, the rest may be anything."""
        entry = self.entry(name)
        dtype = DTYPES[entry.dtype]
        count = (entry.stop - entry.start) // dtype.itemsize
        if not count:
            return np.empty(entry.shape, dtype)
        bits = np.frombuffer(self._map, dtype, count, entry.start)
        if not bits.flags.aligned:
            bits = bits.copy()
            bits.flags.writeable = False
        return bits.reshape(entry.shape)

    def part(self, name: str, views: Iterable[Piece]) -> Bits:
        """Return the bits of one tensor of which only some views are asked for, once; the rest may be anything."""
        return self.array(name)

    def entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise StoreError(f"{self.path}: holds no tensor {name!r}, and {len(self.entries)} others")
        return self.entries[name]

    def hold(self) -> None:
        """Map the file, so that it is read from here on whoever removes it."""
        if self.entries:
            self._map  # noqa: B018

    @cached_property
    def _map(self) -> mmap.mmap:
        with os_errors(self.path), open_file(self.path, self.root) as file:
            if (size := os.fstat(file.fileno()).st_size) != self.size:
                raise StoreError(f"{self.path}: had {self.size} bytes and now has {size}: something writes to it")
            return mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)


def _header_length(path: Path, head: bytes, size: int) -> int:
    """Return the bytes of the header, from the beginning of the file."""
    length = LENGTH.unpack_from(head)[0] if size >= LENGTH.size else None
    if length is None or length > limits.JSON:
        # Only here: the length of a sound header may begin with any of these bytes.
        for magic, words in OTHERS.items():
            if head.startswith(magic):
                raise StoreError(f"{path}: is {words}")
    if length is None:
        raise StoreError(f"{path}: has {size} bytes, fewer than the {LENGTH.size} that say how long the header is")
    if length > limits.JSON:
        raise StoreError(
            f"{path}: claims a header of {length} bytes, above the limit of {limits.JSON}: it is no safetensors file, "
            "or one of so many tensors that the limit in parallel/limits.py must be raised"
        )
    if length > size - LENGTH.size:
        raise StoreError(
            f"{path}: claims a header of {length} bytes, and only {size - LENGTH.size} follow: it is truncated"
        )
    return int(length)


def _is_strings(metadata: object) -> bool:
    return isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())


def _entry(record: object, data: int, size: int) -> Entry:
    """Return the checked entry of a header whose data begins at byte `data`; StoreError without a subject."""
    if not isinstance(record, dict) or record.keys() != KEYS:
        raise StoreError(f"is {short(record)}: it must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = record["dtype"], record["shape"], record["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise StoreError(f"has dtype {short(dtype)}: known are {', '.join(DTYPES)}")
    if not _is_counts(shape):
        raise StoreError(f"has shape {short(shape)}: it must list integers from 0 to {MAX_INTEGER}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise StoreError(f"has data_offsets {short(offsets)}: they must be two integers that climb from 0")
    if len(shape) > MAX_DIMENSIONS:
        raise StoreError(f"has {len(shape)} dimensions: {MAX_DIMENSIONS} are the most that an array can have")
    width = DTYPES[dtype].itemsize
    # numpy counts sizes of 0 as 1 here, so that an empty array's strides still fit.
    if width * math.prod(n or 1 for n in shape) > MAX_INTEGER:
        raise StoreError(f"has shape {short(shape)}: its bytes are more than {MAX_INTEGER}")
    start, stop = (data + offset for offset in offsets)
    if (needed := width * math.prod(shape)) != stop - start:
        raise StoreError(
            f"has shape {short(shape)} in {dtype}, which takes {needed} bytes, and its offsets span {stop - start}"
        )
    if stop > size:
        raise StoreError(f"ends at byte {stop} of a file of {size}: it is truncated")
    return Entry(dtype, tuple(shape), start, stop)


def _is_counts(value: object) -> bool:
    # By type: True and 2.0 equal integers, and are none.
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_INTEGER for n in value)


def _gaps(entries: Mapping[str, Entry], data: int, size: int) -> Iterator[str]:
    """Yield overlaps, holes and the rest, where tensors do not tile bytes [data, size)."""
    at, last = data, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            what = "overlaps" if entry.start < at else "leaves a hole after"
            yield f"tensor {short(name)} begins at byte {entry.start} and {what} {last}, which ends at {at}"
        at, last = max(at, entry.stop), f"tensor {short(name)}"
    if at < size:
        yield f"{last} ends at byte {at}, and the file goes on to {size}"


# -- writing


@dataclass(frozen=True)
class TensorWriter:
    """Fills a safetensors file piece by piece, from any number of threads. A context manager."""

    path: Path
    entries: Mapping[str, Entry]
    size: int
    _file: FileIO
    _direct: DirectFile | None
    _ends: list[tuple[bytes, int]] = field(default_factory=list)

    @classmethod
    def create(
        cls, path: str | Path, tensors: Iterable[Declared], metadata: Mapping[str, str] | None = None
    ) -> TensorWriter:
        """Allocate the whole file, zeros, and write its header; wider dtypes come first, so that all are aligned.
        StoreError if the file exists, the tensors cannot be declared, or the disk has no room for all of it."""
        path = Path(path)
        with os_errors(path):
            header, entries, size = lay_out(tensors, metadata or {})
        with os_errors(path, size):
            # Exclusive: to truncate a file that someone has mapped kills them.
            file = FileIO(path, "x")
        try:
            with os_errors(path, size):
                _allocate(file.fileno(), size)
                _write_all(file.fileno(), memoryview(header), 0)
                direct = DirectFile.open(path)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        return cls(path, entries, size, file, direct)

    def offset(self, name: str, start: int) -> int:
        """Return the byte of the file at which an element of a tensor lies."""
        entry = self.entries[name]
        return entry.start + start * DTYPES[entry.dtype].itemsize

    def put(self, data: Bytes, offset: int) -> None:
        """Write bytes to a place in the file, from any thread; what is not there yet is when it is closed."""
        with os_errors(self.path, self.size):
            first, last = self._direct.write(data, offset) if self._direct else (0, 0)
            if first == last:
                _write_all(self._file.fileno(), data.data, offset)
                return
            ends = (data[:first], offset), (data[last:], offset + last)
            self._ends.extend((end.tobytes(), at) for end, at in ends if end.size)

    def close(self) -> None:
        """Close the file, all of which is on the disk afterwards."""
        try:
            with os_errors(self.path, self.size):
                for data, offset in self._ends:
                    _write_all(self._file.fileno(), memoryview(data), offset)
                os.fsync(self._file.fileno())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file as it is; it will be thrown away."""
        self._file.close()
        if self._direct:
            self._direct.close()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def lay_out(tensors: Iterable[Declared], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Entry], int]:
    """Return the file's first bytes up to the data, the entry of each tensor, and the size of the file."""
    declared = [(name, dtype, tuple(map(operator.index, shape))) for name, dtype, shape in tensors]
    if problems := list(_undeclarable(declared)):
        raise StoreError("; ".join(problems[:LISTED]))
    if not _is_strings(dict(metadata)):
        raise StoreError(f"metadata {short(dict(metadata))} must be strings by name")
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    spans, at = {}, 0
    for name, dtype, shape in sorted(declared, key=lambda tensor: -DTYPES[tensor[1]].itemsize):
        stop = at + DTYPES[dtype].itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, stop)}
        spans[name] = dtype, shape, at, stop
        at = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > limits.JSON:
        raise StoreError(f"{len(declared)} tensors take a header of {len(text)} bytes, above {limits.JSON}: split them")
    data = LENGTH.size + len(text)
    entries = {name: Entry(dtype, shape, data + at, data + stop) for name, (dtype, shape, at, stop) in spans.items()}
    return LENGTH.pack(len(text)) + text, entries, data + at


def _undeclarable(declared: list[Declared]) -> Iterator[str]:
    seen = {METADATA}
    for name, dtype, shape in declared:
        if name in seen:
            yield f"tensor {name!r} is declared more than once" if name != METADATA else f"{METADATA} names no tensor"
        if dtype not in DTYPES:
            yield f"tensor {name!r} has dtype {dtype!r}: known are {', '.join(DTYPES)}"
        if any(n < 0 for n in shape):
            yield f"tensor {name!r} has the negative shape {shape}"
        seen.add(name)


def _allocate(file: int, size: int) -> None:
    """Reserve the bytes, so that a full disk shows now; where it cannot be asked for, it shows while writing."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(file, size)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
