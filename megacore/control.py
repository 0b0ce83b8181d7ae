"""What the ranks of a run tell each other between steps, in host memory: it must not wait for a device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.store.strict_json import StoreError
from parallel.mesh import Mesh

Made = TypeVar("Made")


@dataclass(frozen=True)
class Control:
    """All ranks of a mesh; each call is made by all of them.

    Args:
        mesh: The mesh.
        group: All ranks, for host tensors; None for one process.
    """

    mesh: Mesh
    group: dist.ProcessGroup | None

    @classmethod
    def create(cls, mesh: Mesh) -> Control:
        if mesh.shape.world == 1:
            return cls(mesh, None)
        if mesh.device.type == "cpu":
            return cls(mesh, mesh.world.process_group)
        return cls(mesh, dist.new_group(timeout=mesh.timeout, backend="gloo"))

    def largest(self, *here: float) -> list[float]:
        """Of each number, the largest that any rank gives."""
        said = torch.tensor(here, dtype=torch.float64)
        if self.group is not None:
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group)
        values: list[float] = said.tolist()
        return values

    def gather(self, here: object) -> list[Any]:
        """What each rank gives, in their order, on rank 0; nothing on the others. It travels as JSON."""
        if self.group is None:
            return [here]
        mine, sizes = self._padded(here)
        first = self.mesh.rank == 0
        received = [torch.empty_like(mine) for _ in sizes] if first else None
        dist.gather(mine, received, dst=0, group=self.group)
        return _read(received, sizes) if received else []

    def exchange(self, here: object) -> list[Any]:
        """What each rank gives, in their order, on all of them; for little. It travels as JSON."""
        if self.group is None:
            return [here]
        mine, sizes = self._padded(here)
        received = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(received, mine, group=self.group)
        return _read(received, sizes)

    def attempt(self, make: Callable[[], Made]) -> Made:
        """What each rank makes for itself, or nobody: ranks that go on would wait for one that does not.

        Raises:
            StoreError: ranks have raised it; what they say, on all of them.
        """
        if self.group is None:
            return make()
        made, problem = list[Made](), None
        try:
            made.append(make())
        except StoreError as error:
            problem = str(error)
        said = {reason: self.who(rank) for rank, reason in enumerate(self.exchange(problem)) if reason is not None}
        if said:
            raise StoreError("\n".join(f"{who}: {reason}" for reason, who in said.items()))
        return made[0]

    def who(self, rank: int) -> str:
        return f"rank {rank} ({self.mesh.shape.place(rank)})"

    def _padded(self, here: object) -> tuple[Tensor, list[int]]:
        """(this rank's bytes, as many as the longest has; how many are each rank's)."""
        data = torch.frombuffer(bytearray(json.dumps(here).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.mesh.shape.world, dtype=torch.int64)
        sizes[self.mesh.rank] = len(data)
        dist.all_reduce(sizes, group=self.group)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(data)] = data
        return padded, sizes.tolist()


def _read(received: list[Tensor], sizes: list[int]) -> list[Any]:
    return [json.loads(data[:size].numpy().tobytes()) for data, size in zip(received, sizes, strict=True)]
