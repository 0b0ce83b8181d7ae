"""The live mesh: this process's place in a :class:`~parallel.weights.layout.MeshShape`, its device and its groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from megacore.parallel.baton import Baton
from megacore.parallel.rank_sets import Rounds, channel_kinds, of_mesh, parts_of_dp
from megacore.parallel.recorder import IDLE, Recorder
from megacore.parallel.weights.layout import Coordinates, MeshShape, split_axis

Direction = Literal["forward", "backward"]
FORWARD: Literal["forward"] = "forward"
BACKWARD: Literal["backward"] = "backward"
STEP: dict[Direction, int] = {FORWARD: 1, BACKWARD: -1}
"""The direction of a channel: from the stage that sends to the one that receives."""

TIMEOUT = timedelta(minutes=10)
"""The time that one rank waits for another, where nobody says otherwise."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate.

    Args:
        ranks: Global ranks in ascending order.
        index: Position of this process among them.
        process_group: torch's group; None for a group of one, whose collectives are the identity.
        pairwise: Whether messages between pairs are faster than the backend's own gather and scatter (gloo).
        recorder: Is told of waits for messages.
        baton: That of the rank's two computations; None for a group of one, which waits for nobody.
    """

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None
    pairwise: bool = False
    recorder: Recorder = field(default=IDLE, compare=False, repr=False)
    baton: Baton | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The name by which torch's functional collectives find the process group."""
        assert self.process_group is not None  # what is the identity needs none
        return self.process_group.group_name

    @classmethod
    def named(cls, name: str) -> Group:
        """Return the group of a name, for operators, which take no groups."""
        find: Any = dist.distributed_c10d._resolve_process_group  # of a str in torch 2.11, of a type of its own later
        found = find(name)
        pairwise = dist.get_backend(found) == "gloo"
        return cls(tuple(dist.get_process_group_ranks(found)), dist.get_rank(found), found, pairwise)


ALONE = Group((0,), 0, None)


