"""The documents that a model is evaluated on: of token files, of text, and of chats, as tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megacore.data import data_sets, text
from megacore.data.chat import TrainOn
from megacore.data.formats import FORMATS, PREFERENCES, BadExample, Format, format_of, has_images
from megacore.data.indexed import IndexedDataset
from megacore.data.model_tokenizer import GuardedTokenizer
from megacore.data.text import Fault, FileRange, InputError
from megacore.inference.texts import Texts
from megacore.parallel.labels import IGNORE
from megacore.store.io.strict_json import StoreError

_IMAGES = "has images, and text alone is evaluated: leave them out, or have a run evaluate them (data.validation)"
Integers = npt.NDArray[np.int64]
LONGEST = 2048
"""Tokens of a window by default, for models that would take more."""


@dataclass(frozen=True)
class Document:
    """A text as the model reads it: tokens int64 [n]; counted bool [n], those whose prediction counts (nothing predicts
    the first); size, the bytes of the text that they stand for, None where it is not known."""

    tokens: Integers
    counted: npt.NDArray[np.bool_]
    size: int | None


class Excerpt(NamedTuple):
    """Tokens that the model reads at once, the next ones (IGNORE where it does not count), and the number of the sum
    that each one's score is added to: int64 [t] each."""

    tokens: Integers
    labels: Integers
    sums: Integers

    @classmethod
    def padding(cls, size: int) -> Excerpt:
        return cls(np.zeros(size, np.int64), np.full(size, IGNORE), np.zeros(size, np.int64))


@dataclass(frozen=True)
class Windows:
    """The way that documents are cut.

    Tokens i + 1 of a document are predicted from those before: all but its first, each once. A window is the tokens
    that the model reads at once, at most ``length``; the first begins with the document, and each further one
    ``stride`` tokens after the one before. Of a window only the predictions count that no window before it has made,
    so each token that a later window predicts has at least ``length - stride`` tokens of context.

    So many positions of a document as ``bucket`` says have a sum of their own, None for one sum of all; a label's
    position is the number of tokens before it.
    """

    length: int
    stride: int
    bucket: int | None = None

    def buckets(self, positions: Integers) -> Integers:
        """Return the bucket of each position, [n]."""
        return positions // (self.bucket or sys.maxsize)

    def of(self, document: Document) -> Iterator[Excerpt]:
        """Yield each window; the sums are those of the buckets."""
        tokens, predictions, done = document.tokens, len(document.tokens) - 1, 0
        all_labels = np.where(document.counted, tokens, IGNORE)[1:]
        for start in range(0, max(predictions, 0), self.stride):
            stop = min(start + self.length, predictions)
            labels = all_labels[start:stop].copy()
            labels[: done - start] = IGNORE
            yield Excerpt(tokens[start:stop], labels, self.buckets(np.arange(start + 1, stop + 1)))
            done = stop
            if stop == predictions:
                return


