"""The ranks that hold the same training state, and the ranks that keep copies of what one node alone has: integers.

The image of a rank is what a run cannot compute again from its data: the weights that it updates, their masters and
their moments. It is lost when every rank that has it and every rank that keeps a copy of it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from parallel.choices import ZeroShard
from parallel.rank_sets import RankSet, across, divide
from parallel.weights.layout import Layout


def identical(layout: Layout, shard: ZeroShard = "none", replicas: int = 1) -> dict[int, RankSet]:
    """Return {rank: the ranks whose image is the same, itself among them, in order}.

    Two ranks have the same image where they are replicas of each other in every piece that one of them holds, and own
    the same slices of these where they are split.

    Args:
        layout: The shards of each rank.
        shard: The states that replicas split.
        replicas: Groups of data parallel ranks that do not split with each other (HSDP).
    """
    groups = None if shard == "none" else replicas
    owned: list[set[int]] = [set() for _ in range(layout.mesh.world)]
    sets = (divide(layout.mesh, ranks, groups) for ranks in layout.replica_sets())
    for number, same in enumerate(same for parts in sets for same in across(parts)):
        for rank in same:
            owned[rank].add(number)
    alike = dict[frozenset[int], list[int]]()
    for rank, numbers in enumerate(owned):
        alike.setdefault(frozenset(numbers), []).append(rank)
    return {rank: ranks for ranks in map(tuple, alike.values()) for rank in ranks}


def refuges(alike: Mapping[int, RankSet], leaving: Collection[int]) -> dict[int, int]:
    """Return {rank: a rank that stays} for one rank of each image that only ranks that leave have; each gets equally
    many.

    Args:
        alike: The ranks with the same image as each rank (:func:`identical`).
        leaving: The ranks that leave.
    """
    staying = [rank for rank in alike if rank not in leaving]
    lost = [ranks[0] for ranks in sorted({*alike.values()}) if all(rank in leaving for rank in ranks)]
    return {rank: staying[number % len(staying)] for number, rank in enumerate(lost)} if staying else {}


def holders(alike: Mapping[int, RankSet], ranks_per_node: int) -> dict[int, int]:
    """Return {rank: the rank of another node that keeps a copy of its image}, for one rank of each image that one node
    alone has; empty where there is one node.

    The copies of a node lie half of all nodes further on, each with the rank of its own number there. So an even number
    of nodes are pairs that keep each other's: of all ways to place one copy this one has the fewest sets of two nodes
    that hold all of something (Gemini, Wang et al. 2023, doi 10.1145/3600006.3613145), and the two seldom share a rack.

    Args:
        alike: The ranks with the same image as each rank (:func:`identical`).
        ranks_per_node: The successive ranks that share a node; the last node may have fewer.
    """
    world = len(alike)
    nodes = -(-world // ranks_per_node)
    kept = dict[int, int]()
    if nodes > 1:
        for rank, same in alike.items():
            node = rank // ranks_per_node
            if rank == same[0] and same[-1] // ranks_per_node == node:
                first = (node + nodes // 2) % nodes * ranks_per_node
                kept[rank] = first + rank % ranks_per_node % min(ranks_per_node, world - first)
    return kept
