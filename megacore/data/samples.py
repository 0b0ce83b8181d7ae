"""Training samples of one corpus: its stream of tokens, cut to length, and shuffled by a formula."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megacore.data.indexed import CHUNK, IndexedDataset, Integers
from megacore.data.permutation import ROUNDS, Permutation


class Purpose(IntEnum):
    """The purposes of random words: each has streams of its own."""

    DOCUMENTS = 0
    SAMPLES = 1
    SPLIT = 2
    TOKENIZER = 3
    STREAM = 4
    FILE = 5
    TEXT_FILES = 6
    TEXTS = 7


def draw(
    count: int, seed: int, purpose: Purpose, epoch: int = 0, within: tuple[int, int] = (0, 0)
) -> npt.NDArray[np.uint64]:
    """Return the first `count` words, [count], of the random stream of (seed, purpose, epoch, within), each from 0 to
    2^64 - 1."""
    # Raw words are a fixed function of key and counter; what numpy's Generator makes of them may change with numpy.
    key, counter = np.array([seed, purpose], np.uint64), np.array([0, *within, epoch], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def shuffled(
    count: int, seed: int, purpose: Purpose, epoch: int = 0, within: tuple[int, int] = (0, 0)
) -> npt.NDArray[np.int64]:
    """Return the permutation of range(count), [count], that belongs to (seed, purpose, epoch, within)."""
    return np.argsort(draw(count, seed, purpose, epoch, within), kind="stable")


@dataclass(frozen=True)
class Sample:
    """tokens int64 [length + 1]; documents int32 [length + 1], which of the sample's documents 0, 1, ... each is of;
    counted bool [length + 1], whether the loss counts the prediction of each; filled, the number of tokens that are not
    the padding at the end, None where that is all; reference fp64 [pairs, 2], where documents 2i and 2i + 1 are the
    chosen and the rejected one of a pair: the log-probabilities of their answers by the reference; images, (file, int64
    [its tokens], the places of those that stand for it, (height, width) in tokens or empty) of each."""

    tokens: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32]
    counted: npt.NDArray[np.bool_]
    filled: int | None = None
    reference: npt.NDArray[np.float64] | None = None
    images: Sequence[tuple[str, npt.NDArray[np.int64], Sequence[int]]] = ()

    def blank(self) -> Sample:
        """Return a sample of the same tokens that all count as padding: the model computes it, and learns nothing."""
        return replace(self, counted=np.zeros_like(self.counted), filled=0, images=())


class Source(Protocol):
    """An endless sequence of samples, each a function of its index alone."""

    def sample(self, index: int) -> Sample: ...


@runtime_checkable
class Epochs(Source, Protocol):
    """A source that passes what it has in every ``per_epoch`` samples."""

    per_epoch: int


def split_documents(documents: int, fraction: float, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Hold out each document with probability `fraction`, by a hash of (seed, its index); never all and never none ->
    (those to train on, those held out), each ascending.

    ``fraction``: from [0, 1); 0 holds out nothing. A document stays on its side when others are appended, but for the
    one that is held out or kept so that neither side is empty. ValueError if there are too few documents for two sides.
    """
    if fraction == 0:
        return np.arange(documents), np.arange(0)
    if documents < 2:
        raise ValueError(
            f"cannot hold out a fraction of {fraction} from {documents} document(s), two or more are needed: "
            "cut the text into more documents, or set the validation fraction to 0"
        )
    words = draw(documents, seed, Purpose.SPLIT)
    held_out = words < np.uint64(int(fraction * 2**64))
    held_out[words.argmin()] = True
    held_out[words.argmax()] = False
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


ORDER = 2
"""The version of the order in which samples come."""
BLOCKS = 4096
"""The most that the documents of a corpus are held out in."""


@dataclass(frozen=True)
class Runs:
    """Documents [first, stop) of a corpus, several times: int64 [runs, 2], ascending."""

    bounds: npt.NDArray[np.int64]

    @classmethod
    def all_of(cls, documents: int) -> Runs:
        return cls(np.array([[0, documents]]))

    @property
    def documents(self) -> int:
        return int((self.bounds[:, 1] - self.bounds[:, 0]).sum())

    def of_least(self, dataset: IndexedDataset, least: int, name: str) -> Runs:
        """Return those of the documents that have `least` tokens. ValueError if there is none."""
        if not least:
            return self
        pieces = (
            (at, min(at + CHUNK, stop)) for first, stop in self.bounds.tolist() for at in range(first, stop, CHUNK)
        )
        known = ((np.arange(*piece), dataset.document_lengths(*piece)) for piece in pieces)
        return _runs(of_least(known, least, name), 1, dataset.documents)


def of_least(known: Iterable[tuple[npt.NDArray[np.int64], Integers]], least: int, name: str) -> npt.NDArray[np.int64]:
    """Return those of some documents that have `least` tokens: int64 [kept], in their order. known: documents [n] and
    their lengths [n], a part of them at a time. ValueError if there is none."""
    kept, count, longest = [np.empty(0, np.int64)], 0, 0
    for documents, lengths in known:
        kept.append(documents[lengths >= least])
        count, longest = count + lengths.size, max(longest, int(lengths.max(initial=0)))
    found = np.concatenate(kept)
    if not found.size:
        raise ValueError(
            f"none of the {count} document(s) of {name} has the {least} tokens of least, the longest has {longest}: "
            "lower least, add longer ones, or give this split a larger fraction"
        )
    return found


