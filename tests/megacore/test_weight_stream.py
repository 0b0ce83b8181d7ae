"""The stream of a run's weights is bit for bit its export, on every layout, in the memory of two tensors."""

import math
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
import torch
from engine import GPT2, LLAMA, RECIPE, path_of, trainer, write_recipe
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor
from tracked import Tracked
from wrapped import saved

from megacore import convert
from megacore.store.io.errors import StoreError
from megacore.training.step import Stats
from megacore.training.trainer import Callback, Trainer
from megacore.training.weight_stream import WeightStream

MIXTRAL = {key: value for key, value in LLAMA.items() if key != "family"} | {
    "family": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
TIED = LLAMA | {"tie_word_embeddings": True}
STEPS = ["train.steps=2", "schedule.warmup_steps=0", "evaluate.every=0", "checkpoint.at_end=true"]
LORA = ["lora.rank=2", "lora.alpha=8", "lora.targets=[q_proj,attn.qkv.v,mlp]"]


class Pushes(Callback):
    """Takes the weights after the second step, as a loop of reinforcement learning would."""

    def __init__(self, merged: bool, everywhere: bool) -> None:
        self.arguments = merged, everywhere

    def on_start(self, run: Trainer) -> None:
        self.stream = run.weights(*self.arguments)
        assert [name for name, _ in self.stream] == [each.name for each in self.stream.metadata()]

    def on_step(self, run: Trainer, stats: Stats) -> None:
        if run.step == 2:
            self.tensors = {name: tensor.clone() for name, tensor in self.stream}
            self.beyond = beyond_shards(run, self.stream)


def beyond_shards(run: Trainer, stream: WeightStream) -> float:
    """The most bytes of tensors that a stream has beside those that the run holds, in largest parameters."""
    gradients = run.train_step.gradients
    flat = [values.own for values in (*gradients.values.values(), *gradients.frozen)]
    with Tracked(*run.model.parameters.values(), *flat) as tracked:
        held = tracked.live
        for _, tensor in stream:
            del tensor
    schema, dtype = run.model.parameters.layout.schema, run.model.parameters.dtype
    largest = max(math.prod(param.sentence.shape(schema.sizes)) for param in schema.params)
    return (tracked.peak - held) / (largest * dtype.itemsize)


def streamed(
    recipe: str, overrides: list[str], merged: bool = False, everywhere: bool = False
) -> tuple[list[Any], dict[str, np.ndarray | None], float]:
    """A run on this rank -> (what the stream says is to come, the bits that came, None on no device, memory beyond the
    shards)."""
    pushes = Pushes(merged, everywhere)
    trainer(recipe, [*STEPS, *overrides], callbacks=[pushes]).fit()
    told = [(name, str(dtype), shape) for name, dtype, shape in pushes.stream.metadata()]
    return told, {name: bits(tensor) for name, tensor in pushes.tensors.items()}, pushes.beyond


def bits(tensor: Tensor) -> np.ndarray | None:
    return None if tensor.is_meta else tensor.contiguous().view(torch.uint8).numpy()


def assert_is_export(found: tuple[list[Any], dict[str, np.ndarray | None], int], hf: Path) -> None:
    """What rank 0 was given is what lies in an exported file."""
    told, tensors, _ = found
    want = load_file(next(hf.glob("*.safetensors")))
    assert {(name, str(each.dtype), tuple(each.shape)) for name, each in want.items()} == {*told}
    assert len(told) == len(want)
    for name, each in want.items():
        np.testing.assert_array_equal(tensors[name], bits(each), err_msg=name)


LAYOUTS = [
    pytest.param(LLAMA, 1, ["train.precision=bf16"], id="one"),
    pytest.param(LLAMA, 4, ["mesh.tp=2", "mesh.pp=2", "train.precision=bf16"], id="tp2-pp2"),
    pytest.param(LLAMA, 4, ["mesh.tp=4"], id="tp4"),  # kv heads shared, vocabulary padded
    pytest.param(
        LLAMA,
        4,
        ["mesh.cp=2", "zero.shard=parameters", "train.precision=fp32", "batch.micro_size=1"],
        id="cp2-parameters",
    ),
    pytest.param(LLAMA, 4, ["mesh.tp=4", "zero.shard=optimizer"], id="tp4-optimizer"),
    pytest.param(TIED, 4, ["mesh.pp=2", "zero.shard=gradients"], id="tied-pp2-gradients"),
    pytest.param(TIED, 4, ["mesh.pp=2", "zero.shard=parameters"], id="tied-pp2-parameters"),
    pytest.param(GPT2, 2, ["mesh.tp=2", "zero.shard=optimizer"], id="gpt2-tp2"),
    pytest.param(MIXTRAL, 4, ["mesh.ep=2", "mesh.tp=2"], id="ep2-tp2"),
    pytest.param(MIXTRAL, 4, ["mesh.ep=2", "zero.shard=parameters"], id="ep2-parameters"),
]


@pytest.mark.in_turn(5)
@pytest.mark.parametrize(("model", "world", "overrides"), LAYOUTS)
def test_it_is_the_export_of_its_step(
    pool: Pool, tmp_path: Path, model: dict[str, Any], world: int, overrides: list[str]
) -> None:
    recipe, out = write_recipe(tmp_path, RECIPE | {"model": model}), tmp_path / "run"
    everywhere = "mesh.pp=2" in overrides
    ranks = pool.run(world, streamed, recipe, [f"out={out}", *overrides], False, everywhere)
    convert(path_of(out, 2), tmp_path / "hf", to="hf")
    assert_is_export(ranks[0], tmp_path / "hf")
    for told, tensors, beyond in ranks:
        assert told == ranks[0][0]
        assert all((each is not None) == everywhere for each in tensors.values()) or (told, tensors) == ranks[0][:2]
        assert beyond <= 2


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("overrides", [["mesh.tp=2", "mesh.pp=2"], ["mesh.tp=2", "zero.shard=parameters"]])
def test_adapters_come_alone_or_merged(pool: Pool, tmp_path: Path, overrides: list[str], merged: bool) -> None:
    recipe, base, precision = write_recipe(tmp_path), tmp_path / "base", "train.precision=bf16"
    engine.train(recipe, [f"out={base}", precision, *STEPS])
    convert(path_of(base, 2), tmp_path / "model", to="hf")
    given = [precision, f"checkpoint.init={tmp_path / 'model'}", *LORA, *overrides]
    ranks = pool.run(4, streamed, recipe, [f"out={tmp_path / 'run'}", *given], merged)
    options: dict[str, Any] = {"to": "hf", "base": tmp_path / "model"} if merged else {"to": "peft"}
    convert(path_of(tmp_path / "run", 2), tmp_path / "made", **options)
    assert_is_export(ranks[0], tmp_path / "made")


@pytest.mark.in_turn(3)
def test_a_part_of_a_larger_model_has_the_names_of_the_whole(tmp_path: Path) -> None:
    folder, recipe = saved("qwen3_vl", tmp_path / "hf"), write_recipe(tmp_path, RECIPE | {"model": {}})
    given = ["train.precision=fp32", f"checkpoint.init={folder}"]
    run, whole = trainer(recipe, [f"out={tmp_path / 'run'}", *given]), load_file(folder / "model.safetensors")
    found = dict(run.weights())
    assert found.keys() == {name for name in whole if not name.startswith("model.visual.")}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())
    run = trainer(recipe, [f"out={tmp_path / 'tuned'}", *given, *LORA])
    assert dict(run.weights(merged=True)).keys() == found.keys()
    with pytest.raises(StoreError, match=r"alone: .*hf is a larger model of which qwen3 is a part"):
        run.weights()


def test_quantised_weights_are_not_merged(tmp_path: Path) -> None:
    wide = LLAMA | {"hidden_size": 64, "intermediate_size": 64}
    recipe, base = write_recipe(tmp_path, RECIPE | {"model": wide}), tmp_path / "base"
    engine.train(recipe, [f"out={base}", "train.precision=fp32", *STEPS])
    given = [f"out={tmp_path / 'run'}", "train.precision=fp32", f"checkpoint.init={path_of(base, 2)}", *LORA]
    run = trainer(recipe, [*given, "lora.base_dtype=int8"])
    assert all(".lora_" in name for name, _ in run.weights())
    with pytest.raises(StoreError, match="held in int8 are not merged between steps"):
        run.weights(merged=True)
