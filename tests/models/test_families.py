"""What the files of each family may say: what means the same in other words, which layers have windows and ropes, what
is refused; and published files mean here what they mean to transformers."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from families import drawn, of_transformers, small
from torch import Tensor
from transformers import CONFIG_MAPPING

from megacore.models.anatomy import FULL, ROPE, SLIDING
from megacore.models.assemble import Model
from megacore.models.config import ModelConfig, ModelConfigError
from megacore.models.decoder import Microbatch
from megacore.models.registry import FAMILIES, configure, family
from megacore.models.rope_config import DefaultRope, YarnRope
from megacore.models.stages import layout_of
from megacore.parallel.kernels.activation import clamped_swiglu, gated, limited_swiglu
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.store.weight_folders.hugging_face_files import config_json

Fields = dict[str, Any]


def read(name: str, config: Fields) -> ModelConfig:
    return family(name).config.from_hugging_face(config)


def without(config: Fields, *fields: str) -> Fields:
    return {name: value for name, value in config.items() if name not in fields}


def plain(name: str, **fields: Any) -> Fields:
    """A small ``config.json`` as transformers writes it."""
    return small(name, **fields).to_dict()


def with_experts(name: str) -> Fields:
    """One of five layers, of a family with experts."""
    return of_transformers(drawn(name, 1, pad_token_id=None)).to_dict()


# Of transformers 4, as it wrote them; the larger models of Gemma 3 leave out what is the default.
OLD: dict[str, Fields] = {
    "gemma3_text": {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 500000,
        "rope_local_base_freq": 20000.0,
        "sliding_window": 4,
        "torch_dtype": "bfloat16",
        "cache_implementation": "hybrid",
    },
    "qwen2": without(plain("qwen2"), "layer_types"),
    "smollm3": without(plain("smollm3", pad_token_id=None), "layer_types", "no_rope_layers"),
    "mistral": without(plain("mistral"), "sliding_window"),
    "cohere2": without(plain("cohere2"), "layer_types", "rope_parameters"),
    "falcon": without(plain("falcon"), "rope_parameters"),
    **{name: without(plain(name, head_dim=8), "rope_parameters") for name in ("glm", "glm4")},
}


def test_what_has_no_type_is_no_field() -> None:
    """A default without a type would be none: that of the class behind would stay."""
    for name in FAMILIES:
        kind = family(name).config
        for each in (each for each in kind.__mro__ if issubclass(each, ModelConfig)):
            untyped = vars(each).keys() - vars(each).get("__annotations__", {}).keys()
            assert untyped.isdisjoint(field.name for field in fields(each)), each


# -- other words for the same

GEMMAS = ("gemma", "gemma2", "gemma3_text")
DEEPSEEK = {"aux_loss_alpha": 0.001, "ep_size": 1, "seq_aux": True, "pretraining_tp": 1, "moe_layer_freq": 1}
SAME: list[tuple[str, Fields]] = [
    # Fields of published files that transformers' class does not have, or not any more.
    ("gpt2", {"n_special": 0, "output_past": True, "predict_special_tokens": True}),
    ("gpt_neox", {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}),
    ("nemotron", {"kv_channels": 128}),
    ("cohere2", {"_sliding_window_pattern": 4}),  # as transformers 4.53 saved it
    ("cohere2", {"use_qk_norm": False}),
    ("deepseek_v3", DEEPSEEK | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    ("deepseek_v2", DEEPSEEK | {"scoring_func": "softmax"}),
    ("dots1", {"moe_layer_freq": 1}),
    ("deepseek_v32", DEEPSEEK | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}),
    ("glm_moe_dsa", DEEPSEEK | {"scoring_func": "sigmoid", "indexer_rope_interleave": True}),
    (
        "deepseek_v4",
        {"layer_types": None, "compress_ratios": [0, 4, 128, 0], "mlp_layer_types": None, "num_hash_layers": 1},
    ),
    ("deepseek_v4", {"compress_rates": None, "compress_rate_csa": 2, "compress_rate_hca": 4}),
    ("deepseek_v4", {"rope_parameters": None, "partial_rotary_factor": None, "qk_rope_head_dim": 4}),
    ("exaone4", {"reorder_and_qk_norm": True}),
    ("phimoe", {"hidden_dropout": 0.0}),
    ("qwen3_next", {"use_sliding_window": False}),
    ("starcoder2", {"activation_function": "gelu", "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-5}),
    ("starcoder2", {"scale_attention_softmax_in_fp32": True, "scale_attn_weights": True}),
    ("gpt_oss", {"experts_per_token": 2, "initial_context_length": 4096}),
    ("bamba", {"attn_rotary_emb": 2, "time_step_limit": [0.0, {"__float__": "Infinity"}]}),
    ("mamba", {"ssm_cfg": {}, "d_model": 16, "fused_add_norm": True, "rms_norm": True, "pad_vocab_size_multiple": 8}),
    ("mamba2", {"norm_before_gate": True, "intermediate_size": 32, "rms_norm": True}),  # as transformers 4.44 saved it
    ("jamba", {"mamba_inner_layernorms": True, "n_ctx": 262144, "calc_logits_for_entire_prompt": False}),
    ("granitemoehybrid", {"layer_types": ["attention", "mamba", "mamba"], "normalization_function": "rmsnorm"}),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "*ME", "num_hidden_layers": 3}),
    ("kimi_linear", {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3]}}),
    ("recurrent_gemma", {"embeddings_scale_by_sqrt_dim": True, "final_w_init_variance_scale": 0.1}),
    ("bailing_hybrid", {"rope_theta": 5.0, "mtp_loss_scaling_factor": 0.3}),  # which has rope_parameters
    ("ctrl", {"n_ctx": 512, "from_tf": False}),
    ("openai-gpt", {"n_ctx": 512, "n_special": 0, "predict_special_tokens": True, "summary_activation": None}),
    ("minimax", {"postnorm": True, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "rotary_dim": 4}),
    ("mimo_v2_flash", {"layer_types": None, "hybrid_layer_pattern": [0, 1, 1], "sliding_window_size": 4}),
    ("mimo_v2_flash", {"mlp_layer_types": None, "moe_layer_freq": [0, 1, 1], "n_shared_experts": None}),
    ("mimo_v2_flash", {"swa_num_key_value_heads": 4, "swa_head_dim": 4, "add_swa_attention_sink_bias": True}),
    ("kimi_linear", {"linear_attn_config": {"head_dim": 12, "num_heads": 4}, "head_dim": 72, "mla_use_nope": True}),
    # GELU means its approximation, and Gemma 2 reads one of two names.
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
    ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window_size": 4096}),
    *((name, {"use_bidirectional_attention": off}) for name in GEMMAS for off in (None, False)),
]


@pytest.mark.parametrize(("name", "fields"), SAME)
def test_what_is_said_beside_changes_nothing(name: str, fields: Fields) -> None:
    assert read(name, plain(name) | fields) == read(name, plain(name))


def test_a_name_that_is_read_is_enough() -> None:
    """gpt-oss's own name of the experts of a token, and no constant of the gate; Gemma's other activations."""
    bare = without(plain("gpt_oss"), "num_experts_per_tok", "swiglu_alpha")
    assert read("gpt_oss", bare | {"experts_per_token": 2}) == read("gpt_oss", plain("gpt_oss"))
    assert read("gemma", plain("gemma") | {"hidden_act": "relu"}).anatomy.activation == "relu"
    assert "hidden_act" not in read("gemma2", plain("gemma2")).to_hugging_face()


COHERE2 = {  # command-r7b's, one of which makes its layers
    "cache_implementation": "hybrid",
    "layer_switch": 2,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window_pattern": 2,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}
GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OF_GLM: list[tuple[Fields, int]] = [
    ({}, 4),
    ({"rope_theta": 5e6, "partial_rotary_factor": 0.25}, 2),
    ({"rope_parameters": GLM_ROPE}, 4),
    ({"rope_parameters": GLM_ROPE | {"partial_rotary_factor": 1.0}}, 8),
]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cohere2", COHERE2),
        ("gemma3_text", {}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("gemma3_text", {"layer_types": [FULL, *[SLIDING] * 6]}),
        *((name, fields) for name in ("glm", "glm4") for fields, _ in OF_GLM),
    ],
)
def test_an_old_file_is_the_new_one_that_transformers_makes_of_it(name: str, fields: Fields) -> None:
    theirs = CONFIG_MAPPING[name](**(OLD[name] | fields)).to_dict()
    theirs.pop("sliding_window_pattern", None)  # kept, beside the layer_types that it made
    ours = read(name, OLD[name] | fields)
    if name != "cohere2":
        assert ours == read(name, theirs)
    for field in ("layer_types", "rope_parameters"):
        assert name.startswith("glm") or ours.to_hugging_face()[field] == theirs[field]


@pytest.mark.parametrize("name", ["glm", "glm4"])
@pytest.mark.parametrize(("said", "turning"), OF_GLM)
def test_half_of_a_head_of_glm_turns_unless_another_part_is_said(name: str, said: Fields, turning: int) -> None:
    sizes = read(name, OLD[name] | said).sizes
    assert sizes["two"] * sizes["half"] == turning and sizes.get("rest", 0) == 8 - turning


def test_the_old_spelling_of_olmo_3() -> None:
    """What transformers 4.57 wrote: the scaling is that of the layers that see all."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 32}
    config = without(plain("olmo3"), "rope_parameters") | {"rope_theta": 7e5, "rope_scaling": scaling}
    yarn = YarnRope(rope_theta=7e5, factor=8.0, original_max_position_embeddings=8)
    assert read("olmo3", config).anatomy.ropes == {FULL: yarn, SLIDING: DefaultRope(rope_theta=7e5)}


