"""The split of a microbatch over cp: the tokens of each rank, the scores that it computes, and the keys that travel.

Two pieces of one document are the same one, and their scores a triangle, or one is later than the other, and they are
a full rectangle: no scores are computed that nobody looks at, and no mask is made. A window cuts off a corner of some
rectangles, and drops others with the travel of their keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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
_Held = tuple[int, int, int]
"""[start, stop) of successive tokens, and where the first is in some order."""
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


@dataclass(frozen=True)
class Gathered:
    """The keys that one part takes from all others at once, in one buffer in the order of the documents.

    Args:
        taken: Of each part, the tokens whose keys and values travel, in the order of its tokens, as in :class:`Hop`.
            Of the part itself, those that a window shows to later spans of it; they are copied.
        places: Of each part, where each of these spans is in the buffer.
        rectangles: The scores, keys in the order of the buffer: one of each span of queries.
    """

    taken: tuple[tuple[Span, ...], ...]
    places: tuple[tuple[Span, ...], ...]
    rectangles: tuple[Rectangle, ...]

    @property
    def tokens(self) -> int:
        """The length of the buffer."""
        return sum(stop - start for each in self.places for start, stop in each)


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

    @cached_property
    def in_part(self) -> tuple[dict[int, list[_Held]], ...]:
        """Of each part {document: spans}, with their places in the part, of the documents that it has in part."""
        found: list[dict[int, list[_Held]]] = []
        for spans in self.spans:
            held = np.array(spans)
            numbers = np.searchsorted(self.starts, held[:, 0], side="right") - 1
            lengths = held[:, 1] - held[:, 0]
            places = np.cumsum(lengths) - lengths
            cut = lengths < np.array(self.documents)[numbers]
            each: dict[int, list[_Held]] = {}
            for number, (start, stop), place in zip(
                numbers[cut].tolist(), held[cut].tolist(), places[cut].tolist(), strict=True
            ):
                each.setdefault(number, []).append((start, stop, place))
            found.append(each)
        return tuple(found)

    def alone(self, part: int, window: int | None = None) -> tuple[int, ...]:
        """Return the lengths of a part's successive tokens whose scores are those of a document by itself.

        They are all of its tokens of a document, for those before see none after them. In a document that is longer
        than the window they are those of one span.
        """
        lengths, last = list[int](), -1
        for start, stop in self.spans[part]:
            number = self.document(start)
            if number == last and self.sight(number, window) is None:
                lengths[-1] += stop - start
            else:
                lengths.append(stop - start)
            last = number
        return tuple(lengths)

    def sight(self, document: int, window: int | None) -> int | None:
        """Return how many tokens before it each token of a document sees; None: all of them."""
        return None if window is None or self.documents[document] <= window else window - 1

    def hop(self, part: int, other: int, window: int | None = None) -> Hop:
        """Return what a part takes from another one; from itself, what a window leaves of the scores between spans."""
        return _hop(self, part, other, window)

    def gathered(self, part: int, window: int | None = None) -> Gathered:
        """Return what a part takes from all others at once; each gives what it gives in its hop."""
        return _gathered(self, part, window)

    def pairs(self, part: int, window: int | None = None) -> int:
        """Return the number of scores that a part computes of each head."""
        spans = np.array(self.spans[part])
        spans = spans - self.starts[np.searchsorted(self.starts, spans[:, :1], side="right") - 1]
        whole = spans if window is None else np.minimum(spans, window)
        seen = whole * (whole + 1) // 2 + (spans - whole) * whole
        return int((seen[:, 1] - seen[:, 0]).sum())

    def travel(self, part: int, window: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of keys that a part takes from each part, and that it gives to each."""
        others = range(self.parts)
        taken = tuple(self.hop(part, other, window).tokens for other in others)
        return taken, tuple(self.hop(other, part, window).tokens for other in others)


@lru_cache(maxsize=8192)
def _hop(split: ContextSplit, part: int, other: int, window: int | None) -> Hop:
    found = _meet(split, part, (other,), window)
    return Hop(() if part == other else found.taken[0], found.rectangles)


@lru_cache(maxsize=256)
def _gathered(split: ContextSplit, part: int, window: int | None) -> Gathered:
    return _meet(split, part, range(split.parts), window)


