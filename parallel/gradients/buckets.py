"""Summing gradients: ranks that hold the same box of a piece sum its gradient, and nothing else is ever needed.

Gradients are accumulated in flat buckets (fp32 by default), one bucket for pieces with the same replicas, and a bucket
is all-reduced beside the rest of the backward as soon as its last gradient of the step is there. Every reduction is a
sum: the loss has been divided by the global number of counted tokens before. A gradient that nobody shares and that
needs no wider type stays where autograd puts it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor, nn

from parallel.collectives import Pending, all_reduce_, start_all_reduce
from parallel.layout import MeshShape
from parallel.mesh import Group, Mesh
from parallel.parameters import Parameters, view
from parallel.pattern import Piece


class Part(Protocol):
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


class Elements(Protocol):
    """What somebody has for the elements of a part: a tensor, or what is brought when it is asked for.

    ``[...]`` is all of it in the shape of the part's values; flat parts also give and take slices.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, where: slice | EllipsisType, /) -> Tensor: ...

    def __setitem__(self, where: slice | EllipsisType, values: Tensor, /) -> None: ...


Take = Callable[[Tensor], Tensor]
"""What somebody wants of a tensor of a parameter's shape."""


def all_of_it(tensor: Tensor) -> Tensor:
    return tensor


class Sharing(Protocol):
    """How ranks that hold the same elements share out their gradients and their optimizer state."""

    @property
    def parameters(self) -> Parameters:
        """What the rank holds."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """In which gradients are accumulated and summed."""
        ...

    @property
    def spans(self) -> Sequence[Span]:
        """Of all parameters that are trained."""
        ...

    @property
    def parts(self) -> Sequence[Part]:
        """What this rank updates."""
        ...

    def begin(self, microbatches: int) -> None:
        """Start a step of so many microbatches; the gradients of the last step are forgotten."""
        ...

    def finish(self) -> None:
        """Wait until every part's gradient is summed; where none came it is zero."""
        ...

    def norm(self) -> Tensor:
        """The norm of the whole model's gradient, a scalar that is the same on every rank; fp32 at least."""
        ...

    def updated(self) -> None:
        """The values of the parts have changed: tell those who use them."""
        ...

    def parts_of(self, name: str) -> Sequence[Part]:
        """This rank's parts in the buckets that hold a parameter; all have state of the same dtypes."""
        ...

    def read(self, name: str, of: Callable[[Part], Elements], host: Tensor | None, take: Take = all_of_it) -> None:
        """Put together what parts have for a parameter, in its shape; all ranks do so for all names in one order.

        Args:
            name: Of the parameter.
            of: What a part has.
            host: Where it goes; None where it is not wanted.
            take: What of it goes there.
        """
        ...

    def write(self, name: str, of: Callable[[Part], Elements], host: Tensor) -> None:
        """The other way round: fill what this rank's parts have from a tensor of the parameter's shape."""
        ...

    def read_weight(self, name: str, host: Tensor | None, take: Take = all_of_it) -> None:
        """As :meth:`read`, the parameter itself."""
        ...

    def fill(self, name: str, host: Tensor) -> None:
        """Fill a parameter from a tensor of its shape, of any float dtype."""
        ...


@dataclass(eq=False)
class Span:
    """The unit of ownership: the part of a parameter that has one set of replicas, the whole of it if it can be.

    Args:
        name: The parameter's name.
        labels: Its pieces in this span.
        parameter: The live tensor.
        piece: The view of the span, None for the whole parameter.
        replicas: Ranks that hold the same elements.
        decays: Whether weight decay applies.
    """

    name: str
    labels: tuple[str, ...]
    parameter: nn.Parameter
    piece: Piece | None
    replicas: tuple[int, ...]
    decays: bool
    bucket: Bucket | None = None
    offset: int = 0

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

    @property
    def gradient(self) -> Tensor:
        """The gradient: a view of its bucket, or autograd's own; zeros where nothing flowed."""
        if self.bucket:
            return self.bucket.flat[self.offset : self.offset + self.numel].view(self.shape)
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return self.of(self.parameter.grad)

    def of(self, tensor: Tensor) -> Tensor:
        """The span's part of a tensor that is stored like the parameter."""
        return view(tensor.contiguous(), self.piece) if self.piece else tensor.detach()


@dataclass(eq=False)
class Bucket:
    """A flat buffer of gradients that are summed over the same group in one message.

    ``late`` ones wait for the end of the step: the other end of the pipeline has its gradients when what this one sends
    last has gone all the way. A sum that waited for it meanwhile would hold the device, which the host may wait for.
    """

    group: Group
    flat: Tensor
    spans: list[Span]
    late: bool = False
    waiting: int = 0
    pending: Pending | None = None


@dataclass
class _Arrivals:
    """How many gradients of one parameter have come in this step, and how many will."""

    spans: list[Span]
    uses: int
    seen: int = 0
    expected: int = 0


