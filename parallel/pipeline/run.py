"""The executor: runs the actions of any schedule, and derives every message from it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.parallel.enum_errors import SPLIT_BACKWARD, Placement, check_choice
from megacore.parallel.mesh import BACKWARD, FORWARD, Group, Mesh
from megacore.parallel.pipeline.schedules import (
    RECEIVE,
    SCHEDULES,
    SEND,
    Action,
    Direction,
    F,
    Kind,
    Message,
    Request,
    Schedule,
    builder,
    forward_only,
    ordered,
    requests,
    sent_after,
    steps_of,
)
from megacore.parallel.virtual_stages import placement_of, stage_of, virtual_stage

STEP: Mapping[Direction, int] = {FORWARD: 1, BACKWARD: -1}
"""The stages that each channel leads on, 1 or -1."""
OPPOSITE: Mapping[Direction, Direction] = {FORWARD: BACKWARD, BACKWARD: FORWARD}


class MicrobatchLike(Protocol):
    """A microbatch, of which a step is made; chunks read from it whatever they need."""

    @property
    def activation(self) -> tuple[int, ...]:
        """Shape of the activations between stages: (tokens/tp, embed)."""
        ...


class WeightGradients(Protocol):
    """Sums weight gradients, and lets those of a backward wait."""

    def deferred(self) -> AbstractContextManager[Callable[[], None]]:
        """Let the weight gradients of the backward in this block wait -> what computes and adds them, once."""
        ...


M = TypeVar("M", bound=MicrobatchLike)


@dataclass
class Inbox:
    """Receives the messages of one channel in the order in which they are sent.

    Args:
        channel: The channel that they come from.
        source: Global rank of the sender.
        sent_at: The action after which the sender sends each message, in the order of sending.
        allocate: Makes the buffer of a message.
    """

    channel: Group
    source: int
    sent_at: Mapping[Message, int]
    allocate: Callable[[Message], Tensor]
    room: deque[tuple[Message, Tensor]] = field(default_factory=deque)
    posted: deque[tuple[Message, dist.Work | None, Tensor]] = field(default_factory=deque)
    arrived: dict[Message, Tensor] = field(default_factory=dict)

    def make_room(self, message: Message) -> None:
        """Allocate what will hold the next message."""
        self.room.append((message, self.allocate(message)))

    def post(self) -> None:
        """Ask for the messages that there is room for."""
        while self.room:
            message, buffer = self.room.popleft()
            self.posted.append((message, dist.irecv(buffer, self.source, group=self.channel.process_group), buffer))

    def take(self, message: Message) -> Tensor:
        """Wait for a message that has been asked for."""
        while message not in self.arrived:
            first, work, buffer = self.posted.popleft()
            if work:
                with self.channel.recorder.over(RECEIVE, *first):
                    work.wait()
            self.arrived[first] = buffer
        return self.arrived.pop(message)


@dataclass
class Outbox:
    """Sends on one channel without waiting, and keeps a tensor only until it is known to have arrived.

    Args:
        channel: The channel that the messages go to.
        target: Global rank of the receiver.
        asked_at: The number of actions after which the receiver asks for each message, in the order of sending.
    """

    channel: Group
    target: int
    asked_at: Mapping[Message, int]
    leaving: dict[Message, tuple[dist.Work | None, Tensor]] = field(default_factory=dict)
    early: dict[Message, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._order = deque(self.asked_at)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send a message, once those before it are: in a V two that run in turns may send on one channel."""
        self.early[message] = tensor.contiguous()
        while self._order and self._order[0] in self.early:
            first = self._order.popleft()
            ready = self.early.pop(first)
            self.leaving[first] = dist.isend(ready, self.target, group=self.channel.process_group), ready

    def reached(self, position: float) -> None:
        """Note that the receiver has done its actions up to this one, so what it asked for before them arrives.

        A gloo send would not tell, and waiting for one that has arrived costs nothing.
        """
        for message in [message for message in self.leaving if self.asked_at[message] <= position]:
            work, _ = self.leaving.pop(message)
            if work:
                with self.channel.recorder.over(SEND, *message):
                    work.wait()


