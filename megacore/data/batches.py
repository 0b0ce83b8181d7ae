"""Batches of one data-parallel rank: a function of one global count of samples, whatever the layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megacore.batch_sizes import BatchSizes
from megacore.data.samples import Sample, Source
from megacore.data.skipped import NONE, SkippedSamples
from megacore.parallel.context_split import ContextParallel, ContextSplit
from megacore.parallel.labels import IGNORE

Item = TypeVar("Item")

DEPTH = 2
"""Steps whose batches are prepared ahead."""
HELD = DEPTH + 2
"""Steps whose batches a rank holds at once: those, the one that the thread has made, and the one that is computed."""


@dataclass(frozen=True)
class BatchPairs:
    """The pairs of documents of a microbatch: `places` int64 [micro, length], the document that a token's label is of,
    as its place in [pairs, 2], flattened; `counted` int64 [pairs, 2], the numbers of their labels; `reference` fp64
    [pairs, 2], as of :class:`~megacore.data.samples.Sample`."""

    places: npt.NDArray[np.int64]
    counted: npt.NDArray[np.int64]
    reference: npt.NDArray[np.float64]


@dataclass(frozen=True)
class BatchAhead:
    """The tokens some places further on, and their labels, as of :class:`Batch`; where the document ends before, a
    token stands for itself and has no label."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchImage:
    """An image of a microbatch, by its file, for which ``tokens`` stand. Of all of its features those of ``features``
    int64 [n] stand for the tokens ``places`` int64 [n] of the flattened microbatch, or of what a rank holds of it;
    ``inputs``: {name: array} of what a tower makes them of, where it is read."""

    file: str
    tokens: int
    features: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    inputs: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def within(self, places: npt.NDArray[np.int64]) -> BatchImage:
        """Return what is within some tokens. places: [tokens] -> where each is then; below 0, left out."""
        kept = places[self.places] >= 0
        return replace(self, features=self.features[kept], places=places[self.places[kept]])


