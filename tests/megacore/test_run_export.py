"""A finished run leaves its last checkpoint as a Hugging Face folder, if it is asked to."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from engine import LLAMA, RECIPE, VOCAB, trainer, write_recipe
from hub_server import TOKEN, Hub

from megacore.data.corpus import Corpus
from megacore.models.decoder import Microbatch
from megacore.recipe import load
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.tools import convert
from megacore.training import main
from megacore.training.export import export, model_card


def recipe_of(folder: Path) -> str:
    """A run of two steps that ends with a checkpoint."""
    short = {"schedule": {"warmup_steps": 0}, "train": RECIPE["train"] | {"steps": 2, "precision": "bf16"}}
    return write_recipe(folder, RECIPE | short | {"checkpoint": {"at_end": True}})


def test_the_export_is_what_the_converter_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    out, made, converted = tmp_path / "run", tmp_path / "run" / "hf", tmp_path / "converted"
    recipe = recipe_of(tmp_path)
    assert main.main([recipe, f"out={out}", f"checkpoint.export={made}"]) == 0
    told, size = capsys.readouterr().out, (made / "model.safetensors").stat().st_size
    assert re.search(rf"  exported +{made}: .* parameters and {size:,} bytes in 1 file of weights\n", told), told
    checkpoint = out / "checkpoints" / "step-00000002"
    size = sum(os.path.getsize(Path(at, file)) for at, _, files in os.walk(checkpoint) for file in files)
    assert f"{checkpoint} ({size:,} bytes)\n" in told
    assert convert.main([str(out / "checkpoints" / "step-00000002"), str(converted), "--to", "hf"]) == 0
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in converted.iterdir())
    for path in made.iterdir():
        assert path.read_bytes() == (converted / path.name).read_bytes(), path.name
    # It says the dtype of its weights, and is read in it.
    assert {entry.dtype for entry in TensorFile.open(made / "model.safetensors").entries.values()} == {"BF16"}
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    assert str(AutoModelForCausalLM.from_pretrained(made).dtype) == "torch.bfloat16"


@pytest.mark.in_turn(2, 1)
def test_it_ends_texts_by_the_token_that_ended_them_in_the_corpus(tmp_path: Path) -> None:
    """Also where the run went on in between, and of a model that came with one of its own by that; its dtype is that of
    the run, and not of its start."""
    from transformers import AutoConfig, GenerationConfig

    recipe, out = recipe_of(tmp_path), tmp_path / "run"
    Corpus("corpus", 60, 1440, 5000, 3.5, VOCAB, 7, 4.0, 0, 0).write(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    assert main.main([recipe, f"out={out}", f"checkpoint.export={first}"]) == 0
    started = ["train.steps=3", "train.precision=fp32", "model=null", f"checkpoint.export={second}"]
    theirs = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(theirs | {"eos_token_id": 9}))
    assert main.main([recipe, f"out={tmp_path / 'next'}", f"checkpoint.init={first}", *started]) == 0
    config = json.loads((second / "config.json").read_text())
    assert (theirs["dtype"], config["dtype"], config["eos_token_id"]) == ("bfloat16", "float32", 9)
    assert {entry.dtype for entry in TensorFile.open(second / "model.safetensors").entries.values()} == {"F32"}
    third = ["train.steps=3", "checkpoint.resume=auto", f"checkpoint.export={tmp_path / 'third'}"]
    assert main.main([recipe, f"out={out}", *third]) == 0
    made = GenerationConfig.from_model_config(AutoConfig.from_pretrained(tmp_path / "third"))
    assert (made.bos_token_id, made.eos_token_id) == (None, 7)


def test_a_run_that_is_started_again_when_all_is_done_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheduler may do so where it has not heard of the end; what was exported stays."""
    out, made = tmp_path / "run", tmp_path / "hf"
    again = [recipe_of(tmp_path), f"out={out}", f"checkpoint.export={made}", "checkpoint.resume=auto"]
    assert main.main(again) == 0
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in made.iterdir()}
    assert "stays as it is" not in capsys.readouterr().out
    assert main.main(again) == 0
    assert f"{made} (it is there already, and stays as it is)" in capsys.readouterr().out
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in made.iterdir()}
    assert main.main([*again, "train.steps=3"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_what_is_not_finished_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "hf"
    config = load(recipe_of(tmp_path), [f"out={tmp_path / 'run'}", f"checkpoint.export={made}"])
    assert export(config, 1, 2) is None
    assert capsys.readouterr().out.split() == ["not", "exported", str(made), "(step", "1", "of", "2)"]
    with pytest.raises(StoreError, match="there is no checkpoint of step 2"):
        export(config, 2, 2)
    assert not made.exists()


def test_a_folder_that_has_come_in_between_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, made = tmp_path / "run", tmp_path / "hf"
    recipe = recipe_of(tmp_path)
    assert main.main([recipe, f"out={out}"]) == 0
    made.mkdir()
    (made / "theirs").touch()
    with pytest.raises(StoreError, match=r"(?s)holds 1 files.*megacore convert .*step-00000002 .*hf --to hf"):
        export(load(recipe, [f"out={out}", f"checkpoint.export={made}"]), 2, 2)
    assert [path.name for path in made.iterdir()] == ["theirs"]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_a_model_of_twice_the_positions_is_what_transformers_makes_of_it(tmp_path: Path, spelling: str) -> None:
    """What the recipe does not name of the rope (theta, the original length) is the base's, from the start on."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    base, made, length = tmp_path / "base", tmp_path / "made", 16
    sizes = {key: value for key, value in LLAMA.items() if key != "family"}
    sizes |= {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": length}
    config = LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 100.0})  # type: ignore[arg-type]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    if spelling == "rope_scaling":
        raw = json.loads((base / "config.json").read_text())
        del raw["rope_parameters"]
        (base / "config.json").write_text(json.dumps(raw | {"rope_theta": 100.0, "rope_scaling": None}))
    data = {"validation_fraction": 0.2, "sequence_length": 2 * length}
    train = RECIPE["train"] | {"steps": 1, "precision": "fp32"}
    short = {"model": {}, "data": data, "train": train, "schedule": {"warmup_steps": 0}, "checkpoint": {"at_end": True}}
    recipe = write_recipe(tmp_path, RECIPE | short)
    longer = ["model.rope_scaling={rope_type: yarn, factor: 2.0}", f"model.max_position_embeddings={2 * length}"]
    run = trainer(recipe, [f"checkpoint.init={base}", f"out={tmp_path / 'run'}", *longer])
    tokens = torch.arange(2 * length) * 7 % sizes["vocab_size"]  # type: ignore[operator]
    batch = Microbatch(tokens, tokens, torch.arange(2 * length), 1, (2 * length, 32))

    def close(folder: Path, **changed: object) -> None:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changed)
        (decoder,) = run.model.chunks
        assert decoder.head is not None
        with torch.no_grad():
            want, got = theirs(tokens[None]).logits[0], decoder.head(decoder.hidden(None, batch), None)
        assert float((got - want).norm() / want.norm()) < 1e-6

    by_hand = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": length}
    close(base, rope_parameters=by_hand, max_position_embeddings=2 * length)
    run.fit()
    assert convert.main([str(tmp_path / "run" / "checkpoints" / "step-00000001"), str(made), "--to", "hf"]) == 0
    assert json.loads((made / "config.json").read_text())["max_position_embeddings"] == 2 * length
    close(made)


# -- uploaded


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    made = Hub()
    with made.serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


@pytest.mark.in_turn(2, 0)
def test_an_export_is_uploaded_with_its_card(hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "hf"
    given = [recipe_of(tmp_path), f"out={tmp_path / 'run'}", f"checkpoint.export={made}", "checkpoint.push=own/new"]
    hub.full = True
    assert main.main(given) == 1
    said = "".join(capfd.readouterr())
    assert (
        f"{made} is whole, and was not uploaded to own/new (the hub answers 507): `hf upload own/new {made} --private`"
        in said
    )
    hub.full = False
    assert main.main([*given, "checkpoint.resume=auto"]) == 0  # as who starts it again does
    said += "".join(capfd.readouterr())
    (commit,) = hub.branches["own/new"].values()
    assert f"  uploaded         {hub.url}/own/new/commit/{commit}\n" in said and hub.private == {"own/new"}
    assert hub.files["own/new"][commit] == {path.name: path.read_bytes() for path in made.iterdir()}
    _, tags, page = (made / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(tags) == {"library_name": "transformers", "tags": ["megacore"]}
    told = [
        "# new",
        "A llama of 9,776 parameters",
        "from random weights: 2 steps,",
        "- `corpus`, trained on",
        "lr: 0.01",
    ]
    assert [each for each in told if each not in page] == [] and str(tmp_path) not in page
    assert TOKEN not in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_what_cannot_be_uploaded_is_refused_before_the_start(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    given = [recipe_of(tmp_path), f"out={tmp_path / 'run'}", f"checkpoint.export={tmp_path / 'hf'}"]
    assert main.main([*given, "checkpoint.push=own/new@main"]) == 2
    problems = [
        "2 problems",
        f"(own/new@main) is no OWNER/NAME of the hub ({hub.url})",
        "needs a token",
        "hf auth login",
    ]
    said = capsys.readouterr().err
    assert [each for each in problems if each not in said] == [] and not hub.asked and not (tmp_path / "run").exists()


def test_a_card_names_the_base_and_its_licence(hub: Hub, tmp_path: Path) -> None:
    out, commit = tmp_path / "run", hub.push("own/base", {"config.json": b"{}"})
    hub.licences["own/base"] = "apache-2.0"
    recipe = recipe_of(tmp_path)
    assert main.main([recipe, f"out={out}"]) == 0
    opened = Checkpoint.open(out / "checkpoints" / "step-00000002")
    for init, tags, words in (
        (f"own/base@{commit}", {"base_model": "own/base", "license": "apache-2.0"}, f"(revision {commit})"),
        ("gone/base@main", {"base_model": "gone/base", "license": None}, "(revision main)"),
        (str(tmp_path / "their model"), {"base_model": None, "license": None}, "from `their model`"),
    ):
        card = model_card("own/new", load(recipe, [f"out={out}", f"checkpoint.init={init}"]), opened)
        _, found, page = card.split("---\n", 2)
        assert {key: yaml.safe_load(found).get(key) for key in tags} == tags and words in page
        assert str(tmp_path) not in card
