"""Messages between the ranks of a run, between steps and in host memory: they must not wait for a device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megacore.parallel.mesh import Group, Mesh
from megacore.rank_hierarchy import NODE, by_level
from megacore.store.io.strict_json import StoreError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Control:
    """All ranks of a mesh; each call is made by all of them. ``levels``: groups for host tensors, of this rank's node,
    of the first ranks of nodes where it is one, and so on; ``depth``: the number of all levels, in which rank 0 is. One
    process has none."""

    mesh: Mesh
    levels: tuple[Group, ...]
    depth: int

    @classmethod
    def create(cls, mesh: Mesh, node: int = NODE) -> Control:
        """Create the groups of all levels; every rank calls this. ``node`` successive ranks share a machine."""
        if mesh.shape.world == 1:
            return cls(mesh, (), 0)
        if mesh.shape.world <= node and mesh.device.type == "cpu":
            return cls(mesh, (mesh.world,), 1)
        groups = [(mesh.host_group(sets), sets) for sets in by_level(mesh.shape.world, node)]
        own = tuple(group for group, sets in groups if any(mesh.rank in ranks for ranks in sets))
        return cls(mesh, own, len(groups))

    def largest(self, *here: float) -> list[float]:
        """Return the largest of each number that any rank gives."""
        said = torch.tensor(here, dtype=torch.float64)
        for level, group in enumerate(self.levels, start=1):
            if level == self.depth:
                dist.all_reduce(said, dist.ReduceOp.MAX, group=group.process_group)
            else:
                dist.reduce(said, group.ranks[0], dist.ReduceOp.MAX, group=group.process_group)
        for group in reversed(self.levels[: self.depth - 1]):
            dist.broadcast(said, group.ranks[0], group=group.process_group)
        return said.tolist()

    def gather(self, here: object) -> list[Any]:
        """Return the values of all ranks, in their order, on rank 0; nothing on the others. They travel as JSON."""
        values = [here]
        for group in self.levels:
            values = _gathered(values, group)
        return values if self.mesh.rank == 0 else []

    def tell(self, here: object) -> Any:
        """Return the value of rank 0 on all ranks. It travels as JSON."""
        if not self.levels:
            return here
        data = torch.frombuffer(bytearray(json.dumps(here).encode()), dtype=torch.uint8)
        for group in reversed(self.levels):
            size = torch.tensor(len(data))
            dist.broadcast(size, group.ranks[0], group=group.process_group)
            if group.index:
                data = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(data, group.ranks[0], group=group.process_group)
        return json.loads(data.numpy().tobytes())

    def exchange(self, here: object) -> list[Any]:
        """Return the values of all ranks, in their order, on all of them; for little, and seldom. They travel as
        JSON."""
        return self.tell(self.gather(here))

    def attempt(self, make: Callable[[], Made]) -> Made:
        """Make something on each rank, or on none: ranks that go on would wait for one that does not. Raises
        StoreError: ranks have raised it; what they say, on all of them. An error that nobody has foreseen is raised as
        it is where it came up, and as a RuntimeError on the others: all end as by a fault, not as by a refusal."""
        if not self.levels:
            return make()
        made, problem, unforeseen = list[Made](), None, None
        try:
            made.append(make())
        except StoreError as error:
            problem = str(error)
        except Exception as error:
            problem, unforeseen = f"{type(error).__name__}: {error}", error
        failed, crashed = self.largest(problem is not None, unforeseen is not None)
        if failed:
            problems = self.exchange(problem)
            if unforeseen:
                raise unforeseen
            said = {reason: self.who(rank) for rank, reason in enumerate(problems) if reason is not None}
            text = "\n".join(f"{who}: {reason}" for reason, who in said.items())
            raise RuntimeError(text) if crashed else StoreError(text)
        return made[0]

    def who(self, rank: int) -> str:
        return f"rank {rank} ({self.mesh.shape.place(rank)})"


def _gathered(values: list[Any], group: Group) -> list[Any]:
    """Return the values of all ranks of a group on its first one."""
    data = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.index] = len(data)
    dist.all_reduce(sizes, group=group.process_group)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(data)] = data
    received = None if group.index else [torch.empty_like(padded) for _ in group.ranks]
    dist.gather(padded, received, dst=group.ranks[0], group=group.process_group)
    read = (
        json.loads(each[:size].numpy().tobytes()) for each, size in zip(received or (), sizes.tolist(), strict=False)
    )
    return [each for part in read for each in part]
