"""The ladder of data parallelism: replicas share out what they would all hold alike (ZeRO, Rajbhandari et al. 2020,
arXiv 1910.02054; its last rung as in FSDP, Zhao et al. 2023, arXiv 2304.11277).

Spans with the same replicas lie in flat buckets, and each of n replicas owns 1/n of a bucket: it sums that slice of the
gradient and updates that slice of the parameters. The rungs say what else is shared out:

    none         nothing: every replica has it all (``parallel.sync.Gradients``)
    optimizer    masters and moments; the gradient is reduce-scattered beside the backward of the last microbatch
    gradients    between microbatches the gradient too: each microbatch's is reduce-scattered as it comes in
    parameters   the parameters too, also those that are frozen: a unit (an embedding, a block, a head) has its own
                 whole only while it is used, gathered while the unit before it computes

Up to ``gradients`` the parameters are gathered after the update, in the order of their use, and whoever uses them
waits for his own: the next forward runs beside it.

Sharing goes by replicas, not by data parallel ranks alone: tp ranks share out the norms that they all hold. Only
pipeline stages do not share with each other: they run microbatches in other orders, so their messages would not meet.
The groups of replicas of HSDP (``replicas``) do not either: they sum a slice as soon as the group has. The ends of the
pipeline each share out their copy of a tied table among their own ranks, and sum the slices at the end of the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from parallel.choices import check_choice
from parallel.collectives import (
    Pending,
    broadcast_,
    start_all_gather_,
    start_all_reduce,
    start_reduce_scatter_,
)
from parallel.mesh import Group, Mesh
from parallel.parameters import Parameters, view
from parallel.rank_sets import divide, divided
from parallel.slices import OnDevice, OnHost, SliceHome
from parallel.sync import (
    Elements,
    Gradients,
    Part,
    Sharing,
    Span,
    Take,
    all_of_it,
    crosses_stages,
    deepest_first,
    frozen_spans,
    norm_of,
    on_gradient,
    square_sum,
    trained_spans,
)

Shard = Literal["none", "optimizer", "gradients", "parameters"]
"""What replicas share out."""

BUCKET_BYTES = 32 << 20
# Elements: slices and spans begin on cache lines, whatever the dtype.
_ALIGNED = 64
# Reduce-scatters under way; each holds buffers of a bucket.
_UNDER_WAY = 2


def sharing(
    parameters: Parameters,
    chunks: Sequence[nn.Module],
    dtype: torch.dtype,
    shard: Shard = "none",
    replicas: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    offload: bool = False,
) -> Sharing:
    """How the ranks share out gradients and state.

    Args:
        parameters: What the rank holds, with their initial values; where they are shared out they may be hollow, and
            are filled one at a time (:meth:`Sharing.fill`).
        chunks: The modules of the rank's pipeline chunks.
        dtype: In which gradients are accumulated and summed.
        shard: What is shared out.
        replicas: Groups of data parallel ranks that do not share with each other; they divide dp.
        bucket_bytes: Largest size of a bucket of more than one parameter.
        offload: Whether a rank's slice of shared out parameters lives in host memory.

    Raises:
        ValueError: ``shard`` is another word.
    """
    check_choice("shard", shard, get_args(Shard))
    if shard == "none":
        return Gradients(parameters, chunks, dtype, bucket_bytes)
    return ShardedGradients(parameters, chunks, dtype, shard, replicas, bucket_bytes, offload)


@dataclass(eq=False)
class Held:
    """A span, and where it begins in its bucket."""

    span: Span
    bucket: Flat
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.span.numel

    def of(self, flat: Tensor) -> Tensor:
        """The span's part of a tensor as long as the bucket."""
        return flat[self.start : self.stop].view(self.span.shape)


@dataclass(eq=False)
class Run:
    """Elements [start, stop) of a bucket, within the slice of this rank, to which weight decay applies or not."""

    bucket: Flat
    start: int
    stop: int
    decays: bool

    @property
    def data(self) -> Tensor:
        return self._of(self.bucket.own)

    @property
    def gradient(self) -> Tensor:
        assert isinstance(self.bucket, Bucket)  # nobody asks for that of a frozen one
        return self._of(self.bucket.gradient)

    def _of(self, owned: Tensor) -> Tensor:
        first = self.bucket.bounds(self.bucket.group.index)[0]
        return owned[self.start - first : self.stop - first]


