"""Experts that Hugging Face lists one by one, stacked in checkpoints: against tensors put together by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import Section, hugging_face_folder, snapshot, tensor_file
from torch import Tensor

from megacore.store.checkpoint import Checkpoint
from parallel.weights.schema import EXPERT_TENSOR_PARALLEL
from tools import convert, inspect, reshard

pytestmark = pytest.mark.usefixtures("not_durable")

EXPERTS, FEATURES = 4, 5
MIXTRAL: Section = {
    "family": "mixtral",
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": FEATURES,  # odd: parts are padded
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
}
MOE = "model.layers.{}.block_sparse_moe"
Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hugging_face_folder(tmp_path / "hf", MIXTRAL)
    return tmp_path / "hf"


def up(theirs: Tensors, layer: int, expert: int) -> Tensor:
    return torch.cat([theirs[f"{MOE.format(layer)}.experts.{expert}.{w}.weight"] for w in ("w1", "w3")])


def down(theirs: Tensors, layer: int, expert: int) -> Tensor:
    return theirs[f"{MOE.format(layer)}.experts.{expert}.w2.weight"]


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, whatever the bits are."""
    return ours.shape == theirs.shape and torch.equal(ours.view(torch.int16), theirs.contiguous().view(torch.int16))


def assert_the_first_has_the_rest(ours: Tensors, theirs: Tensors, layer: int, ep: int) -> None:
    """What is no expert lies with the first of ep alone."""
    if ep:
        assert all(".experts." in name for name in ours)
    else:
        assert same(ours[f"layers.{layer}.mlp.router.weight"], theirs[f"{MOE.format(layer)}.gate.weight"])