@dataclass(frozen=True)
class DocumentFiles:
    """Files of documents: text files, .jsonl, .parquet, folders of them, or token files without their suffix, which
    alone need no tokenizer (`texts` is None). count: the part of a chat that counts."""

    paths: Sequence[Path]
    vocabulary: int
    texts: Texts | None
    text_key: str
    count: TrainOn

    def documents(self) -> Iterator[Document]:
        """Yield all documents, in the order of the paths. Raises StoreError: something cannot be read, or is no
        document."""
        with _in_words():
            for path in self.paths:
                yield from self._of_tokens(path) if is_tokens(path) else self._of_files(path)

    def _checked(self, path: Path, tokens: Integers) -> Integers:
        least, largest = int(tokens.min(initial=0)), int(tokens.max(initial=0))
        if least < 0 or largest >= self.vocabulary:
            raise InputError(
                f"{path} has the token {least if least < 0 else largest}, and the model's vocabulary goes from 0 to "
                f"{self.vocabulary - 1}: it is of another model's tokenizer, or the file is damaged"
            )
        return tokens

    def _of_tokens(self, path: Path) -> Iterator[Document]:
        dataset = IndexedDataset(path)
        for index in range(dataset.documents):
            # Before they are decoded, which takes no negative ids.
            tokens = self._checked(path, dataset.document(index).astype(np.int64))
            size = None if self.texts is None else len(self.texts.decode(tokens[1:].tolist()).encode())
            yield Document(tokens, np.ones(tokens.size, np.bool_), size)

    def _of_files(self, path: Path) -> Iterator[Document]:
        for file in text.find_files([path]):
            pieces = text.cut(file)
            if _format(pieces) is not None:
                yield from chain.from_iterable(self._rows(pieces, self.count))
                continue
            for piece in pieces:
                for found in text.documents(piece, self.text_key):
                    if isinstance(found, Fault):
                        raise InputError(str(found))
                    yield self._of_text(path, found)

    def _of_text(self, path: Path, string: str) -> Document:
        assert self.texts is not None  # it is there for texts
        tokens = self._checked(path, np.array(self.texts.encode(string), np.int64))
        # Without a token that begins all texts, nothing predicts the first characters.
        pairs = zip(string, self.texts.decode(tokens[:1].tolist()), strict=False)
        unseen = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return Document(tokens, np.ones(tokens.size, np.bool_), len(string.encode()) - len(unseen.encode()))

    def pairs(self) -> Iterator[Sequence[Document]]:
        """Yield what was chosen and what was rejected of all rows. Raises StoreError: as :meth:`documents`, or a row is
        none of these."""
        with _in_words():
            for path in self.paths:
                for file in text.find_files([path]):
                    yield from self._rows(text.cut(file), None)

    @property
    def are_pairs(self) -> bool:
        """Whether the first row has what was chosen and what was rejected. Raises StoreError: it cannot be read."""
        first = next(iter(self.paths), None)
        if first is None or is_tokens(first):
            return False
        with _in_words():
            file = next(text.find_files([first]), None)
            return file is not None and _format(text.cut(file)) == PREFERENCES

    def _rows(self, pieces: Sequence[FileRange], count: TrainOn | None) -> Iterator[list[Document]]:
        """Yield the documents of each row, of which so much counts; None: those of a pair."""
        assert self.texts is not None
        with self.texts.files.folder() as folder:
            tokenizer = GuardedTokenizer(folder)
        for row in (row for piece in pieces for row in text.rows(piece)):
            if isinstance(row, Fault):
                raise InputError(str(row))
            if count is not None and has_images(row.values, parts=False):
                raise InputError(str(row.fault(_IMAGES)))
            (found,) = tokenizer.examples([row], count)
            if isinstance(found, Fault):
                raise InputError(str(found))
            yield [Document(self._checked(row.path, tokens), counted, None) for tokens, counted in found]


def data_files(path: Path, split: str | None) -> Sequence[Path]:
    """Return the files that a path, or the name of a data set of the hub, stands for. Raises StoreError: there is no
    such data set or split."""
    with _in_words():
        return data_sets.held_out_files(str(path), split)


@contextmanager
def _in_words() -> Iterator[None]:
    """Turn what is wrong with the data within this block into a StoreError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise StoreError(str(error)) from error


def is_tokens(path: Path) -> bool:
    """Return whether it names a token file: a pair PATH.bin, PATH.idx."""
    return not path.exists() and Path(f"{path}.idx").is_file()


def _format(pieces: Sequence[FileRange]) -> Format | None:
    """Return the format of the first row of examples; None of texts."""
    if not pieces or pieces[0].path.suffix in text.WHOLE:
        return None
    first = next(text.rows(pieces[0]), None)
    if first is None or isinstance(first, Fault):
        return None
    with suppress(BadExample):
        found = format_of(first.values)
        return None if found == FORMATS[-1] else found  # which is text, under any key
    return None
