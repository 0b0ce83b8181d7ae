"""A corpus, or a partition of one, while it is tokenized: `OUT/.NAME.partial`, where what is finished outlasts an
interruption.

    .lock                     held by who writes it
    files.jsonl               the input: a line [path, bytes of its pieces, time of its last change] for each file
    NAME.bin .lengths .bounds as far as they are written; what is beyond `progress.json` is cut off
    progress.json             what is finished, and what it was made of; written anew every KEPT bytes of text
    tokenizer.json, ...       the files of the tokenizer

The token file is written once, at its end: a resume cuts it off where it was last kept, and nothing need be joined.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b, file_digest
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megacore.data import text
from megacore.data.corpus import CORPUS, Tally, fits
from megacore.data.grouping import grouped
from megacore.data.indexed import Extent, GrowingPair, IndexedDataset, publish
from megacore.data.permutation import ROUNDS, Permutation
from megacore.data.samples import Purpose, draw
from megacore.data.text import FileRange, InputError
from megacore.data.tokenizer import FILES
from megacore.store.io.files import open_file, replacing
from megacore.store.io.strict_json import StoreError, read_json
from megacore.store.tensor_files.publish import PARTIAL, discard, empty, make_and_hold, replace_file, sync

PROGRESS, LISTED = "progress.json", "files.jsonl"
PART = "part.json"
"""Beside the token file of a partition: its :class:`StageProgress`."""
KEPT = 2**28
"""Bytes of text after which what is finished is kept."""
BLOCK = 2**16
"""Documents whose places in the order are computed at once."""

Provenance = Mapping[str, Any]
"""{what the tokens depend on, as the user knows it: its value}."""


@dataclass(frozen=True)
class Partition:
    """The `number`-th, from 1, of `count` successive partitions of the input."""

    number: int
    count: int

    @classmethod
    def parse(cls, value: str) -> Partition:
        match = re.fullmatch(r"(\d+)/(\d+)", value)
        part = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= part.number <= part.count:
            raise ArgumentTypeError(f"{value} is not I/N with I from 1 to N, such as 2/8")
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, name: str) -> str:
        return f"{name}.part-{self.number}-of-{self.count}"

    def share(self, total: int) -> tuple[int, int | None]:
        """Return the bytes [start, stop) in which its pieces begin; those at the end, which are empty, are the
        last's."""
        stop = None if self.number == self.count else total * self.number // self.count
        return total * (self.number - 1) // self.count, stop