@pytest.mark.parametrize(
    ("name", "written", "other"),
    [
        ("mixtral", "num_local_experts", "num_experts"),
        ("qwen3_moe", "num_local_experts", "num_experts"),
        ("olmoe", "num_experts", "num_local_experts"),
    ],
)
def test_a_field_has_two_names(name: str, written: str, other: str) -> None:
    theirs, kind = with_experts(name), family(name).config
    one, same = read(name, theirs), read(name, without(theirs, written) | {other: theirs[written]})
    assert one == same and written in one.to_hugging_face() and other not in one.to_hugging_face()
    assert one == read(name, theirs | {other: theirs[written]})
    twice = f"{written} is {theirs[written]}, and {other} is 64: they are one field"
    with pytest.raises(ModelConfigError, match=twice):
        read(name, theirs | {other: 64})
    # A name that nobody changes stays in the file, for older readers know no other.
    assert kind.override({other: 8}, {"hidden_act": "relu"}) == {other: 8, "hidden_act": "relu"}
    for field in (written, other):
        assert configure({"preset": f"{name}-tiny", field: 32}).sizes["experts"] == 32


def test_what_belongs_to_their_balance_is_carried() -> None:
    raw = with_experts("olmoe") | {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    assert read("olmoe", raw) == read("olmoe", with_experts("olmoe"))
    assert b'"router_aux_loss_coef": 0.02' in config_json(raw)


# -- published files

_PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())


