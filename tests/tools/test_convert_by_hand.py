"""Shards beside what chunk and cat make of a saved model, spelled out by hand: a round trip can be wrong both ways."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hub import converted, save
from safetensors.torch import load_file
from torch import Tensor

Tensors = Mapping[str, Tensor]
TP, STAGES = 2, ((0,), (1, 2))


def rows(tensor: Tensor, rank: int) -> Tensor:
    return tensor.chunk(TP, 0)[rank]


def columns(tensor: Tensor, rank: int) -> Tensor:
    return tensor.chunk(TP, 1)[rank]


def padded_rows(tensor: Tensor, rank: int) -> Tensor:
    """Of 43 tokens, 22 for each rank: the last row of the second one is zero."""
    return rows(torch.cat([tensor, torch.zeros(1, tensor.shape[1])]), rank)


def llama(hf: Tensors, stage: int, rank: int) -> dict[str, Tensor]:
    shard = {}
    for i in STAGES[stage]:
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        q, k, v = (hf[f"{theirs}.self_attn.{x}_proj.weight"] for x in "qkv")
        gate, up = hf[f"{theirs}.mlp.gate_proj.weight"], hf[f"{theirs}.mlp.up_proj.weight"]
        shard[f"{ours}.attn_norm.weight"] = hf[f"{theirs}.input_layernorm.weight"]
        shard[f"{ours}.attn.qkv.weight"] = torch.cat([rows(q, rank), rows(k, rank), rows(v, rank)])
        shard[f"{ours}.attn.out.weight"] = columns(hf[f"{theirs}.self_attn.o_proj.weight"], rank)
        shard[f"{ours}.mlp_norm.weight"] = hf[f"{theirs}.post_attention_layernorm.weight"]
        shard[f"{ours}.mlp.up.weight"] = torch.cat([rows(gate, rank), rows(up, rank)])
        shard[f"{ours}.mlp.down.weight"] = columns(hf[f"{theirs}.mlp.down_proj.weight"], rank)
    if stage == 0:
        shard["embed.weight"] = padded_rows(hf["model.embed_tokens.weight"], rank)
    else:
        shard["norm.weight"] = hf["model.norm.weight"]
        shard["head.weight"] = padded_rows(hf["lm_head.weight"], rank)
    return shard


def gpt2(hf: Tensors, stage: int, rank: int) -> dict[str, Tensor]:
    # The embedding is the head too, so both ends hold it. Conv1D stores its matrices transposed.
    shard = {"embed.weight": padded_rows(hf["transformer.wte.weight"], rank)}
    for i in STAGES[stage]:
        theirs, ours = f"transformer.h.{i}", f"layers.{i}"
        for kind in ("weight", "bias"):
            fused = hf[f"{theirs}.attn.c_attn.{kind}"]
            q, k, v = (fused.T if kind == "weight" else fused).chunk(3)
            shard[f"{ours}.attn.qkv.{kind}"] = torch.cat([rows(q, rank), rows(k, rank), rows(v, rank)])
            first = hf[f"{theirs}.mlp.c_fc.{kind}"]
            shard[f"{ours}.mlp.up.{kind}"] = rows(first.T if kind == "weight" else first, rank)
            shard[f"{ours}.attn_norm.{kind}"] = hf[f"{theirs}.ln_1.{kind}"]
            shard[f"{ours}.mlp_norm.{kind}"] = hf[f"{theirs}.ln_2.{kind}"]
        shard[f"{ours}.attn.out.weight"] = columns(hf[f"{theirs}.attn.c_proj.weight"].T, rank)
        shard[f"{ours}.mlp.down.weight"] = columns(hf[f"{theirs}.mlp.c_proj.weight"].T, rank)
        # Added once, after the sum over ranks: every rank has all of it.
        shard[f"{ours}.attn.out.bias"] = hf[f"{theirs}.attn.c_proj.bias"]
        shard[f"{ours}.mlp.down.bias"] = hf[f"{theirs}.mlp.c_proj.bias"]
    if stage == 0:
        shard["positions.weight"] = hf["transformer.wpe.weight"]
    else:
        shard["norm.weight"], shard["norm.bias"] = hf["transformer.ln_f.weight"], hf["transformer.ln_f.bias"]
    return shard


@pytest.mark.parametrize(("family", "by_hand"), [("llama", llama), ("gpt2", gpt2)], ids=["llama", "gpt2"])
def test_shards_are_chunks(family: str, by_hand: object, tmp_path: Path) -> None:
    assert callable(by_hand)
    source = save(family, tmp_path / "hf")
    target = converted(source, tmp_path / "sharded", "--tp", "2", "--pp", "2", "--layers-per-stage", "1,2")
    hf = load_file(source / "model.safetensors")
    files = {path.name for path in (target / "weights").iterdir()}
    assert files == {f"pp{stage}-ep0-tp{rank}.safetensors" for stage in (0, 1) for rank in (0, 1)}
    for stage in (0, 1):
        for rank in (0, 1):
            shard = load_file(target / "weights" / f"pp{stage}-ep0-tp{rank}.safetensors")
            wanted = by_hand(hf, stage, rank)
            assert shard.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(shard[name], tensor), f"{name} of stage {stage}, rank {rank}"
