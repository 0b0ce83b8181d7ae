"""The scores that the parts of cp compute of a microbatch and the keys that they send, hop by hop. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from megacore.models.config import looks
from megacore.parallel.context_split import ContextParallel, ContextSplit

Counts = npt.NDArray[np.int64]
WHOLE = ContextParallel()
"""The way of a mesh without cp: each microbatch is whole on its rank."""


@dataclass(frozen=True, eq=False)
class ExchangeWork:
    """The work of all parts in the attention of one layer, of one head.

    A part computes in turns: in the first one the scores of its own tokens by themselves, in each other one those with
    the keys that a hop has brought. In a ring hop d brings those of the part d before; gathered, those of all at once.

    Args:
        pairs: [parts, turns], the scores of each turn.
        taken: [parts, parts - 1], the keys that a part takes of the one that is 1, 2, ... before it.
        rectangle: The queries and the keys of the largest rectangle of what a part takes most keys for.
        gathered: Whether all keys come at once.
    """

    pairs: Counts
    taken: Counts
    rectangle: tuple[int, int]
    gathered: bool

    @cached_property
    def given(self) -> Counts:
        """[parts, parts - 1], the keys that a part gives to the one that is 1, 2, ... behind it."""
        places = np.arange(len(self.taken))
        distances = np.arange(1, len(self.taken))
        return self.taken[(places[:, None] + distances) % len(places), distances - 1]

    @cached_property
    def busiest(self) -> int:
        """The scores of the part that computes most."""
        return int(self.pairs.sum(1).max())

    @cached_property
    def imbalance(self) -> float:
        """The scores of that part over the mean of all."""
        return self.busiest / float(self.pairs.sum(1).mean())

    @cached_property
    def most(self) -> int:
        """The keys of the largest hop; gathered, the most of all that a part takes."""
        return int((self.taken.sum(1) if self.gathered else self.taken).max(initial=0))

    @cached_property
    def several(self) -> bool:
        """Whether some part takes keys of several others."""
        return bool(((self.taken > 0).sum(1) > 1).any())

    @cached_property
    def held(self) -> int:
        """The most keys that a part holds at once: of two hops that follow each other; gathered, of all as they come
        and, if they are of several parts, in their order."""
        if self.gathered:
            return (1 + self.several) * self.most
        return int((self.taken[:, :-1] + self.taken[:, 1:]).max(initial=self.most))

    def messages(self, back: bool) -> tuple[int, ...]:
        """Return the tokens of each message of the part that sends most: keys, or gradients on their way back."""
        sent = self.taken if back else self.given
        busiest = sent[sent.sum(1).argmax()] if len(sent) > 1 else sent[0]
        return tuple(int(tokens) for tokens in busiest if tokens)


@dataclass(frozen=True)
class Packing:
    """The tokens of a microbatch, and the way in which cp shares them out; attention stays within documents of these
    lengths, or each sequence is one."""

    length: int
    sequences: int
    context: ContextParallel = WHOLE
    documents: tuple[int, ...] | None = None

    @property
    def tokens(self) -> Packing:
        """The packing that shares out tokens alone, as many to each rank, whoever looks at whom."""
        return Packing(self.length, self.sequences, ContextParallel(self.context.size))

    @property
    def split(self) -> ContextSplit:
        return self.context.split(self.documents or (self.length,) * self.sequences, self.length)

    def exchange(self, window: int | None, chunk: int | None = None) -> ExchangeWork:
        """Return the work of the parts in the attention of a layer, each of whose tokens looks at a window of them,
        itself included, or at those of its chunk; None: all before it."""
        return _work(self, window, chunk)

    def seen(self, window: int | None, chunk: int | None = None) -> float:
        """Return the scores of the documents over those that there would be if each sequence were one."""
        if self.documents is None:
            return 1.0
        return _scores(self.documents, window, chunk) / _scores((self.length,) * self.sequences, window, chunk)


@lru_cache(maxsize=256)
def _work(packing: Packing, window: int | None, chunk: int | None) -> ExchangeWork:
    split, gathered = packing.split.in_chunks(chunk), packing.context.exchange == "gather"
    pairs, taken, largest = list[Sequence[int]](), list[Sequence[int]](), (0, 0, 0)
    for part in range(split.parts):
        hops = [split.hop(part, (part - distance) % split.parts, window) for distance in range(1, split.parts)]
        found = [sum(rectangle.pairs for rectangle in hop.rectangles) for hop in hops]
        tokens = [hop.tokens for hop in hops]
        together = [split.gathered(part, window)] if gathered and split.parts > 1 else hops
        for each in together:
            for rectangle in each.rectangles:
                (first, last), (start, stop) = rectangle.queries, rectangle.keys
                largest = max(largest, (each.tokens, last - first, stop - start))
        alone = split.pairs(part, window) - sum(found)
        pairs.append([alone, sum(found)] if gathered else [alone, *found])
        taken.append(tokens)
    return ExchangeWork(np.array(pairs, np.int64), np.array(taken, np.int64), largest[1:], gathered)


def _scores(documents: Sequence[int], window: int | None, chunk: int | None) -> int:
    """Return the scores of all tokens of some documents, of one head."""
    return sum(looks(length, window, chunk) for length in documents)
