"""Megatron's indexed dataset: tokens in `PREFIX.bin`, and in `PREFIX.idx` where each sequence and document lies.

The index, little-endian and without gaps:

    magic 9 bytes | version u64 | token dtype code u8 | sequences u64 | documents + 1 u64
    lengths int32 [sequences] | pointers int64 [sequences], bytes into .bin | bounds int64 [documents + 1]

Document d holds the sequences [bounds[d], bounds[d + 1]).
"""

from __future__ import annotations

import os
import shutil
import struct
from bisect import bisect_left, bisect_right
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from megacore.store.io.files import append, open_file
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.publish import sync

Integers = npt.NDArray[np.integer[Any]]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are float64 and float32, which hold no tokens.
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
CHUNK = 2**18
"""Entries of an index that are held in memory together."""
PAGE, PAGES = 2**12, 16
"""Bytes of a page, and the pages of a file, by which it is known again."""


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the dtype Megatron stores tokens of this vocabulary in."""
    return np.dtype("<u2" if vocabulary < 65500 else "<i4")


def publish(temporary: Path, final: Path) -> None:
    """Move a finished file to its place on the same disk: after a crash all of it is there, or none of it."""
    sync(temporary)
    os.replace(temporary, final)
    sync(final.parent)


@dataclass(frozen=True)
class Extent:
    """The extent of a token file that is there."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class GrowingPair:
    """`PREFIX.bin` while it grows; `PREFIX.lengths` and `PREFIX.bounds` beside it are what its index is made of. Memory
    does not grow with it. It goes on from an extent that it had: what was written after that is cut off. StoreError if
    less is there, OSError if one of the names is taken by what is not ours to write to."""

    def __init__(self, prefix: str | Path, vocabulary: int, extent: Extent | None = None) -> None:
        self.vocabulary = vocabulary
        self.dtype = token_dtype(vocabulary)
        self.extent = extent or Extent()
        self.paths = [Path(f"{prefix}.{suffix}") for suffix in ("bin", "lengths", "bounds")]

    def __enter__(self) -> Self:
        if self.extent == Extent():
            for path in self.paths:
                path.unlink(missing_ok=True)  # of a process that was killed, or what is in the way
        with ExitStack() as stack:
            self._files = [stack.enter_context(append(path)) for path in self.paths]
            self._cut()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def _cut(self) -> None:
        sizes = (self.dtype.itemsize * self.extent.tokens, 4 * self.extent.sequences, 8 * self.extent.documents)
        for file, size in zip(self._files, sizes, strict=True):
            if (found := file.tell()) < size:
                raise StoreError(f"{file.name} has {found} bytes, and had {size} when it was last kept: it is damaged")
            file.truncate(size)

    def write(self, *sequences: npt.ArrayLike) -> None:
        """Append one document of the given sequences, each of shape [tokens]; ValueError on a token that is none."""
        arrays = [np.asarray(sequence) for sequence in sequences]
        tokens = np.concatenate([np.empty(0, self.dtype), *arrays]) if len(arrays) != 1 else arrays[0]
        self._append(tokens, np.array([array.size for array in arrays]), np.array([len(arrays)]))

    def extend(self, tokens: Integers, lengths: Integers) -> None:
        """Append documents of a sequence each: their tokens [of all], and how many each has, [documents]."""
        self._append(tokens, lengths, np.ones(lengths.size, np.int64))

    def join(self, other: IndexedDataset) -> None:
        """Append all documents of another pair; ValueError if its sequences do not lie one after the other."""
        if other.scattered:
            raise ValueError(f"{other.scattered}: it is not as `megacore tokenize` writes it")
        for at in range(0, other.sequences, CHUNK):
            self._files[1].write(other.lengths[at : at + CHUNK].tobytes())
        for at in range(1, other.documents + 1, CHUNK):
            self._files[2].write((other.bounds[at : at + CHUNK] + self.extent.sequences).tobytes())
        count = other.start(other.documents)
        for at in range(0, count, 2**22):
            self._files[0].write(other.tokens(at, min(at + 2**22, count)).astype(self.dtype, copy=False).data)
        self._grow(count, other.sequences, other.documents)

    def _append(self, tokens: Integers, lengths: Integers, sequences: Integers) -> None:
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.vocabulary):
            bad = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocabulary))[0])
            sequence = int(np.searchsorted(np.cumsum(lengths), bad, "right"))
            document = self.extent.documents + int(np.searchsorted(np.cumsum(sequences), sequence, "right"))
            raise ValueError(
                f"document {document} has tokens from {tokens.min()} to {tokens.max()}, "
                f"outside the vocabulary of {self.vocabulary}: write it with its own tokenizer's vocabulary"
            )
        if lengths.size and lengths.max() >= 2**31:
            raise ValueError(f"a document has {lengths.max()} tokens, and an index counts up to 2^31: cut it")
        bounds = self.extent.sequences + np.cumsum(sequences)
        columns = (tokens.astype(self.dtype, copy=False), lengths.astype("<i4"), bounds.astype("<i8"))
        for file, column in zip(self._files, columns, strict=True):
            file.write(np.ascontiguousarray(column).data)
        self._grow(tokens.size, lengths.size, sequences.size)

    def _grow(self, tokens: int, sequences: int, documents: int) -> None:
        now = self.extent
        self.extent = Extent(now.tokens + tokens, now.sequences + sequences, now.documents + documents)

    def sync(self) -> Extent:
        """Return what is on the disk now, whatever happens: all that was written."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return self.extent

    def write_index(self, path: Path) -> None:
        for file in self._files:
            file.flush()
        code = next(code for code, name in DTYPES.items() if name == self.dtype.name)
        _, lengths, bounds = self.paths
        path.unlink(missing_ok=True)  # of a process that was killed, and had the number of this one
        with open(path, "xb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, code, self.extent.sequences, self.extent.documents + 1))
            _copy(lengths, file)
            end = 0
            with open_file(lengths, lengths.parent) as read:
                while part := read.read(4 * CHUNK):
                    ends = end + np.cumsum(np.frombuffer(part, "<i4"), dtype="<i8") * self.dtype.itemsize
                    file.write(np.concatenate([np.array([end], "<i8"), ends[:-1]]).data)
                    end = int(ends[-1])
            file.write(bytes(8))
            _copy(bounds, file)


def _copy(path: Path, file: IO[bytes]) -> None:
    with open_file(path, path.parent) as read:
        shutil.copyfileobj(read, file, 4 * CHUNK)


class IndexedWriter(GrowingPair):
    """Streams documents to `PREFIX.bin` and `PREFIX.idx`, which are on the disk when the context ends, and leaves
    neither where it fails. An index that was there is gone before other data are."""

    def __enter__(self) -> Self:
        self._index = self.paths[0].with_suffix(".idx")
        self._index.unlink(missing_ok=True)
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        left = [*self.paths, self._index]
        try:
            if not any(raised):
                self.write_index(self._index)  # and all is written to the file of tokens
                for path in (self.paths[0], self._index):
                    sync(path)
                left = self.paths[1:]
        finally:
            self.close()
            for path in left:
                path.unlink(missing_ok=True)


class IndexedDataset:
    """A memory-mapped pair `PREFIX.bin`, `PREFIX.idx`.

    lengths int32 [sequences], pointers int64 [sequences] and bounds
    int64 [documents + 1] are views of the file. All of them are checked, unless another process does (``checked``).
    FileNotFoundError if either file is missing, ValueError if they are not a whole index and the data it points to.

    Most files have the sequences one after the other: their tokens are one stream. Where they do not, ``scattered``
    says so.
    """

    def __init__(self, prefix: str | Path, checked: bool = False) -> None:
        data, index = (Path(f"{Path(prefix)}.{suffix}") for suffix in ("bin", "idx"))
        for file in (index, data):
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing: a dataset is the pair {index.name} and {data.name}")
        size = index.stat().st_size
        with open(index, "rb") as stream:
            head = stream.read(HEADER.size)
        if not head.startswith(MAGIC[: len(head)]):
            raise ValueError(f"{index} starts with {head[:9]!r}, not {MAGIC!r}: it is no index of tokens")
        if len(head) < HEADER.size:
            raise ValueError(f"{index} has {size} bytes, fewer than its header's {HEADER.size}: it is truncated")
        _, version, code, sequences, bounds = HEADER.unpack(head)
        if version != VERSION:
            raise ValueError(f"{index} has version {version}, and only version {VERSION} is known")
        if code not in DTYPES:
            raise ValueError(f"{index} has token dtype code {code}: the codes of tokens are {DTYPES}")
        if size != (needed := HEADER.size + 12 * sequences + 8 * bounds):
            raise ValueError(
                f"{index} has {size} bytes, and {sequences} sequences and {bounds} document bounds take {needed}: "
                "it is truncated, or carries what is not read here, such as multimodal sequence modes"
            )
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self.sequences, self.documents = sequences, bounds - 1
        raw = np.memmap(index, mode="r", dtype=np.uint8)
        self.lengths = np.frombuffer(raw, "<i4", sequences, HEADER.size)
        self.pointers = np.frombuffer(raw, "<i8", sequences, HEADER.size + 4 * sequences)
        self.bounds = np.frombuffer(raw, "<i8", bounds, HEADER.size + 12 * sequences)
        self._bytes = np.memmap(data, mode="r", dtype=np.uint8) if data.stat().st_size else np.empty(0, np.uint8)
        self.scattered = "" if checked else self._check(index, data)

    @property
    def identity(self) -> str:
        """The digest of the sizes and of some pages of both files, which are the same wherever they lie."""
        hasher = blake2b(
            repr((self.dtype.str, self.sequences, self.documents, self._bytes.size)).encode(), digest_size=8
        )
        for data in (self._bytes, self.lengths.view(np.uint8)):
            last = max(0, data.size - PAGE)
            for at in sorted({last * page // (PAGES - 1) for page in range(PAGES)}):
                hasher.update(data[at : at + PAGE].tobytes())
        return hasher.hexdigest()

    def _check(self, index: Path, data: Path) -> str:
        """Read all entries, by chunks, so that their memory does not grow with the corpus -> what is scattered."""
        bounds, width, size = self.bounds, self.dtype.itemsize, self._bytes.size
        chunks = (slice(at, at + CHUNK + 1) for at in range(0, bounds.size, CHUNK))
        climb = all((part[1:] >= part[:-1]).all() for part in map(bounds.__getitem__, chunks))
        if not bounds.size or bounds[0] != 0 or bounds[-1] != self.sequences or not climb:
            raise ValueError(
                f"{index}: the bounds of its documents do not climb from 0 to its {self.sequences} sequences"
            )
        end, total, scattered = int(self.pointers[0]) if self.sequences else 0, 0, ""
        for at in range(0, self.sequences, CHUNK):
            lengths, begins = self.lengths[at : at + CHUNK].astype(np.int64), self.pointers[at : at + CHUNK]
            ends = begins + width * lengths
            outside = np.flatnonzero((lengths < 0) | (begins < 0) | (ends < 0) | (ends > size))
            if outside.size:
                bad = int(outside[0])
                raise ValueError(
                    f"{index} puts sequence {at + bad} ({lengths[bad]} tokens of {width} bytes) at byte "
                    f"{begins[bad]} of {data.name}, which has {size}: the data is truncated or another's"
                )
            before = np.concatenate([np.array([end]), ends[:-1]])
            apart = np.flatnonzero(begins != before)
            if apart.size and not scattered:
                place = int(apart[0])
                scattered = (
                    f"{index} puts sequence {at + place} at byte {begins[place]} of {data.name}, and the one before it "
                    f"ends at {before[place]}"
                )
            end, total = int(ends[-1]), total + int(lengths.sum())
        if total > size // width:
            raise ValueError(
                f"{index} has sequences of {total} tokens in all, and {data.name} holds {size // width}: they overlap, "
                "or the data is truncated or another's"
            )
        if not scattered and self.sequences and end < size:
            raise ValueError(
                f"{index} tells of the first {end} bytes of {data.name}, which has {size}: one of the two is "
                "another's, or the index is of an earlier time"
            )
        return scattered

    def start(self, document: int) -> int:
        """Return where a document begins in the stream of all tokens; of the number after the last, where it ends."""
        sequence = int(self.bounds[document])
        if sequence < self.sequences:
            place = int(self.pointers[sequence])
        elif self.sequences:
            place = int(self.pointers[-1]) + self.dtype.itemsize * int(self.lengths[-1])
        else:
            return 0
        return (place - int(self.pointers[0])) // self.dtype.itemsize

    def starts_within(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return where in the stream documents begin, after token `start` and before `stop`; empty ones too."""
        documents = range(self.documents)
        first = bisect_right(documents, start, key=self.start)
        last = bisect_left(documents, stop, first, key=self.start)
        places = self.pointers[self.bounds[first:last]]
        return (places - self.pointers[0]) // self.dtype.itemsize if last > first else places

    def tokens(self, start: int, stop: int) -> Integers:
        """Return the tokens [start, stop) of the stream of all documents: a view of the file."""
        first = int(self.pointers[0]) + start * self.dtype.itemsize
        return np.frombuffer(self._bytes, self.dtype, stop - start, first)

    def sequence(self, sequence: int) -> Integers:
        """Return one sequence, [lengths[sequence]] in the file's dtype: a view of the file."""
        return np.frombuffer(self._bytes, self.dtype, int(self.lengths[sequence]), int(self.pointers[sequence]))

    def document(self, document: int) -> Integers:
        """Return the tokens of one document, over its sequences; a view where one holds them."""
        parts = [self.sequence(each) for each in range(int(self.bounds[document]), int(self.bounds[document + 1]))]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def document_lengths(self, first: int = 0, stop: int | None = None) -> Integers:
        """Return the tokens of each of documents [first, stop), [stop - first]; those of all without bounds."""
        bounds = self.bounds[first : None if stop is None else stop + 1]
        lengths = self.lengths[int(bounds[0]) : int(bounds[-1])]
        if lengths.size == bounds.size - 1 and (np.diff(bounds) == 1).all():
            return lengths
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        return np.diff(ends[bounds - bounds[0]])