def _meet(split: ContextSplit, part: int, others: Sequence[int], window: int | None) -> Gathered:
    """Return what a part takes from some parts. Of itself alone it takes nothing: its keys are where they are."""
    taken: list[list[Span]] = [[] for _ in others]
    places: list[list[Span]] = [[] for _ in others]
    rectangles: list[Rectangle] = []
    at = 0
    for document, queries in split.in_part[part].items():
        sight = split.sight(document, window)
        held = (
            (*span, index)
            for index, other in enumerate(others)
            if sight is not None or other != part
            for span in split.in_part[other].get(document, ())
        )
        firsts = [first for first, _, _ in queries]
        runs: list[tuple[int, int, int]] = []
        for start, stop, place, index in sorted(held):
            later = bisect_left(firsts, stop)
            if later == len(firsts):
                break
            first = start if sight is None else max(start, firsts[later] - sight)
            if first >= stop:
                continue
            where, n = place + first - start, stop - first
            taken[index].append((where, where + n))
            places[index].append((at, at + n))
            if runs and runs[-1][1] == first:
                runs[-1] = runs[-1][0], stop, runs[-1][2]
            else:
                runs.append((first, stop, where if others == (part,) else at))
            at += n
        rectangles += _joined(queries, runs) if sight is None else _banded(queries, runs, sight)
    return Gathered(tuple(map(tuple, taken)), tuple(map(tuple, places)), tuple(rectangles))


def _joined(queries: Sequence[_Held], keys: Sequence[_Held]) -> Iterator[Rectangle]:
    """Yield what queries see of keys that lie one after the other: those of the same keys see them together."""
    stops = [stop for _, stop, _ in keys]
    for count, each in groupby(queries, key=lambda span: bisect_right(stops, span[0])):
        if count:
            spans, (start, stop, place) = list(each), keys[count - 1]
            (_, _, own), (begin, end, last) = spans[0], spans[-1]
            yield Rectangle((own, last + end - begin), (keys[0][2], place + stop - start))


def _banded(queries: Sequence[_Held], keys: Sequence[_Held], sight: int) -> Iterator[Rectangle]:
    """Yield what queries see of keys that are up to ``sight`` tokens before them."""
    for first, last, own in queries:
        for start, stop, place in keys:
            begin, end = max(start, first - sight), min(stop, first)
            if begin < end:
                n = min(last, end + sight) - first
                band = first - sight - begin
                place_of = place + begin - start
                yield Rectangle((own, own + n), (place_of, place_of + end - begin), band if n - 1 + band > 0 else None)


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
    return ContextSplit(documents, _spans(documents, *_zigzag(np.array(units), parts), parts), heads)


def _zigzag(units: npt.NDArray[np.int64], parts: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the sizes and the parts of successive pieces: each unit is cut for part 0, 1, ... and back again.

    Tokens that do not divide go to the parts in turn.
    """
    order = np.arange(parts)
    turns = np.cumsum(units % parts) - units % parts
    more = (order - turns[:, None]) % parts < (units % parts)[:, None]
    counts = (units // parts)[:, None] + more
    early = counts // 2
    sizes = np.concatenate([early, (counts - early)[:, ::-1]], 1)
    return sizes.ravel(), np.tile(np.concatenate([order, order[::-1]]), len(units))


def _spans(
    documents: Sequence[int], sizes: npt.NDArray[np.int64], owners: npt.NDArray[np.int64], parts: int
) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of each part: successive pieces of one owner are one, if no document ends between them."""
    ends = np.cumsum(documents)
    last = np.cumsum(sizes)
    stops = np.union1d(last, ends)
    stops = stops[stops > 0]
    owner = owners[np.searchsorted(last, stops)]
    kept = np.append((owner[1:] != owner[:-1]) | np.isin(stops[:-1], ends), True)
    stops, owner = stops[kept], owner[kept]
    spans = np.stack([np.append(0, stops[:-1]), stops], 1)
    order = np.argsort(owner, kind="stable")
    each = np.split(spans[order], np.cumsum(np.bincount(owner, minlength=parts))[:-1])
    return tuple(tuple(map(tuple, of_part.tolist())) for of_part in each)
