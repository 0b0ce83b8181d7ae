"""A bit that flips in one replica is found, with the rank where most agree, and never where nothing has."""

from pathlib import Path

import pytest
import torch
from engine import trainer
from pool import Pool

from megacore.corruption import Corrupted, outvoted
from megacore.training.callbacks.replicas import checksum, held_tensors
from megacore.training.step import Stats
from megacore.training.trainer import Callback, Trainer

QUIET = ["checkpoint.every=0", "evaluate.every=0"]


class Flip(Callback):
    """Flips the lowest bit of an element of a tensor on one rank, after a step."""

    def __init__(self, rank: int, number: int, step: int) -> None:
        self._at, self._number, self.name = (rank, step), number, ""

    def on_step(self, run: Trainer, stats: Stats) -> None:
        if (run.mesh.rank, run.step) == self._at:
            _, self.name, each = list(held_tensors(run))[self._number]
            bits = each[...].view(-1).view(torch.int64 if each.dtype == torch.float64 else torch.int16)
            bits[len(bits) // 2] ^= 1


def compared(recipe: str, overrides: list[str], flipped: int | None, rank: int, step: int = 2) -> tuple[str, str, int]:
    """(The tensor that was flipped on one rank after a step, what this one says, its last step)."""
    flip = Flip(rank, flipped or 0, step)
    made = trainer(recipe, overrides, callbacks=[flip] if flipped is not None else [])
    try:
        made.fit()
    except Corrupted as error:
        return flip.name, f"{error.rank}: {error}", made.step
    return flip.name, "", made.step


def overrides(tmp_path: Path, *more: str) -> list[str]:
    given = [f"out={tmp_path / 'run'}", "batch.global_size=6", "train.steps=3", *QUIET]
    return [*given, "recovery.compare_every=2", "recovery.checksums=0", *more]


OUTVOTED = "1: rank 1 differs from ranks 0, 2, which hold the same, in {} after step 2"
UNKNOWN = "None: ranks 0-1 differ in {} after step 2, and nobody knows which is right"


@pytest.mark.parametrize(
    ("replicas", "flipped", "said"), [(3, 0, OUTVOTED), (3, 5, OUTVOTED), (2, 3, UNKNOWN)], ids=["3-0", "3-5", "2"]
)
def test_of_three_replicas_the_one_with_a_flipped_bit_is_outvoted_and_of_two_nobody_knows(
    pool: Pool, recipe: str, tmp_path: Path, replicas: int, flipped: int, said: str
) -> None:
    found = pool.run(replicas, compared, recipe, overrides(tmp_path, f"mesh.dp={replicas}"), flipped, 1)
    assert found[1][0] and [each[1:] for each in found] == [(said.format(found[1][0]), 2)] * replicas


def test_what_is_kept_is_compared_before(pool: Pool, recipe: str, tmp_path: Path) -> None:
    """After the last step, which is none of the interval."""
    given = overrides(tmp_path, "mesh.dp=2", "checkpoint.at_end=true")
    found = pool.run(2, compared, recipe, given, 3, 1, 3)
    assert all("after step 3" in said for _, said, _ in found) and not (tmp_path / "run/checkpoints").exists()


def test_a_checksum_tells_one_bit_wherever_it_lies() -> None:
    for dtype, numel in ((torch.float64, 3000), (torch.bfloat16, 4099), (torch.bool, 100), (torch.float32, 1)):
        tensor = (torch.arange(numel + 1) % 7).to(dtype)[1:]
        before = int(checksum(tensor))
        assert before == int(checksum(tensor.clone()))
        for at in {0, numel // 2, numel - 1}:
            other = tensor.clone()
            other[at] = not other[at] if dtype == torch.bool else other[at] + 1
            assert int(checksum(other)) != before


def test_most_must_be_more_than_half() -> None:
    assert outvoted({0: "a", 1: "b", 2: "a"}) == [1]
    assert outvoted({0: "a", 1: "b"}) is None
    assert outvoted({0: "a", 1: "b", 2: "a", 3: "b"}) is None
    assert outvoted({0: "a", 1: "b", 2: "a", 3: "a", 4: "c"}) == [1, 4]
