"""Checkpoints that other trainers write: FSDP2's here, by torch itself, and others by hand as they lay them out. What
is read of them, and what is refused."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle  # noqa: TID251  # to write what must not be run
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from changes import edit_config
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor

from megacore import convert
from megacore.models.registry import configure
from megacore.parallel.weights.transfer import hugging_face
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.distributed import DistributedFiles
from megacore.store.tensor_files.pickles import read_pickle
from megacore.store.tensor_files.torch_files import read_saved
from megacore.store.weight_folders.folder import WeightFolder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

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
    fields: Any = {name: value for name, value in engine.LLAMA.items() if name != "family"}
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
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_state_dict

    model, optimizer = _model(tied)
    state = _state(model, optimizer, flat)
    dcp.load(state, checkpoint_id=path)
    weights, moments = (state, state["optimizer"]) if flat else (state["app"]["model"], state["app"]["optim"])
    weights = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
    _step(model, optimizer, tokens, labels)
    full: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return dict(full)


# -- a step after it


@pytest.mark.in_turn(4)
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
    made, seen, stats = engine.trainer(recipe, overrides), list[Any](), list[Any]()
    step: Any = made.train_step
    plain = step.backward

    def backward(microbatches: Any, *rest: Any) -> Any:
        seen.extend(microbatches)
        stats.append(plain(microbatches, *rest))
        return stats[-1]

    step.backward = backward
    assert made.fit() == STEPS + 1
    tokens, labels = (torch.cat([getattr(each, name) for each in seen]) for name in ("tokens", "labels"))
    return tokens.view(-1, engine.LENGTH), labels.view(-1, engine.LENGTH), float(stats[0].loss)


# -- names

_KINDS = "exp_avg", "exp_avg_sq"
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def _tensors(seed: int = 0, model: Mapping[str, Any] = engine.LLAMA) -> dict[str, Tensor]:
    """Tensors of a model by Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {stored.name: stored.shape for stored in hugging_face(configure(dict(model)).schema)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _save(folder: Path, state: Mapping[str, Any], model: Mapping[str, Any] = engine.LLAMA) -> Path:
    """Save what one process has."""
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(configure(dict(model)).to_hugging_face()))
    return folder


