"""Training samples of one corpus: documents shuffled, joined to one stream, cut to length, and shuffled again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megacore.data.indexed import IndexedDataset, Integers


class Purpose(IntEnum):
    """What random words are for: each purpose has streams of its own."""

    DOCUMENTS = 0
    SAMPLES = 1
    SPLIT = 2
    TOKENIZER = 3


def draw(count: int, seed: int, purpose: Purpose, epoch: int = 0) -> npt.NDArray[np.uint64]:
    """The first `count` words, [count], of the random stream of (seed, purpose, epoch), each from 0 to 2^64 - 1."""
    # Raw words are a fixed function of key and counter; what numpy's Generator makes of them may change with numpy.
    key, counter = np.array([seed, purpose], np.uint64), np.array([0, 0, 0, epoch], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def shuffled(count: int, seed: int, purpose: Purpose, epoch: int = 0) -> npt.NDArray[np.int64]:
    """The permutation of range(count), [count], that belongs to (seed, purpose, epoch)."""
    return np.argsort(draw(count, seed, purpose, epoch), kind="stable")


@dataclass(frozen=True)
class Sample:
    """tokens int64 [length + 1]; documents int32 [length + 1], which of the sample's documents 0, 1, ... each is of;
    counted bool [length + 1], whether the loss counts the prediction of each."""

    tokens: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32]
    counted: npt.NDArray[np.bool_]


class Source(Protocol):
    """An endless sequence of samples, each a function of its index alone."""

    @property
    def length(self) -> int: ...

    def sample(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Split:
    """The documents of a corpus to train on and those held out, each int64 and ascending."""

    train: npt.NDArray[np.int64]
    validation: npt.NDArray[np.int64]


def split_documents(documents: int, fraction: float, seed: int) -> Split:
    """Holds out each document with probability `fraction`, by a hash of (seed, its index); never all and never none.

    fraction = 0 holds out nothing. A document stays on its side when others are appended, but for the one that is
    held out or kept so that neither side is empty. ValueError if there are too few documents for two sides.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the validation fraction is {fraction}: choose it from [0, 1)")
    if fraction == 0:
        return Split(np.arange(documents), np.arange(0))
    if documents < 2:
        raise ValueError(
            f"cannot hold out a fraction of {fraction} from {documents} document(s), two or more are needed: "
            "cut the text into more documents, or set the validation fraction to 0"
        )
    words = draw(documents, seed, Purpose.SPLIT)
    held_out = words < np.uint64(int(fraction * 2**64))
    held_out[words.argmin()] = True
    held_out[words.argmax()] = False
    return Split(np.flatnonzero(~held_out), np.flatnonzero(held_out))


@dataclass(frozen=True)
class _Epoch:
    number: int
    documents: npt.NDArray[np.int64]  # in the order of the stream
    ends: npt.NDArray[np.int64]  # where each ends in the stream
    samples: npt.NDArray[np.int64]  # in the order they are handed out


class Samples:
    """The samples of one corpus, in epochs of `per_epoch`, each in an order that belongs to (seed, epoch).

    An epoch joins the documents in a shuffled order into one stream of tokens. Its sample i is the tokens
    [i length, (i + 1) length + 1), so the labels are the tokens shifted by one and each is counted once; what is
    left at the end of the stream, fewer than `length` tokens, waits for another epoch's order. The samples are then
    shuffled. Only the orders of the current epoch are held in memory. ValueError if there is not one whole sample.
    """

    def __init__(
        self, dataset: IndexedDataset, length: int, seed: int, documents: Integers | None = None, name: str = "corpus"
    ) -> None:
        self.length = length
        self._dataset = dataset
        self._seed = seed
        self._documents = np.arange(dataset.documents) if documents is None else documents.astype(np.int64)
        self.tokens = int(dataset.document_lengths()[self._documents].sum(dtype=np.int64))
        self.per_epoch = max(self.tokens - 1, 0) // length
        if self.per_epoch == 0:
            raise ValueError(
                f"{name} has {self.tokens} tokens in {self._documents.size} document(s), and one sample of length "
                f"{length} takes {length + 1}: add text, shorten the samples, or give this split a larger fraction"
            )
        self._epoch: _Epoch | None = None

    def _order(self, epoch: int) -> _Epoch:
        documents = self._documents[shuffled(self._documents.size, self._seed, Purpose.DOCUMENTS, epoch)]
        ends = np.cumsum(self._dataset.document_lengths()[documents], dtype=np.int64)
        return _Epoch(epoch, documents, ends, shuffled(self.per_epoch, self._seed, Purpose.SAMPLES, epoch))

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0 of the endless sequence of epochs."""
        number, within = divmod(index, self.per_epoch)
        epoch = self._epoch
        if epoch is None or epoch.number != number:
            epoch = self._epoch = self._order(number)
        begin = int(epoch.samples[within]) * self.length
        tokens = np.empty(self.length + 1, np.int64)
        documents = np.empty(self.length + 1, np.int32)
        filled, count = 0, 0
        place = int(np.searchsorted(epoch.ends, begin, side="right"))
        offset = begin - (int(epoch.ends[place - 1]) if place else 0)
        while filled < tokens.size:
            part = self._dataset.document(int(epoch.documents[place]), offset, offset + tokens.size - filled)
            tokens[filled : filled + part.size] = part
            documents[filled : filled + part.size] = count
            filled, count = filled + part.size, count + bool(part.size)
            place, offset = place + 1, 0
        return Sample(tokens, documents, np.ones(tokens.size, np.bool_))
