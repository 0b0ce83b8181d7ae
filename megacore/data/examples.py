"""Files of examples, made once into tokens and what of them counts: a folder that all ranks map into memory.

A document of its token file is an example. Its sequences are by turns tokens that do not count and tokens that do; the
first one does not. It is empty where the example is of the same chat as the one before.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megacore.config import ChatConfig
from megacore.data import text
from megacore.data.chat import BadExample, Template, TrainOn, passages
from megacore.data.encode import EncodedPieces, grouped, with_progress
from megacore.data.indexed import IndexedDataset, IndexedWriter, Integers
from megacore.data.model_tokenizer import GuardedTokenizer, ModelFiles, NoTemplateError, Tokens
from megacore.data.text import Fault, FileRange, InputError, Record
from megacore.store.io.files import open_lock
from megacore.store.io.strict_json import StoreError, read_json
from megacore.store.tensor_files.publish import publish, write_file

FORMAT = 3
NAME, FACTS = "examples", "examples.json"
LISTED = 10  # bad lines that are spelled out
WORKER = 2**23  # bytes of a file that are worth a process more
LOOKED_AT = 1000  # rows of a file that is only looked at


@dataclass(frozen=True)
class Facts:
    """The facts about prepared examples.

    tokens: the number of all, `counted` of which the loss counts. split: chats that are several examples. cut,
    dropped: examples that were too long. skipped: lines that hold none, the first of them in words. vocabulary: 1 + the
    largest id.
    """

    examples: int = 0
    tokens: int = 0
    counted: int = 0
    split: int = 0
    cut: int = 0
    dropped: int = 0
    skipped: int = 0
    faults: tuple[str, ...] = ()
    vocabulary: int = 0

    def __add__(self, other: Facts) -> Facts:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        faults = (*self.faults, *other.faults)[:LISTED]
        return Facts(**sums, faults=faults, vocabulary=max(self.vocabulary, other.vocabulary))


_SUMS = ("examples", "tokens", "counted", "split", "cut", "dropped", "skipped")


class Examples:
    """Prepared examples in a folder. `lengths`: tokens of each, [count]. `chats`: which of the rows that hold examples
    each is of, [count], from 0 on."""

    def __init__(self, folder: Path) -> None:
        self._dataset = IndexedDataset(folder / NAME)
        try:
            known = read_json(folder / FACTS, folder)
            self.facts = Facts(**known | {"faults": tuple(known["faults"])})
            self.chats = np.cumsum(self._dataset.lengths[self._dataset.bounds[:-1]] > 0) - 1
        except (StoreError, KeyError, TypeError, IndexError) as error:
            raise InputError(f"{folder} is not as it was prepared: remove it ({error})") from error
        self.count, self.lengths = self._dataset.documents, self._dataset.document_lengths()

    @property
    def identity(self) -> str:
        """The identity of their tokens."""
        return self._dataset.identity

    def example(self, index: int) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Return the tokens [lengths[index]] of an example, and which of them count."""
        dataset = self._dataset
        runs = dataset.lengths[int(dataset.bounds[index]) : int(dataset.bounds[index + 1])]
        return dataset.document(index), np.repeat(np.arange(runs.size) % 2 == 1, runs)


# -- preparing