@dataclass
class Pipeline:
    """The chunks of one stage and the schedule that drives them.

    The chunk of the last virtual stage returns the loss of its microbatch, every other one its activations. A loss may
    be [n]: the first number is trained, the others, which have no gradient, are told.

    Args:
        chunks: This rank's, chunk by chunk: ``chunk(activations or None, microbatch) -> activations or loss``.
        dtype: The dtype of the activations between stages.
        schedule: A name from :data:`~parallel.pipeline.schedules.SCHEDULES`.
        gradients: Lets weight gradients wait; needed by schedules whose backward is split.
        loss: The shape of the loss.
        order: The actions of each stage, in place of the schedule's own order of them.
        group: The most microbatches that go through all chunks before the next ones do; None for as few as can be.

    Raises:
        ValueError: there is no such schedule, or nobody to let weight gradients wait; or it has no such groups.
    """

    mesh: Mesh
    chunks: Sequence[Callable[[Tensor | None, Any], Tensor]]
    dtype: torch.dtype
    schedule: str = "1f1b"
    gradients: WeightGradients | None = None
    loss: tuple[int, ...] = ()
    order: Schedule | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.schedule in SPLIT_BACKWARD and self.gradients is None:
            raise ValueError(f"schedule {self.schedule} splits the backward: give the `gradients` that wait")
        self.placement = placement_of(self.schedule)
        self._build = builder(self.schedule, self.group) if self.order is None else ordered(self.order)
        self.on: Any = torch.get_device_module(self.mesh.device)
        self.receiving = self.on.Stream()

    def train(
        self, microbatches: Sequence[MicrobatchLike], scale: Tensor, enter: Callable[[Kind], object] = lambda _: None
    ) -> Tensor:
        """Run the forward and backward of a step; gradients accumulate on the parameters.

        Args:
            microbatches: The microbatches of this data-parallel rank.
            scale: The factor of each loss, a scalar: one over the global number of counted tokens or pairs.
            enter: Told the kind of each action before it.

        Returns:
            This rank's part of the step's loss, a scalar or [n]; the loss is the sum over all ranks.
        """
        return _Run(self, self._build, microbatches, scale).run(enter)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicrobatchLike], scale: Tensor) -> Tensor:
        """Run the forwards only; arguments and result are :meth:`train`'s."""
        return _Run(self, forward_only, microbatches, scale).run(lambda _: None)


