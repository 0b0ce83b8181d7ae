"""The shards that a rank updates, and the flat buckets in which gradients are accumulated and summed.

span     a parameter, or those of its pieces that have the same replicas: the unit of ownership
flat     spans one after the other in flat memory, of which each of a group's n ranks owns a shard of 1/n
bucket   the gradients of a flat: the partial sums of this rank, and the sum of its shard over all replicas
part     what this rank updates: a span, or a stretch of its shard
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor, nn

from megacore.parallel.collectives import Pending, start_all_reduce, start_reduce_scatter_
from megacore.parallel.gradients import rounding
from megacore.parallel.mesh import Group
from megacore.parallel.parameters import Parameters, WeightGradient, view
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.pattern import Piece


class OwnedShard(Protocol):
    """Elements that this rank updates: they have one gradient, and one optimizer state."""

    @property
    def data(self) -> Tensor:
        """Their values, in the memory of the parameters."""
        ...

    @property
    def gradient(self) -> Tensor:
        """Their gradient, in the shape of the values, once it is summed."""
        ...

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to them."""
        ...

    @property
    def is_matrix(self) -> bool:
        """Whether they are of matrices that are updated as wholes."""
        ...


class Elements(Protocol):
    """The values somebody has for the elements of a part: a tensor, or what is brought when it is asked for.

    ``[...]`` is all of it in the shape of the part's values; flat parts also give and take slices.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, where: slice | EllipsisType, /) -> Tensor: ...

    def __setitem__(self, where: slice | EllipsisType, values: Tensor, /) -> None: ...


Take = Callable[[Tensor], Tensor]
"""A function that takes a part of a tensor of a parameter's shape."""