@dataclass(frozen=True)
class Preparation:
    """A file of examples, the rules by which it is prepared, and the folder that holds what is made of it.

    Examples have up to `length` + 1 tokens: the last one is predicted alone.
    """

    path: Path
    folder: Path
    chat: ChatConfig
    length: int
    model: ModelFiles

    def examples(self) -> Examples:
        """Return the examples prepared before, or now: by the first process that comes, while others wait for it.

        Raises:
            InputError: lines are bad, or the tokenizer or its template do not serve.
            StoreError: the folder cannot be written.
        """
        target = self.folder / f"{self.path.name.partition('.')[0]}-{self.fingerprint()}"
        if target.is_symlink():
            raise InputError(f"{target} is a link, and what is prepared lies in the run's own folder: remove it")
        if not target.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with _lock(self.folder / f".{target.name}.lock"):
                if not target.exists():
                    self._prepare(target)
        found = Examples(target)
        _check_ids(found.facts.vocabulary, self.model.vocabulary, self.path)
        return found

    def look(self) -> None:
        """Prepare the first ``LOOKED_AT`` rows and keep nothing: for a run that will not start as it is.

        Raises:
            InputError: as :meth:`examples`, of these rows.
        """
        with self.model.folder() as folder:
            pieces = text.cut(text.without_link(self.path))
            facts = encode_examples(ExampleTask(pieces, folder, self.chat, self.length, LOOKED_AT)).facts
        _check_ids(facts.vocabulary, self.model.vocabulary, self.path)
        if facts.skipped:
            self._refuse(facts)

    def fingerprint(self) -> str:
        """Return the fingerprint of all that the prepared examples depend on; the file counts by its place, size and
        date."""
        known = self.path.stat()
        rules = replace(self.chat, pack=True, template=None)  # packing comes later, and the template is with the files
        facts = [FORMAT, str(self.path.resolve()), known.st_size, known.st_mtime_ns, asdict(rules), self.length]
        kind = [self.model.config.get(key) for key in ("model_type", "tokenizer_class", "eos_token_id")]
        files = [[name, blake2b(file.read()).hexdigest()] for name, file in sorted(self.model.files.items())]
        versions = [version("transformers"), version("tokenizers")]
        return blake2b(json.dumps([facts, kind, files, versions]).encode(), digest_size=8).hexdigest()

    def _prepare(self, target: Path) -> None:
        pieces = text.cut(text.without_link(self.path))
        size = sum(piece.size for piece in pieces)
        workers = max(1, min(os.cpu_count() or 1, len(pieces), size // WORKER))
        with publish(target) as made, self.model.folder() as folder:
            facts, groups = Facts(), grouped(pieces, lambda piece: piece.size)
            tasks = (ExampleTask(group, folder, self.chat, self.length) for group in groups)
            with (
                IndexedWriter(made / NAME, self.model.vocabulary) as writer,
                closing(with_progress(encode_examples, tasks, workers, size, f"prepare {self.path.name}")) as results,
            ):
                for result in results:
                    facts += result.facts
                    _check_ids(facts.vocabulary, self.model.vocabulary, self.path)
                    for example in result.examples():
                        writer.write(*example)
            self._refuse(facts)
            write_file(made / FACTS, (json.dumps(asdict(facts), indent=2) + "\n").encode())

    def _refuse(self, facts: Facts) -> None:
        if facts.skipped and self.chat.bad_lines == "stop":
            more = [f"and {facts.skipped - len(facts.faults):,} more"] if facts.skipped > len(facts.faults) else []
            raise InputError(
                f"{self.path} has {facts.skipped:,} bad line(s): mend them, or leave them out by "
                f"chat.bad_lines=skip{_indented([*facts.faults, *more])}"
            )
        if not facts.examples:
            raise InputError(
                f"{self.path} has no examples to train on: {facts.skipped:,} bad lines, {facts.dropped:,} dropped "
                f"as they are too long for data.sequence_length={self.length}"
            )


def _indented(lines: Iterable[object]) -> str:
    return "".join(f"\n       {line}" for line in lines)


def _check_ids(found: int, known: int, path: Path) -> None:
    if found > known:
        raise InputError(
            f"{path}: the tokenizer gives ids up to {found - 1}, and the model's vocabulary ends at {known - 1}: it is "
            "another model's tokenizer, or has tokens that were added later"
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that one process has at a time; it ends with the process."""
    with open_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- a worker's part


@dataclass(frozen=True)
class ExampleTask:
    """Pieces to prepare by the tokenizer in a folder; no more than `most` rows of them."""

    pieces: list[FileRange]
    folder: Path
    chat: ChatConfig
    length: int
    most: int = sys.maxsize


@dataclass(frozen=True)
class EncodedExamples(EncodedPieces):
    """tokens [of all examples]; runs: lengths of their sequences, by turns uncounted and counted, [of all examples];
    sequences: the number that each example has."""

    tokens: Integers
    runs: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]
    facts: Facts

    def examples(self) -> Iterator[list[Integers]]:
        """Yield the sequences of each."""
        parts = np.split(self.tokens, np.cumsum(self.runs))
        for stop, count in zip(np.cumsum(self.sequences).tolist(), self.sequences.tolist(), strict=True):
            yield parts[stop - count : stop]


@dataclass
class _ExampleBuilder:
    """The examples that a worker has made so far of a task."""

    task: ExampleTask
    tokens: list[Integers] = field(default_factory=list)
    runs: list[npt.NDArray[np.int64]] = field(default_factory=list)
    facts: Facts = Facts()

    def skip(self, fault: Fault) -> None:
        # To find the line's number the file is read again: only for those that are shown.
        words = (str(fault),) if len(self.facts.faults) < LISTED else ()
        self.facts += Facts(skipped=1, faults=words)

    def add(self, examples: Sequence[Tokens]) -> None:
        """Keep each example of a row up to its last token that counts, or drop it."""
        before = self.facts.examples
        self.facts += Facts(split=int(len(examples) > 1))
        for tokens in examples:
            self._add(tokens, self.facts.examples > before)

    def _add(self, tokens: Tokens, goes_on: bool) -> None:
        ids, counted = _until_counted(tokens)
        limit, cut = self.task.length + 1, 0
        if ids.size > limit:
            if self.task.chat.too_long == "drop":
                self.facts += Facts(dropped=1)
                return
            ids, counted = _until_counted((ids[:limit], counted[:limit]))
            if not ids.size:
                self.facts += Facts(dropped=1)
                return
            cut = 1
        self.tokens.append(ids)
        runs = np.diff(np.flatnonzero(np.diff(counted)) + 1, prepend=0, append=ids.size)
        self.runs.append(np.concatenate([np.zeros(2 * goes_on, np.int64), runs]))
        self.facts += Facts(1, ids.size, int(counted.sum()), cut=cut, vocabulary=int(ids.max()) + 1)


def _until_counted(tokens: Tokens) -> Tokens:
    ids, counted = tokens
    size = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0
    return ids[:size], counted[:size]


def _bad_with_any_template(rows: Iterable[Record | Fault], train_on: TrainOn) -> Iterator[Fault]:
    def none() -> Template:
        raise NoTemplateError("")

    for row in rows:
        if isinstance(row, Fault):
            yield row
            continue
        try:
            passages(row.values, none, train_on)
        except BadExample as error:
            yield row.fault(str(error))
        except NoTemplateError:
            pass


_load = lru_cache(maxsize=1)(GuardedTokenizer)  # once in each process


def encode_examples(task: ExampleTask) -> EncodedExamples:
    """Encode one task in this process."""
    tokenizer, made = _load(task.folder), _ExampleBuilder(task)
    rows = islice((row for piece in task.pieces for row in text.rows(piece)), task.most)
    for group in grouped(rows, lambda row: 0 if isinstance(row, Fault) else row.size):
        try:
            encoded = iter(tokenizer.examples([each for each in group if isinstance(each, Record)], task.chat.train_on))
        except NoTemplateError as error:
            bad = islice(_bad_with_any_template(chain(group, rows), task.chat.train_on), LISTED)
            raise InputError(f"{error}{_indented(bad)}") from error
        for row in group:
            found = row if isinstance(row, Fault) else next(encoded)
            if isinstance(found, Fault):
                made.skip(found)
            elif kept := [tokens for tokens in found if tokens[1].any()]:
                made.add(kept)
            else:
                assert isinstance(row, Record)
                made.skip(row.fault("the loss would count none of its tokens"))
    return EncodedExamples(
        sum(piece.size for piece in task.pieces),
        np.concatenate([np.empty(0, np.int64), *made.tokens]),
        np.concatenate([np.empty(0, np.int64), *made.runs]),
        np.array([runs.size for runs in made.runs], np.int64),
        made.facts,
    )
