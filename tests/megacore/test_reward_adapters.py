"""Reward models by adapters: the head of scores is trained in full beside them, and goes where they go."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine import assert_same_files, checked, path_of, same, train, trainer
from pool import Pool
from safetensors.torch import load_file
from test_preferences import LAYOUTS, chats, folder, name_of, on_layout, records_of, rows_of, token_ids
from test_rewards import OURS, scored, scores_of
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from megacore.inference.loaded_model import load_model
from megacore.models.config import parameters_in_words
from megacore.parallel.weights.transfer import hugging_face, plan
from megacore.store.conversions.convert import convert
from megacore.store.tensor_files.stream import assemble
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.training.resume import remarks

__all__ = ["folder", "scored"]
LORA = (*OURS, "lora.rank=3", "lora.alpha=9", "optimizer.lr=1e-2")
HEAD = "base_model.model.score.weight"
STATES = ("weights", "exp_avg")
SAVED = ("checkpoint.at_end=true", "evaluate.every=0")


def held(run: Path, step: int, state: str) -> dict[str, np.ndarray]:
    """Whole tensors of a state of a run in fp64, on whatever layout it was."""
    checkpoint = Checkpoint.open(path_of(run, step))
    wanted = hugging_face(checkpoint.schema)
    planned = plan(checkpoint.schema, checkpoint.stored(state), wanted)
    read = checkpoint.read(state)
    return {stored.name: assemble(stored, copies, read, "F64").view(np.float64) for stored, copies in planned}


def adapters_in(run: Path, step: int, to: Path) -> dict[str, Tensor]:
    """What the peft library is given of a run."""
    convert(path_of(run, step), to, to="peft")
    return load_file(to / "adapter_model.safetensors")


# -- on layouts


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_compute_what_one_process_computes(pool: Pool, folder: Path, layout: str) -> None:
    """Losses, norms of gradients, and after two updates every adapter and the head, and the mean of its gradients."""
    out, given = f"adapted-{layout}", (*LORA, "checkpoint.at_end=true")
    on_layout(pool, folder, out, layout, *given)
    for state in STATES:
        made, tensors = held(folder / out, 2, state), held(folder / name_of(given), 2, state)
        assert made.keys() == tensors.keys() and HEAD in made
        for name, tensor in made.items():
            assert tensor.any(), (state, name)
            np.testing.assert_allclose(tensor, tensors[name], rtol=1e-9, atol=1e-12, err_msg=f"{state} of {name}")


# -- what a checkpoint holds


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("start", ["model", "scored"])
def test_the_head_is_saved_with_the_adapters_and_goes_on_bitwise(
    pool: Pool, scored: Path, tmp_path: Path, start: str
) -> None:
    """Drawn beside a language model, or that of a reward model, whose own must not come back."""
    recipe = str(scored / "recipe.yaml")
    given = [*LORA, *SAVED, f"checkpoint.init={scored / start}", "checkpoint.every=2", "train.steps=4"]
    given, mesh = [*given, "lora.dropout=0.2"], ["mesh.pp=2", "mesh.tp=2"]
    straight = pool.run(4, train, recipe, [*given, *mesh, f"out={tmp_path / 'straight'}"])
    half = path_of(tmp_path / "straight", 2)
    saved = Checkpoint.open(half)
    for state in ("weights", "exp_avg", "exp_avg_sq"):
        assert {each.param.rpartition(".")[2] for each in saved.stored(state)} == {"lora_a", "lora_b", "weight"}
        assert [each.param for each in saved.stored(state) if each.param.endswith(".weight")] == ["score.weight"] * 2
    again = [*given, f"out={tmp_path / 'again'}", f"checkpoint.resume={half}"]
    setup, _ = checked(recipe, again)
    assert not any("is drawn" in line for line in remarks(setup.start, setup.config, setup.model, saved.layout.mesh))
    for mine, theirs in zip(pool.run(4, train, recipe, [*again, *mesh]), straight, strict=True):
        assert same(mine.weights, theirs.weights)
    assert_same_files(path_of(tmp_path / "straight", 4), path_of(tmp_path / "again", 4), 12)


# -- what comes out


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("start", ["model", "scored"])
def test_peft_and_transformers_compute_what_we_compute(scored: Path, tmp_path: Path, start: str) -> None:
    """The scores of the adapters beside their base and merged; and the loss and the gradients of the step after."""
    recipe, base, run = str(scored / "recipe.yaml"), scored / start, tmp_path / "run"
    rows = rows_of(scored, *LORA, f"checkpoint.init={base}")
    given = [*LORA, *SAVED, f"checkpoint.init={base}", f"batch.global_size={rows}", "checkpoint.every=2"]
    third = records_of(train(recipe, [*given, "train.steps=3", f"out={run}"]))[2]
    adapters = adapters_in(run, 2, tmp_path / "peft")
    convert(path_of(run, 2), tmp_path / "merged", to="hf", base=base, dtype="float64")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged["score.weight"], adapters[HEAD]) and "lm_head.weight" not in merged
    if start == "scored":
        assert not torch.equal(merged["score.weight"], load_file(base / "model.safetensors")["score.weight"].double())
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])

    pairs = token_ids(base, chats())
    alone = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    want = scores_of(alone, pairs).detach()
    rewards = -logsigmoid(want[:, 0] - want[:, 1]).mean()
    assert third["loss"] == pytest.approx(rewards.item(), rel=1e-5)
    convert(base, tmp_path / "base", to="megacore")  # whose tensors have fingerprints
    for path, beside in ((tmp_path / "merged", None), (path_of(run, 2), base), (path_of(run, 2), tmp_path / "base")):
        with load_model(path, base=beside) as model:
            for (prompt, *ends), wanted in zip(pairs, want, strict=True):
                for end, score in zip(ends, wanted, strict=True):
                    assert model.logits(prompt + end)[-1].tolist() == pytest.approx([score.item()], rel=1e-5, abs=1e-5)
    going_on = trainer(recipe, [*given, f"checkpoint.resume={path_of(run, 2)}", f"out={tmp_path / 'on'}"])
    streams = {name: dict(going_on.weights(merged=name == "merged")) for name in ("merged", "peft")}
    for name, files in (("merged", merged), ("peft", adapters)):
        assert streams[name].keys() == files.keys()
        for tensor, value in files.items():
            # Merged in the dtype of the weights, which is fp64 here and fp32 in the base.
            tolerance = 1e-6 * (name == "merged")
            torch.testing.assert_close(streams[name][tensor], value, rtol=tolerance, atol=tolerance, msg=tensor)

    peft = pytest.importorskip("peft", reason="the peft library is not installed")
    plain = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float64, num_labels=1)
    model = peft.PeftModel.from_pretrained(plain, tmp_path / "peft", is_trainable=True, autocast_adapter_dtype=False)
    model.double()
    found = scores_of(model, pairs)
    torch.testing.assert_close(found.detach(), want, rtol=1e-5, atol=1e-5)
    (-logsigmoid(found[:, 0] - found[:, 1]).mean()).backward()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    norm = torch.cat([each.grad.flatten() for each in trained.values() if each.grad is not None]).norm()
    assert third["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert peft.get_peft_model_state_dict(model).keys() == adapters.keys()
    assert sum(map(Tensor.numel, trained.values())) == sum(map(Tensor.numel, adapters.values()))


# -- before anything starts


def test_the_head_counts_as_trained(scored: Path, tmp_path: Path) -> None:
    counts = []
    for loss in ("bradley_terry", "dpo"):
        setup, _ = checked(str(scored / "recipe.yaml"), [*LORA, f"preference.loss={loss}", f"out={tmp_path}"])
        counts.append(setup.config.tuning.trained(setup.model.schema))
        assert f"({counts[-1]:,} trained)" in parameters_in_words(setup.model, setup.config.tuning)
    assert counts[0] - counts[1] == setup.model.sizes["embed"]
