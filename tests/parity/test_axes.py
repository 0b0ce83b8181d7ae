"""Every axis of a mesh meets every feature of a run: the numbers are those of one process. A new axis, or feature, is a
line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import torch
from engine import LLAMA, RECIPE, trainer, write_recipe
from pool import Pool
from torch import Tensor

from megacore import checkpoints

AXES: Mapping[str, Sequence[str]] = {
    "pp": ["mesh.pp=2"],
    "dp": ["zero.shard=gradients"],
    "ep": ["mesh.ep=2"],
    "cp": ["mesh.cp=2", "batch.micro_size=1"],  # else each rank has whole sequences
    "tp": ["mesh.tp=2"],
}
COMMON = [
    "train.steps=4",
    "evaluate.every=2",
    "checkpoint.every=2",
    "checkpoint.at_end=true",
    "log.every=1",
    "batch.micro_size=2",
]
ADAPTERS = ["lora.rank=2", "lora.alpha=8", "lora.targets=[attn]"]
FEATURES: Mapping[str, Sequence[str]] = {
    "evaluation": [],
    "balance of sequences": ["experts.sequence_balance=0.1", "experts.z_loss=0.01", "experts.bias_rate=0.0"],
    "balance of the batch": ["experts.batch_balance=0.1", "pipeline.schedule=gpipe"],
    "adapters": ADAPTERS,
    "samples left out": ["recovery.skip_samples=[[3,9],[20,21]]"],
    "recomputation": ["memory.recompute=full"],
}
MODEL = LLAMA | {
    "family": "mixtral",
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
}
COMPARED = ("loss", "grad_norm", "validation_loss", "balance", "router_z_loss", "load_max", "tokens")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_recipe(tmp_path_factory.mktemp("axes"), RECIPE | {"model": MODEL})


@pytest.fixture(scope="module")
def alone(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """{feature: the records of one process}, filled as they are asked for; and the model that adapters are for."""
    out = tmp_path_factory.mktemp("base")
    engine.train(recipe, [f"out={out / 'run'}", *COMMON])
    return {"base": [{"path": str(checkpoints.newest_of(out / "run"))}]}


def given(feature: str, alone: dict[str, list[dict[str, Any]]]) -> list[str]:
    adapts = any(each in ADAPTERS for each in FEATURES[feature])
    init = [f"checkpoint.init={alone['base'][0]['path']}"] if adapts else []
    return [*COMMON, *FEATURES[feature], *init]


def records_of_one(
    feature: str, recipe: str, alone: dict[str, list[dict[str, Any]]], out: Path
) -> list[dict[str, Any]]:
    if feature not in alone:
        alone[feature] = engine.train(recipe, [f"out={out / 'one'}", *given(feature, alone)]).records
    return alone[feature]


def same(found: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> None:
    assert [each["step"] for each in found] == [each["step"] for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        keys = [key for key in COMPARED if key in other]
        assert keys == [key for key in COMPARED if key in one]
        mine, theirs = ([each[key] for key in keys] for each in (one, other))
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, err_msg=str(keys))


@pytest.mark.in_turn(15)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("axis", AXES)
def test_an_axis_meets_a_feature(
    pool: Pool, recipe: str, alone: dict[str, list[dict[str, Any]]], tmp_path: Path, axis: str, feature: str
) -> None:
    wanted = records_of_one(feature, recipe, alone, tmp_path)
    ranks = pool.run(2, engine.train, recipe, [f"out={tmp_path / 'run'}", *given(feature, alone), *AXES[axis]])
    same(ranks[0].records, wanted)


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("axis", AXES)
def test_a_run_goes_on_along_an_axis(
    pool: Pool, recipe: str, alone: dict[str, list[dict[str, Any]]], tmp_path: Path, axis: str
) -> None:
    """It was saved by one process."""
    wanted, out = records_of_one("evaluation", recipe, alone, tmp_path), tmp_path / "run"
    half = Path(alone["base"][0]["path"]).with_name("step-00000002")
    going_on = [f"out={out}", *COMMON, *AXES[axis], f"checkpoint.resume={half}"]
    ranks = pool.run(2, engine.train, recipe, going_on)
    same(ranks[0].records, [each for each in wanted if each["step"] > 2])


def masks(recipe: str, overrides: list[str]) -> list[tuple[bool, ...]]:
    """The first 64 elements of each mask that this rank draws in a step."""
    made, drawn, plain = trainer(recipe, overrides), list[tuple[bool, ...]](), torch.nn.functional.dropout

    def dropout(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        kept = plain(torch.ones_like(x), *arguments, **keywords)
        if not kept.all():
            drawn.append(tuple(kept.flatten()[:64].bool().tolist()))
        return x * kept

    with mock.patch.object(torch.nn.functional, "dropout", dropout):
        made.train_step.backward(made.upload(made.batches.microbatches(0), 0))
    return drawn


@pytest.mark.parametrize("axis", AXES)
def test_no_two_ranks_of_an_axis_draw_a_mask(
    pool: Pool, recipe: str, alone: dict[str, list[dict[str, Any]]], axis: str
) -> None:
    base = [f"checkpoint.init={alone['base'][0]['path']}", "lora.dropout=0.5"]
    one, other = pool.run(2, masks, recipe, [*COMMON, *ADAPTERS, *base, *AXES[axis]])
    assert len(one) > 4 and len(other) > 4
    assert not set(one) & set(other)
