"""Ranks and groups of them in words. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from megacore.parallel.rank_sets import runs
from megacore.parallel.weights.layout import MeshShape


def place(rank: int, shape: MeshShape | None, node: str = "") -> str:
    """Return "rank 5 (pp=1 tp=1, node c)"; dimensions of size 1 say nothing."""
    at = shape.place(rank) if shape is not None else None
    dims = [f"{dim}={getattr(at, dim)}" for dim in MeshShape.DIMS if shape is not None and shape[dim] > 1]
    told = ", ".join(filter(None, (" ".join(dims), node and f"node {node}")))
    return f"rank {rank} ({told})" if told else f"rank {rank}"


def listed(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-4, 7"."""
    told = ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in runs(sorted(ranks)))
    return f"rank{'s' * (len(ranks) > 1)} {told}"


@lru_cache(maxsize=256)
def differ_in(shape: MeshShape, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the dimensions along which ranks differ."""
    places = [shape.place(rank) for rank in ranks]
    return tuple(dim for dim in shape.DIMS if len({getattr(at, dim) for at in places}) > 1)


def along(ranks: Sequence[int], shape: MeshShape | None) -> str:
    """Return the dimensions along which ranks lie, "dp x tp" or "all"; without a name, the ranks."""
    split = [dim for dim in MeshShape.DIMS if shape is not None and shape[dim] > 1]
    for size in range(1, len(split) + 1):
        for dims in itertools.combinations(split, size):
            if ranks and shape is not None and shape.along(ranks[0], *dims) == tuple(ranks):
                return " x ".join(dims) if size < len(split) or size == 1 else "all"
    return listed(ranks) if ranks else ""
