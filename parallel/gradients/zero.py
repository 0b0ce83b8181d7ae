"""Parameters that are split over their replicas (ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054; its last rung as in
FSDP, Zhao et al. 2023, arXiv 2304.11277): flat memory, who owns which shard, and when it is gathered and resharded.

Up to the rung ``gradients`` parameters are gathered after the update, in the order of their use, and whoever uses them
waits for his own: the next forward runs beside it. On ``parameters`` a unit (an embedding, a block, a head) has its own
whole only while it is used, gathered while the unit before it computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megacore.parallel.collectives import Pending, broadcast_, start_all_gather_
from megacore.parallel.gradients.buckets import Elements, FlatLayout, FlatSlice, OwnedShard, Span
from megacore.parallel.gradients.narrow import NarrowWeights
from megacore.parallel.gradients.shard_stores import ShardStore
from megacore.parallel.mesh import Group
from megacore.parallel.parameters import CastWeight, view

# Elements: shards and spans begin on cache lines, whatever the dtype.
_ALIGNED = 64


@dataclass(frozen=True, eq=False)
class Stretch:
    """The :class:`~parallel.gradients.buckets.OwnedShard` [n] from element ``start`` of flat memory on, within this
    rank's shard; all of it decays or none, and is of matrices or not."""

    start: int
    data: Tensor
    summed: Tensor | None
    decays: bool
    is_matrix: bool

    @property
    def stop(self) -> int:
        return self.start + len(self.data)

    @property
    def gradient(self) -> Tensor:
        """The summed gradient: [n]."""
        assert self.summed is not None  # nobody asks for that of a frozen one
        return self.summed


