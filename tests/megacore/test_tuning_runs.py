"""Runs that train adapters or a part of the weights: what their checkpoints hold, and how they go on."""

import json
from pathlib import Path

import engine
import numpy as np
import pytest
from engine import Result, path_of, same, train, write_recipe
from pool import Pool

from megacore.parallel.weights.layout import MeshShape
from megacore.recipe import ConfigError
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.training.check import check
from megacore.training.resume import remarks

LORA = ["lora.rank=2", "lora.alpha=8", "lora.targets=[q_proj,attn.qkv.v,mlp]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, not_durable: None) -> Path:
    """A recipe, and a model that a run of it has left: ``base``."""
    folder = tmp_path_factory.mktemp("tuning")
    recipe = write_recipe(folder)
    steps = ["train.steps=2", "schedule.warmup_steps=0", "evaluate.every=0"]
    train(recipe, [f"out={folder / 'base'}", "checkpoint.at_end=true", *steps])
    return folder


def base(folder: Path) -> str:
    return str(path_of(folder / "base", 2))


def overrides(folder: Path, out: Path, *more: str) -> list[str]:
    return [f"out={out}", f"checkpoint.init={base(folder)}", "checkpoint.every=3", "train.steps=6", *LORA, *more]


def assert_equal(one: list[Result], other: list[Result]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert same(mine.weights, theirs.weights)


@pytest.mark.in_turn(4, 0)
def test_adapters_are_saved_alone_and_go_on_bitwise(pool: Pool, folder: Path, tmp_path: Path) -> None:
    recipe, mesh = str(folder / "recipe.yaml"), ["mesh.tp=2", "mesh.pp=2", "lora.dropout=0.2"]
    straight = pool.run(4, train, recipe, overrides(folder, tmp_path / "straight", *mesh))
    third, last = (path_of(tmp_path / "straight", step) for step in (3, 6))
    saved = Checkpoint.open(third)
    assert saved.index.adapters is not None and saved.index.adapters.base == base(folder)
    assert {stored.param.rpartition(".")[2] for stored in saved.stored()} == {"lora_a", "lora_b"}
    assert not any(name.endswith("attn.out.lora_a") for name in saved.schema.by_name)
    resumed = overrides(folder, tmp_path / "resumed", *mesh, f"checkpoint.resume={third}")
    assert_equal(straight, pool.run(4, train, recipe, resumed))
    engine.assert_same_files(last, path_of(tmp_path / "resumed", 6), 12)
    before = engine.tensor_files(third)
    assert all(data != before[name] for name, data in engine.tensor_files(last).items())


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("rung", "dim"), [("none", "cp"), ("parameters", "dp")])
def test_adapters_go_on_in_another_layout(pool: Pool, folder: Path, tmp_path: Path, rung: str, dim: str) -> None:
    recipe = str(folder / "recipe.yaml")
    (one,) = pool.run(1, train, recipe, overrides(folder, tmp_path / "one"))
    third = path_of(tmp_path / "one", 3)
    spread = [f"checkpoint.resume={third}", "mesh.tp=2", f"mesh.{dim}=2", f"zero.shard={rung}"]
    spread += ["batch.micro_size=1"] * (dim == "cp")  # else each rank has whole sequences
    other = pool.run(4, train, recipe, overrides(folder, tmp_path / "other", *spread))
    np.testing.assert_allclose(other[0].values("loss"), one.values("loss")[3:], rtol=1e-9)
    finals = [Checkpoint.open(path_of(tmp_path / name, 6)) for name in ("one", "other")]
    assert [each.layout.mesh.tp for each in finals] == [1, 2]
    assert finals[0].index.adapters == finals[1].index.adapters


@pytest.mark.in_turn(2, 1)
def test_a_hugging_face_base_and_its_checkpoint_are_the_same(folder: Path, tmp_path: Path) -> None:
    from megacore.store.conversions.conversion import to_hugging_face

    recipe = str(folder / "recipe.yaml")
    to_hugging_face(Checkpoint.open(Path(base(folder))), 5000).write(tmp_path / "hf", 1)
    train(recipe, overrides(folder, tmp_path / "one"))
    third = path_of(tmp_path / "one", 3)
    on_the_other = [f"checkpoint.init={tmp_path / 'hf'}", f"checkpoint.resume={third}"]
    resumed = train(recipe, [*overrides(folder, tmp_path / "two"), *on_the_other])
    assert resumed.last == 6


@pytest.mark.in_turn(2, 0)
def test_another_base_is_refused(folder: Path, tmp_path: Path) -> None:
    recipe = str(folder / "recipe.yaml")
    train(recipe, [f"out={tmp_path / 'base'}", "train.steps=3", "checkpoint.at_end=true", "evaluate.every=0"])
    train(recipe, overrides(folder, tmp_path / "one"))
    third = path_of(tmp_path / "one", 3)
    wrong = [f"checkpoint.init={path_of(tmp_path / 'base', 3)}", f"checkpoint.resume={third}"]
    with pytest.raises(ConfigError, match="are not those that the adapters were trained on"):
        train(recipe, [*overrides(folder, tmp_path / "two"), *wrong])


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["lora.rank=3"], "lora.rank is 3 in the recipe and 2 in the checkpoint"),
        (["lora.alpha=4"], "lora.alpha is 4.0 in the recipe and 8.0 in the checkpoint"),
        (["lora.targets=[attn]"], r"which differ in layers.\{layer\}.attn.out.lora_a"),
        (["lora=null"], "holds adapters of"),
    ],
)
def test_other_adapters_are_refused(folder: Path, tmp_path: Path, more: list[str], said: str) -> None:
    recipe, run = str(folder / "recipe.yaml"), folder / "refused"
    if not run.exists():
        train(recipe, overrides(folder, run))
    resume = f"checkpoint.resume={path_of(run, 3)}"
    with pytest.raises(ConfigError, match=said):
        check(recipe, [*overrides(folder, tmp_path / "x", resume), *more], 1, 1)
    with pytest.raises(StoreError, match="merge the two by `megacore convert"):
        open_folder(path_of(run, 3))


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_run_with_a_frozen_stage_goes_on_in_another_layout(
    pool: Pool, folder: Path, tmp_path: Path, precision: str
) -> None:
    """Of the first stage nothing is trained."""
    recipe = str(folder / "recipe.yaml")
    more = ["lora=null", "train.freeze=[embed,layers.0,layers.1]", "train.steps=4", f"train.precision={precision}"]
    more += ["checkpoint.every=2", f"checkpoint.init={base(folder)}", "pipeline.layers_per_stage=[2,2]"]
    two = pool.run(2, train, recipe, [f"out={tmp_path / 'pp'}", "mesh.pp=2", *more])
    saved = Checkpoint.open(path_of(tmp_path / "pp", 2))
    assert "embed.weight" in saved.index.frozen and not any("layers.2" in name for name in saved.index.frozen)
    assert sorted(name for name in saved.index.files if "pp0" in name) == ["weights/pp0-ep0-tp0.safetensors"]
    assert json.loads((saved.path / "trainer.json").read_text())["optimizer_steps"] == 2
    (again,) = pool.run(2, train, recipe, [f"out={tmp_path / 'again'}", "mesh.pp=2", *more])[:1]
    assert again.values("loss") == two[0].values("loss")
    resumed = [f"out={tmp_path / 'one'}", f"checkpoint.resume={saved.path}", "checkpoint.init=null"]
    (one,) = pool.run(1, train, recipe, [*more[:-2], *resumed, "mesh.pp=1"])
    rtol = 1e-9 if precision == "fp64" else 1e-2
    np.testing.assert_allclose(one.values("loss"), two[0].values("loss")[2:], rtol=rtol)