def all_of_it(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class Span:
    """The unit of ownership: the part of a parameter that has one set of replicas, the whole of it if it can be.

    Args:
        name: The parameter's name.
        parameter: The live tensor.
        piece: The view of the span, None for the whole parameter.
        replicas: Ranks that hold the same elements.
        decays: Whether weight decay applies.
        is_matrix: Whether it is of matrices that are updated as wholes.
    """

    name: str
    parameter: nn.Parameter
    piece: Piece | None
    replicas: tuple[int, ...]
    decays: bool
    is_matrix: bool

    @property
    def numel(self) -> int:
        return self.piece.numel if self.piece else self.parameter.numel()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.piece.shape if self.piece else tuple(self.parameter.shape)

    @property
    def data(self) -> Tensor:
        """The span's part of the parameter, sharing its memory."""
        return view(self.parameter, self.piece) if self.piece else self.parameter.detach()

    def of(self, tensor: Tensor) -> Tensor:
        """Return the span's part of a tensor that is stored like the parameter."""
        return view(tensor.contiguous(), self.piece) if self.piece else tensor.detach()


@dataclass(frozen=True, eq=False)
class WholeSpan:
    """The :class:`OwnedShard` that is a span, in the parameter's own memory.

    Args:
        span: The span that is updated.
        summed: Its gradient in a bucket; None where it stays where autograd puts it.
    """

    span: Span
    summed: Tensor | None = None

    @property
    def data(self) -> Tensor:
        return self.span.data

    @property
    def gradient(self) -> Tensor:
        """The summed gradient; zeros where nothing flowed."""
        if self.summed is not None:
            return self.summed
        parameter = self.span.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return self.span.of(parameter.grad)

    @property
    def decays(self) -> bool:
        return self.span.decays

    @property
    def is_matrix(self) -> bool:
        return self.span.is_matrix

    @property
    def parts(self) -> Sequence[OwnedShard]:
        return [self]

    def overlaps(self) -> Iterator[tuple[OwnedShard, slice, slice]]:
        """Yield each part that this rank owns of the span, with the place in the part and in the span."""
        yield self, slice(0, self.span.numel), slice(0, self.span.numel)

    def collect(self, of: Callable[[OwnedShard], Elements]) -> Tensor:
        """Return the values of the span's elements, in its shape."""
        return of(self)[...]

    def spread(self, of: Callable[[OwnedShard], Elements], values: Tensor) -> None:
        """Fill the span's elements from a tensor of its shape, the inverse of :meth:`collect`."""
        of(self)[...] = values


# -- flat memory


@dataclass(frozen=True, eq=False)
class FlatSlice:
    """A span, and where it begins in flat memory."""

    span: Span
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.span.numel

    def of(self, flat: Tensor) -> Tensor:
        """flat: [numel] -> the span's elements, in its shape."""
        return flat[self.start : self.stop].view(self.span.shape)


class FlatLayout:
    """Spans one after the other in ``numel`` elements, of which each rank of a group owns ``numel / group.size``.

    It owns no memory: gradients and values are laid out alike by it.

    Args:
        spans: The spans that lie in it.
        group: The ranks that own a shard each.
        aligned: Spans and shards begin at multiples of so many elements.
    """

    def __init__(self, spans: Iterable[Span], group: Group, aligned: int = 1) -> None:
        self.group, self.places, self.used = group, list[FlatSlice](), 0
        for span in spans:
            self.places.append(FlatSlice(span, self.used))
            self.used = -(-self.places[-1].stop // aligned) * aligned
        whole = aligned * group.size
        self.numel = -(-self.used // whole) * whole

    @property
    def parameters(self) -> set[Tensor]:
        return {place.span.parameter for place in self.places}

    def bounds(self, index: int) -> tuple[int, int]:
        """Return [start, stop) of the shard of a rank of the group."""
        size = self.numel // self.group.size
        return index * size, (index + 1) * size

    def shard(self, flat: Tensor) -> Tensor:
        """flat: [numel] -> [numel / group.size], this rank's shard."""
        return flat.chunk(self.group.size)[self.group.index]


class Bucket:
    """The gradients of a flat, which are summed in one message.

    It owns ``full``: [numel], the partial sums of this rank, and ``gradient``: [numel / group.size], the sum of its
    shard. A round ends with the reduce-scatter of ``full`` over the group. Where the bucket ``keeps``, a step has one
    round, and ``gradient`` is the shard of ``full``. Elsewhere each microbatch has a round for each chunk that uses the
    parameters; ``full`` is there from the first gradient of a round to its end, and ``gradient`` sums the rounds. When
    all are summed, it is all-reduced over ``across``.

    Where 8 bits are sent, ``residual``: [numel] is what earlier steps have left unsent, which goes with the sums of
    this one. What that leaves is in ``full`` until :meth:`keep_residual`, and ``gradient`` in memory of its own.

    Args:
        flat: The layout of the bucket.
        across: The ranks that own the same shard.
        uses: {parameter: how many chunks of this rank use it}; all alike where the bucket does not keep.
        dtype: The dtype of the gradients.
        sent: The dtype that they are rounded to where they are sent; int8 only where the bucket keeps.
        keeps: Whether they stay from microbatch to microbatch.
        late: Whether the all-reduce waits for the end of the step: the other end of the pipeline has its gradients when
            what this one sends last has gone all the way. A sum that waited for it meanwhile would hold the device, for
            which the host may wait.
    """

    def __init__(
        self,
        flat: FlatLayout,
        across: Group,
        uses: Mapping[nn.Parameter, int],
        dtype: torch.dtype,
        sent: torch.dtype,
        keeps: bool,
        late: bool,
    ) -> None:
        self.flat, self.group, self.across, self.keeps, self.late = flat, flat.group, across, keeps, late
        self._sent = sent
        self._dtype, self._device = dtype, flat.places[0].span.parameter.device
        self._uses = [uses[place.span.parameter] for place in flat.places]
        self.full = self._zeros(flat.numel) if keeps else None
        self.residual = self._zeros(flat.numel) if sent == torch.int8 else None
        self.gradient = (
            self._zeros(flat.numel // self.group.size)
            if self.full is None or self.residual is not None
            else flat.shard(self.full)
        )
        self.begin(0)

    def begin(self, microbatches: int) -> None:
        """Start a step of so many microbatches."""
        self.rounds = min(microbatches, 1) if self.keeps else self._uses[0] * microbatches
        self.ended = self.summed = 0
        self._in_a_round = [uses * microbatches if self.keeps else 1 for uses in self._uses]
        self._came, self._filled = [0] * len(self._uses), set[int]()
        self._waiting = len(self._uses)

    def add(self, number: int, gradient: Tensor | WeightGradient | None) -> None:
        """Add a gradient of the parameter at ``flat.places[number]``, in its shape; None stands for one that does not
        come.

        Raises:
            RuntimeError: the step has had all of its gradients.
        """
        place = self.flat.places[number]
        if self.ended == self.rounds:
            raise RuntimeError(
                f"a gradient of {place.span.name} came after those of all microbatches of the step: "
                "begin() is told how many there are"
            )
        if gradient is not None:
            if self.full is None:
                self.full = torch.empty(self.flat.numel, dtype=self._dtype, device=self._device)
            if isinstance(gradient, WeightGradient):
                gradient.add_to(place.of(self.full), number not in self._filled)
            elif number in self._filled:
                place.of(self.full).add_(place.span.of(gradient))
            else:
                place.of(self.full).copy_(place.span.of(gradient))
            self._filled.add(number)
        self._came[number] += 1
        self._waiting -= self._came[number] == (self.ended + 1) * self._in_a_round[number]

    @property
    def complete(self) -> bool:
        """Whether all gradients of the round have come."""
        return not self._waiting

    def end_round(self) -> Pending:
        """Start the reduce-scatter of the round; gradients that have not come are zero."""
        full = self._zeros(self.flat.numel) if self.full is None else self.full
        stop = 0
        for number in sorted(self._filled):
            place = self.flat.places[number]
            if stop < place.start:
                full[stop : place.start].zero_()
            stop = place.stop
        if stop < len(full):
            full[stop:].zero_()
        self.ended += 1
        self._filled = set()
        # Gradients of the next round may have come before the last one of this.
        ends = [(self.ended + 1) * count for count in self._in_a_round]
        self._waiting = sum(came < end for came, end in zip(self._came, ends, strict=True))
        if not self.keeps:
            self.full = None
        if self.residual is not None:
            return rounding.start_reduce_scatter(full.add_(self.residual), self.group)
        return start_reduce_scatter_(self._as_sent(full, self.group), self.group)

    def take(self, pending: Pending) -> None:
        """Wait for a reduce-scatter, and add what it gives to the gradient."""
        found = pending.wait()
        if not self.keeps or found.dtype != self._dtype or self.residual is not None:
            _ = self.gradient.add_(found) if self.summed else self.gradient.copy_(found)
        self.summed += 1

    def start_all_reduce(self) -> Pending:
        """Start the sum of the gradient over those who own the same shard."""
        if self.residual is not None and self.full is not None:
            return rounding.start_all_reduce(self.gradient, self.flat.shard(self.full), self.across)
        gradient, sent = self.gradient, self._as_sent(self.gradient, self.across)
        pending = start_all_reduce(sent, self.across)
        return pending if sent is gradient else pending.then(lambda: gradient.copy_(sent))

    def keep_residual(self, go: Tensor) -> None:
        """Keep what the step has left unsent for the next one, if ``go``, a bool scalar on the device, says that there
        was an update."""
        if self.residual is not None and self.full is not None:
            torch.where(go, self.full, self.residual, out=self.residual)

    def _as_sent(self, x: Tensor, group: Group) -> Tensor:
        return x if group.size == 1 else x.to(self._sent)

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self._dtype, device=self._device)


# -- which spans there are, and which of them share a bucket


def spans_of(parameters: Parameters, trained: bool, matrices: bool = False) -> list[Span]:
    """Return the spans of all parameters that are trained, or of all others, in the order of the parameters; buffers
    are neither. Where ``matrices`` are updated as wholes they know that they are of some."""
    named = ((name, p) for name, p in parameters.items() if not parameters.shards[name].param.buffer)
    return [span for name, p in named if p.requires_grad == trained for span in _spans(parameters, name, matrices)]


def _spans(parameters: Parameters, name: str, matrices: bool) -> list[Span]:
    """Return one span, or one for each piece where their replicas differ (kv heads shared by ranks)."""
    shard = parameters.shards[name]
    parameter, kind = parameters[name], (shard.param.decays, matrices and shard.param.is_matrix)
    pieces = parameters.pieces_of(name)
    replicas = {piece.label: parameters.layout.replicas(shard, piece.label) for piece in pieces}
    if len(set(replicas.values())) == 1:
        return [Span(name, parameter, None, next(iter(replicas.values())), *kind)]
    return [Span(name, parameter, p, replicas[p.label], *kind) for p in pieces]


def crosses_stages(shape: MeshShape, ranks: Iterable[int]) -> bool:
    """Return whether some ranks belong to several stages of a pipeline: the ends, which hold a tied table each."""
    return len({shape.place(rank).pp for rank in ranks}) > 1


def fill(
    parameters: Parameters, spans: Iterable[Span], key: Callable[[Span], Hashable], most: float
) -> list[list[Span]]:
    """Return the spans of each bucket: those with the same key, at most so many elements of more than one.

    Buckets are in the order in which the backward completes them; those that cross stages come last.
    """

    def depth(span: Span) -> float:
        """Return the depth in the model at which the parameter is used for the first time."""
        shard = parameters.shards[span.name]
        if "layer" in shard.box:
            return shard.box["layer"][0]
        return float("inf") if shard.param.at == "last" else -1

    order = sorted(spans, key=depth, reverse=True)
    filling, full = dict[Hashable, list[Span]](), list[list[Span]]()
    for span in order:
        filled = filling.setdefault(key(span), [])
        if filled and sum(s.numel for s in filled) + span.numel > most:
            full.append(filling.pop(key(span)))
            filled = filling.setdefault(key(span), [])
        filled.append(span)
    position, shape = {span: i for i, span in enumerate(order)}, parameters.mesh.shape
    return sorted(
        [*full, *filling.values()],
        key=lambda spans: (crosses_stages(shape, spans[0].replicas), position[spans[-1]]),
    )


def on_gradient(parameter: Tensor, receive: Callable[[Tensor], None]) -> None:
    """Have a method called whenever autograd is done with the gradient of a parameter, for as long as its object lives.

    Python's garbage collector cannot see torch's hooks: one that held the object would keep it, the model and the
    process groups for good.
    """
    weak = weakref.WeakMethod(receive)

    def received(parameter: Tensor) -> None:
        method = weak()
        if method is not None:
            method(parameter)

    parameter.register_post_accumulate_grad_hook(received)