_WORDS = {
    "model.embed_tokens": "tok_embeddings",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _titans(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By torchtitan's names, the two halves of each head of queries and keys between each other."""
    made = {}
    for name, value in tensors.items():
        theirs = name.removeprefix("model.") if name != "model.embed_tokens.weight" else name
        for word, their_word in _WORDS.items():
            theirs = theirs.replace(word, their_word)
        turns = "q_proj" in name or "k_proj" in name
        made[theirs] = torch.cat([_paired(head) for head in value.split(4)]) if turns else value
    return made


def _paired(head: Tensor) -> Tensor:
    return torch.stack(head.chunk(2), 1).flatten(0, 1)


def _fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values in one, group by group, as its optimizer has them."""
    made = {name: value for name, value in tensors.items() if ".qkv_linear." not in name}
    for layer in range(4):
        q, k, v = (tensors[f"layers.{layer}.attention.qkv_linear.w{x}.weight"] for x in "qkv")
        groups = zip(q.split(8), k.split(4), v.split(4), strict=True)
        made[f"layers.{layer}.attention.qkv_linear.wqkv.weight"] = torch.cat([torch.cat(each) for each in groups])
    return made


@pytest.mark.parametrize("older", [False, True])
def test_torchtitan_names(tmp_path: Path, older: bool) -> None:
    """Its names, the order of its heads and what it fuses: every element where it belongs."""
    weights, *moments = (_tensors(seed) for seed in range(3))
    state: dict[str, Any] = _titans(weights)
    for kind, values in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        theirs = _titans(values) if older else _fused(_titans(values))
        state |= {f"optimizer.state.{name}.{kind}": value for name, value in theirs.items()}
        state |= {f"optimizer.state.{name}.step": torch.tensor(5.0) for name in theirs}
    if older:
        words = {".qkv_linear": "", "lm_head": "output"}
        for word, said in words.items():
            state = {name.replace(word, said): value for name, value in state.items()}
    folder = open_folder(_save(tmp_path / "titan", state | {"dataloader": {"at": 3}}))
    assert json.loads(folder.trainer_json() or b"")["optimizer_steps"] == folder.index.step == 5
    assert folder.states == ("weights", "exp_avg", "exp_avg_sq")
    for name, values in zip(folder.states, (weights, *moments), strict=True):
        _assert_bits(folder, name, values)


def _assert_bits(folder: WeightFolder, state: str, values: Mapping[str, Tensor]) -> None:
    assert {stored.name for stored in folder.stored(state)} == values.keys()
    for stored in folder.stored(state):
        bits, want = folder.read(state)(stored)[1], values[stored.name].contiguous()
        assert np.array_equal(bits.view(f"i{bits.itemsize}"), want.view(_INTEGERS[want.dtype]).numpy()), stored.name


def _moments(tensors: Mapping[str, Tensor], root: str, steps: int = 5) -> dict[str, Tensor]:
    """Moments of tensors in an optimizer of its own, by what stands before their names."""
    made = {f"{root}{name}.{kind}": value + n for n, kind in enumerate(_KINDS) for name, value in tensors.items()}
    return made | {f"{root}{name}.step": torch.tensor(float(steps)) for name in tensors}


def test_each_optimizer_has_moments_of_some_tensors(tmp_path: Path) -> None:
    """None of them are lost; what has none in either is said, and was frozen."""
    weights = _tensors()
    norms = {name: value for name, value in weights.items() if value.ndim == 1}
    frozen = "model.embed_tokens.weight"
    others = {name: value for name, value in weights.items() if name not in norms and name != frozen}
    state = weights | _moments(norms, "vectors.state.") | _moments(others, "optim.matrices.state.")
    folder = open_folder(_save(tmp_path / "two", state))
    assert folder.states == ("weights", *_KINDS) and folder.index.frozen == {"embed.weight"}
    assert "without moments, as what is frozen has none, are embed.weight" in "\n".join(folder.remarks)
    for number, kind in enumerate(_KINDS):
        _assert_bits(folder, kind, {name: value + number for name, value in (norms | others).items()})


def test_moments_beside_states_of_another_optimizer_are_left_out(tmp_path: Path) -> None:
    """What Muon updates has no moments of AdamW, and was not frozen."""
    weights = _tensors()
    norms = {name: value for name, value in weights.items() if value.ndim == 1}
    muon = {f"muon.{name}.momentum_buffer": value for name, value in weights.items() if name not in norms}
    folder = open_folder(_save(tmp_path / "muon", weights | _moments(norms, "optim.state.") | muon))
    assert folder.states == ("weights",) and folder.trainer_json() is None
    said = "left out: 30 of its states are none of AdamW, such as 'muon.model.embed_tokens.weight.momentum_buffer'"
    assert said in "\n".join(folder.remarks)


class _Parts(Tensor):
    """A tensor that is saved in parts, {where each begins: it}, by the protocol that torch has for that."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], parts: Mapping[tuple[int, ...], Tensor]) -> _Parts:
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=next(iter(parts.values())).dtype)
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint import metadata, planner

        made = []
        for begin, part in self.parts.items():  # type: ignore[attr-defined]
            chunk = metadata.ChunkStorageMetadata(torch.Size(begin), part.shape)
            of = planner.TensorWriteData(chunk, metadata.TensorProperties.create_from_tensor(part), self.shape)
            index = metadata.MetadataIndex(name, torch.Size(begin))
            made.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=of))
        return made

    def __create_chunk_list__(self) -> list[Any]:
        raise NotImplementedError

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.parts[tuple(index.offset)]  # type: ignore[attr-defined]


def _cut(value: Tensor, layers: bool) -> _Parts:
    """In a part for each layer, each in two along the next dimension, as two ranks would have them."""
    dim = int(layers)
    parts: dict[tuple[int, ...], Tensor] = {}
    for at, layer in enumerate(value.split(1) if layers else [value]):
        half = value.shape[dim] // 2
        for begin, part in zip((0, half), layer.tensor_split([half], dim), strict=True):
            parts[(*[at] * dim, begin, *[0] * (value.ndim - dim - 1))] = part.contiguous()
    return _Parts(tuple(value.shape), parts)


