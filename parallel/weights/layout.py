"""The elements of each logical tensor that live on each rank: integer arithmetic, no process group, no GPU."""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType

from megacore.parallel.enum_errors import Placement, check_choice
from megacore.parallel.virtual_stages import stage_of, virtual_stage
from megacore.parallel.weights.pattern import Piece, Sizes
from megacore.parallel.weights.schema import (
    EXPERT_TENSOR_PARALLEL,
    PADDED,
    SHARED,
    SPLIT,
    Param,
    Schema,
    Split,
    check_splits,
)

Box = Mapping[str, tuple[int, int]]
"""[start, stop) of each axis."""


@dataclass(frozen=True, order=True)
class Coordinates:
    """Coordinates of one rank in the mesh."""

    pp: int = 0
    dp: int = 0
    ep: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh: pipeline, data, expert, context and tensor parallel.

    Ranks are numbered with ``tp`` innermost (one node's NVLink), then cp, ep, dp, and ``pp`` outermost.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    DIMS = ("pp", "dp", "ep", "cp", "tp")

    def __post_init__(self) -> None:
        for dim in self.DIMS:
            if self[dim] < 1:
                raise ValueError(f"{dim}={self[dim]} must be at least 1")

    def __getitem__(self, dim: str) -> int:
        return int(getattr(self, dim))

    @property
    def world(self) -> int:
        return math.prod(self[dim] for dim in self.DIMS)

    def size(self, dims: Sequence[str]) -> int:
        """Return the size of the product of some dimensions."""
        return math.prod(self[dim] for dim in dims)

    @property
    def data(self) -> int:
        """Number of ranks that read different sequences: dp x ep."""
        return self.dp * self.ep

    def place(self, rank: int) -> Coordinates:
        coordinates = {}
        for dim in reversed(self.DIMS):
            rank, coordinates[dim] = divmod(rank, self[dim])
        return Coordinates(**coordinates)

    def rank(self, place: Coordinates) -> int:
        rank = 0
        for dim in self.DIMS:
            rank = rank * self[dim] + getattr(place, dim)
        return rank

    def ranks(self, **fixed: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks whose coordinate along each named dimension is among the given ones; other dimensions are
        free.

        Raises:
            ValueError: there is no dimension of one of the names.
        """
        for dim in fixed:
            check_choice("dimension of the mesh", dim, self.DIMS)
        return _ranks(self, *(tuple(fixed.get(dim, range(self[dim]))) for dim in self.DIMS))

    def along(self, rank: int, *dims: str) -> tuple[int, ...]:
        """Return the group of ``rank`` along some dimensions: ranks that differ from it in nothing else.

        Raises:
            ValueError: there is no dimension of one of the names.
        """
        for dim in dims:
            check_choice("dimension of the mesh", dim, self.DIMS)
        place = self.place(rank)
        return self.ranks(**{dim: (getattr(place, dim),) for dim in self.DIMS if dim not in dims})

    def all_along(self, *dims: str) -> list[tuple[int, ...]]:
        """Return the groups of all ranks along some dimensions, each once; they share no rank.

        Raises:
            ValueError: there is no dimension of one of the names.
        """
        return [self.along(first, *dims) for first in self.ranks(**dict.fromkeys(dims, (0,)))]


@lru_cache(maxsize=4096)
def _ranks(shape: MeshShape, *coordinates: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of all combinations of coordinates, given for each dimension. Asked for often, and long."""
    ranks = [0]
    for dim, chosen in zip(shape.DIMS, coordinates, strict=True):
        ranks = [rank * shape[dim] + coordinate for rank in ranks for coordinate in chosen]
    return tuple(ranks)


def split_axis(axis: str, size: int, parts: int, part: int, dims: Sequence[str] = ()) -> tuple[int, int]:
    """Return [start, stop) of ``axis`` in one of ``parts``.

    Splits are even, but those of :data:`~parallel.weights.schema.PADDED` axes are padded up to a multiple (the box may
    run past ``size``), and those of :data:`~parallel.weights.schema.SHARED` are shared by neighbouring parts where they
    have fewer elements than there are parts.

    Args:
        axis: Its name.
        parts: The number of parts of the mesh, along ``dims``.
        part: One of them.
        dims: The mesh dimensions that split it; by default those of :data:`~parallel.weights.schema.SPLIT`.

    Raises:
        ValueError: the axis cannot be split so.
    """
    if size % parts == 0 or axis in PADDED:
        step = -(-size // parts)
        return part * step, (part + 1) * step
    dims = dims or SPLIT[axis]
    shared = axis in SHARED and len(dims) == 1
    if shared and parts % size == 0:
        head = part * size // parts
        return head, head + 1
    over = " x ".join(dims)
    raise ValueError(f"cannot split {axis} ({size}) over {over}={parts}: {_choices(over, size, shared)}")


def _choices(over: str, size: int, shared: bool) -> str:
    # A size may come from a damaged file: look no further than what a mesh may have.
    divisors = [str(n) for n in range(1, min(size - 1, 4096) + 1) if size % n == 0] + [str(size)]
    shown = divisors if len(divisors) <= 12 else [*divisors[:8], "...", divisors[-1]]
    multiples = f" or a multiple of {size}" if shared else ""
    return f"choose {over} from {', '.join(shown)}{multiples}"


def split_problems(sizes: Sizes, mesh: MeshShape, split: Split = SPLIT) -> list[str]:
    """Return every axis that the mesh cannot split, each with the sizes that would do."""
    problems = []
    for axis, dims in split.items():
        if axis in sizes and axis != "layer":
            try:
                split_axis(axis, sizes[axis], mesh.size(dims), 0, dims)
            except ValueError as error:
                problems.append(str(error))
    return problems


def mesh_problems(sizes: Sizes, mesh: MeshShape, etp: int = 1) -> list[str]:
    """Return everything that keeps a model from a mesh, the layers left out, each with the way out.

    Args:
        sizes: Sizes of the model's axes.
        mesh: Sizes of the mesh.
        etp: Parts of each expert.
    """
    whole, parts = (split_problems(sizes, mesh, split) for split in (SPLIT, EXPERT_TENSOR_PARALLEL))
    problems = parts if etp > 1 else whole
    if etp == 1 and len(parts) < len(whole):
        way_out = f", or etp={mesh.tp}, which splits each of them over tp"
        problems = [each if each in parts else each + way_out for each in whole]
    if "experts" not in sizes:
        asked = {"ep": mesh.ep, "etp": etp}
        nothing = "the model has no experts to split"
        problems += [f"{dim}={size}: {nothing}, set {dim}=1" for dim, size in asked.items() if size > 1]
    elif etp not in (1, mesh.tp):
        problems.append(
            f"etp={etp} is neither 1 (experts are whole, over ep x tp) nor tp={mesh.tp} (each is split over tp)"
        )
    return problems


def heads_problem(sizes: Sizes, tp: int, ranks: int) -> str | None:
    """Return why ranks of cp cannot share out the heads that a rank of tp has, with the numbers that can; None: they
    can.

    Each takes the same number of heads of queries, and those of keys and values that they look at.

    Args:
        sizes: Sizes of the model's axes.
        tp: Ranks of tensor parallelism, which split the heads first.
        ranks: Ranks of cp that share out those of one of them.
    """
    if "heads" not in sizes:  # nobody asks for any
        return None
    heads, kv = sizes["heads"] // tp, sizes.get("kv", sizes.get("groups", sizes["heads"])) // tp or 1
    looked_at = {kv, sizes.get("local_kv", kv * tp) // tp or 1}
    local = sizes.get("local_heads", sizes["heads"]) // tp
    fits = (n for n in range(1, min(heads, 4096) + 1) if heads % n == 0 and local % n == 0)
    fitting = [n for n in fits if all(each % n == 0 or n % each == 0 for each in looked_at)]
    if heads * tp < sizes["heads"] or ranks in fitting:  # where tp does not split them, that is said already
        return None
    of_each = f" of each rank of tp={tp}" if tp > 1 else ""
    choices = ", ".join(map(str, fitting))
    return f"cannot share out {heads} heads ({kv} of keys){of_each} over {ranks} ranks of cp: choose from {choices}"


def balanced_layers(
    layers: int,
    stages: int,
    embedding: float = 0.0,
    head: float = 0.0,
    work: Sequence[float] | None = None,
    bare_ends: bool = False,
) -> tuple[int, ...]:
    """Return the layers of each virtual stage so that the slowest stage is as fast as possible, with at least one layer
    each.

    Args:
        layers: Layers of the model.
        stages: Virtual stages (pipeline stages x chunks).
        embedding: Work of the embedding, which the first stage has on top.
        head: Work of the head, which the last stage has on top.
        work: The work of each layer; None: 1 each.
        bare_ends: Whether the first and the last of several stages may have no layer.

    Raises:
        ValueError: there are fewer layers than stages that need one.
    """
    least = least_layers(stages, bare_ends)
    if sum(least) > layers:
        most = layers + stages - sum(least)
        raise ValueError(f"cannot spread {layers} layers over {stages} virtual stages: choose pp x chunks <= {most}")
    extra = [0.0] * stages
    extra[0] += embedding
    extra[-1] += head
    if work is not None:
        return _cut_by_work([0.0, *itertools.accumulate(work)], extra, least)
    counts = list(least)
    for _ in range(layers - sum(least)):
        # Ties go to the stage in the middle of the pipeline: the ends also hold the tables.
        lightest = min(range(stages), key=lambda s: (counts[s] + extra[s], s in (0, stages - 1), s))
        counts[lightest] += 1
    return tuple(counts)


def _cut_by_work(done: Sequence[float], extra: Sequence[float], least: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of each stage, none of which has more than the slowest must have, each near an even share of
    the rest.

    Args:
        done: The work of all layers before each, and of all.
        extra: The work that each stage has on top.
        least: The layers that each stage must have.
    """
    stages = len(extra)

    def longest(start: int, stage: int, bound: float) -> int:
        """Return the last layer at which a stage that begins at a layer may end: within the bound, with layers for the
        others."""
        last = bisect_right(done, bound - extra[stage] + done[start]) - 1
        return min(last, len(done) - 1 - sum(least[stage + 1 :]))

    def fits(start: int, stage: int, bound: float) -> bool:
        for each in range(stage, stages):
            before, start = start, longest(start, each, bound)
            if start < before + least[each]:
                return False
        return start == len(done) - 1

    low, high = 0.0, done[-1] + sum(extra)
    for _ in range(60):  # as exact as a float is
        middle = (low + high) / 2
        low, high = (low, middle) if fits(0, 0, middle) else (middle, high)
    start, counts = 0, []
    for stage in range(stages - 1):
        share = (done[-1] - done[start] + sum(extra[stage:])) / (stages - stage)
        first = start + least[stage]
        ends = [n for n in range(first, longest(start, stage, high) + 1) if fits(n, stage + 1, high)]
        end = min(ends, key=lambda n: abs(done[n] - done[start] + extra[stage] - share))
        counts.append(end - start)
        start = end
    return (*counts, len(done) - 1 - start)


def least_layers(stages: int, bare_ends: bool = True) -> tuple[int, ...]:
    """Return the layers that each virtual stage must have: one, but the first and the last of several may have the
    embedding or the head alone."""
    return tuple(int(not bare_ends or stages == 1 or 0 < stage < stages - 1) for stage in range(stages))


def layers_problems(layers: int, pp: int, chunks: int, counts: Sequence[int] | None) -> Iterator[str]:
    """Yield everything that keeps the layers of a model from virtual stages, with the nearest that is possible; names
    of arguments stand in backticks.

    Args:
        layers: Layers of the model.
        pp: Pipeline stages.
        chunks: Virtual stages of each.
        counts: Layers of each virtual stage; None: they are to be balanced.
    """

    def fits(chunks: int) -> bool:
        ends = 2 if pp * chunks > 1 and (counts is not None or chunks > 1) else 0
        return pp * chunks - ends <= layers

    stages, nearest = pp * chunks, "the nearest possible is"
    product = f"`pp` x `chunks` = {pp} x {chunks} = {stages} virtual stages"
    if not fits(chunks):
        fewer = next((n for n in range(min(chunks, layers // pp + 2), 0, -1) if fits(n)), None)
        alone = f"`pp`={layers}" + " and `chunks`=1" * (chunks > 1)
        way_out = alone if fewer is None else f"`chunks`={fewer}"
        yield f"cannot give each of {product} one of the {layers} layers: {nearest} {way_out}"
    elif counts is not None and (wrong := _counts_problem(layers, stages, counts)):
        way_out = spelled_layers(_nearest_counts(layers, stages, counts))
        yield f"`layers_per_stage` ({spelled_layers(counts)}) {wrong.format(product)}: {nearest} {way_out}"


def _counts_problem(layers: int, stages: int, counts: Sequence[int]) -> str | None:
    if len(counts) != stages:
        return f"has {len(counts)} numbers, and {{}} need one each"
    if sum(counts) != layers:
        return f"adds up to {sum(counts)}, and the model has {layers} layers"
    bare = any(count < least for count, least in zip(counts, least_layers(stages), strict=True))
    return "leaves more than the ends without a layer" if bare else None


def _nearest_counts(layers: int, stages: int, counts: Sequence[int]) -> Sequence[int]:
    """Return possible layers of virtual stages, made of others by moving single ones."""
    if len(counts) != stages or abs(sum(counts) - layers) > stages:
        return balanced_layers(layers, stages, bare_ends=True)
    least = least_layers(stages)
    found = [max(pair) for pair in zip(counts, least, strict=True)]
    while sum(found) < layers:
        found[found.index(min(found))] += 1
    while sum(found) > layers:
        above = [count - low for count, low in zip(found, least, strict=True)]
        found[above.index(max(above))] -= 1
    return found


def spelled_layers(counts: Sequence[int]) -> str:
    """Return the layers of virtual stages as a text, in which ``1x126`` stands for 126 ones: ``0,1x126,0``."""
    runs = ((count, len([*alike])) for count, alike in itertools.groupby(counts))
    return ",".join(f"{count}x{times}" if times > 1 else str(count) for count, times in runs)


_MOST_STAGES = 1 << 16


def read_layers(text: str) -> tuple[int, ...]:
    """Return the layers of virtual stages that :func:`spelled_layers` has spelled. Raises ValueError: it has not."""
    counts = list[int]()
    for run in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:x(\d{1,4}))?", run.strip(), re.ASCII)
        if found is None:
            raise ValueError(f"{run!r} is no number of layers, as 2, nor one of several stages, as 2x3")
        counts += [int(found[1])] * int(found[2] or 1)
        if len(counts) > _MOST_STAGES:
            raise ValueError(f"layers of more than {_MOST_STAGES:,} virtual stages are not looked at")
    return tuple(counts)


@dataclass(frozen=True)
class Shard:
    """The shard that one rank holds of one parameter of one layer.

    Args:
        name: The tensor's name, with its layer filled in: the same on every rank.
        param: Its declaration.
        box: [start, stop) of each of its axes; that of a padded axis may run past its size.
    """

    name: str
    param: Param
    box: Box

    @property
    def sizes(self) -> Sizes:
        return {axis: stop - start for axis, (start, stop) in self.box.items()}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.param.sentence.shape(self.sizes)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.param.sentence.pieces(self.sizes)

    def piece(self, label: str) -> Piece:
        return next(piece for piece in self.pieces if piece.label == label)


@dataclass(frozen=True)
class Layout:
    """A schema on a mesh.

    Args:
        schema: The parameters.
        mesh: Sizes of the mesh.
        layers: Layers of each virtual stage.
        split: The dimensions of the mesh that split an axis, for axes of :data:`~parallel.weights.schema.SPLIT`.
        placement: How virtual stages are placed, see :func:`~parallel.virtual_stages.virtual_stage`.

    Raises:
        ValueError: the mesh cannot split the model so; the message says all reasons.
    """

    schema: Schema
    mesh: MeshShape
    layers: tuple[int, ...]
    split: Split = field(default_factory=lambda: SPLIT)
    placement: Placement = "loop"

    def __post_init__(self) -> None:
        if self.split != SPLIT:
            if self.split.keys() - SPLIT or self.split.get("layer") != SPLIT["layer"]:
                raise ValueError(f"cannot split {dict(self.split)}: layers go over pp, and others are of {[*SPLIT]}")
            check_splits(self.schema.params, self.split)
        problems = split_problems(self.schema.sizes, self.mesh, self.split)
        total = self.schema.sizes.get("layer", 0)
        if sum(self.layers) != total:
            problems.append(
                f"layers per stage {self.layers} sum to {sum(self.layers)}, but the model has {total} layers"
            )
        if len(self.layers) % self.mesh.pp:
            problems.append(f"{len(self.layers)} virtual stages do not divide over pp={self.mesh.pp}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def chunks(self) -> int:
        return len(self.layers) // self.mesh.pp

    @cached_property
    def stage_of_layer(self) -> tuple[int, ...]:
        return tuple(self._stage_of(virtual) for virtual, count in enumerate(self.layers) for _ in range(count))

    @property
    def last_stage(self) -> int:
        """The stage that has the end of the model."""
        return self._stage_of(len(self.layers) - 1)

    def virtual_stages(self, stage: int) -> list[int]:
        """Return the virtual stages that the chunks of a stage are."""
        return [virtual_stage(stage, chunk, self.mesh.pp, self.placement) for chunk in range(self.chunks)]

    def _stage_of(self, virtual: int) -> int:
        return stage_of(virtual, self.mesh.pp, self.placement)

    def chunk_layers(self, stage: int, chunk: int) -> Sequence[int]:
        """Return the layers of one virtual stage."""
        virtual = virtual_stage(stage, chunk, self.mesh.pp, self.placement)
        start = sum(self.layers[:virtual])
        return range(start, start + self.layers[virtual])

    def stages(self, param: Param, index: Mapping[str, int]) -> tuple[int, ...]:
        """Return the pipeline stages that hold a parameter of the layer in ``index``, of all that use it."""
        if "layer" in param.named_axes:
            return tuple(sorted({self.stage_of_layer[layer] for layer in param.users(index["layer"])}))
        if param.at == "layers":
            return tuple(sorted({*self.stage_of_layer}))
        ends = {"first": 0, "last": self.last_stage}
        return tuple(sorted({ends[end] for end in param.at.split()}))

    def box(self, axis: str, place: Coordinates) -> tuple[int, int]:
        """Return [start, stop) of an axis at a place; layers are dealt out by stage instead, see :meth:`stages`."""
        dims = self.split.get(axis, ())
        if not dims or axis == "layer":
            return 0, self.schema.sizes[axis]
        return self._split(axis, [getattr(place, dim) for dim in dims])

    def shards(self, place: Coordinates) -> Iterator[Shard]:
        """Yield the shards that a place holds, in the order of declaration, layer by layer."""
        for param in self.schema.params:
            boxes = {axis: self.box(axis, place) for axis in sorted({*param.sentence.axes, *param.named_axes})}
            for index in self.schema.indices(param, param.name):
                here = all(boxes[axis][0] <= i < boxes[axis][1] for axis, i in index.items())
                if here and place.pp in self.stages(param, index):
                    box = boxes | {axis: (i, i + 1) for axis, i in index.items()}
                    yield Shard(param.name.format(**index), param, MappingProxyType(box))

    def replicas(self, shard: Shard, label: str) -> tuple[int, ...]:
        """Return the ranks that hold the same box of a piece as ``shard``.

        One answer to four questions: who sums its gradient, how it counts in the norm (once: 1/len each), who writes
        it, who shares its optimizer state.
        """
        index = {axis: shard.box[axis][0] for axis in shard.param.named_axes}
        fixed: dict[str, Sequence[int]] = {"pp": self.stages(shard.param, index)}
        together: dict[tuple[str, ...], list[str]] = {}
        for axis in sorted({*shard.param.sentence.piece_axes(label), *shard.param.named_axes}):
            if (dims := self.split.get(axis, ())) and axis != "layer":
                together.setdefault(dims, []).append(axis)
        for dims, axes in together.items():
            # All of one dimension may hold the same; a product of dimensions gives each of its parts another box.
            places = itertools.product(*(range(self.mesh[dim]) for dim in dims))
            alike = [at for at in places if all(self._split(a, at) == self._held(shard, a) for a in axes)]
            fixed |= {dim: sorted({at[i] for at in alike}) for i, dim in enumerate(dims)}
        return self.mesh.ranks(**fixed)

    def replica_sets(self) -> set[tuple[int, ...]]:
        """Return every set of ranks that hold the same box of some piece, over the whole mesh."""
        sets = set()
        for stage, ep, tp in itertools.product(range(self.mesh.pp), range(self.mesh.ep), range(self.mesh.tp)):
            seen = set()  # all layers of a stage are alike, but for those that share a tensor with others
            for shard in self.shards(Coordinates(pp=stage, ep=ep, tp=tp)):
                if shard.param.also or shard.param.name not in seen:
                    seen.add(shard.param.name)
                    sets |= {self.replicas(shard, label) for label in shard.param.sentence.labels}
        return sets

    def _split(self, axis: str, at: Sequence[int]) -> tuple[int, int]:
        """Return [start, stop) of an axis at some coordinates along the dimensions that split it."""
        dims, part = self.split[axis], 0
        for dim, coordinate in zip(dims, at, strict=True):
            part = part * self.mesh[dim] + coordinate
        return split_axis(axis, self.schema.sizes[axis], self.mesh.size(dims), part, dims)

    def _held(self, shard: Shard, axis: str) -> tuple[int, int]:
        """Return the bounds that the holder of a shard has of an axis: of one in the name all of its range."""
        first, stop = shard.box[axis]
        if axis not in shard.param.named_axes:
            return first, stop
        boxes = (self._split(axis, at) for at in itertools.product(*(range(self.mesh[d]) for d in self.split[axis])))
        return next(box for box in boxes if box[0] <= first < box[1])
