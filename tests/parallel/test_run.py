"""The pipeline executor with tiny modules: what it computes, what it keeps, and what it sends in which order."""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import pytest
import torch
from connections import connecting_at_first_use
from drawn_orders import drawn_order
from in_flight import in_flight, takes
from pool import Pool
from stage_messages import arrivals
from torch import Tensor, nn

from megacore.parallel.enum_errors import IN_GROUPS
from megacore.parallel.mesh import BACKWARD, FORWARD, Mesh
from megacore.parallel.pipeline import run
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.pipeline.schedules import SCHEDULES, Message, Schedule, builder, simulate
from megacore.parallel.virtual_stages import placement_of, stage_of, virtual_stage
from megacore.parallel.weights.layout import MeshShape

WIDTH = 4


@dataclass(frozen=True)
class Tokens:
    """A microbatch; their sizes differ."""

    number: int

    @property
    def activation(self) -> tuple[int, ...]:
        return (2 + self.number % 3, WIDTH)

    @property
    def data(self) -> Tensor:
        return torch.randn(self.activation, generator=torch.Generator().manual_seed(self.number), dtype=torch.float64)


class Activations:
    """Stands for what a forward keeps for its backward: it goes when its node of the graph goes."""


class Weights:
    """Adds gradients of weights, at once or where they are let wait later."""

    def __init__(self) -> None:
        self.now: deque[Callable[[], None]] | None = None

    @contextmanager
    def deferred(self) -> Iterator[Callable[[], None]]:
        waiting = self.now = deque[Callable[[], None]]()

        def add() -> None:
            while waiting:
                waiting.popleft()()

        try:
            yield add
        finally:
            self.now = None

    def hand(self, add: Callable[[], None]) -> None:
        if self.now is None:
            add()
        else:
            self.now.append(add)


