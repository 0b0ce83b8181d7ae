"""Gemma 3 and Mistral 3 that also see: their text model is read, and what else there is is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
)

from megacore.models.config import ModelConfigError
from megacore.models.registry import configure
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.tools import convert, verify

TEXT = {
    "vocab_size": 43,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "sliding_window": 4,
}
PIXTRAL = {"model_type": "pixtral", "patch_size": 14}
EYES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 14}


def folder(path: Path, **text: Any) -> Gemma3ForConditionalGeneration:
    torch.manual_seed(0)
    config = Gemma3Config(text_config=TEXT | text, vision_config=EYES, mm_tokens_per_image=1)
    made = Gemma3ForConditionalGeneration(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(path)
    return made


def edit(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))


def of_mistral(path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    text = TEXT | {"model_type": "ministral3", "sliding_window": None}
    made = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=EYES | PIXTRAL))
    made.save_pretrained(path)
    return made


@pytest.mark.parametrize(("make", "family"), [(folder, "gemma3_text"), (of_mistral, "ministral3")])
def test_the_text_model_is_read_and_comes_out_by_itself(
    make: Callable[[Path], Any], family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = make(tmp_path / "hf")
    opened = HuggingFace.open(tmp_path / "hf")
    assert opened.raw["model_type"] == family and configure({"config": str(tmp_path / "hf")}) == opened.config
    outside = [name for name in load_file(tmp_path / "hf" / "model.safetensors") if "language_model." not in name]
    assert set(opened.others) == set(outside) and not opened.ignored
    assert convert.main([str(tmp_path / "hf"), str(tmp_path / "ours"), "--tp", "2"]) == 0
    said = capsys.readouterr().err
    assert f"only its text model is read; {len(outside)} tensors of multi_modal_projector, vision_tower are" in said
    assert verify.main([str(tmp_path / "ours"), str(tmp_path / "hf")]) == 0
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "text"), "--to", "hf"]) == 0
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    tokens = torch.arange(12)[None] % 43
    assert type(text).__name__ == opened.config.architecture
    assert torch.equal(text(tokens).logits, theirs(tokens).logits)
    assert {name: t for name, t in text.state_dict().items() if name != "lm_head.weight"}.keys() == {
        name.removeprefix("language_model.") for name in load_file(tmp_path / "hf" / "model.safetensors")
    } - set(outside)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    """The whole says whether it is tied, and older files keep the head with the text model."""
    folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = torch.randn(43, 16)
    save_file({**tensors, "language_model.lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path, tie_word_embeddings=False)
    opened = HuggingFace.open(tmp_path)
    read = opened.read()
    (found,) = [read(stored)[1] for stored in opened.stored() if stored.name == "lm_head.weight"]
    assert not opened.config.tie_word_embeddings and np.array_equal(found.view(np.float32), head.numpy())


def test_what_is_of_no_part_is_an_error(tmp_path: Path) -> None:
    folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    strange = {"model.embed_tokens.weight": torch.zeros(43, 16)}
    save_file({**tensors, **strange}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StoreError, match=r"1 tensors are not of this model: model\.embed_tokens\.weight"):
        HuggingFace.open(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": None}, "gemma3: text_config is None: it must be a mapping, the text model's"),
        ({"text_config": {"model_type": "gemma2"}}, "text_config is of family 'gemma2': only gemma3_text is read"),
        ({"text_config": {"num_layers": 3}}, "gemma3_text: unknown field 'num_layers'"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", **fields}))
    with pytest.raises(ModelConfigError) as caught:
        configure({"config": str(tmp_path)})
    assert message in str(caught.value)
    with pytest.raises(StoreError) as refused:
        HuggingFace.open(tmp_path)
    assert message.partition(": ")[2] in str(refused.value) or message in str(refused.value)


# As Moonshot AI publishes it, but for tokens.
KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "ep_size": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "torch_dtype": "bfloat16",
    "vocab_size": 163840,
}


def test_kimi_k2_is_a_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    assert configure({"config": str(tmp_path)}) == configure({"preset": "kimi-k2"})
