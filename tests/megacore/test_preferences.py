"""Learning from preferences, end to end: beside a loop written out in plain torch over transformers' model, and beside
TRL where it is installed; on layouts; resumed; and what is wrong with a run before it starts."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from chats import FAMILIES, chat, prepared, write_jsonl
from engine import RECIPE, Result, assert_near, of, path_of, problems, same, train, trainer
from pool import Pool
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megacore.data.examples import ExampleFiles, Examples
from megacore.data.packing import Packed
from megacore.data.reference import read
from megacore.data.text import InputError
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import TRAINER
from megacore.training.callbacks.reference import KEY, ReferenceScores
from megacore.training.check import check
from megacore.training.trainer import Trainer

LENGTH, COUNT, STEPS = 96, 12, 2
WORDS = ["wei", "and", "axe", "of", "a", "mes", "are", "nam", "in", "wor", "use", "may", "ask", "any", "ans"]
LOSSES = ("dpo", "ipo", "simpo", "orpo")
Row = dict[str, Any]


def answers(number: int) -> tuple[str, str, str]:
    """A prompt, what was chosen and what was rejected."""
    words = [WORDS[(number * 5 + i) % len(WORDS)] for i in range(3 + number % 4)]
    return words[0], " ".join(words), words[-1]


def chats(count: int = COUNT) -> list[Row]:
    """By turns with a prompt, and without one: what both begin with."""
    made = list[Row]()
    for number in range(count):
        prompt, *both = answers(number)
        keys = "chosen", "rejected"
        if number % 2:
            made.append({key: chat(prompt, each) for key, each in zip(keys, both, strict=True)})
        else:
            said = {key: [{"role": "assistant", "content": each}] for key, each in zip(keys, both, strict=True)}
            made.append({"prompt": chat(prompt, system="be brief" if number % 4 else None), **said})
    return made


def texts(count: int = COUNT) -> list[Row]:
    return [dict(zip(("prompt", "chosen", "rejected"), answers(number), strict=True)) for number in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, not_durable: None) -> Path:
    """A model in Hugging Face's format with its tokenizer, pairs, and a recipe over them."""
    folder = tmp_path_factory.mktemp("preferences")
    FAMILIES["chatml"].write(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 4) * 4 + 4,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    write_jsonl(folder / "pairs.jsonl", *chats())
    recipe = RECIPE | {
        "data": {**dict.fromkeys(("train", "validation"), str(folder / "pairs.jsonl")), "sequence_length": LENGTH},
        "batch": {"global_size": 4},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0, "clip": None},
        "schedule": {"name": "constant"},
        "train": {"steps": STEPS, "precision": "fp64", "device": "cpu"},
        "evaluate": {"every": STEPS, "batches": 1},
        "checkpoint": {"at_end": False, "init": str(folder / "model")},
        "preference": {"loss": "dpo"},
    }
    del recipe["model"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


# -- beside plain torch


def token_ids(folder: Path, rows: Sequence[Row]) -> list[tuple[list[int], list[int], list[int]]]:
    """The tokens of each prompt, and of both answers, by transformers alone."""
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for row in rows:
        if isinstance(row["chosen"], str):
            ends = [row["prompt"] + row[key] + tokenizer.eos_token for key in ("chosen", "rejected")]
            before, *whole = (tokenizer(text)["input_ids"] for text in (row["prompt"], *ends))
        else:
            before, both = row.get("prompt"), [row["chosen"], row["rejected"]]
            if before is None:
                before, both = both[0][:-1], [each[-1:] for each in both]
            by: dict[str, Any] = {"tokenize": True, "return_dict": False}
            whole = [tokenizer.apply_chat_template([*before, *each], **by) for each in both]
            before = tokenizer.apply_chat_template(before, add_generation_prompt=True, **by)
        begin = min(
            next((i for i, (a, b) in enumerate(zip(before, each, strict=False)) if a != b), len(before))
            for each in whole
        )
        found.append((before[:begin], *(each[begin:] for each in whole)))
    return found


def pairs_of(folder: Path, rows: Sequence[Row], out: Path, length: int = 900, **rules: Any) -> Examples:
    """The pairs, with the tokenizer in a folder."""
    source = ExampleFiles("pairs.jsonl", [write_jsonl(out / "pairs.jsonl", *rows)], pairs=True)
    return prepared(source, folder, out / "made", length, **rules)


@pytest.mark.parametrize("name", ["chatml", "llama-3", "phi-4", "qwen2.5"])
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """And all behind the prompt counts, with what follows the token that ends a turn."""
    folder, rows = FAMILIES[name].write(tmp_path / "model"), [*chats(), *texts()]
    found = pairs_of(folder, rows, tmp_path)
    assert found.count == len(rows) == found.facts.examples
    assert found.facts.formats == {"chosen and rejected": len(rows)}
    for number, (prompt, *ends) in enumerate(token_ids(folder, rows)):
        for place, end in enumerate(ends):
            ids, counted = found.example(2 * number + place)
            assert ids.tolist() == prompt + end
            assert counted.tolist() == [False] * len(prompt) + [True] * len(end)
        assert found.lengths[number] == 2 * len(prompt) + sum(map(len, ends))


def summed(model: LlamaForCausalLM, pair: tuple[list[int], ...]) -> Tensor:
    """The log-probabilities of both answers, [2], of one pair after the other, without a mask or padding."""
    prompt, *ends = pair
    found = []
    for end in ends:
        ids = torch.tensor(prompt + end)
        logits = model(ids[None]).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[len(prompt) - 1 :].sum())
    return torch.stack(found)


