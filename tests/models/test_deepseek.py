"""DeepSeek: what its configs may say, and parts of its files that are left where they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import random_model, small
from safetensors.torch import load_file, save_file
from test_transformers import theirs_of

from megacore.store.compare import config_differences
from megacore.store.hugging_face import HuggingFace
from megacore.store.hugging_face_files import config_json
from megacore.store.strict_json import StoreError
from models.config import ModelConfigError, active_parameters
from models.registry import configure, family

FURTHER = "num_nextn_predict_layers"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

REFUSED = [
    (
        "deepseek_v3",
        {"num_key_value_heads": 2},
        "so it must be num_attention_heads (4)",
    ),
    ("deepseek_v3", {"v_head_dim": 11}, "v_head_dim is 11: it may be up to 10, qk_nope_head_dim + qk_rope_head_dim"),
    ("deepseek_v3", {"qk_head_dim": 12}, "qk_head_dim is 12: DeepseekV3ForCausalLM takes 10"),
    ("deepseek_v3", {"qk_rope_head_dim": 5, "head_dim": 5, "qk_head_dim": 11}, "head_dim 5 is odd"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' would change the maths"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' would change the maths"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 would change the maths"),
    ("deepseek_v3", {"n_group": 3}, "4 experts do not divide into 3 groups"),
    ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1: it must be at least 0"),
    ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1: it must be from 0"),
    ("deepseek_v3", {"quantization_config": FP8}, "only None is: let transformers load it with dequantize=True"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True would change the maths"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not one of greedy, group_limited_greedy"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": None}, "n_group is missing"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(name: str, fields: dict[str, Any], message: str) -> None:
    whole = {key: value for key, value in small(name).to_dict().items() if key not in fields}
    with pytest.raises(ModelConfigError, match=re.escape(message)):
        family(name).config.from_hugging_face(whole | fields)


def test_what_the_files_say_beside_changes_nothing() -> None:
    """The fields of the published config.json that transformers' class does not have."""
    published = {"aux_loss_alpha": 0.001, "ep_size": 1, "seq_aux": True, "pretraining_tp": 1, "moe_layer_freq": 1}
    v3 = published | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    read, plain = family("deepseek_v3").config.from_hugging_face, small("deepseek_v3").to_dict()
    assert read(plain | v3) == read(plain)
    read, plain = family("deepseek_v2").config.from_hugging_face, small("deepseek_v2").to_dict()
    assert read(plain | published | {"scoring_func": "softmax"}) == read(plain)


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


def test_a_model_without_experts_has_none() -> None:
    config = family("deepseek_v3").config.from_hugging_face(small("deepseek_v3", first_k_dense_replace=9).to_dict())
    assert not any("expert" in param.name or "router" in param.name for param in config.schema.params)


def test_the_published_model_is_active_as_published() -> None:
    assert active_parameters(configure({"preset": "deepseek-v3"})) == 37_552_282_624


def test_the_correction_of_a_router_is_drawn_in_the_comparison_with_transformers() -> None:
    """With zeros nothing would be corrected."""
    buffers = {name: buffer for name, buffer in theirs_of(small("deepseek_v3"), 0).named_buffers() if "correct" in name}
    assert len(buffers) == 2 and all(buffer.all() for buffer in buffers.values())