def published(name: str) -> Fields:
    config = _PUBLISHED["every"] | _PUBLISHED["models"][name]["config"]
    if period := config.get("layer_types"):
        config["layer_types"] = period * (config["num_hidden_layers"] // len(period))
    return config


@pytest.mark.parametrize("name", _PUBLISHED["models"])
def test_published_files_mean_what_they_mean_to_transformers(name: str) -> None:
    config = published(name)
    ours, theirs = read(config["model_type"], config), CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
    assert ours == read(config["model_type"], theirs.to_dict())
    assert ours.schema.parameters == _PUBLISHED["models"][name]["parameters"]


OLMO_3 = published("Olmo-3-32B")
BARE = {name: value for name, value in OLMO_3.items() if "rope" not in name}


def test_one_rope_of_olmo_3_is_that_of_the_layers_that_see_all() -> None:
    """Transformers 5.0 wrote such files of what 4.57 wrote as a rope_scaling. Version 5.23 writes the nested ones that
    it computes by beside them; of flat ones alone it reads nothing, so they are not written again."""
    flat = BARE | {"rope_parameters": {**OLMO_3["rope_scaling"], "rope_theta": OLMO_3["rope_theta"]}}
    kind = family("olmo3").config
    assert read("olmo3", flat) == read("olmo3", OLMO_3)
    written = kind.as_written(flat)
    theirs = CONFIG_MAPPING["olmo3"].from_dict(deepcopy(written))
    assert theirs.rope_parameters == written["rope_parameters"]
    assert read("olmo3", theirs.to_dict()) == read("olmo3", OLMO_3)
    assert kind.as_written(OLMO_3) == OLMO_3

    mixed = CONFIG_MAPPING["olmo3"].from_dict(deepcopy(flat)).to_dict()
    assert read("olmo3", mixed) == read("olmo3", BARE)


# -- which layers have windows, and which rotate

SLIDES = {"use_sliding_window": True, "sliding_window": 5}
WINDOWS: list[tuple[str, Fields, Sequence[int | None]]] = [
    ("mistral", {}, [4096] * 3),
    ("mistral", {"sliding_window": None}, [None] * 3),
    ("mistral", {"sliding_window": 5}, [5] * 3),
    # Qwen2's, that are off.
    ("qwen2", {}, [None] * 3),
    ("qwen2", {"sliding_window": 5}, [None] * 3),
    ("qwen2", {"sliding_window": 5, "max_window_layers": 0}, [None] * 3),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None}, [None] * 3),
    ("qwen2", {"layer_types": [FULL] * 3}, [None] * 3),
    ("qwen2", SLIDES | {"max_window_layers": 3}, [None] * 3),
    ("qwen2", SLIDES | {"max_window_layers": 1}, [None, 5, 5]),
    ("qwen2", SLIDES | {"max_window_layers": 0}, [5, 5, 5]),
    ("qwen2", SLIDES | {"max_window_layers": 0, "layer_types": [SLIDING, FULL, SLIDING]}, [5, None, 5]),
    ("smollm3", {}, [None] * 3),
    ("smollm3", {"no_rope_layer_interval": 2}, [None] * 3),
    ("smollm3", {"no_rope_layer_interval": 2, "no_rope_layers": [0, 1, 1, 1, 0]}, [None] * 3),
    ("smollm3", SLIDES | {"no_rope_layer_interval": 2}, [None, 5, None]),
]