def by_hand(loss: str, found: Tensor, reference: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each pair [n] and both rewards [n, 2], as the papers have them; found, reference, sizes: [n, 2]."""
    (w, r), (nw, nr) = found.T, sizes.T
    w_ref, r_ref = reference.T
    if loss == "dpo":
        return -((w - w_ref) * 0.1 - (r - r_ref) * 0.1).sigmoid().log(), 0.1 * (found - reference)
    if loss == "ipo":
        return ((w - w_ref) / nw - (r - r_ref) / nr - 5) ** 2, 0.1 * (found - reference)
    if loss == "simpo":
        return -(2 * w / nw - 2 * r / nr - 1).sigmoid().log(), 2 * found / sizes
    pw, pr = (w / nw).exp(), (r / nr).exp()
    odds = (pw / (1 - pw)) / (pr / (1 - pr))
    return -w / nw - 0.1 * odds.log().sigmoid().log(), 0.1 * found / sizes


def by_torch(model: Any, step_of: Callable[[], tuple[Tensor, Tensor]]) -> list[dict[str, float]]:
    """Records of steps of AdamW, and of an evaluation after them; ``step_of`` gives the loss of each pair [n] and both
    rewards [n, 2]."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.0)
    records = []
    for step in range(STEPS + 1):
        losses, rewards = step_of()
        optimizer.zero_grad()
        losses.mean().backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        optimizer.step()
        chosen, rejected = rewards.detach().mean(0).tolist()
        record = {"loss": losses.mean().item(), "reward_chosen": chosen, "reward_rejected": rejected}
        record |= {"reward_accuracy": (rewards[:, 0] > rewards[:, 1]).double().mean().item()}
        record |= {"reward_margin": chosen - rejected} | ({"grad_norm": norm.item()} if step < STEPS else {})
        records.append(record)
    return records


@cache
def alone(folder: Path, loss: str) -> list[dict[str, float]]:
    """Over the rows of pairs.jsonl, all in each step."""
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    pairs = token_ids(folder / "model", chats())
    sizes = torch.tensor([[len(end) for end in ends] for _, *ends in pairs])
    reference = torch.stack([summed(model, pair).detach() for pair in pairs])
    found = lambda: torch.stack([summed(model, pair) for pair in pairs])  # noqa: E731
    return by_torch(model, lambda: by_hand(loss, found(), reference, sizes))


def run(folder: Path, out: str, *overrides: str) -> Result:
    return train(str(folder / "recipe.yaml"), [f"out={folder / out}", *overrides])


def records_of(result: Result) -> list[dict[str, float]]:
    """As of :func:`alone`."""
    known = [{key.removeprefix("validation_"): value for key, value in each.items()} for each in result.records]
    return [{key: float(x[key] or 0) for key in x if key in ("loss", "grad_norm") or "reward" in key} for x in known]


def rows_of(folder: Path, *overrides: str) -> int:
    """The rows that the pairs to train on take."""
    train = check(str(folder / "recipe.yaml"), [f"out={folder / 'counted'}", *overrides], 1, 1).corpora.train
    assert isinstance(train, Packed)
    return train.per_epoch


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_computes_what_plain_torch_computes(folder: Path, loss: str) -> None:
    """Losses, rewards, gradients and updates; pairs are packed but for ipo, a step has all of them. Transformers' norms
    and rotary angles are in fp32, whatever the rest is in."""
    more = ["chat.pack=false"] if loss == "ipo" else []
    rows = rows_of(folder, *more)
    assert rows == COUNT if more else 1 < rows < COUNT
    made = run(folder, loss, f"preference.loss={loss}", f"batch.global_size={rows}", *more)
    got = records_of(made)
    for mine, want in zip(got, alone(folder, loss), strict=True):
        assert mine == pytest.approx(want, rel=1e-6, abs=1e-7)
    assert got[0]["reward_margin"] != got[1]["reward_margin"]
    assert all(0 < seconds < 60 for seconds in made.values("seconds_per_step"))  # without those of the reference


# -- on layouts

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "micro": (1, ["batch.micro_size=2", "memory.recompute=full", "recovery.recompute_every=1"]),
    "tp4-loss": (4, ["mesh.tp=4", "memory.loss_chunk=7"]),
    "cp2-tp2": (4, ["mesh.cp=2", "mesh.tp=2", "batch.micro_size=2"]),
    "cp2-documents": (2, ["mesh.cp=2", "context.balance=documents", "context.exchange=gather"]),
    "pp4-zb": (4, ["mesh.pp=4", "pipeline.schedule=zb-h1", "memory.loss_chunk=9"]),
    "tp2-pp2-selective": (4, ["mesh.tp=2", "mesh.pp=2", "memory.recompute=selective"]),
    "dp2-optimizer": (2, ["mesh.dp=2", "zero.shard=optimizer", "recovery.recompute_every=1"]),
    "dp2-tp2-gradients": (4, ["mesh.dp=2", "mesh.tp=2", "zero.shard=gradients"]),
    "dp2-pp2-parameters": (4, ["mesh.dp=2", "mesh.pp=2", "zero.shard=parameters", "memory.loss_chunk=5"]),
    "dp2-cp2-parameters": (4, ["mesh.dp=2", "mesh.cp=2", "zero.shard=parameters"]),
    "interleaved": (2, ["mesh.pp=2", "pipeline.chunks=2", "pipeline.schedule=interleaved"]),
    "gpipe": (2, ["mesh.pp=2", "pipeline.schedule=gpipe"]),
}
LORA = ("lora.rank=4", "lora.alpha=8", "optimizer.lr=1e-2")


