"""The examples of docs/python.md run as they stand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine import RECIPE
from hub import save

from megacore.data import tokenizer

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TEXTS = ["The sun rose over the quiet harbour. ", "a b c d e f g " * 4]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page speaks of: a model with its tokenizer, a recipe, a text."""
    model = save("llama", tmp_path / "model", vocab_size=290, max_position_embeddings=64)
    tokenizer.train(TEXTS, 290, model)
    rows = [{"prompt": "The sun", "completion": text} for text in TEXTS * 8]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": "train.jsonl", "sequence_length": 32}
    quiet = {"evaluate": {"every": 0}, "schedule": {"warmup_steps": 1}, "checkpoint": {"at_end": True}}
    recipe = {key: value for key, value in RECIPE.items() if key != "model"} | quiet | {"data": data}
    recipe["train"] = RECIPE["train"] | {"precision": "fp32"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "notes.txt").write_text(TEXTS[0] * 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.in_turn(2, 1)
def test_the_page_runs_from_its_first_example_to_its_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) == 4 and PAGE.index(BLOCKS[0]) < PAGE.index("## ")
    names: dict[str, Any] = {}
    said = []
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"docs/python.md, example {number}", "exec"), names)
        said.append(capsys.readouterr().out)
    run, made = names["run"], names["made"]
    assert run.step == 4 and [path.name for path in run.checkpoints] == ["step-00000004"]
    assert names["logits"].shape == (len(names["model"].texts.encode("The sun")), 290)
    assert made.path.is_dir() and made.bytes > 0 and f"runs/two-stages {made.bytes} {made.tensors}" in said[0]
    assert names["planned"]["parameters"] > 8e9
    assert "pushed lm_head.weight torch.float32 (290, " in said[2]
    assert "lr" in said[3] and "`dtype=float8`: choose from" in said[3]
    assert not Path("runs/wrong").exists()
