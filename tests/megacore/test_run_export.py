"""A finished run leaves its last checkpoint as a Hugging Face folder, if it is asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine import RECIPE, write_recipe

from megacore.recipe import load
from megacore.run import train as pretrain
from megacore.run.export import export
from megacore.store.strict_json import StoreError
from megacore.store.tensors import TensorFile
from tools import convert


def recipe_of(folder: Path) -> str:
    """A run of two steps that ends with a checkpoint."""
    short = {"schedule": {"warmup_steps": 0}, "train": RECIPE["train"] | {"steps": 2, "precision": "bf16"}}
    return write_recipe(folder, RECIPE | short | {"checkpoint": {"at_end": True}})


def test_the_export_is_what_the_converter_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    out, made, converted = tmp_path / "run", tmp_path / "run" / "hf", tmp_path / "converted"
    recipe = recipe_of(tmp_path)
    assert pretrain.main([recipe, f"out={out}", f"checkpoint.export={made}"]) == 0
    assert f"exported         {made}" in capsys.readouterr().out
    assert convert.main([str(out / "checkpoints" / "step-00000002"), str(converted), "--to", "hf"]) == 0
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in converted.iterdir())
    for path in made.iterdir():
        assert path.read_bytes() == (converted / path.name).read_bytes(), path.name
    # It says the dtype of its weights, and is read in it.
    assert {entry.dtype for entry in TensorFile.open(made / "model.safetensors").entries.values()} == {"BF16"}
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    assert str(AutoModelForCausalLM.from_pretrained(made).dtype) == "torch.bfloat16"


def test_the_dtype_is_that_of_the_run_and_not_of_its_start(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    assert pretrain.main([recipe, f"out={tmp_path / 'a'}", f"checkpoint.export={first}"]) == 0
    started = ["model=null", f"checkpoint.init={first}", "train.precision=fp32", "train.steps=3"]
    assert pretrain.main([recipe, f"out={tmp_path / 'b'}", *started, f"checkpoint.export={second}"]) == 0
    assert {entry.dtype for entry in TensorFile.open(second / "model.safetensors").entries.values()} == {"F32"}
    assert json.loads((second / "config.json").read_text())["dtype"] == "float32"


def test_what_is_not_finished_is_not_exported(tmp_path: Path) -> None:
    made = tmp_path / "hf"
    config = load(recipe_of(tmp_path), [f"out={tmp_path / 'run'}", f"checkpoint.export={made}"])
    assert export(config, 1).split() == ["not", "exported", str(made), "(step", "1", "of", "2)"]
    with pytest.raises(StoreError, match="there is no checkpoint of step 2"):
        export(config, 2)
    assert not made.exists()


def test_a_folder_that_has_come_in_between_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, made = tmp_path / "run", tmp_path / "hf"
    recipe = recipe_of(tmp_path)
    assert pretrain.main([recipe, f"out={out}"]) == 0
    made.mkdir()
    (made / "theirs").touch()
    with pytest.raises(StoreError, match=r"(?s)holds 1 files.*megacore convert .*step-00000002 .*hf --to hf"):
        export(load(recipe, [f"out={out}", f"checkpoint.export={made}"]), 2)
    assert [path.name for path in made.iterdir()] == ["theirs"]
