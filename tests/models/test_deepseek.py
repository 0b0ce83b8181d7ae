"""DeepSeek: parts of its files that are left where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import random_model, small
from safetensors.torch import load_file, save_file
from test_transformers import theirs_of

from megacore.models.registry import family
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.compare import config_differences
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.store.weight_folders.hugging_face_files import config_json

FURTHER = "num_nextn_predict_layers"


def test_layers_that_predict_further_tokens_are_told_and_left_out(tmp_path: Path) -> None:
    config = small("deepseek_v3")
    random_model(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    further = {f"model.layers.3.{name}": torch.zeros(2) for name in ("eh_proj.weight", "shared_head.norm.weight")}
    save_file(tensors | further, file, {"format": "pt"})
    folder = HuggingFace.open(tmp_path)
    assert set(folder.others) == set(further) and {s.name for s in folder.stored()} == set(tensors)
    assert folder.left_out == (
        f"{tmp_path}: only the model without layers that predict further tokens is read; 2 tensors of model.layers.3 "
        "are left out"
    )
    for written in (folder.config.to_hugging_face(), json.loads(config_json({**folder.raw, FURTHER: 1}))):
        assert written[FURTHER] == 0  # of what is written, which has none
        assert not config_differences(folder.config, family("deepseek_v3").config.from_hugging_face(written))
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(StoreError, match=r"1 tensors are not of this model: model\.layers\.4\.eh_proj\.weight"):
        HuggingFace.open(tmp_path)


def test_the_correction_of_a_router_is_drawn_in_the_comparison_with_transformers() -> None:
    """With zeros nothing would be corrected."""
    buffers = {name: buffer for name, buffer in theirs_of(small("deepseek_v3"), 0).named_buffers() if "correct" in name}
    assert len(buffers) == 2 and all(buffer.all() for buffer in buffers.values())
