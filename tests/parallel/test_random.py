"""Initial values: bitwise the same logical pieces on every mesh."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import meshes, params, region, sizes_for, splits

from megacore.parallel.random import initial_values, key
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param, Schema

SIZES = {"layer": 2, "vocab": 1001, "embed": 64, "heads": 8, "kv": 2, "head": 16, "mlp": 128, "experts": 4}
QKV = "(q: heads head + k: kv head + v: kv head) embed"


def single(schema: Schema) -> Layout:
    return Layout(schema, MeshShape(), (schema.sizes["layer"],))


def pieces(layout: Layout, rank: int, seed: int = 0) -> dict[tuple[str, str], np.ndarray]:
    return {
        (shard.name, label): initial_values(layout, shard, label, seed)
        for shard in layout.shards(layout.mesh.place(rank))
        for label in shard.param.sentence.labels
    }


@settings(max_examples=30)
@given(st.data())
def test_every_mesh_draws_the_same_logical_pieces(data: st.DataObject) -> None:
    mesh = data.draw(meshes(12))
    sizes = data.draw(sizes_for([mesh]))
    table = tuple(
        Param(p.name, p.pattern, at=p.at, layers=p.layers, mean=data.draw(st.sampled_from([0.0, 1.0])), std=std)
        for p in data.draw(params(sizes["layer"]))
        for std in [data.draw(st.sampled_from([0.0, 0.02]))]
    )
    layout = Layout(Schema(table, sizes), mesh, data.draw(splits(sizes["layer"], mesh)))
    whole = pieces(single(layout.schema), 0)
    for rank in range(mesh.world):
        mine = pieces(layout, rank)
        for shard in layout.shards(mesh.place(rank)):
            for piece in shard.pieces:
                got = mine[shard.name, piece.label]
                want = whole[shard.name, piece.label][region(shard, piece)]
                assert got.dtype == np.float32 and got.shape == piece.shape
                assert np.array_equal(got[tuple(slice(0, n) for n in want.shape)], want)
                real = tuple(slice(0, n) for n in want.shape)
                padding = got.copy()
                padding[real] = 0
                assert not padding.any()


@pytest.mark.quick
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_tables_of_many_blocks(tp: int) -> None:
    """A table that is drawn in several blocks, at boxes that do not begin at one."""
    sizes = SIZES | dict.fromkeys(("heads", "kv", "mlp", "experts"), 24)
    schema = Schema((Param("embed", "vocab embed", std=0.02, mean=1.0),), sizes)
    (whole,) = pieces(single(schema), 0).values()
    assert whole.shape == (1001, 64) and whole.size < 1 << 16
    schema = Schema(schema.params, {**schema.sizes, "embed": 256})  # now 4 blocks
    (whole,) = pieces(single(schema), 0).values()
    layout = Layout(schema, MeshShape(tp=tp), (2,))
    drawn = np.concatenate([next(iter(pieces(layout, rank).values())) for rank in range(tp)])
    assert np.array_equal(drawn[:1001], whole)
    assert not drawn[1001:].any()


@pytest.mark.parametrize("std", [0.0, 0.5])
def test_a_rank_of_nothing_but_padding(std: float) -> None:
    schema = Schema((Param("embed", "vocab embed", std=std, mean=1.0),), SIZES | {"vocab": 5})
    layout = Layout(schema, MeshShape(tp=4), (2,))
    (last,) = pieces(layout, 3).values()
    assert last.shape == (2, 64) and not last.any()
    (third,) = pieces(layout, 2).values()
    assert third[0].any() and not third[1].any()


@pytest.mark.quick
def test_mean_and_std() -> None:
    params = Param("w", "mlp vocab2", std=0.02, mean=0.3), Param("n", "embed", mean=1)
    schema = Schema(params, SIZES | {"vocab2": 4000})
    values = pieces(single(schema), 0)
    w = values["w", ""]
    # Half a million normal numbers: five standard errors.
    assert abs(w.mean() - 0.3) < 5 * 0.02 / np.sqrt(w.size)
    assert abs(w.std() / 0.02 - 1) < 5 / np.sqrt(2 * w.size)
    normal = (w - 0.3) / 0.02
    assert abs((normal**4).mean() - 3) < 5 * np.sqrt(96 / w.size)
    assert (values["n", ""] == 1).all()


def test_layers_labels_names_and_seeds_differ() -> None:
    square = {"heads": 2, "kv": 2}
    schema = Schema((Param("l.{layer}.a", QKV, std=1.0), Param("l.{layer}.b", QKV, std=1.0)), SIZES | square)
    drawn = [*pieces(single(schema), 0).values(), *pieces(single(schema), 0, seed=1).values()]
    assert len(drawn) == 2 * 2 * 2 * 3
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            # Independent: 2048 products of unit normals.
            assert abs((one * other).mean()) < 5 / np.sqrt(one.size)


def test_blocks_of_a_piece_differ() -> None:
    schema = Schema((Param("embed", "vocab embed", std=1.0),), SIZES | {"embed": 1024})
    (whole,) = pieces(single(schema), 0).values()
    assert len(np.unique(whole[:, 0])) == 1001


def test_keys_are_the_same_in_every_release() -> None:
    assert key(0, "layers.0.attn.qkv.weight", "q", (0,)) == 3195830203804246405
    assert key(1, "a") != key("1", "a")
    assert 0 <= key("x") < 1 << 64


def test_experts_are_drawn_in_blocks_of_many_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has one expert and as many features as fit, not one feature: a generator costs as much as thousands."""
    drawn: list[tuple[object, ...]] = []

    def counted(*words: object) -> int:
        drawn.append(words)
        return key(*words)

    monkeypatch.setattr("megacore.parallel.random.key", counted)
    param = Param("up", "experts (gate: expert_mlp + up: expert_mlp) embed", std=1.0)
    schema = Schema((param,), {"layer": 1, "experts": 8, "expert_mlp": 2048, "embed": 64})
    assert len(pieces(single(schema), 0)) == 2
    assert len(drawn) == 2 * 8 * 2048 * 64 // (1 << 16)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_table_lists_different_numbers_on_every_mesh(tp: int) -> None:
    table = Param("table", "words choices", buffer=True, below=10)
    layout = Layout(Schema((table,), {"layer": 2, "words": 400, "choices": 3}), MeshShape(tp=tp), (2,))
    (drawn,) = pieces(layout, tp - 1).values()
    assert {len({*row}) for row in drawn.tolist()} == {3}
    counts = np.bincount(drawn.astype(int).ravel(), minlength=11)
    assert np.array_equal(drawn, drawn.astype(int)) and counts[:10].min() > 90 and counts[10] == 0
    assert np.array_equal(drawn, next(iter(pieces(single(layout.schema), 0).values())))
