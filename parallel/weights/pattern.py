"""Sentences of named axes: how one tensor is stored.

    "(q: heads head + k: kv head + v: kv head) embed"

A name is an axis, juxtaposition is a row-major product (parentheses group), ``+`` is a fused group (concatenation) and
``q:`` labels a piece of it. Every labelled piece is a strided view of the stored tensor with one dimension per axis;
a shard is the same sentence with smaller sizes. Nothing here touches memory: a :class:`Piece` is four tuples of
integers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

Sizes = Mapping[str, int]

_TOKEN = re.compile(r"(?P<label>[a-z_]\w*:)|(?P<axis>[a-z_]\w*)|(?P<mark>[()+])|(?P<space>\s+)|(?P<bad>.)")


class PatternError(ValueError):
    """A sentence that does not parse; the message points at the offending column with a caret."""

    def __init__(self, text: str, column: int, reason: str) -> None:
        super().__init__(f"{reason}\n    {text}\n    {' ' * column}^")
        self.text, self.column, self.reason = text, column, reason


@dataclass(frozen=True)
class AxisProduct:
    """``label: factor factor ...``, row-major; the label may be empty, and so may the factors of a labelled product."""

    label: str
    factors: tuple[Node, ...]


@dataclass(frozen=True)
class FusedGroup:
    """``( product + product + ... )``: the concatenation of its terms."""

    terms: tuple[AxisProduct, ...]


Node = str | FusedGroup


@dataclass(frozen=True)
class Piece:
    """A strided view, one dimension per axis; strides and offset count elements of the stored tensor."""

    label: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def box(self, bounds: Mapping[str, tuple[int, int]]) -> Piece:
        """Return the part inside ``bounds`` ([start, stop) of each axis, counted from this piece's own origin)."""
        starts = [bounds[axis][0] for axis in self.axes]
        return Piece(
            self.label,
            self.axes,
            tuple(bounds[axis][1] - bounds[axis][0] for axis in self.axes),
            self.strides,
            self.offset + sum(start * stride for start, stride in zip(starts, self.strides, strict=True)),
        )


@dataclass(frozen=True)
class Pattern:
    """A parsed sentence: one :data:`Node` per dimension of the stored tensor."""

    dims: tuple[Node, ...]

    @staticmethod
    @cache
    def parse(text: str) -> Pattern:
        """Parse a sentence.

        Raises:
            PatternError: unbalanced parentheses, an unlabelled or twice used label in a fused group, an axis that one
                piece would need twice, or a character outside of the grammar.
        """
        for leaf in _Parser(text, columns=True).pattern()._leaves():
            seen = set[str]()
            for axis, column in (found.split("@") for _, factors in leaf for found, _ in factors):
                if axis in seen:
                    raise PatternError(text, int(column), f"axis {axis!r} stands twice in one piece")
                seen.add(axis)
        return _Parser(text).pattern()

    @cached_property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for dim in self.dims for axis in _axes(dim))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Labels of the pieces in the order of storage; ``("",)`` where nothing is fused."""
        return tuple(_label(leaf) for leaf in self._leaves())

    @cached_property
    def outer_labels(self) -> tuple[str, ...]:
        """The labels without what is fused within a labelled piece: ``q`` for ``q.turn`` and ``q.still``."""
        return tuple(dict.fromkeys(map(outermost, self.labels)))

    def piece_axes(self, label: str) -> tuple[str, ...]:
        """Return the axes of one piece, in the order of the sentence."""
        try:
            return self._piece_axes[label]
        except KeyError:
            raise KeyError(f"no piece {label!r} in {self}: there are {', '.join(map(repr, self.labels))}") from None

    @cached_property
    def _piece_axes(self) -> Mapping[str, tuple[str, ...]]:
        return {_label(leaf): tuple(axis for _, factors in leaf for axis, _ in factors) for leaf in self._leaves()}

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the dimensions of the stored tensor."""
        return tuple(_extent(dim, sizes) for dim in self.dims)

    def pieces(self, sizes: Sizes) -> tuple[Piece, ...]:
        """Return the views of all pieces; together they cover each stored element exactly once."""
        key = tuple([sizes[axis] for axis in self.axes])
        if key not in self._of_sizes:  # as of every expert of every layer
            self._of_sizes[key] = self._pieces(sizes)
        return self._of_sizes[key]

    @cached_property
    def _of_sizes(self) -> dict[tuple[int, ...], tuple[Piece, ...]]:
        return {}

    def _pieces(self, sizes: Sizes) -> tuple[Piece, ...]:
        shape = self.shape(sizes)
        dim_strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        pieces = []
        for leaf in itertools.product(*(_places(dim, sizes) for dim in self.dims)):
            axes = [axis for _, strides, _ in leaf for axis in strides]
            strides = [n * dim_strides[i] for i, (_, strides, _) in enumerate(leaf) for n in strides.values()]
            offset = sum(start * dim_strides[i] for i, (_, _, start) in enumerate(leaf))
            label = _join(label for label, _, _ in leaf)
            pieces.append(Piece(label, tuple(axes), tuple(sizes[axis] for axis in axes), tuple(strides), offset))
        return tuple(pieces)

    def select(self, label: str) -> Pattern:
        """Return the sentence of what a label begins with, stored by itself.

        Each fused group on the way is replaced by the labelled term; what is fused within the last one stays.
        """
        path = label.split(".") if label else []

        def reduce(node: Node) -> list[Node]:
            if isinstance(node, str):
                return [node]
            terms = node.terms
            if path and len(terms) > 1:
                name = path.pop(0)
                terms = tuple(AxisProduct("", term.factors) for term in terms if term.label == name)
            elif path and terms[0].label == path[0]:
                path.pop(0)
            terms = tuple(AxisProduct(t.label, tuple(n for f in t.factors for n in reduce(f))) for t in terms)
            return [FusedGroup(terms)] if len(terms) > 1 or terms[0].factors else []

        return Pattern(tuple(kept for dim in self.dims for kept in reduce(dim)))

    def without(self, axes: frozenset[str]) -> Pattern:
        """Return the sentence less some axes: those that live in a tensor's name rather than in its shape."""

        def reduce(node: Node) -> list[Node]:
            if isinstance(node, str):
                return [] if node in axes else [node]
            terms = (AxisProduct(t.label, tuple(n for f in t.factors for n in reduce(f))) for t in node.terms)
            return [FusedGroup(tuple(terms))]

        return Pattern(tuple(kept for dim in self.dims for kept in reduce(dim)))

    def __str__(self) -> str:
        return " ".join(map(_spell, self.dims))

    def _leaves(self) -> list[tuple[tuple[str, tuple[tuple[str, int], ...]], ...]]:
        unit = dict.fromkeys(self.axes, 1)
        return [
            tuple((label, tuple(strides)) for label, strides, _ in leaf)
            for leaf in itertools.product(*(_occurrences(dim, unit) for dim in self.dims))
        ]


