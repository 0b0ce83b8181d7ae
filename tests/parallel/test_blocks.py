"""Transfers block by block: the same elements as by whole copies, in parts that follow one another."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import meshes, params, sizes_for, splits

from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param, Schema
from megacore.parallel.weights.transfer import (
    Copy,
    Stored,
    TargetChunk,
    blocks,
    execute,
    hugging_face,
    native,
    plan,
    strided,
)

SIZES = {"layer": 2, "vocab": 11, "embed": 6, "heads": 4, "kv": 2, "head": 3, "mlp": 8, "experts": 4, "expert_mlp": 8}
MHA = "(q: heads head + k: heads head + v: heads head)"
GQA = "(q: heads head + k: kv head + v: kv head)"


def ranks(schema: Schema, **mesh: int) -> list[Stored]:
    shape = MeshShape(**mesh)
    layers = schema.sizes["layer"]
    return list(native(Layout(schema, shape, (layers - shape.pp + 1, *[1] * (shape.pp - 1))), range(shape.world)))


def numbered(stored: Iterable[Stored]) -> dict[tuple[object, str], np.ndarray]:
    """Another number for every element, none of them 0 or -1."""
    made, at = {}, 1
    for s in stored:
        size = int(np.prod(s.shape))
        made[s.where, s.name] = np.arange(at, at + size).reshape(s.shape)
        at += size
    return made


def check(target: Stored, copies: Sequence[Copy], limit: int, sources: Mapping[tuple[object, str], np.ndarray]) -> None:
    """Blocks climb, lie within the target, hold what the copies hold, and nothing but padding is left out."""
    whole = np.zeros(target.shape, int)
    touched = np.zeros(target.shape, bool)
    for copy in copies:
        execute(copy, sources[copy.source.where, copy.source.name], whole)
        strided(touched, copy.target_view)[...] = True
    made, at = np.full(whole.size, -1), 0
    for block in blocks(copies, limit):
        assert block.numel > 0 and block.copies and block.start >= at
        at = block.start + block.numel
        assert at <= whole.size
        part = np.zeros(block.numel, int)
        for copy in block.copies:
            axes = dict(zip(copy.target_view.axes, copy.target_view.shape, strict=True))
            assert copy.source_view.axes == copy.target_view.axes and copy.source_view.shape == copy.target_view.shape
            # The box says which elements these are, of which one dimension per axis is in the views.
            assert all(copy.box[axis][1] - copy.box[axis][0] == size for axis, size in axes.items())
            assert {axis for axis, (start, stop) in copy.box.items() if stop - start > 1} <= axes.keys()
            view = strided(part, copy.target_view)
            assert view.size == 0 or copy.target_view.offset + last(copy) < block.numel
            assert not view.any()  # written once
            view[...] = strided(sources[copy.source.where, copy.source.name], copy.source_view)
        assert block.is_full == part.all()
        made[block.start : at] = part
    assert np.array_equal(np.where(made == -1, 0, made), whole.reshape(-1))
    assert not touched.reshape(-1)[made == -1].any()


def last(copy: Copy) -> int:
    view = copy.target_view
    return sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))


def check_all(schema: Schema, sources: list[Stored], targets: list[Stored], limit: int) -> list[list[TargetChunk]]:
    numbers, found = numbered(sources), []
    for target, copies in plan(schema, sources, targets):
        check(target, copies, limit, numbers)
        found.append(list(blocks(copies, limit)))
    return found


@pytest.mark.in_turn(2, 1)
@settings(max_examples=25)
@given(st.data(), st.integers(1, 60))
def test_random_tables_between_random_layouts(data: st.DataObject, limit: int) -> None:
    shapes = [data.draw(meshes(12)) for _ in range(2)]
    sizes = data.draw(sizes_for(shapes))
    schema = Schema(data.draw(params(sizes["layer"])), sizes)
    one, two = (list(native(Layout(schema, m, data.draw(splits(sizes["layer"], m))), range(m.world))) for m in shapes)
    check_all(schema, one, two, limit)


STORED: Mapping[str, Param] = {
    "plain": Param("w", "mlp embed", "w"),
    "transposed": Param("w", "mlp embed", "w", "embed mlp"),
    "separate-qkv": Param("w", f"{GQA} embed", "{q,k,v}"),
    "conv1d": Param("w", f"{MHA} embed", "w", f"embed {MHA}"),
    "neox": Param("w", f"{MHA} embed", "w", "(heads (q: + k: + v:) head) embed"),
    "listed-experts": Param("w", "experts (gate: expert_mlp + up: expert_mlp) embed", "e.{experts}.{gate,up}"),
    "stacked-experts": Param("w.{experts}", "expert_mlp embed", "w", "experts embed expert_mlp"),
    "row-parallel": Param("w", "embed (heads head)", "w"),
    "padded": Param("w", "vocab embed", "w"),
    "padded-transposed": Param("w", "embed vocab", "w", "vocab embed"),
    "vector": Param("w", "embed", "w"),
}
MESHES = [{}, {"tp": 2}, {"tp": 4}, {"ep": 2, "tp": 2}]


@pytest.mark.in_turn(3)
@pytest.mark.quick
@pytest.mark.parametrize("limit", [1, 5, 12, 1000])
@pytest.mark.parametrize("name", STORED)
def test_real_sentences(name: str, limit: int) -> None:
    """Hugging Face and meshes, kv < tp among them, in all directions; each row of a target fits or is alone."""
    schema = Schema((STORED[name],), SIZES)
    formats = [list(hugging_face(schema)), *(ranks(schema, **mesh) for mesh in MESHES)]
    for source, target in itertools.permutations(formats, 2):
        for found in check_all(schema, source, target, limit):
            # No dimension of these sentences keeps a block from being cut down to one element of each copy.
            assert all(block.numel <= max(limit, smallest(block)) for block in found)


def smallest(block: TargetChunk) -> int:
    """What cannot be cut any more: one element of each copy, and what lies between them."""
    return block.numel if any(copy.target_view.numel == 1 for copy in block.copies) else 0


@pytest.mark.parametrize(
    ("name", "mesh", "target"),
    [
        ("plain", {}, "native"),
        ("transposed", {"tp": 2}, "native"),
        ("conv1d", {"tp": 4}, "hf"),
        ("neox", {"tp": 2}, "hf"),
        ("padded-transposed", {"tp": 2}, "native"),
        ("listed-experts", {"ep": 2, "tp": 2}, "native"),
        ("stacked-experts", {"ep": 2, "tp": 2}, "hf"),
    ],
)
def test_no_block_of_a_large_tensor_is_large(name: str, mesh: Mapping[str, int], target: str) -> None:
    """Whatever the sizes: what is held at once is bounded, and the number of blocks is in keeping."""
    sizes = {**SIZES, "embed": 600, "mlp": 800, "expert_mlp": 800, "head": 64, "vocab": 5001, "heads": 8, "kv": 4}
    schema = Schema((STORED[name],), sizes)
    formats = {"native": ranks(schema, **mesh), "hf": list(hugging_face(schema))}
    limit = 10_000
    for stored, copies in plan(schema, formats[{"native": "hf", "hf": "native"}[target]], formats[target]):
        found = list(blocks(copies, limit))
        assert max(block.numel for block in found) <= limit
        filled = sum(block.numel for block in found)
        assert filled <= int(np.prod(stored.shape))
        assert len(found) <= 3 * filled / limit + 8


def test_blocks_are_lazy() -> None:
    """A tensor of a million blocks is not a list of a million blocks."""
    sizes = {**SIZES, "mlp": 1 << 30, "embed": 1 << 20}
    schema = Schema((STORED["plain"],), sizes)
    ((_, copies),) = plan(schema, hugging_face(schema), ranks(schema))
    found = blocks(copies, 1 << 20)
    starts = [block.start for block in itertools.islice(found, 3)]
    assert starts == [0, 1 << 20, 2 << 20]


@pytest.mark.quick
def test_padding_at_the_end_is_in_no_block_and_within_is_in_one_that_is_not_full() -> None:
    schema = Schema((STORED["padded"],), SIZES)
    found = [list(blocks(copies, 12)) for _, copies in plan(schema, hugging_face(schema), ranks(schema, tp=4))]
    assert [[(block.start, block.numel) for block in of] for of in found] == [[(0, 12), (12, 6)]] * 3 + [[(0, 12)]]
    assert all(block.is_full for of in found for block in of)
    schema = Schema((STORED["padded-transposed"],), SIZES)
    *_, (_, copies) = plan(schema, hugging_face(schema), ranks(schema, tp=4))
    assert [(block.start, block.numel, block.is_full) for block in blocks(copies, 1000)] == [(0, 17, False)]
    nothing = Schema((STORED["padded"],), {**SIZES, "vocab": 5})
    *_, (_, copies) = plan(nothing, hugging_face(nothing), ranks(nothing, tp=4))
    assert copies == [] and list(blocks(copies, 1000)) == []


def test_a_part_of_a_copy() -> None:
    schema = Schema((STORED["transposed"],), SIZES)
    ((target, (copy,)),) = plan(schema, hugging_face(schema), ranks(schema))
    (numbers,) = numbered([copy.source]).values()
    whole, made = np.zeros(target.shape, int), np.zeros(target.shape, int)
    execute(copy, numbers, whole)
    part = copy.along("mlp", 2, 5).along("embed", 1, 3)
    assert part.box == {"mlp": (2, 5), "embed": (1, 3)}
    assert part.along("mlp", 1, 2).box == {"mlp": (3, 4), "embed": (1, 3)}
    execute(part, numbers, made)
    wanted = np.zeros_like(whole)
    wanted[2:5, 1:3] = whole[2:5, 1:3]
    assert np.array_equal(made, wanted)
