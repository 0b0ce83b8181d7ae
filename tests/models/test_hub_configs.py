"""The config.json of published models, as older transformers wrote them, mean here what they mean to transformers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from families import small
from transformers import CONFIG_MAPPING

from models.config import ModelConfigError
from models.registry import family


def said(model_type: str, hidden: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, **own: Any) -> Any:
    """A file of transformers 4: what every one says, with sizes, and its own fields."""
    every = {
        "_name_or_path": "x",
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0",
        "use_cache": True,
    }
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    shared = {"num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab}
    return every | sizes | shared | {"model_type": model_type} | own


YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "rope_type": "yarn"}
SHORT = {"original_max_position_embeddings": 8192}
SOME_SLIDE = [*["sliding_attention"] * 3, "full_attention"]
QWEN = {"rope_theta": 1e6, "use_sliding_window": False}
UNASKED = {"output_router_logits": False}
UNBIASED = {"attention_bias": False, "mlp_bias": False}

FILES: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM2-360M-Instruct": (
        said("llama", 960, 2560, 32, 15, 5, 49152, head_dim=64, is_llama_config=True, max_position_embeddings=8192)
        | {"pretraining_tp": 1, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, **UNBIASED}
        | {
            "pad_token_id": 2,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {}},
            "trust_remote_code": True,
        },
        361_821_120,
    ),
    "Mistral-7B-Instruct-v0.1": (
        said("mistral", 4096, 14336, 32, 32, 8, 32000, max_position_embeddings=32768, rope_theta=10000.0)
        | {"sliding_window": 4096},
        7_241_732_096,
    ),
    "Mistral-Small-Instruct-2409": (
        said("mistral", 6144, 16384, 56, 48, 8, 32768, max_position_embeddings=32768, rope_theta=1e6, head_dim=128)
        | {"sliding_window": None},
        22_247_282_688,
    ),
    "Qwen2-0.5B": (
        said("qwen2", 896, 4864, 24, 14, 2, 151936, max_position_embeddings=131072, max_window_layers=24, **QWEN)
        | {"sliding_window": 131072, "tie_word_embeddings": True},
        494_032_768,
    ),
    "Meraj-Mini": (  # Qwen2.5-7B
        said("qwen2", 3584, 18944, 28, 28, 4, 152064, max_position_embeddings=131072, max_window_layers=28, **QWEN)
        | {"sliding_window": None, "use_mrope": False, "rope_scaling": None},
        7_615_616_512,
    ),
    "Austral-AFM-SFT": (
        said("arcee", 2560, 18432, 36, 20, 4, 128005, head_dim=128, max_position_embeddings=65536, rope_theta=1e4)
        | {"hidden_act": "relu2", "rope_scaling": {**YARN, "factor": 20.0, "mscale": 1.0, "type": "yarn"}, **UNBIASED},
        4_619_189_760,
    ),
    "Seed-OSS-36B": (
        said("seed_oss", 5120, 27648, 64, 80, 8, 155136, head_dim=128, max_position_embeddings=524288, pad_token_id=1)
        | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.0}
        | {"pretraining_tp": 1, "rope_theta": 1e7, "rope_scaling": {"rope_type": "default"}},
        36_151_104_512,
    ),
    "helium-1-preview-2b": (
        said("helium", 2560, 7040, 24, 20, 20, 48000, head_dim=128, max_position_embeddings=4096, rope_theta=1e5)
        | {"pretraining_tp": 1, "rms_norm_eps": 1e-8, **UNBIASED},
        2_172_643_840,
    ),
    "Olmo-3-32B": (
        said("olmo3", 5120, 27648, 64, 40, 8, 100278, max_position_embeddings=65536, pad_token_id=100277)
        | {"attention_bias": False, "sliding_window": 4096, "layer_types": SOME_SLIDE * 16, "rope_theta": 500000}
        | {"rope_scaling": {**YARN, "attention_factor": 1.2079441541679836, "factor": 8.0, **SHORT}},
        32_233_522_176,
    ),
    "Mixtral-8x22B-Instruct-v0.1": (
        said("mixtral", 6144, 16384, 56, 48, 8, 32768, max_position_embeddings=65536, rope_theta=1e6, **UNASKED)
        | {"num_experts_per_tok": 2, "num_local_experts": 8, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0}
        | {"rms_norm_eps": 1e-5, "sliding_window": None},
        140_630_071_296,
    ),
    "Qwen3-30B-A3B": (
        said("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, max_position_embeddings=40960, **QWEN, **UNASKED)
        | {"attention_bias": False, "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": []}
        | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8}
        | {"rope_scaling": None, "router_aux_loss_coef": 0.001, "sliding_window": None},
        30_532_122_624,
    ),
    "Qwen1.5-MoE-A2.7B": (
        said("qwen2_moe", 2048, 5632, 24, 16, 16, 151936, max_position_embeddings=8192, **QWEN, **UNASKED)
        | {"decoder_sparse_step": 1, "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False}
        | {"num_experts": 60, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001}
        | {"shared_expert_intermediate_size": 5632, "sliding_window": 32768},
        14_315_784_192,
    ),
    "OLMoE-1B-7B-0924": (
        said("olmoe", 2048, 1024, 16, 16, 16, 50304, max_position_embeddings=4096, rope_theta=10000.0, **UNASKED)
        | {"attention_bias": False, "clip_qkv": None, "norm_topk_prob": False, "pad_token_id": 1}
        | {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "rope_scaling": None}
        | {"router_aux_loss_coef": 0.01},
        6_919_161_856,
    ),
    "granite-3.1-1b-a400m-base": (
        said("granitemoe", 1024, 512, 24, 16, 8, 49155, max_position_embeddings=131072, rope_theta=1500000.0, **UNASKED)
        | {"attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0}
        | {"logits_scaling": 6.0, "residual_multiplier": 0.22, "num_experts_per_tok": 8, "num_local_experts": 32}
        | {"pad_token_id": 0, "rope_scaling": None, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True},
        1_334_628_352,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_published_files_mean_what_they_mean_to_transformers(name: str) -> None:
    config, parameters = FILES[name]
    kind = family(config["model_type"]).config
    ours = kind.from_hugging_face(config)
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
    assert ours == kind.from_hugging_face(theirs.to_dict())
    assert ours.schema.parameters == parameters


BESIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_special": 0, "output_past": True, "predict_special_tokens": True},
    "gpt_neox": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    "nemotron": {"kv_channels": 128},
    "cohere2": {"_sliding_window_pattern": 4},  # as transformers 4.53 saved it
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_published_files_say_beside_changes_nothing(name: str) -> None:
    read, plain = family(name).config.from_hugging_face, small(name).to_dict()
    assert read(plain | BESIDE[name]) == read(plain)


def test_one_rope_of_olmo_3_is_that_of_the_layers_that_see_all() -> None:
    """Transformers 5.0 wrote such files of what 4.57 wrote as a rope_scaling. Version 5.23 writes the nested ones that
    it computes by beside them; of flat ones alone it reads nothing, so they are not written again."""
    config, _ = FILES["Olmo-3-32B"]
    bare = {name: value for name, value in config.items() if "rope" not in name}
    flat = bare | {"rope_parameters": {**config["rope_scaling"], "rope_theta": config["rope_theta"]}}
    kind = family("olmo3").config
    assert kind.from_hugging_face(flat) == kind.from_hugging_face(config)
    written = kind.as_written(flat)
    theirs = CONFIG_MAPPING["olmo3"].from_dict(deepcopy(written))
    assert theirs.rope_parameters == written["rope_parameters"]
    assert kind.from_hugging_face(theirs.to_dict()) == kind.from_hugging_face(config)
    assert kind.as_written(config) == config

    mixed = CONFIG_MAPPING["olmo3"].from_dict(deepcopy(flat)).to_dict()
    assert kind.from_hugging_face(mixed) == kind.from_hugging_face(bare)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factr": 8.0}, "'factr': did you mean 'factor'"),
        ({"full_attention": None, "global_attention": None}, "no kind of layer 'global_attention'"),
    ],
)
def test_what_is_no_rope_of_olmo_3_is_refused(rope: dict[str, Any], message: str) -> None:
    config, _ = FILES["Olmo-3-32B"]
    bare = {name: value for name, value in config.items() if "rope" not in name}
    with pytest.raises(ModelConfigError, match=message):
        family("olmo3").config.from_hugging_face(bare | {"rope_parameters": rope})
