"""Experts that Hugging Face lists one by one, stacked in checkpoints: against tensors put together by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import MIXTRAL, hugging_face_folder, tensor_file
from torch import Tensor

from megacore.parallel.weights.schema import EXPERT_TENSOR_PARALLEL
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.tools import convert, inspect

pytestmark = pytest.mark.usefixtures("not_durable")

EXPERTS, FEATURES = 4, 5
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


def test_inspect_says_how_experts_lie(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main([str(folder), str(tmp_path / "c"), "--ep", "2", "--tp", "2", "--etp", "2"]) == 0
    assert inspect.main([str(tmp_path / "c"), "--tensors", "--check"]) == 0
    said = capsys.readouterr().out
    assert "pp=1 x ep=2 x tp=2; experts over ep; expert_mlp over tp; layers of each stage: 3" in said
    assert "model.layers.0.block_sparse_moe.experts.{0..3}.{w1,w3}.weight" in said
    assert "4 x [2, 6, 8] 192 B" in said and "Sound" in said
    assert inspect.main([str(folder), "--diff", str(tmp_path / "c")]) == 0