class Flat:
    """The values of some spans in flat memory, shared out over a group.

    Args:
        spans: What lies in it; those to which weight decay applies come first.
        group: The ranks that own a slice each.
        lets_go: Whether the whole parameters go when they have been used.
        home: Where the slice of this rank lives then.
    """

    def __init__(self, spans: Sequence[Span], group: Group, lets_go: bool, home: SliceHome) -> None:
        self.group, self.home = group, home
        self.held: list[Held] = []
        self.decaying = stop = 0
        for span in sorted(spans, key=lambda span: not span.decays):
            self.held.append(Held(span, self, stop))
            stop = _aligned(self.held[-1].stop)
            self.decaying = stop if span.decays else self.decaying
        self.numel = math.ceil(stop / (_ALIGNED * group.size)) * _ALIGNED * group.size
        # A span that is only a piece of its parameter has no memory of its own in it: it is copied there.
        self.loose = any(span.piece is not None for span in spans)
        # What is loose may share its memory with a piece that goes.
        self.lets_go = lets_go and (group.size > 1 or self.loose or home.away)
        self._take_over()
        lo, hi = self.bounds(group.index)
        middle = min(max(self.decaying, lo), hi)
        runs = (Run(self, lo, middle, True), Run(self, middle, hi, False))
        self.runs = [run for run in runs if run.start < run.stop]
        self.gathering: Pending | None = None

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        return (held.span.parameter for held in self.held)

    def bounds(self, index: int) -> tuple[int, int]:
        """[start, stop) of the slice of a rank of the group."""
        size = self.numel // self.group.size
        return index * size, (index + 1) * size

    def _take_over(self) -> None:
        """Move the parameters to flat memory; the slice of this rank is ``own``."""
        parameter = self.held[0].span.parameter
        hollow = not parameter.untyped_storage().size()
        self.values = torch.zeros(self.numel, dtype=parameter.dtype, device=parameter.device)
        for held in self.held:
            if not hollow:
                held.of(self.values).copy_(held.span.data)
        self.own = self.values.chunk(self.group.size)[self.group.index]
        self.there = True
        if self.loose or self.lets_go:
            self.own = self.home.keep(self.own)
        if not self.loose:
            for held in self.held:
                # Not in place: what autograd has saved of a parameter must not seem changed when it is gathered again.
                held.span.parameter.data = held.of(self.values)
        if self.loose or (hollow and self.lets_go):
            _free(self.values)

    def gather(self) -> None:
        """Start to gather the parameters, if they are not there and not on their way."""
        if not self.there and self.gathering is None:
            self.refresh()

    def refresh(self) -> None:
        """Start to gather the parameters."""
        if self.loose or self.lets_go:
            _allocate(self.values)
            self.gathering = self.home.gather(self.own, self.values, self.group)
        else:
            self.gathering = start_all_gather_(self.values, self.group)

    def wait(self) -> None:
        """Until the parameters are there."""
        if self.gathering is None:
            return
        self.gathering.wait()
        self.gathering, self.there = None, True
        if self.loose:
            for held in self.held:
                piece, parameter = held.span.piece, held.span.parameter.data
                _allocate(parameter)
                assert piece is not None
                view(parameter, piece).copy_(held.of(self.values))
            _free(self.values)

    def let_go(self) -> None:
        """The parameters are not needed for now."""
        if self.lets_go:
            self.wait()
            self.there = False
            for tensor in [p.data for p in self.parameters] if self.loose else [self.values]:
                _free(tensor)


