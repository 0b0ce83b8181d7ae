"""Training on chats, end to end: packing changes no number, on any layout; resuming goes on; problems come first."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from chats import FAMILIES, chat, write_jsonl, write_tokenizer
from engine import LLAMA, RECIPE, Result, assert_near, of, problems, same, train, trainer
from pool import Pool

from megacore import checkpoints
from megacore.control import Control
from megacore.data.blend import Blend
from megacore.data.packing import Packed
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.recipe import ConfigError
from megacore.training import build
from megacore.training.callbacks.evaluation import Evaluation
from megacore.training.check import check
from megacore.training.resume import companions

LENGTH, ROWS, EXAMPLES = 64, 4, 16
MODEL = {**LLAMA, "vocab_size": 360, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
WORDS = ["wei", "and", "axe", "of", "a", "mes", "are", "nam", "in", "wor", "use", "may", "ask", "any", "ans"]


def rows(count: int = EXAMPLES) -> list[dict[str, Any]]:
    """Of different lengths, that fill ROWS rows well."""
    made = []
    for number in range(count):
        words = [WORDS[(number * 5 + i) % len(WORDS)] for i in range(2 + number % 3)]
        made.append({"text": " ".join(words)} if number % 5 == 4 else {"messages": chat(words[0], words[-1])})
    return made


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return write(tmp_path)


def write(folder: Path, **sections: dict[str, Any]) -> str:
    """A recipe over chats, with a tokenizer beside them."""
    family = FAMILIES["chatml"]
    write_tokenizer(folder, family.template, family.end)
    chats = write_jsonl(folder / "chats.jsonl", *rows())
    data = {"train": str(chats), "validation": str(chats), "sequence_length": LENGTH, **sections.pop("data", {})}
    evaluate = {"every": 2, "batches": 1}
    recipe = RECIPE | {"model": MODEL, "data": data, "evaluate": evaluate} | sections
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def said_of(recipe: str, *overrides: str) -> str:
    return str(ConfigError(problems(recipe, *overrides)))


# -- packing changes no number


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chats")


@cache
def _alone(pool: Pool, folder: Path) -> Result:
    """Each example in a row of its own; a step has all of them."""
    overrides = [f"out={folder / 'alone'}", "chat.pack=false", f"batch.global_size={EXAMPLES}", "train.steps=3"]
    return pool.run(1, train, write(folder), overrides)[0]


LAYOUTS = {
    "one": (1, ["batch.micro_size=4"]),
    "selective-offload": (1, ["memory.recompute=selective", "memory.offload_activations=true"]),
    "dp2-gradients": (2, ["mesh.dp=2", "zero.shard=gradients"]),
    "cp2-tp2": (4, ["mesh.cp=2", "mesh.tp=2", "batch.micro_size=1"]),
    "tp2-pp2-full": (4, ["mesh.tp=2", "mesh.pp=2", "memory.recompute=full", "batch.micro_size=4"]),
}


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_examples_train_as_they_do_alone(pool: Pool, folder: Path, layout: str) -> None:
    alone = _alone(pool, folder)
    world, overrides = LAYOUTS[layout]
    common = [f"out={folder / layout}", f"batch.global_size={ROWS}", "train.steps=3"]
    packed = pool.run(world, train, str(folder / "recipe.yaml"), [*common, *overrides])
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(packed[0].values(key), alone.values(key), rtol=1e-9)
    assert len(packed[0].values("loss")) == 3 and packed[0].values("loss")[2] < packed[0].values("loss")[0]
    np.testing.assert_allclose(packed[0].values("validation_loss"), alone.values("validation_loss"), rtol=1e-9)
    np.testing.assert_allclose(np.exp(alone.values("validation_loss")), alone.values("validation_perplexity"))
    if world == 1:
        assert_near(packed[0].weights, alone.weights, 1e-9)


def test_without_documents_kept_apart_it_would_be_another_loss(pool: Pool, folder: Path) -> None:
    """Else equal losses would prove little; and the rows are as many as these tests take them for."""
    alone, recipe = _alone(pool, folder), str(folder / "recipe.yaml")
    setup = check(recipe, [f"batch.global_size={ROWS}", f"out={folder / 'joined'}"], 1, 1)
    unpacked = check(recipe, ["chat.pack=false", f"out={folder / 'joined'}"], 1, 1)
    for source, count in ((setup.corpora.train, ROWS), (unpacked.corpora.train, EXAMPLES)):
        assert isinstance(source, Packed) and source.per_epoch == count and setup.corpora.separate
    object.__setattr__(setup.corpora, "separate", False)
    mesh = Mesh.single()
    made = build.trainer_of(setup, mesh, Control.create(mesh))
    stats = made.train_step.backward(made.upload(made.batches.microbatches(0), 1))
    assert abs(stats.loss.item() / alone.values("loss")[0] - 1) > 1e-4


# -- validation


def validation_loss(recipe: str) -> float:
    made = trainer(recipe, [])
    return of(made, Evaluation).losses(made)[0]


def test_the_validation_loss_is_one_mean_over_all_labels(pool: Pool, tmp_path: Path) -> None:
    """However unequally batches, ranks and microbatches have them."""
    recipe = write(tmp_path, chat={"pack": False}, batch={"global_size": 4}, evaluate={"batches": 3})
    made = trainer(recipe, [])
    batches = list[list[torch.Tensor]]()
    for number in range(3):
        batches.append([])
        for part in made.upload(of(made, Evaluation)._held_out.microbatches(number), 0):
            logits = made.model.logits(replace(part, wanted=None))
            assert logits is not None
            losses = torch.nn.functional.cross_entropy(logits, part.labels, reduction="none")
            batches[-1].append(losses[part.labels != IGNORE])
    means = [torch.cat(batch).mean() for batch in batches]
    wanted = torch.cat([losses for batch in batches for losses in batch]).mean().item()
    assert abs(torch.stack(means).mean().item() / wanted - 1) > 1e-4
    assert all(len({len(losses) for losses in batch}) > 1 for batch in batches)
    found = [validation_loss(recipe), *pool.run(2, validation_loss, recipe)]
    assert found == pytest.approx([wanted] * 3, rel=1e-9)


# -- a run


@pytest.mark.in_turn(2, 0)
def test_a_run_that_is_resumed_goes_on_bitwise_with_the_same_examples(pool: Pool, tmp_path: Path) -> None:
    recipe = write(tmp_path, batch={"global_size": 3, "micro_size": 1})
    whole, part = tmp_path / "whole", tmp_path / "part"
    saving = ["checkpoint.every=2", "train.steps=6"]
    one = pool.run(1, train, recipe, [f"out={whole}", *saving])[0]
    from_there = checkpoints.complete(checkpoints.folder_of(whole))[2]
    two = pool.run(1, train, recipe, [f"out={part}", *saving, f"checkpoint.resume={from_there}"])[0]
    assert two.values("loss") == one.values("loss")[2:] and two.last == 6
    assert same(two.weights, one.weights)
    names = [sorted(path.name for path in (run / "examples").glob("[!.]*")) for run in (whole, part)]
    assert names[0] == names[1] and len(names[0]) == 1
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (from_there / "tokenizer" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_what_was_made_of_the_data_is_said(recipe: str, tmp_path: Path) -> None:
    long = {"text": "too long " * 40}
    write_jsonl(tmp_path / "more.jsonl", *rows(), "{", long)
    overrides = [f"data.train={tmp_path / 'more.jsonl'}", "data.validation=[]", "data.validation_fraction=0.3"]
    said = check(recipe, [*overrides, "chat.bad_lines=skip"], 1, 1).corpora.remarks
    kinds = "messages in 13 rows, text in 4 rows"
    assert said[0].startswith(f"{tmp_path / 'more.jsonl'}: {kinds}: 17 examples of ")
    assert said[0].endswith(" of which count")
    assert said[1:3] == (
        f"  longer than {LENGTH + 1} tokens: 1 cut, 0 dropped",
        f"  1 bad lines skipped, such as {tmp_path / 'more.jsonl'}, line 17: not JSON: "
        "Expecting property name enclosed in double quotes at character 2",
    )
    kept, held_out = (line.split(": ")[1].split(" examples in ")[0] for line in said[3:])
    assert int(kept) + int(held_out) == 17 and said[3].endswith("% full")


def test_the_examples_of_a_chat_are_held_out_together(recipe: str, tmp_path: Path) -> None:
    """Each would else be seen in what another one is learned from."""
    (tmp_path / "chat_template.jinja").write_text(FAMILIES["thinking"].template)
    write_jsonl(tmp_path / "chats.jsonl", *({"messages": chat("hi", "hello", "and", "so")} for _ in range(12)))
    corpora = check(recipe, ["data.validation=[]", "data.validation_fraction=0.4"], 1, 1).corpora
    sides = [source for source in (corpora.train, corpora.validation) if isinstance(source, Packed)]
    kept, held = (source.examples.chats[source.chosen].tolist() for source in sides)
    assert len(kept) + len(held) == 24 and held
    assert {*kept} | {*held} == {*range(12)} and not {*kept} & {*held}
    for seed in range(4):  # one at least, however small the fraction
        few = ["data.validation=[]", "data.validation_fraction=0.0001", f"data.seed={seed}"]
        source = check(recipe, few, 1, 1).corpora.validation
        assert isinstance(source, Packed) and source.chosen.size == 2


def test_examples_of_a_least_length_alone(recipe: str, tmp_path: Path) -> None:
    """And several files are blended."""
    blend = [f"data.train=[{{path: {tmp_path / 'chats.jsonl'}, weight: 3}}, {tmp_path / 'mixed.jsonl'}]"]
    path = write_jsonl(tmp_path / "mixed.jsonl", *rows(12), *({"text": "word " * (9 * n)} for n in range(1, 7)))
    whole, some = (check(recipe, [f"data.train=[{{path: {path}, least: {n}}}]"], 1, 1).corpora.train for n in (0, 20))
    assert isinstance(whole, Packed) and isinstance(some, Packed)
    long = whole.chosen[whole.examples.lengths[whole.chosen] >= 20]
    assert {*some.chosen.tolist()} == {*long.tolist()} and 0 < long.size < whole.chosen.size
    train = check(recipe, blend, 1, 1).corpora.train
    assert isinstance(train, Blend) and len(train.sources) == 2
    with pytest.raises(ConfigError, match=r"none of the \d+ document\(s\) of .*mixed.jsonl to train on has the 9999"):
        check(recipe, [f"data.train=[{{path: {path}, least: 9999}}]"], 1, 1)


def test_a_template_in_the_recipe_takes_the_place_of_the_models(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    for name in ("additional_chat_templates/tool_use.jinja", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("the model's, or that of the data")
    setup = check(recipe, [f"chat.template={tmp_path / 'mine.jinja'}"], 1, 1)
    plain = check(recipe, [], 1, 1)
    counts = [each.corpora.remarks[0] for each in (setup, plain)]
    assert counts[0] != counts[1]
    travels = companions(setup.start, setup.config)
    assert travels["chat_template.jinja"].path == tmp_path / "mine.jinja"
    # Another template of the model's would be taken where there are tools. Terms beside the data are those of the data.
    tools = "additional_chat_templates/tool_use.jinja"
    assert sorted(travels) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(companions(plain.start, plain.config)) == sorted([tools, *travels])


# -- before anything starts


def test_bad_lines_are_said_beside_what_else_is_wrong_and_nothing_is_prepared(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "chats.jsonl", {"messages": []}, *rows(), {"text": 3})
    overrides = [f"out={tmp_path / 'run'}", "optimizer.lr=0", "data.validation=[]"]
    said = said_of(recipe, *overrides)
    assert said.startswith("2 problems") and "optimizer.lr (0.0)" in said
    assert "2 bad line(s)" in said and "line 18: text is a int" in said
    assert not (tmp_path / "run").exists()
    # Of a long file only the beginning is looked at: what is wrong with a config is said soon.
    monkeypatch.setattr("megacore.data.examples.LOOKED_AT", 5)
    assert "1 bad line(s)" in said_of(recipe, *overrides)
    assert said_of(recipe, *overrides, "chat.bad_lines=skip").startswith("1 problem ")
    assert said_of(recipe, *overrides, "data.sequence_length=0").startswith("2 problems")


SLOW = "torch", "tokenizers", "transformers"
"""What takes a process seconds to import."""
REFUSED = f"""
import os, sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
from megacore.tools.main import main
status = main(sys.argv[1:])
names = {{os.path.basename(each) for each in opened}} & {{"tokenizer.json", "chats.jsonl"}}
print(status, *sorted(names), *(each for each in {SLOW} if each in sys.modules))
"""


@pytest.mark.parametrize(
    ("override", "told", "touched"),
    [
        ("trian.steps=3", "trian: unknown key", "2"),
        ("optimizer.lr=0", "optimizer.lr (0.0)", "2 chats.jsonl"),
        ("data.train=nowhere.jsonl", "there is no nowhere.jsonl", "2"),
    ],
)
def test_a_wrong_recipe_is_told_before_what_is_slow(
    recipe: str, tmp_path: Path, override: str, told: str, touched: str
) -> None:
    """Keys before all else, and no tokenizer, nor torch, before what is wrong without them."""
    (tmp_path / "tokenizer.json").write_text("{")
    command = [sys.executable, "-c", REFUSED, "train", recipe, f"out={tmp_path / 'run'}", override]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told in done.stderr and "tokenizer" not in done.stderr
    assert done.stdout.split("\n")[-2] == touched


def test_a_tokenizer_is_looked_at_before_the_rest_of_the_data(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacore.data.examples.LOOKED_AT", 5)
    write_jsonl(tmp_path / "chats.jsonl", *rows(), {"text": 3})
    sound = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text("{")
    said = said_of(recipe, f"out={tmp_path / 'run'}")
    assert "tokenizer" in said and "line 17" not in said
    (tmp_path / "tokenizer.json").write_text(sound)
    assert "line 17: text is a int" in said_of(recipe, f"out={tmp_path / 'run'}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train=[chats.jsonl, corpus/text]"], ["name examples (chats.jsonl", "token files (corpus/text)"]),
        (["data.validation=corpus/text"], ["a run takes one kind"]),
        (["model.vocab_size=300"], ["gives ids up to", "the model's vocabulary ends at 299"]),
    ],
)
def test_what_does_not_fit_is_named(recipe: str, overrides: Sequence[str], words: Sequence[str]) -> None:
    said = said_of(recipe, *overrides)
    assert all(word in said for word in words), said


def test_without_a_tokenizer_or_a_template_there_are_no_chats(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").unlink()
    assert "the model's tokenizer no chat template: set chat.template" in said_of(recipe)
    chats = (tmp_path / "chats.jsonl").read_text()
    (tmp_path / "chats.jsonl").write_text(chats + '{"messages": [{"role": "none", "content": "hi"}]}\n{"messages": \n')
    said = said_of(recipe)  # what is bad with any template comes before one is looked for
    assert said.startswith("1 problem ") and "message 1 has the role 'none'" in said and "not JSON" in said
    (tmp_path / "chats.jsonl").write_text(chats)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    assert "examples and streams need the model's tokenizer, and none is there" in said_of(recipe)


def test_the_check_of_the_launcher_prepares(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    check(recipe, [f"out={out}"], 1, 1)
    (folder,) = (out / "examples").glob("[!.]*")
    assert json.loads((folder / "examples.json").read_text())["examples"] == EXAMPLES
    before = (folder / "examples.bin").stat().st_mtime_ns
    check(recipe, [f"out={out}"], 1, 1)
    assert (folder / "examples.bin").stat().st_mtime_ns == before
