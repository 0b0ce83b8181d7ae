"""Declarations of parameters and of whole models."""

import re
from typing import Any

import pytest

from megacore.parallel.weights.schema import SPLIT, Param, Schema

SIZES = {
    "layer": 3,
    "vocab": 101,
    "embed": 8,
    "heads": 4,
    "kv": 2,
    "head": 2,
    "mlp": 12,
    "experts": 5,
    "expert_mlp": 12,
}
PAIRS = ("two half", "half two")
QKV = "(q: heads head + k: kv head + v: kv head)"


def test_hugging_face_names_one_tensor_for_each_piece() -> None:
    param = Param("layers.{layer}.qkv.weight", f"{QKV} embed", "model.layers.{layer}.attn.{q,k,v}_proj.weight")
    tensors = param.hf_tensors
    assert list(tensors) == ["q", "k", "v"]
    assert tensors["k"][0] == "model.layers.{layer}.attn.k_proj.weight"
    assert str(tensors["k"][1]) == "(kv head) embed"
    assert param.named_axes == ("layer",)


def test_what_is_fused_within_a_piece_stays_in_its_tensor() -> None:
    head = "(turn: {} + still: rest)"
    ours, theirs = (f"(q: heads {head} + k: kv {head} + v: kv head)".format(pair, pair) for pair in PAIRS)
    param = Param("qkv.weight", f"{ours} embed", "attn.{q,k,v}_proj.weight", f"{theirs} embed")
    assert list(param.hf_tensors) == ["q.turn", "q.still", "k.turn", "k.still", "v"]
    assert param.hf_tensors["q.turn"] == param.hf_tensors["q.still"]
    name, stored = param.hf_tensors["k.turn"]
    assert (name, str(stored)) == ("attn.k_proj.weight", "(kv (turn: half two + still: rest)) embed")


def test_pieces_that_stay_fused_share_name_and_sentence() -> None:
    param = Param("layers.{layer}.qkv.weight", f"{QKV} embed", "h.{layer}.c_attn.weight", f"embed {QKV}")
    assert set(param.hf_tensors) == {"q", "k", "v"}
    assert len(set(param.hf_tensors.values())) == 1
    assert str(param.hf_tensors["q"][1]) == f"embed {QKV}"


def test_an_axis_in_the_name_leaves_the_tensor() -> None:
    param = Param("up", "experts (gate: expert_mlp + up: expert_mlp) embed", "experts.{experts}.{w1,w3}.weight")
    assert {name: str(pattern) for name, pattern in param.hf_tensors.values()} == {
        "experts.{experts}.w1.weight": "(expert_mlp) embed",
        "experts.{experts}.w3.weight": "(expert_mlp) embed",
    }


def test_words_must_name_every_piece() -> None:
    param = Param("qkv", f"{QKV} embed", "attn.{q,k}_proj.weight")
    with pytest.raises(ValueError, match="names 2 tensors for 3 pieces"):
        _ = param.hf_tensors


def test_matrices_decay_and_vectors_do_not() -> None:
    assert Param("a", "embed (heads head)").decays
    assert not Param("a", QKV).decays
    assert not Param("a", "embed").decays


@pytest.mark.quick
def test_parameters_are_counted() -> None:
    schema = Schema(
        (
            Param("embed.weight", "vocab embed", at="first last"),
            Param("layers.{layer}.qkv.weight", f"{QKV} embed"),
            Param("layers.{layer}.expert.{experts}.up", "expert_mlp embed"),
        ),
        SIZES,
    )
    assert [schema.numel(param) for param in schema.params] == [101 * 8, 3 * (8 + 4 + 4) * 8, 3 * 5 * 12 * 8]
    assert schema.parameters == 101 * 8 + 3 * 16 * 8 + 3 * 5 * 12 * 8
    assert schema["embed.weight"] is schema.params[0]