@dataclass(frozen=True)
class Batch:
    """One microbatch.

    tokens, labels (IGNORE where there is none), positions: int64 [micro, length]. documents: the lengths of the rows'
    documents, one after the other, where attention stays within documents; else None. padding: bool [micro, length],
    true where a row is not filled; None: nowhere. blank: how many of the last rows only fill the microbatch up. pairs:
    those of preferences. ahead: what is further on by one token, by two, and so on; empty where nobody predicts that.
    images: those of its tokens. positions_3d: int64 [3, micro, length], the positions in time, height and width, where
    images have such; None: each of the three is that of positions. image_of: int64 [micro * length], the number of the
    image that each token is of, -1 of none, where those that follow each other are one; prompt_of: the same, of prompts
    of documents with images: what is before their first token that counts. Of a rank of cp: split, how the tokens are
    shared out, and rows: [its tokens], the row that each is of; the other arrays are of those tokens, too, but for
    image_of and prompt_of.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    documents: tuple[int, ...] | None
    padding: npt.NDArray[np.bool_] | None = None
    split: ContextSplit | None = None
    rows: npt.NDArray[np.int64] | None = None
    blank: int = 0
    pairs: BatchPairs | None = None
    ahead: tuple[BatchAhead, ...] = ()
    images: tuple[BatchImage, ...] = ()
    positions_3d: npt.NDArray[np.int64] | None = None
    image_of: npt.NDArray[np.int64] | None = None
    prompt_of: npt.NDArray[np.int64] | None = None

    def of_tokens(self, own: npt.NDArray[np.int64]) -> tuple[BatchImage, ...]:
        """Return the images of some of its tokens, [n], by their places among these."""
        places = np.full(self.tokens.size, -1)
        places[own] = np.arange(own.size)
        found = (each.within(places) for each in self.images)
        return tuple(each for each in found if each.places.size)

    def looking(self, ahead: int) -> Batch:
        """Return the whole microbatch with what is up to ``ahead`` tokens further on."""
        if not ahead:
            return self
        lengths = np.array(self.documents or (self.tokens.shape[1],) * len(self.tokens))
        here, ends = np.arange(self.tokens.size), np.repeat(np.cumsum(lengths), lengths)

        def shifted(by: int) -> BatchAhead:
            there = here + by
            inside = there < ends
            tokens = self.tokens.ravel()[np.where(inside, there, here)]
            labels = np.where(inside, self.labels.ravel()[np.where(inside, there, here)], IGNORE)
            return BatchAhead(tokens.reshape(self.tokens.shape), labels.reshape(self.tokens.shape))

        return replace(self, ahead=tuple(map(shifted, range(1, ahead + 1))))

    def of_rank(self, context: ContextParallel, rank: int) -> Batch:
        """Return what a rank of cp holds of the microbatch: arrays of [its tokens], and the documents of all."""
        if context.size == 1:
            return self
        micro, length = self.tokens.shape
        split = context.split(self.documents or (length,) * micro, length)
        own = split.indices(rank)
        padding = None if self.padding is None else self.padding.ravel()[own]
        tokens, labels, positions = (x.ravel()[own] for x in (self.tokens, self.labels, self.positions))
        pairs = None if self.pairs is None else replace(self.pairs, places=self.pairs.places.ravel()[own])
        ahead = tuple(BatchAhead(each.tokens.ravel()[own], each.labels.ravel()[own]) for each in self.ahead)
        in_three = None if self.positions_3d is None else self.positions_3d.reshape(3, -1)[:, own]
        looks = in_three, self.image_of, self.prompt_of
        rest = own // length, self.blank, pairs, ahead, self.of_tokens(own), *looks
        return Batch(tokens, labels, positions, self.documents, padding, split, *rest)


def collate(samples: list[Sample], separate_documents: bool = False, scores: bool = False) -> Batch:
    """Collate samples of [length + 1] tokens into a batch of [samples, length]. With separate documents positions
    restart at each, and a document's last token has no label; but with ``scores`` it alone has one, 0."""
    tokens = np.stack([sample.tokens for sample in samples])
    counted = np.stack([sample.counted for sample in samples])
    inputs, labels = tokens[:, :-1].copy(), np.where(counted[:, 1:], tokens[:, 1:], IGNORE)
    positions = np.tile(np.arange(inputs.shape[1]), (len(samples), 1))
    filled = np.array([tokens.shape[1] if sample.filled is None else sample.filled for sample in samples])
    padding = positions >= filled[:, None] if filled.min() < inputs.shape[1] else None
    blank = int((filled == 0).sum())
    shown = [
        (file, at + row * inputs.shape[1], size) for row, each in enumerate(samples) for file, at, size in each.images
    ]
    images = tuple(BatchImage(file, at.size, np.arange(at.size), at) for file, at, _ in shown)
    sizes = [(at, size) for _, at, size in shown if size]
    first, lengths, pairs = positions == 0, None, None
    if separate_documents:
        documents = np.stack([sample.documents for sample in samples])
        last = documents[:, 1:] != documents[:, :-1]
        labels[last] = IGNORE
        if scores:
            labels = np.where(last & (np.arange(last.shape[1]) < filled[:, None]), 0, IGNORE)
        first[:, 1:] = last[:, :-1]
        positions -= np.maximum.accumulate(np.where(first, positions, 0), axis=1)
        pairs = _pairs([sample.reference for sample in samples if sample.reference is not None], documents, labels)
        lengths = tuple(np.diff(np.flatnonzero(first), append=first.size).tolist())
    in_three = _in_three(first, sizes) if sizes else None
    looks = (_image_of(images, inputs.size), _prompt_of(images, first, counted)) if images else (None, None)
    return Batch(inputs, labels, positions, lengths, padding, None, None, blank, pairs, (), images, in_three, *looks)


