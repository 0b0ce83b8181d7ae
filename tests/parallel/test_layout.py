"""Who holds what: boxes, replicas, stages, balanced splits; against brute force over all ranks."""

import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import coverage, layouts, meshes, owners, region

from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.weights.layout import (
    Coordinates,
    Layout,
    MeshShape,
    balanced_layers,
    heads_problem,
    layers_problems,
    mesh_problems,
    read_layers,
    spelled_layers,
    split_axis,
    split_problems,
)
from megacore.parallel.weights.schema import EXPERT_TENSOR_PARALLEL, PADDED, SPLIT, Param, Schema, Split
from megacore.parallel.weights.transfer import Copy, hugging_face, native, plan

QKV = Param("layers.{layer}.qkv", "(q: heads head + k: kv head + v: kv head) embed")
SIZES = {"layer": 4, "vocab": 101, "embed": 8, "heads": 8, "kv": 2, "head": 2, "mlp": 12}
SIZES |= {"experts": 4, "expert_mlp": 12}


def layout(*params: Param, mesh: MeshShape, layers: tuple[int, ...] | None = None, **sizes: int) -> Layout:
    sizes = SIZES | sizes
    return Layout(Schema(params, sizes), mesh, layers or balanced_layers(sizes["layer"], mesh.pp))


# -- the mesh


@pytest.mark.quick
def test_tp_is_innermost_then_cp_ep_dp_and_pp_outermost() -> None:
    mesh = MeshShape(pp=2, dp=3, ep=2, cp=2, tp=4)
    assert mesh.world == 96 and mesh.data == 6
    assert mesh.along(0, "tp") == (0, 1, 2, 3)
    assert mesh.along(0, "cp") == (0, 4)
    assert mesh.along(0, "ep") == (0, 8)
    assert mesh.along(0, "dp") == (0, 16, 32)
    assert mesh.along(0, "pp") == (0, 48)
    assert mesh.along(95, "pp") == (47, 95)
    assert mesh.place(48 + 32 + 8 + 4 + 3) == Coordinates(pp=1, dp=2, ep=1, cp=1, tp=3)


@given(meshes(48))
def test_ranks_and_places_are_one_to_one(mesh: MeshShape) -> None:
    places = [mesh.place(rank) for rank in range(mesh.world)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.world))
    assert places == [Coordinates(*c) for c in itertools.product(*(range(mesh[dim]) for dim in mesh.DIMS))]


@given(meshes(48), st.sets(st.sampled_from(MeshShape.DIMS)))
def test_groups_along_dimensions_partition_the_world(mesh: MeshShape, dims: set[str]) -> None:
    groups = {mesh.along(rank, *dims) for rank in range(mesh.world)}
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world))
    assert all(rank in mesh.along(rank, *dims) for rank in range(mesh.world))
    for group in groups:
        assert list(group) == sorted(group)
        places = [mesh.place(rank) for rank in group]
        assert all(len({getattr(p, dim) for p in places}) == (mesh[dim] if dim in dims else 1) for dim in mesh.DIMS)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="tp=0 must be at least 1"):
        MeshShape(tp=0)


# -- splits


