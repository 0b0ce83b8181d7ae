"""Files of examples, made once into tokens and what of them counts: a folder that all ranks map into memory.

A document of its token file is an example. Its sequences are by turns tokens that do not count and tokens that do; the
first one does not. It is empty where the example is of the same chat as the one before. A pair of preferences is two
documents of one chat: what was chosen, and what was rejected. The images of a document are a line beside them: its
number, and [file, runs of the tokens that stand for it] of each.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megacore.config import ChatConfig
from megacore.data import text
from megacore.data.encode import EncodedPieces, with_progress
from megacore.data.formats import BadExample, example, format_of, has_images, preference, renamed
from megacore.data.grouping import grouped
from megacore.data.indexed import IndexedDataset, IndexedWriter, Integers
from megacore.data.model_tokenizer import GuardedTokenizer, ImageTokens, ModelFiles, Tokens
from megacore.data.text import Fault, FileRange, InputError, Record
from megacore.store.io.files import open_file, open_lock
from megacore.store.io.strict_json import StoreError, read_json
from megacore.store.tensor_files.publish import publish, write_file

FORMAT = 5
NAME, FACTS, IMAGES = "examples", "examples.json", "images.jsonl"
LISTED = 10  # bad lines that are spelled out
WORKER = 2**23  # bytes of a file that are worth a process more
LOOKED_AT, LOOKED_AT_BYTES = 1000, 2**26  # of the beginning of files, before a tokenizer is loaded


@dataclass(frozen=True)
class Facts:
    """The facts about prepared examples. tokens: the number of all, `counted` of which the loss counts. split: chats
    that are several examples. cut, dropped: examples that were too long. skipped: lines that hold none, the first of
    them in words. vocabulary: 1 + the largest id. formats: {a format: the number of rows of it}."""

    examples: int = 0
    tokens: int = 0
    counted: int = 0
    split: int = 0
    cut: int = 0
    dropped: int = 0
    skipped: int = 0
    faults: tuple[str, ...] = ()
    vocabulary: int = 0
    formats: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Facts) -> Facts:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        faults = (*self.faults, *other.faults)[:LISTED]
        formats = {name: self.formats.get(name, 0) + count for name, count in other.formats.items()}
        vocabulary = max(self.vocabulary, other.vocabulary)
        return Facts(**sums, faults=faults, vocabulary=vocabulary, formats={**self.formats, **formats})


_SUMS = ("examples", "tokens", "counted", "split", "cut", "dropped", "skipped")


class Examples:
    """Prepared examples in a folder, or pairs of documents. `lengths`: tokens of each, [count]. `chats`: which of the
    rows that hold examples each is of, [count], from 0 on. `reference`: of pairs, the log-probabilities of their
    answers by the reference, fp64 [count, 2]: NaN until they are known."""

    def __init__(self, folder: Path, pairs: bool = False) -> None:
        self.folder, self.documents = folder, 2 if pairs else 1
        """The number of documents of each."""
        self._dataset = IndexedDataset(folder / NAME)
        try:
            known = read_json(folder / FACTS, folder)
            formats = {str(name): int(count) for name, count in known["formats"].items()}
            self.facts = Facts(**known | {"faults": tuple(known["faults"]), "formats": formats})
            self._images = dict(_images(folder / IMAGES)) if (folder / IMAGES).exists() else {}
            chats = np.cumsum(self._dataset.lengths[self._dataset.bounds[:-1]] > 0) - 1
            self.chats = chats.reshape(-1, self.documents)[:, 0]
        except (StoreError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InputError(f"{folder} is not as it was prepared: remove it ({error})") from error
        self.lengths = self._dataset.document_lengths().reshape(-1, self.documents).sum(1)
        self.count = len(self.lengths)
        self.reference = np.full((self.count, 2), np.nan) if pairs else None

    @property
    def has_images(self) -> bool:
        """Whether there are images."""
        return bool(self._images)

    def images(self, index: int) -> ImageTokens:
        """Return the images of a document."""
        return json.loads(self._images[index])[1] if index in self._images else ()

    @property
    def identity(self) -> str:
        """The identity of their tokens."""
        return self._dataset.identity

    def example(self, index: int) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Return the tokens [n] of a document, and which of them count."""
        dataset = self._dataset
        runs = dataset.lengths[int(dataset.bounds[index]) : int(dataset.bounds[index + 1])]
        return dataset.document(index), np.repeat(np.arange(runs.size) % 2 == 1, runs)