def _in_three(
    first: npt.NDArray[np.bool_], images: Sequence[tuple[npt.NDArray[np.int64], Sequence[int]]]
) -> npt.NDArray[np.int64]:
    """Return positions in time, height and width, [3, rows, length], as transformers' ``get_rope_index`` has them:
    within an image they are of its rows and columns, and behind it all three go on past its longer side.

    Args:
        first: [rows, length], where documents begin.
        images: (the tokens of each among all, its height and width in tokens).
    """
    advances, within = np.ones(first.size, np.int64), np.zeros((3, first.size), np.int64)
    for at, (height, width) in images:
        advances[at] = 0
        advances[at[-1]] = max(height, width)
        within[1:, at] = np.divmod(np.arange(at.size), width)
    before = np.cumsum(advances) - advances
    before -= np.maximum.accumulate(np.where(first.ravel(), before, 0))
    return (before + within).reshape(3, *first.shape)


def _image_of(images: Sequence[BatchImage], size: int) -> npt.NDArray[np.int64]:
    shown = np.zeros(size + 1, bool)
    shown[np.concatenate([each.places for each in images])] = True
    return np.where(shown, np.cumsum(shown & ~np.roll(shown, 1)), -1)[:size]


def _prompt_of(
    images: Sequence[BatchImage], first: npt.NDArray[np.bool_], counted: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """first: [rows, length], where documents begin; counted: [rows, length + 1]."""
    number, before = np.cumsum(first), np.cumsum(counted[:, :-1], dtype=np.int64)
    before = before - np.maximum.accumulate(np.where(first.ravel(), before, 0))  # a first token never counts
    shown = np.isin(number, number[np.concatenate([each.places for each in images])])
    return np.where(shown & (before == 0), number, -1)


def _pairs(
    references: Sequence[npt.NDArray[np.float64]], documents: npt.NDArray[np.int32], labels: npt.NDArray[np.int64]
) -> BatchPairs | None:
    """references: [pairs, 2] of each row, or none at all; documents: [rows, length + 1]; labels: [rows, length]."""
    if not references:
        return None
    sizes = np.array([each.size for each in references])
    # What follows the last document of a row is padding, which has no labels.
    within = np.minimum(documents[:, :-1], sizes[:, None] - 1)
    places = within + (np.cumsum(sizes) - sizes)[:, None]
    counted = np.bincount(places[labels != IGNORE], minlength=int(sizes.sum())).reshape(-1, 2)
    return BatchPairs(places, counted, np.concatenate(references))


def filled_up(global_batch: int, micro_batch: int, data_size: int) -> int:
    """Return the number of samples that the ranks compute of a global batch, with those that are blank: whole
    microbatches, as many on each rank."""
    together = micro_batch * data_size
    return -(-global_batch // together) * together


def in_vain(global_batch: int, micro_batch: int, data_size: int) -> Iterator[str]:
    """Yield what the ranks compute in vain, where they cannot share out the global batch evenly."""
    filled, together = filled_up(global_batch, micro_batch, data_size), micro_batch * data_size
    if blank := filled - global_batch:
        below = f"{filled - together} or " if filled > together else ""
        yield (
            f"batch.global_size ({global_batch}) is not shared out evenly by batch.micro_size x dp x ep = "
            f"{micro_batch} x {data_size}: a step computes {filled} sequences, {blank} of them blank "
            f"({blank / filled:.0%}); none is with {below}{filled}"
        )


class TokenError(ValueError):
    """A token id that the model does not have, or a row of a data set of the user's own that is none."""


@dataclass(frozen=True)
class Batches:
    """The microbatches of each global batch that one of `data_size` data-parallel ranks computes.

    A global batch is `global_batch` successive samples of the source, or as many as `sizes` says of its position. Its
    microbatch m on rank d is the `micro_batch` samples from (m data_size + d) micro_batch on: under any data_size and
    micro_batch a step is of the same samples. Where `replicas` take steps alone, each has one of as many successive
    parts of it, shared out so among its own ranks: its samples too are the same under any of them. Those that are
    `skipped` are cut from the source's order, and the next ones take their place.
    All ranks have as many microbatches, and all of these one shape, for messages between ranks want it so: where the
    global batch ends before, its last sample stands again, blank. Of each microbatch it gives what a rank of cp holds,
    where `context` shares it out, and what is up to `ahead` tokens further on. With `scores` the last token of each
    document has a label, and no other. Ids outside of the vocabulary, if one is given, raise a TokenError when they
    are met. ``image_reader`` reads the images of what it gives, on ranks that embed.
    """

    source: Source
    global_batch: int
    micro_batch: int
    data_rank: int
    data_size: int
    separate_documents: bool = False
    vocabulary: int | None = None
    context: ContextParallel = ContextParallel()  # noqa: RUF009
    context_rank: int = 0
    skipped: SkippedSamples = NONE
    sizes: BatchSizes | None = None
    ahead: int = 0
    scores: bool = False
    replicas: int = 1
    image_reader: Callable[[Batch], Batch] | None = None

    def microbatches(self, step: int) -> list[Batch]:
        """Return this rank's microbatches of step `step`: of the samples [step global_batch, (step + 1)
        global_batch)."""
        return self.microbatches_from(step * self.global_batch)

    def microbatches_from(self, position: int) -> list[Batch]:
        """Return this rank's microbatches of the global batch that begins at `position` of the run's order."""
        size = self._size(position)
        end = position + size
        ranks = self.data_size // self.replicas
        replica, rank = divmod(self.data_rank, ranks)
        share = filled_up(size, self.micro_batch, self.data_size) // self.replicas
        start = position + replica * share
        first = range(start + rank * self.micro_batch, start + share, ranks * self.micro_batch)
        how = self.separate_documents, self.scores
        whole = (collate([self._row(i, end) for i in range(begin, begin + self.micro_batch)], *how) for begin in first)
        own = [batch.looking(self.ahead).of_rank(self.context, self.context_rank) for batch in whole]
        return own if self.image_reader is None else list(map(self.image_reader, own))

    def _row(self, position: int, end: int) -> Sample:
        """Return the sample at a position, or what stands in its place where the global batch has ended before."""
        # Not zeros: routers would send them all to the same experts, and fp8's scale of a microbatch might be theirs.
        return self._sample(position) if position < end else self._sample(end - 1).blank()

    def _sample(self, position: int) -> Sample:
        index = self.skipped.sample(position)
        sample = self.source.sample(index)
        # An id that the model does not have would look up another rank's row, or none, and train in silence.
        if self.vocabulary is not None and not 0 <= sample.tokens.min() <= sample.tokens.max() < self.vocabulary:
            wrong = sample.tokens[(sample.tokens < 0) | (sample.tokens >= self.vocabulary)][0]
            raise TokenError(
                f"sample {index} has the token id {wrong}, and the model's vocabulary ends at {self.vocabulary - 1}: "
                "the corpus was tokenized for another model, or its token file is damaged"
            )
        return sample

    def steps(self, position: int = 0) -> Iterator[list[Batch]]:
        """Yield the microbatches of the global batch that begins at sample `position`, and of all after it."""
        while True:
            yield self.microbatches_from(position)
            position += self._size(position)

    def _size(self, position: int) -> int:
        return self.global_batch if self.sizes is None else self.sizes.at(position)


class Prefetch(Iterator[Item], AbstractContextManager["Prefetch[Item]"]):
    """The items of an iterator, prepared by a thread that keeps at most `depth` ready and makes one more; what it
    raises, `next` raises. Close it, or leave its `with` block, to end the thread."""

    def __init__(self, items: Iterator[Item], depth: int = DEPTH) -> None:
        self._items, self._thread = items, ThreadPoolExecutor(1, "prefetch")
        self._coming = deque(self._thread.submit(next, items) for _ in range(depth + 1))

    def __next__(self) -> Item:
        if not self._coming:
            raise StopIteration
        try:
            item = self._coming.popleft().result()
        except BaseException:
            self.close()
            raise
        self._coming.append(self._thread.submit(next, self._items))
        return item

    def close(self) -> None:
        self._coming.clear()
        self._thread.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()
