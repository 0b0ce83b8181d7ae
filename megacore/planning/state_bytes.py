"""Bytes of parameters, gradients, masters and moments: sums over the shards that a layout gives a rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

from megacore.parallel.budgets import MATRIX_ELEMENTS
from megacore.parallel.enum_errors import ZeroShard
from megacore.parallel.rank_sets import matrix_dims
from megacore.parallel.weights.layout import Coordinates, Layout, Shard
from megacore.parallel.weights.schema import Param, Schema
from megacore.places import differ_in
from megacore.planning.costs import MatMul
from megacore.planning.setting import SHARDS, Setting, Widths


@dataclass(frozen=True)
class ParameterShare:
    """The share that a rank holds of one parameter, all its layers together, as far as the same ranks hold copies of
    it.

    Args:
        labels: Its pieces in this part.
        elements, trained: Their elements, and those of them that are trained; the others have values alone.
        tensors: The number of tensors that these are of, all alike: one for each layer.
        model_replicas: Ranks of one data parallel replica that hold the same.
        dims: Along which dimensions of the mesh these differ.
        stages: The stages of a pipeline that they are of.
    """

    param: Param
    labels: tuple[str, ...]
    elements: int
    trained: int
    tensors: int
    model_replicas: int
    dims: tuple[str, ...]
    stages: int

    def of(self, layers: Sequence[int], frozen: frozenset[str]) -> ParameterShare:
        """Return the share of those of some layers that have it, this being that of one; an end of the model has no
        layers."""
        name = self.param.name
        held = self.param.held_in(layers) if "layer" in self.param.named_axes else [0]
        trained = sum(name.format(layer=n) not in frozen for n in held) if frozen else len(held)
        return replace(
            self, elements=self.elements * len(held), trained=self.elements * trained, tensors=self.tensors * len(held)
        )


@dataclass(frozen=True)
class Shares:
    """The shares that a rank of each stage holds. Those of one stage differ in which elements, not in how many."""

    stages: tuple[tuple[ParameterShare, ...], ...]

    @classmethod
    def of(cls, setting: Setting) -> Shares:
        """Return the shares; those of one model on one layout are counted once."""
        layout = setting.layout
        key = setting.model, setting.tuning, layout.mesh, layout.layers, tuple(layout.split.items()), layout.placement
        if key not in _counted:
            if len(_counted) >= MOST_COUNTED:
                _counted.clear()
            _counted[key] = cls._count(setting)
        return _counted[key]

    @classmethod
    def _count(cls, setting: Setting) -> Shares:
        """Count the shares in one layer that has all that any layer has, and at both ends; dp and cp split none."""
        layout, pp, frozen = setting.layout, setting.layout.mesh.pp, setting.frozen
        params = {param.name: param for param in layout.schema.params}
        alike = tuple(replace(param, layers=None, also=(), hf="") for param in params.values())
        one_each = Schema(alike, {**layout.schema.sizes, "layer": 1})
        mesh = replace(layout.mesh, pp=min(pp, 2), dp=1, cp=1)
        bare = mesh.pp * min(layout.chunks, 2) - 1
        small = Layout(one_each, mesh, (1, *[0] * bare), layout.split, layout.placement)
        first, last = (
            [replace(part, param=params[part.param.name]) for part in _parts(small, Coordinates(pp=stage))]
            for stage in (0, mesh.pp - 1)
        )
        blocks = [part for part in first if "layer" in part.param.named_axes]
        ends = {stage: [part for part in own if part not in blocks] for stage, own in ((pp - 1, last), (0, first))}
        some = [frozenset(part.param.layers) for part in blocks if part.param.layers is not None]
        shares = any(part.param.also for part in blocks)
        if frozen:
            numbers = range(layout.schema.sizes["layer"])
            some += [frozenset(n for n in numbers if part.param.name.format(layer=n) in frozen) for part in blocks]
        stages, known = [], dict[object, tuple[ParameterShare, ...]]()
        for stage in range(pp):
            layers = [layer for chunk in range(layout.chunks) for layer in layout.chunk_layers(stage, chunk)]
            key = (
                stage if stage in ends or shares else None,
                len(layers),
                *(len(each.intersection(layers)) for each in some),
            )
            if key not in known:
                parts = [(part, layers) for part in (*ends.get(stage, ()), *blocks)]
                own = (part.of(some, frozen) for each in parts for part, some in _by_stages(layout, *each))
                known[key] = tuple(part for part in own if part.tensors)
            stages.append(known[key])
        return cls(tuple(stages))

    @cached_property
    def unlike(self) -> tuple[tuple[ParameterShare, ...], ...]:
        """The shares of the stages, those of several that are alike once."""
        return tuple({id(own): own for own in self.stages}.values())


MOST_COUNTED = 256
_counted: dict[object, Shares] = {}


def _parts(layout: Layout, place: Coordinates) -> tuple[ParameterShare, ...]:
    shards: dict[str, list[Shard]] = {}
    for shard in layout.shards(place):
        shards.setdefault(shard.param.name, []).append(shard)
    return tuple(part for alike in shards.values() for part in _by_replicas(layout, alike))


def _by_stages(
    layout: Layout, part: ParameterShare, layers: Sequence[int]
) -> Iterator[tuple[ParameterShare, Sequence[int]]]:
    """Yield a share of one layer and some layers of a stage; of what layers share, for each set of stages that hold it
    the share of one of them, and its layers."""
    if not part.param.also:
        yield part, layers
        return
    by_stages: dict[tuple[int, ...], list[int]] = {}
    for layer in part.param.held_in(layers):
        by_stages.setdefault(layout.stages(part.param, {"layer": layer}), []).append(layer)
    for stages, held in by_stages.items():
        replicas = part.model_replicas * len(stages)
        dims = ("pp", *part.dims) if len(stages) > 1 else part.dims
        yield replace(part, model_replicas=replicas, dims=dims, stages=len(stages)), held


def _by_replicas(layout: Layout, alike: list[Shard]) -> Iterator[ParameterShare]:
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    numel = {piece.label: piece.numel for piece in alike[0].pieces}
    for label in numel:
        by_ranks.setdefault(layout.replicas(alike[0], label), []).append(label)
    for ranks, labels in by_ranks.items():
        dims = differ_in(layout.mesh, ranks)
        elements = sum(numel[label] for label in labels) * len(alike)
        stages = len({layout.mesh.place(rank).pp for rank in ranks})
        yield ParameterShare(alike[0].param, tuple(labels), elements, elements, len(alike), len(ranks), dims, stages)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the training state on one rank; averages of the weights, and what an outer step needs,
    count with the moments."""

    parameters: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.masters + self.moments

    def device(self, setting: Setting) -> StateBytes:
        """Return the bytes on the device: those that are not offloaded."""
        parameters = 0 if setting.offload_parameters else self.parameters
        if setting.offload_optimizer == "none":
            return replace(self, parameters=parameters)
        return replace(self, parameters=parameters, masters=0, moments=0)

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*map(add, vars(self).values(), vars(other).values()))


