"""The split of a microbatch over cp: each score is computed once, only keys that somebody looks at travel, and the work
is the same everywhere."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.parallel import context_split
from megacore.parallel.context_split import BALANCED, ContextParallel, ContextSplit, Rectangle, Span
from megacore.parallel.enum_errors import ContextBalance

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """A microbatch of some rows, and how it is split."""

    documents: tuple[int, ...]
    length: int
    parts: int
    heads: int
    balance: ContextBalance
    window: int | None

    @property
    def split(self) -> ContextSplit:
        context = ContextParallel(self.parts * self.heads, "ring", self.balance, self.heads)
        return context.split(self.documents, self.length)


@st.composite
def small(draw: st.DrawFn) -> Case:
    parts, heads = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    length = parts * heads * draw(st.integers(1, 12))
    documents: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        left = length
        while left:
            documents.append(min(left, draw(st.one_of(st.integers(1, 5), st.integers(1, 80)))))
            left -= documents[-1]
    balance: ContextBalance = draw(st.sampled_from(["auto", "rows", "documents"]))
    return Case(tuple(documents), length, parts, heads, balance, draw(st.none() | st.integers(1, 40)))


def lognormal(seed: int, t: int, median: float, sigma: float) -> tuple[int, ...]:
    """Draw lengths that add up to t; the last is cut."""
    rng, found = np.random.default_rng(seed), np.array([], dtype=np.int64)
    while found.sum() < t:
        more = np.rint(median * np.exp(sigma * rng.standard_normal(1000)))
        found = np.append(found, np.clip(more, 1, t).astype(np.int64))
    ends = np.minimum(np.cumsum(found), t)
    return tuple(np.diff(ends[: int(np.searchsorted(ends, t)) + 1], prepend=0).tolist())


@st.composite
def large(draw: st.DrawFn, balances: Sequence[ContextBalance] = ("auto", "rows", "documents")) -> Case:
    """Lognormal lengths of some 3000 documents at most, up to 2^20 tokens over up to 64 parts."""
    parts = draw(st.integers(2, 64))
    t = int(2 ** draw(st.floats(13, 20))) // parts * parts
    median = float(np.exp(draw(st.floats(np.log(max(30, t / 3000)), np.log(t)))))
    documents = lognormal(draw(st.integers(0, 2**32)), t, median, draw(st.floats(0, 2)))
    return Case(documents, t, parts, 1, draw(st.sampled_from(balances)), draw(st.none() | st.integers(1, 4096)))


def examples(some: int, many: int) -> pytest.MarkDecorator:
    counts = [pytest.param(some, id="some"), pytest.param(many, id="many", marks=pytest.mark.grid)]
    return pytest.mark.parametrize("count", counts)


def for_all(cases: st.SearchStrategy[Case], check: Callable[[Case], None], count: int) -> None:
    settings(max_examples=count)(given(cases)(check))()


def of_part(split: ContextSplit, part: int) -> Tokens:
    """Return the tokens of all ranks of a part."""
    return np.concatenate([split.indices(part * split.heads + piece) for piece in range(split.heads)])


def rows(tokens: Tokens, spans: Sequence[Span]) -> Tokens:
    return np.concatenate([tokens[:0], *(tokens[start:stop] for start, stop in spans)])


class Looks:
    """Which keys a part's queries look at, over all of its calls."""

    def __init__(self, split: ContextSplit, part: int, window: int | None) -> None:
        self.split, self.part, self.window = split, part, window
        self.own = of_part(split, part)
        self.lengths = split.alone(part, window)
        assert sum(self.lengths) == len(self.own)
        self.hops = [split.hop(part, other, window) for other in range(split.parts)]
        self.gathered = split.gathered(part, window)
        held = [of_part(split, other) for other in range(split.parts)]
        self.keys = [rows(tokens, hop.taken) for tokens, hop in zip(held, self.hops, strict=True)]
        assert self.hops[part].taken == ()
        self.keys[part] = self.own
        self.buffer = np.full(self.gathered.tokens, -1)
        for tokens, taken, places in zip(held, self.gathered.taken, self.gathered.places, strict=True):
            for of_them, here in zip(taken, places, strict=True):
                assert (self.buffer[slice(*here)] == -1).all()
                self.buffer[slice(*here)] = tokens[slice(*of_them)]

    def of_triangles(self, row: int) -> Tokens:
        first = next(end - n for n, end in zip(self.lengths, accumulate(self.lengths), strict=True) if end > row)
        return self.own[first if self.window is None else max(first, row + 1 - self.window) : row + 1]

    def by_hops(self, row: int) -> Tokens:
        found = [seen(hop.rectangles, keys, row) for hop, keys in zip(self.hops, self.keys, strict=True)]
        return np.sort(np.concatenate([self.of_triangles(row), *found]))

    def at_once(self, row: int) -> Tokens:
        return np.sort(np.append(self.of_triangles(row), seen(self.gathered.rectangles, self.buffer, row)))

    def expected(self, row: int) -> Tokens:
        token = self.own[row]
        start = int(self.split.starts[self.split.starts <= token].max())
        return np.arange(start if self.window is None else max(start, token + 1 - self.window), token + 1)

    def pairs(self) -> tuple[int, int]:
        """Return the numbers of scores by hops, and with all keys at once."""
        whole = [n if self.window is None else min(n, self.window) for n in self.lengths]
        alone = sum(w * (w + 1) // 2 + (n - w) * w for n, w in zip(self.lengths, whole, strict=True))
        by_hops = sum(rectangle.pairs for hop in self.hops for rectangle in hop.rectangles)
        return alone + by_hops, alone + sum(rectangle.pairs for rectangle in self.gathered.rectangles)


def seen(rectangles: Sequence[Rectangle], keys: Tokens, row: int) -> Tokens:
    found = [keys[:0]]
    for each in rectangles:
        (first, last), (start, stop) = each.queries, each.keys
        assert 0 <= first < last and 0 <= start < stop <= len(keys)
        if first <= row < last:
            begin = start if each.band is None else start + max(0, row - first + each.band)
            assert begin < stop, "a query of a rectangle looks at no key"
            found.append(keys[begin:stop])
    return np.concatenate(found)


def check_scores(case: Case) -> None:
    """Each query looks once at each of its keys, and at no others; all keys that travel are looked at."""
    split = case.split
    for part in range(case.parts):
        looks = Looks(split, part, case.window)
        lookers = [np.zeros(len(keys)) for keys in looks.keys]
        for row in range(len(looks.own)):
            expected = looks.expected(row)
            assert (found := looks.by_hops(row)).shape == expected.shape and (found == expected).all()
            assert (found := looks.at_once(row)).shape == expected.shape and (found == expected).all()
            for other, hop in enumerate(looks.hops):
                if other != part:
                    lookers[other] += np.isin(looks.keys[other], seen(hop.rectangles, looks.keys[other], row))
        assert all(counts.all() for other, counts in enumerate(lookers) if other != part)
        assert looks.pairs() == (split.pairs(part, case.window),) * 2
        check_travel(looks)


def check_travel(looks: Looks) -> None:
    """A key comes once; the gather takes what the hops take, in the order of the tokens; what is taken is given."""
    split, part = looks.split, looks.part
    taken, given = split.travel(part, looks.window)
    for other, hop in enumerate(looks.hops):
        if other != part:
            assert (np.diff(looks.keys[other]) > 0).all()
            assert looks.gathered.taken[other] == hop.taken
        assert taken[other] == hop.tokens
        assert given[other] == split.hop(other, part, looks.window).tokens
    assert (looks.buffer >= 0).all() and (np.diff(looks.buffer) > 0).all()
    queries = sorted(each.queries for each in looks.gathered.rectangles)
    assert all(before[1] <= after[0] for before, after in pairwise(queries))


@examples(60, 4000)
def test_each_score_is_computed_once_and_only_keys_that_are_looked_at_travel(count: int) -> None:
    for_all(small(), check_scores, count)


def check_large(case: Case) -> None:
    """As with few tokens, of some parts and rows; all scores are counted."""
    split = case.split
    check_shares(case)
    rng = np.random.default_rng(case.parts)
    for part in {0, case.parts - 1, int(rng.integers(case.parts))}:
        looks = Looks(split, part, case.window)
        assert looks.pairs() == (split.pairs(part, case.window),) * 2
        check_travel(looks)
        for row in {0, len(looks.own) - 1, *rng.integers(len(looks.own), size=6).tolist()}:
            expected = looks.expected(row)
            assert np.array_equal(looks.by_hops(row), expected) and np.array_equal(looks.at_once(row), expected)


@pytest.mark.in_turn(3)
@examples(4, 300)
def test_many_tokens(count: int) -> None:
    for_all(large(), check_large, count)


def check_shares(case: Case) -> None:
    """Each rank has as many tokens, each token one rank, and each span lies in one document."""
    split = case.split
    ranks = case.parts * case.heads
    held = [split.indices(rank) for rank in range(ranks)]
    assert {len(tokens) for tokens in held} == {split.tokens // ranks}
    assert np.array_equal(np.sort(np.concatenate(held)), np.arange(split.tokens))
    documents = np.repeat(np.arange(len(case.documents)), case.documents)
    for part, spans in enumerate(split.spans):
        assert np.array_equal(rows(np.arange(split.tokens), spans), of_part(split, part))
        assert all(documents[start] == documents[stop - 1] for start, stop in spans)
    for rank, tokens in enumerate(held):
        lengths, of_each = split.of_documents(rank, range(len(case.documents)))
        assert np.array_equal(np.repeat(of_each, lengths), documents[tokens])


@examples(60, 4000)
def test_each_rank_has_as_many_tokens(count: int) -> None:
    for_all(small(), check_shares, count)


def keys_that_travel(split: ContextSplit) -> int:
    """Count, of each part and document, the tokens before its last span that are not its own."""
    total = 0
    for spans in split.spans:
        last = dict[int, int]()
        for start, stop in spans:
            number = int(np.searchsorted(split.starts, start, side="right"))
            total += start - last.get(number, int(split.starts[number - 1]))
            last[number] = stop
    return total


def busiest(split: ContextSplit) -> float:
    work = [split.pairs(part) for part in range(split.parts)]
    return max(work) / (sum(work) / split.parts)


def check_auto(case: Case) -> None:
    split, documents = case.split, context_split.split(case.documents, case.length, case.parts, "documents", 1)
    assert busiest(split) <= BALANCED
    assert keys_that_travel(split) <= keys_that_travel(documents)


@examples(8, 2000)
def test_auto_is_balanced_and_moves_no_more_keys_than_documents(count: int) -> None:
    for_all(large(["auto"]), check_auto, count)


@pytest.mark.parametrize("parts", [2, 8, 64])
@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
def test_auto_on_rows_of_short_documents_moves_at_most_half_the_keys(parts: int, sigma: float) -> None:
    """A part has some 20 documents here. No key travels, or at most a fifth of what would."""
    lengths = tuple(n for row in range(4) for n in lognormal(row, 256 * parts, 50, sigma))
    split, documents = (context_split.split(lengths, 256 * parts, parts, each, 1) for each in ("auto", "documents"))
    assert keys_that_travel(split) <= 0.2 * keys_that_travel(documents)
    assert busiest(split) <= BALANCED


@pytest.mark.parametrize(
    ("parts", "documents"), [pytest.param(6, (15, 21), id="as few parts as can take them would move more keys")]
)
def test_auto_is_documents_where_that_moves_fewer_keys(parts: int, documents: tuple[int, ...]) -> None:
    spans = [context_split.split(documents, sum(documents), parts, each, 1).spans for each in ("auto", "documents")]
    assert spans[0] == spans[1]


def test_documents_that_fit_stay_whole_and_nothing_travels() -> None:
    split = ContextParallel(4).split((5, 3) * 4, 8)
    assert {split.gathered(part).tokens for part in range(4)} == {0}
    assert all(stop - start in split.documents for spans in split.spans for start, stop in spans)


def test_what_is_left_of_a_part_takes_short_documents_whole() -> None:
    """The long one fills three parts, and the last has room for the others: not four times a quarter of each."""
    documents = (4000, 96, 1, 3)
    split, evenly = (ContextParallel(4, balance=each).split(documents, 4100) for each in ("auto", "documents"))
    assert [number for number, held in enumerate(split.in_part) if {*held} == {0}] == [0, 1, 2, 3]
    assert split.spans[3][-3:] == ((4000, 4096), (4096, 4097), (4097, 4100))
    assert busiest(split) <= 1.03 and keys_that_travel(split) < 0.97 * keys_that_travel(evenly)


def test_rows_are_left_to_the_longest_document() -> None:
    """Why rows are not the default: one row is one long document, the other short ones."""
    documents = (4096, *[64] * 64)
    assert busiest(ContextParallel(4, balance="rows").split(documents, 8192)) > 1.5
    assert busiest(ContextParallel(4).split(documents, 8192)) <= BALANCED


@pytest.mark.parametrize("count", [1, 3])
def test_a_hop_is_one_rectangle_of_each_document(count: int) -> None:
    """Its queries see all that came, or all of them see the first half of it; two of a part are no more than that."""
    split = ContextParallel(4, balance="documents").split((64,) * count, 64)
    for part in range(4):
        for other in range(4):
            rectangles = split.hop(part, other).rectangles
            assert len(rectangles) == (count if part != other else 0)
            assert {each.pairs for each in rectangles} <= {8 * 16, 16 * 8}
        assert split.alone(part) == (16,) * count
        assert len(split.gathered(part).rectangles) == count * (1 if part in (0, 3) else 2)


def test_a_window_leaves_what_is_near() -> None:
    """Pieces of 8: of the one before each, 3 keys are in a window of 4, in whatever hop they come."""
    split = ContextParallel(4, balance="documents").split((64,), 64)
    assert [split.travel(part, 4)[0] for part in range(4)] == [(0, 3, 0, 0), (3, 0, 3, 0), (0, 3, 0, 3), (0, 0, 3, 0)]
    assert split.hop(0, 1, 4).rectangles == (Rectangle((8, 11), (0, 3), 0),)
    assert split.alone(0, 4) == (8, 8) and split.alone(0, 64) == (16,)
    assert split.hop(0, 1, 64) == split.hop(0, 1)


def test_one_part_is_in_order() -> None:
    split = ContextParallel(4, heads=4).split((5, 7, 4), 8)
    assert split.spans == (((0, 5), (5, 12), (12, 16)),)
    assert [split.indices(rank).tolist() for rank in range(4)] == np.arange(16).reshape(4, 4).tolist()


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ((5, 5), r"cannot split 10 tokens over cp=4: choose a multiple of 4"),
        ((1, 2), r"cannot split 3 tokens over cp=4, a rank would have none: choose cp of at most 3"),
    ],
)
def test_tokens_that_do_not_divide_are_an_error(documents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextParallel(4, heads=2).split(documents, sum(documents))


@pytest.mark.parametrize(
    ("parts", "median", "sigma"), [(8, 300, 1.0), (64, 300, 1.0), (64, 40, 0.3), (64, 131072, 0.0)]
)
def test_a_plan_for_128k_tokens_is_quick(parts: int, median: float, sigma: float) -> None:
    """It takes 1 to 10 ms where the machine has nothing else to do; ten times as much is a mistake."""
    documents = lognormal(0, 131072, median, sigma)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        split = context_split.split.__wrapped__(documents, 131072, parts, "auto", 1)
        for other in range(parts):
            split.hop(0, other)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.1
