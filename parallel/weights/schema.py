"""The declaration of a model's weights: every parameter once, as a sentence of named axes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megacore.parallel.weights.pattern import Pattern, Sizes, outermost

Split = Mapping[str, tuple[str, ...]]
"""{axis: the mesh dimensions over whose product it is split, the slowest first}."""

SPLIT: Split = {
    "layer": ("pp",),
    "experts": ("ep", "tp"),
    "heads": ("tp",),
    "local_heads": ("tp",),
    "kv": ("tp",),
    "local_kv": ("tp",),
    "groups": ("tp",),
    "state_heads": ("tp",),
    "state_groups": ("tp",),
    "channels": ("tp",),
    "mlp": ("tp",),
    "shared_mlp": ("tp",),
    "expert_mlp": (),
    "vocab": ("tp",),
    "input_vocab": ("tp",),
    "labels": ("tp",),
}
"""The mesh dimensions that split an axis, unless a layout says otherwise: the only such table."""

EXPERT_TENSOR_PARALLEL: Split = {**SPLIT, "experts": ("ep",), "expert_mlp": ("tp",)}
"""The same, but tp splits the features of each expert, not the experts."""

PADDED = ("vocab", "input_vocab", "labels", "mlp", "shared_mlp", "expert_mlp")
"""Axes that are filled up with zeros to a multiple of the ranks. No token or label names a row of zeros; a hidden
feature of zeros stays zero, and so does its gradient, for the activation functions have f(0) = 0."""

SHARED = ("kv", "local_kv", "state_groups")
"""Axes of what several heads look at: neighbouring ranks share them where there are fewer than ranks."""

NAMED = re.compile(r"\{(\w+)\}")
"""An axis that lives in a name."""
WORDS = re.compile(r"\{(\w+(?:,\w+)+)\}")
"""Words in a Hugging Face name that spell one tensor for each outermost piece."""
_PARTS_OF_HEADS = ("turn", "still")
_VARIES = re.compile(r"\{\w+\}|\b\d+\b")
"""An axis or a number in a name."""


def split_of(etp: int) -> Split:
    """Return the table for so many parts of each expert: 1, or as many as tensor parallelism has."""
    return SPLIT if etp == 1 else EXPERT_TENSOR_PARALLEL


@dataclass(frozen=True)
class Param:
    """One parameter of a model, for all layers at once.

    Args:
        name: Our name, the same on every rank; ``{axis}`` is an axis that lives in the name.
        pattern: The way that it is stored, a sentence (see :mod:`parallel.weights.pattern`).
        hf: The name that Hugging Face gives it; ``{q,k,v}`` spells one tensor for each outermost piece in order.
        hf_pattern: The way that Hugging Face stores it, where that differs from ``pattern``.
        hf_held: The name that transformers gives it in memory, where that differs from ``hf``: by which the peft
            library knows what it stacks.
        at: The ends of the pipeline that hold it: ``first``, ``last`` or ``first last`` (tied); or ``layers``, every
            stage that has some. Parameters with ``{layer}`` in their name live where their layer lives instead.
        layers: The layers that have it, ascending; None: all. It needs ``{layer}`` in its name.
        also: Of each of ``layers`` the later ones that use its very tensor, ascending; empty: none does.
        mean: Mean of the initial values.
        std: Standard deviation of the initial values.
        uniform: Whether they are spread evenly about the mean, rather than normally.
        log: Whether the initial values are the logarithms of such numbers.
        vector: Whether it multiplies or adds element by element, though it has two dimensions: the norms of several
            heads, each with weights of its own.
        buffer: Whether it gets no gradient and is fp32 in any run: training moves it otherwise, or leaves it alone. It
            does not count as a parameter of the model.
        below: Its initial values are whole numbers below so many, no two of a row the same; 0: they are as those say.
        hf_copies: Names by which Hugging Face stores it again: equal where they are read, and written all.
        hf_turned: Whether the peft library takes the inputs of what transformers stacks for its outputs.
    """

    name: str
    pattern: str
    hf: str = ""
    hf_pattern: str = ""
    hf_held: str = ""
    at: str = "first"
    layers: tuple[int, ...] | None = None
    also: tuple[tuple[int, ...], ...] = ()
    mean: float = 0.0
    std: float = 0.0
    uniform: bool = False
    log: bool = False
    vector: bool = False
    buffer: bool = False
    below: int = 0
    hf_copies: tuple[str, ...] = ()
    hf_turned: bool = False

    def __post_init__(self) -> None:
        if self.at not in ("first", "last", "first last", "layers"):
            raise ValueError(f"{self.name}: at={self.at!r} is not one of 'first', 'last', 'first last', 'layers'")
        if self.layers is not None and "layer" not in self.named_axes:
            raise ValueError(f"{self.name}: it belongs to some layers, and has no {{layer}} in its name")

    @cached_property
    def sentence(self) -> Pattern:
        return Pattern.parse(self.pattern)

    @cached_property
    def named_axes(self) -> tuple[str, ...]:
        """Axes that live in the name."""
        return tuple(NAMED.findall(self.name))

    def values(self, axis: str, sizes: Sizes) -> Sequence[int]:
        """Return the indices that an axis has in its names: of ``layer`` those of the layers that have it."""
        return range(sizes[axis]) if axis != "layer" or self.layers is None else self.layers

    @cached_property
    def owners(self) -> Mapping[int, int] | None:
        """{a layer that uses it: the one whose tensor that is}; None: each of all layers has its own."""
        layers = self.layers or ()
        others = {user: layer for layer, also in zip(layers, self.also, strict=False) for user in also}
        return None if self.layers is None else {**dict(zip(layers, layers, strict=True)), **others}

    def used_in(self, layers: Iterable[int]) -> list[int]:
        """Return those of some layers that use it."""
        return [layer for layer in layers if self.owners is None or layer in self.owners]

    def held_in(self, layers: Iterable[int]) -> list[int]:
        """Return the layers whose tensors some layers use."""
        owners = self.owners or {}
        return [*dict.fromkeys(owners.get(layer, layer) for layer in self.used_in(layers))]

    def users(self, layer: int) -> tuple[int, ...]:
        """Return the layers that use the tensor that one of them has, that one the first."""
        return (layer, *self.also[(self.layers or ()).index(layer)]) if self.also else (layer,)

    @property
    def predicts(self) -> bool:
        """Whether it is of a layer behind the model, which predicts a token further ahead (MTP)."""
        return self.name.startswith("mtp.")

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.sentence.dims) > 1 and not self.vector

    @property
    def is_table(self) -> bool:
        """Whether blocks look tokens up in it."""
        return "input_vocab" in self.sentence.axes

    @property
    def is_matrix(self) -> bool:
        """Whether it is made of matrices of blocks, see :attr:`matrices`: no norm, bias, embedding, head or router, and
        not what gives one number of each token."""
        inner = ("layer" in self.named_axes or self.predicts) and not self.is_table
        return inner and self.decays and not self.buffer and self.sentence.axes.isdisjoint(("routes", "one"))

    @cached_property
    def matrices(self) -> Mapping[tuple[str, ...], Pattern]:
        """{labels: the sentence, by itself} of the linear maps that it is made of, for each index of :attr:`leading`:
        each outermost piece is one. The parts of a head that turn and that do not are one, if nothing else is."""
        together: dict[str, list[str]] = {}
        for label in self.sentence.labels:
            together.setdefault("" if label in _PARTS_OF_HEADS else outermost(label), []).append(label)
        return {
            tuple(labels): self.sentence if len(together) == 1 else self.sentence.select(outermost(labels[0]))
            for labels in together.values()
        }

    @cached_property
    def leading(self) -> tuple[str, ...]:
        """The axes before the last two dimensions: of experts that are stacked."""
        before = Pattern(self.sentence.dims[:-2]).axes
        return tuple(axis for axis in self.sentence.piece_axes(self.sentence.labels[0]) if axis in before)

    @cached_property
    def hf_names(self) -> tuple[str, ...]:
        """The name templates of the Hugging Face tensors that hold it: one, or one for each word."""
        words = WORDS.search(self.hf)
        if not words:
            return (self.hf,)
        return tuple(self.hf.replace(words.group(), word) for word in words.group(1).split(","))

    @cached_property
    def hf_tensors(self) -> Mapping[str, tuple[str, Pattern]]:
        """{label: (name template, sentence)} of the Hugging Face tensors that hold the pieces.

        Pieces that Hugging Face stores fused share one entry's name and sentence.
        """
        named = frozenset(NAMED.findall(self.hf))
        stored = Pattern.parse(self.hf_pattern) if self.hf_pattern else self.sentence
        names = self.hf_names
        if len(names) == 1:
            return dict.fromkeys(stored.labels, (self.hf, stored.without(named)))
        outer = stored.outer_labels
        if len(names) != len(outer):
            raise ValueError(f"{self.name}: {self.hf} names {len(names)} tensors for {len(outer)} pieces")
        tensors = {label: (name, stored.select(label).without(named)) for label, name in zip(outer, names, strict=True)}
        return {label: tensors[outermost(label)] for label in stored.labels}


@dataclass(frozen=True)
class Schema:
    """The parameters of a model and the sizes of its axes; everything about its weights derives from these.

    Raises:
        ValueError: a parameter is declared twice, two tensors have one Hugging Face name, an axis has no size or one
            below 1, or the mesh would split two axes of one piece alike.
    """

    params: tuple[Param, ...]
    sizes: Sizes

    def __post_init__(self) -> None:
        names = [param.name for param in self.params]
        for axis, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"axis {axis!r} has size {size}: it must be at least 1")
        for param in self.params:
            if names.count(param.name) > 1:
                raise ValueError(f"{param.name} is declared twice")
            for axis in (*param.sentence.axes, *param.named_axes, *NAMED.findall(param.hf)):
                if axis not in self.sizes:
                    raise ValueError(f"{param.name}: axis {axis!r} has no size; sizes are {dict(self.sizes)}")
            _check_layers(param, self.sizes)
        check_splits(self.params, SPLIT)
        _check_hf_names(self.params, self.sizes)

    def __getitem__(self, name: str) -> Param:
        return self.by_name[name]

    @cached_property
    def by_name(self) -> Mapping[str, Param]:
        return {param.name: param for param in self.params}

    @cached_property
    def pieces(self) -> Mapping[tuple[str, str], tuple[object, ...]]:
        """{(parameter, label): its axes, its layers, those that use it too}: what two declarations must agree on.

        They need not agree on how it is stored.
        """
        pairs = ((param, label) for param in self.params for label in param.sentence.labels)
        return {(p.name, each): (frozenset(p.sentence.piece_axes(each)), p.layers, p.also) for p, each in pairs}

    def numel(self, param: Param) -> int:
        """Return the number of elements of a parameter over all its layers (and every other axis in its name),
        unsharded, unpadded."""
        return self.count(param, param.name) * math.prod(param.sentence.shape(self.sizes))

    def count(self, param: Param, template: str) -> int:
        """Return the number of tensors with a name of a parameter, ours or Hugging Face's: one for each layer, say."""
        some = {} if param.layers is None else {"layer": len(param.layers)}
        return math.prod(some.get(axis, self.sizes[axis]) for axis in NAMED.findall(template))

    def indices(self, param: Param, template: str) -> Iterator[Mapping[str, int]]:
        """Yield the index of each axis in a name of a parameter, ours or Hugging Face's, for each of its tensors."""
        axes = NAMED.findall(template)
        for values in itertools.product(*(param.values(axis, self.sizes) for axis in axes)):
            yield dict(zip(axes, values, strict=True))

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model; tied ones count once, buffers not at all."""
        return sum(self.numel(param) for param in self.params if not param.buffer)


def _check_hf_names(params: Sequence[Param], sizes: Sizes) -> None:
    """Refuse two tensors with one Hugging Face name: both would be read from it, and one would not be written."""
    alike: dict[str, list[tuple[Param, str]]] = {}
    templates = ((param, template) for param in params if param.hf for template in param.hf_names)
    for param, template in templates:
        others = alike.setdefault(_VARIES.sub("#", template), [])
        for other, theirs in others:
            if name := _in_common((param, template), (other, theirs), sizes):
                raise ValueError(f"{other.name} and {param.name} have one Hugging Face name, {name}: rename one")
        others.append((param, template))


def _in_common(one: tuple[Param, str], other: tuple[Param, str], sizes: Sizes) -> str | None:
    """Return a name that both of two templates spell, alike but for axes and numbers; None where there is none."""

    def indices(param: Param, word: str) -> Sequence[int]:
        return param.values(word[1:-1], sizes) if word.startswith("{") else range(int(word), int(word) + 1)

    words = (_VARIES.findall(template) for _, template in (one, other))
    numbers = [_first_of_both(indices(one[0], a), indices(other[0], b)) for a, b in zip(*words, strict=True)]
    return None if None in numbers else _VARIES.sub("{}", one[1]).format(*numbers)


def _first_of_both(some: Sequence[int], others: Sequence[int]) -> int | None:
    if isinstance(some, range) and isinstance(others, range):
        first = max(some.start, others.start)
        return first if first in some and first in others else None
    listed, more = (others, some) if isinstance(some, range) else (some, others)
    return next((n for n in listed if n in more), None)


def _check_layers(param: Param, sizes: Sizes) -> None:
    if (layers := param.layers) is None and not param.also:
        return
    if not layers or list(layers) != sorted({*layers}) or layers[0] < 0 or layers[-1] >= sizes["layer"]:
        raise ValueError(
            f"{param.name}: layers={layers} are not some of the {sizes['layer']} layers, ascending, each once"
        )
    later = [(layer, *others) for layer, others in zip(layers, param.also, strict=False)]
    used = [*layers, *itertools.chain(*param.also)]
    ascending = all(list(each) == sorted(each) for each in later) and max(used) < sizes["layer"]
    if not ascending or len({*used}) < len(used) or len(param.also) not in (0, len(layers)):
        raise ValueError(
            f"{param.name}: also={param.also} are not later ones of the {sizes['layer']} layers, ascending and each "
            f"once, for each of layers={layers}"
        )


def check_splits(params: Iterable[Param], split: Split) -> None:
    """Refuse two axes of a piece on one mesh dimension: ranks would hold blocks of a diagonal, and nobody the rest.

    Raises:
        ValueError: there are two.
    """
    for param in params:
        for label in param.sentence.labels:
            taken: dict[str, str] = {}
            for axis in (*param.named_axes, *param.sentence.piece_axes(label)):
                for dim in split.get(axis, (axis,)):
                    other = taken.setdefault(dim, axis)
                    if other != axis:
                        piece = f"piece {label!r}" if label else "one piece"
                        raise ValueError(f"{param.name}: {dim} would split both {other!r} and {axis!r} of {piece}")
