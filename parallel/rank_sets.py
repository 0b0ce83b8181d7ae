"""Which ranks talk to each other, and in how few calls their groups are made: integers, for a world of any size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from parallel.layout import Layout, MeshShape

RankSet = tuple[int, ...]


def of_mesh(shape: MeshShape) -> Iterator[list[RankSet]]:
    """The sets that every mesh has: of tensor parallelism, those that share a step's tokens, and the world."""
    for dims in (("tp",), ("dp", "ep", "cp"), shape.DIMS):
        yield shape.all_along(*dims)


def channel_kinds(stages: int) -> int:
    """How many groups a pipeline has for each direction: in one of two stages both are the pair of each other, so each
    has its own."""
    return {1: 0, 2: 2}.get(stages, 1)


def divide(shape: MeshShape, ranks: Sequence[int], replicas: int) -> list[RankSet]:
    """The groups of a set of replicas that share with each other: of one stage, and of one of ``replicas`` parts of dp.

    All are alike, so that the first ranks of each, the second ones, ..., hold the same slices.
    """
    parts: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(ranks):
        place = shape.place(rank)
        parts.setdefault((place.pp, place.dp * replicas // shape.dp), []).append(rank)
    return [tuple(part) for part in parts.values()]


def divided(layout: Layout, replicas: int) -> set[RankSet]:
    """The sets of :func:`divide` of all replicas of a layout, and those that hold the same slices."""
    found = set[RankSet]()
    for ranks in layout.replica_sets():
        parts = divide(layout.mesh, ranks, replicas)
        found |= {*parts, *(tuple(sorted(same)) for same in zip(*parts, strict=True))}
    return found


class Rounds:
    """Rank sets that get groups: in each round those that share no rank, which one call on each rank makes."""

    def __init__(self) -> None:
        self._made = set[RankSet]()

    def new(self, rank_sets: Iterable[RankSet]) -> list[list[RankSet]]:
        """The rounds of the sets of several ranks that have no group yet."""
        new = {ranks for ranks in rank_sets if len(ranks) > 1} - self._made
        self._made |= new
        return in_rounds(new)


def in_rounds(rank_sets: Iterable[RankSet]) -> list[list[RankSet]]:
    """Sets of ranks, parted so that no two of a round share a rank; the same for the same sets in any order."""
    rounds = list[tuple[list[RankSet], set[int]]]()
    for ranks in sorted(rank_sets):
        chosen = next((each for each in rounds if each[1].isdisjoint(ranks)), None)
        if chosen is None:
            chosen = [], set()
            rounds.append(chosen)
        chosen[0].append(ranks)
        chosen[1].update(ranks)
    return [sets for sets, _ in rounds]
