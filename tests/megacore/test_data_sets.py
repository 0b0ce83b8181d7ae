"""Data sets by their names on the hub: the files of a split, at a commit, and nothing else of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from chats import FAMILIES, write_jsonl
from engine import RECIPE
from families import random_model, small
from hub_server import TOKEN, World

ASK = """
import json, sys
from megacore.data.data_sets import files_of, resolved
from megacore.recipe import load
made = []
for overrides, begun in json.loads(sys.argv[1]):
    try:
        config = resolved(load({}, overrides), begun)
        corpora = (*config.data.train, *config.data.validation)
        made.append([[c.path, c.split, *map(str, files_of(config, c).files)] for c in corpora])
    except ValueError as error:
        made.append(str(error))
print(json.dumps(made))
"""
LINES = b'{"text": "a"}\n'
SET = {
    "README.md": b"# a card",
    "data/train-00000-of-00002.jsonl": LINES,
    "data/train-00001-of-00002.jsonl": LINES * 3,
    "data/test-00000-of-00001.jsonl": LINES * 4,
    "own.py": b"raise SystemExit('code of the hub')",
}
TRAIN = [name for name in SET if "train" in name]


def ask(world: World, *questions: tuple[list[str], list[str]], **variables: str) -> list[Any]:
    command = [sys.executable, "-c", ASK, json.dumps(questions)]
    environment = world.environment(HF_TOKEN=TOKEN, **variables)
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=world.folder, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def names(found: list[str]) -> list[str]:
    return [name.partition("/snapshots/")[2].partition("/")[2] for name in found]


@pytest.mark.in_turn(4, 1)
def test_a_split_is_fetched_and_pinned(tmp_path: Path) -> None:
    world = World(tmp_path)
    first = world.hub.push("datasets/own/set", SET)
    pinned = f"own/set@{first}"
    with world.hub.serving():
        train, wrong, missing = ask(
            world,
            (["data.train=own/set@main"], []),
            (["data.train=own/set@main", "data.split=dev"], []),
            (["data.train=own/other@main"], []),
        )
        ((path, split, *files),) = train
        assert (path, split, names(files)) == (pinned, "train", TRAIN)
        assert sorted(world.hub.fetched) == sorted(["README.md", *TRAIN])
        assert wrong == f"{pinned} has no split dev among data/test, data/train: name one by data.split (or split, " + (
            "beside its path; of evaluate, --split), or take all by *"
        )
        assert "nor, for this user, a data set own/other on the hub" in missing and "/datasets/own/other" in missing
        second = world.hub.push("datasets/own/set", {**SET, "data/train-00000-of-00002.jsonl": LINES * 2})
        stays, goes = ask(world, (["data.train=own/set@main"], [pinned]), (["data.train=own/set@main"], []))
        assert stays[0][0] == pinned and goes[0][0] == f"own/set@{second}"
    overrides = [f"data.train=[{{path: {pinned}, split: train}}]"]
    held = [f"data.validation=[{{path: {pinned}, split: test}}]"]
    offline, absent = ask(world, (overrides, []), (held, []), HF_HUB_OFFLINE="1")
    assert names(offline[0][2:]) == TRAIN
    assert f"{pinned} is not, or not all, in the hub's cache" in absent and "the start of a run fetches it" in absent


@pytest.mark.slow
@pytest.mark.in_turn(12, 9)
def test_a_run_takes_a_data_set_at_its_commit(tmp_path: Path) -> None:
    """Two ranks, which ask nobody; the run goes on without the hub."""
    world, family = World(tmp_path), FAMILIES["chatml"]
    random_model(small("llama", vocab_size=400), 0).save_pretrained(tmp_path / "model")
    family.write(tmp_path / "model")
    rows = [{"q": f"what is {n}?", "a": f"{n} of them"} for n in range(24)]
    content = {"train.jsonl": write_jsonl(tmp_path / "rows.jsonl", *rows).read_bytes(), "README.md": b"#"}
    commit = world.hub.push("datasets/own/set", content)
    data = {"train": "own/set@main", "map": {"prompt": "q", "completion": "a"}, "sequence_length": 32}
    recipe = {**{key: value for key, value in RECIPE.items() if key != "model"}, "data": data, "out": "run"}
    recipe |= {"checkpoint": {"at_end": True}, "evaluate": {"every": 0}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    given = ["finetune", "recipe.yaml", "--init", "model", "mesh.dp=2"]
    with world.hub.serving():
        status, said = world.run(*given, "train.steps=3")
        assert status == 0 and f"own/set@{commit} (train): prompt and completion: 24 examples of " in said, said
        assert world.hub.fetched.count("train.jsonl") == 1
        world.hub.push("datasets/own/set", {"train.jsonl": LINES})
    assert f"own/set@{commit}" in (tmp_path / "run/config.yaml").read_text()
    status, said = world.run(*given, "train.steps=4", "--resume", "auto", HF_HUB_OFFLINE="1")
    assert status == 0 and "Resuming after step 3" in said, said
