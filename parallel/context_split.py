"""The split of a microbatch over cp: the tokens of each rank, the scores that it computes, and the keys that travel.

Two pieces of one document are the same one, and their scores a triangle, or one is later than the other, and they are
a full rectangle: no scores are computed that nobody looks at, and no mask is made. A window cuts off a corner of some
rectangles, and drops others with the travel of their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from parallel.choices import ContextBalance, ContextExchange

Span = tuple[int, int]
"""[start, stop) of successive tokens."""
Kept = TypeVar("Kept", bound=np.generic)


@dataclass(frozen=True)
class ContextParallel:
    """The way in which cp shares out a microbatch and its attention.

    Args:
        size: The number of ranks of cp.
        exchange: The way in which a part's queries meet the keys of the others, ``ring`` or ``gather``.
        balance: The pieces that are cut.
        heads: The number of successive ranks that share out the heads of one part; ``size`` for all of them, and then
            there is one part and no exchange.
    """

    size: int = 1
    exchange: ContextExchange = "ring"
    balance: ContextBalance = "auto"
    heads: int = 1

    @classmethod
    def of(
        cls,
        size: int,
        exchange: ContextExchange = "auto",
        balance: ContextBalance = "auto",
        heads: int = 1,
        drops: bool = False,
    ) -> ContextParallel:
        """Return what was asked for, with the exchange that ``auto`` stands for.

        That is ``heads`` where attention weights are dropped, for whoever drops some needs all keys of a query, and
        elsewhere ``ring``: it splits no heads, travels beside the products, and sends no more keys than are looked at.
        """
        if exchange == "auto":
            exchange = "heads" if drops and heads == 1 else "ring"
        return cls(size, exchange, balance, size if exchange == "heads" else heads)

    @property
    def parts(self) -> int:
        """The number of parts of a microbatch, each of ``heads`` ranks."""
        return self.size // self.heads

    def split(self, documents: Sequence[int], length: int) -> ContextSplit:
        """Return the split of a microbatch.

        Args:
            documents: The lengths of its documents, one after the other.
            length: The length of its rows, in which no document begins before and ends behind an end.
        """
        return split(tuple(documents), length, self.parts, self.balance, self.heads)


@dataclass(frozen=True)
class Rectangle:
    """Successive queries, and successive keys which all are before them.

    Args:
        queries: The queries, in the order of the tokens of the part that computes.
        keys: The keys, in the order of what has come from the other part (of the part's own tokens, if it is that one).
        band: Query i sees the keys from i + band on (a window); None: it sees all of them.
    """

    queries: Span
    keys: Span
    band: int | None = None

    @property
    def pairs(self) -> int:
        """The number of scores."""
        (first, last), (start, stop) = self.queries, self.keys
        n, m = last - first, stop - start
        return n * m if self.band is None else sum(m - max(0, i + self.band) for i in range(n))


@dataclass(frozen=True)
class Hop:
    """The keys that one part takes from another one, and the scores that it computes with them.

    Args:
        taken: The tokens whose keys and values travel, in the order of the other part's tokens.
        rectangles: The scores.
    """

    taken: tuple[Span, ...]
    rectangles: tuple[Rectangle, ...]

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.taken)


@dataclass(frozen=True, eq=False)
class ContextSplit:
    """The tokens of a microbatch, and the part and rank that hold each.

    Args:
        documents: The lengths of the documents, one after the other.
        spans: The tokens of each part, in ascending order; each span lies in one document.
        heads: The number of ranks that a part's tokens are shared out over, in the order that they have there.
    """

    documents: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    heads: int = 1

    @property
    def parts(self) -> int:
        return len(self.spans)

    @property
    def tokens(self) -> int:
        """The number of tokens of the microbatch."""
        return sum(self.documents)

    def of_rank(self, array: npt.NDArray[Kept], rank: int) -> npt.NDArray[Kept]:
        """array: [t, ...] of the microbatch -> [t/cp, ...] of the tokens of a rank."""
        return array[self.indices(rank)]

    def indices(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a rank, [t/cp]."""
        part, piece = divmod(rank, self.heads)
        found = np.concatenate([np.arange(start, stop) for start, stop in self.spans[part]])
        n = len(found) // self.heads
        return found[piece * n : (piece + 1) * n]

    def of_documents(self, rank: int, values: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of a rank's successive tokens of one document, and the documents' values."""
        found = np.searchsorted(self.starts, self.indices(rank), side="right") - 1
        runs = [(len(list(each)), values[document]) for document, each in groupby(found.tolist())]
        lengths, of_each = zip(*runs, strict=True)
        return lengths, of_each

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[documents], the first token of each."""
        return np.array([0, *accumulate(self.documents)][:-1])

    def document(self, token: int) -> int:
        return int(np.searchsorted(self.starts, token, side="right")) - 1

    def alone(self, part: int, window: int | None = None) -> tuple[int, ...]:
        """Return the lengths of a part's successive tokens whose scores are those of a document by itself.

        They are all of its tokens of a document, for those before see none after them. A window counts those between.
        """
        spans = groupby(self.spans[part], key=lambda span: self.document(span[0]) if window is None else span)
        return tuple(sum(stop - start for start, stop in each) for _, each in spans)

    def hop(self, part: int, other: int, window: int | None = None) -> Hop:
        """Return what a part takes from another one; from itself, what a window leaves of the scores between spans."""
        return _hop(self, part, other, window)

    def pairs(self, part: int, window: int | None = None) -> int:
        """Return the number of scores that a part computes of each head."""
        alone = sum(_triangle(length, window) for length in self.alone(part, window))
        return alone + sum(
            rectangle.pairs for other in range(self.parts) for rectangle in self.hop(part, other, window).rectangles
        )


def _triangle(length: int, window: int | None) -> int:
    whole = length if window is None else min(length, window)
    return whole * (whole + 1) // 2 + (length - whole) * whole


@lru_cache(maxsize=4096)
def _hop(split: ContextSplit, part: int, other: int, window: int | None) -> Hop:
    if part == other and window is None:
        return Hop((), ())
    held = _placed(split.spans[part])
    theirs = _placed(split.spans[other])
    taken, rectangles, at = list[Span](), list[Rectangle](), 0
    for keys, place in theirs:
        document, used = split.document(keys[0]), False
        for queries, own in held:
            if split.document(queries[0]) != document or queries[0] < keys[1] or queries == keys:
                continue
            n, m = queries[1] - queries[0], keys[1] - keys[0]
            band = None
            if window is not None:
                band = queries[0] - keys[0] - window + 1
                n = min(n, m - band)
                if n <= 0:
                    continue
                band = None if n - 1 + band <= 0 else band
            used = True
            begin = place if part == other else at
            rectangles.append(Rectangle((own, own + n), (begin, begin + m), band))
        if used:
            taken.append((place, place + keys[1] - keys[0]))
            at += keys[1] - keys[0]
    return Hop(() if part == other else tuple(taken), tuple(rectangles))


def _placed(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Spans, and where each is in the order of the part's tokens."""
    places = [0, *accumulate(stop - start for start, stop in spans)]
    return list(zip(spans, places, strict=False))


@lru_cache(maxsize=64)
def split(documents: tuple[int, ...], length: int, parts: int, balance: ContextBalance, heads: int) -> ContextSplit:
    """Return the split of a microbatch over some parts, t/parts tokens each.

    Args:
        documents: The lengths of its documents, one after the other.
        length: The length of its rows.
        parts: The number of parts.
        balance: ``rows`` cuts each row in zigzag, ``documents`` each document.
        heads: The number of ranks of a part.

    Raises:
        ValueError: the tokens do not divide over the ranks.
    """
    t, ranks = sum(documents), parts * heads
    if t % ranks:
        raise ValueError(f"cannot split {t} tokens over cp={ranks}: choose a multiple of {ranks}")
    units = (length,) * (t // length) if balance == "rows" else documents
    spans: list[list[Span]] = [[] for _ in range(parts)]
    turn = start = 0
    for unit in units:
        counts = [unit // parts] * parts
        for _ in range(unit % parts):
            counts[turn % parts] += 1
            turn += 1
        pieces = [count // 2 for count in counts]
        pieces += [count - piece for count, piece in zip(counts[::-1], pieces[::-1], strict=True)]
        for owner, size in zip([*range(parts), *reversed(range(parts))], pieces, strict=True):
            spans[owner].append((start, start + size))
            start += size
    ends = [0, *accumulate(documents)]
    return ContextSplit(documents, tuple(tuple(_within(sorted(each), ends)) for each in spans), heads)


def _within(spans: Sequence[Span], ends: Sequence[int]) -> Iterator[Span]:
    """Cut spans where documents end, and join those that follow each other in one."""
    cuts = set(ends)
    last: Span | None = None
    for start, stop in spans:
        inside = [end for end in ends if start < end < stop]
        for span in zip([start, *inside], [*inside, stop], strict=True):
            if span[0] == span[1]:
                continue
            if last is not None and last[1] == span[0] and span[0] not in cuts:
                last = last[0], span[1]
                continue
            if last is not None:
                yield last
            last = span
    if last is not None:
        yield last