def _images(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (document, its line): as text, for there may be many."""
    with open_file(path, path.parent) as file:
        for line in file:
            yield int(json.loads(line)[0]), line


# -- preparing


@dataclass(frozen=True)
class ExampleFiles:
    """Files of examples, under the name that the recipe has for them, and {our key: theirs} where that is another;
    pairs: whether they are to be preferences."""

    name: str
    files: Sequence[Path]
    keys: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False

    def pieces(self) -> list[FileRange]:
        """Return the pieces of all files. InputError as of :func:`megacore.data.text.cut`."""
        return [piece for file in self.files for piece in text.cut(file)]

    def look(self, bad_lines: str) -> None:
        """Look at the first rows, which takes no tokenizer. Raises InputError: they are none to be trained on."""
        facts, size = Facts(), 0
        rows = (row for piece in self.pieces() for row in recognized(text.rows(piece), self.keys, self.pairs))
        for row in islice(rows, LOOKED_AT):
            fault = row if isinstance(row, Fault) else _fault(row, self.pairs)
            size += 0 if isinstance(row, Fault) else row.size
            facts = _with_fault(facts, fault) if fault is not None else facts + Facts(examples=1)
            if size > LOOKED_AT_BYTES:
                break
        if facts.skipped and bad_lines == "stop":
            more = facts.examples + facts.skipped == LOOKED_AT or size > LOOKED_AT_BYTES
            raise InputError(_bad_lines(self.name, facts, " among its first rows" if more else ""))


def recognized(rows: Iterable[Record | Fault], keys: Mapping[str, str], pairs: bool) -> Iterator[Record | Fault]:
    """Yield rows under our keys, those without a format as faults, unless these are to be ``pairs``. InputError where
    one is of a format that is not trained on."""
    for row in rows:
        if isinstance(row, Fault):
            yield row
            continue
        try:
            found = replace(row, values=renamed(row.values, keys))
            refused = not pairs and format_of(found.values).refused
        except BadExample as error:
            yield row.fault(str(error))
            continue
        if refused:
            raise InputError(str(_fault(found, pairs)))
        yield found


def _fault(row: Record, pairs: bool) -> Fault | None:
    try:
        preference(row.values) if pairs else example(row.values, row.path.parent)
    except BadExample as error:
        return row.fault(str(error))
    return None


def _with_fault(facts: Facts, fault: Fault) -> Facts:
    # To find the line's number the file is read again: only for those that are shown.
    return facts + Facts(skipped=1, faults=(str(fault),) if len(facts.faults) < LISTED else ())


def _bad_lines(name: str, facts: Facts, where: str = "") -> str:
    more = [f"and {facts.skipped - len(facts.faults):,} more"] if facts.skipped > len(facts.faults) else []
    listed = "".join(f"\n       {line}" for line in (*facts.faults, *more))
    return (
        f"{name} has {facts.skipped:,} bad line(s){where}: mend them, or leave them out by chat.bad_lines=skip{listed}"
    )


@dataclass(frozen=True)
class Preparation:
    """Files of examples, the rules by which they are prepared, and the folder that holds what is made of them. Examples
    have up to `length` + 1 tokens: the last one is predicted alone."""

    source: ExampleFiles
    folder: Path
    chat: ChatConfig
    length: int
    model: ModelFiles

    def examples(self) -> Examples:
        """Return the examples prepared before, or now: by the first process that comes, while others wait for it.
        Raises InputError: lines are bad, or the tokenizer or its template do not serve; StoreError: the folder cannot
        be written."""
        target = self.folder / f"{re.split('[.@]', Path(self.source.name).name)[0]}-{self.fingerprint()}"
        if target.is_symlink():
            raise InputError(f"{target} is a link, and what is prepared lies in the run's own folder: remove it")
        if not target.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with open_lock(self.folder / f".{target.name}.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one process has it at a time, until it ends
                if not target.exists():
                    self._prepare(target)
        found = Examples(target, self.source.pairs)
        _check_ids(found.facts.vocabulary, self.model.vocabulary, self.source.name)
        return found

    def fingerprint(self) -> str:
        """Return the fingerprint of all that the prepared examples depend on; a file counts by its place, size and
        date, one of the hub's by its commit."""
        rules = replace(self.chat, pack=True, template=None)  # packing comes later, and the template is with the files
        facts = [FORMAT, [*map(_version, self.source.files)], dict(self.source.keys), asdict(rules), self.length]
        facts += [self.source.pairs] * self.source.pairs
        kind = [self.model.config.get(key) for key in ("model_type", "tokenizer_class", "eos_token_id")]
        files = [[name, blake2b(file.read()).hexdigest()] for name, file in sorted(self.model.files.items())]
        versions = [version("transformers"), version("tokenizers")]
        return blake2b(json.dumps([facts, kind, files, versions]).encode(), digest_size=8).hexdigest()

    def _prepare(self, target: Path) -> None:
        pieces = self.source.pieces()
        size = sum(piece.size for piece in pieces)
        workers = max(1, min(os.cpu_count() or 1, size // WORKER))
        with publish(target) as made, self.model.folder() as folder:
            facts, parts = Facts(), (part for piece in pieces for part in text.blocks(piece))
            groups = grouped(parts, lambda part: part.work)
            encoder = partial(encode_examples, folder, self.chat, self.length, self.source, self.model.no_images)
            images, number = list[bytes](), count()
            name = f"prepare {Path(self.source.name).name}"
            with (
                IndexedWriter(made / NAME, self.model.vocabulary) as writer,
                closing(with_progress(encoder, groups, workers, size, name)) as results,
            ):
                for result in results:
                    facts += result.facts
                    _check_ids(facts.vocabulary, self.model.vocabulary, self.source.name)
                    for example, shown in zip(result.examples(), result.images, strict=True):
                        line = json.dumps([next(number), shown])
                        images += [f"{line}\n".encode()] if shown else []
                        writer.write(*example)
            if facts.skipped and self.chat.bad_lines == "stop":
                raise InputError(_bad_lines(self.source.name, facts))
            if not facts.examples:
                raise InputError(
                    f"{self.source.name} has no examples to train on: {facts.skipped:,} bad lines, {facts.dropped:,} "
                    f"dropped as they are too long for data.sequence_length={self.length}"
                )
            if images:
                write_file(made / IMAGES, b"".join(images))
            write_file(made / FACTS, (json.dumps(asdict(facts), indent=2) + "\n").encode())


def _version(file: Path) -> list[object]:
    if (commit := text.snapshot(file)) is not None:
        return [commit.name, str(file.relative_to(commit))]
    known = file.stat()
    return [str(file.resolve()), known.st_size, known.st_mtime_ns]


def _check_ids(found: int, known: int, name: str) -> None:
    if found > known:
        raise InputError(
            f"{name}: the tokenizer gives ids up to {found - 1}, and the model's vocabulary ends at {known - 1}: it is "
            "another model's tokenizer, or has tokens that were added later"
        )


# -- a worker's part


@dataclass
class EncodedExamples(EncodedPieces):
    """The examples that a worker has made so far of some pieces: the tokens of each, the lengths of its sequences, by
    turns uncounted and counted, and its images. ``room``: the most tokens of one, or of a pair; ``drops``: whether
    longer ones are dropped."""

    room: int
    drops: bool
    tokens: list[Integers] = field(default_factory=list)
    runs: list[npt.NDArray[np.int64]] = field(default_factory=list)
    images: list[ImageTokens] = field(default_factory=list)
    facts: Facts = Facts()

    def examples(self) -> Iterator[list[Integers]]:
        """Yield the sequences of each."""
        for tokens, runs in zip(self.tokens, self.runs, strict=True):
            yield np.split(tokens, np.cumsum(runs)[:-1])

    def skip(self, fault: Fault) -> None:
        self.facts = _with_fault(self.facts, fault)

    def add(self, examples: Sequence[tuple[Tokens, ImageTokens]], kind: str) -> None:
        """Keep each example of a row up to its last token that counts, or drop it. It ends within no image: tokens of
        these never count."""
        self.facts += Facts(split=int(len(examples) > 1), formats={kind: 1})
        goes_on = False
        for tokens, shown in examples:
            ids, counted = _until_counted(tokens)
            kept = _until_counted((ids[: self.room], counted[: self.room]))
            goes_on |= self._keep([kept], ids.size > self.room, goes_on, shown)

    def add_pair(self, pair: Sequence[Tokens], kind: str) -> None:
        """Keep a pair, or drop it. What does not fit into a row is cut at the ends of both answers, but no answer to
        less than half of the row."""
        self.facts += Facts(formats={kind: 1})
        sizes = [len(ids) for ids, _ in pair]
        limits = [max(self.room // 2, self.room - other) for other in reversed(sizes)]
        kept = [(ids[:limit], counted[:limit]) for (ids, counted), limit in zip(pair, limits, strict=True)]
        self._keep(kept, sum(sizes) > self.room)

    def _keep(self, documents: Sequence[Tokens], cut: bool, goes_on: bool = False, shown: ImageTokens = ()) -> bool:
        """Keep an example -> whether it was kept: one that was cut may be unwanted, or have nothing that counts."""
        if cut and (self.drops or not all(counted.any() for _, counted in documents)):
            self.facts += Facts(dropped=1)
            return False
        for number, (ids, counted) in enumerate(documents):
            self.tokens.append(ids)
            runs = np.diff(np.flatnonzero(np.diff(counted)) + 1, prepend=0, append=ids.size)
            self.images.append([each for each in shown if each[1][-1][1] <= ids.size])
            self.runs.append(np.concatenate([np.zeros(2 * (goes_on or number > 0), np.int64), runs]))
            self.facts += Facts(0, ids.size, int(counted.sum()), vocabulary=int(ids.max()) + 1)
        self.facts += Facts(1, cut=int(cut))
        return True


def _until_counted(tokens: Tokens) -> Tokens:
    ids, counted = tokens
    size = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0
    return ids[:size], counted[:size]


_load = lru_cache(maxsize=1)(GuardedTokenizer)  # once in each process


def encode_examples(
    folder: Path, chat: ChatConfig, length: int, source: ExampleFiles, no_images: str, pieces: list[FileRange]
) -> EncodedExamples:
    """Encode pieces of a source in this process by the tokenizer in a folder. ``no_images``: that of its
    :class:`~megacore.data.model_tokenizer.ModelFiles`. InputError, then, where there are images."""
    tokenizer, pairs = _load(folder), source.pairs
    made = EncodedExamples(sum(piece.size for piece in pieces), length + 1, chat.too_long == "drop")
    rows = (row for piece in pieces for row in recognized(text.rows(piece), source.keys, pairs))

    def shows(row: Record) -> bool:
        return not pairs and has_images(row.values, parts=not no_images)

    for group in grouped(rows, lambda row: 0 if isinstance(row, Fault) else row.size):
        records = [each for each in group if isinstance(each, Record) and not shows(each)]
        encoded = iter(tokenizer.examples(records, None if pairs else chat.train_on))
        for row in group:
            if isinstance(row, Fault):
                made.skip(row)
                continue
            if shows(row):
                if no_images:
                    raise InputError(str(row.fault(no_images)))
                shown = tokenizer.with_images(row, chat.train_on)
            else:
                found = next(encoded)
                shown = found if isinstance(found, Fault) else [(tokens, []) for tokens in found]
            if isinstance(shown, Fault):
                made.skip(shown)
            elif pairs:
                made.add_pair([tokens for tokens, _ in shown], str(format_of(row.values)))
            elif kept := [each for each in shown if each[0][1].any()]:
                made.add(kept, str(format_of(row.values)))
            else:
                made.skip(row.fault("the loss would count none of its tokens"))
    return made
