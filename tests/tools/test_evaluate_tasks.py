"""`megacore evaluate --tasks`: what transformers finds, and lm-evaluation-harness by its own adapter of it."""

import io
import json
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import torch
from engine import RECIPE
from families import loaded
from hub import save
from pool import Pool
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from tqdm import tqdm

import megacore.inference
from megacore.data import tokenizer
from megacore.inference.model_loader import model_from
from megacore.inference.perplexity import log_likelihoods
from megacore.inference.texts import Texts
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.recipe import ConfigError
from megacore.store.conversions.formats import open_folder
from megacore.tools import evaluate as command
from megacore.training import main

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


# -- in a run, where a double stands for the harness: it is installed in few places


def double(lm: Any, tasks: Any, **_: Any) -> dict[str, Any]:
    """Ask a model, and leave random numbers behind."""
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    list(tqdm(range(3), desc="asked", disable=False))
    asked = [
        (None, lm.tok_encode(context) or [lm.prefix_token_id], lm.tok_encode(more, False)) for context, more in PAIRS
    ]
    requests = [SimpleNamespace(args=(text, {"max_gen_toks": 5})) for text, _ in PAIRS if text]
    scores, made = lm._loglikelihood_tokens(asked), lm.generate_until(requests)
    told = {"alias": "own", "sum,none": sum(each for each, _ in scores), "sum_stderr,none": "N/A"}
    return {"results": {"own": told | {"made,strict": zlib.crc32("|".join(made).encode()), "made_stderr,strict": 0.5}}}


def shown(folder: Path) -> str:
    """What one rank shows while it is asked."""
    texts, shows = Texts.of(open_folder(folder)), io.StringIO()
    with doubled(), redirect_stderr(shows):
        from megacore.inference import harness

        model = model_from(open_folder(folder), Mesh.create(MeshShape(tp=2)), torch.float32)
        harness.measure(harness.HarnessModel(model, texts), {"tasks": {}})
        list(tqdm(range(3), desc="behind"))
    return shows.getvalue()


def test_rank_0_alone_shows_progress(folder: Path, pool: Pool) -> None:
    first, second = pool.run(2, shown, folder)
    assert "asked" in first and "asked" not in second and "behind" in second


class DoubleLM:
    @property
    def device(self) -> None:
        """As theirs, which nobody sets."""


class DoubleManager:
    def __init__(self, include_path: str | None = None) -> None:
        pass

    def match_tasks(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name != "other"]

    def load(self, names: Sequence[str]) -> dict[str, Any]:
        asks = {"output_type": "generate_until", "generation_kwargs": {"max_gen_toks": 32 if "long" in names else 5}}
        task = mock.Mock(UNSAFE_CODE="code" in names, MULTIMODAL=False, get_config=asks.get)
        return {"tasks": dict.fromkeys(names, task)}


@contextmanager
def doubled() -> Iterator[None]:
    """Have lm_eval be its double."""

    def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"until": [], "do_sample": False, **settings}

    parts: dict[str, dict[str, Any]] = {
        "lm_eval": {"evaluate": double, "utils": None},
        "lm_eval.api": {},
        "lm_eval.api.instance": {"Instance": SimpleNamespace},
        "lm_eval.api.model": {"TemplateLM": DoubleLM},
        "lm_eval.models": {},
        "lm_eval.models.utils": {
            "normalize_gen_kwargs": plain,
            "postprocess_generated_text": lambda text, stops, _: text,
        },
        "lm_eval.tasks": {"TaskManager": DoubleManager},
    }
    made = {name: ModuleType(name) for name in parts}
    for name, module in made.items():
        vars(module).update(parts[name], __spec__=ModuleSpec(name, None))
    ours = "megacore.inference.harness"
    with mock.patch.dict(sys.modules, made):
        sys.modules.pop(ours, None)
        known = vars(megacore.inference).pop("harness", None)
        try:
            yield
        finally:
            vars(megacore.inference).pop("harness", None)
            if known is not None:
                vars(megacore.inference)["harness"] = known