def outermost(label: str) -> str:
    """Return the label of the outermost piece that a piece is within."""
    return label.partition(".")[0]


def _label(leaf: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]) -> str:
    return _join(label for label, _ in leaf)


def _join(labels: Iterable[str]) -> str:
    return ".".join(label for label in labels if label)


def _axes(node: Node) -> list[str]:
    if isinstance(node, str):
        return [node]
    return [axis for term in node.terms for factor in term.factors for axis in _axes(factor)]


def _extent(node: Node, sizes: Sizes) -> int:
    if isinstance(node, str):
        return sizes[node]
    return sum(math.prod(_extent(factor, sizes) for factor in term.factors) for term in node.terms)


def _occurrences(node: Node, sizes: Sizes) -> list[tuple[str, list[tuple[str, int]], int]]:
    """Return the label, [(axis, stride)] and offset of every piece in a dimension; an axis may occur twice here."""
    if isinstance(node, str):
        return [("", [(node, 1)], 0)]
    found, base = [], 0
    for term in node.terms:
        inner, combos = 1, [("", list[tuple[str, int]](), 0)]
        for factor in reversed(term.factors):
            combos = [
                (_join((label, others)), [(a, n * inner) for a, n in own] + rest, start * inner + offset)
                for others, rest, offset in combos
                for label, own, start in _occurrences(factor, sizes)
            ]
            inner *= _extent(factor, sizes)
        found += [(_join((term.label, label)), strides, offset + base) for label, strides, offset in combos]
        base += inner
    return found


def _places(node: Node, sizes: Sizes) -> list[tuple[str, dict[str, int], int]]:
    return [(label, dict(strides), offset) for label, strides, offset in _occurrences(node, sizes)]


def _spell(node: Node) -> str:
    if isinstance(node, str):
        return node
    terms = (" ".join([f"{t.label}:"] * bool(t.label) + [_spell(f) for f in t.factors]) for t in node.terms)
    return f"({' + '.join(terms)})"


class _Parser:
    """Recursive descent; with ``columns`` axes are spelled ``axis@column``."""

    def __init__(self, text: str, columns: bool = False) -> None:
        self.text, self.columns = text, columns
        self.tokens = [(m.lastgroup, m.group(), m.start()) for m in _TOKEN.finditer(text) if m.lastgroup != "space"]
        for kind, token, column in self.tokens:
            if kind == "bad":
                raise PatternError(text, column, f"{token!r} has no meaning in a sentence of axes")
        self.at = 0

    def peek(self) -> tuple[str | None, str, int]:
        return self.tokens[self.at] if self.at < len(self.tokens) else (None, "", len(self.text))

    def pattern(self) -> Pattern:
        dims: list[Node] = []
        while self.peek()[0] is not None:
            kind, token, column = self.peek()
            if kind == "label":
                raise PatternError(self.text, column, f"label {token!r} outside of a group: put parentheses around it")
            if token in ("+", ")"):
                raise PatternError(self.text, column, f"{token!r} without an opening parenthesis")
            dims.append(self.node())
        return Pattern(tuple(dims))

    def node(self) -> Node:
        _, token, column = self.peek()
        self.at += 1
        if token == "(":
            return self.group()
        return f"{token}@{column}" if self.columns else token

    def group(self) -> FusedGroup:
        opened = self.tokens[self.at - 1][2]
        terms, columns = [], []
        while True:
            columns.append(self.peek()[2])
            terms.append(self.product())
            kind, token, _ = self.peek()
            if kind is None:
                raise PatternError(self.text, opened, "this parenthesis is never closed")
            self.at += 1
            if token == ")":
                break
        for i, (term, column) in enumerate(zip(terms, columns, strict=True)):
            if not term.factors and not term.label:
                raise PatternError(self.text, column, "an empty term: name its axes or its label")
            if len(terms) > 1 and not term.label:
                raise PatternError(self.text, column, "each term of a fused group needs a label such as 'q:'")
            if any(term.label == other.label for other in terms[:i]):
                raise PatternError(self.text, column, f"label {term.label!r} stands twice in one group")
        return FusedGroup(tuple(terms))

    def product(self) -> AxisProduct:
        kind, token, _ = self.peek()
        label = ""
        if kind == "label":
            label, self.at = token[:-1], self.at + 1
        factors: list[Node] = []
        while True:
            kind, token, column = self.peek()
            if kind is None or token in ("+", ")"):
                return AxisProduct(label, tuple(factors))
            if kind == "label":
                raise PatternError(self.text, column, f"label {token!r} in the middle of a term: it opens one")
            factors.append(self.node())
