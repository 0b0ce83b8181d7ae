"""Folders of every format are asked the same, and answer alike."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny import LLAMA, hugging_face_folder, layout_of, run_checkpoint, spread
from whole import Whole

from megacore.inference.model_loader import model_from
from megacore.models.lora import Lora
from megacore.models.tuning import Tuning
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.fingerprint import combined
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.transfer import native
from megacore.store.conversions.adapters import MergedFolder
from megacore.store.conversions.conversion import to_checkpoint, to_hugging_face
from megacore.store.conversions.formats import open_folder, open_model
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders import audit
from megacore.store.weight_folders.folder import WeightFolder
from megacore.store.weight_folders.foreign import ForeignFolder
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.store.weight_folders.index import STATES, Adapters, Index

LORA = Lora(2, 4.0, ("attn.qkv", "mlp.down"))
FORMATS = (
    *(
        "hugging_face",
        "checkpoint",
        "spread",
        "adapters",
        "adapted",
        "adapted-checkpoint",
        "merged",
        "whole",
        "foreign",
    ),
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WeightFolder]:
    folder = tmp_path_factory.mktemp("folders")
    bits = hugging_face_folder(folder / "hf", LLAMA)
    base = HuggingFace.open(folder / "hf")
    run_checkpoint(folder / "checkpoint", LLAMA, layout_of(LLAMA, (2, 3), pp=2, tp=2))
    to_checkpoint(base, layout_of(LLAMA, tp=2)).write(folder / "converted", jobs=1)
    layout = layout_of(LLAMA, tp=2)
    kept = Tuning(LORA).kept(base.schema)
    index = Index(base.raw, replace(layout, schema=kept), ("weights",), None, {}, None)
    own = replace(index, adapters=Adapters(LORA, str(base.path), combined(audit.fingerprints(base, "weights", 1))))
    small = {"weights": lambda s: ("F32", np.full(s.shape, 0.25, np.float32).view(np.uint32))}
    to_checkpoint(Whole(folder, own, kept, small), own.layout).write(folder / "adapters", jobs=1)
    adapters = open_folder(folder / "adapters", adapters=True)
    reads = {"weights": lambda s: ("BF16", bits[s.name])}
    return {
        "hugging_face": base,
        "checkpoint": open_folder(folder / "checkpoint"),
        "spread": spread(folder / "checkpoint", folder / "spread"),
        "adapters": adapters,
        "adapted": open_model(folder / "adapters"),
        "adapted-checkpoint": open_model(folder / "adapters", folder / "converted"),
        "merged": MergedFolder(base.path, base.index, adapters, None, base=base),
        "whole": Whole(folder, base.index, base.schema, reads),
        "foreign": _foreign(folder / "dcp", bits, base),
    }


def _foreign(folder: Path, bits: Mapping[str, np.ndarray], base: HuggingFace) -> WeightFolder:
    """A checkpoint of torch.distributed.checkpoint of the same weights, with moments."""
    weights = {name: torch.from_numpy(of.view("i2").copy()).view(torch.bfloat16) for name, of in bits.items()}
    state = {name: {"exp_avg": of, "exp_avg_sq": of, "step": 2} for name, of in weights.items()}
    dcp.save({"model": weights, "optim": {"state": state}}, checkpoint_id=folder, no_dist=True)
    return ForeignFolder.open(folder, base.path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:invalid value")  # any bits are weights here
@pytest.mark.parametrize("kind", FORMATS)
def test_a_folder_has_what_it_says(opened: dict[str, WeightFolder], kind: str) -> None:
    """All tensors of its states, in the dtypes that it says and with the fingerprints that it knows; and no others."""
    folder = opened[kind]
    whole = {s.name for s in native(Layout(folder.schema, MeshShape(), folder.layout.layers), [0])}
    assert "weights" in folder.states
    for state in STATES:
        assert folder.names(state) == (whole if state in folder.states else set())
        known = folder.fingerprints(state)
        found = audit.fingerprints(folder, state, 1) if state in folder.states else {}
        assert known == {piece: found[piece] for piece in known}
        for stored in folder.stored(state):
            dtype, bits = folder.read(state)(stored)
            assert dtype == folder.dtype(state, stored) and bits.shape == stored.shape
    assert bool(folder.fingerprints("weights")) == (kind not in ("hugging_face", "merged", "whole", "foreign"))


@pytest.mark.parametrize("kind", ["checkpoint", "hugging_face"])
def test_bytes_are_checked_where_fingerprints_are_known(opened: dict[str, WeightFolder], kind: str) -> None:
    (folder,), read = opened[kind].folders, list[int]()
    assert not audit.check(folder, 1, read.append)
    assert bool(read) == (kind == "checkpoint")


def test_a_format_that_nobody_has_heard_of(opened: dict[str, WeightFolder], tmp_path: Path) -> None:
    """It converts, exports and is computed with, to the bit what a Hugging Face folder of the same weights is."""
    ours, theirs = opened["whole"], opened["hugging_face"]
    for name, folder in (("ours", ours), ("theirs", theirs)):
        to_checkpoint(folder, layout_of(LLAMA, tp=2)).write(tmp_path / name, jobs=1)
        to_hugging_face(folder, 10**9).write(tmp_path / f"{name}-hf", jobs=1)
    for path in ("weights/pp0-ep0-tp1.safetensors", "index.json"):
        assert (tmp_path / "ours" / path).read_bytes() == (tmp_path / "theirs" / path).read_bytes()
    one, other = (tmp_path / f"{name}-hf/model.safetensors" for name in ("ours", "theirs"))
    assert one.read_bytes() == other.read_bytes()
    here, there = (model_from(folder, Mesh.single()).parameters for folder in (ours, theirs))
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name].view(torch.int16), there[name].view(torch.int16)) for name in here)


def test_what_a_folder_is_instead(opened: dict[str, WeightFolder], tmp_path: Path) -> None:
    """In one sentence, where that is known; a folder of checkpoints within a model's is no run."""
    copy, checkpoint = tmp_path / "copy", opened["checkpoint"].path
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("index.json"))
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft/adapter_config.json").write_text("{}")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    for path, said in {
        copy: "is a checkpoint without its index.json: ",
        checkpoint / "master": f"is a part of a checkpoint: give {checkpoint}",
        tmp_path / "peft": "holds adapters as the peft library saves them, and no model: ",
        tmp_path / "run": f"is the folder of a run, and there is no checkpoint in {tmp_path / 'run/checkpoints'} yet",
        tmp_path / "nothing": "is not a folder",
    }.items():
        with pytest.raises(StoreError) as error:
            open_folder(path)
        assert str(error.value).startswith(f"{path} {said}") and "\n" not in str(error.value)
    shutil.copytree(opened["hugging_face"].path, tmp_path / "run", dirs_exist_ok=True)
    assert open_folder(tmp_path / "run").format == HuggingFace.format