def urgent(timeout: timedelta) -> Any:
    """Return the options of a process group of NCCL: its kernels run on a stream of high priority.

    They take few of the device's units. But behind a product that fills the device they would wait for some, and who
    waits for the message would wait for the product.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns where it is not that of the group
    return options


@dataclass
class Mesh:
    """The place of this process in the mesh, and the groups that it talks in. Passed explicitly; made once by
    :meth:`create`."""

    shape: MeshShape
    rank: int
    device: torch.device
    timeout: timedelta = TIMEOUT
    _rounds: Rounds = field(default_factory=Rounds, init=False)
    _groups: dict[tuple[int, ...], Group] = field(default_factory=dict, init=False)
    _channels: dict[tuple[str, int], Group] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.device)
        self.baton = Baton(self.device, self.recorder)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Mesh:
        """Return a mesh of one process; needs no process group."""
        return cls(MeshShape(), 0, torch.device(device))

    @classmethod
    def create(cls, shape: MeshShape, device: torch.device | str = "cpu", timeout: timedelta = TIMEOUT) -> Mesh:
        """Create the mesh over all processes of ``torch.distributed``, which must be initialised unless the world is
        one.

        Args:
            shape: Its sizes.
            device: The device of this process.
            timeout: The time that one rank waits for another in the groups that are made; not in the world, which is
                there.

        Raises:
            ValueError: the number of processes is not the mesh's.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        if shape.world != world:
            sizes = " x ".join(f"{dim}={shape[dim]}" for dim in shape.DIMS)
            raise ValueError(f"the mesh {sizes} needs {shape.world} processes, but {world} run")
        mesh = cls(shape, dist.get_rank() if dist.is_initialized() else 0, torch.device(device), timeout)
        for sets in of_mesh(shape):
            mesh.make_groups(sets)
        mesh._make_channels()
        return mesh

    def part(self, replicas: int) -> Mesh:
        """Return this rank's part of the mesh, one of so many successive parts of dp, as a mesh of its own: its ranks
        count from 0. Every rank of the world calls this.

        Raises:
            ValueError: the parts would not be alike.
        """
        return self if replicas == 1 else MeshPart(self, replicas)

    def global_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers that ranks of this mesh have in the world."""
        return tuple(ranks)

    @property
    def place(self) -> Coordinates:
        return self.shape.place(self.rank)

    @property
    def tp(self) -> Group:
        return self.along("tp")

    def rows(self, vocab: int) -> tuple[int, int]:
        """Return the first row that this rank holds of a table, which is split over tp, and the one after its last."""
        return split_axis("vocab", vocab, self.shape.tp, self.place.tp)

    @property
    def cp(self) -> Group:
        return self.along("cp")

    @property
    def batch(self) -> Group:
        """The ranks among which the tokens of a step are divided: dp x ep x cp."""
        return self.along("dp", "ep", "cp")

    @property
    def data_rank(self) -> int:
        """The number of the part, of ``shape.data`` ones, that this rank reads of each batch of sequences."""
        return self.place.dp * self.shape.ep + self.place.ep

    @property
    def world(self) -> Group:
        return self.along(*self.shape.DIMS)

    def along(self, *dims: str) -> Group:
        """Return the group of this rank along some dimensions."""
        return self.group(self.shape.along(self.rank, *dims))

    def group(self, ranks: tuple[int, ...]) -> Group:
        """Return the group of some ranks, which :meth:`make_groups` has made before (groups of one always exist)."""
        if ranks == (self.rank,):
            return Group(ranks, 0, None)
        return self._groups[ranks]

    def make_groups(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        """Make the groups of several rank sets at once; every rank of the world calls this with the same sets.

        Each is used once before this returns, so that its members connect now rather than in the middle of a step.
        """
        made = []
        for disjoint in self._rounds.new(rank_sets):
            group = self._make_own(disjoint)
            if group.size > 1:
                self._groups[group.ranks] = group
                made.append(group)
        # In the same order on all ranks, and after all are made: those that share no rank connect at the same time.
        for group in made:
            dist.all_reduce(torch.zeros(1, device=self.device), group=group.process_group)

    def channel(self, direction: str, source: int) -> Group:
        """Return the one-way channel that leaves pipeline stage ``source``: to the next stage (forward) or the one
        before.

        It is a queue which no other message can block: gloo has one for each pair of a group, and NCCL a communicator.
        """
        return self._channels[direction, source]

    def peer(self, stage: int) -> int:
        """Return the global rank of this place on another pipeline stage."""
        place = self.place
        return self.shape.rank(Coordinates(stage % self.shape.pp, place.dp, place.ep, place.cp, place.tp))

    def host_group(self, disjoint: Sequence[tuple[int, ...]]) -> Group:
        """Make groups for tensors in host memory, of sets that share no rank; every rank of the world calls this.

        Returns:
            The one of this rank; a group of itself, if it is in none.
        """
        ranks = self._own(disjoint)
        return self._of(ranks, self._new_group(ranks, "gloo"))

    def _make_own(self, disjoint: Sequence[tuple[int, ...]]) -> Group:
        """Make, of sets that share no rank, the one of this rank."""
        ranks = self._own(disjoint)
        return self._of(ranks, dist.group.WORLD if len(ranks) == self.shape.world else self._new_group(ranks))

    def _own(self, disjoint: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return next((each for each in disjoint if self.rank in each), (self.rank,))

    def _new_group(self, ranks: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
        """Make a group. A rank makes those that it is in, and no others: thousands of ranks make a handful each.

        torch names such a group by its ranks and by how many groups the process has, so all ranks must always have as
        many: one that is in none of several makes a group of itself.
        """
        nccl = backend is None and self.device.type == "cuda" and dist.get_backend() == "nccl"
        options = urgent(self.timeout) if nccl else None
        return dist.new_group(
            list(ranks), timeout=self.timeout, backend=backend, pg_options=options, use_local_synchronization=True
        )

    def _of(self, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> Group:
        return Group(ranks, ranks.index(self.rank), group, dist.get_backend(group) == "gloo", self.recorder, self.baton)

    def _make_channels(self) -> None:
        """Make the group of each direction of this rank's pipeline: in it, each pair has a queue of its own."""
        stages = self.shape.pp
        if stages == 1:
            return
        pipeline = self.shape.along(self.rank, "pp")
        directions: tuple[Direction, Direction] = (FORWARD, BACKWARD)
        kinds = channel_kinds(stages)
        groups = {(way, kind): self._new_group(pipeline) for way in directions for kind in range(kinds)}
        # NCCL connects a pair at its first message, and each host waits there for the other. In a step the two would
        # begin with different channels, and wait for ever.
        for source, direction in itertools.product(range(stages), directions):
            sender, receiver = pipeline[source], pipeline[(source + STEP[direction]) % stages]
            if self.rank not in (sender, receiver):
                continue
            channel = self._of(pipeline, groups[direction, source % kinds])
            self._channels[direction, source] = channel
            message = torch.zeros(1, device=self.device)
            if self.rank == sender:
                dist.send(message, receiver, group=channel.process_group)
            else:
                dist.recv(message, sender, group=channel.process_group)


class MeshPart(Mesh):
    """A part of a mesh (:meth:`Mesh.part`), whose groups are some of the whole's: they know their global ranks."""

    def __init__(self, whole: Mesh, replicas: int) -> None:
        self._parts = parts_of_dp(whole.shape, replicas)
        self._members = next(ranks for ranks in self._parts if whole.rank in ranks)
        shape = replace(whole.shape, dp=whole.shape.dp // replicas)
        super().__init__(shape, self._members.index(whole.rank), whole.device, whole.timeout)
        self._whole, self.recorder, self.baton = whole, whole.recorder, whole.baton
        for sets in of_mesh(shape):
            self.make_groups(sets)

    def global_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._members[rank] for rank in ranks)

    def group(self, ranks: tuple[int, ...]) -> Group:
        return self._whole.group(self.global_ranks(ranks))

    def make_groups(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        self._whole.make_groups(tuple(part[rank] for rank in ranks) for ranks in rank_sets for part in self._parts)

    def channel(self, direction: str, source: int) -> Group:
        return self._whole.channel(direction, source)

    def peer(self, stage: int) -> int:
        return self._whole.peer(stage)
