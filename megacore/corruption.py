"""Replicas that do not agree: who is at fault, by the others or by itself, and the end of it. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


class Corrupted(Exception):
    """The state of a rank, or what it computes, is not that of its replicas. No RuntimeError, which a rank may outlive:
    this one must end. ``text``: the tensors and ranks that differ, in words; ``rank``: the rank at fault, None where
    nobody knows."""

    def __init__(self, text: str, rank: int | None) -> None:
        super().__init__(text)
        self.rank = rank


def outvoted(values: Mapping[int, object]) -> list[int] | None:
    """Return the ranks whose value is not that of most; None where no value is that of more than half. ``values``:
    {rank: its value}."""
    value, votes = Counter(values.values()).most_common(1)[0]
    return [rank for rank, other in values.items() if other != value] if 2 * votes > len(values) else None


def at_fault(tries: Mapping[int, Sequence[object]]) -> list[int]:
    """Return the ranks that are at fault where tries of the same differ: those that do not repeat themselves, else
    those that are outvoted; all of them where that tells nothing. ``tries``: {rank: what it came to, each time}; two of
    all are not the same."""
    unsteady = [rank for rank, each in tries.items() if len({*each}) > 1]
    if unsteady:
        return unsteady
    return outvoted({rank: each[0] for rank, each in tries.items()}) or list(tries)
