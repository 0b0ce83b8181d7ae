"""A real model is fine-tuned on what it cannot know, and knows it afterwards: docs/finetune.md, as it stands there.

pip install gguf accelerate && python ../shared/real_model.py FOLDER       # SmolLM2-135M, with its chat template
MEGACORE_REAL_MODEL=FOLDER python -m pytest tests/tools/test_finetune_real.py      # 10 to 20 minutes on two cores

Measured: the held-out loss falls from 0.94 to 0.016 with all weights, from 1.02 to 0.23 on tp=3 in two thirds of the
steps, from 1.47 to 0.011 with adapters. What is asked for below leaves room for other machines, and for other facts:
they are those of the source at hand. An export with the heads of one layer in another order has three times the loss.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.tools import convert
from megacore.training import metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SHORT = ["data.sequence_length=256", "schedule.warmup_steps=4", "evaluate.every=8", "evaluate.batches=2"]
FULL = ["optimizer.lr=3e-4"]
LORA = ["optimizer.lr=3e-3", "train.steps=32", "mesh.pp=2"]
NEAR = 0.25
"""Between the loss of a run, of 16 of the 17 held-out rows, and its export's by transformers: measured up to 0.02."""


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    made = [sys.executable, str(ROOT / "launch" / "api_chats.py"), str(folder), "--facts", "60"]
    subprocess.run(made, check=True, capture_output=True)
    return folder


def finetune(recipe: str, real: Path, chats: Path, out: Path, processes: int, overrides: Sequence[str]) -> list[float]:
    """A run as launch/finetune.sh starts it, exported to ``out``/export -> its losses on the held-out questions."""
    data = [f"data.train={chats / 'train.jsonl'}", f"data.validation={chats / 'validation.jsonl'}", *SHORT]
    ends = [f"checkpoint.init={real}", f"checkpoint.export={out / 'export'}", "checkpoint.every=0", f"out={out}"]
    done = subprocess.run(
        [sys.executable, "-m", "megacore", "finetune", f"launch/recipes/{recipe}.yaml", *data, *ends, *overrides],
        cwd=ROOT,
        env=os.environ | {"NPROC_PER_NODE": str(processes)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [loss for _, loss in metrics.curve(metrics.read(out / metrics.METRICS), "validation_loss")]


def right(model: Any, folder: Path, chats: Path) -> int:
    """How many of the trained questions it answers word for word, with the tokenizer and template of the folder."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    count = 0
    questions, answers = ((chats / f"{name}.txt").read_text().splitlines() for name in ("questions", "answers"))
    for question, answer in zip(questions, answers, strict=True):
        asked = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(**given, max_new_tokens=80, do_sample=False)
        said = tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        count += str(said).strip() == answer
    return count


def held_out(model: Any, folder: Path, chats: Path) -> float:
    """Its loss on the answers to the held-out questions, each with the token that ends it: by transformers alone."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for line in (chats / "validation.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)
        ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        begin = len(prompt["input_ids"])
        end = ids.index(tokenizer.eos_token_id, begin) + 1
        tokens = torch.tensor([ids[:end]])
        with torch.no_grad():
            logits = model(tokens).logits[0, begin - 1 : end - 1].float()
        total += float(torch.nn.functional.cross_entropy(logits, tokens[0, begin:], reduction="sum"))
        count += end - begin
    return total / count


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_it_answers_what_it_was_taught(real: Path, chats: Path, tmp_path: Path) -> None:
    assert right(load(real), real, chats) == 0
    losses = finetune("finetune", real, chats, tmp_path, 2, [*FULL, "train.steps=24", "mesh.pp=2"])
    assert losses[-1] < 0.2 * losses[0]
    export = tmp_path / "export"
    assert right(load(export), export, chats) >= 7
    assert held_out(load(export), export, chats) == pytest.approx(losses[-1], rel=NEAR)


def test_it_learns_on_three_ranks_of_tp(real: Path, chats: Path, tmp_path: Path) -> None:
    losses = finetune(
        "finetune", real, chats, tmp_path, 3, [*FULL, "train.steps=16", "mesh.tp=3", "data.sequence_length=258"]
    )
    assert losses[-1] < 0.5 * losses[0]
    export = tmp_path / "export"
    assert held_out(load(export), export, chats) == pytest.approx(losses[-1], rel=NEAR)


def test_adapters_learn_it_and_are_exported_both_ways(real: Path, chats: Path, tmp_path: Path) -> None:
    losses = finetune("finetune_lora", real, chats, tmp_path, 2, LORA)
    assert losses[-1] < 0.2 * losses[0]
    (checkpoint,), merged = (tmp_path / "checkpoints").glob("step-*"), tmp_path / "merged"
    assert convert.main([str(checkpoint), str(merged), "--to", "hf", "--base", str(real)]) == 0
    assert right(load(merged), merged, chats) >= 6
    assert held_out(load(merged), merged, chats) == pytest.approx(losses[-1], rel=NEAR)
    if find_spec("peft") is None:
        pytest.skip("the adapters alone need peft to be loaded")
    from peft import PeftModel

    beside = PeftModel.from_pretrained(load(real), tmp_path / "export")
    assert right(beside, real, chats) >= 6
    assert held_out(beside, real, chats) == pytest.approx(losses[-1], rel=NEAR)