class _Scaled(torch.autograd.Function):
    """weight * x, which keeps activations for both gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, kept: Activations, weights: Weights) -> Tensor:
        ctx.x, ctx.weight, ctx.kept, ctx.weights = x, weight, kept, weights
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight, kept = ctx.x, ctx.weight, ctx.kept

        def add(kept: Activations = kept) -> None:
            gradient = (x * dy).sum(0)
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

        ctx.weights.hand(add)
        return dy * weight, None, None, None


class Chunk(nn.Module):
    """x -> tanh(weight * x) of the first or a middle virtual stage; the last one sums it to a loss."""

    def __init__(self, virtual: int, virtuals: int) -> None:
        super().__init__()
        self.virtual, self.last = virtual, virtual == virtuals - 1
        generator = torch.Generator().manual_seed(100 + virtual)
        self.weight = nn.Parameter(torch.rand(WIDTH, generator=generator, dtype=torch.float64) + 0.5)
        self.weights = Weights()
        self.kept: weakref.WeakSet[Activations] = weakref.WeakSet()
        self.outputs: list[weakref.ref[Tensor]] = []
        self.observe: Callable[[], None] = lambda: None

    @property
    def outputs_alive(self) -> int:
        return sum(output() is not None for output in self.outputs)

    def forward(self, x: Tensor | None, microbatch: Tokens) -> Tensor:
        if x is None:
            x = microbatch.data
        assert x.shape == microbatch.activation
        kept = Activations()
        self.kept.add(kept)
        if not x.requires_grad:
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        y = torch.tanh(_Scaled.apply(x, self.weight, kept, self.weights))
        y = (y * (microbatch.number + 1)).sum() if self.last else y
        self.outputs.append(weakref.ref(y))
        self.observe()
        return y


def alone(virtuals: int, microbatches: int, scale: float) -> tuple[float, list[Tensor]]:
    """(loss, gradients of the weights) without a pipeline."""
    chunks = [Chunk(v, virtuals) for v in range(virtuals)]
    total = torch.zeros((), dtype=torch.float64)
    for m in range(microbatches):
        x: Tensor | None = None
        for chunk in chunks:
            x = chunk(x, Tokens(m))
        assert x is not None
        total = total + x * scale
    total.backward()
    return total.item(), [chunk.weight.grad for chunk in chunks if chunk.weight.grad is not None]


@dataclass
class Seen:
    """Of one step on one rank."""

    loss: float
    evaluated: float
    gradients: list[Tensor]
    most_kept: int
    most_outputs: int
    left: int
    sent: dict[str, list[Message]]


def train(
    chunks: int, counts: Sequence[int], schedule: str, orders: Sequence[Schedule | None] = (), group: int | None = None
) -> list[Seen]:
    """As on NCCL: a first message waits for its receiver to ask for it, and a step has no first messages."""
    stages = torch.distributed.get_world_size()
    with connecting_at_first_use() as connected:
        mesh = Mesh.create(MeshShape(pp=stages))
        before = len(connected)
        each = zip_longest(counts, orders)
        seen = [step(mesh, chunks, microbatches, schedule, order, group) for microbatches, order in each]
        assert len(connected) == before > 0, connected
    return seen


def step(
    mesh: Mesh,
    chunks: int,
    microbatches: int,
    schedule: str,
    order: Schedule | None = None,
    group: int | None = None,
) -> Seen:
    stages = mesh.shape.pp
    placed = (virtual_stage(mesh.place.pp, chunk, stages, placement_of(schedule)) for chunk in range(chunks))
    modules = [Chunk(virtual, chunks * stages) for virtual in placed]
    most_kept, most_outputs = 0, 0

    def observe() -> None:
        nonlocal most_kept, most_outputs
        most_kept = max(most_kept, sum(len(module.kept) for module in modules))
        most_outputs = max(most_outputs, sum(module.outputs_alive for module in modules))

    weights = Weights()
    for module in modules:
        module.observe, module.weights = observe, weights
    pipeline = Pipeline(mesh, modules, torch.float64, schedule, weights, order=order, group=group)
    batch, scale = [Tokens(m) for m in range(microbatches)], torch.tensor(0.5, dtype=torch.float64)
    gc.disable()  # what is freed must go by itself
    try:
        with recorded(mesh) as sent:
            loss = pipeline.train(batch, scale)
        left = sum(len(module.kept) + module.outputs_alive for module in modules)
    finally:
        gc.enable()
    gradients = [module.weight.grad.clone() for module in modules if module.weight.grad is not None]
    evaluated = pipeline.evaluate(batch, scale)
    for module, gradient in zip(modules, gradients, strict=True):
        assert module.weight.grad is not None
        assert torch.equal(module.weight.grad, gradient), "an evaluation left gradients"
    return Seen(loss.item(), evaluated.item(), gradients, most_kept, most_outputs, left, sent)


@contextmanager
def recorded(mesh: Mesh) -> Iterator[dict[str, list[Message]]]:
    """{direction: messages in the order in which this rank sends them}."""
    sent: dict[str, list[Message]] = {FORWARD: [], BACKWARD: []}
    send = run.Outbox.send

    def record(self: run.Outbox, message: Message, tensor: Tensor) -> None:
        direction = FORWARD if self.channel is mesh.channel(FORWARD, mesh.place.pp) else BACKWARD
        sent[direction].append(message)
        send(self, message, tensor)

    run.Outbox.send = record  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        run.Outbox.send = send  # type: ignore[method-assign]


COUNTS = (1, 2, 3, 5, 7)
RUNS = [
    pytest.param(stages, chunks, name, id=f"{name}-{stages}x{chunks}", marks=[pytest.mark.quick] * (chunks == 2))
    for stages in (2, 3, 4)
    for name in SCHEDULES
    for chunks in (1, 2, 3)
    if takes(name, chunks) and not (name.endswith("interleaved") and chunks == 1)
]


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("stages", "chunks", "schedule"), RUNS)
def test_any_number_of_microbatches(pool: Pool, stages: int, chunks: int, schedule: str) -> None:
    check_any_number(pool, stages, chunks, schedule, None)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(("stages", "chunks", "group"), [(2, 3, 3), (3, 2, 5)])
@pytest.mark.parametrize("schedule", IN_GROUPS)
def test_any_number_in_groups(pool: Pool, stages: int, chunks: int, schedule: str, group: int) -> None:
    check_any_number(pool, stages, chunks, schedule, group)


def check_any_number(pool: Pool, stages: int, chunks: int, schedule: str, group: int | None) -> None:
    """It ends, computes what one process computes, keeps what the schedule needs and sends in the order expected."""
    results = pool.run(stages, train, chunks, COUNTS, schedule, (), group)
    for i, microbatches in enumerate(COUNTS):
        seen = [result[i] for result in results]
        loss, gradients = alone(chunks * stages, microbatches, 0.5)
        assert sum(s.loss for s in seen) == pytest.approx(loss, rel=1e-12)
        assert sum(s.evaluated for s in seen) == pytest.approx(loss, rel=1e-12)
        placement = placement_of(schedule)
        last = stage_of(chunks * stages - 1, stages, placement)
        assert all(s.loss == 0 for stage, s in enumerate(seen) if stage != last)
        for virtual, want in enumerate(gradients):
            chunk, stage = virtual // stages, stage_of(virtual, stages, placement)
            torch.testing.assert_close(seen[stage].gradients[chunk], want, rtol=1e-12, atol=0)
        plan = builder(schedule, group)(stages, chunks, microbatches)
        bounds = in_flight(schedule, stages, chunks, microbatches, group)
        for stage, found in enumerate(seen):
            assert found.most_kept == bounds[stage], "activations in flight"
            assert found.most_outputs == 1, "an output outlives its sending"
            assert found.left == 0
            assert tuple(found.sent[FORWARD]) == arrivals(plan, (stage + 1) % stages, placement)["forward"]
            assert tuple(found.sent[BACKWARD]) == arrivals(plan, (stage - 1) % stages, placement)["backward"]


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("stages", "chunks", "schedule"), [run for run in RUNS if run.values[2] != "gpipe"])
def test_orders_that_were_searched_for(pool: Pool, stages: int, chunks: int, schedule: str, seed: int) -> None:
    """They end, compute what one process computes, and hold what the simulator says."""
    orders = [drawn_order(seed + 10 * m, schedule, stages, chunks, m) for m in COUNTS]
    results = pool.run(stages, train, chunks, COUNTS, schedule, orders)
    placement = placement_of(schedule)
    for i, (microbatches, order) in enumerate(zip(COUNTS, orders, strict=True)):
        loss, gradients = alone(chunks * stages, microbatches, 0.5)
        assert sum(result[i].loss for result in results) == pytest.approx(loss, rel=1e-12)
        for virtual, want in enumerate(gradients):
            found = results[stage_of(virtual, stages, placement)][i]
            torch.testing.assert_close(found.gradients[virtual // stages], want, rtol=1e-12, atol=0)
        peaks = simulate(order, placement=placement).peaks
        assert [result[i].most_kept for result in results] == [sum(held) for held in peaks]
        assert not any(result[i].left for result in results)


def test_an_order_is_for_one_number_of_microbatches() -> None:
    order = drawn_order(1, "1f1b", 1, 1, 3)
    pipeline = Pipeline(Mesh.single(), [Chunk(0, 1)], torch.float64, order=order)
    with pytest.raises(ValueError, match="one of 1 stages, 1 chunks and 3 microbatches, not of 1, 1 and 2"):
        pipeline.train([Tokens(0), Tokens(1)], torch.ones(()))


@pytest.mark.quick
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_one_stage_needs_no_process_group(chunks: int) -> None:
    for microbatches in (1, 3):
        seen = step(Mesh.single(), chunks, microbatches, "interleaved")
        loss, gradients = alone(chunks, microbatches, 0.5)
        assert seen.loss == pytest.approx(loss, rel=1e-12)
        assert seen.left == 0
        for got, want in zip(seen.gradients, gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_a_split_backward_needs_who_lets_gradients_wait() -> None:
    with pytest.raises(ValueError, match="schedule zb-h1 splits the backward: give the `gradients` that wait"):
        Pipeline(Mesh.single(), [Chunk(0, 1)], torch.float64, "zb-h1")


def test_gradients_accumulate_over_steps() -> None:
    module = Chunk(0, 1)
    pipeline = Pipeline(Mesh.single(), [module], torch.float64)
    one = torch.tensor(1.0, dtype=torch.float64)
    pipeline.train([Tokens(0)], one)
    assert module.weight.grad is not None
    first = module.weight.grad.clone()
    pipeline.train([Tokens(0)], 2 * one)
    torch.testing.assert_close(module.weight.grad, 3 * first)


def test_evaluation_keeps_nothing() -> None:
    module, most = Chunk(0, 1), [0]
    module.observe = lambda: most.append(len(module.kept))
    Pipeline(Mesh.single(), [module], torch.float64).evaluate([Tokens(m) for m in range(4)], torch.tensor(1.0))
    assert max(most) == 1 and not module.kept


def out_of_order() -> list[float]:
    """Three messages are sent, and used in another order; the sender lets go of what is known to have arrived."""
    mesh = Mesh.create(MeshShape(pp=2))
    at = {Message(0, 0): 1, Message(0, 1): 2, Message(1, 0): 0}
    channel = mesh.channel(FORWARD, 0)
    if mesh.rank == 0:
        outbox = run.Outbox(channel, 1, at)
        for number, message in enumerate(at):
            outbox.send(message, torch.full((3,), float(number)))
        outbox.reached(1)
        assert list(outbox.leaving) == [Message(0, 1)]
        outbox.reached(2)
        return [float(len(outbox.leaving))]
    inbox = run.Inbox(channel, 0, at, lambda message: torch.empty(3))
    for message in at:
        inbox.make_room(message)
    inbox.post()
    return [inbox.take(message)[0].item() for message in sorted(at, key=at.__getitem__)]


def test_messages_may_be_used_in_another_order_than_sent(pool: Pool) -> None:
    assert pool.run(2, out_of_order) == [[0.0], [2.0, 0.0, 1.0]]
