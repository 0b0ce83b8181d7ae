"""Runs that start from a model of the hub, and the model in several ranks: all of the commit that was fetched first."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine import RECIPE, write_corpus
from hub import save
from hub_server import TOKEN, World

from megacore.data import tokenizer
from megacore.recipe import load

VOCABULARY = 43


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def recipe(folder: Path) -> str:
    """A recipe of adapters that names no model."""
    recipe: dict[str, Any] = {key: section for key, section in RECIPE.items() if key != "model"}
    data = {**recipe["data"], "train": write_corpus(folder / "corpus", vocabulary=VOCABULARY)}
    lora = {"rank": 2, "alpha": 4.0}
    more = {"checkpoint": {"at_end": True}, "schedule": {"name": "constant", "warmup_steps": 1}, "out": "run"}
    text = yaml.safe_dump({**recipe, "data": data, "lora": lora, **more})
    (folder / "recipe.yaml").write_text(text)
    return "recipe.yaml"


@pytest.mark.slow
@pytest.mark.in_turn(12, 4)
def test_a_run_stays_with_its_commit(world: World) -> None:
    """Two ranks train adapters of a model whose branch moves on; the run goes on, without the hub in the end."""
    first = world.hub.push("own/model", save("llama", world.folder / "one"))
    pinned, given = f"own/model@{first}", [recipe(world.folder), "--init", "own/model", "mesh.tp=2"]
    export = ["checkpoint.export=adapters"]
    with world.hub.serving():
        status, said = world.run("train", *given, "train.steps=2", HF_TOKEN=TOKEN)
        assert status == 0 and f"Starting from the weights of {pinned}." in said, said
        assert world.hub.fetched.count("model.safetensors") == 1
        assert load(world.folder / "run/config.yaml").checkpoint.init == pinned
        index = json.loads((world.folder / "run/checkpoints/step-00000002/index.json").read_text())
        assert index["adapters"]["base"]["path"] == pinned
        world.hub.push("own/model", save("llama", world.folder / "two", seed=1))
        world.hub.asked.clear()
        assert world.run("train", *given, "--resume", "auto", "train.steps=3", HF_TOKEN=TOKEN)[0] == 0
        assert not world.hub.asked
    status, said = world.run("train", *given, "--resume", "auto", "train.steps=4", *export, HF_TOKEN=TOKEN)
    assert status == 0 and load(world.folder / "run/config.yaml").checkpoint.init == pinned, said
    adapters = json.loads((world.folder / "adapters/adapter_config.json").read_text())
    assert (adapters["base_model_name_or_path"], adapters["revision"]) == ("own/model", first)
    merged = ["convert", "run/checkpoints/step-00000004", "merged", "--to", "hf", "--base", pinned]
    assert world.run(*merged, HF_HUB_OFFLINE="1")[0] == 0
    written = [path for path in world.folder.rglob("*") if path.is_file()]
    assert len(written) > 20 and not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in said
    # A stranger's checkpoint may name any model: it is fetched where the user names it.
    shutil.rmtree(world.folder / "hf")
    world.hub.asked.clear()
    with world.hub.serving():
        status, said = world.run("generate", "run/checkpoints/step-00000004", "--prompt", "a")
    assert status == 1 and f"of {pinned}, and there is no such folder here" in said and not world.hub.asked


@pytest.mark.slow
@pytest.mark.in_turn(12, 1)
def test_ranks_of_a_tool_ask_nobody(world: World) -> None:
    world.hub.push("own/model", save("llama", world.folder / "one"))
    write_corpus(world.folder / "corpus", documents=3, vocabulary=VOCABULARY)
    with world.hub.serving():
        status, said = world.run("evaluate", "own/model", "--data", "corpus", "--tp", "2", "--json")
        assert status == 0, said
        assert world.hub.fetched.count("model.safetensors") == 1
        asked = [path for how, path, _ in world.hub.asked if how == "GET" and path.endswith("/revision/main")]
        assert len(asked) == 1


@pytest.mark.slow
@pytest.mark.in_turn(12, 7)
def test_a_data_set_is_evaluated_on_as_its_file_is(world: World) -> None:
    """Two ranks, which ask nobody; of the splits the one to validate on."""
    model = save("llama", world.folder / "model", vocab_size=290)
    tokenizer.train(["The sun rose."], 290, model)
    held = "".join(json.dumps({"text": text}) + "\n" for text in ("The sun rose.", "a b c"))
    content = {"train.jsonl": b'{"text": "no"}\n', "test.jsonl": held.encode(), "own.py": b"raise SystemExit(1)"}
    world.hub.push("datasets/own/set", content)
    (world.folder / "held.jsonl").write_text(held)
    given = ["evaluate", "model", "--json", "--dtype", "float64", "--tp", "2", "--data"]
    with world.hub.serving():
        status, found = world.run(*given, "own/set@main")
        assert status == 0, found
        assert [name for name in world.hub.fetched if name.endswith(("jsonl", "py"))] == ["test.jsonl"]
        assert "has no split dev among test, train" in world.run(*given, "own/set@main", "--split", "dev")[1]
    assert printed(found) == printed(world.run(*given, "held.jsonl")[1]) and printed(found)["documents"] == 2


def printed(said: str) -> dict[str, Any]:
    """What stands between the words."""
    found: dict[str, Any] = json.loads(said[said.index("{") : said.rindex("}") + 1])
    return found
