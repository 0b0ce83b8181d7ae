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
from heapq import heapify, heappop, heappush
from itertools import accumulate, groupby, pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megacore.parallel.enum_errors import ContextBalance, ContextExchange

Span = tuple[int, int]
"""[start, stop) of successive tokens."""
_Held = tuple[int, int, int]
"""[start, stop) of successive tokens, and where the first is in some order."""
_Integers = npt.NDArray[np.int64]
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
        cut = 0 if self.band is None else max(0, n - 1 + self.band)
        return n * m - cut * (cut + 1) // 2


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
        taken: The tokens of each part whose keys and values travel, in the order of its tokens, as in :class:`Hop`. The
            part itself copies those that a window shows to later spans of it.
        places: The places of each part's spans in the buffer.
        rectangles: The scores, with keys in the order of the buffer: no query is in two of them.
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
        found = self._documents_of(self.indices(rank))
        ends = [*(np.flatnonzero(np.diff(found)) + 1).tolist(), len(found)]
        lengths = tuple(stop - start for start, stop in pairwise([0, *ends]))
        return lengths, tuple(values[found[end - 1]] for end in ends)

    def in_chunks(self, chunk: int | None) -> ContextSplit:
        """Return the same tokens of the same parts, whose documents are cut into pieces of so many; None: they are
        not."""
        return self if chunk is None else _in_chunks(self, chunk)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[documents], the first token of each."""
        return np.array([0, *accumulate(self.documents)][:-1])

    def document(self, token: int) -> int:
        """Return the number of the document of a token."""
        return int(np.searchsorted(self.starts, token, side="right")) - 1

    def _documents_of(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.searchsorted(self.starts, tokens, side="right") - 1

    @cached_property
    def in_part(self) -> tuple[dict[int, list[_Held]], ...]:
        """{document: spans, with their places in the part} of each part, of the documents that it has not whole."""
        lengths = np.array(self.documents)
        found: list[dict[int, list[_Held]]] = []
        for spans in self.spans:
            held = np.array(spans)
            numbers, sizes = self._documents_of(held[:, 0]), held[:, 1] - held[:, 0]
            cut = sizes < lengths[numbers]
            each: dict[int, list[_Held]] = {}
            rows = np.column_stack([numbers, held, np.cumsum(sizes) - sizes])[cut].tolist()
            for number, start, stop, place in rows:
                each.setdefault(number, []).append((start, stop, place))
            found.append(each)
        return tuple(found)

    def alone(self, part: int, window: int | None = None) -> tuple[int, ...]:
        """Return the lengths of a part's successive tokens whose scores are those of a document by itself.

        They are all of its tokens of a document, for those before see none after them. In a document that is longer
        than the window they are those of one span.
        """
        spans = self.spans[part]
        lengths, last = list[int](), -1
        for (start, stop), number in zip(spans, self._documents_of(np.array(spans)[:, 0]).tolist(), strict=True):
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
        spans = spans - self.starts[self._documents_of(spans[:, :1])]
        whole = spans if window is None else np.minimum(spans, window)
        seen = whole * (whole + 1) // 2 + (spans - whole) * whole
        return int((seen[:, 1] - seen[:, 0]).sum())

    def travel(self, part: int, window: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of keys that a part takes from each part, and that it gives to each."""
        others = range(self.parts)
        taken = tuple(self.hop(part, other, window).tokens for other in others)
        return taken, tuple(self.hop(other, part, window).tokens for other in others)