def forward(
    mesh: Mesh,
    chunks: Sequence[Callable[[Tensor | None, M], Tensor]],
    microbatch: M,
    dtype: torch.dtype,
    placement: Placement = "loop",
) -> Tensor | None:
    """Run the forward of one microbatch through all virtual stages in turn -> what the last one gives; None on other
    stages.

    Args:
        chunks: This rank's, ``chunk(activations or None, microbatch) -> activations``, or of the last one anything.
        microbatch: The same on all stages.
        dtype: The dtype of the activations between stages.
        placement: How the virtual stages are placed.
    """
    stages, stage = mesh.shape.pp, mesh.place.pp
    last = stages * len(chunks) - 1

    def sent(virtual: int) -> Request | None:
        """Return what follows the forward of a virtual stage, if it goes to another stage."""
        source = stage_of(virtual, stages, placement)
        return sent_after(F(virtual // stages, 0), source, stages, last, placement)

    y = None
    for chunk, run in enumerate(chunks):
        virtual, x = virtual_stage(stage, chunk, stages, placement), y
        if virtual > 0 and (request := sent(virtual - 1)):
            x = torch.empty(microbatch.activation, dtype=dtype, device=mesh.device)
            source = stage_of(virtual - 1, stages, placement)
            dist.recv(x, mesh.peer(source), group=mesh.channel(request.direction, source).process_group)
        y = run(x, microbatch)
        if request := sent(virtual):
            target = mesh.peer(stage + STEP[request.direction])
            dist.send(y.contiguous(), target, group=mesh.channel(request.direction, stage).process_group)
    return y if stage == stage_of(last, stages, placement) else None


@lru_cache(maxsize=16)
def _planned(
    build: Callable[[int, int, int], Schedule], stages: int, chunks: int, microbatches: int, placement: Placement
) -> tuple[Schedule, tuple[tuple[tuple[Request, ...], ...], ...]]:
    """Return a schedule, and when its stages ask for messages: the same in every step."""
    schedule = build(stages, chunks, microbatches)
    return schedule, requests(schedule, placement)


class _Run:
    """One step: what is in flight, and nothing that outlives it."""

    def __init__(
        self,
        pipeline: Pipeline,
        build: Callable[[int, int, int], Schedule],
        microbatches: Sequence[MicrobatchLike],
        scale: Tensor,
    ) -> None:
        self.pipeline, self.microbatches = pipeline, microbatches
        mesh = pipeline.mesh
        self.stages, self.stage = mesh.shape.pp, mesh.place.pp
        placement = pipeline.placement
        schedule, asked = _planned(build, self.stages, len(pipeline.chunks), len(microbatches), placement)
        self.actions, self.requests = schedule[self.stage], asked[self.stage]
        dtype = torch.promote_types(pipeline.dtype, torch.float32)
        self.loss = torch.zeros(pipeline.loss, dtype=dtype, device=mesh.device)
        self.scale = scale.to(self.loss.dtype)
        # (input, edge of the output) of each forward whose backward is still to come; the output itself is let go. It
        # has no edge where the first chunk trains nothing.
        self.alive: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = {}
        self.waiting: dict[tuple[int, int], Callable[[], None]] = {}
        self.local: dict[tuple[Kind, Message], Tensor] = {}
        self.inboxes: dict[Direction, Inbox] = {}
        self.outboxes: dict[Direction, Outbox] = {}
        if self.stages > 1:
            for direction, step in STEP.items():
                source, target = (self.stage - step) % self.stages, (self.stage + step) % self.stages
                sent = (sent_after(action, source, self.stages, self._last, placement) for action in schedule[source])
                sent_at = {
                    request.message: position
                    for position, request in enumerate(sent)
                    if request and request.direction == direction
                }
                asked_at = {
                    request.message: position
                    for position, found in enumerate(asked[target])
                    for request in found
                    if request.direction == direction
                }
                self.inboxes[direction] = Inbox(
                    mesh.channel(direction, source), mesh.peer(source), sent_at, self._buffer
                )
                self.outboxes[direction] = Outbox(mesh.channel(direction, self.stage), mesh.peer(target), asked_at)

    def run(self, enter: Callable[[Kind], object]) -> Tensor:
        position = 0
        self._make_room(position)
        self._ask()
        for step in steps_of(self.actions):
            for action in step:
                enter(action.kind)
            position += len(step)
            self._make_room(position)
            self.pipeline.mesh.baton.run(*(partial(self._act, action) for action in step))
            self._ask()
        for outbox in self.outboxes.values():
            outbox.reached(math.inf)
        return self.loss

    def _act(self, action: Action) -> None:
        run = {"F": self._forward, "B": self._backward, "I": self._input_gradients, "W": self._weight_gradients}
        with self.pipeline.mesh.recorder.over(action.kind, action.chunk, action.microbatch):
            run[action.kind](action.chunk, action.microbatch)

    def _make_room(self, position: int) -> None:
        """Allocate what is asked for after so many actions. It may come while the last of them computes: allocated
        before that is launched, the memory is that of nobody who runs later."""
        for direction, message in self.requests[position]:
            self.inboxes[direction].make_room(message)
            self.pipeline.receiving.wait_stream(self.pipeline.on.current_stream())

    def _ask(self) -> None:
        for inbox in self.inboxes.values():
            with self.pipeline.on.stream(self.pipeline.receiving):
                inbox.post()

    def _forward(self, chunk: int, m: int) -> None:
        x = None if self._virtual(chunk) == 0 else self._take("F", chunk, m)
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        y = self.pipeline.chunks[chunk](x, self.microbatches[m])
        if self._virtual(chunk) == self._last:
            y = y * self.scale
            self.loss += y.detach()
        else:
            self._send("F", chunk, m, y.detach())
        if torch.is_grad_enabled():
            self.alive[chunk, m] = x, get_gradient_edge(y) if y.requires_grad else None

    def _backward(self, chunk: int, m: int) -> None:
        x, edge = self.alive.pop((chunk, m))
        if self._virtual(chunk) == self._last:
            gradient = torch.ones(self.pipeline.loss, dtype=self.loss.dtype, device=self.loss.device)
        else:
            gradient = self._take("B", chunk, m)
        if edge is not None:
            torch.autograd.backward([edge], [gradient])
        if x is not None:
            assert x.grad is not None  # each chunk's output depends on its input
            self._send("B", chunk, m, x.grad)

    def _input_gradients(self, chunk: int, m: int) -> None:
        assert self.pipeline.gradients is not None
        with self.pipeline.gradients.deferred() as self.waiting[chunk, m]:
            self._backward(chunk, m)

    def _weight_gradients(self, chunk: int, m: int) -> None:
        with torch.no_grad():  # there is no backward around it that would say so
            self.waiting.pop((chunk, m))()

    @property
    def _last(self) -> int:
        return self.stages * len(self.pipeline.chunks) - 1

    def _virtual(self, chunk: int) -> int:
        return virtual_stage(self.stage, chunk, self.stages, self.pipeline.placement)

    def _send(self, kind: Kind, chunk: int, m: int, tensor: Tensor) -> None:
        """Send what a forward or a backward gives to the virtual stage that it is for."""
        to = self._virtual(chunk) + (1 if kind == "F" else -1)
        request = sent_after(Action(kind, chunk, m), self.stage, self.stages, self._last, self.pipeline.placement)
        if request is None:
            self.local[kind, Message(to // self.stages, m)] = tensor
        else:
            self.outboxes[request.direction].send(request.message, tensor)

    def _take(self, kind: Kind, chunk: int, m: int) -> Tensor:
        """Return what the forward or the backward of the virtual stage before or after a chunk has given."""
        message = Message(chunk, m)
        if (kind, message) in self.local:
            return self.local.pop((kind, message))
        # In a V, what goes forward there comes back there where the chunk is odd.
        back = self.pipeline.placement == "v" and chunk % 2 == 1
        direction: Direction = FORWARD if (kind == "F") != back else BACKWARD
        inbox = self.inboxes[direction]
        tensor = inbox.take(message)
        # Its sender is the receiver of what leaves in the other direction.
        self.outboxes[OPPOSITE[direction]].reached(inbox.sent_at[message])
        return tensor

    def _buffer(self, message: Message) -> Tensor:
        shape = self.microbatches[message.microbatch].activation
        return torch.empty(shape, dtype=self.pipeline.dtype, device=self.loss.device)