def trained(recipe: str, overrides: Sequence[str]) -> tuple[engine.Result, list[float]]:
    """A run on this rank, and random numbers behind it."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with doubled():
        found = engine.train(recipe, overrides)
    return found, [random.random(), np.random.random(), torch.rand(()).item()]


def of_tasks(found: engine.Result) -> list[dict[str, float | None]]:
    told = [{key: value for key, value in record.items() if "tasks/" in key} for record in found.records]
    return [each for each in told if each]


Run = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Run:
    """The recipe of a run that goes on with a model of transformers, and its overrides."""
    save("llama", folder, vocab_size=290, max_position_embeddings=32, num_hidden_layers=4)
    recipe = engine.write_recipe(tmp_path, {key: value for key, value in RECIPE.items() if key != "model"})

    def made(name: str, *more: str) -> tuple[str, list[str]]:
        return recipe, [f"out={tmp_path / name}", f"checkpoint.init={folder}", *more]

    return made


ASKED = "evaluate.tasks=[own]"


def test_evaluations_ask_tasks_and_change_nothing(run: Run, tmp_path: Path) -> None:
    averaged = ["ema.decay=0.7", "ema.evaluate=true"]
    plain, drawn = trained(*run("plain", *averaged))
    found, others = trained(*run("asked", ASKED, *averaged))
    assert drawn == others and engine.same(plain.weights, found.weights)
    assert plain.values("loss") == found.values("loss") and not of_tasks(plain)
    told = of_tasks(found)
    assert [record["step"] for record in found.records if "tasks/own/sum" in record] == [2, 4, 5]
    for each in told:
        assert {*each} == {f"{kind}tasks/own/{name}" for kind in ("", "ema_") for name in ("sum", "made,strict")}
        assert each["tasks/own/sum"] != each["ema_tasks/own/sum"]
    recipe, overrides = run("exported", "checkpoint.at_end=true", f"checkpoint.export={tmp_path / 'hf'}")
    main.main([recipe, *overrides])
    model: Any = loaded(tmp_path / "hf")
    texts = Texts.of(open_folder(tmp_path / "hf"))
    want = sum(theirs(model, texts.encode(x) or [texts.begin], texts.encode(y, False))[0] for x, y in PAIRS)
    assert told[-1]["tasks/own/sum"] == pytest.approx(want, rel=1e-7)


LAYOUTS = [
    pytest.param(4, ["mesh.tp=2", "mesh.pp=2"], id="tp2-pp2"),
    pytest.param(2, ["zero.shard=parameters"], id="dp2-parameters"),
    pytest.param(2, ["mesh.pp=2", "pipeline.schedule=zb-v", "pipeline.chunks=2"], id="zb-v"),
    pytest.param(2, ["mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.chunks=2"], id="interleaved"),
    pytest.param(2, ["mesh.cp=2"], id="cp2"),
]


@pytest.mark.in_turn(5)
@pytest.mark.parametrize(("world", "overrides"), LAYOUTS)
def test_every_layout_answers_the_same(pool: Pool, run: Run, world: int, overrides: list[str]) -> None:
    want = of_tasks(trained(*run("one", ASKED))[0])
    ranks = pool.run(world, trained, *run("split", ASKED, *overrides))
    found = of_tasks(ranks[0][0])
    assert [each["tasks/own/made,strict"] for each in found] == [each["tasks/own/made,strict"] for each in want]
    for one, other in zip(found, want, strict=True):
        assert one["tasks/own/sum"] == pytest.approx(other["tasks/own/sum"], rel=1e-9)
    plain = pool.run(world, trained, *run("plain", *overrides))
    assert all(engine.same(one.weights, other.weights) for (one, _), (other, _) in zip(ranks, plain, strict=True))


def test_what_cannot_be_asked_is_said_before_the_first_step(run: Run, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.tasks: lm_eval has no task other: `lm_eval ls tasks` lists"):
        trained(*run("unknown", "evaluate.tasks=[own,other]"))
    for name, words in (("code", "code that the model writes"), ("long", "texts of 32 tokens, and the model has 32")):
        with pytest.raises(ConfigError, match=rf"evaluate\.tasks: .*{words}"):
            trained(*run(name, f"evaluate.tasks=[{name}]"))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"evaluate\.tasks: .*name one by data\.tokenizer"):
        trained(*run("without", ASKED))