@pytest.mark.parametrize(("name", "fields", "windows"), WINDOWS)
def test_windows_and_ropes_are_those_of_transformers(name: str, fields: Fields, windows: list[int | None]) -> None:
    anatomy, theirs = read(name, OLD[name] | fields).anatomy, CONFIG_MAPPING[name](**OLD[name] | fields)
    assert [layer.window for layer in anatomy.layers] == windows
    if not any(windows):
        assert name == "smollm3" or anatomy == read(name, OLD[name] | {"sliding_window": None}).anatomy
    kinds = getattr(theirs, "layer_types", None) or [SLIDING] * 3
    assert [theirs.sliding_window if kind == SLIDING else None for kind in kinds] == windows
    rotate = getattr(theirs, "no_rope_layers", [1] * 3)
    assert [int(layer.rope is not None) for layer in anatomy.layers] == rotate[:3]


def test_layers_of_cohere2_that_see_all_do_not_rotate() -> None:
    config = plain("cohere2", num_hidden_layers=8, sliding_window=7) | {"layer_types": None}
    layers = read("cohere2", config).anatomy.layers
    assert [(layer.rope, layer.window) for layer in layers] == [(ROPE, 7), (ROPE, 7), (ROPE, 7), (None, None)] * 2


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, None),
        ({"mlp_only_layers": [1, 3]}, (0, 2, 4)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 3, 70]}, (1,)),
    ],
)
def test_layers_without_experts(fields: Fields, sparse: tuple[int, ...] | None) -> None:
    """Counted from 1 where every so many layers have some, and from 0 where they are named."""
    config = with_experts("qwen3_moe") | {"decoder_sparse_step": 1, "mlp_only_layers": None}
    schema = read("qwen3_moe", config | fields).schema
    assert schema["layers.{layer}.mlp.router.weight"].layers == sparse
    dense = None if sparse is None else tuple(sorted({*range(5)} - {*sparse}))
    assert getattr(schema.by_name.get("layers.{layer}.mlp.up.weight"), "layers", None) == dense


def test_a_model_without_experts_has_none() -> None:
    config = read("deepseek_v3", plain("deepseek_v3", first_k_dense_replace=9))
    assert not any("expert" in param.name or "router" in param.name for param in config.schema.params)


# -- Falcon's heads, gates with limits, StarCoder2's dropout


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, {"kv": 1}),
        ({"multi_query": False}, {"kv": 4}),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, {"groups": 2, "share": 2}),
    ],
    ids=["7b", "one for each", "40b"],
)
def test_how_keys_and_values_of_falcon_are_shared(changes: Fields, shared: dict[str, int]) -> None:
    sizes = read("falcon", plain("falcon", **changes)).sizes
    assert {axis: sizes[axis] for axis in ("kv", "groups", "share") if axis in sizes} == shared


def test_a_group_is_on_one_rank() -> None:
    """Ranks that share keys and values would share the queries of the group, too, and count them twice."""
    with pytest.raises(ValueError, match=r"cannot split groups \(8\) over tp=16: choose tp from 1, 2, 4, 8"):
        layout_of(configure({"preset": "falcon-40b"}), MeshShape(tp=16))


