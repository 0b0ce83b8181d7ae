"""Recipes drawn whole: whatever is accepted trains to the numbers of one plain process, and goes on from a checkpoint
on another layout."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import get_args

import numpy as np
import pytest
from engine import LENGTH, RECIPE, VOCAB, assert_near, path_of, stopped, train, whole, write_recipe
from families import drawn
from pool import Pool
from turns import TURN

from megacore.models.registry import FAMILIES
from megacore.parallel.enum_errors import PipelineSchedule
from megacore.recipe import ConfigError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.training.check import check

Options = Mapping[str, Sequence[object]]

MEANING: Options = {
    "data.within_documents": ["false", "true"],
    "loss.label_smoothing": [0, 0, 0.1],
    "loss.z_loss": [0, 0, 0.01],
    "batch.global_size": [4, 6, 8, 12],
    "batch.ramp": ["null", "null", "null", "[2,2,12]"],
    "optimizer.name": ["adamw", "adamw", "muon"],
    "optimizer.clip": [1, 1, "null"],
    "ema.decay": ["null", "null", 0.9],
    "lora": ["null", "null", "null", "{rank: 2}"],
    "train.freeze": ["[]", "[]", "[]", "[embed]", "[layers.1]", "['*norm']", "[attn.qkv]"],
    "experts.sequence_balance": [0, 0, 0.1],
    "experts.z_loss": [0, 0, 0.01],
    "recovery.skip_samples": ["[]", "[]", "[5-9]"],
}
"""What numbers depend on. Each option is drawn by itself, whether it goes with the others or not."""
WAY: Options = {
    "mesh.pp": [1, 1, 2, 4],
    "mesh.cp": [1, 1, 2],
    "mesh.ep": [1, 1, 2],
    "mesh.tp": [1, 1, 2, 4],
    "mesh.etp": [1, 1, 1, 2],
    "batch.micro_size": [1, 1, 2],
    "pipeline.schedule": ["1f1b", *get_args(PipelineSchedule)],
    "pipeline.chunks": [1, 1, 2],
    "zero.shard": ["none", "optimizer", "gradients", "parameters"],
    "zero.replicas": [1, 1, 1, 2],
    "memory.recompute": ["none", "none", "selective", "full", "[selective,none]", "[full,none,selective,none]"],
    "memory.offload_activations": ["false", "false", "true", "[false,true]"],
    "memory.loss_chunk": ["null", "null", 3],
    "memory.mlp_chunk": ["null", "null", 3],
    "memory.offload_optimizer": ["none", "none", "host"],
    "memory.offload_parameters": ["false", "false", "false", "true"],
    "context.exchange": ["auto", "ring", "gather", "heads"],
    "context.balance": ["auto", "rows", "documents"],
    "recovery.compare_every": [0, 1],
    "recovery.recompute_every": [0, 0, 2],
    "checkpoint.background": ["true", "false"],
}
"""What they do not depend on."""
STEPS, STOP = 4, 2
COMMON = [f"train.steps={STEPS}", "evaluate.every=1", "checkpoint.at_end=true"]


def overrides(random: Random, options: Options) -> list[str]:
    return [f"{key}={random.choice(values)}" for key, values in options.items()]


def accepted(recipe: str, given: Sequence[str], world: int) -> bool:
    try:
        check(recipe, given, world, world)
    except ConfigError:
        return False
    return True


def drawn_run(random: Random, folder: Path) -> tuple[str, list[str], list[tuple[int, list[str]]]]:
    """A recipe that is accepted -> (its file, what it means, two ways to train it and the ranks of each)."""
    section = drawn(random.choice(list(FAMILIES)), random.randrange(2**20), layers=4, vocab=VOCAB, positions=LENGTH)
    recipe, out = write_recipe(folder, RECIPE | {"model": section}), f"out={folder / 'out'}"
    meaning = next(
        given for _ in range(1000) if accepted(recipe, [out, *(given := [*COMMON, *overrides(random, MEANING)])], 1)
    )
    ways = list[tuple[int, list[str]]]()
    while len(ways) < 2:
        world, way = random.choice([2, 4, 4, 8]), overrides(random, WAY)
        if accepted(recipe, [out, *meaning, *way], world):
            ways.append((world, way))
    return recipe, meaning, ways


@pytest.mark.in_turn(40)
@pytest.mark.parametrize("seed", range(40))
def test_a_recipe_trains_as_in_one_process(pool: Pool, tmp_path: Path, seed: int) -> None:
    recipe, meaning, ((first, before), (second, after)) = drawn_run(Random(1000 * TURN + seed), tmp_path)
    one = train(recipe, [f"out={tmp_path / 'one'}", *meaning])
    many = [f"out={tmp_path / 'many'}", *meaning]
    pool.run(first, stopped, recipe, [*many, *before], STOP)
    found = pool.run(second, train, recipe, [*many, *after, "checkpoint.resume=auto"])[0]
    said = f"{recipe}: {meaning}, {first} ranks: {before}, {second} ranks: {after}"
    for key in ("loss", "grad_norm", "validation_loss"):
        length = len(found.values(key))
        assert length > 1, said
        np.testing.assert_allclose(found.values(key), one.values(key)[-length:], rtol=1e-9, err_msg=said)
    expected, reached = path_of(tmp_path / "one", STEPS), path_of(tmp_path / "many", STEPS)
    for state in Checkpoint.open(expected).states:
        assert_near(whole(reached, state), whole(expected, state), 1e-8)
