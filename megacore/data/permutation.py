"""Permutations that are formulas: they take no memory and no time to make, however many numbers they are of."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

ROUNDS = 12
"""Each with a key. With 4, neighbours stay neighbours twice as often as they should; with 8, the orders of five numbers
are not all as frequent; with 12, nothing was found."""

_MASK = (1 << 64) - 1

Words = TypeVar("Words", int, npt.NDArray[Any])


class Permutation:
    """A permutation of range(count), of one number at least, drawn by ``keys``, ROUNDS words from 0 to 2^64 - 1.

    A number is a pair (row, column) of a table that holds at least ``count`` pairs. The rounds are those of a Feistel
    network: by turns they add to the row what belongs to the column, and to the column what belongs to the row. A
    pair outside of range(count) goes through all of them again, until it is within (Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002). The table has less than a row too many, so that is rare.
    """

    def __init__(self, count: int, keys: Sequence[int]) -> None:
        self.count = count
        self._keys = tuple(int(key) for key in keys)
        self._columns = isqrt(count - 1) + 1
        self._rows = -(-count // self._columns)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        """Return the place that ``index`` goes to; IndexError outside of range(count)."""
        if not 0 <= index < self.count:
            raise IndexError(f"{index} is not one of {self.count} numbers")
        while (index := self._moved(index)) >= self.count:
            pass
        return index

    def block(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the places that [start, stop) go to, [stop - start]: all at once."""
        places = np.arange(start, stop, dtype=np.uint64)
        left = np.arange(places.size)
        while left.size:
            places[left] = self._moved(places[left])
            left = left[places[left] >= self.count]
        return places.astype(np.int64)

    def _moved(self, places: Words) -> Words:
        """Return the places in the table that others go to, in one pass through the rounds."""
        rows, columns = self._rows, self._columns
        row, column = places // columns, places % columns
        for one, other in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + _mixed(one + column) % rows) % rows
            column = (column + _mixed(other + row) % columns) % columns
        return row * columns + column


def _mixed(x: Words) -> Words:
    """Return the words of a counter, mixed: Steele, Lea and Flood's SplitMix64 (2014)."""
    x = (x * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
