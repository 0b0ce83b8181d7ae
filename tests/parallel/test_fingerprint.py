"""Fingerprints: the same over any boxes that tile a piece, and another one for anything that is not the same."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import meshes, params, sentences, sizes_for, splits
from sentences import strided as by_index

from megacore.parallel.weights.fingerprint import MODULUS, Logical, add_up, fingerprint
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.pattern import Pattern
from megacore.parallel.weights.schema import Param, Schema
from megacore.parallel.weights.transfer import native, strided

Bounds = Mapping[str, tuple[int, int]]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
AXES = ("heads", "head", "embed")


def drawn(shape: Sequence[int], itemsize: int, seed: int) -> np.ndarray:
    """Random bits."""
    numbers = np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), np.uint8)
    return numbers.view(UNSIGNED[itemsize])[..., 0]


def of(bits: np.ndarray, axes: Sequence[str] = AXES) -> int:
    """Of a whole piece."""
    return fingerprint(bits, axes, dict.fromkeys(axes, 0))


def naive(bits: np.ndarray, axes: Sequence[str], starts: Mapping[str, int]) -> int:
    """One element at a time, with Python's integers; the weights are the fingerprints of single ones."""
    per_word, total = 8 // bits.itemsize, 0
    for at in np.ndindex(bits.shape):
        place = [starts[axis] + i for axis, i in zip(axes, at, strict=True)]
        word, shift = divmod(place[-1], per_word)
        weight = 1
        for axis, i in zip(axes, (*place[:-1], word), strict=True):
            weight *= fingerprint(np.ones(1, np.uint64), (axis,), {axis: i})
        total += (int(bits[at]) << (8 * bits.itemsize * shift)) * weight
    return total % MODULUS


@st.composite
def tilings(draw: st.DrawFn, bounds: Bounds) -> list[Bounds]:
    """Boxes that tile a box, cut along one axis or another again and again."""
    boxes = [bounds]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axes = [axis for axis, (start, stop) in box.items() if stop - start > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(axes))
        start, stop = box[axis]
        cut = draw(st.integers(start + 1, stop - 1))
        boxes += [{**box, axis: (start, cut)}, {**box, axis: (cut, stop)}]
    return draw(st.permutations(boxes))


@settings(max_examples=50)
@given(st.data(), st.sampled_from([1, 2, 4, 8]), sentences())
def test_adds_up_over_any_boxes_of_any_sentence(data: st.DataObject, itemsize: int, sentence: str) -> None:
    pattern = Pattern.parse(sentence)
    sizes = {axis: data.draw(st.integers(1, 9), axis) for axis in sorted(pattern.axes)}
    stored = drawn(pattern.shape(sizes), itemsize, data.draw(st.integers(0, 99)))
    for piece in pattern.pieces(sizes):
        whole = strided(stored, piece)
        wanted = of(whole, piece.axes)
        assert of(by_index(stored, piece), piece.axes) == wanted  # contiguous or not is the same
        total = 0
        for box in data.draw(tilings({axis: (0, sizes[axis]) for axis in piece.axes})):
            part = whole[tuple(slice(*box[axis]) for axis in piece.axes)]
            total += fingerprint(part, piece.axes, {axis: start for axis, (start, _) in box.items()})
        assert total % MODULUS == wanted


@pytest.mark.quick
@pytest.mark.parametrize("itemsize", UNSIGNED)
def test_is_the_sum_that_it_says(itemsize: int) -> None:
    starts = {"heads": 3, "head": 0, "embed": 5}
    bits = drawn((2, 3, 21), itemsize, 0)
    assert fingerprint(bits, AXES, starts) == naive(bits, AXES, starts)
    assert 0 <= fingerprint(bits, AXES, starts) < MODULUS


def test_is_the_one_that_files_of_this_version_hold() -> None:
    """Written down: a change of the numbers would make every checkpoint on disk look damaged."""
    bits = np.arange(2 * 3 * 5, dtype=np.uint16).reshape(2, 3, 5) * np.uint16(2049)
    assert f"{of(bits):016x}" == "7debfcda1411ca6c"
    assert f"{of(bits[0, 0], ('embed',)):016x}" == "5ebb80ffe652642c"


