"""Tensors that ``torch.save`` wrote, in files of their own or one after the other in one: found without running
anything of them, and read by their bytes. No torch.

Such a tensor is a zip archive: a pickle, which :mod:`~megacore.store.tensor_files.pickles` reads as inert records, and
a member of plain bytes for each storage.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from megacore.parallel import limits
from megacore.store.io.strict_json import StoreError, short
from megacore.store.tensor_files.pickles import PERSISTENT, Call, Name, read_pickle
from megacore.store.tensor_files.tensors import DTYPES, MAX_DIMENSIONS, Bits

_DTYPES = (
    ("F64", "float64", "Double"),
    ("F32", "float32", "Float"),
    ("F16", "float16", "Half"),
    ("BF16", "bfloat16", "BFloat16"),
    ("I64", "int64", "Long"),
    ("I32", "int32", "Int"),
    ("I16", "int16", "Short"),
    ("I8", "int8", "Char"),
    ("U8", "uint8", "Byte"),
    ("BOOL", "bool", "Bool"),
)
"""(name in safetensors files, torch's name, and how its storages begin) of each dtype."""
KINDS: Mapping[str, str] = {f"torch.{name}": kind for kind, name, _ in _DTYPES}
"""{torch's name of a dtype: that of safetensors files}."""
_STORAGES = {f"torch.{begin}Storage": kind for kind, _, begin in _DTYPES}
_TENSOR = "torch._utils._rebuild_tensor_v2"
_KNOWN = {*_STORAGES, _TENSOR, "collections.OrderedDict", "torch.Size"}
_NUMBERS = {"F32": "f4", "F64": "f8", "I64": "i8", "I32": "i4"}
_LOCAL = struct.Struct("<4s22xHH")  # of a member: magic, lengths of its name and of what else stands before its bytes


@dataclass(frozen=True)
class SavedTensor:
    """A tensor within a file. ``dtype``: as in safetensors files; ``shape``: sizes of its dimensions; ``strides``:
    elements from one to the next along each of them; ``start``: the byte of the file at which its first element
    lies."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def read(self, file: BinaryIO, where: object) -> Bits:
        """Return its bits, [shape], from the file that it lies in. Raises StoreError: the file has become shorter."""
        dtype = DTYPES[self.dtype]
        made = np.empty(self._last + 1, dtype)
        file.seek(self.start)
        memory = made.view(np.uint8).data
        read = 0
        while read < len(memory):
            count = file.readinto(memory[read:])  # type: ignore[attr-defined]
            if not count:
                raise StoreError(f"{where}: ends within a tensor: it is truncated, or something writes to it")
            read += count
        strides = [stride * dtype.itemsize for stride in self.strides]
        return np.ndarray(self.shape, dtype, made, 0, strides)

    def number(self, file: BinaryIO, where: object) -> Any:
        """Return the number that it is. Raises StoreError: it is none, or as of :meth:`read`."""
        if self.shape != () or self.dtype not in _NUMBERS:
            raise StoreError(f"{where} is {self.dtype}{list(self.shape)}, and no number")
        return self.read(file, where).view(_NUMBERS[self.dtype]).item()

    @property
    def _last(self) -> int:
        """The last element, counted from the first."""
        if 0 in self.shape:
            return -1
        return sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def read_saved(file: BinaryIO, where: object, start: int, length: int, any_names: bool = False) -> Any:
    """Return what an archive within a file describes: values, lists, tuples and dicts; tensors as :class:`SavedTensor`,
    of which nothing is read yet. ``where``: what it is, in words; ``start, length``: in bytes of the file;
    ``any_names``: whether it may name what it likes, which stays a :class:`Name` or a :class:`Call`. Raises StoreError:
    it is no such archive, is damaged, or holds something else."""
    window = _FileWindow(file, start, length)
    try:
        with zipfile.ZipFile(window) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        found = {name: _bounds(window, info) for name, info in members.items()}
        order = _bytes(window, found.get("byteorder", (0, 0)))
        if "data.pkl" not in found or order not in (b"", b"little"):
            raise ValueError(f"it holds {short(sorted(found))}, in byte order {order!r}")
        tree = read_pickle(_bytes(window, found["data.pkl"]), where, None if any_names else _KNOWN)
        return _placed(tree, {name: (start + first, size) for name, (first, size) in found.items()}, any_names)
    except StoreError:
        raise
    except (zipfile.BadZipFile, OSError, RuntimeError, ValueError, LookupError, TypeError, struct.error) as error:
        raise StoreError(
            f"{where}: no archive of torch.save at byte {start}, or a damaged one ({short(str(error))})"
        ) from error


class _FileWindow(io.RawIOBase):
    """Some bytes of a file, as a file by themselves; a read of more than a description needs is refused."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = origin + offset
        if self._at < 0:
            raise ValueError(f"byte {self._at} is before its beginning")
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size < 0 else min(size, left)
        if count > limits.DESCRIPTION:
            raise ValueError(f"it has a description of {count} bytes, above the limit of {limits.DESCRIPTION}")
        self._file.seek(self._start + self._at)
        found = self._file.read(count)
        self._at += len(found)
        return found


def _bounds(window: _FileWindow, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Return (first byte, bytes) of a member."""
    window.seek(info.header_offset)
    magic, name, extra = _LOCAL.unpack(window.read(_LOCAL.size))
    first = info.header_offset + _LOCAL.size + name + extra
    if magic != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(f"{short(info.filename)} is compressed or encrypted, or is not there")
    if first + info.file_size > window.seek(0, io.SEEK_END):
        raise ValueError(f"{short(info.filename)} ends beyond it")
    return first, info.file_size


def _bytes(window: _FileWindow, bounds: tuple[int, int]) -> bytes:
    window.seek(bounds[0])
    return window.read(bounds[1])


def numbers_of(tree: Any, names: Collection[str], file: BinaryIO, where: object) -> Iterator[Any]:
    """Yield what stands by any of the names in the dicts of what :func:`read_saved` returned, at any depth; a tensor of
    one number as that number."""
    seen, left = set[int](), [tree]
    while left:
        at = left.pop()
        if id(at) in seen or not isinstance(at, dict | list | tuple):
            continue
        seen.add(id(at))
        for key, value in at.items() if isinstance(at, dict) else enumerate(at):
            if key in names:
                yield value.number(file, f"{where}: {key}") if isinstance(value, SavedTensor) else value
            else:
                left.append(value)


def _placed(tree: Any, members: Mapping[str, tuple[int, int]], any_names: bool) -> Any:
    """Return what a pickle describes with its tensors found among the members, {name: (byte of the file, bytes)}."""
    # What stands in many places is one object, and is made once: written out it may be more than could ever be held.
    done = dict[int, Any]()

    def placed(tree: Any) -> Any:
        if id(tree) not in done:
            done[id(tree)] = made(tree)
        return done[id(tree)]

    def made(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: placed(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(placed(value) for value in tree)
        if isinstance(tree, Call) and tree.name == _TENSOR:
            return _tensor(tree.arguments, members)
        if isinstance(tree, Call | Name) and not any_names:
            raise ValueError(f"it holds {short(tree.name)}")
        return tree

    return placed(tree)


def _tensor(arguments: tuple[Any, ...], members: Mapping[str, tuple[int, int]]) -> SavedTensor:
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, Call) or storage.name != PERSISTENT:
        raise ValueError(f"a tensor has {short(storage)} for its storage")
    _, kind, key, _, elements = storage.arguments[0]
    dtype = _STORAGES[kind.name]
    counts = (offset, elements, *shape, *strides)
    if not all(type(n) is int and n >= 0 for n in counts) or not len(shape) == len(strides) <= MAX_DIMENSIONS:
        raise ValueError(f"a tensor has offset, elements, shape and strides {short(counts)}")
    first, size = members[f"data/{key}"]
    width = DTYPES[dtype].itemsize
    made = SavedTensor(dtype, tuple(shape), tuple(strides), first + offset * width)
    if math.prod(shape) > elements or offset + made._last >= max(elements, 1) or elements * width > size:
        raise ValueError(f"a tensor of {list(shape)} lies beyond its storage of {size} bytes")
    return made