def test_splits_are_even_or_padded_and_kv_is_shared() -> None:
    assert [split_axis("heads", 8, 4, part) for part in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [split_axis("vocab", 101, 4, part) for part in range(4)] == [(0, 26), (26, 52), (52, 78), (78, 104)]
    assert [split_axis("vocab", 5, 4, part) for part in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [split_axis("mlp", 10, 4, part) for part in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert [split_axis("kv", 2, 4, part) for part in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [split_axis("kv", 1, 3, part) for part in range(3)] == [(0, 1)] * 3


PROBLEMS = [
    ("heads", 9, "tp", 2, "cannot split heads (9) over tp=2: choose tp from 1, 3, 9"),
    ("kv", 6, "tp", 4, "cannot split kv (6) over tp=4: choose tp from 1, 2, 3, 6 or a multiple of 6"),
    ("kv", 2, "tp", 3, "cannot split kv (2) over tp=3: choose tp from 1, 2 or a multiple of 2"),
    ("heads", 10, "tp", 4, "cannot split heads (10) over tp=4: choose tp from 1, 2, 5, 10"),
    ("experts", 8, "ep", 3, "cannot split experts (8) over ep x tp=3: choose ep x tp from 1, 2, 4, 8"),
    ("heads", 5040, "tp", 11, "cannot split heads (5040) over tp=11: choose tp from 1, 2, 3, 4, 5, 6, 7, 8, ..., 5040"),
]


@pytest.mark.parametrize(("axis", "size", "dim", "parts", "message"), PROBLEMS)
def test_split_problems_name_the_way_out(axis: str, size: int, dim: str, parts: int, message: str) -> None:
    assert split_problems({"embed": 7, "vocab": 13, "layer": 5, axis: size}, MeshShape(**{dim: parts})) == [message]


DENSE = {"heads": 8, "kv": 8, "mlp": 12}
SPARSE = DENSE | {"experts": 8, "routes": 8, "expert_mlp": 7}
OVER_TP = ", or etp={}, which splits each of them over tp"
EIGHT = "cannot split experts (8) over {0}={1}: choose {0} from 1, 2, 4, 8"
NEITHER = "etp={} is neither 1 (experts are whole, over ep x tp) nor tp={} (each is split over tp)"
NONE = "{0}={1}: the model has no experts to split, set {0}=1"
MESH_PROBLEMS = [
    (SPARSE, {"ep": 2, "tp": 4}, 1, []),
    (SPARSE, {"ep": 8, "tp": 8}, 8, []),  # features of an expert are padded
    (SPARSE, {"tp": 8}, 1, []),  # without ep, whole experts lie on tp
    (SPARSE, {"ep": 3}, 1, [EIGHT.format("ep x tp", 3)]),
    (SPARSE, {"ep": 16}, 1, [EIGHT.format("ep x tp", 16)]),
    (SPARSE, {"ep": 4, "tp": 4}, 1, [EIGHT.format("ep x tp", 16) + OVER_TP.format(4)]),
    (
        SPARSE | {"experts": 6},
        {"ep": 3, "tp": 4},
        1,
        ["cannot split experts (6) over ep x tp=12: choose ep x tp from 1, 2, 3, 6" + OVER_TP.format(4)],
    ),
    # where ep alone cannot split them, that is no way out
    (SPARSE, {"ep": 3, "tp": 4}, 1, [EIGHT.format("ep x tp", 12)]),
    (SPARSE, {"ep": 3, "tp": 4}, 4, [EIGHT.format("ep", 3)]),
    (SPARSE, {"ep": 2, "tp": 4}, 2, [NEITHER.format(2, 4)]),
    (SPARSE, {"ep": 2}, 2, [NEITHER.format(2, 1)]),
    (SPARSE, {"ep": 16, "tp": 2}, 3, [EIGHT.format("ep", 16), NEITHER.format(3, 2)]),
    (DENSE, {"ep": 2}, 1, [NONE.format("ep", 2)]),
    (DENSE, {"tp": 2}, 2, [NONE.format("etp", 2)]),
    (
        DENSE,
        {"ep": 2, "tp": 3},
        3,
        [
            "cannot split heads (8) over tp=3: choose tp from 1, 2, 4, 8",
            "cannot split kv (8) over tp=3: choose tp from 1, 2, 4, 8 or a multiple of 8",
            NONE.format("ep", 2),
            NONE.format("etp", 3),
        ],
    ),
    (
        SPARSE | {"heads": 9, "kv": 3},
        {"ep": 4, "tp": 4},
        1,
        [
            EIGHT.format("ep x tp", 16) + OVER_TP.format(4),
            "cannot split heads (9) over tp=4: choose tp from 1, 3, 9",
            "cannot split kv (3) over tp=4: choose tp from 1, 3 or a multiple of 3",
        ],
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize(("sizes", "mesh", "etp", "problems"), MESH_PROBLEMS)
def test_meshes_of_experts(sizes: dict[str, int], mesh: dict[str, int], etp: int, problems: list[str]) -> None:
    assert mesh_problems({"layer": 5, **sizes}, MeshShape(**mesh), etp) == problems


def test_all_problems_at_once() -> None:
    mesh = MeshShape(tp=3, ep=3, pp=2)
    with pytest.raises(ValueError) as caught:
        layout(QKV, mesh=mesh, layers=(1, 1, 1))
    for part in ("heads (8)", "kv (2)", "experts (4)", "sum to 3, but the model has 4", "do not divide over pp=2"):
        assert part in str(caught.value)


@given(st.sampled_from(sorted(set(SPLIT) - {"layer"})), st.integers(1, 30), st.integers(1, 12))
def test_choices_are_choices(axis: str, size: int, parts: int) -> None:
    """Whatever can be split covers the axis; whatever cannot, can with what the message proposes."""
    try:
        boxes = [split_axis(axis, size, parts, part) for part in range(parts)]
    except ValueError as error:
        proposed = str(error).rpartition("choose ")[2].partition("from ")[2].partition(" or ")[0]
        for choice in (int(word) for word in proposed.split(", ") if word != "..."):
            assert split_axis(axis, size, choice, 0)[0] == 0
        return
    assert len({stop - start for start, stop in boxes}) == 1
    assert {i for start, stop in boxes for i in range(start, stop)} >= set(range(size))
    assert boxes == sorted(boxes)
    if axis not in PADDED:
        assert boxes[-1][1] == size


# -- shards


def test_local_shapes() -> None:
    one = layout(QKV, Param("embed", "vocab embed"), mesh=MeshShape(tp=4, pp=2))
    shards = {shard.name: shard for shard in one.shards(Coordinates(pp=0, tp=1))}
    assert list(shards) == ["layers.0.qkv", "layers.1.qkv", "embed"]
    assert shards["layers.0.qkv"].shape == ((2 + 1 + 1) * 2, 8)
    box = {"layer": (1, 2), "heads": (2, 4), "kv": (0, 1), "head": (0, 2), "embed": (0, 8)}
    assert shards["layers.1.qkv"].box == box
    assert shards["embed"].shape == (26, 8)
    assert shards["embed"].numel == 26 * 8
    assert [shard.name for shard in one.shards(Coordinates(pp=1))] == ["layers.2.qkv", "layers.3.qkv"]


@pytest.mark.quick
def test_shared_kv_heads_are_replicas_and_query_heads_are_not() -> None:
    one = layout(QKV, mesh=MeshShape(tp=4, dp=2))
    shard = next(one.shards(Coordinates(tp=1)))
    assert one.replicas(shard, "q") == (1, 5)
    assert one.replicas(shard, "k") == one.replicas(shard, "v") == (0, 1, 4, 5)


def test_tied_parameters_live_at_both_ends() -> None:
    table = Param("embed", "vocab embed", at="first last")
    one = layout(table, Param("norm", "embed", at="last"), mesh=MeshShape(pp=3, tp=2, dp=2))
    held = [{shard.name for shard in one.shards(Coordinates(pp=stage))} for stage in range(3)]
    assert held == [{"embed"}, set(), {"embed", "norm"}]
    (shard,) = one.shards(Coordinates(pp=0, tp=1))
    assert one.replicas(shard, "") == (1, 3, 9, 11)
    # On one stage both ends are the same place, and the parameter is there once.
    alone = layout(table, mesh=MeshShape(tp=2))
    (shard,) = alone.shards(Coordinates(tp=1))
    assert alone.replicas(shard, "") == (1,)


def test_experts_are_replicated_over_dp_only_and_dense_weights_over_ep_too() -> None:
    stacked = Param("layers.{layer}.up", "experts expert_mlp embed")
    listed = Param("layers.{layer}.expert.{experts}.up", "expert_mlp embed")
    dense = Param("layers.{layer}.down", "embed mlp")
    schema = Schema((stacked, listed, dense), SIZES | {"layer": 1})
    for split, mine in ((SPLIT, (3, 4)), (EXPERT_TENSOR_PARALLEL, (2, 4))):
        one = Layout(schema, MeshShape(dp=2, ep=2, tp=2), (1,), split)
        shards = {shard.name: shard for shard in one.shards(Coordinates(ep=1, tp=1))}
        assert list(shards) == ["layers.0.up", *(f"layers.0.expert.{i}.up" for i in range(*mine)), "layers.0.down"]
        assert shards["layers.0.up"].box["experts"] == mine
        assert one.replicas(shards["layers.0.up"], "") == (3, 7)
        assert one.replicas(shards["layers.0.expert.3.up"], "") == (3, 7)
        assert one.replicas(shards["layers.0.down"], "") == (1, 3, 5, 7)


def test_uneven_and_interleaved_stages() -> None:
    one = layout(Param("layers.{layer}.norm", "embed"), mesh=MeshShape(pp=2), layers=(1, 3, 2, 1), layer=7)
    assert one.chunks == 2
    assert one.stage_of_layer == (0, 1, 1, 1, 0, 0, 1)
    held = [list(one.chunk_layers(stage, chunk)) for chunk in range(2) for stage in range(2)]
    assert held == [[0], [1, 2, 3], [4, 5], [6]]
    assert [shard.name for shard in one.shards(Coordinates(pp=0))] == [f"layers.{i}.norm" for i in (0, 4, 5)]


@pytest.mark.in_turn(2, 0)
@settings(max_examples=40)
@given(layouts())
def test_every_element_is_owned_by_exactly_its_replicas(one: Layout) -> None:
    """Brute force: ask all ranks what they hold, element by element. Replicas counted once make the model."""
    held, total = owners(one), 0.0
    sets = set()
    for rank in range(one.mesh.world):
        for shard in one.shards(one.mesh.place(rank)):
            for piece in shard.pieces:
                mine = held[shard.name, piece.label][(slice(None), *region(shard, piece))].reshape(one.mesh.world, -1)
                replicas = one.replicas(shard, piece.label)
                sets.add(replicas)
                assert np.array_equal(np.flatnonzero(mine[:, 0]), replicas)
                assert (mine == mine[:, :1]).all(), f"{shard.name} {piece.label}: boxes overlap in part"
                real = piece.numel
                for axis in {*PADDED} & {*piece.axes}:
                    start, stop = shard.box[axis]
                    real = real // (stop - start) * max(0, min(stop, one.schema.sizes[axis]) - start)
                total += real / len(replicas)
    assert one.replica_sets() == sets and total == pytest.approx(one.schema.parameters)
    for array in held.values():
        assert array.any(0).all(), "an element that nobody holds"
    names = {
        param.name.format(layer=layer, experts=expert)
        for param in one.schema.params
        for layer in (range(one.schema.sizes["layer"]) if param.layers is None else param.layers)
        for expert in range(one.schema.sizes["experts"])
    }
    assert {name for name, _ in held} == names


@pytest.mark.in_turn(2, 1)
@settings(max_examples=40)
@given(layouts(), st.data())
def test_pieces_of_a_shard_cover_what_is_stored_once(one: Layout, data: st.DataObject) -> None:
    place = one.mesh.place(data.draw(st.integers(0, one.mesh.world - 1)))
    for shard in one.shards(place):
        count = coverage(shard.param.sentence, dict(shard.sizes))
        assert count.size == shard.numel == sum(piece.numel for piece in shard.pieces)
        assert (count == 1).all()


EXPERTS = Param("layers.{layer}.moe", "experts expert_mlp embed")


def test_experts_over_a_product_of_dimensions() -> None:
    """Rank (ep, tp) holds the experts of part ep x TP + tp whole; who has the same are its data parallel peers."""
    mesh = MeshShape(dp=2, ep=2, tp=2)
    one = Layout(Schema((EXPERTS, Param("layers.{layer}.out", "embed (heads head)")), SIZES), mesh, (4,))
    for rank in range(8):
        experts, *_, out = one.shards(mesh.place(rank))
        assert experts.box["experts"] == (rank % 4, rank % 4 + 1) and experts.shape == (1, 12, 8)
        assert one.replicas(experts, "") == (rank % 4, rank % 4 + 4)
        assert one.replicas(out, "") == tuple(range(rank % 2, 8, 2))


CANNOT = "cannot split {} over ep x tp=4: choose ep x tp from "


@pytest.mark.parametrize(
    ("sizes", "split", "message"),
    [
        (
            {},
            {"expert_mlp": ("tp",)},
            "layers.{layer}.moe: tp would split both 'experts' and 'expert_mlp' of one piece",
        ),
        ({"experts": 9}, {}, CANNOT.format("experts (9)") + "1, 3, 9"),
        ({}, {"kv": ("ep", "tp")}, CANNOT.format("kv (2)") + "1, 2"),
        ({}, {"embed": ("tp",)}, "layers go over pp, and others are of"),
    ],
)
def test_what_cannot_be_split_over_a_product_of_dimensions(
    sizes: dict[str, int], split: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Layout(Schema((EXPERTS,), SIZES | sizes), MeshShape(dp=2, ep=2, tp=2), (4,), {**SPLIT, **split})


# -- balanced splits


SIZES_OF_STAGES = [
    (n, s, bare) for bare in (False, True) for n in range(1, 8) for s in range(1, min(n + 2 * bare, 4) + 1)
]


def counts_of(layers: int, stages: int, bare: bool) -> Iterator[tuple[int, ...]]:
    """All that virtual stages may have; ``bare``: their ends none."""
    for counts in itertools.product(range(layers + 1), repeat=stages):
        if sum(counts) == layers and all(n or (bare and at in (0, stages - 1)) for at, n in enumerate(counts)):
            yield counts


@pytest.mark.parametrize("embedding", [0.0, 0.3, 2.5])
@pytest.mark.parametrize("head", [0.0, 1.0, 3.7])
def test_balanced_layers_are_as_good_as_any(embedding: float, head: float) -> None:
    for layers, stages, bare in SIZES_OF_STAGES:
        counts = balanced_layers(layers, stages, embedding, head, bare_ends=bare)
        every = [*counts_of(layers, stages, bare)]
        assert counts in every

        def slowest(counts: tuple[int, ...]) -> float:
            work = [float(n) for n in counts]
            work[0] += embedding
            work[-1] += head
            return max(work)

        assert slowest(counts) == min(map(slowest, every))


def test_balanced_layers_count_embedding_and_head() -> None:
    assert balanced_layers(8, 4) == (2, 2, 2, 2)
    assert balanced_layers(10, 4) == (2, 3, 3, 2)
    assert balanced_layers(8, 4, head=2) == (2, 3, 2, 1)
    with pytest.raises(ValueError, match="cannot spread 3 layers over 4 virtual stages: choose pp x chunks <= 3"):
        balanced_layers(3, 4)
    assert balanced_layers(3, 4, bare_ends=True) == (1, 1, 1, 0)
    assert balanced_layers(2, 4, bare_ends=True) == (0, 1, 1, 0)
    with pytest.raises(ValueError, match="cannot spread 3 layers over 6 virtual stages: choose pp x chunks <= 5"):
        balanced_layers(3, 6, bare_ends=True)


def test_layers_of_stages_are_spelled_and_read() -> None:
    for counts, text in (((0, *[1] * 126, 0), "0,1x126,0"), ((16,), "16"), ((3, 3, 2), "3x2,2")):
        assert spelled_layers(counts) == text and read_layers(text) == counts
    for wrong in ("", "1,,2", "1x", "x2", "-1,2", "1x2x3", "1x9999," * 7 + "1"):
        with pytest.raises(ValueError, match="layers"):
            read_layers(wrong)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 9), max_size=9))
def test_a_problem_of_layers_names_what_is_possible(layers: int, pp: int, chunks: int, counts: list[int]) -> None:
    for problem in layers_problems(layers, pp, chunks, counts):
        what = problem.split("the nearest possible is ")[1]
        if fewer := re.fullmatch("`(pp|chunks)`=([0-9]+)(?: and `chunks`=1)?", what):
            sizes = {"pp": pp, "chunks": 1 if fewer[1] == "pp" else chunks, fewer[1]: int(fewer[2])}
            assert not any("cannot give" in each for each in layers_problems(layers, **sizes, counts=counts))
        else:
            assert not [*layers_problems(layers, pp, chunks, read_layers(what))]


def _work(counts: Sequence[int], work: Sequence[float], first: float, last: float) -> list[float]:
    """Of each stage."""
    of = [sum(work[a:b]) for a, b in itertools.pairwise([0, *itertools.accumulate(counts)])]
    return [each + (s == 0) * first + (s == len(of) - 1) * last for s, each in enumerate(of)]


def test_unequal_layers_are_balanced_by_their_work() -> None:
    rng = np.random.default_rng(0)
    for layers, stages, bare in SIZES_OF_STAGES:
        work = [float(n) for n in rng.integers(1, 9, layers)]
        first, last = float(rng.integers(0, 9)), float(rng.integers(0, 9))
        counts = balanced_layers(layers, stages, first, last, work, bare)
        slowest = {c: max(_work(c, work, first, last)) for c in counts_of(layers, stages, bare)}
        assert slowest[counts] == min(slowest.values())
    # Three dense layers and then experts of nine times their work: no stage of experts waits for another.
    assert balanced_layers(12, 3, work=[1] * 3 + [9] * 9) == (6, 3, 3)


# -- size


def _python_calls(function: object) -> int:
    calls = Counter[str]()

    def count(frame: FrameType, event: str, argument: object) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        function()  # type: ignore[operator]
    finally:
        sys.setprofile(None)
    return calls["call"]


@pytest.mark.quick
def test_70b_on_1024_ranks_is_little_work() -> None:
    """Counted in calls of Python functions, for time depends on the machine: 2 million are about a second."""
    config = configure({"preset": "llama-3.1-70b"})
    mesh = MeshShape(tp=8, pp=4, dp=32)
    made: list[Layout] = []
    assert _python_calls(lambda: made.append(layout_of(config, mesh, chunks=4))) < 5_000
    one = made[0]
    sets: list[set[tuple[int, ...]]] = []
    assert _python_calls(lambda: sets.append(one.replica_sets())) < 300_000
    assert {len(ranks) for ranks in sets[0]} == {32, 8 * 32}
    stage = mesh.ranks(pp=(1,), dp=(0,))
    copies: list[Copy] = []

    def read_a_stage() -> None:
        targets = native(one, stage)
        copies.extend(c for _, found in plan(config.schema, hugging_face(config.schema), targets) for c in found)

    assert _python_calls(read_a_stage) < 1_000_000
    held = sum(s.numel for rank in stage for s in one.shards(mesh.place(rank)))
    assert sum(copy.target_view.numel for copy in copies) == held


@pytest.mark.quick
@pytest.mark.parametrize("split", [SPLIT, EXPERT_TENSOR_PARALLEL], ids=["whole", "parts"])
def test_planning_experts_looks_at_those_that_overlap(split: Split) -> None:
    """Four times as many experts on four times as many ranks are four times as much work, in both directions."""
    up = "experts (gate: expert_mlp + up: expert_mlp) embed"
    param = Param("layers.{layer}.up", up, "h.{layer}.experts.{experts}.{w1,w3}.weight")
    work = []
    for experts in (32, 128):
        sizes = SIZES | {"layer": 2, "experts": experts}
        schema, mesh = Schema((param,), sizes), MeshShape(ep=experts // 2, tp=2)
        held = list(native(Layout(schema, mesh, (2,), split), range(mesh.world)))
        listed = list(hugging_face(schema))
        for sources, targets in ((listed, held), (held, listed)):
            work.append(_python_calls(partial(list, plan(schema, sources, targets))))
    assert work[2] < 4.2 * work[0] and work[3] < 4.2 * work[1]


def test_heads_that_ranks_of_cp_can_share_out() -> None:
    """Those of keys and values that layers with windows have, too."""
    assert heads_problem({"heads": 12, "kv": 2}, 1, 6) is None
    told = heads_problem({"heads": 12, "kv": 2, "local_kv": 4}, 1, 6)
    assert told is not None and "choose from 1, 2, 4, 12" in told
    told = heads_problem({"heads": 12, "kv": 2, "local_heads": 18}, 1, 4)
    assert told is not None and "choose from 1, 2, 6" in told
