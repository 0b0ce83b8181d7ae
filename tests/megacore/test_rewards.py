"""Reward models, end to end: beside transformers' class with a head of scores, on layouts, from a language model, to a
folder that transformers loads; and what is wrong with such a run before it starts."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine import checked, path_of, problems, train
from pool import Pool
from safetensors.torch import load_file, save_file
from test_preferences import (
    COUNT,
    LAYOUTS,
    by_torch,
    chats,
    folder,
    on_layout,
    records_of,
    rows_of,
    run,
    texts,
    token_ids,
)
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from megacore.data.batches import Batches
from megacore.inference.evaluation import evaluate
from megacore.inference.loaded_model import generate, load_model
from megacore.store.conversions.convert import convert
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.training.resume import remarks

__all__ = ["folder"]
OURS = ("preference.loss=bradley_terry",)


@pytest.fixture(scope="module")
def scored(folder: Path) -> Path:
    """The folder of the recipe, with a model in `scored` whose head scores."""
    torch.manual_seed(1)
    whole = LlamaForCausalLM.from_pretrained(folder / "model")
    whole.config.num_labels = 1
    model = LlamaForSequenceClassification(whole.config)
    model.model.load_state_dict(whole.model.state_dict())
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder / "scored")
    for file in (folder / "model").iterdir():
        if not (folder / "scored" / file.name).exists():
            (folder / "scored" / file.name).write_bytes(file.read_bytes())
    return folder


def started(folder: Path) -> tuple[str, ...]:
    return (*OURS, f"checkpoint.init={folder / 'scored'}")


def scores_of(model: LlamaForSequenceClassification, pairs: Sequence[tuple[list[int], ...]]) -> Tensor:
    """[pairs, 2], one text after the other, without a mask or padding."""
    texts = [[prompt + end for end in ends] for prompt, *ends in pairs]
    return torch.stack([torch.stack([model(torch.tensor([t])).logits[0, 0] for t in both]) for both in texts])


@pytest.mark.in_turn(2)
def test_a_run_computes_what_transformers_computes(scored: Path) -> None:
    """Losses, rewards, gradients and updates, by the formula of TRL's RewardTrainer."""
    model = LlamaForSequenceClassification.from_pretrained(scored / "scored", dtype=torch.float64)
    pairs = token_ids(scored / "scored", chats())

    def step_of() -> tuple[Tensor, Tensor]:
        rewards = scores_of(model, pairs)
        return -logsigmoid(rewards[:, 0] - rewards[:, 1]), rewards

    want = by_torch(model, step_of)
    rows = rows_of(scored, *started(scored))
    assert 1 < rows < COUNT
    got = records_of(run(scored, "scores", *started(scored), f"batch.global_size={rows}"))
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-7)
    assert got[0]["reward_margin"] != got[1]["reward_margin"]


def test_the_last_token_of_a_full_row_is_scored(scored: Path, tmp_path: Path) -> None:
    """Nothing is predicted, and no row has a token more than the model is given; what does not fit is cut."""
    sizes = [2 * len(prompt) + len(a) + len(b) for prompt, a, b in token_ids(scored / "model", chats())]
    length = max(sizes) - 1
    recipe = str(scored / "recipe.yaml")
    setup, _ = checked(recipe, [*started(scored), f"out={tmp_path}", f"data.sequence_length={length}"])
    batch = setup.config.batch
    batches = Batches(
        setup.corpora.train, batch.global_size, batch.micro_size, 0, 1, setup.corpora.separate, scores=True
    )
    rows = [
        batches.microbatches_from(row)
        for row in range(rows_of(scored, *started(scored), f"data.sequence_length={length}"))
    ]
    counted = [batch.pairs.counted for row in rows for batch in row[:1] if batch.pairs is not None]
    assert sum(map(len, counted)) == COUNT and all((each == 1).all() for each in counted)
    assert any("1 cut" in remark for remark in setup.corpora.remarks)


def test_texts_that_end_with_what_is_padding_there_are_told(scored: Path, tmp_path: Path) -> None:
    """transformers reads the score of such a text at the token before, at which none was learned."""
    source = tmp_path / "scored"
    shutil.copytree(scored / "scored", source)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts()))
    ends = AutoTokenizer.from_pretrained(source).eos_token_id
    given = [*OURS, f"checkpoint.init={source}", f"data.train={tmp_path / 'pairs.jsonl'}"]
    config, told = json.loads((source / "config.json").read_text()), list[bool]()
    for padding in (ends, None):
        (source / "config.json").write_text(json.dumps(config | {"pad_token_id": padding}))
        setup, _ = checked(str(scored / "recipe.yaml"), [*given, f"out={tmp_path / str(padding)}"])
        said = (
            f"{2 * COUNT} of the first {2 * COUNT} texts end with token {ends}, the model's pad_token_id: their score"
        )
        told.append(said in "\n".join(setup.corpora.remarks))
    assert told == [True, False]