class FlatParameters:
    """The values of spans, split over a group: parameters become views of ``values``: [numel].

    It owns ``values``, and ``own``: [numel / group.size], this rank's shard: a view of ``values`` where these stay,
    otherwise memory of its own, on the device or wherever ``store`` keeps it.

    Args:
        spans: The spans that lie in it; matrices come first, then what else decays.
        group: The ranks that own a shard each.
        reshards: Whether the whole parameters go when they have been used.
        store: The store that the shard lives in then.
    """

    def __init__(self, spans: Sequence[Span], group: Group, reshards: bool, store: ShardStore) -> None:
        self.flat = flat = FlatLayout(sorted(spans, key=_kind, reverse=True), group, _ALIGNED)
        self._store = store
        # A span that is only a piece of its parameter has no memory of its own in it: it is copied there.
        self._loose = any(place.span.piece is not None for place in flat.places)
        # What is loose may share its memory with a piece that goes.
        self.reshards = reshards and (group.size > 1 or self._loose or store.away)
        parameter = flat.places[0].span.parameter
        hollow = not parameter.untyped_storage().size()
        self.values = torch.zeros(flat.numel, dtype=parameter.dtype, device=parameter.device)
        if not hollow:
            for place in flat.places:
                place.of(self.values).copy_(place.span.data)
        self.own, self.there = flat.shard(self.values), True
        if self._loose or self.reshards:
            self.own = store.keep(self.own)
        if not self._loose:
            for place in flat.places:
                # Not in place: what autograd has saved of a parameter must not seem changed when it is gathered again.
                place.span.parameter.data = place.of(self.values)
        if self._loose or (hollow and self.reshards):
            _free(self.values)
        self._gathering: Pending | None = None
        self._uses = set[bool]()
        """Who needs them whole: a forward (False), a backward (True), or one of each that run beside each other."""
        self._sent, self._whole = self.own, self.values
        self._narrow: NarrowWeights | None = None
        self._casts: Mapping[Tensor, CastWeight] = {}
        self._narrow_views: list[Tensor] = []

    @property
    def narrows(self) -> bool:
        """Whether narrow numbers may be gathered in place of the values, of spans that alone are multiplied by them."""
        return self.reshards and not self._loose and not self._store.away

    def narrow(self, casts: Mapping[Tensor, CastWeight], weights: NarrowWeights) -> None:
        """Gather narrow numbers from now on, and never the values: parameters stay hollow."""
        self._narrow, self._casts = weights, casts
        self._sent = torch.empty(self.own.shape, dtype=torch.uint8, device=self.own.device)
        self._whole = torch.empty(self.flat.numel, dtype=torch.uint8, device=self.own.device)
        # No views to autograd: what it has saved must not seem changed when it is gathered again.
        dtypes = [casts[place.span.parameter].dtype for place in self.flat.places]
        each = zip(self.flat.places, dtypes, strict=True)
        self._narrow_views = [place.of(self._whole).view(dtype).data for place, dtype in each]
        _free(self._whole)
        weights.cast_slices(self.flat.parameters, self._cast)

    def _cast(self, largest: Mapping[Tensor, Tensor]) -> None:
        lo, hi = self.flat.bounds(self.flat.group.index)
        for place, whole in zip(self.flat.places, self._narrow_views, strict=True):
            weight, start, stop = place.span.parameter, max(place.start, lo), min(place.stop, hi)
            cast = self._casts[weight]
            if start < stop:
                here = slice(start - lo, stop - lo)
                cast.fill(self._sent[here].view(cast.dtype), self.own[here], start - place.start, largest[weight])
            cast.give(whole, largest[weight])

    def parts(self, gradient: Tensor | None) -> list[Stretch]:
        """Return the shards that this rank updates; gradient: [numel / group.size] of its shard, None if frozen."""
        lo, hi = self.flat.bounds(self.flat.group.index)
        parts, stop = list[Stretch](), self.flat.numel
        for kind, alike in itertools.groupby(reversed(self.flat.places), key=lambda place: _kind(place.span)):
            begin = list(alike)[-1].start
            start, end = max(begin, lo), min(stop, hi)
            stop = begin
            if start < end:
                where = slice(start - lo, end - lo)
                parts.append(Stretch(start, self.own[where], None if gradient is None else gradient[where], *kind))
        return parts[::-1]

    def gather(self, backward: bool = False) -> None:
        """Start to gather the parameters for a forward or a backward, if they are not there and not on their way."""
        self._uses.add(backward)
        if not self.there and self._gathering is None:
            self.gather_anew()

    def gather_anew(self) -> None:
        """Start to gather the parameters: the shards have changed."""
        if self._narrow is not None:
            self._narrow.measure()
        if self._loose or self.reshards:
            _allocate(self._whole)
            self._gathering = self._store.gather(self._sent, self._whole, self.flat.group)
        else:
            self._gathering = start_all_gather_(self.values, self.flat.group)

    def wait(self) -> None:
        """Wait for parameters that are on their way."""
        if self._gathering is None:
            return
        self._gathering.wait()
        self._gathering, self.there = None, True
        if self._loose:
            for place in self.flat.places:
                piece, parameter = place.span.piece, place.span.parameter.data
                _allocate(parameter)
                assert piece is not None
                view(parameter, piece).copy_(place.of(self.values))
            _free(self.values)

    def keep(self) -> None:
        """Have the backward that comes next find what a forward needed."""
        self._uses.discard(False)

    def reshard(self, backward: bool) -> None:
        """Free all but this rank's shard, unless what runs beside this forward or backward needs the parameters."""
        self._uses.discard(backward)
        if self.reshards and not self._uses:
            self.wait()
            self.there = False
            for tensor in [p.data for p in self.flat.parameters] if self._loose else [self._whole]:
                _free(tensor)

    def updated(self) -> None:
        """Gather the shards, which have changed, or wait until somebody needs them."""
        if self.reshards:
            self.reshard(backward=True)
        else:
            self.wait()
            self.gather_anew()


@dataclass(frozen=True, eq=False)
class SplitSpan:
    """A span of which each rank of a group updates what lies in its shard.

    Args:
        place: Its place there.
        values: The flat parameters that it lies in.
        parts: All of this rank's shard.
    """

    place: FlatSlice
    values: FlatParameters
    parts: Sequence[Stretch]

    @property
    def span(self) -> Span:
        return self.place.span

    def collect(self, of: Callable[[OwnedShard], Elements]) -> Tensor:
        """Return the values of the span's elements, in its shape; all ranks of the group do so."""
        place, group = self.place, self.values.flat.group
        flat = torch.empty(place.span.numel, dtype=of(self.parts[0]).dtype, device=place.span.parameter.device)
        for part, theirs, mine in self.overlaps():
            flat[mine] = of(part)[theirs]
        for owner in range(group.size):
            start, stop = (min(max(at, place.start), place.stop) for at in self.values.flat.bounds(owner))
            if start < stop:
                broadcast_(flat[start - place.start : stop - place.start], group, owner)
        return flat.view(place.span.shape)

    def spread(self, of: Callable[[OwnedShard], Elements], values: Tensor) -> None:
        """Fill this rank's share of the span from a tensor of its shape, the inverse of :meth:`collect`."""
        flat = values.reshape(-1)
        for part, theirs, mine in self.overlaps():
            of(part)[theirs] = flat[mine]

    def overlaps(self) -> Iterator[tuple[Stretch, slice, slice]]:
        """Yield each part that this rank owns of the span, with the place in the part and in the span."""
        for part in self.parts:
            start, stop = max(self.place.start, part.start), min(self.place.stop, part.stop)
            if start < stop:
                here = slice(start - self.place.start, stop - self.place.start)
                yield part, slice(start - part.start, stop - part.start), here


