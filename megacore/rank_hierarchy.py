"""The groups of ranks that talk between steps: a node's among themselves, their first ones, and so on. No torch."""

from __future__ import annotations

from collections.abc import Iterator

FAN_OUT = 16
"""Groups that meet in one of the next level: gloo passes numbers around a ring, and has a socket for each pair."""
NODE = 8
"""Successive ranks that share a machine, where nothing is said."""


def by_level(world: int, node: int = NODE) -> Iterator[list[tuple[int, ...]]]:
    """Yield sets of at most ``node`` successive ranks, then of at most ``FAN_OUT`` of their first ones, and so on until
    one is left; a rank is in those of its level and of the ones before it."""
    members, size = list(range(world)), node if node > 1 else FAN_OUT
    while len(members) > 1:
        sets = [tuple(members[at : at + size]) for at in range(0, len(members), size)]
        yield sets
        members, size = [ranks[0] for ranks in sets], FAN_OUT
