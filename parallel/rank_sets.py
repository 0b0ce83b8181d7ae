"""The sets of ranks that talk to each other, and the few calls that make their groups: integers, for any world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param, Split

RankSet = tuple[int, ...]


TOKENS = ("dp", "ep", "cp", "tp")
"""The dimensions of the mesh whose ranks share the tokens of a step."""


def mesh_dims(shape: MeshShape, experts: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the dimensions along which a mesh has groups: of tensor parallelism, of those that read other sequences,
    and of the world; and of those over which experts are spread, where they are.

    Args:
        shape: The sizes of the mesh.
        experts: Whether the model has some: their balance is that of all tokens.
    """
    spread: tuple[tuple[str, ...], ...] = (("ep", "tp"), ("ep",)) if shape.ep > 1 else ()
    if shape.cp > 1:
        spread = *spread, ("cp",), ("cp", "tp")
    return ("tp",), ("dp", "ep", "cp"), shape.DIMS, *spread, *([TOKENS] if experts else [])


def parts_of_dp(shape: MeshShape, parts: int) -> list[RankSet]:
    """Return the ranks of each of so many successive parts of dp, which take steps alone; those at one place of all
    parts are :func:`across` them.

    Raises:
        ValueError: the parts would not be alike.
    """
    size, rest = divmod(shape.dp, parts)
    if rest:
        raise ValueError(f"cannot divide dp={shape.dp} into {parts} parts")
    return [shape.ranks(dp=range(first, first + size)) for first in range(0, shape.dp, size)]


def of_mesh(shape: MeshShape, experts: bool = False) -> Iterator[list[RankSet]]:
    """Yield the sets of all ranks along each of :func:`mesh_dims`."""
    for dims in mesh_dims(shape, experts):
        yield shape.all_along(*dims)


def inner_ranks(ranks: RankSet, index: int, heads: int) -> RankSet:
    """Return those of the ranks of cp that share out the heads of the part of one of them."""
    first = index // heads * heads
    return ranks[first : first + heads]


def of_context(shape: MeshShape, heads: int) -> list[RankSet]:
    """Return the sets of :func:`inner_ranks` of all ranks."""
    return [inner_ranks(ranks, first, heads) for ranks in shape.all_along("cp") for first in range(0, shape.cp, heads)]


def matrix_dims(param: Param, split: Split) -> tuple[str, ...]:
    """Return the dimensions of the mesh along which ranks hold some of one matrix of a parameter, or a copy: those of
    the tokens, but for those along which ranks hold other matrices."""
    others = {dim for axis in (*param.leading, *param.named_axes) if axis != "layer" for dim in split.get(axis, ())}
    return tuple(dim for dim in TOKENS if dim not in others)


def copy_dims(param: Param, split: Split) -> tuple[str, ...]:
    """Return the dimensions of the mesh along which ranks of a stage hold copies of a parameter: those of the tokens,
    but for those that split one of its axes."""
    split_by = {dim for axis in (*param.sentence.axes, *param.named_axes) for dim in split.get(axis, ())}
    return tuple(dim for dim in TOKENS if dim not in split_by)


def of_copies(layout: Layout) -> Iterator[list[RankSet]]:
    """Yield the sets of ranks along each of :func:`copy_dims`, of all parameters."""
    for dims in dict.fromkeys(copy_dims(param, layout.split) for param in layout.schema.params):
        yield layout.mesh.all_along(*dims)


def of_matrices(layout: Layout) -> Iterator[list[RankSet]]:
    """Yield the sets of ranks along each of :func:`matrix_dims`, of all matrices."""
    for dims in dict.fromkeys(matrix_dims(p, layout.split) for p in layout.schema.params if p.is_matrix):
        yield layout.mesh.all_along(*dims)


def channel_kinds(stages: int) -> int:
    """Return how many groups a pipeline has for each direction: in one of two stages both are the pair of each other,
    so each has its own."""
    return {1: 0, 2: 2}.get(stages, 1)


def divide(shape: MeshShape, ranks: Sequence[int], replicas: int | None) -> list[RankSet]:
    """Return the groups of a set of replicas that split what they hold: of one stage, and of one of ``replicas`` parts
    of dp.

    Pipeline stages run microbatches in other orders, so their messages would not meet. All groups are alike, so that
    the first ranks of each, the second ones, ..., own the same shards. Where nothing is split (None), each rank is a
    group of its own.
    """
    if replicas is None:
        return [(rank,) for rank in sorted(ranks)]
    parts: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(ranks):
        place = shape.place(rank)
        parts.setdefault((place.pp, place.dp * replicas // shape.dp), []).append(rank)
    return [tuple(part) for part in parts.values()]


def across(groups: Sequence[RankSet]) -> list[RankSet]:
    """Return the sets of ranks, one of each group of :func:`divide`, that own the same shard."""
    return [tuple(sorted(same)) for same in zip(*groups, strict=True)]


def groups_of(shape: MeshShape, ranks: Sequence[int], replicas: int | None, rank: int) -> tuple[RankSet, RankSet]:
    """Return a rank's group of :func:`divide`, and those of :func:`across` it, in a set of replicas."""
    groups = divide(shape, ranks, replicas)
    own, same = (next(each for each in way if rank in each) for way in (groups, across(groups)))
    return own, same


def divided(layout: Layout, replicas: int | None) -> set[RankSet]:
    """Return the sets of :func:`divide` and :func:`across` of all replicas of a layout."""
    ways = (divide(layout.mesh, ranks, replicas) for ranks in layout.replica_sets())
    return {group for groups in ways for group in (*groups, *across(groups))}


class Rounds:
    """Rank sets that get groups: in each round those that share no rank, which one call on each rank makes."""

    def __init__(self) -> None:
        self._made = set[RankSet]()

    def new(self, rank_sets: Iterable[RankSet]) -> list[list[RankSet]]:
        """Return the rounds of the sets of several ranks that have no group yet."""
        new = {ranks for ranks in rank_sets if len(ranks) > 1} - self._made
        self._made |= new
        return in_rounds(new)


def in_rounds(rank_sets: Iterable[RankSet]) -> list[list[RankSet]]:
    """Part sets of ranks into rounds, so that no two of a round share a rank; the order of the sets does not count."""
    rounds = list[tuple[list[RankSet], set[int]]]()
    for ranks in sorted(rank_sets):
        chosen = next((each for each in rounds if each[1].isdisjoint(ranks)), None)
        if chosen is None:
            chosen = [], set()
            rounds.append(chosen)
        chosen[0].append(ranks)
        chosen[1].update(ranks)
    return [sets for sets, _ in rounds]


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs (first, last) of ascending numbers that follow each other: of ranks, or of layers or tokens."""
    found = list[tuple[int, int]]()
    for n in map(int, numbers):
        if found and n == found[-1][1] + 1:
            found[-1] = found[-1][0], n
        else:
            found.append((n, n))
    return found