def _kind(span: Span) -> tuple[bool, bool]:
    return span.decays, span.is_matrix


# -- units


@dataclass(eq=False)
class FSDPUnit:
    """A module, and the parameters that it needs whole while it computes.

    Args:
        trained, frozen: The flat parameters that it uses.
        stays: Whether its backward follows its forward, so that there is no use in resharding between them.
    """

    module: nn.Module
    trained: Sequence[FlatParameters]
    frozen: Sequence[FlatParameters]
    stays: bool = False

    @property
    def used(self) -> Sequence[FlatParameters]:
        return [*self.trained, *self.frozen]


def modules_of(chunk: nn.Module, held: Set[nn.Parameter]) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield the modules, with their parameters, that a chunk runs one after the other: its children in their order and,
    of lists, theirs.

    Of the parameters, those that are ``held`` count. Some of its own make the chunk itself a unit.
    """
    children = list[nn.Module]()
    for child in chunk.children():
        children += child.children() if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    own = [p for p in chunk.parameters(recurse=False) if p in held]
    if own:
        yield chunk, own
    for child in children:
        if used := [p for p in child.parameters() if p in held]:
            yield child, used


def used_by(parameters: Iterable[Tensor], values: Iterable[FlatParameters]) -> list[FlatParameters]:
    """Return the flat parameters in which some of these parameters lie."""
    return [each for each in values if not each.flat.parameters.isdisjoint(parameters)]


def gather_in_turn(units: Sequence[FSDPUnit], reshards: bool) -> None:
    """Have the units of a chunk wait for their parameters before they run, each of which is gathered beside the unit
    before it, and reshard them afterwards if they do."""
    for i, unit in enumerate(units):
        _hook(unit, units[max(0, i - 1) : i], units[i + 1 : i + 2], reshards)


def _hook(unit: FSDPUnit, before: Sequence[FSDPUnit], after: Sequence[FSDPUnit], reshards: bool) -> None:
    def before_forward(module: nn.Module, inputs: object) -> None:
        again = _in_backward()
        _ready(unit, [] if again else after, again)

    def after_forward(module: nn.Module, inputs: object, output: object) -> None:
        if _in_backward():
            return
        stays = False
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(before_backward)
            stays = unit.stays
        if stays:
            for values in unit.used:
                values.keep()
        else:
            _reshard(unit.used, after, backward=False)

    def before_backward(gradient: Tensor) -> None:
        # The gradient of its output is there, so the units after it are done.
        for each in after:
            _reshard(each.frozen, [unit], backward=True)
        _ready(unit, before, backward=True)

    unit.module.register_forward_pre_hook(before_forward)
    if reshards:
        unit.module.register_forward_hook(after_forward)


def end_backward(units: Iterable[FSDPUnit]) -> None:
    """Reshard what is left of a chunk whose backward is over."""
    for unit in units:
        _reshard(unit.frozen, [], backward=True)


def _in_backward() -> bool:
    """Return whether a backward runs here, of which any forward only computes again."""
    return bool(torch._C._current_graph_task_id() >= 0)


def _ready(unit: FSDPUnit, ahead: Sequence[FSDPUnit], backward: bool) -> None:
    for each in (unit, *ahead):
        for values in each.used:
            values.gather(backward)
    for values in unit.used:
        values.wait()


def _reshard(used: Iterable[FlatParameters], needing: Sequence[FSDPUnit], backward: bool) -> None:
    """Reshard parameters, but for those that some units need."""
    needed = {values for unit in needing for values in unit.used}
    for values in used:
        if values not in needed:
            values.reshard(backward)


def _free(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _allocate(tensor: Tensor) -> None:
    """Allocate memory for a tensor that fills its storage; what is in it does not count."""
    if not tensor.untyped_storage().size():
        tensor.untyped_storage().resize_(tensor.nbytes)
