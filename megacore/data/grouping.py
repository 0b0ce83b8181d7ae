"""Successive items together, by their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

AT_ONCE = 2**20
"""Bytes of text that a worker is sent, and that it encodes, at once."""


def grouped(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield successive items together, as many as have AT_ONCE."""
    return fitting(items, size, AT_ONCE)


def fitting(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield successive items together, as many as have no more than the most, and one at least."""
    group, total = list[Item](), 0
    for item in items:
        if group and total + size(item) > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group
