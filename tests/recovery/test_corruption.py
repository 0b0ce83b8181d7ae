"""A bit that flips in one replica is found, with the rank where most agree, and never where nothing has."""

from pathlib import Path

import pytest
import torch
from engine import RECIPE, trainer, write_recipe
from pool import Pool

from megacore.recovery.corruption import Corrupted, outvoted
from megacore.training import image
from megacore.training import train as pretrain
from megacore.training.checksums import checksum
from megacore.training.replicas import compare_replicas
from megacore.training.resume import remarks
from megacore.training.trainer import Trainer


def flip(made: Trainer, named: int) -> str:
    """Flip the lowest bit of an element of the image -> the name of its tensor."""
    name, each = list(image.named(made))[named]
    bits = each[...].view(-1).view(torch.int64 if each.dtype == torch.float64 else torch.int16)
    bits[len(bits) // 2] ^= 1
    return name


def compared(
    recipe: str, overrides: list[str], world: int, flipped: int | None, rank: int
) -> tuple[bool, str, list[str]]:
    """(Whether it compares, the tensor that was flipped on one rank after step 2, what it says after each step)."""
    made, said, names = trainer(recipe, overrides), list[str](), [""]
    compare_replicas(pretrain.check(recipe, overrides, world, world), made)
    compare, update = made.compare, made.update

    def noted() -> None:
        try:
            compare()
        except Corrupted as error:
            said.append(f"{error.rank}: {error}")

    def flips(step: int, *given: object) -> None:
        update(step, *given)  # type: ignore[arg-type]
        if step == 2 and made.mesh.rank == rank and flipped is not None:
            names[0] = flip(made, flipped)

    compares = getattr(compare, "func", None) is not None
    made.compare, made.update = noted, flips  # type: ignore[method-assign, assignment]
    made.run()
    return compares, names[0], said


def overrides(tmp_path: Path, *more: str) -> list[str]:
    return [f"out={tmp_path / 'run'}", "batch.global_size=6", "train.steps=3", "recovery.compare_every=2", *more]


@pytest.mark.parametrize("flipped", [0, 5])
def test_of_three_replicas_the_one_with_a_flipped_bit_is_outvoted(pool: Pool, tmp_path: Path, flipped: int) -> None:
    recipe = write_recipe(tmp_path, RECIPE)
    found = pool.run(3, compared, recipe, overrides(tmp_path, "mesh.dp=3"), 3, flipped, 1)
    name = found[1][1]
    assert name and found[0][2] == found[2][2] == []
    assert found[1][2] == [f"1: rank 1 differs from its replicas, ranks 0, 2, in {name} after step 2"]


def test_of_two_replicas_nobody_knows_which_is_right(pool: Pool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE)
    found = pool.run(2, compared, recipe, overrides(tmp_path, "mesh.dp=2"), 2, 3, 1)
    said = [f"None: ranks 0, 1 differ in {found[1][1]} after step 2, and nobody knows which is right"]
    assert found[0][2] == found[1][2] == said


@pytest.mark.parametrize("more", [["train.precision=bf16"], ["zero.shard=optimizer"], ["mesh.tp=2"]])
def test_what_nothing_befell_agrees_and_split_states_are_not_compared(
    pool: Pool, tmp_path: Path, more: list[str]
) -> None:
    recipe = write_recipe(tmp_path, RECIPE)
    world = 4 if "mesh.tp=2" in more else 2
    found = pool.run(
        world, compared, recipe, overrides(tmp_path, "mesh.dp=2", "batch.global_size=4", *more), world, None, 0
    )
    assert all(each == (more[0] != "zero.shard=optimizer", "", []) for each in found)


def test_the_start_says_where_nothing_is_compared(tmp_path: Path) -> None:
    def said(world: int, *more: str) -> list[str]:
        given = [f"out={tmp_path / 'run'}", "recovery.compare_every=7", *more]
        setup = pretrain.check(write_recipe(tmp_path, RECIPE), given, world, world)
        return remarks(setup.start, setup.config, setup.model, setup.config.mesh.shape(world))

    text = "recovery.compare_every (7) compares nothing: no rank holds the same states as another"
    assert said(2, "mesh.dp=2", "zero.shard=optimizer") == [f"{text} (mesh.dp=2, zero.shard=optimizer)"]
    assert said(2, "mesh.tp=2") == [f"{text} (mesh.dp=1)"]
    assert said(4, "mesh.dp=4", "zero.shard=optimizer", "zero.replicas=2") == said(2, "mesh.dp=2") == said(1) == []
    assert said(2, "mesh.tp=2", "recovery.compare_every=0") == []


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