def split_runs(documents: int, fraction: float, seed: int) -> tuple[Runs, Runs]:
    """Split documents into (to train on, held out), as :func:`split_documents`, by blocks of successive documents, up
    to BLOCKS of them.

    So what is known of the split does not grow with the corpus. Up to BLOCKS documents, each is a block. A document
    stays on its side when others are appended, as long as there are no more than BLOCKS blocks of the same size.
    """
    size = 1
    while size * BLOCKS < documents:
        size *= 2
    train, held_out = split_documents(-(-documents // size), fraction, seed)
    return _runs(train, size, documents), _runs(held_out, size, documents)


def _runs(blocks: npt.NDArray[np.int64], size: int, documents: int) -> Runs:
    """Return the runs of documents that some blocks are, neighbours joined."""
    first = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    last = np.append(first[1:], blocks.size) - 1
    stops = np.minimum((blocks[last] + 1) * size, documents) if blocks.size else blocks
    return Runs(np.stack([blocks[first] * size, stops], axis=1))


def parts(
    dataset: IndexedDataset, length: int, seed: int, fraction: float, name: str, least: int = 0, shuffle: bool = True
) -> tuple[Samples, Samples | None]:
    """Return the samples to train on and those held out, a fraction of the documents; None where that is 0. Documents
    of fewer than `least` tokens are left out of both. The side of the others does not depend on it, so that a corpus
    which is named twice, with two values of it, holds the same ones out."""
    train, held_out = split_runs(dataset.documents, fraction, seed)

    def part(runs: Runs, name: str) -> Samples:
        return Samples(dataset, length, seed if shuffle else None, runs.of_least(dataset, least, name), name)

    if not held_out.documents:
        return part(train, name), None
    return part(train, f"the train part of {name}"), part(held_out, f"the validation part of {name}")


@lru_cache(1024)  # of each corpus the epoch that its samples are taken from
def epoch_order(count: int, seed: int, epoch: int) -> Permutation:
    """Return the order of the samples of an epoch: a permutation of range(count) that belongs to (seed, epoch)."""
    return Permutation(count, draw(ROUNDS, seed, Purpose.SAMPLES, epoch).tolist())


@lru_cache(1024)
def _epoch_begin(seed: int, epoch: int) -> int:
    """Return where an epoch begins in any stream: a share of it, times 2^64."""
    return int(draw(1, seed, Purpose.STREAM, epoch)[0])


class Samples:
    """The samples of one corpus, in epochs of `per_epoch`, each in an order that belongs to (seed, epoch).

    The documents, in the order of the file, are one stream of tokens that goes on at its beginning when it ends. An
    epoch begins somewhere in it, which belongs to (seed, epoch) too. Its sample i is the tokens [i length,
    (i + 1) length + 1) from there, so the labels are the tokens shifted by one and each is counted once at the most;
    fewer than `length` + 1 are left. The samples are then shuffled. Without a seed, sample i is the tokens
    [i length, (i + 1) length + 1) of the stream, on and on. All of this is computed for the sample that is
    asked for; what is held in memory does not grow with the corpus. ValueError if there is not one whole sample, or
    the sequences of the dataset do not lie one after the other.
    """

    def __init__(
        self, dataset: IndexedDataset, length: int, seed: int | None, runs: Runs | None = None, name: str = "corpus"
    ) -> None:
        self.length = length
        self._dataset = dataset
        self._seed = seed
        if dataset.scattered:
            raise ValueError(f"{dataset.scattered}: to train on it, write it anew, one sequence after the other")
        runs = runs or Runs.all_of(dataset.documents)
        self._starts = [dataset.start(first) for first in runs.bounds[:, 0].tolist()]
        stops = [dataset.start(stop) for stop in runs.bounds[:, 1].tolist()]
        lengths = [stop - start for start, stop in zip(self._starts, stops, strict=True)]
        self._ends = np.cumsum(lengths, dtype=np.int64).tolist()  # of the runs, in the stream
        self.tokens: int = self._ends[-1] if self._ends else 0
        if self.tokens <= length:
            raise ValueError(
                f"{name} has {self.tokens} tokens in {runs.documents} document(s), and one sample of length {length} "
                f"takes {length + 1}: add text, shorten the samples, or give this split a larger fraction"
            )
        self.per_epoch = (self.tokens - 1) // length

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0 of the endless sequence of epochs."""
        if self._seed is None:
            return self._cut(index * self.length % self.tokens)
        number, within = divmod(index, self.per_epoch)
        begin = _epoch_begin(self._seed, number) * self.tokens >> 64
        place = epoch_order(self.per_epoch, self._seed, number)[within]
        return self._cut((begin + place * self.length) % self.tokens)

    def _cut(self, at: int) -> Sample:
        """Return the sample that begins at a token of the stream."""
        tokens = np.empty(self.length + 1, np.int64)
        begins = np.zeros(self.length + 1, np.int32)  # 1 where another document begins
        filled = 0
        while filled < tokens.size:
            run = bisect_right(self._ends, at)
            start = self._starts[run] + at - (self._ends[run - 1] if run else 0)
            count = min(self._ends[run] - at, tokens.size - filled)
            tokens[filled : filled + count] = self._dataset.tokens(start, start + count)
            begins[filled] = 1
            begins[filled - start + self._dataset.starts_within(start, start + count)] = 1
            filled, at = filled + count, (at + count) % self.tokens
        begins[0] = 0
        return Sample(tokens, np.cumsum(begins, dtype=np.int32), np.ones(tokens.size, np.bool_))
