"""Examples in rows of one length: several in each, without a cut, so that little is left empty."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megacore.data.examples import Examples
from megacore.data.indexed import Integers
from megacore.data.samples import Purpose, Sample, epoch_order, shuffled


def best_fit(lengths: Sequence[int], room: int) -> npt.NDArray[np.int64]:
    """Return the row of each example [n], of lengths [n] up to `room`, the longest first: the row that it fills most. A
    row is begun where none has room. Rows use at most 11/9 of the fewest possible and a row (Johnson 1974)."""
    rows, begun = np.empty(len(lengths), np.int64), 0
    free: list[int] = []  # the different rooms that rows have left, ascending
    having: dict[int, list[int]] = {}
    least = min(lengths, default=0)
    for index, length in enumerate(lengths):
        place = bisect_left(free, length)
        if place == len(free):
            row, left = begun, room - length
            begun += 1
        else:
            best = free[place]
            row, left = having[best].pop(), best - length
            if not having[best]:
                del having[best], free[place]
        rows[index] = row
        if left >= least:
            if left not in having:
                having[left] = []
                insort(free, left)
            having[left].append(row)
    return rows


class Packed:
    """The samples of some examples, in epochs of `per_epoch` rows, each in an order that belongs to (seed, epoch).

    Which examples share a row is the same in every epoch. What is left of a row is padding: a document of its own, of
    which nothing counts. The two documents of a pair lie one after the other. ``chosen``: of the examples some, one at
    least; None for all; ``room``: the most tokens of examples in a row; None: one more than its length, the last of
    which is predicted alone.
    """

    def __init__(
        self,
        examples: Examples,
        length: int,
        seed: int,
        chosen: Integers | None = None,
        pack: bool = True,
        room: int | None = None,
    ) -> None:
        chosen = np.arange(examples.count) if chosen is None else chosen.astype(np.int64)
        self.length = length
        self.examples, self._seed = examples, seed
        chosen = chosen[shuffled(chosen.size, seed, Purpose.DOCUMENTS)]
        lengths = examples.lengths[chosen]
        if pack:
            longest_first = np.argsort(-lengths.astype(np.int64), kind="stable")
            chosen, lengths = chosen[longest_first], lengths[longest_first]
            rows = best_fit(lengths.tolist(), length + 1 if room is None else room)
            together = np.argsort(rows, kind="stable")
            self.chosen, sizes = chosen[together], np.bincount(rows)
        else:
            rows, self.chosen, sizes = np.arange(chosen.size), chosen, np.ones(chosen.size, np.int64)
        self._ends = np.cumsum(sizes)
        self.per_epoch = sizes.size
        filled = np.bincount(rows, weights=lengths)
        self.fill = float(np.minimum(filled, length).sum() / (self.per_epoch * length))

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0 of the endless sequence of epochs."""
        epoch, within = divmod(index, self.per_epoch)
        row = epoch_order(self.per_epoch, self._seed, epoch)[within]
        begin = int(self._ends[row - 1]) if row else 0
        tokens, counted = np.zeros(self.length + 1, np.int64), np.zeros(self.length + 1, np.bool_)
        documents, filled, each = np.empty(self.length + 1, np.int32), 0, self.examples.documents
        images = list[tuple[str, npt.NDArray[np.int64], Sequence[int]]]()
        examples = self.chosen[begin : int(self._ends[row])]
        numbers = (examples[:, None] * each + np.arange(each)).ravel()
        for number, document in enumerate(numbers.tolist()):
            ids, counts = self.examples.example(document)
            own = slice(filled, filled + len(ids))
            tokens[own], counted[own], documents[own] = ids, counts, number
            for file, runs, size in self.examples.images(document):
                images.append((file, filled + np.concatenate([np.arange(*run) for run in runs]), size))
            filled = own.stop
        documents[filled:] = len(numbers)
        known = self.examples.reference
        return Sample(tokens, documents, counted, filled, None if known is None else known[examples], images)