NOTHING = StateBytes(0, 0, 0, 0)
BUFFER = 4
"""Bytes of an element of a buffer, which is fp32 in any run."""


def state_of(elements: int, ranks: int, widths: Widths, shard: ZeroShard) -> StateBytes:
    """Return the state of so many elements of which ``ranks`` ranks hold copies, and split what the rung says.

    Per element, with N ranks and ``ADAM_16``: 16, 4 + 12/N, 2 + 14/N, 16/N bytes (ZeRO 0 to 3).
    """
    rung = SHARDS.index(shard)
    own = -(-elements // ranks)
    gradients, parameters = (own if rung >= least else elements for least in (2, 3))
    states = own if rung >= 1 else elements
    return StateBytes(
        parameters * widths.parameter,
        gradients * widths.gradient,
        states * widths.master,
        states * (widths.moments + widths.average + widths.outer),
    )


def sharing(part: ParameterShare, setting: Setting) -> int:
    """Return the number of ranks that the state of a part is split over where it is (`parallel.rank_sets.divide`): all
    that hold copies, less HSDP's replicas and those that take steps alone, and less other stages of the pipeline."""
    mesh = setting.layout.mesh
    return part.model_replicas // part.stages * mesh.dp * mesh.cp // setting.replicas


def state(shares: Iterable[ParameterShare], setting: Setting) -> StateBytes:
    """Return the state of everything a rank holds, wherever it lies.

    Where pieces of one parameter have different owners, each rank that updates a slice of one has a copy of the slice.
    """
    shares, widths = list(shares), setting.widths
    pieces = Counter(part.param.name for part in shares)
    total, buffers, alone = NOTHING, 0, 0  # alone: the bytes of what has values and nothing else
    for part in shares:
        if part.param.buffer:  # every rank that has one has all of it
            buffers += part.elements
            continue
        ranks = sharing(part, setting)
        total += state_of(part.trained, ranks, setting.widths_of(part.param), setting.shard)
        if setting.feeds_back(part.model_replicas):  # what is left of all, and the sums in memory of their own
            own = part.trained if setting.shard == "none" else -(-part.trained // ranks)
            total += StateBytes(0, (part.trained + own) * widths.gradient, 0, 0)
        still = setting.bytes_of(part.param, part.elements - part.trained)
        alone += -(-still // ranks) if setting.shard == "parameters" else still
        if pieces[part.param.name] > 1 and setting.shard in ("optimizer", "gradients"):
            alone += widths.parameter * -(-part.trained // ranks)
    return total + StateBytes(BUFFER * buffers + alone, 0, 0, 0)


def cast(part: ParameterShare, setting: Setting, stage: int) -> int:
    """Return the elements of a part on a stage whose products multiply fp8 that is made once a step: matrices of
    linears and experts, but for those of the first and the last layer (`Model.use_fp8`) and adapters."""
    param, layout = part.param, setting.layout
    if not setting.fp8 or not param.is_matrix or "layer" not in param.named_axes:
        return 0
    if "rank" in param.sentence.axes:
        return 0
    layers = [layer for chunk in range(layout.chunks) for layer in layout.chunk_layers(stage, chunk)]
    held = param.used_in(layers)
    inner = sum(0 < layer < layout.schema.sizes["layer"] - 1 for layer in held)
    return part.elements * inner // max(1, len(held))


def casts(shares: Iterable[ParameterShare], setting: Setting, stage: int) -> Iterator[tuple[int, int]]:
    """Yield the elements of each part that :func:`cast` counts, with the number of ranks that have slices of it; 0 of
    pieces of a weight that different ranks update and of slices in host memory, which are cast for each product."""
    shares = list(shares)
    pieces, split = Counter(part.param.name for part in shares), setting.shard == "parameters"
    for part in shares:
        ranks = sharing(part, setting) if split else 1
        each = ranks > 1 and (setting.offload_parameters or pieces[part.param.name] > 1)
        yield cast(part, setting, stage), 0 if each else ranks


def cast_bytes(shares: Iterable[ParameterShare], setting: Setting, stage: int) -> int:
    """Return the bytes of :func:`casts`: of whole weights, on a GPU a transposed copy too; of slices, that of one."""
    copies = 1 if setting.device == "cpu" else 2
    return sum(
        -(-elements // ranks) * (1 if ranks > 1 else copies)
        for elements, ranks in casts(shares, setting, stage)
        if ranks
    )


def updated(shares: Iterable[ParameterShare], setting: Setting) -> StateBytes:
    """Return :func:`state` of what is trained alone."""
    return state((replace(part, elements=part.trained) for part in shares), setting)


# -- matrices that are updated as wholes (`parallel.gradients.matrices`)


@dataclass(frozen=True)
class MatrixGroup:
    """The matrices that the ranks along some dimensions of the mesh share out.

    Args:
        ranks: Their number.
        owned: The elements that a rank updates.
        whole: The elements of all of the matrices.
        largest: Those of the matrices of one tensor, or of one expert of it.
        products: {a product of matrices: how often all ranks together compute it in a step}.
    """

    dims: tuple[str, ...]
    ranks: int
    owned: int
    whole: int
    largest: int
    products: Mapping[MatMul, int]

    @property
    def owners(self) -> int:
        """The ranks that together have each element once."""
        return max(1, round(self.whole / self.owned))

    @property
    def rounds(self) -> int:
        return -(-self.owned // MATRIX_ELEMENTS)

    @property
    def at_once(self) -> int:
        """The elements that a rank has on their way in a round: of its matrices as they came, whole, and three times in
        a product of them, and of all that comes back."""
        return 5 * max(self.largest, self.whole // (self.ranks * self.rounds)) + min(self.owned, MATRIX_ELEMENTS)


def matrix_groups(setting: Setting, shares: Sequence[ParameterShare]) -> Iterator[MatrixGroup]:
    """Yield the groups of a rank that has some shares; none where everything is updated element by element."""
    layout, sizes = setting.layout, setting.layout.schema.sizes
    by_dims = dict[tuple[str, ...], list[ParameterShare]]()
    for part in shares if setting.muon_steps else ():
        if part.param.is_matrix and part.trained:
            by_dims.setdefault(matrix_dims(part.param, layout.split), []).append(part)
    for dims, parts in by_dims.items():
        owned = sum(-(-part.trained // (1 if setting.shard == "none" else sharing(part, setting))) for part in parts)
        products, whole, largest = Counter[MatMul](), 0, 0
        for part in {part.param.name: part for part in parts}.values():
            spread = (dim for axis in part.param.leading for dim in layout.split.get(axis, ()))
            stacked, ranks = math.prod(sizes[axis] for axis in part.param.leading), layout.mesh.size([*spread])
            number = part.tensors * part.trained // part.elements * stacked // ranks
            shapes = [sorted(pattern.shape(sizes)[-2:]) for pattern in part.param.matrices.values()]
            for short, long in shapes:
                for product in (MatMul(short, short, long), MatMul(short, short, short), MatMul(short, long, short)):
                    products[product] += setting.muon_steps * number
            own = sum(short * long for short, long in shapes)
            whole, largest = whole + number * own, max(largest, own)
        yield MatrixGroup(dims, layout.mesh.size(dims), owned, whole, largest, products)
