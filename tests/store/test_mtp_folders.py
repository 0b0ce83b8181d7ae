"""Layers that predict further tokens in folders of Hugging Face: read, exported, or left where they are."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from families import drawn, loaded, random_model, small
from safetensors.torch import load_file, save_file
from tiny import edit_index, hugging_face_folder, layout_of
from torch import Tensor
from transformers.modeling_layers import MtpModel
from wrapped import saved

from megacore.models.mtp import FIELD
from megacore.models.registry import configure
from megacore.parallel.weights.transfer import hugging_face
from megacore.store.conversions.conversion import to_checkpoint, to_hugging_face
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.tools import convert

SECTION = drawn("deepseek_v3", 1, layers=3, first_k_dense_replace=1, **{FIELD: 1})
AT = "model.layers.3."


def change(folder: Path, tensors: Mapping[str, Tensor | None], **fields: object) -> None:
    """Other tensors, or none, and other fields of the config."""
    file, config = folder / "model.safetensors", folder / "config.json"
    there = {name: tensor for name, tensor in {**load_file(file), **tensors}.items() if tensor is not None}
    save_file(there, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def without_layer(folder: Path) -> dict[str, None]:
    return dict.fromkeys(name for name in load_file(folder / "model.safetensors") if name.startswith(AT))


def test_transformers_loads_the_layers_that_are_exported(tmp_path: Path) -> None:
    """By the names of its own: it refuses what is missing."""
    hugging_face_folder(tmp_path / "hf", SECTION)
    file = tmp_path / "hf/model.safetensors"
    generator = torch.Generator().manual_seed(0)
    save_file({n: torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in load_file(file).items()}, file)
    shared = {f"{AT}embed_tokens.weight": "model.embed_tokens.weight", f"{AT}shared_head.head.weight": "lm_head.weight"}
    there = load_file(file)
    change(tmp_path / "hf", {copy: there[of] for copy, of in shared.items()})
    to_checkpoint(HuggingFace.open(tmp_path / "hf"), layout_of(SECTION, (2, 1), pp=2, tp=2)).write(
        tmp_path / "c", jobs=1
    )
    to_hugging_face(Checkpoint.open(tmp_path / "c"), 1 << 30).write(tmp_path / "back", jobs=1)
    model = loaded(tmp_path / "back", torch.bfloat16)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]  # of the published sizes alone it knows them
    layer, want = MtpModel.from_pretrained(model).layers[0].state_dict(), load_file(file)
    for ours, theirs in (
        ("enorm", "enorm"),
        ("hnorm", "hnorm"),
        ("eh_proj", "eh_proj"),
        ("post_norm", "shared_head.norm"),
        ("mtp_block.self_attn.o_proj", "self_attn.o_proj"),
        ("mtp_block.mlp.shared_experts.down_proj", "mlp.shared_experts.down_proj"),
    ):
        assert torch.equal(layer[f"{ours}.weight"], want[f"{AT}{theirs}.weight"])
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == want.keys() and all(torch.equal(back[name], tensor) for name, tensor in want.items())


def test_a_folder_without_their_tensors_has_no_such_layers(tmp_path: Path) -> None:
    """As transformers saves it, whose config counts one; and checkpoints of releases that left them out."""
    random_model(small("deepseek_v3", **{FIELD: 1})).save_pretrained(tmp_path / "hf")
    folder = HuggingFace.open(tmp_path / "hf")
    assert folder.config.mtp_layers == folder.raw[FIELD] == 0
    told = f"{tmp_path / 'hf'}: {FIELD} is 1, and no tensor is of such a layer: it is read as 0"
    assert folder.remarks == [told]
    to_checkpoint(folder, layout_of({"family": "deepseek_v3", **folder.raw}, (3,))).write(tmp_path / "c", jobs=1)
    edit_index(tmp_path / "c", lambda index: index["config"].update({FIELD: 1}))
    assert Checkpoint.open(tmp_path / "c").config == folder.config


def test_a_config_that_counts_nothing_has_the_layers_of_its_tensors(tmp_path: Path) -> None:
    """As the published ones of Qwen3-Next."""
    hugging_face_folder(tmp_path / "hf", drawn("qwen3_next", 1, **{FIELD: 1}))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    del config[FIELD]
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    folder = HuggingFace.open(tmp_path / "hf")
    assert folder.config.mtp_layers == folder.raw[FIELD] == 1 and not folder.remarks
    assert {name for name in load_file(tmp_path / "hf/model.safetensors") if name.startswith("mtp.")} <= {
        stored.name for stored in folder.stored()
    }
    change(tmp_path / "hf", {}, **{FIELD: 0})
    assert all(name.startswith("mtp.") for name in HuggingFace.open(tmp_path / "hf").others)


def test_a_config_that_counts_none_leaves_them_out(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path / "hf", SECTION)
    change(tmp_path / "hf", {}, **{FIELD: 0})
    folder = HuggingFace.open(tmp_path / "hf")
    assert set(folder.others) == without_layer(tmp_path / "hf").keys() and folder.config.mtp_layers == 0
    assert folder.remarks == [
        f"{tmp_path / 'hf'}: only the model without layers that predict further tokens is read; "
        f"{len(folder.others)} tensors of model.layers.3 are left out"
    ]


OF_QWEN = {"fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"} | {
    f"layers.0.{part}"
    for part in (
        *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        *(f"self_attn.{each}" for each in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    )
}
"""As Qwen3.5's dense models have them, beside the text model."""