def _flat(value: Tensor) -> _Parts:
    """In two blocks of the last dimension, and one for each layer: each flat, and cut at a third of it."""
    parts: dict[tuple[int, ...], Tensor] = {}
    blocks = 2 if value.ndim > 1 else 1
    for layer, of in enumerate(value):
        for block, elements in enumerate(of.chunk(blocks, -1) if blocks == 2 else [of]):
            at = (layer, *[0] * (value.ndim - 2), block)[: value.ndim]
            third = elements.numel() // 3
            for begin, part in zip((0, third), elements.flatten().tensor_split([third]), strict=True):
                parts[(*at, begin)] = part.reshape(*[1] * value.ndim, -1)
    grid = (len(value), *[1] * (value.ndim - 2), blocks)[: value.ndim]
    return _Parts((*grid, value.numel() // len(value) // blocks), parts)


MIXTRAL = {**engine.LLAMA, "family": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 4}


def _megatrons(tensors: Mapping[str, Tensor], gated_apart: bool) -> dict[str, Tensor]:
    """By Megatron-Core's names, which have the numbers of layers and experts."""

    def up(name: str, gate: str, up: str) -> dict[str, Tensor]:
        two = tensors[gate], tensors[up]
        apart = {f"{name}.weight_w": two[0], f"{name}.weight_v": two[1]}
        return apart if gated_apart else {f"{name}.weight": torch.cat(two)}

    pad = functools.partial(torch.nn.functional.pad, pad=(0, 0, 0, 3), value=9.0)
    gpt2, made = "transformer.wte.weight" in tensors, dict[str, Tensor]()
    if gpt2:
        made["embedding.word_embeddings.weight"] = pad(tensors["transformer.wte.weight"])
        made["embedding.position_embeddings.weight"] = tensors["transformer.wpe.weight"]
        ends = {f"decoder.final_layernorm.{kind}": f"transformer.ln_f.{kind}" for kind in ("weight", "bias")}
    else:
        made["embedding.word_embeddings.weight"] = pad(tensors["model.embed_tokens.weight"])
        made["output_layer.weight"] = pad(tensors["lm_head.weight"])
        ends = {"decoder.final_layernorm.weight": "model.norm.weight"}
    made |= {theirs: tensors[ours] for theirs, ours in ends.items()}
    for layer in range(2 if gpt2 else 4):
        theirs, ours = f"decoder.layers.{layer}.", f"transformer.h.{layer}." if gpt2 else f"model.layers.{layer}."
        if gpt2:
            for kind in ("weight", "bias"):
                q, k, v = _turned(tensors[f"{ours}attn.c_attn.{kind}"]).chunk(3)
                heads = zip(q.split(4), k.split(4), v.split(4), strict=True)
                made[f"{theirs}self_attention.linear_qkv.{kind}"] = torch.cat([torch.cat(each) for each in heads])
                for word, their_word in _GPT2_WORDS.items():
                    made[f"{theirs}{their_word}{kind}"] = _turned(tensors[f"{ours}{word}{kind}"])
            continue
        q, k, v = (tensors[f"{ours}self_attn.{label}_proj.weight"] for label in "qkv")
        groups = zip(q.split(8), k.split(4), v.split(4), strict=True)
        made[f"{theirs}self_attention.linear_qkv.weight"] = torch.cat([torch.cat(each) for each in groups])
        made[f"{theirs}self_attention.linear_proj.weight"] = tensors[f"{ours}self_attn.o_proj.weight"]
        made[f"{theirs}self_attention.linear_qkv.layer_norm_weight"] = tensors[f"{ours}input_layernorm.weight"]
        experts = f"{ours}block_sparse_moe."
        if f"{experts}gate.weight" not in tensors:
            made[f"{theirs}mlp.linear_fc1.layer_norm_weight"] = tensors[f"{ours}post_attention_layernorm.weight"]
            made |= up(f"{theirs}mlp.linear_fc1", f"{ours}mlp.gate_proj.weight", f"{ours}mlp.up_proj.weight")
            made[f"{theirs}mlp.linear_fc2.weight"] = tensors[f"{ours}mlp.down_proj.weight"]
            continue
        made[f"{theirs}pre_mlp_layernorm.weight"] = tensors[f"{ours}post_attention_layernorm.weight"]
        made[f"{theirs}mlp.router.weight"] = tensors[f"{experts}gate.weight"]
        for n in range(3):
            name, of = f"{theirs}mlp.experts.experts.{n}.", f"{experts}experts.{n}."
            made |= up(f"{name}linear_fc1", f"{of}w1.weight", f"{of}w3.weight")
            made[f"{name}linear_fc2.weight"] = tensors[f"{of}w2.weight"]
    return {name: value.contiguous() for name, value in made.items()}


def _turned(value: Tensor) -> Tensor:
    return value.T if value.ndim > 1 else value


_GPT2_WORDS = {
    "ln_1.": "self_attention.linear_qkv.layer_norm_",
    "attn.c_proj.": "self_attention.linear_proj.",
    "ln_2.": "mlp.linear_fc1.layer_norm_",
    "mlp.c_fc.": "mlp.linear_fc1.",
    "mlp.c_proj.": "mlp.linear_fc2.",
}


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layers, and the experts of each, in one tensor."""
    groups: dict[str, list[Tensor]] = {}
    for name, value in tensors.items():
        groups.setdefault(re.sub(r"\.\d+\b", "", name), []).append(value)
    stacks = {name: torch.stack(of) for name, of in groups.items() if len(of) > 1}
    stacks |= {name: of.unflatten(0, (4, 3)) for name, of in stacks.items() if ".experts." in name}
    return {name: stacks.get(name, of[0]) for name, of in groups.items()}


def _save_megatron(folder: Path, model: Mapping[str, Any], lie: str, optimizer: Any = None) -> list[dict[str, Tensor]]:
    """Save a model in bfloat16, with masters and moments -> the tensors of each state, by Hugging Face's names."""
    held = [_tensors(seed, model) for seed in range(4)]
    held[0] = {name: value.bfloat16() for name, value in held[0].items()}
    state: dict[str, Any] = {"decoder.layers.self_attention.core_attention._extra_state/shard_0_4": io.BytesIO()}
    shapes = dict[str, dict[str, Any]]()
    for kind, tensors in zip(("", "param" if lie == "stacked" else "fp32_param", *_KINDS), held, strict=True):
        root = f"optimizer.state.{kind}." if kind else ""
        made = _megatrons(tensors, lie == "listed")
        made = made if lie == "listed" else _stacked(made)
        for name, value in made.items():
            if lie == "blocks" and kind:
                shapes[root + name] = {"nd_reformulated_orig_global_shape": tuple(value.shape)}
                state[root + name] = _flat(value)
            else:
                state[root + name] = _cut(value, ".layers." in name and lie != "listed")
    _save(folder, state, model)
    described: Any = dcp.FileSystemReader(folder).read_metadata()
    described.mcore_data = shapes
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    groups = {"optimizer": {"param_groups": [{"step": 5, "betas": (0.9, 0.95)}, {"step": 5}]}}
    torch.save({"optimizer": optimizer or groups, "args": Evil(), "iteration": 7}, folder / "common.pt")  # noqa: TID251
    return held


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("model", "lie"),
    [
        pytest.param(engine.LLAMA, "stacked", id="llama-stacked"),
        pytest.param(engine.GPT2, "blocks", id="gpt2-blocks"),
        pytest.param(MIXTRAL, "listed", id="mixtral-listed"),
        pytest.param(MIXTRAL, "stacked", id="mixtral-stacked"),
    ],
)
def test_megatron_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], lie: str) -> None:
    """Queries, keys and values group by group, gates before what they gate, layers and experts in one or in names, a
    filled-up vocabulary, and states that lie flat: every element where it belongs, and nothing of the files is run."""
    monkeypatch.chdir(tmp_path)
    held = _save_megatron(tmp_path / "iter", model, lie)
    folder = open_folder(tmp_path / "iter")
    assert folder.index.step == 5 and folder.states == ("weights", "master", *_KINDS)
    for state, tensors in zip(folder.states, held, strict=True):
        _assert_bits(folder, state, tensors)
    assert "word_embeddings.weight' is filled up to 64 tokens: those beyond 61 are left out" in "\n".join(
        folder.remarks
    )
    assert not (tmp_path / "ran").exists()