@pytest.mark.parametrize(
    ("name", "function", "limit", "formula"),
    [
        ("swiglu_oai", clamped_swiglu, 7, lambda g, u: (u + 1) * g / (1 + (-1.702 * g).exp())),  # gpt-oss
        ("swiglu_limited", limited_swiglu, 10, lambda g, u: u * g / (1 + (-g).exp())),  # DeepSeek-V4
    ],
)
def test_gates_with_a_limit_are_the_formula_and_its_derivative(
    name: str, function: Callable[[Tensor], Tensor], limit: int, formula: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Below, within and above the limits."""
    generator = torch.Generator().manual_seed(0)
    gate_up = (torch.randn(6, 16, generator=generator, dtype=torch.float64) * 9).requires_grad_()
    gate, up = gate_up.detach().chunk(2, -1)
    assert all((each > limit).any() and (each < -limit).any() for each in (gate, up))
    torch.testing.assert_close(gated(name, gate_up), formula(gate.clamp(max=limit), up.clamp(-limit, limit)))
    assert torch.autograd.gradcheck(function, (gate_up,))
    assert not function(torch.zeros(2, 4)).any()  # what is padded with zeros stays zero


@pytest.mark.parametrize("field", ["attention_dropout", "embedding_dropout", "residual_dropout"])
def test_each_dropout_of_starcoder2_drops_in_training_alone(field: str) -> None:
    config = configure(drawn("starcoder2") | {field: 0.5})
    model = Model.create(config, layout_of(config, MeshShape()), Mesh.single(), torch.float64)
    model.parameters.initialise(0)
    tokens = torch.arange(12)

    def loss(seed: int) -> float:
        batch = Microbatch(tokens, tokens, tokens, 1, (12, config.sizes["embed"]), seed=seed)
        return float(model.chunks[0](None, batch))

    assert loss(1) == loss(1) != loss(2)
    model.train(False)
    assert loss(1) == loss(2)


# -- what is refused

ALL_SLIDE = {"layer_types": [SLIDING] * 3, "sliding_window": 5}
REFUSED: list[tuple[str, Fields, str]] = [
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm=True would change the maths"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True would change the maths"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not one of greedy, group_limited_greedy"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": None}, "n_group is missing"),
    (
        "bamba",
        {"mamba_d_head": 3},
        "mamba_n_heads (8) times mamba_d_head (3) is not 32: mamba_expand (2) times hidden_size",
    ),
    ("bamba", {"mamba_n_groups": 3}, "mamba_n_heads (8) is not a multiple of mamba_n_groups (3)"),
    ("bamba", {"time_step_limit": [0.5]}, "time_step_limit is [0.5]: it must be two numbers, the lower one first"),
    ("bamba", {"time_step_limit": [1.0, 0.1]}, "time_step_limit is [1.0, 0.1]"),
    ("bamba", {"layer_types": ["full_attention"] * 3}, "BambaForCausalLM takes None"),
    ("bamba", {"z_loss_coefficient": 0.1}, "z_loss_coefficient=0.1 would change the maths"),
    ("mamba", {"rms_norm": False}, "rms_norm=False would change the maths"),
    ("mamba", {"head_dim": 4}, "head_dim is 4: MambaForCausalLM takes 1"),
    ("mamba2", {"intermediate_size": 24}, "intermediate_size is 24: Mamba2ForCausalLM takes 32"),
    ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms=False would change the maths"),
    ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset is 3: it must be below attn_layer_period (3)"),
    ("jamba", {"num_experts_per_tok": 5}, "top_k is 5: choose from 1 to 4, the number of experts"),
    ("granitemoehybrid", {"layer_types": ["mamba", "other", "attention"]}, "layer_types names other"),
    ("granitemoehybrid", {"intermediate_size": 0}, "intermediate_size is 0: it must be at least 1"),
    ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings=False would change the maths"),
    ("zamba2", {"use_long_context": True}, "use_long_context=True would change the maths"),
    ("zamba2", {"attention_head_dim": 4}, "attention_head_dim (4) is not 32: twice hidden_size (16)"),
    ("zamba2", {"hybrid_layer_ids": [0]}, "hybrid_layer_ids is [0]: Zamba2ForCausalLM takes"),
    (
        "zamba2",
        {"layers_block_type": ["hybrid", "attention", "mamba"], "hybrid_layer_ids": None},
        "names full_attention: only linear_attention and",
    ),
    ("zamba2", {"use_shared_attention_adapter": True}, "num_key_value_heads (2) is not num_attention_heads (4)"),
    ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size=8 would change the maths"),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX*"}, "hybrid_override_pattern has X"),
    ("nemotron_h", {"mamba_hidden_act": "tanh"}, "mamba_hidden_act 'tanh' is not one of"),
    ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "linear_attn_config is {'gate_lower_bound'"),
    (
        "kimi_linear",
        {"linear_attn_config": {"num_heads": 8}},
        "linear_num_heads is 4, and linear_attn_config.num_heads",
    ),
    (
        "kimi_linear",
        {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]}},
        "layer_types names none",
    ),
    ("mimo_v2_flash", {"num_key_value_heads": 4}, "num_attention_heads (4) is not a multiple of 8, twice"),
    ("mimo_v2_flash", {"v_head_dim": 5}, "v_head_dim is 5: it may be up to head_dim (4)"),
    ("mimo_v2_flash", {"swa_num_key_value_heads": 2}, "swa_num_key_value_heads is 2: MiMoV2FlashForCausalLM takes 4"),
    (
        "mimo_v2_flash",
        {"add_full_attention_sink_bias": True},
        "add_full_attention_sink_bias=True would change the maths",
    ),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False would change the maths"),
    ("kimi_linear", {"qk_rope_head_dim": 5, "qk_head_dim": 11}, "qk_rope_head_dim is 5: it must be even"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "so it must be num_attention_heads (4)"),
    ("deepseek_v3", {"v_head_dim": 11}, "v_head_dim is 11: it may be up to 10, qk_nope_head_dim + qk_rope_head_dim"),
    ("deepseek_v3", {"qk_head_dim": 12}, "qk_head_dim is 12: DeepseekV3ForCausalLM takes 10"),
    ("deepseek_v3", {"qk_rope_head_dim": 5, "head_dim": 5, "qk_head_dim": 11}, "head_dim 5 is odd"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' would change the maths"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' would change the maths"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 would change the maths"),
    ("deepseek_v3", {"n_group": 3}, "4 experts do not divide into 3 groups"),
    ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1: it must be at least 0"),
    ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1: it must be from 0"),
    *(
        (name, fields, message)
        for name in ("deepseek_v32", "glm_moe_dsa")
        for fields, message in (
            ({"index_topk": 0}, "index_topk is 0: it must be at least 1"),
            ({"index_n_heads": 0}, "index_n_heads is 0: it must be at least 1"),
            ({"index_head_dim": 4}, "index_head_dim is 4: it must be above qk_rope_head_dim (4), the part of it that"),
            ({"q_lora_rank": None}, "q_lora_rank is None, which is not of type int"),
            ({"rope_interleave": False}, "rope_interleave=False would change the maths"),
        )
    ),
    ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave=False would change the maths"),
    ("glm_moe_dsa", {"index_topk_pattern": "FSS"}, "unknown field 'index_topk_pattern'"),
    ("glm_moe_dsa", {"indexer_types": ["full"] * 2}, "indexer_types names 2 layers, and num_hidden_layers is 3"),
    ("glm_moe_dsa", {"indexer_types": ["full", "half", "full"]}, "indexer_types names half: only full and shared are"),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "indexer_types: the first layer must be full"),
    ("deepseek_v4", {"compress_rates": {"full_attention": 4}}, "compress_rates is {'full_attention': 4}: it may say"),
    ("deepseek_v4", {"layer_types": None, "compress_ratios": [0, 4, 64]}, "layer_types names compress_ratios 64"),
    ("deepseek_v4", {"o_groups": 3}, "num_attention_heads (4) is not a multiple of o_groups (3)"),
    ("deepseek_v4", {"num_key_value_heads": 4}, "num_key_value_heads=4 would change the maths"),
    ("deepseek_v4", {"swiglu_limit": 7.0}, "swiglu_limit=7.0 would change the maths"),
    ("deepseek_v4", {"index_head_dim": 4}, "index_head_dim is 4: it must be above 4, the part of a head that turns"),
    (
        "deepseek_v4",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "compress: rope_type is 'dynamic', which goes by the length",
    ),
    (
        "deepseek_v4",
        {"rope_parameters": {"main": {"partial_rotary_factor": 0.5}, "compress": {"partial_rotary_factor": 0.25}}},
        "partial_rotary_factor is 0.5 of main and 0.25 of compress",
    ),
    ("falcon", {"alibi": True}, "alibi=True would change the maths and is not supported: only False is"),
    ("falcon", {"hidden_dropout": 0.1}, "hidden_dropout=0.1 would change the maths and is not supported: only 0.0 is"),
    ("falcon", {"attention_dropout": 0.1}, "attention_dropout=0.1 would change the maths and is not supported: only 0"),
    ("falcon", {"partial_rotary_factor": 0.5}, "rope_type 'default' has no field 'partial_rotary_factor'"),
    ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn is false: branches of new_"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2: it must be 1 or null, or 2 with new_"),
    ("gemma2", {"hidden_act": "relu"}, "hidden_act is 'relu': Gemma2ForCausalLM takes 'gelu_pytorch_tanh'"),
    *(
        (name, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True would change the maths")
        for name in GEMMAS
    ),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 would change the maths"),
    *(
        ("gemma3n_text", fields, message)
        for fields, message in (
            ({"altup_correct_scale": False}, "altup_correct_scale=False would change the maths"),
            ({"altup_num_inputs": 1}, "altup_num_inputs is 1: it must be at least 2"),
            ({"altup_active_idx": 4}, "altup_active_idx is 4: it must be at least 0, and below altup_num_inputs (4)"),
            ({"altup_coef_clip": 0.0}, "altup_coef_clip is 0.0: it must be above 0, or null"),
            ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is 0: it must be at least 1"),
            (
                {"activation_sparsity_pattern": [0.5]},
                "activation_sparsity_pattern names 1 layers, and num_hidden_layers",
            ),
            (
                {"activation_sparsity_pattern": [0.5, 1.0, 0]},
                "activation_sparsity_pattern has 1.0: each must lie in [0",
            ),
            (
                {"intermediate_size": [8, 8, 12]},
                "intermediate_size is [8, 8, 12]: it must be one number, or 3 of these",
            ),
        )
    ),
    ("gemma4_text", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1: it must be at least 0"),
    *(
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": rows, "pad_token_id": 5},
            message,
        )
        for rows, message in (
            (0, "vocab_size_per_layer_input is 0: it must be at least 1"),
            (5, "pad_token_id is 5: it"),
        )
    ),
    ("gemma4_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3: it must be at least 0, and below 3, the"),
    (
        "gemma4_text",
        {"num_kv_shared_layers": 1},
        "num_kv_shared_layers is 1: no layer before those is of full_attention",
    ),
    (
        "gemma4_text",
        {"enable_moe_block": True, "top_k_experts": 2, "num_experts": 4, "moe_intermediate_size": 8}
        | {"use_double_wide_mlp": True},
        "use_double_wide_mlp and enable_moe_block: no model has both",
    ),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all': only 'vision'"),
    ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 8}}}, "only the layers of full_attention may have another"),
    ("gemma4_text", {"per_layer_config": {"2": {"sliding_window": 8}}}, "only the layers of full_attention may have"),
    (
        "gemma4_text",
        {"enable_moe_block": True, "top_k_experts": 2, "num_experts": None},
        "num_experts is 0: it must be",
    ),
    (
        "gemma4_text",
        {"attention_k_eq_v": True, "per_layer_config": {"2": {"num_key_value_heads": 3}}},
        "4 heads are no m",
    ),
    *(
        ("gemma3_text", {"sliding_window_pattern": pattern}, f"sliding_window_pattern is {pattern!r}: it must be a")
        for pattern in (0, 2.5, "6")
    ),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "only None is"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 would change the maths"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 would change the maths"),
    ("gpt_oss", {"experts_per_token": 3}, "experts_per_token"),
    *(("gptj", {"rotary_dim": turning}, f"rotary_dim is {turning}:") for turning in (0, 3, 6)),
    ("gptj", {"rotary_dim": None}, "rotary_dim is None,"),
    ("mistral", {"layer_types": [FULL] * 3}, "unknown field 'layer_types', which may change the maths"),
    ("qwen2", {"layer_types": [FULL, FULL, SLIDING]}, "layer_types names sliding_attention, and there is no sliding"),
    ("qwen2", {"layer_types": [FULL] * 2}, "layer_types names 2 layers, and num_hidden_layers is 3: give as many, or"),
    ("qwen2", {"layer_types": [FULL, FULL, "mamba"]}, "layer_types names mamba: only full_attention and sliding_att"),
    ("qwen2", {"layer_types": 3}, "layer_types is 3, which is not of type tuple[str, ...] | None"),
    ("qwen2", SLIDES | {"sliding_window": 0}, "sliding_window is 0: it must be at least 1, or null"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers, and num_hidden_layers is 3: give as many"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0: it must be at least 1"),
    ("smollm3", ALL_SLIDE, "layer_types names sliding_attention, and use_sliding_window is false: say which"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 would change the maths"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0: it must be at least 1"),
    ("mixtral", {"num_experts_per_tok": 9}, "top_k is 9: choose from 1 to 8, the number of experts"),
    ("mixtral", {"num_experts_per_tok": 0}, "top_k is 0: choose from 1 to 8"),
    ("mixtral", {"sliding_window": 0}, "sliding_window is 0"),
    ("mixtral", {"input_jitter_noise": 0.1}, "unknown field 'input_jitter_noise'"),
    ("mixtral", {"expert_capacity": 64}, "unknown field 'expert_capacity'"),
    ("qwen3_moe", {"num_nextn_predict_layers": 1}, "unknown field 'num_nextn_predict_layers'"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0: it must be at least 1"),
    ("qwen3_moe", {"decoder_sparse_step": 9}, "leave no layer with experts"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3, 4]}, "leave no layer with experts"),
    ("qwen3_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers is ('a',), which is not of type tuple[int, ...]"),
    ("qwen3_moe", {"num_hidden_layers": 2**62}, f"num_hidden_layers is {2**62}: it may be up to 65536"),
    ("qwen2_moe", {"num_local_experts": 8}, "unknown field 'num_local_experts'"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    ("olmoe", {"clip_qkv": 0}, "clip_qkv is 0: it must be above 0, or null"),
    ("olmoe", {"head_dim": 3}, "head_dim is 3: OlmoeForCausalLM takes"),
    ("ernie4_5", {"attention_dropout": 0.1}, "attention_dropout is 0.1: Ernie4_5ForCausalLM takes 0.0"),
    ("exaone_moe", {"mlp_layer_types": ["dense"]}, "mlp_layer_types names 1 layers, and num_hidden_layers is 3: give"),
    ("exaone_moe", {"mlp_layer_types": ["sparse", "dense", "rare"]}, "mlp_layer_types names rare: only dense and spa"),
    ("gpt_neo", {"attention_types": [[["global"], 2]]}, "attention_types names 2 layers, and num_layers is 3: give as"),
    ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=True would change the maths"),
    ("recurrent_gemma", {"lru_width": 18}, "lru_width (18) is not a multiple of num_attention_heads (4)"),
    ("recurrent_gemma", {"block_types": ["recurrent", "x"]}, "layer_types names x: only"),
    ("bailing_hybrid", {"kda_lower_bound": 0.5}, "kda_lower_bound is 0.5: it must be below 0"),
    ("xglm", {"pad_token_id": -1}, "pad_token_id is -1: it must be at least 0, or null"),
    ("ctrl", {"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon=1e-05 would change the maths"),
    ("openai-gpt", {"afn": "gelu_new"}, "hidden_act 'gelu_new' is not one of gelu, relu, silu, swish"),
    ("laguna", {"num_attention_heads_per_layer": [4, 8, 12]}, "has 8, 12 beside num_attention_heads (4)"),
    ("laguna", {"num_attention_heads_per_layer": [4, 7, 4]}, "has 7: give multiples of num_key_value_heads (2)"),
    ("laguna", {"gating": "x"}, "gating is 'x': it must be true, 'per-head' or 'per-element'"),
    ("minimax", {"postnorm": False}, "postnorm=False would change the maths"),
    ("minimax", {"shared_intermediate_size": 8}, "shared_intermediate_size=8 would change the maths"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax' would change the maths"),
    ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "rope_type is 'default': queries have a temperature"),
    ("mistral4", {"rope_parameters": {"rope_type": "default"}}, "rope_type is 'default': queries have a temperature"),
    ("mistral4", {"partial_rotary_factor": 0.7}, "partial_rotary_factor is 0.7: Mistral4ForCausalLM turns qk_rope_h"),
    ("olmo_hybrid", {"layer_types": [FULL] * 3}, "layer_types names one kind of layers: its class takes both"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm=True would change the maths"),
    ("codegen", {"n_head": 6, "n_embd": 48}, "n_head is 6: it must be a multiple of 4, the groups that heads lie in"),
    ("qwen3_5_moe_text", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' would change the maths"),
    ("qwen3_5_text", {"mlp_only_layers": [1]}, "mlp_only_layers=[1] would change the maths"),
    ("mpt", {"attn_config": {"alibi": False, "qk_ln": True}}, "attn_config has alibi=False, which is not supported"),
    ("mpt", {"attn_config": 3}, "attn_config is 3, not fields by name"),
    ("nanochat", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0: it must be above 0, or null"),
    ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 would change the maths"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False would change the maths"),
    ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim is 8: it must be hidden_size, 16"),
    ("opt", {"rope_parameters": {"rope_type": "default"}}, "unknown field 'rope_parameters'"),
    ("falcon_h1", {"key_multiplier": -0.5}, "key_multiplier is -0.5: it must be above 0"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0: it must be above 0"),
    ("granite", {"attention_multiplier": 0.0}, "attention_multiplier is 0.0: it must be above 0"),
    ("granitemoe", {"logits_scaling": 0}, "logits_scaling is 0"),
    ("mpt", {"attn_config": {"softmax_scale": -1.0}}, "softmax_scale is -1.0: it must be above 0, or null"),
    ("granitemoe", {"num_local_experts": None}, "num_local_experts is None, which is not of type int"),
]
MIXTURES = ("granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_refused(name: str, fields: Fields, message: str) -> None:
    config = with_experts(name) if name in MIXTURES else OLD.get(name) or plain(name)
    if name == "falcon":
        config = config | {"hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(ModelConfigError) as caught:
        read(name, without(config, *fields) | fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factr": 8.0}, "'factr': did you mean 'factor'"),
        ({"full_attention": None, "global_attention": None}, "no kind of layer 'global_attention'"),
    ],
)
def test_what_is_no_rope_of_olmo_3_is_refused(rope: Fields, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read("olmo3", BARE | {"rope_parameters": rope})