@lru_cache(maxsize=64)
def _in_chunks(split: ContextSplit, chunk: int) -> ContextSplit:
    documents = tuple(min(chunk, n - start) for n in split.documents for start in range(0, n, chunk))
    ends = np.cumsum(documents)

    def cut(start: int, stop: int) -> Iterator[Span]:
        return pairwise([start, *ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, stop)], stop])

    spans = (tuple((int(a), int(b)) for span in part for a, b in cut(*span)) for part in split.spans)
    return ContextSplit(documents, tuple(spans), split.heads)


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
        balance: ``rows`` cuts each row in zigzag, ``documents`` each document, ``auto`` only long ones and as few as
            the balance of the work needs: no part has more than :data:`BALANCED` of the mean, if there is a way, and
            no more keys travel than with ``documents``.
        heads: The number of ranks of a part.

    Raises:
        ValueError: the tokens do not divide over the ranks, or there are fewer.
    """
    t, ranks = sum(documents), parts * heads
    if t < ranks:
        raise ValueError(f"cannot split {t} tokens over cp={ranks}, a rank would have none: choose cp of at most {t}")
    if t % ranks:
        raise ValueError(f"cannot split {t} tokens over cp={ranks}: choose a multiple of {ranks}")
    units = np.array(documents if balance != "rows" else (length,) * (t // length))
    cuts = _cheapest(units, parts) if balance == "auto" and parts > 1 else _evenly(units, parts)
    return ContextSplit(documents, _spans(documents, *_zigzag(cuts), parts), heads)


@dataclass(frozen=True, eq=False)
class _Cuts:
    """The tokens of successive units that each part has, all above zero.

    A unit is cut in zigzag: for its parts in their order, the first half of each share, and back again the second. So
    each share has as much work of attention as any other tokens of its unit on average: half the unit's length each.
    """

    unit: _Integers
    part: _Integers
    tokens: _Integers

    @cached_property
    def of_unit(self) -> tuple[_Integers, _Integers]:
        """Return how many shares each share's unit has, and the index of the first of them."""
        counts = np.bincount(self.unit)
        return np.repeat(counts, counts), np.repeat(np.cumsum(counts) - counts, counts)

    @property
    def keys(self) -> int:
        """The number of keys that travel: to a part all those before its last piece, but its own."""
        early = self.tokens // 2
        counts, firsts = self.of_unit
        return int(((counts - 1) * early + (np.arange(len(early)) - firsts) * (self.tokens - early)).sum())

    def work(self, units: _Integers, parts: int) -> float:
        """Return the work of the busiest part, of the mean."""
        sizes, owners = _zigzag(self)
        ends = np.cumsum(units)
        last = np.cumsum(sizes)
        stops = last - (ends - units)[np.searchsorted(ends, last)]
        pairs = sizes * (2 * stops - sizes + 1) // 2
        each = np.bincount(owners, pairs, parts)
        return float(each.max() / each.mean())


