"""Summing gradients: ranks that hold the same elements sum their gradients, and nothing else is ever needed.

Gradients are accumulated in flat buckets (fp32 by default). A bucket is reduce-scattered over the group that splits it
as soon as its last gradient is there, and each rank's shard is all-reduced over the ranks that own the same one; both
go on beside the rest of the backward. What is sent may be rounded to bf16, which is half of the bytes, or to 8 bits
with error feedback (`gradients.rounding`). Every reduction is a sum: the loss has been divided by the global number of
counted tokens before. The rungs of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) say what the replicas of a bucket
split:

    none         nothing: groups of one, and the all-reduce goes over all replicas
    optimizer    masters and moments
    gradients    between microbatches the gradient too: each microbatch's is reduce-scattered as it comes in
    parameters   the parameters too, also those that are frozen

Splitting goes by replicas, not by data parallel ranks alone: tp ranks split the norms that they all hold. Groups of
replicas (HSDP) and the ends of a pipeline, which each hold a tied table, do not split with each other: their shards are
all-reduced.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from megacore.parallel.budgets import BUCKET_BYTES, NORM_BLOCK, REDUCE_SCATTERS
from megacore.parallel.collectives import Pending, all_reduce_
from megacore.parallel.enum_errors import Compression, ZeroShard, check_choice
from megacore.parallel.gradients.buckets import (
    Bucket,
    Elements,
    FlatLayout,
    OwnedShard,
    Span,
    Take,
    WholeSpan,
    all_of_it,
    crosses_stages,
    fill,
    on_gradient,
    spans_of,
)
from megacore.parallel.gradients.narrow import NarrowWeights
from megacore.parallel.gradients.shard_stores import OnDevice, OnHost, ShardStore
from megacore.parallel.gradients.zero import (
    FlatParameters,
    FSDPUnit,
    SplitSpan,
    end_backward,
    gather_in_turn,
    modules_of,
    used_by,
)
from megacore.parallel.mesh import Group, Mesh
from megacore.parallel.parameters import Parameters, WeightGradient
from megacore.parallel.rank_sets import divided, groups_of


class Gradients:
    """Accumulates and sums the gradients of a rank's parameters, on any rung.

    It owns the buckets and, where parameters are split, their flat memory. On ``none`` a gradient that nobody else has
    and that needs no wider type stays where autograd puts it.

    Args:
        parameters: The parameters that the rank holds, with their initial values; where they are split they may be
            hollow, and are filled one at a time (:meth:`fill`).
        chunks: The modules of the rank's pipeline chunks; a parameter that several use gets a gradient from each.
        dtype: The dtype in which gradients are accumulated and summed.
        shard: The states that are split.
        replicas: Groups of data parallel ranks that do not split with each other; they divide dp.
        bucket_bytes: Largest size of a bucket of more than one parameter; on ``parameters`` each unit has its own.
        offload: Whether a rank's shard of split parameters lives in host memory.
        matrices: Whether matrices of blocks are updated as wholes, and are parts of their own.
        compress: The numbers that gradients are rounded to where they are sent; int8 what ranks of dp and cp alone sum,
            in fp32, where whole gradients stay.

    Raises:
        ValueError: ``shard`` or ``compress`` is another word, or they do not fit.
    """

    def __init__(
        self,
        parameters: Parameters,
        chunks: Iterable[nn.Module],
        dtype: torch.dtype = torch.float32,
        shard: ZeroShard = "none",
        replicas: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        offload: bool = False,
        matrices: bool = False,
        compress: Compression = "none",
    ) -> None:
        check_choice("shard", shard, get_args(ZeroShard))
        check_choice("compress", compress, get_args(Compression))
        self.parameters, self.dtype = parameters, dtype
        self._mesh: Mesh = parameters.mesh
        self.splits, self._reshards = shard != "none", shard == "parameters"
        self.replicas = replicas if self.splits else None
        """Groups of data parallel ranks that do not split with each other; None where nobody splits."""
        self._keeps = shard in ("none", "optimizer")
        if compress == "int8" and (not self._keeps or dtype != torch.float32):
            raise ValueError(f"compress=int8 is for fp32 sums and shard=none or optimizer, not {dtype} and {shard}")
        self._sent = {"none": dtype, "bf16": torch.bfloat16, "int8": torch.int8}[compress]
        self.data_ranks = self._mesh.shape.along(self._mesh.rank, "dp", "cp")
        """The ranks that differ from this one in their data alone; each has residuals where 8 bits are sent."""
        self._mesh.make_groups(divided(parameters.layout, self.replicas))
        self.spans = spans_of(parameters, True, matrices)
        self.buckets: list[Bucket] = []
        self.values: dict[Bucket, FlatParameters] = {}
        """The flat parameters whose gradients lie in a bucket, where parameters are split."""
        self.frozen: list[FlatParameters] = []
        self.parts: list[OwnedShard] = []
        """The shards that this rank updates."""
        self._owned: dict[str, list[WholeSpan | SplitSpan]] = {}
        modules = list(chunks)
        across = [self._mesh.batch, self._mesh.tp] if self.splits else [self._mesh.tp]
        self._cast_names: dict[Tensor, str] = {
            parameter: name for name, parameter in parameters.items() if parameter in parameters.casts
        }
        self.narrow = NarrowWeights(parameters.casts, self._owned_parts, across)
        """Narrow numbers of the parameters that are multiplied by them."""
        self._uses = Counter(parameter for module in modules for parameter in module.parameters())
        if self.splits:
            units = self._split(modules, bucket_bytes, OnHost(self._mesh.device) if offload else OnDevice())
        else:
            units = [[] for _ in modules]
            self._share(bucket_bytes)
        self._cast_before_use(modules)
        self._norms = 0
        """The sums of the norm so far."""
        self._alone = [part for part in self.parts if isinstance(part, WholeSpan) and part.summed is None]
        owners = [*(bucket.across.size for bucket in self.buckets), *(1 for _ in self._alone)]
        self._owners = torch.tensor(owners, dtype=torch.float64, device=self._mesh.device)
        self._places: dict[Tensor, list[tuple[Bucket, int]]] = {}
        for bucket in self.buckets:
            for number, place in enumerate(bucket.flat.places):
                self._places.setdefault(place.span.parameter, []).append((bucket, number))
        for parameter in self._places:
            on_gradient(parameter, self._receive)
        for module, own in zip(modules, units, strict=True):
            self._watch(module, own)
        self._rounds: deque[Bucket] = deque()
        self._to_come: set[Tensor] = set()
        self._under_way: deque[tuple[Bucket, Pending]] = deque()
        self._sums: deque[Pending] = deque()
        self._sink: Callable[[Tensor, Tensor], object] | None = None
        self._waiting: _Waiting | None = None
        self._held: tuple[Tensor, WeightGradient] | None = None

    @property
    def widens(self) -> bool:
        """Whether products of linears are to add weight gradients to these sums themselves: where the sums are wider
        than the weights, on a GPU; a CPU's products would be rounded before."""
        wider = self.dtype.itemsize > self.parameters.dtype.itemsize
        return wider and self._mesh.device.type == "cuda"

    @property
    def feeds_back(self) -> bool:
        """Whether what rounding leaves of gradients is sent later."""
        return self._sent == torch.int8 and len(self.data_ranks) > 1

    # -- sums

    def begin(self, microbatches: int) -> None:
        """Start a step of so many microbatches; the gradients of the last step are forgotten."""
        for span in self.spans:
            span.parameter.grad = None
        for bucket in self.buckets:
            bucket.begin(microbatches)
        # All ranks of a group end rounds in one order, whatever completes first.
        self._rounds = deque(self.buckets if self._keeps else ())

    @contextmanager
    def handed_to(self, sink: Callable[[Tensor, Tensor], object]) -> Iterator[None]:
        """Hand the gradients of what runs in this block to somebody, and sum none: it is no part of a step.

        Args:
            sink: Is given a parameter and a gradient of it, which is no more kept; more than one of a parameter that
                several chunks use, or whose gradients autograd would have kept.
        """
        for span in self.spans:
            span.parameter.grad = None
        self._sink = sink
        try:
            yield
            for part in self._alone:
                if part.span.parameter.grad is not None:
                    sink(part.span.parameter, part.span.parameter.grad)
        finally:
            self._sink = None
            for span in self.spans:
                span.parameter.grad = None

    @contextmanager
    def deferred(self) -> Iterator[Callable[[], None]]:
        """Let the gradients that linears hand on in the backward of this block wait (zero bubble, Qi et al. 2023, arXiv
        2401.10241) -> what computes and adds them, once.

        On the rungs that sum each microbatch's gradients all of them wait: whole ones are then there for as few
        parameters at a time as in a backward that is not split. Parameters that are resharded go in the block, for no
        weight gradient reads them.
        """
        waiting = self._waiting = _Waiting()
        try:
            yield partial(self._add_waiting, waiting)
        finally:
            self._waiting = None

    def finish(self) -> None:
        """Wait until every part's gradient is summed; those that never came are zero."""
        while self._rounds:
            self._end_round(self._rounds.popleft())
        for bucket in self.buckets:
            while bucket.ended < bucket.rounds:
                self._end_round(bucket)
        while self._under_way:
            self._take()
        self._sums += [bucket.start_all_reduce() for bucket in self.buckets if bucket.late]
        while self._sums:
            self._sums.popleft().wait()

    def squares(self) -> Tensor:
        """Return this rank's part of the sum of squares of the whole model's gradient, an fp64 scalar.

        Each element counts once: 1/n on each of the n ranks that own it.
        """
        owned = [*(bucket.gradient for bucket in self.buckets), *(part.gradient for part in self._alone)]
        if not owned:
            return torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        return (square_sums(owned) / self._owners).sum()

    def norm(self, squares: Tensor | None = None) -> Tensor:
        """Return the norm of the whole model's gradient, a scalar that is the same on every rank; fp32 at least.

        Args:
            squares: This rank's part, if that is known.

        Raises:
            RuntimeError: on CPUs, another rank was at another message.
        """
        self._norms += 1
        return norm_of(self.squares() if squares is None else squares, self._norms, self.dtype, self._mesh)

    def keep_residuals(self, go: Tensor) -> None:
        """Keep what rounding has left of this step's gradients for the next one, if ``go``, a bool scalar on the
        device, is true: a step without an update leaves nothing."""
        for bucket in self.buckets:
            bucket.keep_residual(go)

    def residuals(self, name: str) -> Iterator[tuple[Span, Tensor]]:
        """Yield (span, what rounding has left of its gradients on this rank, in its shape) of a parameter: none of
        those that are not sent in 8 bits."""
        for bucket, number in self._places.get(self.parameters[name], ()):
            if bucket.residual is not None:
                place = bucket.flat.places[number]
                yield place.span, place.of(bucket.residual)

    def receive(self, parameter: Tensor, gradient: Tensor | WeightGradient) -> None:
        """Add the gradient that the backward which runs has for a parameter: autograd's, or in its place what a linear
        hands on, which is multiplied into the memory where it is summed.

        Raises:
            RuntimeError: the step has had all gradients of this parameter.
        """
        self._to_come.discard(parameter)
        if self._waiting is None and isinstance(gradient, WeightGradient) and gradient.held:
            self.add_held()
            self._held = parameter, gradient
            return
        if self._waiting is None or (self._keeps and not isinstance(gradient, WeightGradient)):
            self._add(parameter, gradient)
            if not isinstance(gradient, WeightGradient) or not gradient.in_graph:
                self._reduce()
            return
        self._waiting.gradients.append((parameter, gradient))
        for bucket, _ in self._places.get(parameter, ()):
            if bucket in self.values and bucket.flat.parameters.isdisjoint(self._to_come):
                self.values[bucket].reshard(backward=True)

    @torch.no_grad()
    def add_held(self) -> None:
        """Add the gradient that is held for a message to travel beside its product, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            self._add(*held)
            self._reduce()

    def _receive(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.receive(parameter, parameter.grad)
            parameter.grad = None
        else:  # what has given its gradient to receive() is done, compiled code too
            self._reduce()

    def _add(self, parameter: Tensor, gradient: Tensor | WeightGradient | None) -> None:
        if self._sink is not None:
            if gradient is not None:
                self._sink(parameter, gradient.make() if isinstance(gradient, WeightGradient) else gradient)
            return
        places = self._places.get(parameter)
        if places is None:
            assert gradient is not None
            _add_alone(parameter, gradient)
            return
        if isinstance(gradient, WeightGradient) and len(places) > 1:  # each has pieces of it
            gradient = gradient.make()
        for bucket, number in places:
            bucket.add(number, gradient)

    def _add_waiting(self, waiting: _Waiting) -> None:
        if not self._keeps and self._sink is None:
            self._rounds.extend(waiting.buckets)
        gradients = waiting.gradients
        while gradients:
            parameter, gradient = gradients.popleft()
            later = next((each for _, each in gradients if isinstance(each, WeightGradient)), None)
            if later is not None:  # its messages travel beside this product
                later.start()
            self._add(parameter, gradient)
            self._reduce()

    def _reduce(self) -> None:
        while self._rounds and self._rounds[0].complete:
            self._end_round(self._rounds.popleft())

    def _end_round(self, bucket: Bucket) -> None:
        self._under_way.append((bucket, bucket.end_round()))
        if bucket in self.values:  # all of its gradients are there, so no more of this backward needs its parameters
            self.values[bucket].reshard(backward=True)
        while self._under_way and (len(self._under_way) > REDUCE_SCATTERS or not self._under_way[0][1].works):
            self._take()

    def _take(self) -> None:
        bucket, pending = self._under_way.popleft()
        bucket.take(pending)
        if bucket.summed == bucket.rounds and not bucket.late:
            self._sums.append(bucket.start_all_reduce())
        while self._sent != self.dtype and len(self._sums) > REDUCE_SCATTERS:  # each holds what it is rounded to
            self._sums.popleft().wait()

    def _watch(self, chunk: nn.Module, units: Sequence[FSDPUnit]) -> None:
        """Watch when a backward of a chunk begins and ends."""
        trained = {parameter for parameter in chunk.parameters() if parameter in self._places}
        buckets = [bucket for bucket in self.buckets if not trained.isdisjoint(bucket.flat.parameters)]

        def begin_backward(gradient: Tensor) -> None:
            self._to_come = set(trained)
            if self._waiting is not None:
                self._waiting.buckets = buckets
            elif not self._keeps and self._sink is None:
                self._rounds.extend(buckets)
            engine: Any = Variable._execution_engine
            engine.queue_callback(partial(self._end_backward, units))

        def after_forward(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(begin_backward)

        chunk.register_forward_hook(after_forward)

    def _end_backward(self, units: Sequence[FSDPUnit]) -> None:
        """Send the messages of gradients that have not come: others may have some, and messages are the same on all."""
        self.add_held()
        if self._waiting is not None and not self._keeps:
            self._waiting.gradients += ((parameter, None) for parameter in self._to_come)
        else:
            for parameter in self._to_come:
                self._add(parameter, None)
            self._reduce()
        self._to_come = set()
        if self._sink is not None or self._waiting is not None:  # there were no rounds, at whose ends this is done
            for unit in units:
                for values in unit.trained:
                    values.reshard(backward=True)
        end_backward(units)

    # -- parameters

    def updated(self) -> None:
        """Gather parameters that are split again, in the order of use: the values of the parts have changed."""
        self.narrow.changed({span.parameter for span in self.spans})
        for values in reversed(self.values.values()):
            values.updated()

    def settle(self) -> None:
        """Wait for parameters that are on their way: their parts are read until then, and are not to be changed."""
        for values in self.values.values():
            values.wait()

    # -- what is held, by the names and in the shapes of the parameters

    def parts_of(self, name: str) -> Sequence[OwnedShard]:
        """Return this rank's parts where a parameter lies; all have state of the same dtypes."""
        return [part for owned in self._owned[name] for part in owned.parts]

    def owned(self) -> Iterator[tuple[OwnedShard, Span, slice, slice]]:
        """Yield what this rank owns of each span: the part, with the place in the part and in the span."""
        for each in self._owned.values():
            yield from ((part, held.span, there, here) for held in each for part, there, here in held.overlaps())

    def owned_spans(self) -> list[WholeSpan | SplitSpan]:
        """Return the spans that are trained, with what this rank owns of them."""
        return [each for held in self._owned.values() for each in held if each.span.parameter.requires_grad]

    def read(
        self, name: str, of: Callable[[OwnedShard], Elements], host: Tensor | None, take: Take = all_of_it
    ) -> None:
        """Put together what parts have for a parameter, in its shape; all ranks do so for all names in one order.

        Args:
            name: The name of the parameter.
            of: The values that a part has.
            host: The tensor that it goes to; None where it is not wanted.
            take: The part of it that goes there.
        """
        if host is not None:
            host.copy_(take(self.collected(name, of)), non_blocking=True)
        elif self.splits:
            for owned in self._owned[name]:
                owned.collect(of)

    def collected(self, name: str, of: Callable[[OwnedShard], Elements]) -> Tensor:
        """Return what parts have for a parameter, in its shape; all ranks do so for all names in one order."""
        collected = [(owned.span, owned.collect(of)) for owned in self._owned[name]]
        span, whole = collected[0]
        if span.piece is not None:
            whole = torch.empty(span.parameter.shape, dtype=whole.dtype, device=span.parameter.device)
            for span, values in collected:
                span.of(whole).copy_(values)
        return whole

    def write(self, name: str, of: Callable[[OwnedShard], Elements], host: Tensor) -> None:
        """Fill the values of this rank's parts from a tensor of the parameter's shape, the inverse of :meth:`read`; a
        frozen one has none."""
        for owned in self._owned.get(name, ()):
            owned.spread(of, owned.span.of(host))

    def read_weight(self, name: str, host: Tensor | None, take: Take = all_of_it) -> None:
        """Read the parameter itself, as :meth:`read` does."""
        if self._is_resharded(name):
            self.read(name, lambda part: part.data, host, take)
            return
        whole = self.weight(name)
        if host is not None:
            host.copy_(take(whole), non_blocking=True)

    def weight(self, name: str) -> Tensor:
        """Return the parameter itself, in its shape, which shares its memory where all of it is here; all ranks that
        hold it do so for all names in one order."""
        if self._is_resharded(name):
            return self.collected(name, lambda part: part.data)
        for each in self._values_of(name):
            each.wait()
        return self.parameters[name].detach()

    def fill(self, name: str, host: Tensor) -> None:
        """Fill a parameter from a tensor of its shard's shape, of any float dtype."""
        values, host = self._values_of(name), self.parameters.as_held(name, host)
        for each in values:
            each.wait()
        if all(each.there for each in values):
            self.parameters[name].detach().copy_(host)
        if values:
            self.write(name, lambda part: part.data, host)
        self.narrow.changed([self.parameters[name]])

    def _is_resharded(self, name: str) -> bool:
        return any(each.reshards for each in self._values_of(name))

    def _values_of(self, name: str) -> list[FlatParameters]:
        return [owned.values for owned in self._owned.get(name, ()) if isinstance(owned, SplitSpan)]

    # -- how it is put together

    def _groups(self, spans: Sequence[Span]) -> tuple[Group, Group]:
        """Return, for spans with the same replicas, this rank's group that splits them and those that own the same
        shard."""
        mine = groups_of(self._mesh.shape, spans[0].replicas, self.replicas, self._mesh.rank)
        group, same = map(self._mesh.group, mine)
        return group, same

    def _bucket(self, flat: FlatLayout, same: Group) -> Bucket:
        late = crosses_stages(self._mesh.shape, flat.places[0].span.replicas)
        replicas = flat.places[0].span.replicas
        in_8_bits = self._sent == torch.int8 and len(replicas) > 1 and replicas == self.data_ranks
        sent = self._sent if in_8_bits or self._sent != torch.int8 else self.dtype
        self.buckets.append(Bucket(flat, same, self._uses, self.dtype, sent, self._keeps, late))
        return self.buckets[-1]

    def _share(self, bucket_bytes: int) -> None:
        """Make the buckets where every replica holds all: spans with the same replicas share them."""
        # A parameter whose spans differ goes into buckets as a whole: its gradient leaves autograd's hands at once.
        taken = {s.name for s in self.spans if len(s.replicas) > 1 or s.parameter.dtype != self.dtype}
        summed = dict[Span, Tensor]()
        spans = [span for span in self.spans if span.name in taken]
        for each in fill(self.parameters, spans, lambda span: span.replicas, bucket_bytes // self.dtype.itemsize):
            group, same = self._groups(each)
            bucket = self._bucket(FlatLayout(each, group), same)
            summed |= {place.span: place.of(bucket.gradient) for place in bucket.flat.places}
        for span in self.spans:
            part = WholeSpan(span, summed.get(span))
            self.parts.append(part)
            self._owned.setdefault(span.name, []).append(part)

    def _split(self, modules: Sequence[nn.Module], bucket_bytes: int, store: ShardStore) -> list[list[FSDPUnit]]:
        """Make the buckets of which each rank owns a shard -> the units of each chunk.

        The gradients of a bucket come together, so the same chunks use its spans; parameters that are resharded go with
        their unit.
        """
        still = spans_of(self.parameters, trained=False) if self._reshards else []
        own = {span.parameter for span in (*self.spans, *still)}
        chunk_modules = [list(modules_of(module, own)) for module in modules]
        users: dict[nn.Parameter, set[tuple[int, int]]] = {}
        for at, units in enumerate(chunk_modules):
            for number, (_, parameters) in enumerate(units):
                for parameter in parameters:
                    users.setdefault(parameter, set()).add((at, number * self._reshards))

        def key(span: Span) -> Hashable:
            # The other end of the pipeline uses a tied parameter elsewhere, and must come to the same buckets.
            tied = span.name if crosses_stages(self._mesh.shape, span.replicas) else ""
            dtype = span.parameter.dtype  # of what is quantised, bytes
            narrow = self._reshards and span.parameter in casts
            return span.replicas, frozenset(users[span.parameter]), tied, span.piece is None, dtype, narrow

        casts = self.parameters.casts
        most = math.inf if self._reshards else bucket_bytes // self.dtype.itemsize
        for spans in fill(self.parameters, still, key, most):
            self.frozen.append(FlatParameters(spans, self._groups(spans)[0], self._reshards, store))
            self._narrow(self.frozen[-1])
            self._own(self.frozen[-1], None)
        for spans in fill(self.parameters, self.spans, key, most):
            group, same = self._groups(spans)
            values = FlatParameters(spans, group, self._reshards, store)
            self._narrow(values)
            bucket = self._bucket(values.flat, same)
            self.values[bucket] = values
            self.parts += self._own(values, bucket.gradient)
        chunks = [
            [
                FSDPUnit(module, used_by(needs, self.values.values()), used_by(needs, self.frozen))
                for module, needs in units
            ]
            for units in chunk_modules
        ]
        if self._mesh.place.pp == self.parameters.layout.last_stage and chunks[-1]:
            chunks[-1][-1].stays = True
        for chunk in chunks:
            gather_in_turn(chunk, self._reshards)
        for values in (*self.values.values(), *self.frozen):
            values.reshard(backward=True)
        return chunks

    def _narrow(self, values: FlatParameters) -> None:
        if values.flat.parameters <= self.parameters.casts.keys() and values.narrows:
            values.narrow(self.parameters.casts, self.narrow)
        elif values.reshards:
            self.narrow.leave_out(values.flat.parameters)

    def _cast_before_use(self, chunks: Sequence[nn.Module]) -> None:
        """Have whole weights be cast before a unit that multiplies them runs, and behind what brings them."""
        for chunk in chunks:
            held = {p for p in chunk.parameters() if p in self.narrow.whole}
            for module, own in modules_of(chunk, held):
                module.register_forward_pre_hook(lambda _, inputs, own=own: self.narrow.ready(own))

    def _owned_parts(self, parameter: Tensor) -> Sequence[tuple[int, Tensor]]:
        """Return what this rank owns of a parameter, each part with the element of its span that it begins at; all of
        it where nobody updates it."""
        owned = self._owned.get(self._cast_names[parameter])
        if owned is None:
            return [(0, parameter)]
        return [(here.start, part.data[there]) for each in owned for part, there, here in each.overlaps()]

    def _own(self, values: FlatParameters, gradient: Tensor | None) -> Sequence[OwnedShard]:
        parts = values.parts(gradient)
        for place in values.flat.places:
            self._owned.setdefault(place.span.name, []).append(SplitSpan(place, values, parts))
        return parts


@dataclass(eq=False)
class _Waiting:
    """What a backward has given and is still to be added, and the buckets whose rounds that ends."""

    gradients: deque[tuple[Tensor, Tensor | WeightGradient | None]] = field(default_factory=deque)
    buckets: Sequence[Bucket] = ()


def _add_alone(parameter: Tensor, gradient: Tensor | WeightGradient) -> None:
    """Add a gradient that nobody shares where autograd would."""
    first = parameter.grad is None
    if first:
        parameter.grad = torch.empty_like(parameter)
    assert parameter.grad is not None
    if isinstance(gradient, WeightGradient):
        gradient.add_to(parameter.grad, first)
    else:
        _ = parameter.grad.copy_(gradient) if first else parameter.grad.add_(gradient)


def square_sums(gradients: list[Tensor]) -> Tensor:
    """Return [n], for n gradients, the sums of their squares in fp64: too exact for the order to show in fp32.

    Each is read once. On a GPU one kernel widens what it reads; a CPU has none that does.
    """
    if gradients[0].device.type == "cpu":
        return torch.stack([_square_sum(gradient) for gradient in gradients])
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square_()


def _square_sum(gradient: Tensor) -> Tensor:
    blocks = gradient.reshape(-1).split(NORM_BLOCK)
    memory, total = torch.empty_like(blocks[0], dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for block in blocks:
        wide = memory[: len(block)].copy_(block)
        total += torch.dot(wide, wide)
    return total


def norm_of(squares: Tensor, number: int, dtype: torch.dtype, mesh: Mesh) -> Tensor:
    """Return the root of the sum over all ranks, in the dtype of the gradients or fp32: whoever holds which part of the
    gradient, it is the same number, bit for bit but for one step in millions.

    The number of the sum, which is another each time, goes with it: this message is the commit of a step. gloo takes
    one of another sum, from a rank that has left one out, for what it waits for, which is an error. What is queued on a
    GPU behind a message that was aborted still runs: there the norm is then no number, and the device leaves the update
    out.
    """
    summed = all_reduce_(torch.stack([squares, torch.full_like(squares, number)]), mesh.world)
    total, numbers = summed.unbind()
    whole = numbers == number * mesh.shape.world
    if mesh.device.type == "cpu":
        if not whole:
            raise RuntimeError("another rank was at another message than the norm of the gradient: nobody has that")
    else:
        total = torch.where(whole, total, math.nan)
    return total.sqrt().to(torch.promote_types(dtype, torch.float32))