@dataclass(frozen=True)
class StageProgress:
    """pieces, size: the number of those that are finished, and their bytes, of `total`. outputs: the files to be
    published, once all is finished; `end`: the id after each document."""

    made: Provenance
    pieces: int
    size: int
    total: int
    extent: Extent
    tally: Tally
    end: int | None = None
    outputs: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        replace_file(path, (json.dumps(asdict(self), default=np.ndarray.tolist) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> StageProgress:
        """Read the progress of a stage; InputError if it is not as it was written."""
        try:
            fields = read_json(path, path.parent)
            if not fits(cls, fields) or not fits(Extent, fields["extent"]):
                raise StoreError("it has other fields, or values of other types")
            known = {"extent": Extent(**fields["extent"]), "tally": Tally.of(fields["tally"])}
            return cls(**fields | known | {"outputs": tuple(fields["outputs"])})
        except StoreError as error:
            raise InputError(f"{path} is damaged ({error}): remove its folder and begin anew") from error


@dataclass
class Stage:
    """The folder while it is held. shuffle: the seed of the order of the documents, None for that of the input;
    progress: the progress that was kept before, None at the beginning."""

    out: Path
    name: str
    shuffle: int | None
    folder: Path
    progress: StageProgress | None

    @classmethod
    @contextmanager
    def open(cls, out: Path, name: str, shuffle: int | None, resume: bool, overwrite: bool) -> Iterator[Stage]:
        """Make the folder, or take up what an interrupted run has left in it.

        On a failure what was kept stays; without any, neither the folder nor an `out` that was made for it does.
        InputError if something was kept and neither `resume` nor `overwrite` says what to do about it; StoreError if
        another process writes it, or the folder is not ours.
        """
        folder = out / PARTIAL.format(name)
        new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        with make_and_hold(folder) as lock:
            try:
                progress = StageProgress.read(folder / PROGRESS) if (folder / PROGRESS).exists() else None
                if progress is not None and not resume:
                    if not overwrite:
                        raise InputError(
                            f"{folder} has {progress.size / max(progress.total, 1):.0%} of an interrupted run: go on "
                            "with --resume, or begin anew with --overwrite"
                        )
                    progress = None
                if progress is None:
                    (folder / PROGRESS).unlink(missing_ok=True)  # first, for it speaks of the others
                    empty(folder)
                try:
                    yield cls(out, name, shuffle, folder, progress)
                except BaseException as error:
                    if (folder / PROGRESS).exists():
                        error.add_note(f"what is finished is kept in {folder}: go on with --resume")
                    raise
            finally:
                if not (folder / PROGRESS).exists():
                    discard(folder, lock)
                if new and not any(out.iterdir()):
                    out.rmdir()

    def list_files(self, inputs: Sequence[Path], exclude: Sequence[str]) -> int:
        """List the files of the input, or compare them with those listed before -> bytes of their pieces. InputError
        names the first one that has changed."""
        listed = self.folder / LISTED
        files, total = text.find_files(inputs, exclude), 0
        if self.progress is None:
            with replacing(listed) as file:
                for path in files:
                    line = _line(path)
                    total += line[1]
                    file.write((json.dumps(line) + "\n").encode())
            return total
        for line, path in zip_longest(self._listed(), files):
            now = None if path is None else _line(path)
            if line is None or now is None or line[0] != now[0]:
                raise InputError(
                    f"{self.folder} is of other files: there {'it ends' if line is None else line[0]} where the "
                    f"input now {'ends' if now is None else f'has {now[0]}'}: {BEGIN_ANEW}"
                )
            if line != now:
                raise InputError(f"{line[0]} has changed since the interrupted run: {BEGIN_ANEW}")
            total += now[1]
        return total

    def _listed(self) -> Iterator[list[Any]]:
        listed = self.folder / LISTED
        with open_file(listed, self.folder) as file:
            for line in file:
                try:
                    path, size, changed = json.loads(line)
                except ValueError as error:
                    raise InputError(f"{listed} is damaged ({error}): remove its folder and begin anew") from error
                yield [path, size, changed]

    def check(self, made: Provenance) -> None:
        """Check what the tokens depend on; InputError names what has changed."""
        assert self.progress is not None
        before = self.progress.made
        for key in dict.fromkeys((*before, *made)):
            if before.get(key) != made.get(key):
                raise InputError(
                    f"{self.folder}: the interrupted run had {key} {before.get(key)!r}, and this one has "
                    f"{made.get(key)!r}: {BEGIN_ANEW}"
                )

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[FileRange]:
        """Yield those of the listed files that begin in bytes [start, stop) of all of them."""
        at = 0
        for path, _, _ in self._listed():
            for piece in text.cut(Path(path)):
                if start <= at and (stop is None or at < stop):
                    yield piece
                at += piece.size

    def digest(self) -> str:
        """Return the digest of the names and sizes of the listed files, wherever they lie."""
        hasher = blake2b(digest_size=16)
        for path, size, _ in self._listed():
            hasher.update(json.dumps([Path(path).name, size]).encode())
        return hasher.hexdigest()

    def keep(self, progress: StageProgress) -> None:
        """Keep this progress, which outlasts an interruption: the files that it speaks of are on the disk."""
        progress.write(self.folder / PROGRESS)
        self.progress = progress

    def pair(self, vocabulary: int, extent: Extent | None = None) -> AbstractContextManager[GrowingPair]:
        """Write documents in the order of the input, from an extent on, and at the end their index."""
        return _indexed(self._in_order, vocabulary, extent)

    @property
    def _in_order(self) -> Path:
        return self.folder / (self.name if self.shuffle is None else f".{self.name}.in_order")

    def finish(self, progress: StageProgress, part: bool = False) -> None:
        """Make the outputs from :meth:`pair`, and keep that they are finished and in the folder."""
        if self.shuffle is not None and progress.extent.documents:
            source = IndexedDataset(self._in_order, checked=True)
            with _indexed(self.folder / self.name, progress.tally.counts.size) as pair:
                _shuffle(source, pair, self.shuffle)
        if part:
            progress.write(self.folder / PART)
        else:
            progress.tally.corpus(self.name, progress.end).write(self.folder)
        tokenizer = [file for file in FILES if (self.folder / file).exists()]
        outputs = (f"{self.name}.bin", *tokenizer, PART if part else CORPUS, f"{self.name}.idx")
        for output in outputs:
            sync(self.folder / output)
        self.keep(replace(progress, outputs=outputs))

    def publish(self, replaced: Sequence[str]) -> None:
        """Move the outputs to their places, the index last, and remove what they replace and the folder's rest. If it
        is interrupted, a resume goes on with it: nothing but what is not moved yet is replaced."""
        assert self.progress is not None
        outputs = [name for name in self.progress.outputs if (self.folder / name).exists()]
        for name in replaced:
            if name not in self.progress.outputs or (name in outputs and name.endswith(".idx")):
                (self.out / name).unlink(missing_ok=True)
        for name in sorted(outputs, key=lambda name: name.endswith(".idx")):
            publish(self.folder / name, self.out / name)
        (self.folder / PROGRESS).unlink()


@contextmanager
def _indexed(prefix: Path, vocabulary: int, extent: Extent | None = None) -> Iterator[GrowingPair]:
    with GrowingPair(prefix, vocabulary, extent) as pair:
        yield pair
        pair.sync()
        pair.write_index(prefix.with_name(f"{prefix.name}.idx"))


def _shuffle(source: IndexedDataset, pair: GrowingPair, seed: int) -> None:
    order = Permutation(source.documents, draw(ROUNDS, seed, Purpose.FILE).tolist())
    starts = range(0, source.documents, BLOCK)
    blocks = (order.block(start, min(start + BLOCK, source.documents)) for start in starts)
    documents = (source.document(document) for block in blocks for document in block.tolist())
    for group in grouped(documents, lambda tokens: tokens.nbytes):
        pair.extend(np.concatenate(group), np.array([tokens.size for tokens in group]))


BEGIN_ANEW = "undo that, or begin anew with --overwrite"


def digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return {name: digest} of those files that are there."""
    found = {}
    for name in names:
        if (folder / name).is_file():
            with open_file(folder / name, folder) as file:
                found[name] = file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()
    return found


def _line(path: Path) -> list[Any]:
    size = sum(piece.size for piece in text.cut(path))
    return [str(path), size, path.stat().st_mtime_ns]
