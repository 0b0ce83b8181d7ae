"""What ranks tell each other: where one of them cannot go on, all of them know, and why."""

from __future__ import annotations

import pytest
from pool import Pool

from megacore.control import Control
from megacore.store.strict_json import StoreError
from parallel.layout import MeshShape
from parallel.mesh import Mesh


def attempted(failing: list[int]) -> int | str:
    """What one rank makes, or what it is told; a rank that failed on its own would leave the others waiting."""
    mesh = Mesh.create(MeshShape(dp=3))

    def make() -> int:
        if mesh.rank in failing:
            raise StoreError(f"disk {mesh.rank} is broken")
        return 10 * mesh.rank

    try:
        return Control.create(mesh).attempt(make)
    except StoreError as error:
        return str(error)


def test_all_make_it_or_none_does(pool: Pool) -> None:
    assert pool.run(3, attempted, []) == [0, 10, 20]
    (said,) = {*pool.run(3, attempted, [1])}
    assert said.startswith("rank 1 (") and said.endswith("): disk 1 is broken")
    (said,) = {*pool.run(3, attempted, [0, 2])}
    assert [line.split(": ")[1] for line in said.splitlines()] == ["disk 0 is broken", "disk 2 is broken"]


def test_one_process_says_it_plainly() -> None:
    def fail() -> None:
        raise StoreError("the disk is broken")

    with pytest.raises(StoreError, match=r"^the disk is broken$"):
        Control.create(Mesh.single()).attempt(fail)
