"""`megacore evaluate --tasks`: what transformers finds, and lm-evaluation-harness by its own adapter of it."""

import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from families import loaded
from hub import save
from pool import Pool
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from megacore.data import tokenizer
from megacore.inference.model_loader import model_from
from megacore.inference.perplexity import log_likelihoods
from megacore.inference.texts import Texts
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.store.conversions.formats import open_folder
from megacore.tools import evaluate as command

with_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
TEXTS = ["The sun rose over the quiet harbour. ", "a b c d e f g " * 4]
PAIRS = [("The sun", " rose"), ("The sun rose over the", " quiet harbour."), ("", "a b c"), ("a b ", "c d")]
LONG = " ".join(random.Random(0).choices(TEXTS[0].split() + TEXTS[1].split(), k=60))
"""Three windows, of other tokens each: else the adapter takes the numbers of one for all, wherever they are cut."""
SHAPE = MeshShape(tp=2, pp=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = save("llama", tmp_path / "model", vocab_size=290, max_position_embeddings=32)
    tokenizer.train(TEXTS, 280, made)
    fast = Tokenizer.from_file(str(made / "tokenizer.json"))
    fast.add_special_tokens(["<s>"])
    begin = fast.token_to_id("<s>")
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    fast.save(str(made / "tokenizer.json"))
    config = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>"}))
    return made


def ours(folder: Path, requests: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    model = model_from(open_folder(folder), Mesh.create(SHAPE), torch.float32)
    return log_likelihoods(model, requests, 48)


def theirs(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    tokens = torch.tensor((context + continuation)[-33:])
    with torch.no_grad():
        made = model(tokens[None, :-1]).logits[0]
    rows, labels = made.log_softmax(-1)[-len(continuation) :], tokens[1:][-len(continuation) :]
    found = rows.gather(1, labels[:, None]).sum()
    return float(found), bool((rows.argmax(-1) == labels).all())


def test_log_likelihoods_are_those_of_transformers(folder: Path, pool: Pool) -> None:
    model: Any = loaded(folder, torch.float32)
    greedy = model.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    best: list[int] = greedy[0, 3:].tolist()
    requests = [([3, 1, 4], [1, 5]), ([9], [2, 6, 5, 3, 5]), (list(range(40)), [7, 8]), ([5, 6, 7], best)]
    want = [theirs(model, *request) for request in requests]
    assert [right for _, right in want] == [False, False, False, True]
    for found in pool.run(4, ours, folder, requests):
        assert [right for _, right in found] == [right for _, right in want]
        torch.testing.assert_close([each for each, _ in found], [each for each, _ in want], rtol=1e-6, atol=1e-5)


# -- with the harness


def asked(model: Any) -> list[Any]:
    """What a model of the harness answers to requests of each kind."""
    from lm_eval.api.instance import Instance

    def requests(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
        return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]

    plain, texts = {"until": ["zz"], "max_gen_toks": 12}, ["The sun", "a b", "a b c d e f g " * 6, "harbour"]
    free = model.generate_until(requests("generate_until", [(text, plain) for text in texts]))
    inside = [{"until": [text[3:5], "zz"], "max_gen_toks": 9, "do_sample": False} for text in free]
    cut = model.generate_until(requests("generate_until", list(zip(texts, inside, strict=True))))
    assert all(len(short) < len(text) for short, text in zip(cut, free, strict=True))
    return [
        [each for each, _ in model.loglikelihood(requests("loglikelihood", list(PAIRS)), disable_tqdm=True)],
        [right for _, right in model.loglikelihood(requests("loglikelihood", list(PAIRS)), disable_tqdm=True)],
        model.loglikelihood_rolling(requests("loglikelihood_rolling", [(TEXTS[0],), (LONG,)])),
        [*free, *cut],
    ]


def asked_ours(folder: Path) -> list[Any]:
    from megacore.inference.harness import HarnessModel

    opened = open_folder(folder)
    return asked(HarnessModel(model_from(opened, Mesh.create(SHAPE), torch.float32), Texts.of(opened), 48, 3))


@with_harness
def test_it_answers_as_the_adapter_of_transformers(folder: Path, pool: Pool) -> None:
    from lm_eval.models.huggingface import HFLM

    want = asked(HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2))
    for found in pool.run(4, asked_ours, folder):
        for one, other in ((found[0], want[0]), (found[2], want[2])):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)
        assert found[1] == want[1] and found[3] == want[3]


TASK = """
task: own_choice
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.mark.slow
@with_harness
def test_the_command_scores_a_task_of_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [{"question": x, "choices": [" rose", " b", " harbour"], "answer": i % 3} for i, x in enumerate("abcde")]
    data, tasks = tmp_path / "rows.jsonl", tmp_path / "tasks"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks.mkdir()
    (tasks / "own_choice.yaml").write_text(TASK % data)
    given = [str(folder), "--tasks", "own_choice", "--tasks-folder", str(tasks), "--dtype", "float32", "--json"]
    ran = [sys.executable, "-m", "megacore.tools.main", "evaluate", *given, "--tp", "2"]
    made = subprocess.run(ran, check=True, stdout=subprocess.PIPE)
    found = json.loads(made.stdout)["results"]["own_choice"]
    options: dict[str, Any] = {
        "tasks": ["own_choice"],
        "task_manager": TaskManager(include_path=str(tasks), include_defaults=False),
    }
    adapter = {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}
    theirs = simple_evaluate("hf", adapter, **options)
    assert theirs is not None
    want = theirs["results"]["own_choice"]
    assert all(found[key] == want[key] for key in ("acc,none", "acc_norm,none"))
    assert command.main([*given[:2], "no_such_task"]) == 1
    assert "lm_eval has no task no_such_task" in capsys.readouterr().err


def test_data_or_tasks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], ["--data", "x.txt", "--tasks", "piqa"]):
        with pytest.raises(SystemExit):
            command.main([str(folder), *given])
        assert "give either --data or --tasks" in capsys.readouterr().err
    if find_spec("lm_eval") is None:
        assert command.main([str(folder), "--tasks", "piqa"]) == 1
        assert "pip install 'megacore[lm-eval]'" in capsys.readouterr().err
    else:
        assert command.main([str(folder), "--tasks", "piqa", "--dp", "2"]) == 1
        assert "--dp is of --data" in capsys.readouterr().err
