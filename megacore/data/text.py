"""Documents in files: a whole text file, a line of .jsonl, an element of a .json array or a row of a table, found and
read in pieces.

A .jsonl or .json file may be compressed (.jsonl.gz, .json.zst). A table is a .parquet file, or an .arrow file, as
`datasets` saves it.
"""

from __future__ import annotations

import gzip
import io
import json
import mmap
import os
import re
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megacore.parallel import limits
from megacore.say import err
from megacore.store.io.files import leaves, open_file
from megacore.store.io.strict_json import text_problem

WHOLE = (".txt", ".md", ".py")
SUFFIXES = (*WHOLE, ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""The endings of the names of files that are taken from folders of text."""
NAMED = (*SUFFIXES, ".json", ".json.gz", ".json.zst")
"""The endings of files that are taken where they are named: a .json in a folder may be anything."""
PACKED = {".gz": "gunzip", ".zst": "unzstd"}
"""{the ending of a compressed file: what unpacks it}."""
STREAMED = (*PACKED, ".json")
"""The endings of files that can be read from their beginning alone."""
LINES = 4 * 2**20  # bytes of a piece of a .jsonl file
_NAME_IT = "name the one with --text-key (data.map={text: KEY} of a run)"
_SEPARATOR = re.compile(r"(?:\xef\xbb\xbf)?[ \t\r\n]*([\[,\]])[ \t\r\n]*")
"""The text between two elements of a JSON array, or before the first one; a character is a byte."""


class InputError(ValueError):
    """The user's input is at fault; the message says what, where, and the way out; of a long one, the middle is cut."""

    def __init__(self, message: str) -> None:
        super().__init__(limits.cut(message))


@dataclass(frozen=True)
class FileRange:
    """A part of the input that is read at once: a text file, the lines of a .jsonl file that begin in bytes [start,
    stop), for a .parquet file row group `start`, or the batches in bytes [start, stop) of an .arrow file. `size` is its
    length in bytes, those of the file where it is compressed; `row` the number of its first row; `lines` those of a
    streamed file, or its elements, each with the byte that it begins at, where they have been read."""

    path: Path
    start: int
    stop: int
    size: int
    row: int = 0
    lines: tuple[tuple[int, bytes], ...] = ()

    @property
    def work(self) -> int:
        """The bytes of text in it, about."""
        return LINES if self.lines else self.size


@dataclass(frozen=True)
class Fault:
    """A document that could not be read; in a .jsonl or .json file it begins at byte `line_at`, in a table it is row
    `row`, counted from 0."""

    path: Path
    reason: str
    line_at: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        where = "" if self.row is None else f", row {self.row}"
        if self.line_at is not None:
            with _open(self.path) as (_, file):
                sizes = (min(2**20, self.line_at - at) for at in range(0, self.line_at, 2**20))
                before = sum(file.read(size).count(b"\n") for size in sizes)
            where = f", line {1 + before}"
        return limits.cut(f"{self.path}{where}: {self.reason}")


@dataclass(frozen=True)
class Record:
    """A line of a .jsonl file or an element of a .json file that begins at byte `line_at`, or row `row` of a table: an
    object with these values, of about `size` bytes."""

    values: Mapping[str, Any]
    path: Path
    line_at: int | None = None
    row: int | None = None
    size: int = 0

    def fault(self, reason: str) -> Fault:
        return Fault(self.path, reason, self.line_at, self.row)


def find_files(inputs: Sequence[Path], exclude: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the files among the inputs, and in the folders among them, in the order of the inputs, each once.

    A folder is walked in sorted order, without hidden entries, those whose name matches a pattern of `exclude`, and
    links that leave it, which are said on stderr. InputError names an input that does not exist, is of another type, or
    holds no such file. Memory grows with the inputs and the links, not with the files in folders.
    """
    folders: list[Path] = []  # inputs before this one
    seen: set[Path] = set()  # where links lead, and inputs that are files
    types = " ".join(SUFFIXES)
    for given in inputs:
        if not given.exists():
            raise InputError(f"{given} does not exist")
        if given.is_file() and not given.name.endswith(NAMED):
            raise InputError(f"{given} is not of a known type: {' '.join(NAMED)}")
        root, found, left, example = given.resolve(), 0, 0, Path()
        for file in _walk(given, exclude) if given.is_dir() else [given]:
            link = file.is_symlink()
            if link and given.is_dir() and leaves(file, given):
                left, example = left + 1, example if left else file
                continue
            found += 1
            real = file.resolve()
            before = link and _walks(root, real, exclude) and real.relative_to(root) < file.relative_to(given)
            if before or real in seen or any(_walks(folder, real, exclude) for folder in folders):
                continue
            if link or file is given:
                seen.add(real)
            yield without_link(file)
        if left:
            err(f"{given}: {left:,} links that lead out of it are left out, such as {example}")
        if not found:
            raise InputError(f"{given} has no file of a known type ({types}) that is not hidden or excluded")
        if given.is_dir():
            folders.append(root)


def without_link(path: Path) -> Path:
    """Return the file that a link leads to now: pieces are read without following any, but those of the hub's cache,
    where only the link has a name that says what the file is."""
    return path.resolve() if path.is_symlink() and snapshot(path) is None else path


def _walks(folder: Path, file: Path, exclude: Sequence[str]) -> bool:
    """Return whether a walk of the folder comes upon the file, neither of whose paths has links."""
    if folder not in file.parents or not file.name.endswith(SUFFIXES):
        return False
    return not any(_passed_over(name, exclude) for name in file.relative_to(folder).parts)


def _passed_over(name: str, exclude: Sequence[str]) -> bool:
    return name.startswith(".") or any(fnmatch(name, pattern) for pattern in exclude)


def _walk(folder: Path, exclude: Sequence[str]) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if _passed_over(entry.name, exclude):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), exclude)
        elif entry.is_file() and entry.name.endswith(SUFFIXES):
            yield Path(entry.path)


def cut(path: Path) -> list[FileRange]:
    """Return a file's pieces, in order: they hold each of its documents once."""
    size = path.stat().st_size
    if path.suffix in WHOLE:
        return [FileRange(path, 0, size, size)]
    if path.suffix == ".jsonl":
        return [FileRange(path, at, min(at + LINES, size), min(LINES, size - at)) for at in range(0, size, LINES)]
    if path.suffix in STREAMED:
        return [FileRange(path, 0, sys.maxsize, size)]
    if path.suffix == ".arrow":
        return list(_arrow_pieces(path))
    with _table(path) as file:
        metadata = file.metadata
    pieces, row = list[FileRange](), 0
    for group in range(metadata.num_row_groups):
        known = metadata.row_group(group)
        pieces.append(FileRange(path, group, group + 1, known.total_byte_size, row))
        row += known.num_rows
    if any(piece.size > _unpacked(path) for piece in pieces):
        raise InputError(_too_much(path))
    return pieces


def blocks(piece: FileRange) -> Iterator[FileRange]:
    """Yield a piece in parts that are small: the lines or elements of a streamed file, some at a time, else the piece
    itself. InputError as of :func:`rows`."""
    if piece.path.suffix not in STREAMED or piece.lines:
        yield piece
        return
    lines, held, done = list[tuple[int, bytes]](), 0, 0
    with _open(piece.path) as (raw, file), _damage_in_words(piece.path):
        # A file that is named as JSON may have an array, rather than an object on each line.
        begins = file.peek().removeprefix(b"\xef\xbb\xbf").lstrip() if ".json" in piece.path.suffixes else b""
        for at, line in _elements(piece.path, file) if begins.startswith(b"[") else _lines(piece, file):
            lines.append((at, line))
            held += len(line)
            if held >= LINES:
                size, done = raw.tell() - done, raw.tell()
                yield replace(piece, size=size, lines=tuple(lines))
                lines, held = [], 0
    if lines:
        yield replace(piece, size=piece.size - done, lines=tuple(lines))


def _unpacked(path: Path) -> int:
    """Return the bytes that a compressed file may become."""
    return limits.LINE + limits.UNPACKED * path.stat().st_size


def _too_much(path: Path) -> str:
    tool = PACKED.get(path.suffix)
    how = f"unpack it yourself, by {tool}," if tool else "raise the limit in parallel/limits.py"
    return f"{path} unpacks to more than {limits.UNPACKED} times its size, and text does not: {how} if you trust it"


_OF_DAMAGE = (ValueError, NotImplementedError, struct.error, EOFError, KeyError, zlib.error)


@contextmanager
def _damage_in_words(path: Path) -> Iterator[None]:
    """Turn what libraries say of a damaged table or compressed file within this block into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (*_OF_DAMAGE, OSError, MemoryError) as error:
        kind = {".gz": "no whole gzip file", ".zst": "no whole zstandard file"}.get(path.suffix)
        raise InputError(f"{path} is {kind or f'no {path.suffix[1:]} file that can be read'}: {error}") from error


def documents(piece: FileRange, text_key: str) -> Iterator[str | Fault]:
    """Yield the documents of a piece: their text, or why there is none. InputError if a table has no column
    `text_key`."""
    if piece.path.suffix in WHOLE:
        yield _whole(piece.path)
        return
    for row in rows(piece, text_key):
        if isinstance(row, Fault):
            yield row
        elif text_key not in row.values and row.row is None:
            keys = ", ".join(map(repr, row.values))
            yield row.fault(f"no key {text_key!r} among {keys}: {_NAME_IT}")
        else:  # a table has all of its keys, and a null is none of its values
            text = row.values.get(text_key)
            problem = text_problem(text, repr(text_key))
            yield str(text) if problem is None else row.fault(problem)


def rows(piece: FileRange, column: str | None = None) -> Iterator[Record | Fault]:
    """Yield the objects that the lines of a piece of a .jsonl file, the elements of a .json file or the rows of a table
    hold; or why that is nothing. Of a table, all columns are read, or one. Empty lines are passed over. InputError if a
    compressed file or an array is damaged, or a table has no such column."""
    if piece.path.suffix in (".parquet", ".arrow"):
        yield from _table_rows(piece, column)
        return
    for at, line in (each for block in blocks(piece) for each in block.lines or _lines_within(block)):
        if line.strip():
            found = _object(piece.path, at, line)
            yield found if isinstance(found, Fault) else Record(found, piece.path, at, size=len(line))


def _lines_within(piece: FileRange) -> Iterator[tuple[int, bytes]]:
    with _open(piece.path) as (_, file):
        yield from _lines(piece, file)


def _table_rows(piece: FileRange, column: str | None) -> Iterator[Record]:
    read = _arrow_batches if piece.path.suffix == ".arrow" else _batches
    row = piece.row
    for batch in read(piece, column):
        size = batch.nbytes // max(batch.num_rows, 1)
        for values in batch.to_pylist():
            yield Record(_without_nulls(values), piece.path, row=row, size=size)
            row += 1


def _without_nulls(value: Any) -> Any:
    """Return a value of a table whose objects have their own fields alone: a table gives each those of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


@contextmanager
def _table(path: Path) -> Iterator[Any]:
    """Open a .parquet file."""
    parquet = pyarrow_of(path).parquet
    with _damage_in_words(path), _open(path) as (raw, _), parquet.ParquetFile(raw) as file:
        yield file


def _batches(piece: FileRange, column: str | None) -> Iterator[Any]:
    """Yield some rows of a .parquet file at a time. InputError where a few values are so many rows that they were no
    text."""
    with _table(piece.path) as file:
        _check_column(piece.path, file.schema_arrow.names, column)
        most = _unpacked(piece.path)
        columns = None if column is None else [column]
        for batch in file.iter_batches(limits.ROWS, row_groups=[piece.start], columns=columns):
            most -= batch.nbytes
            if most < 0:
                raise InputError(_too_much(piece.path))
            yield batch


def _check_column(path: Path, names: Sequence[str], column: str | None) -> None:
    if column is not None and column not in names:
        known = ", ".join(map(repr, names))
        raise InputError(f"{path}: no column {column!r} among {known}: {_NAME_IT}")


@contextmanager
def _stream(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Open an .arrow file -> pyarrow.ipc, what its messages are read from, and its schema."""
    pyarrow = pyarrow_of(path)
    with _damage_in_words(path), _open(path) as (raw, _):
        # Not closed here: batches may look into it for longer.
        source = pyarrow.BufferReader(pyarrow.py_buffer(mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)))
        source.seek(8 if source.read(6) == b"ARROW1" else 0)  # the format of files has a stream between head and foot
        yield pyarrow.ipc, source, pyarrow.ipc.read_schema(pyarrow.ipc.read_message(source))


def _messages(ipc: Any, source: Any, stop: int) -> Iterator[tuple[int, Any]]:
    """Yield the batches of a stream from here on, each with the byte that it begins at."""
    while (at := source.tell()) < stop:
        try:
            message = ipc.read_message(source)
        except EOFError:  # the mark of the end
            return
        if message.type != "record batch" or _is_compressed(message.metadata.to_pybytes()):
            raise ValueError("it has dictionaries or compressed batches, and `datasets` saves none")
        yield at, message


def _is_compressed(message: bytes) -> bool:
    """Return whether a batch says that its values are to be unpacked: pyarrow would, into whatever memory they ask for.
    The message is a flatbuffer that pyarrow has checked. Its field 2 is the batch, whose field 3 is the compression."""

    def field(table: int, number: int) -> int:
        (back,) = struct.unpack_from("<i", message, table)
        (size,) = struct.unpack_from("<H", message, table - back)
        place = 4 + 2 * number
        return struct.unpack_from("<H", message, table - back + place)[0] if place < size else 0

    (root,) = struct.unpack_from("<I", message)
    batch = root + field(root, 2)
    return field(batch + struct.unpack_from("<I", message, batch)[0], 3) != 0


def _arrow_pieces(path: Path) -> Iterator[FileRange]:
    with _stream(path) as (ipc, source, schema):
        start, rows, row = source.tell(), 0, 0
        for _, message in _messages(ipc, source, sys.maxsize):
            rows += ipc.read_record_batch(message, schema).num_rows
            if (stop := source.tell()) - start >= LINES:
                yield FileRange(path, start, stop, stop - start, row)
                start, row, rows = stop, row + rows, 0
        if rows:
            yield FileRange(path, start, source.tell(), source.tell() - start, row)


def _arrow_batches(piece: FileRange, column: str | None) -> Iterator[Any]:
    """Yield some rows of an .arrow file at a time."""
    with _stream(piece.path) as (ipc, source, schema):
        _check_column(piece.path, schema.names, column)
        source.seek(piece.start)
        for _, message in _messages(ipc, source, piece.stop):
            batch = ipc.read_record_batch(message, schema)
            batch.validate(full=True)  # offsets that lead elsewhere would be followed
            batch = batch if column is None else batch.select([column])
            for at in range(0, batch.num_rows, limits.ROWS):
                yield batch.slice(at, limits.ROWS)


def _decoded(path: Path, data: bytes, line_at: int | None) -> str | Fault:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Fault(path, f"not UTF-8: byte {data[error.start]:#04x} at {error.start}", line_at)


def _whole(path: Path) -> str | Fault:
    with _open(path) as (_, file):
        data = file.read(limits.DOCUMENT + 1)
    if len(data) > limits.DOCUMENT:
        reason = f"more than {limits.DOCUMENT:,} bytes, and a text file is one document: cut it into several"
        return Fault(path, reason)
    return _decoded(path, data, None)


def _lines(piece: FileRange, file: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yield the beginning of each line, and the line; of one that is longer than `limits.LINE`, a byte more than that.
    Empty lines are left out. InputError if a compressed file unpacks to more than text does."""
    # Not in one go: a line may be as long as the file, and have no end in many of its pieces.
    most = _unpacked(piece.path) if piece.path.suffix in PACKED else sys.maxsize
    at = max(piece.start - 1, 0)
    if at:
        file.seek(at)
    inside = piece.start > 0  # a line that begins in the piece before
    while at < piece.stop and (line := file.readline(limits.LINE + 1)):
        if not inside and line != b"\n":
            yield at, line
        at += len(line)
        if line == b"\n":  # of which a bomb has a hundred million
            more = file.peek()
            at += len(file.read(len(more) - len(more.lstrip(b"\n"))))
        inside = not line.endswith(b"\n")
        if at > most:
            raise InputError(_too_much(piece.path))


def _elements(path: Path, file: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yield the beginning of each element of a JSON array, and the element: no more is held than the longest of them.
    InputError if it is no array, an element is longer than `limits.LINE`, or the file unpacks to more than text
    does."""
    scan = json.JSONDecoder().raw_decode
    most = _unpacked(path) if path.suffix in PACKED else sys.maxsize
    text, begin, at, mark = "", 0, 0, "["  # text begins at byte `begin`; its characters are bytes
    while True:
        found = _SEPARATOR.match(text, at)
        if found and found[1] == "]" and mark == ",":
            return
        try:
            if found is None or found[1] != mark:
                raise json.JSONDecodeError(f"no {mark}", text, at)
            end = scan(text, found.end())[1]
        except RecursionError:
            raise InputError(f"{path} is nested too deeply, at byte {begin + at}") from None
        except ValueError as error:
            more = b"" if len(text) - at > limits.LINE else file.read(max(LINES, len(text) - at))
            if not more:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else error
                raise InputError(f"{path} is no JSON array of objects: {reason}, at byte {begin + at}") from None
            begin, text, at = begin + at, text[at:] + more.decode("latin-1"), 0
            if begin > most:
                raise InputError(_too_much(path)) from None
            continue
        yield begin + found.end(), text[found.end() : end].encode("latin-1")
        at, mark = end, ","


@contextmanager
def _open(path: Path) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
    """Open a file -> as it is, and as it is unpacked, where a reader in C finds the lines."""
    with open_file(path, snapshot(path) or path.parent) as file:
        if path.suffix == ".gz":
            yield file, io.BufferedReader(gzip.GzipFile(fileobj=file))
        elif path.suffix == ".zst":
            pyarrow = pyarrow_of(path)
            yield file, io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"))
        else:
            yield file, file


def snapshot(path: Path) -> Path | None:
    """Return the folder of a commit in the hub's cache that a file is in, if it is in one."""
    return next((folder for folder in path.parents if folder.parent.name == "snapshots"), None)


def _object(path: Path, at: int, line: bytes) -> dict[str, Any] | Fault:
    if len(line) > limits.LINE:
        return Fault(path, f"longer than {limits.LINE:,} bytes", at)
    decoded = _decoded(path, line, at)
    if isinstance(decoded, Fault):
        return decoded
    try:
        row = json.loads(decoded.rstrip())
    except json.JSONDecodeError as error:
        return Fault(path, f"not JSON: {error.msg} at character {error.pos + 1}", at)
    except ValueError as error:  # a number of too many digits
        return Fault(path, f"not JSON that can be read: {error}", at)
    except RecursionError:
        return Fault(path, "not JSON that can be read: it is nested too deeply", at)
    if not isinstance(row, dict):
        return Fault(path, f"{'null' if row is None else f'a JSON {type(row).__name__}'}, not an object", at)
    return row


def pyarrow_of(path: Path) -> Any:
    """Return pyarrow with what reads tables; InputError where it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"reading {path.suffix} files takes pyarrow: pip install 'megacore[data]'") from error
    return pyarrow
