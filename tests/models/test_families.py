"""What the files of each family may say: what means the same in other words, which layers have windows and ropes, what
is refused; and published files mean here what they mean to transformers."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
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
from megacore.models.registry import configure, family
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


_FIELDS = yaml.safe_load(Path(__file__).with_name("fields.yaml").read_text())


# -- other words for the same


@pytest.mark.parametrize(("name", "fields"), _FIELDS["same"])
def test_what_is_said_beside_changes_nothing(name: str, fields: Fields) -> None:
    assert read(name, plain(name) | fields) == read(name, plain(name))


def test_a_name_that_is_read_is_enough() -> None:
    """gpt-oss's own name of the experts of a token, and no constant of the gate; Gemma's other activations."""
    bare = without(plain("gpt_oss"), "num_experts_per_tok", "swiglu_alpha")
    assert read("gpt_oss", bare | {"experts_per_token": 2}) == read("gpt_oss", plain("gpt_oss"))
    with pytest.raises(ModelConfigError, match="gpt_oss: experts_per_token is 0: choose"):
        read("gpt_oss", bare | {"experts_per_token": 0})
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


def test_kimi_k2_is_a_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_PUBLISHED["kimi_k2"]))
    assert configure({"config": str(tmp_path)}) == configure({"preset": "kimi-k2"})


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

MIXTURES = ("granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize(("name", "fields", "message"), _FIELDS["refused"], ids=lambda value: str(value)[:60])
def test_what_is_refused(name: str, fields: Fields, message: str) -> None:
    config = with_experts(name) if name in MIXTURES else OLD.get(name) or plain(name)
    if name == "falcon":
        config = config | {"hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(ModelConfigError) as caught:
        read(name, without(config, *fields) | fields)
    assert message in str(caught.value) and str(caught.value).startswith(f"{name}: ")


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