def test_a_layer_of_a_stack_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the memory is that of a tensor."""
    _save_megatron(tmp_path / "iter", engine.LLAMA, "stacked")
    folder = open_folder(tmp_path / "iter")
    read = list[str]()
    part = DistributedFiles._part

    def noted(self: DistributedFiles, name: str, *rest: Any) -> Any:
        read.append(name)
        return part(self, name, *rest)

    monkeypatch.setattr(DistributedFiles, "_part", noted)
    (stored,) = (each for each in folder.stored() if each.name == "model.layers.2.mlp.down_proj.weight")
    folder.read()(stored)
    assert read == ["decoder.layers.mlp.linear_fc2.weight"] * 2


def test_what_all_ranks_share_is_missed(tmp_path: Path) -> None:
    _save_megatron(tmp_path / "iter", engine.LLAMA, "stacked")
    (tmp_path / "iter/common.pt").unlink()
    with pytest.raises(StoreError, match=r"no common\.pt, which says how many updates they have seen: copy all files"):
        open_folder(tmp_path / "iter")


def test_moments_in_buckets_are_told(tmp_path: Path) -> None:
    """Nobody can say whose they are; the weights are read."""
    weights = {n: _cut(value, ".layers." in n) for n, value in _stacked(_megatrons(_tensors(), False)).items()}
    bucket = {f"optimizer.distributed.dp_group_idx_0.bucket_idx_0.{kind}": torch.ones(9) for kind in _KINDS}
    folder = _save(tmp_path / "iter", weights | bucket)
    torch.save({"optimizer": {"param_state_sharding_type": "dp_reshardable"}}, folder / "common.pt")  # noqa: TID251
    opened = open_folder(folder)
    assert opened.states == ("weights",) and "left out: they lie in the buckets" in "\n".join(opened.remarks)
    assert "--dist-ckpt-optim-fully-reshardable" in "\n".join(opened.remarks)
    _assert_bits(opened, "weights", _tensors())
    edit_config(folder, num_hidden_layers=3, intermediate_size=20)
    with pytest.raises(
        StoreError, match=r"shape \[4, 16, 24\] instead of \[3, 16, 20\]: decoder.layers.mlp.linear_fc2"
    ):
        open_folder(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """DeepSpeed's: of stage 3 flat, and with one number of updates; what else stands beside a tensor is not run."""
    monkeypatch.chdir(tmp_path)
    held = [_tensors(seed) for seed in range(3)]
    path = tmp_path / "universal"
    for state, tensors in zip(("fp32", *_KINDS), held, strict=True):
        for name, value in tensors.items():
            at = path / "zero" / name
            at.mkdir(parents=True, exist_ok=True)
            whole = value.flatten() if stage == 3 else {"cat_dim": 0, "param": value, "sub_param_shape": Evil()}
            torch.save(whole, at / f"{state}.pt")  # noqa: TID251
            if stage == 2:
                torch.save(torch.tensor(5.0), at / "step.pt")  # noqa: TID251
    torch.save({"param_groups": [{"step": 5}], "loss_scaler": Evil()}, path / "zero/optimizer_state.pt")  # noqa: TID251
    (path / "config.json").write_text(json.dumps(configure(engine.LLAMA).to_hugging_face()))
    folder = open_folder(path)
    assert folder.index.step == 5 and folder.states == ("weights", *_KINDS)
    for state, tensors in zip(folder.states, held, strict=True):
        _assert_bits(folder, state, tensors)
    assert not any("filled up" in remark for remark in folder.remarks)
    made = convert(path, tmp_path / "ours", tp=2)
    assert made.tensors and not (tmp_path / "ran").exists()
    shutil.rmtree(path / "zero/model.norm.weight")
    with pytest.raises(StoreError, match=r"1 tensors are missing: model.norm.weight"):
        open_folder(path)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "python -m deepspeed.checkpoint.ds_to_universal"),
        ("mp_rank_00/model_optim_rng.pt", "let it save by `--ckpt-format torch_dist`"),
        ("latest_checkpointed_iteration.txt", "give one of them, such as iter_"),
    ],
)
def test_the_way_to_what_is_read(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(StoreError, match=re.escape(said)):
        open_folder(tmp_path)


def _save_sharded(path: str) -> None:
    """Each rank writes a quarter of a matrix, or half of a vector."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    split: Any = {1: [Replicate(), Shard(0)], 2: [Shard(0), Shard(1)]}
    dcp.save(
        {"model": {name: distribute_tensor(value, mesh, split[value.ndim]) for name, value in _tensors().items()}},
        checkpoint_id=path,
    )


def test_parts_in_two_dimensions(pool: Pool, tmp_path: Path) -> None:
    """Of a mesh of four ranks; the vocabulary is odd."""
    pool.run(4, _save_sharded, str(tmp_path / "dcp"))
    (tmp_path / "config.json").write_text(json.dumps(configure(engine.LLAMA).to_hugging_face()))
    folder = open_folder(tmp_path / "dcp", config=tmp_path / "config.json")
    assert len(folder.index.files) == 4
    _assert_bits(folder, "weights", _tensors())


# -- what is refused


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def _replace(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Any]]) -> None:
    shutil.rmtree(folder)
    _save(folder, change(_tensors()))


def _hole(folder: Path) -> None:
    """Of a tensor only the first half has a part, as a rank that did not write would leave it."""
    described = dcp.FileSystemReader(folder).read_metadata()
    norm: Any = described.state_dict_metadata["model.norm.weight"]
    (part,) = norm.chunks
    part.sizes = torch.Size([8])
    (folder / ".metadata").write_bytes(pickle.dumps(described))


def _some_moments(tensors: dict[str, Tensor]) -> Mapping[str, Any]:
    moments = {f"{name}.{kind}": value for kind in ("exp_avg", "exp_avg_sq") for name, value in tensors.items()}
    del moments["model.layers.0.self_attn.k_proj.weight.exp_avg"]
    return tensors | {"optim": {"state": moments | {f"{name}.step": 3 for name in tensors}}}


WRONG: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "evil metadata": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Evil())),
        "mkdir', which is nothing that such a file needs: it is not read, and nothing of it has been run",
    ),
    "metadata that end": (lambda folder: os.truncate(folder / ".metadata", 900), "is no pickle that torch writes, or"),
    "other metadata": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "does not describe a checkpoint of torch.distributed.checkpoint",
    ),
    "no file": (
        lambda folder: (folder / "__0_0.distcp").unlink(),
        "copy all files of all ranks:\n- '__0_0.distcp': No",
    ),
    "a file that ends": (
        lambda folder: os.truncate(folder / "__0_0.distcp", 20_000),
        "'__0_0.distcp' has 20000 bytes, and its last part ends at",
    ),
    "a hole": (_hole, "the parts of 'model.norm.weight' do not make up [16], or overlap"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "give it by `megacore convert --config`, or copy"),
    "layers": (lambda folder: edit_config(folder, num_hidden_layers=5), "9 tensors are missing: model.layers.4."),
    "sizes": (lambda folder: edit_config(folder, intermediate_size=20), "shape [24, 16] instead of [20, 16]: model"),
    "other names": (
        lambda folder: _replace(folder, lambda tensors: {f"x.{name}.y": value for name, value in tensors.items()}),
        "its tensors are named neither of model.layers.0.input_layernorm.weight (Hugging Face), "
        "layers.0.attention_norm.weight (torchtitan), embedding.word_embeddings.weight (Megatron-Core), of a llama as "
        "config.json has it; there are x.",
    ),
    "two models": (
        lambda folder: _replace(folder, lambda tensors: {**tensors, "ema": tensors}),
        "there are 2 tensors model.layers.0.input_layernorm.weight, after '', 'ema.'",
    ),
    "moments twice": (
        lambda folder: _replace(folder, lambda each: each | _moments(each, "a.state.") | _moments(each, "b.state.", 7)),
        "'a.state.model.embed_tokens.weight.exp_avg' and 'b.state.model.embed_tokens.weight.exp_avg' are of one tensor",
    ),
    "whole numbers": (
        lambda folder: _replace(folder, lambda tensors: tensors | {"model.norm.weight": torch.ones(16).long()}),
        "dtype I64 is not one of F64, F32, F16, BF16",
    ),
    "another tensor": (
        lambda folder: _replace(folder, lambda tensors: tensors | {"model.layers.0.x": torch.ones(1)}),
        "1 tensors are not of this model: model.layers.0.x",
    ),
    "some moments": (
        lambda folder: _replace(folder, _some_moments),
        "model.layers.0.self_attn.k_proj.weight has no exp_avg",
    ),
}
"""{what is wrong: (what makes it so, a part of what is said)}."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("dcp") / "sound", _tensors())


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_refused(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In words that name it; and nothing that a file says is run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound, tmp_path / "copy")
    change, said = WRONG[kind]
    change(tmp_path / "copy")
    with pytest.raises(StoreError) as error:
        open_folder(tmp_path / "copy")
    assert said in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_part_is_refused_when_it_is_read(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "copy")
    (tmp_path / "copy/__0_0.distcp").write_bytes(b"x" * (sound / "__0_0.distcp").stat().st_size)
    with pytest.raises(StoreError, match=r"no archive of torch.save at byte \d+, or a damaged one"):
        convert(tmp_path / "copy", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_nothing_that_torch_saved_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    torch.save({"a": torch.ones(2), "b": Evil()}, file)  # noqa: TID251
    with pytest.raises(StoreError, match="mkdir'"):
        read_saved(file, "a file", 0, len(file.getvalue()))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nmkdir\n(S'ran'\ntR.",
        b"\x80\x02cos\nmkdir\nX\x03\x00\x00\x00ran\x85R.",
        b"(S'ran'\nios\nmkdir\n.",
        b"(cos\nmkdir\nS'ran'\no.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02X\x01\x00\x00\x00aX\x01\x00\x00\x00b\x85R.",
        b"\x80\x02]}b.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02h\x05.",
        b"\x80\x02e.",
        b"",
    ],
)
def test_pickles_that_are_none_of_torchs(code: bytes) -> None:
    with pytest.raises(StoreError):
        read_pickle(code, "a file", {"torch.Size"})


def _many(kind: type[list[Any]] | type[tuple[Any, ...]], levels: int) -> Any:
    """What is few bytes in a pickle, and 10^levels words written out."""
    made: Any = kind(["x"])
    for _ in range(levels):
        made = kind([made] * 10)
    return made


def test_what_is_little_in_a_pickle_is_never_written_out() -> None:
    """Neither as a key, nor as a name, nor as a value."""
    lists, tuples = (pickle.dumps(_many(kind, 6), 2)[2:-1] for kind in (list, tuple))
    with pytest.raises(StoreError, match=r"has the key \(\(\("):
        read_pickle(b"\x80\x02}" + tuples + b"K\x01s.", "a file", ())
    with pytest.raises(StoreError, match=r"it names 'a' of \[\[\["):
        read_pickle(b"\x80\x02" + lists + b"X\x01\x00\x00\x00a\x93.", "a file", ())
    file = io.BytesIO()
    torch.save(_many(list, 40), file)  # noqa: TID251
    assert isinstance(read_saved(file, "a file", 0, len(file.getvalue())), list)


def test_random_damage_is_told(sound: Path, tmp_path: Path) -> None:
    """Whatever byte of the description is another one: it is refused in words, or changes nothing that matters."""
    shutil.copytree(sound, tmp_path / "copy")
    data, draw = (sound / ".metadata").read_bytes(), random.Random(0)
    for _ in range(60):
        wrong = bytearray(data)
        for _ in range(draw.choice((1, 1, 4))):
            wrong[draw.randrange(len(wrong))] = draw.randrange(256)
        (tmp_path / "copy/.metadata").write_bytes(wrong)
        try:
            folder = open_folder(tmp_path / "copy")
            for stored in folder.stored():
                folder.read()(stored)
        except StoreError:
            pass
