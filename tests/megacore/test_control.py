"""What ranks tell each other: where one of them cannot go on, all of them know, and why."""

from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacore import rank_hierarchy as levels
from megacore.control import Control
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.rank import outcome_of
from megacore.store.io.strict_json import StoreError


def attempted(failing: list[int], kind: type[Exception] = StoreError) -> int | str:
    """What one rank makes, or what it is told; a rank that failed on its own would leave the others waiting."""
    mesh = Mesh.create(MeshShape(dp=3))

    def make() -> int:
        if mesh.rank in failing:
            raise kind(f"disk {mesh.rank} is broken")
        return 10 * mesh.rank

    try:
        return Control.create(mesh).attempt(make)
    except (StoreError, RuntimeError, KeyError) as error:
        # Their agent looks for the rank at fault among those that have not just lost another.
        assert outcome_of(error).kind == ("lost_contact" if isinstance(error, RuntimeError) else "raised")
        return f"{type(error).__name__}: {error}"


def test_all_make_it_or_none_does(pool: Pool) -> None:
    assert pool.run(3, attempted, []) == [0, 10, 20]
    (said,) = {*pool.run(3, attempted, [1])}
    assert said.startswith("StoreError: rank 1 (") and said.endswith("): disk 1 is broken")
    (said,) = {*pool.run(3, attempted, [0, 2])}
    assert [line.split("): ")[1] for line in said.splitlines()] == ["disk 0 is broken", "disk 2 is broken"]
    # What nobody has foreseen is told as it is by the rank that has met it, and ends the others as a fault too.
    said, own, other = pool.run(3, attempted, [1], KeyError)
    assert own == "KeyError: 'disk 1 is broken'" and said == other
    assert said.startswith("RuntimeError: rank 1 (") and said.endswith("): KeyError: 'disk 1 is broken'")


def talked(node: int, fan_out: int) -> tuple[list[Any], int]:
    """(what one rank is told by each way of talking, the sockets that its groups take)."""
    with patch.object(levels, "FAN_OUT", fan_out):
        mesh = Mesh.create(MeshShape(dp=dist.get_world_size()))
        made = Control.create(mesh, node)
    rank = mesh.rank
    mine = {"rank": rank, "text": "x" * (rank * rank)}
    told = [
        made.largest(rank % 5, -rank),
        made.gather(mine),
        made.tell([rank, None, "ä"]),
        made.exchange([rank] if rank % 2 else None),
    ]
    return told, sum(group.size - 1 for group in made.levels)


@pytest.mark.parametrize(
    ("world", "node", "fan_out", "sockets"),
    [(8, 8, 16, 7), (8, 2, 16, 4), (8, 2, 2, 3), (7, 3, 2, 4), (5, 2, 2, 3), (3, 1, 2, 2)],
)
def test_all_are_told_the_same_over_any_number_of_levels(
    pool: Pool, world: int, node: int, fan_out: int, sockets: int
) -> None:
    every = [{"rank": rank, "text": "x" * (rank * rank)} for rank in range(world)]
    found = pool.run(world, talked, node, fan_out)
    for rank, (told, _) in enumerate(found):
        assert told == [
            [min(world - 1, 4), 0],
            every if rank == 0 else [],
            [0, None, "ä"],
            [[each] if each % 2 else None for each in range(world)],
        ]
    assert max(taken for _, taken in found) == sockets


def test_nobody_talks_to_everybody() -> None:
    """With 16,384 ranks a group of all would take a socket for each in each, and pass a number around 16,384 times."""
    world = 16384
    for rank in (0, 1, 8, 128, world - 1):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = Mesh(MeshShape(dp=world), rank, torch.device("cpu"))
            with patch.object(dist, "new_group", lambda ranks, **_: dist.group.WORLD):
                made = Control.create(mesh)
        finally:
            dist.destroy_process_group()
        assert made.depth == 4 and all(group.index == 0 for group in made.levels[:-1])
        assert sum(group.size - 1 for group in made.levels) <= 7 + 15 + 15 + 7


def test_one_process_says_it_plainly() -> None:
    with pytest.raises(StoreError, match=r"^the disk is broken$"):
        Control.create(Mesh.single()).attempt(mock.Mock(side_effect=StoreError("the disk is broken")))
