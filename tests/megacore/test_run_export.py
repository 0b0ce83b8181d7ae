"""A finished run leaves its last checkpoint as a Hugging Face folder, if it is asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine import LLAMA, RECIPE, VOCAB, trainer, write_recipe

from megacore.data.corpus import Corpus
from megacore.models.decoder import Microbatch
from megacore.recipe import load
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.tensors import TensorFile
from megacore.tools import convert
from megacore.training import main
from megacore.training.export import export


def recipe_of(folder: Path) -> str:
    """A run of two steps that ends with a checkpoint."""
    short = {"schedule": {"warmup_steps": 0}, "train": RECIPE["train"] | {"steps": 2, "precision": "bf16"}}
    return write_recipe(folder, RECIPE | short | {"checkpoint": {"at_end": True}})


def test_the_export_is_what_the_converter_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    out, made, converted = tmp_path / "run", tmp_path / "run" / "hf", tmp_path / "converted"
    recipe = recipe_of(tmp_path)
    assert main.main([recipe, f"out={out}", f"checkpoint.export={made}"]) == 0
    assert f"exported         {made}" in capsys.readouterr().out
    assert convert.main([str(out / "checkpoints" / "step-00000002"), str(converted), "--to", "hf"]) == 0
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in converted.iterdir())
    for path in made.iterdir():
        assert path.read_bytes() == (converted / path.name).read_bytes(), path.name
    # It says the dtype of its weights, and is read in it.
    assert {entry.dtype for entry in TensorFile.open(made / "model.safetensors").entries.values()} == {"BF16"}
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    assert str(AutoModelForCausalLM.from_pretrained(made).dtype) == "torch.bfloat16"


def test_it_ends_texts_by_the_token_that_ended_them_in_the_corpus(tmp_path: Path) -> None:
    """Also where the run went on in between, and of a model that came with one of its own by that."""
    from transformers import AutoConfig, GenerationConfig

    recipe, out = recipe_of(tmp_path), tmp_path / "run"
    Corpus("corpus", 60, 1440, 5000, 3.5, VOCAB, 7, 4.0, 0, 0).write(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    assert main.main([recipe, f"out={out}", f"checkpoint.export={first}"]) == 0
    started = ["train.steps=3", "model=null", f"checkpoint.export={second}"]
    (first / "config.json").write_text(
        json.dumps(json.loads((first / "config.json").read_text()) | {"eos_token_id": 9})
    )
    assert main.main([recipe, f"out={tmp_path / 'next'}", f"checkpoint.init={first}", *started]) == 0
    assert json.loads((second / "config.json").read_text())["eos_token_id"] == 9
    third = ["train.steps=3", "checkpoint.resume=auto", f"checkpoint.export={tmp_path / 'third'}"]
    assert main.main([recipe, f"out={out}", *third]) == 0
    made = GenerationConfig.from_model_config(AutoConfig.from_pretrained(tmp_path / "third"))
    assert (made.bos_token_id, made.eos_token_id) == (None, 7)


def test_the_dtype_is_that_of_the_run_and_not_of_its_start(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    assert main.main([recipe, f"out={tmp_path / 'a'}", f"checkpoint.export={first}"]) == 0
    started = ["model=null", f"checkpoint.init={first}", "train.precision=fp32", "train.steps=3"]
    assert main.main([recipe, f"out={tmp_path / 'b'}", *started, f"checkpoint.export={second}"]) == 0
    assert {entry.dtype for entry in TensorFile.open(second / "model.safetensors").entries.values()} == {"F32"}
    assert json.loads((second / "config.json").read_text())["dtype"] == "float32"


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


def test_what_is_not_finished_is_not_exported(tmp_path: Path) -> None:
    made = tmp_path / "hf"
    config = load(recipe_of(tmp_path), [f"out={tmp_path / 'run'}", f"checkpoint.export={made}"])
    assert export(config, 1, 2).split() == ["not", "exported", str(made), "(step", "1", "of", "2)"]
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
