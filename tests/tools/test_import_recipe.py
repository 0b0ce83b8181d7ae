"""`megacore import`: configs of other projects, against recipes that were written by hand of the same meaning."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore import foreign
from megacore.config import SECTIONS, Config
from megacore.foreign.megatron import arguments
from megacore.recipe import load
from megacore.recipe_yaml import flat
from megacore.tools.import_recipe import main

CASES: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("foreign.yaml").read_text())


@pytest.mark.parametrize("case", CASES)
def test_configs_become_recipes_of_the_same_meaning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    said, out = CASES[case], tmp_path / "recipe.yaml"
    text, file = said["text"], tmp_path / said["file"]
    file.write_text(text)
    assert main([str(file), *said.get("options", ()), "--out", str(out)]) == 0, capsys.readouterr().err
    assert yaml.safe_load(out.read_text()) == said["recipe"]
    load(out)
    account = capsys.readouterr().err
    keys = flat(yaml.safe_load(text)) if not case.startswith("megatron") else arguments(text)
    assert [key for key in keys if key not in account] == []


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", {"zero_optimization": {"stage": 2}, "x": 1}, "x  .*REFUSED: unknown here"),
        ("a.json", {"optimizer": {"type": "Lion"}}, "REFUSED: only AdamW is carried"),
        ("a.json", {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, "2 x 3 x .*--gpus N"),
        ("a.json", {"optimizer.params.lr": 1, "scheduler.params.warmup_max_lr": 2}, "makes optimizer.lr 1.0, and this"),
        ("a.yml", {"base_model": "x", "adapter": "ia3"}, "REFUSED: ia3 is not here: only lora and qlora are"),
        ("a.yml", {"base_model": "x", "load_in_4bit": True}, "REFUSED: a base in fewer bits is for adapters"),
        ("a.yml", {"base_model": "x", "adapter": "qlora", "load_in_8bit": True}, "makes lora.base_dtype nf4, and this"),
        ("a.yml", {"base_model": "x", "datasets": [{"path": "y", "type": "cot"}]}, "the type cot of y is no format"),
        ("a.yml", {"distributed_type": "DEEPSPEED"}, "import the file that it names"),
        ("a.sh", "--num-layers 2 --swiglu", "REFUSED: no family has these parts"),
        ("a.yml", {"model": {}}, "it is not clear whose config it is"),
        ("a.yml", {"base_model": "x", "datasets": "y"}, "datasets +y +REFUSED: y is not understood"),
        ("a.yml", {"base_model": "x", "roles_to_train": ["user"]}, "REFUSED: the assistant is trained on"),
        ("a.sh", "--num-layers 2 --split a,b", "REFUSED: a,b is not understood"),
        ("a.json", "{", "is no JSON or YAML"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: Any, says: str
) -> None:
    (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
    assert main([str(tmp_path / name), "--out", str(tmp_path / "recipe.yaml")]) == 2
    assert re.search(says, capsys.readouterr().err) and not (tmp_path / "recipe.yaml").exists()


SHARDS = {"1": "parameters", "2": "gradients", "true": "parameters", "false": "gradients", "NO_SHARD": "none"}


@pytest.mark.parametrize(("value", "shard"), SHARDS.items())
def test_fsdp_reshards_by_flag_or_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, shard: str
) -> None:
    (tmp_path / "a.yml").write_text(f"distributed_type: FSDP\nfsdp_config: {{fsdp_reshard_after_forward: {value}}}\n")
    assert main([str(tmp_path / "a.yml")]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["zero"] == {"shard": shard}


@pytest.mark.parametrize(("adapter", "bits", "dtype"), [("qlora", 4, "nf4"), ("lora", 4, "nf4"), ("lora", 8, "int8")])
def test_adapters_beside_fewer_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], adapter: str, bits: int, dtype: str
) -> None:
    (tmp_path / "a.yml").write_text(f"base_model: x\nadapter: {adapter}\nload_in_{bits}bit: true\nlora_dropout: 0.05\n")
    assert main([str(tmp_path / "a.yml"), "--gpus", "1"]) == 0
    wanted = {"rank": 8, "alpha": 16.0, "dropout": 0.05, "base_dtype": dtype}
    assert yaml.safe_load(capsys.readouterr().out)["lora"] == wanted


def test_what_is_ignored_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "a.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}, "x": 1}))
    assert main([str(config), "--ignore", "x"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["zero"] == {"shard": "gradients"}
    assert main([str(config), "--ignore", "y"]) == 2 and "has no y to ignore" in capsys.readouterr().err
    assert main([str(config), "--ignore", "x", "--out", str(config)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_all_keys_that_rules_name_are_keys_of_a_recipe() -> None:
    known = {f"{name}.{each.name}" for name, section in SECTIONS.items() for each in fields(section)}
    known |= {each.name for each in fields(Config)}
    text = "".join(path.read_text() for path in Path(str(foreign.__file__)).parent.glob("*.py"))
    named = re.findall(rf'"((?:{"|".join(SECTIONS)})\.\w+)"', text) + re.findall(r'\bto\(\s*"([^"]+)"', text)
    ours = {key for key in named if not key.startswith(("model.", "optimizer.type", "optimizer.params"))}
    assert len(ours) > 50 and ours - known - {"optimizer.legacy_fusion", "tensorboard.enabled"} == set()