class Bucket(Flat):
    """Spans whose gradients are summed in one message, and shared out as their values are.

    Args:
        spans, group, lets_go, home: As of :class:`Flat`.
        across: The ranks that own the same slice.
        dtype: Of the gradients.
        keeps: Whether the whole gradient stays from microbatch to microbatch.
        late: Whether slices are summed at the end of the step, as those of :class:`parallel.sync.Bucket` are.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        group: Group,
        across: Group,
        dtype: torch.dtype,
        keeps: bool,
        late: bool,
        lets_go: bool,
        home: SliceHome,
    ) -> None:
        super().__init__(spans, group, lets_go, home)
        self.across, self.dtype, self.keeps, self.late = across, dtype, keeps, late
        self.full = self._zeros(self.numel) if keeps else None
        own = self.numel // group.size
        self.gradient = self.full.chunk(group.size)[group.index] if self.full is not None else self._zeros(own)
        self.begin(0)

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.dtype, device=self.values.device)

    def begin(self, rounds: int) -> None:
        """A step in which each parameter gets so many gradients."""
        self.rounds, self.expected, self.summed = 0, rounds, 0
        self.arrived: set[Held] = set()

    def add(self, held: Held, gradient: Tensor) -> None:
        """The gradient of a span for one microbatch."""
        if self.full is None:
            self.full = torch.empty(self.numel, dtype=self.dtype, device=self.values.device)
        if held in self.arrived or (self.keeps and self.rounds):
            held.of(self.full).add_(gradient)
        else:
            held.of(self.full).copy_(gradient)
        self.arrived.add(held)

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.held)

    def end_round(self) -> Pending | None:
        """A microbatch's gradients are all there, and those that are not are zero -> the sum that was started."""
        full = self._zeros(self.numel) if self.full is None else self.full
        if not self.rounds or not self.keeps:
            self._clear(full)
        self.rounds += 1
        self.arrived = set()
        if not self.keeps:
            self.full = None
        elif self.rounds < self.expected:
            return None
        return start_reduce_scatter_(full, self.group)

    def _clear(self, full: Tensor) -> None:
        """Zero what nothing has been written to."""
        stop = 0
        for held in self.held:
            full[stop : held.start].zero_()
            stop = held.stop
            if held not in self.arrived:
                held.of(full).zero_()
        full[stop:].zero_()

    def take(self, pending: Pending) -> None:
        """Wait for a sum that was started, and add it to the slice."""
        found = pending.wait()
        if not self.keeps:
            _ = self.gradient.add_(found) if self.summed else self.gradient.copy_(found)
        self.summed += 1

    @property
    def summable(self) -> bool:
        """Whether the group has summed all of this step's gradients."""
        return self.summed == (1 if self.keeps else self.expected)


@dataclass(eq=False)
class Unit:
    """A module and the buckets that it needs while it computes.

    Args:
        module: The module.
        buckets: What it uses of what is trained.
        frozen: What it uses beside that.
        before, after: The unit before it in its chunk, and the one after it, if there is one.
        stays: Whether its backward follows its forward, so that there is no use in letting go between them.
    """

    module: nn.Module
    buckets: list[Bucket]
    frozen: list[Flat]
    before: list[Unit] = field(default_factory=list)
    after: list[Unit] = field(default_factory=list)
    stays: bool = False
    backward: bool = False

    @property
    def used(self) -> Sequence[Flat]:
        return [*self.buckets, *self.frozen]


