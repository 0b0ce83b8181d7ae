"""Moving weights: against chunk-and-concat written by hand, and there and back over random meshes."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from families import drawn, rotated
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import SPLITS, meshes, params, region, sizes_for, splits, strided

from megacore.models.registry import configure
from megacore.models.stages import default_layers
from megacore.parallel.weights.layout import Layout, MeshShape, balanced_layers
from megacore.parallel.weights.schema import EXPERT_TENSOR_PARALLEL, SPLIT, Param, Schema, Split
from megacore.parallel.weights.transfer import Stored, TransferError, execute, hugging_face, native, plan

Arrays = dict[tuple[Any, str], np.ndarray]
"""{(rank or "hf", tensor name): array}."""

SIZES = {"layer": 2, "vocab": 11, "embed": 6, "heads": 4, "kv": 2, "head": 3, "mlp": 8, "experts": 4, "expert_mlp": 8}
QKV = "(q: heads head + k: kv head + v: kv head)"
MHA = "(q: heads head + k: heads head + v: heads head)"


def numbered(stored: Iterable[Stored], seed: int = 0) -> Arrays:
    """A different number for every element."""
    rng, made, tensors = np.random.default_rng(seed), Arrays(), list(stored)
    numbers = rng.permutation(sum(int(np.prod(s.shape)) for s in tensors)) + 1
    for s in tensors:
        made[s.where, s.name], numbers = np.split(numbers, [int(np.prod(s.shape))])
        made[s.where, s.name] = made[s.where, s.name].reshape(s.shape)
    return made


def transfer(schema: Schema, arrays: Arrays, sources: Iterable[Stored], targets: Iterable[Stored]) -> Arrays:
    made = Arrays()
    for target, copies in plan(schema, sources, targets):
        made[target.where, target.name] = np.zeros(target.shape, int)
        for copy in copies:
            execute(copy, arrays[copy.source.where, copy.source.name], made[target.where, target.name])
    return made


def layout(schema: Schema, mesh: MeshShape, split: Split = SPLIT) -> Layout:
    return Layout(schema, mesh, balanced_layers(schema.sizes["layer"], mesh.pp), split)


def ranks(one: Layout) -> Iterable[Stored]:
    return native(one, range(one.mesh.world))


def load(param: Param, mesh: MeshShape, split: Split = SPLIT) -> tuple[Mapping[str, np.ndarray], Arrays]:
    """(Hugging Face's tensors, what the ranks hold) of a model of one parameter."""
    schema = Schema((param,), SIZES)
    hf = numbered(hugging_face(schema))
    held = transfer(schema, hf, hugging_face(schema), ranks(layout(schema, mesh, split)))
    return {name: array for (_, name), array in hf.items()}, held


# -- by hand


@pytest.mark.quick
def test_fused_qkv_is_chunks_of_q_k_and_v() -> None:
    hf, held = load(Param("l.{layer}.qkv", f"{QKV} embed", "h.{layer}.{q,k,v}_proj"), MeshShape(tp=2, pp=2))
    assert set(held) == {(rank, f"l.{rank // 2}.qkv") for rank in range(4)}
    for (rank, name), array in held.items():
        layer, tp = name.split(".")[1], rank % 2
        parts = [np.split(hf[f"h.{layer}.{x}_proj"], 2)[tp] for x in "qkv"]
        assert np.array_equal(array, np.concatenate(parts))


def test_fused_qkv_where_ranks_share_kv_heads() -> None:
    hf, held = load(Param("l.{layer}.qkv", f"{QKV} embed", "h.{layer}.{q,k,v}_proj"), MeshShape(tp=4))
    for (rank, name), array in held.items():
        q, k, v = (hf[f"h.{name.split('.')[1]}.{x}_proj"] for x in "qkv")
        kv = slice(rank // 2 * 3, (rank // 2 + 1) * 3)
        assert np.array_equal(array, np.concatenate([q[3 * rank : 3 * rank + 3], k[kv], v[kv]]))


def test_gate_and_up() -> None:
    hf, held = load(Param("up", "(gate: mlp + up: mlp) embed", "mlp.{gate,up}_proj"), MeshShape(tp=4))
    for (rank, _), array in held.items():
        halves = [np.split(hf[f"mlp.{x}_proj"], 4)[rank] for x in ("gate", "up")]
        assert np.array_equal(array, np.concatenate(halves))


def test_row_parallel_weight_is_cut_in_its_second_dimension() -> None:
    hf, held = load(Param("out", "embed (heads head)", "o_proj"), MeshShape(tp=4))
    for (rank, _), array in held.items():
        assert np.array_equal(array, np.split(hf["o_proj"], 4, axis=1)[rank])


def test_gpt2_stores_its_matrices_transposed() -> None:
    hf, held = load(Param("qkv", f"{MHA} embed", "c_attn", f"embed {MHA}"), MeshShape(tp=2))
    for (rank, _), array in held.items():
        q, k, v = np.split(hf["c_attn"].T, 3)
        assert np.array_equal(array, np.concatenate([np.split(x, 2)[rank] for x in (q, k, v)]))


def test_neox_interleaves_q_k_and_v_head_by_head() -> None:
    param = Param("qkv", f"{MHA} embed", "query_key_value", "(heads (q: + k: + v:) head) embed")
    hf, held = load(param, MeshShape(tp=2))
    per_head = hf["query_key_value"].reshape(4, 3, 3, 6)
    for (rank, _), array in held.items():
        mine = per_head[2 * rank : 2 * rank + 2]
        assert np.array_equal(array, np.concatenate([mine[:, i].reshape(6, 6) for i in range(3)]))


def test_rope_halves_and_pairs() -> None:
    sizes = SIZES | {"two": 2, "half": 3}
    schema = Schema((Param("q", "heads (two half) embed", "wq", "heads (half two) embed"),), sizes)
    hf = numbered(hugging_face(schema))
    held = transfer(schema, hf, hugging_face(schema), ranks(layout(schema, MeshShape(tp=2))))
    for (rank, _), array in held.items():
        mine = np.split(hf["hf", "wq"], 2)[rank]
        assert np.array_equal(array, np.concatenate([mine[:, 0::2], mine[:, 1::2]], 1))


GATED = "experts (gate: expert_mlp + up: expert_mlp) embed"
LISTED = Param("l.{layer}.up", GATED, "h.{layer}.experts.{experts}.{w1,w3}.weight")


@pytest.mark.parametrize(("split", "parts"), [(SPLIT, 1), (EXPERT_TENSOR_PARALLEL, 2)], ids=["folded", "etp"])
def test_experts_and_parts_of_them_from_listed_ones(split: Split, parts: int) -> None:
    hf, held = load(LISTED, MeshShape(ep=2, tp=2), split)
    assert len(hf) == 2 * 4 * 2
    for (rank, name), array in held.items():
        first, part = rank // parts * parts, rank % parts
        assert array.shape == (parts, 16 // parts, 6)
        for i, expert in enumerate(range(first, first + parts)):
            w1, w3 = (hf[f"h.{name.split('.')[1]}.experts.{expert}.{w}.weight"] for w in ("w1", "w3"))
            assert np.array_equal(array[i], np.concatenate([np.split(w, parts)[part] for w in (w1, w3)]))


@pytest.mark.parametrize("split", [SPLIT, EXPERT_TENSOR_PARALLEL], ids=["folded", "etp"])
def test_listed_experts_from_stacked_ones(split: Split) -> None:
    param = Param("expert.{experts}.up", "expert_mlp embed", "experts.up", "experts embed expert_mlp")
    hf, held = load(param, MeshShape(ep=2, tp=2), split)
    assert list(hf) == ["experts.up"]
    for (rank, name), array in held.items():
        expert = int(name.split(".")[1])
        whole = hf["experts.up"][expert].T
        if split is SPLIT:
            assert expert == rank and np.array_equal(array, whole)
        else:
            assert expert // 2 == rank // 2 and np.array_equal(array, np.split(whole, 2)[rank % 2])


def test_padding_has_no_source() -> None:
    schema = Schema((Param("embed", "vocab embed", "wte"),), SIZES)
    hf = numbered(hugging_face(schema))
    held = transfer(schema, hf, hugging_face(schema), ranks(layout(schema, MeshShape(tp=4))))
    assert [held[rank, "embed"].shape for rank in range(4)] == [(3, 6)] * 4
    whole = np.concatenate([held[rank, "embed"] for rank in range(4)])
    assert np.array_equal(whole[:11], hf["hf", "wte"])
    assert not whole[11:].any()
    # It does not travel on either: what lies in padded rows here is nobody's source.
    held[3, "embed"][2:] = -1
    again = transfer(schema, held, ranks(layout(schema, MeshShape(tp=4))), ranks(layout(schema, MeshShape(tp=2))))
    whole = np.concatenate([again[rank, "embed"] for rank in range(2)])
    assert np.array_equal(whole[:11], hf["hf", "wte"])
    assert not whole[11:].any()


def test_tied_table_goes_to_both_ends() -> None:
    schema = Schema((Param("embed", "vocab embed", "wte", at="first last"),), SIZES)
    hf = numbered(hugging_face(schema))
    held = transfer(schema, hf, hugging_face(schema), ranks(layout(schema, MeshShape(pp=2))))
    assert set(held) == {(0, "embed"), (1, "embed")}
    assert all(np.array_equal(array, hf["hf", "wte"]) for array in held.values())


def test_pieces_that_are_cut_differently_do_not_hinder_each_other() -> None:
    """A copy of one piece looks at its own axes only: what box of ``experts`` its source has does not matter to mlp."""
    schema = Schema((Param("ab", "(a: mlp embed + b: experts head)", "{a,b}"),), SIZES)
    one, two, four = (
        layout(schema, MeshShape(ep=ep, tp=tp), EXPERT_TENSOR_PARALLEL) for ep, tp in ((1, 1), (2, 1), (2, 2))
    )
    arrays = numbered(ranks(one))
    there = transfer(schema, arrays, ranks(one), ranks(two))
    there = transfer(schema, there, ranks(two), ranks(four))
    a, b = np.split(arrays[0, "ab"], [48])
    for (rank, _), array in there.items():
        assert np.array_equal(array, np.concatenate([np.split(a, 2)[rank % 2], np.split(b, 2)[rank // 2]]))


# -- errors


@pytest.mark.quick
def test_missing_source_is_an_error_that_names_the_tensor() -> None:
    schema = Schema((Param("l.{layer}.up", "(gate: mlp + up: mlp) embed", "h.{layer}.{gate,up}"),), SIZES)
    some = [s for s in hugging_face(schema, "model.safetensors") if s.name != "h.1.up"]
    with pytest.raises(TransferError, match=r"l\.1\.up: 48 of 96 elements have a source \(.* held by model.safetens"):
        list(plan(schema, some, ranks(layout(schema, MeshShape()))))
    with pytest.raises(TransferError, match=r"l\.0\.up: 0 of 96 elements have a source \(.* held by nobody\)"):
        list(plan(schema, [], ranks(layout(schema, MeshShape()))))


def test_a_missing_rank_is_an_error() -> None:
    schema = Schema((Param("embed", "vocab embed", "wte"),), SIZES)
    two = layout(schema, MeshShape(tp=2))
    with pytest.raises(TransferError, match="wte: 36 of 66 elements have a source"):
        list(plan(schema, native(two, [0]), hugging_face(schema)))


# -- there and back


@pytest.mark.in_turn(2)
@settings(max_examples=12)
@given(st.data())
@pytest.mark.parametrize(("family", "tied"), rotated([True, False], few=12))
def test_hugging_face_over_a_chain_of_meshes_and_back_is_bitwise(family: str, tied: bool, data: st.DataObject) -> None:
    config = configure(drawn(family, data.draw(st.integers(0, 99)), tie_word_embeddings=tied))
    schema = config.schema
    size, few = st.sampled_from([1, 2, 4]), st.integers(1, 2)
    shapes = data.draw(st.lists(st.builds(MeshShape, pp=few, dp=few, ep=few, tp=size), min_size=1, max_size=3))
    original = numbered(hugging_face(schema))
    stored, arrays = list(hugging_face(schema)), original
    for mesh in shapes:
        layers = data.draw(st.one_of(splits(5, mesh), st.just(default_layers(config, mesh.pp))))
        there = list(ranks(Layout(schema, mesh, layers)))
        arrays = transfer(schema, arrays, stored, there)
        stored = there
    back = transfer(schema, arrays, stored, hugging_face(schema))
    assert back.keys() == original.keys()
    assert all(np.array_equal(back[name], original[name]) for name in original)


@pytest.mark.in_turn(2, 0)
@settings(max_examples=30)
@given(st.data())
def test_random_tables_move_between_random_meshes(data: st.DataObject) -> None:
    """What a rank holds is the slice of what one process holds, and one process gets it back."""
    shapes = [data.draw(meshes(12)) for _ in range(2)]
    sizes = data.draw(sizes_for(shapes))
    schema = Schema(data.draw(params(sizes["layer"])), sizes)
    alone = Layout(schema, MeshShape(), (sizes["layer"],))
    # Whole experts come to a mesh that splits each of them, and the other way round.
    first, second = (
        Layout(schema, mesh, data.draw(splits(sizes["layer"], mesh)), data.draw(st.sampled_from(SPLITS)))
        for mesh in shapes
    )
    whole = numbered(ranks(alone))
    logical = {
        (shard.name, piece.label): strided(whole[0, shard.name], piece)
        for shard in alone.shards(alone.mesh.place(0))
        for piece in shard.pieces
    }
    one = transfer(schema, whole, ranks(alone), ranks(first))
    two = transfer(schema, one, ranks(first), ranks(second))
    for rank in range(second.mesh.world):
        for shard in second.shards(second.mesh.place(rank)):
            for piece in shard.pieces:
                got, want = strided(two[rank, shard.name], piece), logical[shard.name, piece.label]
                want = want[region(shard, piece)]
                real = tuple(slice(0, size) for size in want.shape)
                assert np.array_equal(got[real], want)
                assert np.count_nonzero(got) == want.size
    back = transfer(schema, two, ranks(second), ranks(alone))
    assert all(np.array_equal(back[name], whole[name]) for name in whole)


def test_the_dtype_is_converted() -> None:
    schema = Schema((Param("norm", "embed", "ln"),), SIZES)
    ((_, copies),) = plan(schema, hugging_face(schema), ranks(layout(schema, MeshShape())))
    target = np.zeros(6, np.float32)
    execute(copies[0], np.arange(6, dtype=np.float64) / 3, target)
    assert np.array_equal(target, (np.arange(6) / 3).astype(np.float32))