def _evenly(units: _Integers, parts: int) -> _Cuts:
    """Share out each unit over all parts; tokens that do not divide go to the parts in turn."""
    rest = units % parts
    turns = np.cumsum(rest) - rest
    tokens = (units // parts)[:, None] + ((np.arange(parts) - turns[:, None]) % parts < rest[:, None])
    unit, part = np.nonzero(tokens)
    return _Cuts(unit, part, tokens[unit, part])


def _zigzag(shares: _Cuts) -> tuple[_Integers, _Integers]:
    """Return the sizes and the parts of successive pieces."""
    n = len(shares.unit)
    early = shares.tokens // 2
    counts, firsts = shares.of_unit
    there = firsts + np.arange(n)
    back = 3 * firsts + 2 * counts - 1 - np.arange(n)
    sizes, owners = np.empty(2 * n, np.int64), np.empty(2 * n, np.int64)
    sizes[there], sizes[back] = early, shares.tokens - early
    owners[there] = owners[back] = shares.part
    sizes, owners = sizes[sizes > 0], owners[sizes > 0]
    return sizes, owners


BALANCED = 1.05
"""The work of the busiest part, of the mean, below which the parts are told apart by the keys that travel."""
_AIMS = 1.03, 1.01, 1.0
"""The work of a part that is aimed at, of the mean, in turn: where pieces are of few tokens, their work is not that of
their document's tokens on average, and what comes out is off."""
_LITTLE = 0.02
"""The work of a document, of a part's, that is placed whole wherever there is room."""


def _cheapest(units: _Integers, parts: int) -> _Cuts:
    """Return shares of documents that are whole where they can be, or even ones if those are not better."""
    even = units // parts  # keys that even shares move at least, without the tokens that do not divide
    least = np.where(even > 0, parts * (parts - 1) * (even // 2 + even), units * (units - 1)).sum() // 2
    held = _placed(units, parts)
    for aim in _AIMS:
        _level(units, held, aim)
        part = np.repeat(np.arange(parts), [len(each) for each in held])
        unit = np.concatenate([np.fromiter(each, np.int64, len(each)) for each in held])
        tokens = np.concatenate([np.fromiter(each.values(), np.int64, len(each)) for each in held])
        order = np.lexsort((part, -tokens, unit))  # fewer keys travel if large shares come first
        found = _Cuts(unit[order], part[order], tokens[order])
        if found.keys > least and found.keys > _evenly(units, parts).keys:
            return _evenly(units, parts)
        busiest = found.work(units, parts)
        if busiest <= BALANCED:
            return found
    evenly = _evenly(units, parts)
    return found if busiest <= evenly.work(units, parts) else evenly


def _placed(units: _Integers, parts: int) -> list[dict[int, int]]:
    """Return {document: tokens} of each part: the longest first, to the part of the least work that has room.

    What is too much for one is shared out over as few as it is not too much for, those with most left.
    """
    room, work = [int(units.sum()) // parts] * parts, [0.0] * parts
    mean = float((units.astype(float) ** 2).sum()) / 2 / parts
    held: list[dict[int, int]] = [{} for _ in range(parts)]
    waiting = [(-room[0], part) for part in range(parts)]  # the parts by room
    ready: list[tuple[float, int]] = []  # by work, those of them that have room
    order = np.argsort(-units, kind="stable")
    for unit, n in zip(order.tolist(), units[order].tolist(), strict=True):
        while waiting and -waiting[0][0] >= n:
            part = heappop(waiting)[1]
            heappush(ready, (work[part], part))
        all_of_it = n * n / 2
        if ready and all_of_it <= max(_LITTLE * mean, _AIMS[0] * mean - ready[0][0]):
            part = heappop(ready)[1]
            shares = {part: n}
        else:
            wanted = (_AIMS[0] * mean - np.array(work)).clip(0) * 2 // n
            shares = _fewest(n, np.array(room), wanted.astype(np.int64))
            ready, waiting = [], [(-tokens, part) for part, tokens in enumerate(room) if part not in shares]
            heapify(waiting)
        for part, tokens in shares.items():
            held[part][unit] = tokens
            room[part] -= tokens
            work[part] += tokens * n / 2
            heappush(waiting, (-room[part], part))
    return held


def _fewest(n: int, room: _Integers, wanted: _Integers) -> dict[int, int]:
    """Share out tokens over the fewest parts that have room and want them, or have room: {part: tokens}.

    Where room is all that limits them they are full but the last one, which then has room for another whole document.
    """
    left = np.minimum(room, wanted)
    left = left if left.sum() >= n else room
    order = np.argsort(-left, kind="stable")
    sums = np.cumsum(left[order])
    count = int(np.searchsorted(sums, n)) + 1
    sums, chosen = sums[:count], order[:count]
    full = (left[chosen] == room[chosen]).all()
    each = np.diff(np.minimum(sums, n) if full else sums * n // sums[-1], prepend=0)
    return {part: tokens for part, tokens in zip(order.tolist(), each.tolist(), strict=False) if tokens}


def _level(units: _Integers, held: list[dict[int, int]], aim: float) -> None:
    """Let the part of the most work change tokens for as many of shorter documents of that of the least, in turn.

    Where one change is enough, documents are taken that it costs the fewest keys to cut.
    """
    work = np.array([sum(tokens * int(units[unit]) for unit, tokens in each.items()) / 2 for each in held])
    mean = work.mean()
    for _ in range(4 * len(held)):
        most, least = int(work.argmax()), int(work.argmin())
        if work[most] <= aim * mean:
            break
        (longer, given), (shorter, taken) = (np.array(list(held[part].items())).T for part in (most, least))
        gap = (units[longer][:, None] - units[shorter]) / 2
        wanted = min(work[most] - mean, mean - work[least])
        moved = np.minimum(np.minimum(given[:, None], taken), np.ceil(wanted / np.maximum(gap, 0.5)))
        gain = moved * gap
        cost = (moved < given[:, None]) * units[longer][:, None]
        cost = cost + (moved < taken) * units[shorter]
        value = np.where(gain >= 0.3 * wanted, -cost, -np.inf)
        value = value if np.isfinite(value).any() else gain
        i, j = np.unravel_index(int(value.argmax()), value.shape)
        if gain[i, j] <= 0:
            break
        for unit, source, target in ((longer[i], most, least), (shorter[j], least, most)):
            _move(held, int(unit), int(moved[i, j]), source, target)
        work[most] -= gain[i, j]
        work[least] += gain[i, j]


def _move(held: list[dict[int, int]], unit: int, tokens: int, source: int, target: int) -> None:
    held[target][unit] = held[target].get(unit, 0) + tokens
    held[source][unit] -= tokens
    if not held[source][unit]:
        del held[source][unit]


def _spans(documents: Sequence[int], sizes: _Integers, owners: _Integers, parts: int) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of each part: successive pieces of one owner are one, if no document ends between them."""
    ends = np.cumsum(documents)
    last = np.cumsum(sizes)
    stops = np.union1d(last, ends)
    owner = owners[np.searchsorted(last, stops)]
    kept = np.append((owner[1:] != owner[:-1]) | np.isin(stops[:-1], ends), True)
    stops, owner = stops[kept], owner[kept]
    spans = np.column_stack([np.append(0, stops[:-1]), stops])[np.argsort(owner, kind="stable")]
    each = np.split(spans, np.cumsum(np.bincount(owner, minlength=parts))[:-1])
    return tuple(tuple((start, stop) for start, stop in of_part.tolist()) for of_part in each)