class ShardedGradients:
    """Accumulates and sums gradients as :class:`~parallel.sync.Gradients`, each rank only its own slices.

    Args:
        parameters: What the rank holds, with their initial values.
        chunks: The modules of the rank's pipeline chunks.
        dtype: In which gradients are accumulated and summed.
        shard: What is shared out beside the optimizer's state.
        replicas: Groups of data parallel ranks that do not share with each other.
        bucket_bytes: Largest size of a bucket of more than one parameter; units have buckets of their own where their
            parameters are shared out.
        offload: Whether a rank's slice of shared out parameters lives in host memory.
    """

    def __init__(
        self,
        parameters: Parameters,
        chunks: Iterable[nn.Module],
        dtype: torch.dtype,
        shard: Shard,
        replicas: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        offload: bool = False,
    ) -> None:
        self.parameters, self.dtype, self.shard = parameters, dtype, shard
        self._mesh: Mesh = parameters.mesh
        self._chunks = list(chunks)
        self.spans = trained_spans(parameters)
        still = frozen_spans(parameters) if shard == "parameters" else []
        self._mesh.make_groups(divided(parameters.layout, replicas))
        held = {span.parameter for span in (*self.spans, *still)}
        modules = [list(_units(chunk, held)) for chunk in self._chunks]
        home: SliceHome = OnHost(self._mesh.device) if offload else OnDevice()
        self.frozen = [
            Flat(spans, self._groups_of(spans[0].replicas, replicas)[0], True, home)
            for spans in self._fill(modules, bucket_bytes, still)
        ]
        self.buckets = [
            Bucket(
                spans,
                *self._groups_of(spans[0].replicas, replicas),
                dtype,
                keeps=shard == "optimizer",
                late=crosses_stages(self._mesh.shape, spans[0].replicas),
                lets_go=shard == "parameters",
                home=home,
            )
            for spans in self._fill(modules, bucket_bytes, self.spans)
        ]
        self.parts: list[Run] = [run for bucket in self.buckets for run in bucket.runs]
        self._held: dict[str, list[Held]] = {}
        for each in (each for flat in (*self.buckets, *self.frozen) for each in flat.held):
            self._held.setdefault(each.span.name, []).append(each)
        self._names: dict[Tensor, str] = {span.parameter: span.name for span in self.spans}
        self._units = [
            [Unit(module, _used_by(params, self.buckets), _used_by(params, self.frozen)) for module, params in units]
            for units in modules
        ]
        self._uses = {
            bucket: sum(any(bucket in unit.buckets for unit in units) for units in self._units)
            for bucket in self.buckets
        }
        # Buckets of each chunk, in the order in which its backward completes them.
        self._orders = [
            [bucket for bucket in self.buckets if any(bucket in unit.buckets for unit in units)]
            for units in self._units
        ]
        self._waiting: deque[Bucket] = deque()
        self._under_way: deque[tuple[Bucket, Pending]] = deque()
        self._sums: deque[Pending] = deque()
        self._hook()
        for flat in (*self.buckets, *self.frozen):
            flat.let_go()

    # -- sums

    def begin(self, microbatches: int) -> None:
        for span in self.spans:
            span.parameter.grad = None
        for bucket in self.buckets:
            bucket.begin(microbatches * self._uses[bucket])

    def finish(self) -> None:
        for bucket in self.buckets:
            while bucket.rounds < bucket.expected:
                self._end_round(bucket)
        while self._under_way:
            self._take()
        self._sums += [start_all_reduce(bucket.gradient, bucket.across) for bucket in self.buckets if bucket.late]
        while self._sums:
            self._sums.popleft().wait()

    def norm(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for bucket in self.buckets:
            total += square_sum(bucket.gradient) / bucket.across.size
        return norm_of(total, self.dtype, self._mesh)

    def _accumulate(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None  # a post-accumulate hook runs with a gradient
        for each in self._held[self._names[parameter]]:
            assert isinstance(each.bucket, Bucket)  # a gradient comes to what is trained
            each.bucket.add(each, each.span.of(gradient))
        parameter.grad = None
        # In order, whatever completes first: all ranks of a group must agree on it.
        while self._waiting and self._waiting[0].complete:
            self._end_round(self._waiting.popleft())

    def _end_round(self, bucket: Bucket) -> None:
        pending = bucket.end_round()
        # All of its gradients are there, so no more of this backward needs its parameters.
        bucket.let_go()
        if pending is not None:
            self._under_way.append((bucket, pending))
        if len(self._under_way) > _UNDER_WAY:
            self._take()

    def _take(self) -> None:
        bucket, pending = self._under_way.popleft()
        bucket.take(pending)
        if bucket.summable and not bucket.late:
            self._sums.append(start_all_reduce(bucket.gradient, bucket.across))

    # -- parameters

    def updated(self) -> None:
        for bucket in reversed(self.buckets):
            if bucket.lets_go:
                bucket.let_go()
            else:
                bucket.wait()
                bucket.refresh()

    def wait(self) -> None:
        """Until parameters that are gathered after the update are there."""
        for bucket in self.buckets:
            bucket.wait()

    def _hook(self) -> None:
        for name in self._names.values():
            on_gradient(self.parameters[name], self._accumulate)
        for chunk, order, units in zip(self._chunks, self._orders, self._units, strict=True):
            chunk.register_forward_hook(partial(self._after_chunk, order, units))
            for i, unit in enumerate(units):
                unit.before, unit.after = units[max(0, i - 1) : i], units[i + 1 : i + 2]
                unit.module.register_forward_pre_hook(partial(self._before_forward, unit))
                if self.shard == "parameters":
                    unit.module.register_forward_hook(partial(self._after_forward, unit))
        if self._mesh.place.pp == self._mesh.shape.pp - 1 and self._units[-1]:
            self._units[-1][-1].stays = True

    def _before_forward(self, unit: Unit, module: nn.Module, inputs: object) -> None:
        self._ready(unit, [] if unit.backward else unit.after)

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: object, output: object) -> None:
        if unit.backward:  # it is only computed again
            return
        stays = False
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._before_backward, unit))
            stays = unit.stays
        if not stays:
            _let_go(unit.used, unit.after)

    def _before_backward(self, unit: Unit, gradient: Tensor) -> None:
        unit.backward = True
        # The gradient of its output is there, so the units after it are done.
        for each in unit.after:
            _let_go(each.frozen, [unit])
        self._ready(unit, unit.before)

    def _ready(self, unit: Unit, ahead: Sequence[Unit]) -> None:
        for each in (unit, *ahead):
            for flat in each.used:
                flat.gather()
        for flat in unit.used:
            flat.wait()

    def _after_chunk(
        self, order: Sequence[Bucket], units: Sequence[Unit], module: nn.Module, inputs: object, output: object
    ) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self._begin_backward, order, units))

    def _begin_backward(self, order: Sequence[Bucket], units: Sequence[Unit], gradient: Tensor) -> None:
        self._waiting = deque(order)
        engine: Any = Variable._execution_engine
        engine.queue_callback(partial(self._end_backward, units))

    def _end_backward(self, units: Sequence[Unit]) -> None:
        """Where a gradient has not come, others may have one: the messages are the same on all ranks."""
        while self._waiting:
            self._end_round(self._waiting.popleft())
        for unit in units:
            unit.backward = False
            _let_go(unit.frozen, [])

    # -- what is held, by the names and in the shapes of the parameters

    def parts_of(self, name: str) -> Sequence[Run]:
        return [run for held in self._held[name] for run in held.bucket.runs]

    def read(self, name: str, of: Callable[[Part], Elements], host: Tensor | None, take: Take = all_of_it) -> None:
        parameter = self.parameters[name]
        whole = None if host is None else torch.empty(parameter.shape, dtype=host.dtype, device=parameter.device)
        for held in self._held[name]:
            group, runs = held.bucket.group, held.bucket.runs
            flat = torch.empty(held.span.numel, dtype=of(runs[0]).dtype, device=parameter.device)
            for run in runs:
                for theirs, mine in _overlap(held, run):
                    flat[mine] = of(run)[theirs]
            for owner in range(group.size):
                start, stop = (min(max(at, held.start), held.stop) for at in held.bucket.bounds(owner))
                if start < stop:
                    broadcast_(flat[start - held.start : stop - held.start], group, owner)
            if whole is not None:
                held.span.of(whole).copy_(flat.view(held.span.shape))
        if host is not None and whole is not None:
            host.copy_(take(whole), non_blocking=True)

    def write(self, name: str, of: Callable[[Part], Elements], host: Tensor) -> None:
        for held in self._held[name]:
            flat = held.span.of(host).reshape(-1)
            for run in held.bucket.runs:
                for theirs, mine in _overlap(held, run):
                    of(run)[theirs] = flat[mine]

    def read_weight(self, name: str, host: Tensor | None, take: Take = all_of_it) -> None:
        held = self._held.get(name, ())
        if any(each.bucket.lets_go for each in held):
            self.read(name, lambda part: part.data, host, take)
            return
        for each in held:
            each.bucket.wait()
        if host is not None:
            host.copy_(take(self.parameters[name].detach()), non_blocking=True)

    def fill(self, name: str, host: Tensor) -> None:
        held = self._held.get(name, ())
        for each in held:
            each.bucket.wait()
        if all(each.bucket.there for each in held):
            self.parameters[name].detach().copy_(host)
        if held:
            self.write(name, lambda part: part.data, host)

    # -- how it is put together

    def _groups_of(self, ranks: Sequence[int], replicas: int) -> tuple[Group, Group]:
        """(the group that shares, those with the same slice) of a span with these replicas."""
        parts = divide(self._mesh.shape, ranks, replicas)
        own = next(part for part in parts if self._mesh.rank in part)
        at = own.index(self._mesh.rank)
        return self._mesh.group(own), self._mesh.group(tuple(sorted(part[at] for part in parts)))

    def _fill(
        self,
        modules: Sequence[Sequence[tuple[nn.Module, list[nn.Parameter]]]],
        bucket_bytes: int,
        spans: Sequence[Span],
    ) -> list[list[Span]]:
        """Spans of each bucket, in the order in which the backward completes them.

        The gradients of a bucket come in together, so its spans are used in the same chunks; parameters that are let go
        go with their unit.
        """
        shards = self.shard == "parameters"
        users: dict[nn.Parameter, list[tuple[int, int]]] = {}
        for chunk, units in enumerate(modules):
            for number, (_, parameters) in enumerate(units):
                for parameter in parameters:
                    users.setdefault(parameter, []).append((chunk, number if shards else 0))
        filling: dict[object, list[Span]] = {}
        full: list[list[Span]] = []
        order = deepest_first(self.parameters, spans)
        for span in order:
            used = tuple(dict.fromkeys(users[span.parameter]))
            # The other end of the pipeline uses a tied parameter elsewhere, and must come to the same buckets.
            tied = span.name if crosses_stages(self._mesh.shape, span.replicas) else ""
            key = span.replicas, used, tied, span.piece is None
            filled = filling.setdefault(key, [])
            if filled and not shards and sum(s.numel for s in [*filled, span]) * self.dtype.itemsize > bucket_bytes:
                full.append(filling.pop(key))
                filled = filling.setdefault(key, [])
            filled.append(span)
        position = {id(span): i for i, span in enumerate(order)}
        return sorted([*full, *filling.values()], key=lambda spans: max(position[id(span)] for span in spans))


