"""Orders by a formula: each number once, none more likely than another, neighbours apart."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from megacore.data.permutation import ROUNDS, Permutation
from megacore.data.samples import Purpose, draw, epoch_order

Words = npt.NDArray[np.uint64]


def mixed(x: Words) -> Words:
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def table(rows: int, columns: int, keys: Words) -> npt.NDArray[np.int64]:
    """Where each pair of the table goes in one pass through the rounds: another way to compute it, all at once."""
    row, column = (part.astype(np.uint64) for part in np.divmod(np.arange(rows * columns), columns))
    r, c = np.uint64(rows), np.uint64(columns)
    for one, other in zip(keys[::2], keys[1::2], strict=True):
        row = (row + mixed(one + column) % r) % r
        column = (column + mixed(other + row) % c) % c
    return (row * c + column).astype(np.int64)


def shape(count: int) -> tuple[int, int]:
    columns = next(n for n in range(int(count**0.5), count + 1) if n * n >= count)
    return -(-count // columns), columns


def whole(count: int, keys: Words) -> npt.NDArray[np.int64]:
    """The permutation of range(count), [count]."""
    through = table(*shape(count), keys)
    found = through[:count].copy()
    while (outside := found >= count).any():
        found[outside] = through[found[outside]]
    return found


def keys(seed: int) -> Words:
    return draw(ROUNDS, seed, Purpose.SAMPLES)


@pytest.mark.parametrize("count", [*range(1, 40), 97, 1000, 1023, 1024, 1025])
def test_it_is_the_permutation_that_is_computed_all_at_once(count: int) -> None:
    made = Permutation(count, keys(count).tolist())
    assert [made[i] for i in range(count)] == whole(count, keys(count)).tolist()
    halves = np.concatenate([made.block(0, count // 3), made.block(count // 3, count)])
    assert halves.tolist() == [made[i] for i in range(count)]


@pytest.mark.parametrize("most", [2500, pytest.param(10**5, marks=pytest.mark.grid)])
def test_each_number_comes_once(most: int) -> None:
    """Up to ``most`` numbers. One pass permutes the table, and walking on until within keeps that."""
    for rows, columns in sorted({shape(count) for count in range(1, most + 1)}):
        assert (np.bincount(table(rows, columns, keys(rows * columns))) == 1).all()
    for count in (most // 2, most - 1, most):
        assert (np.bincount(whole(count, keys(count))) == 1).all()


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("count", [3, 7, 16, 100])
def test_every_place_is_as_likely(count: int) -> None:
    draws = 4000
    seen = np.zeros((count, count))
    for seed in range(draws):
        seen[np.arange(count), whole(count, keys(seed))] += 1
    freedom = (count - 1) ** 2
    chi_squared = ((seen - draws / count) ** 2).sum() / (draws / count)
    assert abs(chi_squared - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("count", [16, 100, 1000])
def test_neighbours_stay_neighbours_as_seldom_as_by_chance(count: int) -> None:
    """Of a random permutation (count - 1) / count neighbours follow each other in the mean, with a variance of 1."""
    drawn = [whole(count, keys(seed)) for seed in range(1000)]
    follow = np.array([(np.diff(each) == 1).sum() for each in drawn])
    fixed = np.array([(each == np.arange(count)).sum() for each in drawn])
    shared = np.array([(one == other).sum() for one, other in pairwise(drawn)])
    for found, expected in ((follow, (count - 1) / count), (fixed, 1), (shared, 1)):
        assert abs(found.mean() - expected) < 0.15 and 0.7 < found.var() < 1.3


def test_huge_ones_cost_what_small_ones_cost() -> None:
    order = epoch_order(10**15, seed=3, epoch=7)
    found = [order[i] for i in range(1000)]
    assert len(set(found)) == 1000 and 0.4 < np.mean(found) / 10**15 < 0.6
