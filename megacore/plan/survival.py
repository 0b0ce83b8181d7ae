"""The training state that is lost with a node, and the nodes that may be lost at once. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations

from megacore.plan.efficiency import LINKS
from megacore.plan.setting import Setting
from megacore.plan.state import ParameterShare, Shares, sharing, updated
from megacore.plan.step_time import Cluster
from parallel.choices import ZeroShard
from parallel.copies import holders, identical
from parallel.rank_sets import RankSet

OVERHEAD = 0.01
"""The share of a step that copies to other nodes may take, where nothing is said."""
Nodes = frozenset[int]


@dataclass(frozen=True)
class Survival:
    """The images of all ranks (`parallel.copies`), and where they lie.

    Args:
        per_node: The successive ranks that share a node.
        alike: The ranks with the same image as each rank.
        copies: {rank: the rank of another node that keeps a copy of its image}.
    """

    per_node: int
    alike: Mapping[int, RankSet]
    copies: Mapping[int, int]

    @classmethod
    def of(cls, setting: Setting, per_node: int, copies: bool = True) -> Survival:
        """Return where the images of a run lie, with the copies that the engine places, or with none."""
        alike = identical(setting.layout, setting.shard, setting.replicas)
        return cls(per_node, alike, holders(alike, per_node) if copies else {})

    @property
    def nodes(self) -> int:
        return -(-len(self.alike) // self.per_node)

    @cached_property
    def images(self) -> Mapping[RankSet, Nodes]:
        """{the ranks of an image: the nodes that it lies on, those of its copies among them}."""
        found = dict[RankSet, Nodes]()
        for same in set(self.alike.values()):
            copies = (self.copies[rank] for rank in same if rank in self.copies)
            found[same] = frozenset(rank // self.per_node for rank in (*same, *copies))
        return found

    @cached_property
    def _fatal_from(self) -> Mapping[int, list[Nodes]]:
        """{node: the sets whose first one it is and whose end at once loses an image}, those that hold a smaller one
        left out."""
        found = dict[int, list[Nodes]]()
        for nodes in sorted(set(self.images.values()), key=lambda nodes: (len(nodes), sorted(nodes))):
            if not _holds(nodes, found):
                found.setdefault(min(nodes), []).append(nodes)
        return found

    @cached_property
    def fatal(self) -> tuple[Nodes, ...]:
        """All of these sets, small ones first."""
        return tuple(sorted(chain(*self._fatal_from.values()), key=lambda nodes: (len(nodes), sorted(nodes))))

    @property
    def any_at_once(self) -> int:
        """The number of nodes that may end at once, whichever they are."""
        return len(self.fatal[0]) - 1

    def loses(self, ended: Collection[int]) -> bool:
        """Return whether an image is lost where these nodes end at once."""
        return _holds(frozenset(ended), self._fatal_from)

    def fatal_share(self, count: int) -> float:
        """Return the share of all sets of so many nodes that may not end at once.

        Raises:
            ValueError: the sets are too many to look at, and more than one kind of set makes them fatal.
        """
        sets, sizes = math.comb(self.nodes, count), [len(nodes) for nodes in self.fatal if len(nodes) <= count]
        if not sizes or count > self.nodes:
            return 0.0
        if min(sizes) == count:
            return len(sizes) / sets
        if sets > 100_000:
            raise ValueError(f"{sets:,} sets of {count} nodes are too many to look at")
        return sum(self.loses(ended) for ended in combinations(range(self.nodes), count)) / sets

    @cached_property
    def one_node(self) -> Mapping[int, tuple[RankSet, ...]]:
        """{node: the images that lie on ranks of this node alone}: they end with it, or come back from copies."""
        found: dict[int, list[RankSet]] = {node: [] for node in range(self.nodes)}
        for same in sorted(self.images):
            if same[0] // self.per_node == same[-1] // self.per_node:
                found[same[0] // self.per_node].append(same)
        return {node: tuple(images) for node, images in found.items()}

    @property
    def nodes_kept(self) -> float:
        """The share of nodes that may end alone."""
        return 1 - sum(len(nodes) == 1 for nodes in self.fatal) / self.nodes

    @property
    def nodes_with_replicas(self) -> float:
        """The share of nodes all of whose images are on ranks of other nodes too."""
        return sum(not images for images in self.one_node.values()) / self.nodes

    @property
    def ranks_kept(self) -> float:
        """The share of ranks that may end alone, their node and its copies staying."""
        return sum(len(same) > 1 or rank in self.copies for rank, same in self.alike.items()) / len(self.alike)

    @property
    def ranks_with_replicas(self) -> float:
        """The share of ranks whose image another rank has too."""
        return sum(len(same) > 1 for same in self.alike.values()) / len(self.alike)

    @property
    def partners(self) -> float:
        """The mean number of nodes that may not end while another one is being replaced, of one that may."""
        return 2 * sum(len(nodes) == 2 for nodes in self.fatal) / self.nodes


def _holds(nodes: Nodes, by_first: Mapping[int, Sequence[Nodes]]) -> bool:
    """Return whether some nodes hold one of the sets that are found by their first ones."""
    return any(each <= nodes for node in nodes for each in by_first.get(node, ()))


def image_bytes(setting: Setting, shares: Shares) -> tuple[int, ...]:
    """Return, for each stage, the bytes of the image of a rank: its slices of weights, masters and moments."""
    split: ZeroShard = "none" if setting.shard == "none" else "parameters"
    owned = replace(setting, shard=split, widths=replace(setting.widths, gradient=0))
    return tuple(updated(stage, owned).total for stage in shares.stages)


@dataclass(frozen=True)
class PieceHolders:
    """A parameter's pieces that the same ranks have.

    Args:
        name: The parameter's name, of all layers.
        pieces: Its pieces; one without a label is all of it.
        elements: Their elements on a rank.
        values: The number of ranks that have them.
        state: The number of ranks that have the same slice of their masters and moments.
    """

    name: str
    pieces: tuple[str, ...]
    elements: int
    values: int
    state: int


def piece_holders(setting: Setting, shares: Shares) -> Iterator[PieceHolders]:
    """Yield the holders of all that is trained, each parameter and set of its pieces once."""
    seen = set[tuple[str, tuple[str, ...]]]()
    for part in (part for stage in shares.stages for part in stage if part.trained):
        key = part.param.name, part.labels
        if key not in seen:
            seen.add(key)
            yield _holders(part, setting)


def _holders(part: ParameterShare, setting: Setting) -> PieceHolders:
    mesh = setting.layout.mesh
    copies = part.model_replicas * mesh.dp * mesh.cp
    state = copies if setting.shard == "none" or part.param.buffer else copies // sharing(part, setting)
    values = state if setting.shard == "parameters" else copies
    return PieceHolders(part.param.name, part.labels, part.elements, values, state)


@dataclass(frozen=True)
class PeerCopies:
    """The cost of copies in the memory of other nodes.

    Args:
        sizes: For each stage, the bytes that a rank sends whose image is copied, and that its holder keeps.
        ranks: The ranks that send theirs.
        seconds: The time that it takes over the network.
        every: The least number of steps from one copy to the next.
    """

    sizes: Sequence[int]
    ranks: int
    seconds: float
    every: int

    @classmethod
    def of(
        cls, setting: Setting, shares: Shares, survival: Survival, cluster: Cluster, step_s: float, overhead: float
    ) -> PeerCopies | None:
        """Return the cost of the copies of a run, as if none of it were hidden; None where there are none.

        Args:
            setting: The recipe on paper.
            shares: The shares of its ranks.
            survival: The places of its images and copies.
            cluster: The devices, whose network is used.
            step_s: Seconds of a step.
            overhead: The share of a step that copies may take.
        """
        if not survival.copies:
            return None
        sizes, per_stage = image_bytes(setting, shares), len(survival.alike) // len(shares.stages)
        largest = max(sizes[rank // per_stage] for rank in survival.copies)
        seconds = largest / min(cluster.device.network * LINKS, cluster.device.host)
        return cls(sizes, len(survival.copies), seconds, max(1, math.ceil(seconds / (overhead * step_s))))