F = TypeVar("F", bound=Flat)


def _used_by(parameters: Iterable[nn.Parameter], flats: Iterable[F]) -> list[F]:
    used = set(parameters)
    return [flat for flat in flats if not used.isdisjoint(flat.parameters)]


def _let_go(flats: Iterable[Flat], needing: Sequence[Unit]) -> None:
    """Let go of parameters, but for those that some units need."""
    needed = {flat for unit in needing for flat in unit.used}
    for flat in flats:
        if flat not in needed:
            flat.let_go()


def _units(chunk: nn.Module, held: Set[nn.Parameter]) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """(module, parameters) of what a chunk runs one after the other: its children in their order and, of lists, theirs.

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


def _overlap(held: Held, run: Run) -> Iterator[tuple[slice, slice]]:
    """What a run has of a span: (where in the run, where in the span), if there is something."""
    start, stop = max(held.start, run.start), min(held.stop, run.stop)
    if start < stop:
        yield slice(start - run.start, stop - run.start), slice(start - held.start, stop - held.start)


def _aligned(numel: int) -> int:
    return math.ceil(numel / _ALIGNED) * _ALIGNED


def _free(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _allocate(tensor: Tensor) -> None:
    """Memory for a tensor that fills its storage; what is in it does not count."""
    if not tensor.untyped_storage().size():
        tensor.untyped_storage().resize_(tensor.nbytes)
