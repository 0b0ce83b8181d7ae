"""Bits that flip in memory between two steps are found on every layout, whatever they are a part of: what replicas hold
by comparison, what one rank alone holds by its checksum."""

import random
from typing import Any

import pytest
import torch
from engine import GPT2, trainer
from pool import Pool

from megacore.corruption import Corrupted
from megacore.training.callbacks.replicas import held_tensors
from megacore.training.trainer import Callback, Trainer

RECIPE_CHANGES = {"model": GPT2 | {"tie_word_embeddings": True}}
ALL_WATCHED = ["recovery.checksums=0.99", "recovery.compare_every=2", "evaluate.every=0", "train.steps=6"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "dp": (2, []),
    "dp3": (3, ["batch.global_size=6"]),
    "tp": (2, ["mesh.tp=2"]),
    "pp tied": (2, ["mesh.pp=2"]),
    "cp": (2, ["mesh.cp=2", "batch.micro_size=1"]),
    "tp pp": (4, ["mesh.tp=2", "mesh.pp=2"]),
    "zero 1": (2, ["zero.shard=optimizer"]),
    "zero 2": (2, ["zero.shard=gradients"]),
    "zero 3": (2, ["zero.shard=parameters"]),
    "hsdp": (4, ["zero.shard=optimizer", "zero.replicas=2"]),
}


class Flip(Callback):
    """Flips a bit of something that a rank holds, drawn by a seed, before a step."""

    def __init__(self, seed: int, world: int) -> None:
        draw = random.Random(seed)
        self.rank, self.step, self.draw = draw.randrange(world), draw.randrange(2, 5), draw
        self.flipped = ""

    def on_step_begin(self, run: Trainer) -> None:
        if (run.step, run.mesh.rank) == (self.step, self.rank):
            tensors = [(n, each) for _, n, each in held_tensors(run) if isinstance(each, torch.Tensor) and each.numel()]
            name, tensor = self.draw.choice(tensors)
            flat = tensor.view(torch.uint8).view(-1) if tensor.is_contiguous() else None
            if flat is None:
                tensor.view(-1)[:1].mul_(1 + 2**-40)
            else:
                flat[self.draw.randrange(len(flat))] ^= 1 << self.draw.randrange(8)
            self.flipped = name


def flip(recipe: str, overrides: list[str], seed: int) -> tuple[str, str, int]:
    """(what was flipped here, what was said, the step after which it was)."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    fault = Flip(seed, world)
    made = trainer(recipe, [*ALL_WATCHED, *overrides], callbacks=[fault])
    try:
        made.fit()
    except Corrupted as error:
        return fault.flipped, str(error), made.step
    return fault.flipped, "", made.step


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 1 else pytest.mark.grid) for n in range(10)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_is_found(pool: Pool, recipe: str, layout: str, seed: int) -> None:
    world, overrides = LAYOUTS[layout]
    found: list[Any] = pool.run(world, flip, recipe, overrides, seed)
    (flipped,) = [name for name, _, _ in found if name]
    said = {text for _, text, _ in found if text}
    assert said, f"{flipped} was flipped, and nobody said a word"
    assert any(flipped in text or "differ" in text for text in said), (flipped, said)
    assert all(step <= 6 for _, text, step in found if text)


@pytest.mark.in_turn(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_found_where_nothing_flips(pool: Pool, recipe: str, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    assert pool.run(world, calm, recipe, overrides) == [6] * world


def calm(recipe: str, overrides: list[str]) -> int:
    return trainer(recipe, [*ALL_WATCHED, *overrides]).fit()
