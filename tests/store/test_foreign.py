"""Checkpoints that other trainers write: FSDP2's here, by torch itself. What is read of them, and what is refused."""

from __future__ import annotations

import pickle  # noqa: TID251  # to write what must not be run
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
import torch
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor

from megacore import convert
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.pickles import read_pickle

LR, DECAY, STEPS = 1e-2, 0.1, 3
RECIPE = {
    **{name: value for name, value in engine.RECIPE.items() if name != "model"},
    "optimizer": {"lr": LR, "weight_decay": DECAY, "clip": None},
    "schedule": {"name": "constant"},
    "train": {"steps": STEPS + 1, "precision": "fp32", "device": "cpu"},
    "evaluate": {"every": 0},
    "checkpoint": {"at_end": True},
}


# -- what ranks of FSDP2 do


def _model(tied: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields = {name: value for name, value in engine.LLAMA.items() if name != "family"}
    model = LlamaForCausalLM(LlamaConfig(**fields, tie_word_embeddings=tied))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)


def _step(model: Any, optimizer: Any, tokens: Tensor, labels: Tensor) -> None:
    """All ranks do the same, and FSDP2 takes the mean."""
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _state(model: Any, optimizer: Any, flat: bool) -> dict[str, Any]:
    """Return what is saved: in an application's own dict, or flat, as torchtitan has it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if flat:
        return {**weights, "optimizer": moments, "train_state": {"step": STEPS}}
    return {"app": {"model": weights, "optim": moments}}


def _written(path: str, tied: bool, flat: bool) -> None:
    """Train some steps and save."""
    import torch.distributed.checkpoint as dcp

    model, optimizer = _model(tied)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(engine.VOCAB, (4, engine.LENGTH + 1), generator=generator)
        _step(model, optimizer, tokens[:, :-1], tokens[:, 1:])
    dcp.save(_state(model, optimizer, flat), checkpoint_id=path)
    if torch.distributed.get_rank() == 0:
        model.config.save_pretrained(path)


def _stepped(path: str, tied: bool, flat: bool, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Load what was saved, by torch itself, and do the next step -> the weights by their names."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_state_dict

    model, optimizer = _model(tied)
    state = _state(model, optimizer, flat)
    dcp.load(state, checkpoint_id=path)
    weights, moments = (state, state["optimizer"]) if flat else (state["app"]["model"], state["app"]["optim"])
    weights = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
    _step(model, optimizer, tokens, labels)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


# -- a step after it


@pytest.mark.parametrize(("tied", "flat"), [(True, False), (False, True)], ids=["tied-in-an-app", "flat"])
def test_the_next_step_is_theirs(pool: Pool, tmp_path: Path, tied: bool, flat: bool) -> None:
    """With the moments that FSDP2 wrote, in any layout of ours: the weights after it are those that FSDP2 has."""
    theirs, ours = tmp_path / "fsdp2", tmp_path / "ours"
    pool.run(2, _written, str(theirs), tied, flat)
    made = convert(theirs, ours, tp=2, pp=2)
    assert made.tensors and open_folder(ours).states == ("weights", "exp_avg", "exp_avg_sq")
    recipe = engine.write_recipe(tmp_path, RECIPE)
    (tokens, labels, loss), *_ = pool.run(4, _next, recipe, str(ours), str(tmp_path / "run"))
    convert(tmp_path / "run", tmp_path / "hf", to="hf")
    want = pool.run(2, _stepped, str(theirs), tied, flat, tokens, labels)[0]
    got = load_file(tmp_path / "hf/model.safetensors")
    assert got.keys() == want.keys() - ({"lm_head.weight"} if tied else set()) and loss < 10
    for name, value in got.items():
        assert (value - want[name]).abs().max() < 1e-6, name


def _next(recipe: str, resumed: str, out: str) -> tuple[Tensor, Tensor, float]:
    """One step of ours that goes on from there -> its tokens and labels, and its loss."""
    overrides = [f"out={out}", f"checkpoint.resume={resumed}", "mesh.tp=2", "mesh.pp=2", "batch.micro_size=2"]
    made, seen = engine.trainer(recipe, overrides), list[Any]()
    plain = made.train_step.backward

    def backward(microbatches: Any, *rest: Any) -> Any:
        seen.extend(microbatches)
        found.append(plain(microbatches, *rest))
        return found[-1]

    found = list[Any]()
    made.train_step.backward = backward  # type: ignore[method-assign]
    assert made.fit() == STEPS + 1
    return *(torch.cat([getattr(each, name).flatten() for each in seen]).view(-1, engine.LENGTH) for name in ("tokens", "labels")), float(found[0].loss)
