"""The sentences of adapters, derived from those of the weights."""

from megacore.models.lora import Lora, adapters, linears, targets
from megacore.models.names import matches, tensors
from megacore.models.registry import configure
from megacore.parallel.weights.schema import Param, Schema

SIZES = {"layer": 2, "embed": 8, "heads": 4, "kv": 2, "head": 6, "two": 2, "half": 2, "rest": 2}


def test_adapters_of_pieces_in_which_more_is_fused() -> None:
    """Queries of which some dimensions turn, in pairs, and some stand still: one linear to Hugging Face."""
    ours, theirs = (
        f"(q: heads (turn: {pair} + still: rest) + k: kv (turn: {pair} + still: rest) + v: kv head)"
        for pair in ("two half", "half two")
    )
    name = "attn.{q,k,v}_proj"
    weight = Param("layers.{layer}.qkv.weight", f"{ours} embed", f"l.{{layer}}.{name}.weight", f"{theirs} embed")
    schema = Schema((weight,), SIZES)
    assert [linear.name for linear in linears(schema)] == ["qkv.q", "qkv.k", "qkv.v"]
    a, b = adapters(schema, Lora(3, 1.0, ("q_proj", "v_proj"))).params
    assert a.pattern == "(q: rank + v: rank) embed"
    assert b.pattern == "(q: heads (turn: two half + still: rest) + v: kv head) rank"
    assert {name for name, _ in b.hf_tensors.values()} == {
        f"base_model.model.l.{{layer}}.attn.{word}_proj.lora_B.weight" for word in "qv"
    }
    assert str(b.hf_tensors["q.turn"][1]) == "(heads (turn: half two + still: rest)) rank"


def test_norms_of_heads_have_no_adapters() -> None:
    norm = Param("layers.{layer}.q_norm.weight", "heads head", vector=True)
    assert not list(linears(Schema((norm,), SIZES)))


def test_attention_is_that_of_layers_with_windows_too() -> None:
    """Wherever their heads have other sizes; they can be chosen alone."""
    schema = configure({"preset": "mimo_v2_flash-tiny"}).schema
    found = {pattern: {each.name for each in targets(schema, [pattern])} for pattern in ("attn", "local_attn", "qkv")}
    both = {f"{name}.{linear}" for name in ("attn", "local_attn") for linear in ("qkv.q", "qkv.k", "qkv.v", "out")}
    assert found == {"attn": both, "local_attn": {name for name in both if "local" in name}, "qkv": set()}
    layers = {name for name, names in tensors(schema) if matches("attn.out", names)}
    assert len(layers) == schema.sizes["layer"]
