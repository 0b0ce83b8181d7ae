"""Documents in files: a whole text file, a line of .jsonl or a row of .parquet, found and read in pieces.

A .jsonl file may be compressed (.jsonl.gz) where its rows are read.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

from megacore.parallel import limits
from megacore.say import err
from megacore.store.io.files import leaves, open_file

WHOLE = (".txt", ".md", ".py")
SUFFIXES = (*WHOLE, ".jsonl", ".parquet")
LINES = 4 * 2**20  # bytes of a piece of a .jsonl file


class InputError(ValueError):
    """The user's input is at fault; the message says what, where, and the way out; of a long one, the middle is cut."""

    def __init__(self, message: str) -> None:
        super().__init__(limits.cut(message))


@dataclass(frozen=True)
class FileRange:
    """A part of the input that is read at once: a text file, the lines of a .jsonl file that begin in bytes [start,
    stop), or, for a .parquet file, row group `start`. `size` is its length in bytes, those of the file where it is
    compressed."""

    path: Path
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Fault:
    """A document that could not be read; in a .jsonl file it begins at byte `line_at`, in a table it is row `row`,
    counted from 0."""

    path: Path
    reason: str
    line_at: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        if self.row is not None:
            return limits.cut(f"{self.path}, row {self.row}: {self.reason}")
        if self.line_at is None:
            return limits.cut(f"{self.path}: {self.reason}")
        with _open(self.path) as file:
            line = 1 + sum(
                file.read(min(2**20, self.line_at - at)).count(b"\n") for at in range(0, self.line_at, 2**20)
            )
        return limits.cut(f"{self.path}, line {line}: {self.reason}")


@dataclass(frozen=True)
class Record:
    """A line of a .jsonl file that begins at byte `line_at`, or row `row` of a table: an object with these values, of
    about `size` bytes."""

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
        if given.is_file() and given.suffix not in SUFFIXES:
            raise InputError(f"{given} is not of a known type: {types}")
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
            yield real if link else file
        if left:
            err(f"{given}: {left:,} links that lead out of it are left out, such as {example}")
        if not found:
            raise InputError(f"{given} has no file of a known type ({types}) that is not hidden or excluded")
        if given.is_dir():
            folders.append(root)


def without_link(path: Path) -> Path:
    """Return the file that a link leads to now: pieces are read without following any."""
    return path.resolve() if path.is_symlink() else path


def _walks(folder: Path, file: Path, exclude: Sequence[str]) -> bool:
    """Return whether a walk of the folder comes upon the file, neither of whose paths has links."""
    if folder not in file.parents or file.suffix not in SUFFIXES:
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
        elif entry.is_file() and Path(entry.name).suffix in SUFFIXES:
            yield Path(entry.path)


def cut(path: Path) -> list[FileRange]:
    """Return a file's pieces, in order: they hold each of its documents once."""
    size = path.stat().st_size
    if path.suffix in WHOLE:
        return [FileRange(path, 0, size, size)]
    if path.suffix == ".jsonl":
        return [FileRange(path, at, min(at + LINES, size), min(LINES, size - at)) for at in range(0, size, LINES)]
    if path.suffix == ".gz":
        return [FileRange(path, 0, sys.maxsize, size)]
    parquet = _parquet()
    with _table_errors(path):
        metadata = parquet.read_metadata(path)
    groups = range(metadata.num_row_groups)
    pieces = [FileRange(path, group, group + 1, metadata.row_group(group).total_byte_size) for group in groups]
    if any(piece.size > _unpacked(path) for piece in pieces):
        raise InputError(_too_much(path))
    return pieces


def _unpacked(path: Path) -> int:
    """Return the bytes that a compressed file may become."""
    return limits.LINE + limits.UNPACKED * path.stat().st_size


def _too_much(path: Path) -> str:
    how = "unpack it yourself, by gunzip," if path.suffix == ".gz" else "raise the limit in parallel/limits.py"
    return f"{path} unpacks to more than {limits.UNPACKED} times its size, and text does not: {how} if you trust it"