def ranks(folder: Path, out: str, overrides: Sequence[str]) -> Result:
    return run(folder, out, *overrides)


def name_of(given: tuple[str, ...]) -> str:
    """The folder of the run of one process."""
    return "-".join(("one", *given)).replace("/", "")


@cache
def one_process(pool: Pool, folder: Path, given: tuple[str, ...]) -> Result:
    (found,) = pool.run(1, ranks, folder, name_of(given), [*given, "batch.global_size=3"])
    assert isinstance(found, Result)
    return found


def on_layout(pool: Pool, folder: Path, out: str, layout: str, *given: str) -> Result:
    """A run on a layout, which logs what one process does."""
    world, overrides = LAYOUTS[layout]
    want = one_process(pool, folder, given)
    found: Result = pool.run(world, ranks, folder, out, [*overrides, *given, "batch.global_size=3"])[0]
    for mine, wanted in zip(records_of(found), records_of(want), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    if world == 1 or "zero.shard=optimizer" in overrides:
        assert_near(found.weights, want.weights, 1e-9)
    return found


@pytest.mark.in_turn(24)
@pytest.mark.parametrize("tuning", ["all", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_what_one_process_computes(pool: Pool, folder: Path, layout: str, tuning: str) -> None:
    """The references too, which each layout computes for itself; three rows over two ranks leave one of them less."""
    loss = LOSSES[(list(LAYOUTS).index(layout) + (tuning == "lora")) % 4]
    on_layout(pool, folder, f"{layout}-{tuning}", layout, f"preference.loss={loss}", *LORA * (tuning == "lora"))


# -- resumed


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("more", [(), LORA], ids=["all", "lora"])
def test_a_run_that_goes_on_reads_its_reference(
    pool: Pool, folder: Path, tmp_path: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise on the layout that it was on, and as one process on another one; it computes the reference once."""
    saving = ["checkpoint.every=2", "train.steps=4", "evaluate.every=0", "schedule.name=constant", *more]
    one = train(str(folder / "recipe.yaml"), [f"out={tmp_path / 'one'}", *saving])
    (kept,) = (tmp_path / "one").glob("examples/*/reference-*")
    assert json.loads((path_of(tmp_path / "one", 2) / TRAINER).read_text())[KEY] in kept.name
    from_there = [
        *saving,
        f"checkpoint.resume={path_of(tmp_path / 'one', 2)}",
        *([] if more else ["checkpoint.init=null"]),
    ]
    layout = [f"out={tmp_path / 'other'}", *from_there, "mesh.tp=2", "mesh.dp=2", "zero.shard=gradients"]
    elsewhere = pool.run(4, train, str(folder / "recipe.yaml"), layout)
    assert elsewhere[0].values("loss") == pytest.approx(one.values("loss")[2:], rel=1e-9)
    monkeypatch.setattr(ReferenceScores, "_computed", None)
    again = train(str(folder / "recipe.yaml"), [f"out={tmp_path / 'again'}", *from_there])
    assert again.values("loss") == one.values("loss")[2:] and same(again.weights, one.weights)
    (copied,) = (tmp_path / "again").glob("examples/*/reference-*")
    assert copied.read_bytes() == kept.read_bytes()
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    with pytest.raises(StoreError, match="is damaged, or of other pairs"):
        train(str(folder / "recipe.yaml"), [f"out={tmp_path / 'damaged'}", *from_there])
    kept.unlink()
    with pytest.raises(
        StoreError, match="is not there, or is of other pairs, and the weights that the run started from"
    ):
        train(str(folder / "recipe.yaml"), [f"out={tmp_path / 'gone'}", *from_there])


def test_a_reference_is_of_the_weights_and_of_their_precision(folder: Path, tmp_path: Path) -> None:
    """Runs in one folder, or with another share held out, compute what they have not found."""
    calls = list[int]()

    def counting(self: ReferenceScores, run: Trainer, source: Packed) -> Any:
        calls.append(len(source.chosen))
        return computed(self, run, source)

    computed = ReferenceScores._computed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceScores, "_computed", counting)
        found = []
        for more in ([], [], ["train.precision=fp32"], ["data.validation=[]", "data.validation_fraction=0.3"]):
            made = trainer(str(folder / "recipe.yaml"), [f"out={tmp_path}", *more])
            of(made, ReferenceScores).on_start(made)
            found.append([*calls])
            calls.clear()
    assert found == [[COUNT], [], [COUNT], []]
    assert len(list(tmp_path.glob("examples/*/reference-*"))) == 2


# -- before anything starts

PROBLEMS = {
    "preference=null": "pairs.jsonl, line 1: has 'chosen' and 'rejected', which are preferences: learn from both by",
    "data.train=corpus": "learns from files of pairs, 'chosen' and 'rejected', and corpus is none",
    "data.sequence_length=12 chat.too_long=drop": "has no examples to train on: 0 bad lines, 12 dropped",
}


@pytest.mark.parametrize("overrides", PROBLEMS)
def test_what_does_not_fit_is_said(folder: Path, tmp_path: Path, overrides: str) -> None:
    found = problems(str(folder / "recipe.yaml"), f"out={tmp_path}", *overrides.split())
    assert PROBLEMS[overrides] in "\n".join(found)


def said(*turns: str) -> list[dict[str, str]]:
    return chat(*turns)


BAD_ROWS: dict[str, tuple[Row, str]] = {
    "keys": ({"question": "a", "good": "b"}, "has 'question', 'good', and no 'chosen' and no 'rejected': preferences"),
    "messages": ({"messages": said("a", "b")}, "has 'messages', and no 'chosen' and no 'rejected'"),
    "one": ({"prompt": "a", "chosen": "b"}, "and no 'rejected': preferences are pairs, whose keys a recipe names"),
    "same": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the chosen and the rejected answer are the same"),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": ""}, "the rejected answer is empty"),
    "no prompt": ({"chosen": said("a", "b"), "rejected": said("c", "d")}, "has no prompt: give 'prompt', or begin"),
    "text": ({"chosen": said("a", "b"), "rejected": "c"}, "rejected is a str, not a list"),
    "user": (
        {"prompt": said("a"), "chosen": said("b"), "rejected": said("c", "d")},
        "chosen ends with the user, not with",
    ),
    "prompt": (
        {"prompt": "b", "chosen": said("a", "b"), "rejected": said("a", "d")},
        "the prompt is a str, not a list",
    ),
    "system": (
        {"system": "s", "prompt": "a", "chosen": "b", "rejected": "c"},
        "has 'system' beside 'chosen', which is",
    ),
    "question": (
        {"question": "a", "chosen": "The b", "rejected": "The c"},
        "not read: name it by data.map={prompt: quest",
    ),
    "kwargs": ({"prompt": "a", "chosen": "b", "rejected": "c", "chat_template_kwargs": {"a": 1}}, "which is not read"),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_is_no_pair_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    row, message = BAD_ROWS[name]
    with pytest.raises(InputError, match=f"line 2: .*{re.escape(message)}"):
        pairs_of(folder / "model", [chats()[0], row], tmp_path)
    kept = pairs_of(folder / "model", [chats()[0], row], tmp_path, bad_lines="skip")
    assert kept.count == 1 and kept.facts.skipped == 1


def test_a_prompt_may_be_told_beside_whole_chats(folder: Path, tmp_path: Path) -> None:
    """As text, of what they begin with; keys may be others; of texts it is all characters that both begin with."""
    row = {"chosen": said("hi", "yes"), "rejected": said("hi", "no")}
    plain, beside, mapped = (
        pairs_of(folder / "model", [each], tmp_path) for each in (row, row | {"prompt": "hi"}, row | {"score": 3})
    )
    assert plain.identity == beside.identity == mapped.identity
    whole = pairs_of(folder / "model", [{"chosen": "of a mesh", "rejected": "of a weight"}], tmp_path)
    parts = pairs_of(folder / "model", [{"prompt": "of a", "chosen": " mesh", "rejected": " weight"}], tmp_path)
    assert whole.identity == parts.identity


def test_long_answers_are_cut_and_no_answer_to_less_than_half_a_row(folder: Path, tmp_path: Path) -> None:
    long = {"prompt": "a b", "chosen": " a" * 90, "rejected": " b"}
    both, alone = long | {"rejected": " b" * 80}, long | {"prompt": "a b" * 40}
    found = pairs_of(folder / "model", [long, both, alone], tmp_path, length=63)
    sizes = [[len(found.example(2 * number + place)[0]) for place in (0, 1)] for number in range(found.count)]
    assert sizes[0][0] == 64 - sizes[0][1] > 50 and sizes[1] == [32, 32]
    assert found.facts.cut == 2 and found.facts.dropped == 1  # the prompt alone takes half of the row
    with pytest.raises(InputError, match="3 dropped as they are too long"):
        pairs_of(folder / "model", [long, both, alone], tmp_path, length=63, too_long="drop")


# -- beside TRL, where it is installed


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_a_run_computes_what_trl_computes(folder: Path, tmp_path: Path, loss: str) -> None:
    """Tokens and what counts of them; log-probabilities, losses and rewards of three steps in fp32. Its versions change
    what they call, and it is no dependency: 1.16 has been seen to agree."""
    trl = pytest.importorskip("trl", minversion="1.16")
    datasets = pytest.importorskip("datasets")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", pad_token="<|end|>")
    rows = [
        {"prompt": row["chosen"][:-1], **{key: row[key][-1:] for key in ("chosen", "rejected")}}
        if "prompt" not in row
        else row
        for row in chats()
    ]
    args = trl.DPOConfig(
        str(tmp_path), loss_type={"dpo": "sigmoid"}.get(loss, loss), beta=0.1, max_length=None, max_steps=3,
        per_device_train_batch_size=COUNT, learning_rate=1e-3, adam_beta2=0.95, lr_scheduler_type="constant",
        max_grad_norm=0.0, weight_decay=0.0, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
        bf16=False, gradient_checkpointing=False, disable_tqdm=True, precompute_ref_log_probs=True,
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    theirs = trl.DPOTrainer(
        model, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    tokens = [(each["prompt_ids"], each["chosen_ids"], each["rejected_ids"]) for each in theirs.train_dataset]
    assert tokens == token_ids(folder / "model", chats())
    theirs.train()
    more = ["train.precision=fp32", "train.steps=3", "evaluate.every=0", f"batch.global_size={rows_of(folder)}"]
    got = records_of(run(folder, f"trl-{loss}", f"preference.loss={loss}", *more))
    (kept,) = (folder / f"trl-{loss}").glob("examples/*/reference-*")
    want = [[each["ref_chosen_logps"], each["ref_rejected_logps"]] for each in theirs.train_dataset]
    np.testing.assert_allclose(read(kept, COUNT), want, rtol=1e-5, atol=1e-5)
    names = {"chosen": "chosen", "rejected": "rejected", "accuracies": "accuracy", "margins": "margin"}
    logged = [record for record in theirs.state.log_history if "rewards/chosen" in record]
    assert len(logged) == len(got) == 3
    for mine, log in zip(got, logged, strict=True):
        wanted = {f"reward_{ours}": log[f"rewards/{name}"] for name, ours in names.items()} | {"loss": log["loss"]}
        assert {key: mine[key] for key in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-5)