def test_the_layer_of_a_model_that_sees_goes_there_and_back(tmp_path: Path) -> None:
    """By the fields that its makers say, of which transformers' class has none."""
    theirs, ours, back = (tmp_path / name for name in ("hf", "c", "back"))
    saved("qwen3_5", theirs)
    said = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_use_dedicated_embeddings": False}
    said |= {"output_gate_type": "swish", "mlp_only_layers": []}
    whole = json.loads((theirs / "config.json").read_text())
    count = {"mtp_num_hidden_layers": 1}
    config = configure({"family": "qwen3_5_text", **HuggingFace.open(theirs).raw, **count})
    shapes = {tensor.name: tensor.shape for tensor in hugging_face(config.schema) if tensor.name.startswith("mtp.")}
    assert shapes.keys() == {f"mtp.{name}.weight" for name in OF_QWEN}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    change(theirs, tensors, text_config=whole["text_config"] | said | count)
    assert convert.main([str(theirs), str(ours), "--tp", "2", "--pp", "2"]) == 0
    assert convert.main([str(ours), str(back), "--to", "hf"]) == 0
    want, made = (load_file(folder / "model.safetensors") for folder in (theirs, back))
    assert made.keys() == want.keys() and all(torch.equal(made[name], tensor) for name, tensor in want.items())
    assert json.loads((back / "config.json").read_text())["text_config"] == whole["text_config"] | said | count
    change(theirs, dict.fromkeys(tensors))
    folder = HuggingFace.open(theirs)
    assert folder.config.mtp_layers == folder.raw["mtp_num_hidden_layers"] == 0
    assert "mtp_num_hidden_layers is 1, and no tensor is of such a layer" in folder.remarks[0]


@pytest.mark.parametrize(
    ("tensors", "fields", "said"),
    [
        ({f"{AT}hnorm.weight": None}, {}, "1 tensors are missing: model.layers.3.hnorm.weight"),
        ({"model.layers.4.eh_proj.weight": torch.zeros(2)}, {}, "1 tensors are not of this model: model.layers.4.eh_"),
        ({}, {FIELD: 2}, "model.layers.4.eh_proj.weight"),
        ({}, {FIELD: -1}, f"{FIELD} is -1: it must be from 0 to 16"),
        (
            {f"{AT}shared_head.head.weight": torch.zeros(13, 1).to(torch.bfloat16)},
            {},
            "have the model's own: to read it",
        ),
    ],
    ids=["missing", "too many", "fewer than said", "below 0", "another head"],
)
def test_refused(tmp_path: Path, tensors: Mapping[str, Tensor | None], fields: Mapping[str, object], said: str) -> None:
    hugging_face_folder(tmp_path / "hf", SECTION)
    change(tmp_path / "hf", tensors, **fields)
    with pytest.raises(StoreError) as caught:
        HuggingFace.open(tmp_path / "hf")
    assert said in str(caught.value)


def test_what_is_stored_again_may_be_left_out(tmp_path: Path) -> None:
    bits = hugging_face_folder(tmp_path / "hf", SECTION)
    change(tmp_path / "hf", {f"{AT}embed_tokens.weight": None, f"{AT}shared_head.head.weight": None})
    folder = HuggingFace.open(tmp_path / "hf")
    assert {stored.name for stored in folder.stored()} == bits.keys() and folder.config.mtp_layers == 1
    assert np.prod([stored.shape for stored in folder.stored() if stored.name == f"{AT}eh_proj.weight"]) > 0
