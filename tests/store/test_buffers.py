"""Buffers, tensors that training moves without a gradient: fp32 wherever weights are converted, and without states."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changes import header
from extended_family import extended
from safetensors.torch import load_file
from tiny import LLAMA, SECTIONS, Section, assert_holds, hugging_face_folder, layout_of, run_checkpoint, whole

from megacore.inference.model_loader import dtype_of, model_from
from megacore.models.registry import configure
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.transfer import hugging_face
from megacore.store.conversions.conversion import to_checkpoint, to_hugging_face
from megacore.store.conversions.formats import open_folder
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.store.weight_folders.index import STATES
from megacore.tools import convert

pytestmark = pytest.mark.usefixtures("not_durable")

SECTION: Section = {**LLAMA, "family": "extended", "experts": [0, 1, 1, 0, 1], "num_experts": 4, "correction": True}
CORRECTIONS = {f"model.layers.{layer}.mlp.gate.correction" for layer in (1, 2, 4)}
DTYPES = {state: "BF16" if state == "weights" else "F32" for state in STATES}


@pytest.fixture(scope="module", autouse=True)
def _family() -> Iterator[None]:
    with extended():
        yield


def mixed(path: Path) -> None:
    """A folder whose weights are bf16, and its buffers fp32, as DeepSeek-V3's are."""
    from safetensors.torch import save_file

    config, rng = configure(SECTION), torch.Generator().manual_seed(1)
    path.mkdir()
    made = {s.name: torch.randn(s.shape, generator=rng) for s in hugging_face(config.schema)}
    made = {name: t if name in CORRECTIONS else t.bfloat16() for name, t in made.items()}
    save_file(made, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config.to_hugging_face()))


def test_states_of_buffers_are_neither_written_nor_missed(tmp_path: Path) -> None:
    held = run_checkpoint(tmp_path / "a", SECTION, layout_of(SECTION, (3, 2), pp=2, tp=2))
    assert held["weights"].keys() - held["master"].keys() == CORRECTIONS
    saved = assert_holds(tmp_path / "a", held, DTYPES)
    again = layout_of(SECTION, (1, 2, 2), pp=3, ep=2)
    to_checkpoint(saved, again).write(tmp_path / "b", jobs=1)
    index = assert_holds(tmp_path / "b", held, DTYPES).index
    assert not index.has("master", "layers.1.mlp.router.correction") and index.has("master", "layers.1.attn.out.weight")
    assert "frozen" not in json.loads((tmp_path / "b/index.json").read_text())


def test_conversions_to_another_dtype_leave_them_as_they_are(tmp_path: Path) -> None:
    mixed(tmp_path / "hf")
    for arguments in (["--ep", "2"], ["--tp", "2", "--dtype", "float16"]):
        target = tmp_path / "-".join(arguments)
        assert convert.main([str(tmp_path / "hf"), str(target), *arguments]) == 0
        dtypes = {name: dtype for name, (dtype, _) in whole(Checkpoint.open(target), "weights").items()}
        assert {name for name, dtype in dtypes.items() if dtype == "F32"} == CORRECTIONS
        to_hugging_face(Checkpoint.open(target), 10**9, "BF16").write(Path(f"{target}-back"), jobs=1)
        before, after = (
            load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", Path(f"{target}-back"))
        )
        assert all(torch.equal(before[name], after[name]) for name in CORRECTIONS)
        assert all(after[name].dtype == tensor.dtype for name, tensor in before.items())


def test_the_dtype_of_a_model_is_that_of_its_weights(tmp_path: Path) -> None:
    """Generating and evaluating take it."""
    mixed(tmp_path / "hf")
    folder = HuggingFace.open(tmp_path / "hf")
    assert dtype_of(folder) == torch.bfloat16
    model = model_from(folder, Mesh.single())
    held = load_file(tmp_path / "hf/model.safetensors")
    for layer in (1, 2, 4):
        correction = model.parameters[f"layers.{layer}.mlp.router.correction"]
        wanted = held[f"model.layers.{layer}.mlp.gate.correction"]
        assert torch.equal(correction, wanted) and not correction.requires_grad
    assert model.parameters["embed.weight"].dtype == torch.bfloat16


def test_a_narrow_buffer_of_a_file_is_widened_where_it_is_loaded(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path / "hf", SECTION, "BF16")
    model = model_from(open_folder(tmp_path / "hf"), Mesh.single())
    name = "layers.1.mlp.router.correction"
    held = load_file(tmp_path / "hf/model.safetensors")["model.layers.1.mlp.gate.correction"].float()
    assert model.parameters[name].dtype == torch.float32
    assert np.array_equal(model.parameters[name].detach().numpy(), held.numpy(), equal_nan=True)


def test_a_wrong_dtype_of_a_table_is_told_beside_those_that_it_may_have(tmp_path: Path) -> None:
    """Of whole numbers, which may be integers, unlike weights."""
    hugging_face_folder(tmp_path / "hf", SECTIONS["deepseek_v4"][0], "F32")
    folder = HuggingFace.open(tmp_path / "hf")
    to_checkpoint(folder, layout_of(SECTIONS["deepseek_v4"][0])).write(tmp_path / "ours", jobs=1)

    def said(file: Path, dtype: str) -> str:
        def change(tree: dict[str, Any]) -> None:
            next(each for name, each in tree.items() if "table" in name or "tid2eid" in name)["dtype"] = dtype

        header(file.name, change)(file.parent)
        try:
            open_folder(tmp_path / file.relative_to(tmp_path).parts[0])
        except StoreError as error:
            return str(error)
        return ""

    (ours,) = (tmp_path / "ours").rglob("*.safetensors")
    theirs = tmp_path / "hf/model.safetensors"
    assert "table is U32[13, 2] instead of F64/F32/F16/BF16/I64/I32[13, 2]" in said(ours, "U32")
    assert "dtype U32 is not one of F64, F32, F16, BF16, I64, I32: " in said(theirs, "U32")
    assert "router.table" not in said(ours, "I32") and not said(theirs, "I32")
