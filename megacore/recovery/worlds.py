"""The processes that take part in a run as nodes come and go. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def places(nodes: Mapping[int, int], there: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int | None]]:
    """Return {rank: (node, life)} of the processes of nodes: those that are there, in their order, then new ones, whose
    life is None.

    Args:
        nodes: {node: its processes}.
        there: The (node, life) of processes, by rank; those of other nodes have no place.
    """
    kept: list[tuple[int, int | None]] = [(node, life) for node, life in there if node in nodes]
    lacking = Counter(nodes)
    lacking.subtract(node for node, _ in kept)
    return dict(enumerate([*kept, *((node, None) for node in nodes for _ in range(lacking[node]))]))
