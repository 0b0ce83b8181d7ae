"""Families with experts: what their files say, and each layer's balance beside that of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import drawn, in_float64, of_transformers
from test_transformers import SEQUENCES, as_saved, close, move, theirs_of

from megacore.store.hugging_face_files import config_json
from models.assemble import Model
from models.config import ModelConfig, ModelConfigError
from models.decoder import Microbatch
from models.registry import FAMILIES, configure, family
from models.stages import layout_of
from parallel.balance import Coefficients
from parallel.mesh import Mesh
from parallel.weights.layout import MeshShape
from parallel.weights.transfer import hugging_face, native

MIXTURES = [name for name in FAMILIES if name in ("granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")]


def published(name: str, **fields: Any) -> dict[str, Any]:
    """A small ``config.json`` as transformers writes it, but for these fields."""
    return {**of_transformers(drawn(name, 1, pad_token_id=None)).to_dict(), **fields}


def read(name: str, **fields: Any) -> ModelConfig:
    return family(name).config.from_hugging_face(published(name, **fields))


# -- the balance


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.grid] * (seed > 0)) for seed in range(14)])
@pytest.mark.parametrize("name", MIXTURES)
def test_each_layers_balance_is_that_of_transformers_over_k(name: str, seed: int) -> None:
    """Theirs of one layer at a time: of several, they average counts and scores before they multiply them."""
    section = drawn(name, seed, layers=3, vocab=17, positions=32, tp=1)
    hf_config = of_transformers(section)
    theirs = theirs_of(hf_config, seed)
    config = configure(section)
    layout = layout_of(config, MeshShape())
    ours = Model.create(config, layout, Mesh.single(), torch.float64, coefficients=Coefficients(batch=1.0))
    ours.train(False)
    state = as_saved(theirs, {name: p.detach() for name, p in theirs.named_parameters()})
    with torch.no_grad():
        for key, array in move(config.schema, state, hugging_face(config.schema), native(layout, [0])).items():
            ours.parameters[key].copy_(torch.from_numpy(array))

    # A power of two tokens: theirs divides by their number in fp32.
    count = SEQUENCES * 16
    tokens = torch.randint(config.vocab_size, (SEQUENCES, 16), generator=torch.Generator().manual_seed(seed))
    modeling, routing = import_module(type(theirs).__module__), config.anatomy.routing
    assert routing is not None
    with in_float64():
        out = theirs(input_ids=tokens, use_cache=False, output_router_logits=True)
        balances = [
            modeling.load_balancing_loss_func((logits,), routing.experts, routing.top_k) / routing.top_k
            for logits in out.router_logits
        ]
    loss = F.cross_entropy(out.logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    (loss + sum(balances)).backward()

    positions = torch.arange(16).repeat(SEQUENCES)
    flat, shape = tokens.flatten(), (count, config.sizes["embed"])
    batch = Microbatch(flat, flat, positions, SEQUENCES, shape, number=0)
    assert ours.balance is not None
    ours.balance.begin(1, torch.tensor(2.0), torch.tensor(float(count)), torch.tensor(1.0))
    ours.chunks[0](None, batch).backward()
    read = ours.balance.read(config.sizes["layer"])
    torch.testing.assert_close(read.balance, torch.stack(balances).detach(), rtol=1e-12, atol=0)
    gradients = as_saved(theirs, {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None})
    for key, gradient in move(config.schema, gradients, hugging_face(config.schema), native(layout, [0])).items():
        found = ours.parameters[key].grad
        assert found is not None
        close(found, torch.from_numpy(gradient), f"gradient of {key}")


# -- the names of fields


@pytest.mark.parametrize(
    ("name", "written", "other"),
    [
        ("mixtral", "num_local_experts", "num_experts"),
        ("qwen3_moe", "num_local_experts", "num_experts"),
        ("olmoe", "num_experts", "num_local_experts"),
    ],
)
def test_a_field_has_two_names(name: str, written: str, other: str) -> None:
    theirs = published(name)
    without = {key: value for key, value in theirs.items() if key != written}
    kind = family(name).config
    one, same = kind.from_hugging_face(theirs), kind.from_hugging_face(without | {other: theirs[written]})
    assert one == same and written in one.to_hugging_face() and other not in one.to_hugging_face()
    assert one == kind.from_hugging_face(theirs | {other: theirs[written]})
    with pytest.raises(
        ModelConfigError, match=f"{written} is {theirs[written]}, and {other} is 64: they are one field"
    ):
        kind.from_hugging_face(theirs | {other: 64})
    # A name that nobody changes stays in the file, for older readers know no other.
    assert kind.override({other: 8}, {"hidden_act": "relu"}) == {other: 8, "hidden_act": "relu"}
    for field in (written, other):
        assert configure({"preset": f"{name}-tiny", field: 32}).sizes["experts"] == 32


def test_what_belongs_to_their_balance_is_carried() -> None:
    raw = published("olmoe", output_router_logits=True, router_aux_loss_coef=0.02)
    assert family("olmoe").config.from_hugging_face(raw) == read("olmoe")
    assert b'"router_aux_loss_coef": 0.02' in config_json(raw)


# -- layers without experts


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, None),
        ({"mlp_only_layers": [1, 3]}, (0, 2, 4)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 3, 70]}, (1,)),
    ],
)
def test_layers_without_experts(fields: Mapping[str, Any], sparse: tuple[int, ...] | None) -> None:
    """Counted from 1 where every so many layers have some, and from 0 where they are named."""
    plain = {"decoder_sparse_step": 1, "mlp_only_layers": None}
    schema = read("qwen3_moe", **{**plain, **fields}).schema
    assert schema["layers.{layer}.mlp.router.weight"].layers == sparse
    dense = None if sparse is None else tuple(sorted({*range(5)} - {*sparse}))
    assert getattr(schema.by_name.get("layers.{layer}.mlp.up.weight"), "layers", None) == dense


# -- what is refused

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 would change the maths"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0: it must be at least 1"),
        ("mixtral", {"num_experts_per_tok": 9}, "top_k is 9: choose from 1 to 8, the number of experts"),
        ("mixtral", {"num_experts_per_tok": 0}, "top_k is 0: choose from 1 to 8"),
        ("mixtral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mixtral", {"input_jitter_noise": 0.1}, "unknown field 'input_jitter_noise'"),
        ("mixtral", {"expert_capacity": 64}, "unknown field 'expert_capacity'"),
        ("qwen3_moe", {"quantization_config": FP8}, "quantization_config={'quant_method': 'fp8'"),
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
        ("granitemoe", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("granitemoe", {"num_local_experts": None}, "num_local_experts is None, which is not of type int"),
    ],
)
def test_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        read(name, **fields)
    assert message in str(caught.value)


def test_families_with_experts_that_are_unknown() -> None:
    with pytest.raises(ModelConfigError, match="unknown family 'phimoe'"):
        configure({"family": "phimoe"})