@contextmanager
def _table_errors(path: Path) -> Iterator[None]:
    """Turn what pyarrow says of a damaged file within this block into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, OSError, MemoryError, NotImplementedError) as error:
        raise InputError(f"{path} is no parquet file that can be read: {error}") from error


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
            yield row.fault(f"no key {text_key!r} among {keys}: name the one with --text-key")
        else:  # a table has all of its keys, and a null is none of its values
            text = row.values.get(text_key)
            problem = text_problem(text, repr(text_key))
            yield str(text) if problem is None else row.fault(problem)


def rows(piece: FileRange, column: str | None = None) -> Iterator[Record | Fault]:
    """Yield the objects that the lines of a piece of a .jsonl file, or the rows of one of a .parquet file, hold; or why
    that is nothing. Of a table, all columns are read, or one.

    Empty lines are passed over. InputError if a compressed file is damaged, or a table has no such column.
    """
    if piece.path.suffix == ".parquet":
        yield from _table_rows(piece, column)
        return
    try:
        for at, line in _lines(piece):
            if line.strip():
                found = _object(piece.path, at, line)
                yield found if isinstance(found, Fault) else Record(found, piece.path, at, size=len(line))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{piece.path} is no whole gzip file: {error}") from error


def _table_rows(piece: FileRange, column: str | None) -> Iterator[Record]:
    parquet = _parquet()
    with _table_errors(piece.path), parquet.ParquetFile(piece.path) as file:
        if column is not None and column not in file.schema_arrow.names:
            names = ", ".join(map(repr, file.schema_arrow.names))
            raise InputError(f"{piece.path}: no column {column!r} among {names}: name the one with --text-key")
        row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        for batch in _batches(file, piece, None if column is None else [column]):
            for values in batch.to_pylist():
                yield Record(_without_nulls(values), piece.path, row=row, size=batch.nbytes // batch.num_rows)
                row += 1


def _without_nulls(value: Any) -> Any:
    """Return a value of a table whose objects have their own fields alone: a table gives each those of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _batches(file: Any, piece: FileRange, columns: list[str] | None) -> Iterator[Any]:
    """Yield some rows at a time. InputError where a few values are so many rows that they were no text."""
    most = _unpacked(piece.path)
    for batch in file.iter_batches(limits.ROWS, row_groups=[piece.start], columns=columns):
        most -= batch.nbytes
        if most < 0:
            raise InputError(_too_much(piece.path))
        yield batch


def _decoded(path: Path, data: bytes, line_at: int | None) -> str | Fault:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Fault(path, f"not UTF-8: byte {data[error.start]:#04x} at {error.start}", line_at)


def _whole(path: Path) -> str | Fault:
    with _open(path) as file:
        data = file.read(limits.DOCUMENT + 1)
    if len(data) > limits.DOCUMENT:
        reason = f"more than {limits.DOCUMENT:,} bytes, and a text file is one document: cut it into several"
        return Fault(path, reason)
    return _decoded(path, data, None)


def _lines(piece: FileRange) -> Iterator[tuple[int, bytes]]:
    """Yield the beginning of each line, and the line; of one that is longer than `limits.LINE`, a byte more than that.
    Empty lines are left out.

    InputError if a compressed file unpacks to more than text does.
    """
    # Not in one go: a line may be as long as the file, and have no end in many of its pieces.
    most = _unpacked(piece.path) if piece.path.suffix == ".gz" else sys.maxsize
    with _open(piece.path) as file:
        at = max(piece.start - 1, 0)
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


@contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader]:
    with open_file(path, path.parent) as file:
        # A reader in C finds the lines.
        yield io.BufferedReader(gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file


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
        return Fault(path, f"a JSON {type(row).__name__}, not an object", at)
    return row


def text_problem(value: object, what: str) -> str | None:
    """Return why a value is no text that can be encoded; None where it is one."""
    if not isinstance(value, str):
        return f"{what} is {kind_of(value)}, not text"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"{what} has the lone surrogate {value[error.start]!r} at {error.start}"
    return None


def kind_of(value: object) -> str:
    """Return the type of a JSON value, for a message."""
    return "null" if value is None else f"a {type(value).__name__}"


def _parquet() -> ModuleType:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError("reading .parquet files takes pyarrow: pip install 'megacore[parquet]'") from error
    return pyarrow.parquet