def views(bits: np.ndarray) -> Iterator[np.ndarray]:
    """The same elements in other memory: strided, backwards, transposed, and off the alignment of a word."""
    wide = np.zeros((bits.shape[0], 2 * bits.shape[1], 3 * bits.shape[2]), bits.dtype)
    wide[:, ::2, 1::3] = bits
    yield wide[:, ::2, 1::3]
    yield np.ascontiguousarray(bits[:, :, ::-1])[:, :, ::-1]
    yield np.ascontiguousarray(bits.T).T
    yield np.ascontiguousarray(bits.transpose(1, 0, 2)).transpose(1, 0, 2)
    for shift in range(1, 8):
        raw = np.zeros(bits.nbytes + 8, np.uint8)
        raw[shift : shift + bits.nbytes] = np.frombuffer(bits.tobytes(), np.uint8)
        yield raw[shift : shift + bits.nbytes].view(bits.dtype).reshape(bits.shape)
    padded = np.zeros((*bits.shape[:-1], bits.shape[-1] + 3), bits.dtype)  # rows that end within a word
    padded[..., :-3] = bits
    yield padded[..., :-3]
    read_only = bits.copy()
    read_only.flags.writeable = False
    yield read_only


@pytest.mark.parametrize("itemsize", UNSIGNED)
def test_memory_does_not_matter(itemsize: int) -> None:
    bits = drawn((3, 4, 16), itemsize, 1)
    wanted = of(bits)
    for i, view in enumerate(views(bits)):
        assert np.array_equal(view, bits)
        assert of(view) == wanted, i


@settings(max_examples=30)
@given(st.data(), st.sampled_from([1, 2, 4, 8]))
def test_every_bit_counts(data: st.DataObject, itemsize: int) -> None:
    """Always, by arithmetic: one bit, or one element as a whole."""
    shape = [data.draw(st.integers(1, 9)) for _ in AXES]
    bits = drawn(shape, itemsize, data.draw(st.integers(0, 99)))
    before = of(bits)
    at = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    bit = data.draw(st.integers(0, 8 * itemsize - 1))
    bits[at] ^= bits.dtype.type(1 << bit)
    assert of(bits) != before
    bits[at] ^= bits.dtype.type(1 << bit)
    other = data.draw(st.integers(0, 256**itemsize - 1).filter(lambda number: number != int(bits[at])))
    bits[at] = other
    assert of(bits) != before


def test_every_single_bit_of_a_small_piece() -> None:
    for itemsize in UNSIGNED:
        bits = drawn((2, 2, 5), itemsize, 3)
        raw, before, seen = bits.reshape(-1).view(np.uint8), of(bits), set()
        for byte, bit in itertools.product(range(raw.size), range(8)):
            raw[byte] ^= 1 << bit
            seen.add(of(bits))
            raw[byte] ^= 1 << bit
        assert before not in seen
        # Nor do two of them look like one another, but for the highest bits of words: little is left of their weights.
        assert len(seen) > 0.9 * 8 * raw.size


@pytest.mark.parametrize("itemsize", UNSIGNED)
def test_exchanges_show(itemsize: int) -> None:
    """Of elements, rows, columns, halves, dimensions; and a piece in another's place."""
    bits = drawn((8, 8, 8), itemsize, 2)
    changed: list[np.ndarray] = []
    for axis, (i, j) in itertools.product(range(3), itertools.combinations(range(8), 2)):
        order = list(range(8))
        order[i], order[j] = j, i
        changed.append(bits.take(order, axis))
    changed += [np.roll(bits, shift, axis) for axis in range(3) for shift in range(1, 8)]
    changed += [bits.transpose(order) for order in itertools.permutations(range(3)) if order != (0, 1, 2)]
    for a, b in itertools.combinations([(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (7, 7, 7), (3, 4, 5)], 2):
        assert bits[a] != bits[b]
        one = bits.copy()
        one[a], one[b] = bits[b], bits[a]
        changed.append(one)
    halves = bits.reshape(8, 8, 2, 4).transpose(0, 1, 3, 2).reshape(8, 8, 8)  # rope's other order
    found = [of(one) for one in (bits, halves, *changed)]
    assert len(set(found)) == len(found)
    assert len({of(bits, names) for names in itertools.permutations(AXES)}) == 6
    moved = [fingerprint(bits, AXES, dict.fromkeys(AXES, 0) | {axis: 8}) for axis in AXES]
    assert len({*moved, found[0]}) == 4


def test_scalars_and_nothing() -> None:
    assert fingerprint(np.array(7, np.uint16), (), {}) == 7
    for itemsize, shape in itertools.product(UNSIGNED, [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)]):
        assert of(np.zeros(shape, UNSIGNED[itemsize])) == 0
    assert of(np.zeros((2, 3, 4), np.uint16)) == 0  # zeros are what padding holds, and count as nothing