@dataclass
class Gradients:
    """Accumulates and sums the gradients of a rank's parameters; every replica holds and updates all of them.

    Args:
        parameters: What the rank holds.
        chunks: The modules of the rank's pipeline chunks; a parameter that several use gets a gradient from each.
        dtype: In which gradients are accumulated and summed.
        bucket_bytes: Largest size of a bucket of more than one parameter.
    """

    parameters: Parameters
    chunks: Iterable[nn.Module]
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = 32 << 20
    spans: list[Span] = field(init=False)
    buckets: list[Bucket] = field(init=False)

    def __post_init__(self) -> None:
        uses: dict[nn.Parameter, int] = {}
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                uses[parameter] = uses.get(parameter, 0) + 1
        self.spans = trained_spans(self.parameters)
        self._mesh: Mesh = self.parameters.mesh
        self._mesh.make_groups(self.parameters.layout.replica_sets())
        self.buckets = self._make_buckets()
        self._launched = 0
        self._arrivals: dict[nn.Parameter, _Arrivals] = {}
        for span in self.spans:
            if span.bucket:
                self._arrivals.setdefault(span.parameter, _Arrivals([], uses[span.parameter])).spans.append(span)
        for parameter in self._arrivals:
            on_gradient(parameter, self._accumulate)

    def begin(self, microbatches: int) -> None:
        """Start a step of so many microbatches; the gradients of the last step are forgotten."""
        for span in self.spans:
            span.parameter.grad = None
        for arrivals in self._arrivals.values():
            arrivals.seen, arrivals.expected = 0, arrivals.uses * microbatches
        for bucket in self.buckets:
            bucket.waiting, bucket.pending = len(bucket.spans) + bucket.late, None
        self._launched = 0

    def finish(self) -> None:
        """Wait until every gradient is summed; those that never came are zero."""
        for arrivals in self._arrivals.values():
            if not arrivals.seen:
                for span in arrivals.spans:
                    span.gradient.zero_()
        for bucket in self.buckets:
            bucket.waiting = 0
        self._launch()
        for bucket in self.buckets:
            if bucket.pending:
                bucket.pending.wait()

    def norm(self) -> Tensor:
        """The norm of the whole model's gradient, a scalar that is the same on every rank; fp32 at least.

        Each element counts once: 1/replicas on each rank that holds it.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for bucket in self.buckets:
            total += square_sum(bucket.flat) / bucket.group.size
        for span in self.spans:
            if not span.bucket:
                total += square_sum(span.gradient)
        return norm_of(total, self.dtype, self._mesh)

    # -- what is updated, as every :class:`Sharing` has it

    @property
    def parts(self) -> Sequence[Span]:
        return self.spans

    def updated(self) -> None:
        """Every rank has updated its own copy."""

    def parts_of(self, name: str) -> Sequence[Span]:
        return [span for span in self.spans if span.name == name]

    def read(self, name: str, of: Callable[[Part], Elements], host: Tensor | None, take: Take = all_of_it) -> None:
        if host is None:
            return
        spans = self.parts_of(name)
        if spans[0].piece is None:
            host.copy_(take(of(spans[0])[...]), non_blocking=True)
            return
        whole = torch.empty_like(spans[0].parameter, dtype=host.dtype)
        for span in spans:
            span.of(whole).copy_(of(span)[...])
        host.copy_(take(whole), non_blocking=True)

    def write(self, name: str, of: Callable[[Part], Elements], host: Tensor) -> None:
        for span in self.parts_of(name):
            of(span)[...] = span.of(host)

    def read_weight(self, name: str, host: Tensor | None, take: Take = all_of_it) -> None:
        if host is not None:
            host.copy_(take(self.parameters[name].detach()), non_blocking=True)

    def fill(self, name: str, host: Tensor) -> None:
        self.parameters[name].detach().copy_(host)

    def _make_buckets(self) -> list[Bucket]:
        """Buckets in the order in which the backward completes them; those of ends of the pipeline come last."""
        # A parameter whose spans differ goes into buckets as a whole: its gradient leaves autograd's hands at once.
        taken = {s.name for s in self.spans if len(s.replicas) > 1 or s.parameter.dtype != self.dtype}
        order = deepest_first(self.parameters, (s for s in self.spans if s.name in taken))
        filling: dict[tuple[int, ...], list[Span]] = {}
        full: list[list[Span]] = []
        for span in order:
            spans = filling.setdefault(span.replicas, [])
            if spans and sum(s.numel for s in [*spans, span]) * self.dtype.itemsize > self.bucket_bytes:
                full.append(filling.pop(span.replicas))
                spans = filling.setdefault(span.replicas, [])
            spans.append(span)
        position = {id(span): i for i, span in enumerate(order)}
        full = sorted(
            [*full, *filling.values()],
            key=lambda spans: (
                crosses_stages(self._mesh.shape, spans[0].replicas),
                max(position[id(span)] for span in spans),
            ),
        )
        return [self._make_bucket(spans) for spans in full]

    def _make_bucket(self, spans: list[Span]) -> Bucket:
        flat = torch.zeros(sum(s.numel for s in spans), dtype=self.dtype, device=self._mesh.device)
        bucket = Bucket(
            self._mesh.group(spans[0].replicas), flat, spans, crosses_stages(self._mesh.shape, spans[0].replicas)
        )
        offset = 0
        for span in spans:
            span.bucket, span.offset = bucket, offset
            offset += span.numel
        return bucket

    def _accumulate(self, parameter: Tensor) -> None:
        arrivals = self._arrivals[parameter]  # type: ignore[index]
        gradient = parameter.grad
        assert gradient is not None  # a post-accumulate hook runs with a gradient
        for span in arrivals.spans:
            if arrivals.seen:
                span.gradient.add_(span.of(gradient))
            else:
                span.gradient.copy_(span.of(gradient))
        parameter.grad = None
        arrivals.seen += 1
        if arrivals.seen == arrivals.expected:
            for span in arrivals.spans:
                assert span.bucket is not None
                span.bucket.waiting -= 1
            self._launch()

    def _launch(self) -> None:
        """Start the sums of buckets that are complete, in order: all ranks of a group must agree on it."""
        while self._launched < len(self.buckets) and not self.buckets[self._launched].waiting:
            bucket = self.buckets[self._launched]
            bucket.pending = start_all_reduce(bucket.flat, bucket.group)
            self._launched += 1


# Elements that are widened at a time: what stays in a core's cache, and what keeps a GPU busy.
_BLOCK, _BLOCK_GPU = 1 << 18, 1 << 23


def square_sum(gradient: Tensor) -> Tensor:
    """gradient: [...] -> the sum of its squares, an fp64 scalar: too exact for the order of the sum to show in fp32."""
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    blocks = gradient.reshape(-1).split(_BLOCK if gradient.device.type == "cpu" else _BLOCK_GPU)
    memory = torch.empty_like(blocks[0], dtype=torch.float64)
    for block in blocks:
        wide = memory[: len(block)].copy_(block)
        total += torch.dot(wide, wide)
    return total


def norm_of(squares: Tensor, dtype: torch.dtype, mesh: Mesh) -> Tensor:
    """The root of the sum over all ranks, in the dtype of the gradients or fp32: whoever holds which part of the
    gradient, it is the same number, bit for bit but for one step in millions."""
    return all_reduce_(squares, mesh.world).sqrt().to(torch.promote_types(dtype, torch.float32))


def on_gradient(parameter: nn.Parameter, receive: Callable[[Tensor], None]) -> None:
    """Have a method called whenever autograd has put a gradient on a parameter, for as long as its object lives.

    Python's garbage collector cannot see torch's hooks: one that held the object would keep it, the model and the
    process groups for good.
    """
    weak = weakref.WeakMethod(receive)

    def received(parameter: Tensor) -> None:
        method = weak()
        if method is not None:
            method(parameter)

    parameter.register_post_accumulate_grad_hook(received)


def crosses_stages(shape: MeshShape, ranks: Iterable[int]) -> bool:
    """Whether some ranks belong to several stages of a pipeline: the ends, which hold a tied table each."""
    return len({shape.place(rank).pp for rank in ranks}) > 1


def trained_spans(parameters: Parameters) -> list[Span]:
    """The spans of all parameters that are trained, in the order of the parameters."""
    return [span for name, p in parameters.items() if p.requires_grad for span in spans(parameters, name)]


def frozen_spans(parameters: Parameters) -> list[Span]:
    """The spans of all others."""
    return [span for name, p in parameters.items() if not p.requires_grad for span in spans(parameters, name)]


def spans(parameters: Parameters, name: str) -> list[Span]:
    """The spans of one parameter: one, or one for each piece where their replicas differ (kv heads shared by ranks)."""
    shard = parameters.shards[name]
    parameter, decays = parameters[name], shard.param.decays
    replicas = {piece.label: parameters.layout.replicas(shard, piece.label) for piece in shard.pieces}
    if len(set(replicas.values())) == 1:
        return [Span(name, tuple(replicas), parameter, None, next(iter(replicas.values())), decays)]
    return [Span(name, (p.label,), parameter, p, replicas[p.label], decays) for p in shard.pieces]


def deepest_first(parameters: Parameters, spans: Iterable[Span]) -> list[Span]:
    """In the order in which the backward completes their gradients."""

    def depth(span: Span) -> float:
        """How deep in the model the parameter is used for the first time."""
        shard = parameters.shards[span.name]
        if "layer" in shard.box:
            return shard.box["layer"][0]
        return float("inf") if shard.param.at == "last" else -1

    return sorted(spans, key=depth, reverse=True)