def test_whole_experts_lie_on_ep_x_tp_as_they_were_listed(folder: Path, tmp_path: Path) -> None:
    theirs = load_file(folder / "model.safetensors")
    assert convert.main([str(folder), str(tmp_path / "c"), "--ep", "2", "--tp", "2", "--pp", "3"]) == 0
    for rank in range(EXPERTS):
        for layer in range(3):
            ours = load_file(tensor_file(tmp_path / "c", pp=layer, ep=rank // 2, tp=rank % 2))
            assert same(ours[f"layers.{layer}.mlp.experts.up.weight"], up(theirs, layer, rank)[None])
            assert same(ours[f"layers.{layer}.mlp.experts.down.weight"], down(theirs, layer, rank)[None])
            assert_the_first_has_the_rest(ours, theirs, layer, ep=rank // 2)
    index = json.loads((tmp_path / "c/index.json").read_text())
    assert index["version"] == 2 and "split" not in index


def test_parts_of_experts_are_padded_like_any_feature(folder: Path, tmp_path: Path) -> None:
    theirs = load_file(folder / "model.safetensors")
    assert convert.main([str(folder), str(tmp_path / "c"), "--ep", "2", "--tp", "2", "--etp", "2"]) == 0
    half = -(-FEATURES // 2)
    for ep, tp in np.ndindex(2, 2):
        ours, experts = load_file(tensor_file(tmp_path / "c", ep=ep, tp=tp)), (2 * ep, 2 * ep + 1)
        kept = slice(tp * half, (tp + 1) * half)
        for layer in range(3):
            stacked = ours[f"layers.{layer}.mlp.experts.up.weight"]
            assert stacked.shape == (2, 2 * half, 8)
            for at, expert in enumerate(experts):
                w1, w3 = up(theirs, layer, expert).chunk(2)
                want = torch.zeros(2 * half, 8, dtype=torch.bfloat16)
                want[: len(w1[kept])], want[half : half + len(w3[kept])] = w1[kept], w3[kept]
                assert same(stacked[at], want)
                want = torch.zeros(8, half, dtype=torch.bfloat16)
                want[:, : len(w1[kept])] = down(theirs, layer, expert)[:, kept]
                assert same(ours[f"layers.{layer}.mlp.experts.down.weight"][at], want)
            assert_the_first_has_the_rest(ours, theirs, layer, ep)
    index = json.loads((tmp_path / "c/index.json").read_text())
    assert (index["version"], index["split"]) == (2, {"experts": ["ep"], "expert_mlp": ["tp"]})
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.layout.split == EXPERT_TENSOR_PARALLEL


def test_experts_are_listed_again_as_they_were(folder: Path, tmp_path: Path) -> None:
    """From parts of them to whole ones on another mesh, and out: to the byte what came in."""
    assert convert.main([str(folder), str(tmp_path / "a"), "--ep", "4", "--tp", "2", "--etp", "2", "--pp", "2"]) == 0
    assert reshard.main([str(tmp_path / "a"), str(tmp_path / "b"), "--tp", "4"]) == 0
    assert convert.main([str(tmp_path / "b"), str(tmp_path / "back"), "--to", "hf"]) == 0
    theirs, ours = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert theirs.keys() == ours.keys() and all(same(ours[name], theirs[name]) for name in theirs)


def test_inspect_says_how_experts_lie(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main([str(folder), str(tmp_path / "c"), "--ep", "2", "--tp", "2", "--etp", "2"]) == 0
    assert inspect.main([str(tmp_path / "c"), "--tensors", "--check"]) == 0
    said = capsys.readouterr().out
    assert "pp=1 x ep=2 x tp=2; experts over ep; expert_mlp over tp; layers of each stage: 3" in said
    assert "model.layers.0.block_sparse_moe.experts.{0..3}.{w1,w3}.weight" in said
    assert "4 x [2, 6, 8] 192 B" in said and "Sound" in said
    assert inspect.main([str(folder), "--diff", str(tmp_path / "c")]) == 0


# -- accounting


def expert(number: int, word: str, layer: int = 1) -> str:
    return f"{MOE.format(layer)}.experts.{number}.{word}.weight"


def drop(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def all_of(number: int) -> tuple[str, ...]:
    return tuple(expert(number, word, layer) for layer in range(3) for word in ("w1", "w2", "w3"))


ACCOUNTS: Mapping[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "one-tensor-missing": (drop(expert(2, "w3")), ("1 tensors are missing", expert(2, "w3"))),
    "one-expert-missing": (
        drop(*all_of(3)),
        ("9 tensors are missing: model.layers.{0..2}.block_sparse_moe.experts.3.w1.weight, ",),
    ),
    "all-of-a-layer-missing": (
        drop(*(expert(number, word) for number in range(EXPERTS) for word in ("w1", "w2", "w3"))),
        ("12 tensors are missing: model.layers.1.block_sparse_moe.experts.{0..3}.w1.weight, ",),
    ),
    "one-expert-too-many": (
        lambda t: t.update({expert(EXPERTS, word): t[expert(0, word)].clone() for word in ("w1", "w2", "w3")}),
        ("3 tensors are not of this model", expert(EXPERTS, "w2")),
    ),
    "another-number": (
        lambda t: t.update({expert(9, "w1"): t.pop(expert(1, "w1"))}),
        ("1 tensors are missing: " + expert(1, "w1"), f"{expert(9, 'w1')} (is it {expert(1, 'w1')}?)"),
    ),
    "gate-and-down-exchanged": (
        lambda t: t.update({expert(0, "w1"): t[expert(0, "w2")].clone()}),
        ("shape [8, 5] instead of [5, 8]", expert(0, "w1")),
    ),
    "stacked": (
        lambda t: t.update(
            {f"{MOE.format(1)}.experts.down_proj": torch.stack([t.pop(expert(i, "w2")) for i in range(4)])}
        ),
        ("4 tensors are missing: model.layers.1.block_sparse_moe.experts.{0..3}.w2.weight", "experts.down_proj"),
    ),
    "router-missing": (drop(f"{MOE.format(2)}.gate.weight"), ("1 tensors are missing", f"{MOE.format(2)}.gate.weight")),
    "router-of-fewer": (
        lambda t: t.update({f"{MOE.format(0)}.gate.weight": t[f"{MOE.format(0)}.gate.weight"][:3].clone()}),
        ("shape [3, 8] instead of [4, 8]",),
    ),
    "quantised": (
        lambda t: t.update({expert(0, "w1"): torch.zeros(FEATURES, 8, dtype=torch.int8)}),
        ("dtype I8", expert(0, "w1")),
    ),
}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_each_expert_is_accounted_for(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = ACCOUNTS[name]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    before = snapshot(folder.parent)
    assert convert.main([str(folder), str(folder.parent / "c"), "--ep", "2"]) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert len(said) < 1500 and snapshot(folder.parent) == before


def test_an_expert_that_two_files_have_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    save_file({expert(3, "w1"): tensors[expert(3, "w1")]}, folder / "model-00002-of-00002.safetensors")
    named = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    named[expert(3, "w1")] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    assert convert.main([str(folder), str(folder.parent / "c")]) == 1
    said = capsys.readouterr().err
    assert "tensors lie in several files (model-00001-of-00002.safetensors, model-00002-of-00002.safetensors): " in said
    assert expert(3, "w1") in said


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_local_experts": 5}, ("9 tensors are missing", "experts.4.w1", "shape [4, 8] instead of [5, 8]")),
        ({"num_local_experts": 3}, ("9 tensors are not of this model", "shape [4, 8] instead of [3, 8]")),
        ({"intermediate_size": 6}, ("shape [5, 8] instead of [6, 8]", "shape [8, 5] instead of [8, 6]")),
    ],
)
def test_a_config_of_other_experts(
    fields: Section, words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(fields)))
    assert convert.main([str(folder), str(folder.parent / "c")]) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("--ep 3", ("cannot split experts (4) over ep x tp=3: choose ep x tp from 1, 2, 4",)),
        ("--ep 4 --tp 2", ("experts (4) over ep x tp=8", "or etp=2, which splits each of them over tp")),
        ("--ep 2 --tp 2 --etp 3", ("etp=3 is neither 1", "nor tp=2")),
        ("--ep 8 --tp 2 --etp 2", ("experts (4) over ep=8: choose ep from 1, 2, 4",)),
        ("--ep 3 --tp 3 --pp 4", ("experts (4) over ep x tp=9", "heads (4) over tp=3", "3 layers")),
    ],
)
def test_meshes_that_do_not_fit(
    asked: str, words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert.main([str(folder), str(folder.parent / "c"), *asked.split()]) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
