"""The first order of the data, in arrays: runs that began in it go on in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megacore.data.indexed import IndexedDataset, Integers
from megacore.data.samples import Purpose, Sample, of_least, shuffled, split_documents, whole_samples


def parts(
    dataset: IndexedDataset, length: int, seed: int, fraction: float, name: str, least: int = 0
) -> tuple[ShuffledDocuments, ShuffledDocuments | None]:
    """Return the samples to train on and those held out, a fraction of the documents; None where that is 0.
    Documents of fewer than `least` tokens are left out of both."""
    split = split_documents(dataset.documents, fraction, seed)

    def part(documents: npt.NDArray[np.int64], name: str) -> ShuffledDocuments:
        if least:
            documents = of_least([(documents, dataset.document_lengths()[documents])], least, name)
        return ShuffledDocuments(dataset, length, seed, documents, name)

    if not split.validation.size:
        return part(split.train, name), None
    return part(split.train, f"the train part of {name}"), part(split.validation, f"the validation part of {name}")


def epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of the samples of an epoch: a permutation of range(count), [count], that belongs to (seed,
    epoch)."""
    return shuffled(count, seed, Purpose.SAMPLES, epoch)


@dataclass(frozen=True)
class _EpochOrder:
    number: int
    documents: npt.NDArray[np.int64]  # in the order of the stream
    ends: npt.NDArray[np.int64]  # where each ends in the stream
    samples: npt.NDArray[np.int64]  # in the order they are handed out


class ShuffledDocuments:
    """The samples of one corpus, in epochs of `per_epoch`, each in an order that belongs to (seed, epoch).

    An epoch joins the documents in a shuffled order into one stream of tokens. Its sample i is the tokens
    [i length, (i + 1) length + 1), so the labels are the tokens shifted by one and each is counted once; what is
    left at the end of the stream, fewer than `length` tokens, waits for another epoch's order. The samples are then
    shuffled. The orders of the current epoch are held in memory, 24 bytes for each document and 8 for each sample.
    ValueError if there is not one whole sample.
    """

    def __init__(
        self, dataset: IndexedDataset, length: int, seed: int, documents: Integers | None = None, name: str = "corpus"
    ) -> None:
        self.length = length
        self._dataset = dataset
        self._seed = seed
        self._documents = np.arange(dataset.documents) if documents is None else documents.astype(np.int64)
        self.tokens = int(dataset.document_lengths()[self._documents].sum(dtype=np.int64))
        self.per_epoch = whole_samples(self.tokens, self._documents.size, length, name)
        self._epoch: _EpochOrder | None = None

    def _order(self, epoch: int) -> _EpochOrder:
        documents = self._documents[shuffled(self._documents.size, self._seed, Purpose.DOCUMENTS, epoch)]
        ends = np.cumsum(self._dataset.document_lengths()[documents], dtype=np.int64)
        return _EpochOrder(epoch, documents, ends, epoch_order(self.per_epoch, self._seed, epoch))

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0 of the endless sequence of epochs."""
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