# -- adding up


SCHEMA = Schema(
    (Param("layers.{layer}.up", "(gate: mlp + up: mlp) embed"), Param("norm", "embed", at="last")),
    {"layer": 2, "mlp": 4, "embed": 3},
)


@pytest.mark.quick
def test_replicas_count_once_and_must_agree() -> None:
    layout = Layout(SCHEMA, MeshShape(tp=2), (2,))
    stored = list(native(layout, range(2)))
    found = [(s, {label: 10 * s.where + i for i, label in enumerate(s.labels)}) for s in stored]  # type: ignore[operator]
    norms = [of for s, of in found if s.name == "norm"]
    norms[1][""] = norms[0][""] = MODULUS - 1
    assert add_up(SCHEMA, found) == {
        ("layers.0.up", "gate"): 10,
        ("layers.0.up", "up"): 12,
        ("layers.1.up", "gate"): 10,
        ("layers.1.up", "up"): 12,
        ("norm", ""): MODULUS - 1,
    }
    norms[1][""] = 5
    with pytest.raises(ValueError, match=r"replicas of the same elements differ: norm in 1$"):
        add_up(SCHEMA, found)


def test_all_replicas_that_differ_are_named() -> None:
    schema = Schema((Param("layers.{layer}.kv", "(k: kv head + v: kv head) embed"), Param("norm", "embed")),
                    {"layer": 1, "kv": 1, "head": 2, "embed": 2})  # fmt: skip
    stored = list(native(Layout(schema, MeshShape(tp=3), (1,)), range(3)))
    found = [(s, {label: 2 if s.where and label != "k" else 1 for label in s.labels}) for s in stored]
    with pytest.raises(ValueError) as caught:
        add_up(schema, found)
    for name in ("layers.0.kv (v) in 1", "layers.0.kv (v) in 2", "norm in 1", "norm in 2"):
        assert name in str(caught.value)
    assert "(k)" not in str(caught.value)


@pytest.mark.in_turn(2, 1)
@settings(max_examples=20)
@given(st.data(), st.sampled_from([1, 2, 4, 8]))
def test_any_two_layouts_add_up_to_the_same(data: st.DataObject, itemsize: int) -> None:
    shapes = [data.draw(meshes(12)) for _ in range(2)]
    sizes = data.draw(sizes_for(shapes))
    schema = Schema(data.draw(params(sizes["layer"])), sizes)
    alone = Layout(schema, MeshShape(), (sizes["layer"],))
    logical: dict[Logical, np.ndarray] = {}
    for i, stored in enumerate(native(alone, [0])):
        bits = drawn(stored.shape, itemsize, i)
        logical |= {(stored.name, label): strided(bits, piece) for label, piece in stored.pieces.items()}

    def total(layout: Layout) -> dict[Logical, int]:
        found = []
        for stored in native(layout, range(layout.mesh.world)):
            of_pieces = {}
            for label, piece in stored.pieces.items():
                box = {axis: (start, min(stop, sizes[axis])) for axis, (start, stop) in stored.box.items()}
                part = logical[stored.name, label][tuple(slice(*box[axis]) for axis in piece.axes)]
                of_pieces[label] = fingerprint(part, piece.axes, {axis: start for axis, (start, _) in box.items()})
            found.append((stored, of_pieces))
        return add_up(schema, data.draw(st.permutations(found)))

    wanted = total(alone)
    assert wanted.keys() == logical.keys()
    for mesh in shapes:
        assert total(Layout(schema, mesh, data.draw(splits(sizes["layer"], mesh)))) == wanted