# -- on layouts


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_what_one_process_computes(pool: Pool, scored: Path, layout: str) -> None:
    on_layout(pool, scored, f"scores-{layout}", layout, *started(scored))


# -- from a language model, and to a folder


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_language_model_becomes_a_reward_model(pool: Pool, scored: Path, tmp_path: Path, tied: bool) -> None:
    """Its head is drawn in place of the other one, wherever that lay; the export loads in transformers."""
    source, out = tmp_path / "source", tmp_path / "run"
    shutil.copytree(scored / "model", source)
    if tied:
        torch.manual_seed(2)
        config = LlamaForCausalLM.from_pretrained(source).config
        config.tie_word_embeddings = True
        LlamaForCausalLM(config).save_pretrained(source)
    recipe = [*OURS, f"checkpoint.init={source}", f"out={out}", "checkpoint.every=2", "train.steps=4"]
    recipe += ["evaluate.every=0", "optimizer.lr=1e-2"]
    layout = ["mesh.pp=2", "mesh.tp=2"]
    whole = pool.run(4, train, str(scored / "recipe.yaml"), [*recipe, *layout])[0]
    setup, _ = checked(str(scored / "recipe.yaml"), [*recipe, f"out={tmp_path / 'other'}"])
    told = remarks(setup.start, setup.config, setup.model, setup.config.mesh.shape(1))
    assert any("a head of scores, score.weight [1, 16], is drawn in place of lm_head.weight" in line for line in told)
    again = [f"out={tmp_path / 'again'}", f"checkpoint.resume={path_of(out, 2)}", "checkpoint.init=null"]
    on = train(str(scored / "recipe.yaml"), [*recipe, *again])
    assert on.values("loss") == pytest.approx(whole.values("loss")[2:], rel=1e-9)

    convert(path_of(out, 4), tmp_path / "hf", to="hf")
    folder = HuggingFace.open(tmp_path / "hf")
    assert folder.raw["architectures"] == ["LlamaForSequenceClassification"] and folder.raw["id2label"] == {
        "0": "LABEL_0"
    }
    assert "lm_head.weight" not in folder.names("weights")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    pairs = token_ids(tmp_path / "hf", chats())
    rewards = scores_of(theirs, pairs).detach()
    assert (rewards[:, 0] > rewards[:, 1]).double().mean() > 0.7  # it has learned
    with load_model(tmp_path / "hf") as model:
        for (prompt, *ends), want in zip(pairs, rewards, strict=True):
            for end, score in zip(ends, want, strict=True):
                assert model.logits(prompt + end)[-1].tolist() == pytest.approx([score.item()], rel=1e-5, abs=1e-5)
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats()))
    found, margins = (
        evaluate(tmp_path / "hf", tmp_path / "held_out.jsonl", dtype="float64"),
        rewards[:, 0] - rewards[:, 1],
    )
    assert found == {
        "pairs": COUNT,
        "too_long": 0,
        "accuracy": pytest.approx((margins > 0).double().mean().item()),
        "margin": pytest.approx(margins.mean().item(), rel=1e-5),
    }
    with pytest.raises(StoreError, match="is a LlamaForSequenceClassification, whose head scores a sequence and"):
        generate(tmp_path / "hf", ["a"])


# -- before anything starts

PROBLEMS = {
    "frozen": (
        "train.only=[layers.0] checkpoint.init={language}",
        "score.weight is drawn, and train.only or train.freeze would leave it so: name score in train.only",
    ),
    "family": (
        "checkpoint.init=null model.preset=granite-tiny",
        "model: transformers has no ForSequenceClassification of this family: a head of scores would load nowhere",
    ),
    "dpo": (
        "preference.loss=dpo checkpoint.init={scored}",
        "head scores sequences, and predicts no tokens: set preference.loss=bradley_terry",
    ),
    "tasks": ("evaluate.tasks=[piqa]", "evaluate.tasks are of models of text, and this one scores sequences"),
    "classes": ("checkpoint.init={classes}", "is of one score, and the model's head gives 2 .id2label.: start from a"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_does_not_fit_is_said(scored: Path, tmp_path: Path, name: str) -> None:
    overrides, message = PROBLEMS[name]
    classes = tmp_path / "classes"
    shutil.copytree(scored / "scored", classes)
    config = json.loads((classes / "config.json").read_text())
    del config["id2label"], config["label2id"]
    (classes / "config.json").write_text(json.dumps(config))
    weights = load_file(classes / "model.safetensors")
    weights["score.weight"] = weights["score.weight"].repeat(2, 1)
    save_file(weights, classes / "model.safetensors", {"format": "pt"})
    given = overrides.format(scored=scored / "scored", classes=classes, language=scored / "model").split()
    found = problems(str(scored / "recipe.yaml"), f"out={tmp_path}", *OURS, *given)
    assert re.search(message, "\n".join(found)), found