@pytest.mark.in_turn(2, 0)
def test_what_was_frozen_before_is_trained_and_said(folder: Path, tmp_path: Path) -> None:
    """Its moments begin at 0 in the middle of a run: AdamW divides the first by less than at a beginning."""
    recipe = str(folder / "recipe.yaml")
    more = ["checkpoint.every=2", f"checkpoint.init={base(folder)}", "train.steps=4"]
    first = train(recipe, [f"out={tmp_path / 'first'}", *more, "train.freeze=[layers.0]"])
    resumed = [f"checkpoint.resume={path_of(tmp_path / 'first', 2)}", "train.steps=4"]
    for out, key in ("same", "train.freeze=[layers.0]"), ("more", "train.freeze=[]"):
        setup = check(recipe, [f"out={tmp_path / out}", *resumed, key], 1, 1)
        said = "\n".join(remarks(setup.start, setup.config, setup.model, MeshShape()))
        assert ("the bias correction of step 2: its first steps are larger" in said) == (out == "more")
    found, before = (
        train(recipe, [f"out={tmp_path / 'more'}", *resumed]),
        Checkpoint.open(path_of(tmp_path / "first", 4)),
    )
    frozen = [name for name in found.weights if name in before.index.frozen]
    assert frozen and not any(np.array_equal(found.weights[name], first.weights[name]) for name in frozen)
