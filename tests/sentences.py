"""Random sentences, sizes and meshes for property tests, and brute-force answers about them."""

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from megacore.parallel.weights.layout import Layout, MeshShape, Shard
from megacore.parallel.weights.pattern import Pattern, Piece
from megacore.parallel.weights.schema import EXPERT_TENSOR_PARALLEL, PADDED, SPLIT, Param, Schema, Split

FREE = ("embed", "head", "two", "half")
TP = ("heads", "kv", "mlp", "vocab", "columns", "rows")
LABELS = ("q", "k", "v", "gate")


@st.composite
def _node(draw: st.DrawFn, slots: Sequence[str], depth: int) -> str:
    """One dimension or factor over some slots; a slot is an axis, or "tp": any axis that tp splits."""
    kinds = ["fused", "labelled"] if depth else []
    kinds += ["axis"] if len(slots) == 1 else ["product"]
    match draw(st.sampled_from(kinds)):
        case "axis":
            return draw(st.sampled_from(TP)) if slots[0] == "tp" else slots[0]
        case "product":
            return f"({draw(_factors(slots, depth))})"
        case "labelled":
            return f"({draw(st.sampled_from(LABELS))}: {draw(_factors(slots, depth - 1))})"
        case _:
            labels = draw(st.lists(st.sampled_from(LABELS), min_size=2, max_size=3, unique=True))
            terms = []
            for label in labels:
                kept = draw(st.lists(st.sampled_from(slots), max_size=len(slots), unique=True))
                terms.append(f"{label}: {draw(_factors(kept, depth - 1)) if kept else ''}".strip())
            return f"({' + '.join(terms)})"


@st.composite
def _factors(draw: st.DrawFn, slots: Sequence[str], depth: int) -> str:
    cuts = sorted(draw(st.sets(st.integers(1, len(slots) - 1)))) if len(slots) > 1 else []
    parts = [slots[a:b] for a, b in itertools.pairwise([0, *cuts, len(slots)])]
    if len(parts) == 1 and len(slots) > 1:
        parts = [[slot] for slot in slots]
    return " ".join(draw(_node(part, depth)) for part in parts)


@st.composite
def sentences(draw: st.DrawFn, experts: bool = True, tp: bool = True) -> str:
    """Any sentence in which no piece has an axis twice, or two axes that one mesh dimension splits."""
    slots = draw(st.lists(st.sampled_from(FREE), min_size=0 if tp else 1, max_size=3, unique=True))
    if experts and draw(st.booleans()):
        slots += ["experts", *draw(st.sampled_from([[], ["expert_mlp"]]))]
    elif tp and (draw(st.booleans()) or not slots):
        slots += ["tp"]
    return draw(_factors(draw(st.permutations(slots)), 2))


def meshes(most: int = 24) -> st.SearchStrategy[MeshShape]:
    few = st.integers(1, 3)
    shapes = st.builds(MeshShape, pp=few, dp=few, ep=few, cp=st.integers(1, 2), tp=st.integers(1, 4))
    return shapes.filter(lambda mesh: mesh.world <= most)


SPLITS = (SPLIT, EXPERT_TENSOR_PARALLEL)


@st.composite
def sizes_for(draw: st.DrawFn, shapes: Sequence[MeshShape], split: Split = SPLIT) -> dict[str, int]:
    """Sizes of all axes that every one of the meshes can split."""
    tp = int(np.lcm.reduce([mesh.tp for mesh in shapes]))
    ep = int(np.lcm.reduce([mesh.size(split["experts"]) for mesh in shapes]))
    shared = [n for n in range(1, tp + 1) if all(mesh.tp % n == 0 or n % mesh.tp == 0 for mesh in shapes)]
    sizes = {axis: draw(st.integers(1, 3)) for axis in (*FREE, "expert_mlp")}
    sizes |= {axis: tp * draw(st.integers(1, 2)) for axis in ("heads", "mlp", "columns", "rows")}
    return sizes | {
        "kv": draw(st.sampled_from([*shared, 2 * tp])),
        "vocab": draw(st.integers(1, 9)),
        "experts": ep * draw(st.integers(1, 2)),
        "layer": draw(st.integers(max(mesh.pp for mesh in shapes), 7)),
    }


@st.composite
def splits(draw: st.DrawFn, layers: int, mesh: MeshShape) -> tuple[int, ...]:
    """Layers of each virtual stage, uneven and interleaved too."""
    stages = mesh.pp * draw(st.integers(1, max(1, min(2, layers // mesh.pp))))
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    return tuple(b - a for a, b in itertools.pairwise([0, *cuts, layers]))


@st.composite
def params(draw: st.DrawFn, layers: int) -> tuple[Param, ...]:
    """A table: some parameters of layers, of some layers, of listed experts, and at the ends of the pipeline."""
    some = tuple(sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1))))
    table = [
        Param("layers.{layer}.a", draw(sentences())),
        Param("layers.{layer}.c", draw(sentences()), layers=some),
        Param("layers.{layer}.expert.{experts}.b", draw(sentences(experts=False, tp=False)), layers=some),
    ]
    for name, at in (("first", "first"), ("last", "last"), ("tied", "first last")):
        table.append(Param(name, draw(sentences()), at=at))
    return tuple(draw(st.lists(st.sampled_from(table), min_size=1, unique_by=lambda param: param.name)))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    mesh, split = draw(meshes()), draw(st.sampled_from(SPLITS))
    sizes = draw(sizes_for([mesh], split))
    schema = Schema(draw(params(sizes["layer"])), sizes)
    return Layout(schema, mesh, draw(splits(sizes["layer"], mesh)), split)


def strided(array: np.ndarray, piece: Piece) -> np.ndarray:
    """A piece of a stored array, found by index arithmetic alone."""
    flat = np.full(piece.shape, piece.offset)
    for i, (size, stride) in enumerate(zip(piece.shape, piece.strides, strict=True)):
        flat += (np.arange(size) * stride).reshape([-1 if d == i else 1 for d in range(len(piece.shape))])
    found: np.ndarray = array.reshape(-1)[flat]
    return found


def coverage(pattern: Pattern, sizes: dict[str, int]) -> np.ndarray:
    """How many pieces each stored element belongs to."""
    count = np.zeros(int(np.prod(pattern.shape(sizes))), int)
    index = np.arange(count.size)
    for piece in pattern.pieces(sizes):
        np.add.at(count, strided(index, piece).reshape(-1), 1)
    return count


def owners(layout: Layout) -> dict[tuple[str, str], np.ndarray]:
    """{(tensor name, label): bool [world, padded size of each axis of the piece]}, by asking every rank."""
    parts = {axis: layout.mesh.size(layout.split[axis]) if axis in PADDED else 1 for axis in layout.schema.sizes}
    sizes = {axis: -(-n // parts[axis]) * parts[axis] for axis, n in layout.schema.sizes.items()}
    held: dict[tuple[str, str], np.ndarray] = {}
    for rank in range(layout.mesh.world):
        for shard in layout.shards(layout.mesh.place(rank)):
            for piece in shard.pieces:
                shape = [layout.mesh.world, *(sizes[axis] for axis in piece.axes)]
                array = held.setdefault((shard.name, piece.label), np.zeros(shape, bool))
                array[rank, ...][region(shard, piece)] = True
    return held


def region(shard: Shard, piece: Piece) -> tuple[slice, ...]:
    """Where a shard's piece lies in the logical piece."""
    return tuple(slice(*shard.box[axis]) for axis in piece.axes)