TWO = "(q: embed + k: embed) vocab"
REFUSED: list[tuple[list[tuple[Any, ...]], str]] = [
    ([("a", "embed"), ("a", "vocab")], "a is declared twice"),
    # Else both are read from one Hugging Face's tensor, and one of them is lost on the way back.
    ([("a", TWO, "wte"), ("b", "embed", "wte")], "a and b have one Hugging Face name, wte: rename one"),
    (
        [("a", TWO, "h.{layer}.w"), ("b", "embed", "h.{layer}.w")],
        "a and b have one Hugging Face name, h.0.w: rename one",
    ),
    ([("a", TWO, "h.{layer}.w"), ("b", "embed", "h.{experts}.w")], "one Hugging Face name, h.0.w: rename one"),
    ([("a", TWO, "h.{layer}.w"), ("b", "embed", "h.2.w")], "one Hugging Face name, h.2.w: rename one"),
    ([("a", TWO, "h.{layer}.{q,k}.w"), ("b", "embed", "h.{layer}.k.w")], "one Hugging Face name, h.0.k.w: rename one"),
    ([("a", TWO, "{k,k}")], "a and a have one Hugging Face name, k: rename one"),
    ([("a", "none embed")], "axis 'none' has size 0: it must be at least 1"),
    ([("a", "below embed")], "axis 'below' has size -1: it must be at least 1"),
    ([("a", "position embed")], "a: axis 'position' has no size"),
    ([("a.{block}", "embed")], "a.{block}: axis 'block' has no size"),
    # Else each rank would hold a block of the diagonal, and nobody the rest.
    ([("a", "vocab (heads head)")], "a: tp would split both 'vocab' and 'heads' of one piece"),
    ([("a", "(q: embed + k: heads) mlp")], "tp would split both 'heads' and 'mlp' of piece 'k'"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("params", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_no_schema_is_refused(params: list[tuple[Any, ...]], message: str) -> None:
    wrong = {axis: size for axis, size in (("none", 0), ("below", -1)) if axis in message}
    with pytest.raises(ValueError, match=re.escape(message)):
        Schema(tuple(Param(*each) for each in params), SIZES | wrong)


def test_pieces_are_split_each_by_itself() -> None:
    Schema((Param("a", "(q: heads + k: kv) embed"), Param("b", "experts expert_mlp embed")), SIZES)


def test_some_layers_have_a_parameter() -> None:
    some, rest = (Param(f"layers.{{layer}}.{name}", "embed", "h.{layer}.w", layers=n) for name, n in
                  (("a", (0, 2)), ("b", (1,))))  # fmt: skip
    schema = Schema((some, rest), SIZES)  # they share a name, and no layer
    assert [schema.numel(param) for param in (some, rest)] == [16, 8]
    assert [index["layer"] for index in schema.indices(some, some.name)] == [0, 2]
    with pytest.raises(ValueError, match=r"have one Hugging Face name, h\.1\.w: rename one"):
        Schema((rest, Param("layers.{layer}.c", "embed", "h.{layer}.w", layers=(1, 2))), SIZES)
    with pytest.raises(ValueError, match=r"have one Hugging Face name, h\.2\.w: rename one"):
        Schema((some, Param("c", "embed", "h.2.w")), SIZES)
    with pytest.raises(ValueError, match=r"it belongs to some layers, and has no \{layer\} in its name"):
        Param("embed.weight", "vocab embed", layers=(0,))
    for layers in ((), (3,), (-1, 0), (1, 0), (1, 1)):
        with pytest.raises(ValueError, match="are not some of the 3 layers, ascending, each once"):
            Schema((Param("layers.{layer}.a", "embed", layers=layers),), SIZES)


def test_later_layers_share_a_parameter() -> None:
    shared = Param("layers.{layer}.a", "embed", "h.{layer}.w", layers=(0, 1), also=((2,), ()))
    assert Schema((shared,), SIZES).numel(shared) == 16
    assert shared.owners == {0: 0, 1: 1, 2: 0} and shared.held_in([1, 2]) == [1, 0] and shared.users(0) == (0, 2)
    for also in (((2,),), ((2,), (2,)), ((3,), ()), ((1,), ()), ((), (0,))):
        with pytest.raises(ValueError, match="are not later ones of the 3 layers, ascending and each once"):
            Schema((Param("layers.{layer}.a", "embed", layers=(0, 1), also=also),), SIZES)
    with pytest.raises(ValueError, match="layers=None are not some of the 3 layers"):
        Schema((Param("layers.{layer}.a", "embed", also=((2,),)),), SIZES)


def test_names_that_only_look_alike_are_taken() -> None:
    names = ("h.{layer}.w", "h.3.w", "h.4.w", "h.{layer}.{q,k}.w", "h{layer}.w", "", "")
    Schema(tuple(Param(str(i), "(q: embed + k: embed)", hf) for i, hf in enumerate(names)), SIZES)


def test_the_only_table_of_splits() -> None:
    assert {dim for dims in SPLIT.values() for dim in dims} == {"pp", "ep", "tp"}
