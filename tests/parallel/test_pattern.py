"""Sentences: parsing, shapes, views of pieces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentences import coverage, sentences, strided

from megacore.parallel.weights.pattern import Pattern, PatternError, Piece

SIZES = {"embed": 5, "heads": 4, "kv": 2, "head": 3, "mlp": 7, "vocab": 11, "two": 2, "half": 3, "experts": 3}
SIZES |= {"columns": 2, "rows": 3, "layer": 2}
QKV = "(q: heads head + k: kv head + v: kv head)"


def test_axes_are_dimensions_and_parentheses_group() -> None:
    assert Pattern.parse("vocab embed").shape(SIZES) == (11, 5)
    assert Pattern.parse("embed (heads head)").shape(SIZES) == (5, 12)
    assert Pattern.parse("(two half) embed").shape(SIZES) == (6, 5)
    assert Pattern.parse("").shape(SIZES) == ()


@pytest.mark.quick
def test_fused_group_is_a_concatenation() -> None:
    pattern = Pattern.parse(f"{QKV} embed")
    assert pattern.shape(SIZES) == (12 + 6 + 6, 5)
    assert pattern.labels == ("q", "k", "v")
    assert pattern.pieces(SIZES) == (
        Piece("q", ("heads", "head", "embed"), (4, 3, 5), (15, 5, 1), 0),
        Piece("k", ("kv", "head", "embed"), (2, 3, 5), (15, 5, 1), 60),
        Piece("v", ("kv", "head", "embed"), (2, 3, 5), (15, 5, 1), 90),
    )


def test_pieces_are_views_of_stored_tensors() -> None:
    """Against numpy's own slicing and reshaping."""
    stored = np.arange(24 * 5).reshape(24, 5)
    q, k, v = (strided(stored, piece) for piece in Pattern.parse(f"{QKV} embed").pieces(SIZES))
    assert np.array_equal(q, stored[:12].reshape(4, 3, 5))
    assert np.array_equal(k, stored[12:18].reshape(2, 3, 5))
    assert np.array_equal(v, stored[18:].reshape(2, 3, 5))

    conv1d = np.arange(24 * 5).reshape(5, 24)
    _, k, _ = (strided(conv1d, piece) for piece in Pattern.parse(f"embed {QKV}").pieces(SIZES))
    assert np.array_equal(k, conv1d[:, 12:18].reshape(5, 2, 3))

    interleaved = np.arange(4 * 3 * 3 * 5).reshape(36, 5)
    pieces = Pattern.parse("(heads (q: + k: + v:) head) embed").pieces(SIZES)
    assert [piece.label for piece in pieces] == ["q", "k", "v"]
    for i, piece in enumerate(pieces):
        assert np.array_equal(strided(interleaved, piece), interleaved.reshape(4, 3, 3, 5)[:, i])

    (halves,) = Pattern.parse("(half two)").pieces(SIZES)
    assert np.array_equal(strided(np.arange(6), halves).T, [[0, 2, 4], [1, 3, 5]])


def test_labels_of_nested_and_crossed_groups_are_joined() -> None:
    assert Pattern.parse("(a: (x: mlp + y: mlp) + b: mlp) embed").labels == ("a.x", "a.y", "b")
    assert Pattern.parse("(a: mlp + b: mlp) (x: head + y: head)").labels == ("a.x", "a.y", "b.x", "b.y")
    assert set(Pattern.parse("(a: (p: + q:) (x: + y:) + b: mlp)").labels) == {"a.p.x", "a.p.y", "a.q.x", "a.q.y", "b"}
    assert Pattern.parse("vocab embed").labels == ("",)


def test_a_label_without_axes_is_one_element() -> None:
    pattern = Pattern.parse("(q: + k: + v:) embed")
    assert pattern.shape(SIZES) == (3, 5)
    assert [piece.offset for piece in pattern.pieces(SIZES)] == [0, 5, 10]


def test_box_is_a_slice() -> None:
    stored = np.arange(24 * 5).reshape(24, 5)
    _, k, _ = Pattern.parse(f"{QKV} embed").pieces(SIZES)
    part = k.box({"kv": (1, 2), "head": (1, 3), "embed": (0, 4)})
    assert np.array_equal(strided(stored, part), stored[12:18].reshape(2, 3, 5)[1:2, 1:3, 0:4])
    assert part.numel == 1 * 2 * 4


def test_select_stores_a_piece_by_itself() -> None:
    assert str(Pattern.parse(f"{QKV} embed").select("k")) == "(kv head) embed"
    assert str(Pattern.parse("(heads (q: + k: + v:) head) embed").select("k")) == "(heads head) embed"
    assert str(Pattern.parse("embed (gate: mlp + up: mlp)").select("up")) == "embed (mlp)"
    assert str(Pattern.parse("vocab embed").select("")) == "vocab embed"


def test_select_leaves_what_is_fused_within() -> None:
    pattern = Pattern.parse("(q: heads (turn: two half + still: rest) + v: kv head) embed")
    assert pattern.labels == ("q.turn", "q.still", "v")
    assert pattern.outer_labels == ("q", "v")
    assert str(pattern.select("q")) == "(heads (turn: two half + still: rest)) embed"
    assert str(pattern.select("q.still")) == "(heads (rest)) embed"


def test_without_takes_axes_out_of_the_tensor() -> None:
    pattern = Pattern.parse("experts (gate: mlp + up: mlp) embed").without(frozenset({"experts"}))
    assert str(pattern) == "(gate: mlp + up: mlp) embed"
    assert pattern.shape(SIZES) == (14, 5)


def test_piece_axes_in_the_order_of_the_sentence() -> None:
    pattern = Pattern.parse(f"embed {QKV}")
    assert pattern.piece_axes("q") == ("embed", "heads", "head")
    assert pattern.piece_axes("v") == ("embed", "kv", "head")
    with pytest.raises(KeyError, match=r"no piece 'x' in .* there are 'q', 'k', 'v'"):
        pattern.piece_axes("x")


ERRORS = [
    ("(heads head", 0, "never closed"),
    ("embed (heads (q: + k:)", 6, "never closed"),
    ("heads) embed", 5, "')' without an opening parenthesis"),
    ("heads + kv", 6, "'+' without an opening parenthesis"),
    ("q: heads", 0, "label 'q:' outside of a group"),
    ("(heads + kv) embed", 1, "needs a label"),
    ("(q: heads + kv) embed", 12, "needs a label"),
    ("(q: heads + q: kv) embed", 12, "label 'q' stands twice"),
    ("(q: heads k: kv)", 10, "in the middle of a term"),
    ("embed ()", 7, "an empty term"),
    ("(q: heads + ) embed", 12, "an empty term"),
    ("embed embed", 6, "axis 'embed' stands twice"),
    ("(q: heads head + k: kv head) kv", 29, "axis 'kv' stands twice"),
    ("(q: embed + k: heads) embed", 22, "axis 'embed' stands twice"),
    ("(q: heads + k: heads) heads", 22, "axis 'heads' stands twice"),
    ("heads * head", 6, "'*' has no meaning"),
    ("heads, head", 5, "',' has no meaning"),
    ("Heads", 0, "'H' has no meaning"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("text", "column", "reason"), ERRORS, ids=[text for text, _, _ in ERRORS])
def test_errors_point_at_the_column(text: str, column: int, reason: str) -> None:
    with pytest.raises(PatternError) as caught:
        Pattern.parse(text)
    lines = str(caught.value).split("\n")
    assert reason in lines[0]
    assert lines[1] == f"    {text}"
    assert lines[2] == " " * (4 + column) + "^"
    assert (caught.value.text, caught.value.column) == (text, column)


@given(sentences())
def test_spelling_parses_to_the_same_pattern(text: str) -> None:
    pattern = Pattern.parse(text)
    assert Pattern.parse(str(pattern)) == pattern


@given(sentences(), st.data())
def test_pieces_cover_each_stored_element_once(text: str, data: st.DataObject) -> None:
    pattern = Pattern.parse(text)
    sizes = {axis: data.draw(st.integers(1, 4), label=axis) for axis in sorted(pattern.axes)}
    assert np.all(coverage(pattern, sizes) == 1)
    assert tuple(piece.label for piece in pattern.pieces(sizes)) == pattern.labels
    for piece in pattern.pieces(sizes):
        assert piece.axes == pattern.piece_axes(piece.label)
        assert piece.shape == tuple(sizes[axis] for axis in piece.axes)


@given(sentences(), st.data())
def test_slicing_commutes_with_storage(text: str, data: st.DataObject) -> None:
    """A shard is the same sentence with smaller sizes: its pieces are slices of the whole's pieces."""
    pattern = Pattern.parse(text)
    sizes = {axis: data.draw(st.integers(1, 4), label=axis) for axis in sorted(pattern.axes)}
    bounds = {}
    for axis, size in sizes.items():
        start = data.draw(st.integers(0, size - 1), label=f"start of {axis}")
        bounds[axis] = (start, data.draw(st.integers(start + 1, size), label=f"stop of {axis}"))
    whole = np.arange(int(np.prod(pattern.shape(sizes))))
    for piece in pattern.pieces(sizes):
        slices = tuple(slice(*bounds[axis]) for axis in piece.axes)
        assert np.array_equal(strided(whole, piece.box(bounds)), strided(whole, piece)[slices])


@given(sentences(), st.data())
def test_a_selected_piece_has_the_axes_of_the_piece(text: str, data: st.DataObject) -> None:
    pattern = Pattern.parse(text)
    sizes = {axis: data.draw(st.integers(1, 4), label=axis) for axis in sorted(pattern.axes)}
    for piece in pattern.pieces(sizes):
        (alone,) = pattern.select(piece.label).pieces(sizes)
        assert sorted(alone.axes) == sorted(piece.axes)
        assert alone.numel == piece.numel
        assert np.all(coverage(pattern.select(piece.label), sizes) == 1)
