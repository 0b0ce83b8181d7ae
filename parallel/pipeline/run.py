"""The executor: runs the actions of any schedule, and derives every message from it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.parallel.enum_errors import SPLIT_BACKWARD, check_choice
from megacore.parallel.mesh import BACKWARD, FORWARD, Group, Mesh
from megacore.parallel.pipeline.schedules import (
    RECEIVE,
    SCHEDULES,
    SEND,
    Direction,
    Kind,
    Message,
    Request,
    Schedule,
    arrivals,
    forward_only,
    requests,
)

STEP: Mapping[Direction, int] = {FORWARD: 1, BACKWARD: -1}
"""The stages that each channel leads on, 1 or -1."""
KINDS: Mapping[Direction, tuple[Kind, ...]] = {FORWARD: ("F",), BACKWARD: ("B", "I")}
"""The kinds of actions that send on each channel."""
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
        asked_at: The number of actions after which the receiver asks for each message.
    """

    channel: Group
    target: int
    asked_at: Mapping[Message, int]
    leaving: dict[Message, tuple[dist.Work | None, Tensor]] = field(default_factory=dict)

    def send(self, message: Message, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        self.leaving[message] = dist.isend(tensor, self.target, group=self.channel.process_group), tensor

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
        mesh: The live mesh.
        chunks: This rank's, chunk by chunk: ``chunk(activations or None, microbatch) -> activations or loss``.
        dtype: The dtype of the activations between stages.
        schedule: A name from :data:`~parallel.pipeline.schedules.SCHEDULES`.
        gradients: Lets weight gradients wait; needed by schedules whose backward is split.
        loss: The shape of the loss.

    Raises:
        ValueError: there is no such schedule, or nobody to let weight gradients wait.
    """

    mesh: Mesh
    chunks: Sequence[Callable[[Tensor | None, Any], Tensor]]
    dtype: torch.dtype
    schedule: str = "1f1b"
    gradients: WeightGradients | None = None
    loss: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.schedule in SPLIT_BACKWARD and self.gradients is None:
            raise ValueError(f"schedule {self.schedule} splits the backward: give the `gradients` that wait")
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
        return _Run(self, SCHEDULES[self.schedule], microbatches, scale).run(enter)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicrobatchLike], scale: Tensor) -> Tensor:
        """Run the forwards only; arguments and result are :meth:`train`'s."""
        return _Run(self, forward_only, microbatches, scale).run(lambda _: None)


def forward(
    mesh: Mesh, chunks: Sequence[Callable[[Tensor | None, M], Tensor]], microbatch: M, dtype: torch.dtype
) -> Tensor | None:
    """Run the forward of one microbatch through all virtual stages in turn -> what the last one gives; None on other
    stages.

    Args:
        mesh: The live mesh.
        chunks: This rank's, ``chunk(activations or None, microbatch) -> activations``, or of the last one anything.
        microbatch: The same on all stages.
        dtype: The dtype of the activations between stages.
    """
    stages, stage = mesh.shape.pp, mesh.place.pp
    last = stages * len(chunks) - 1
    y = None
    for virtual in range(stage, last + 1, stages):
        x = y
        if virtual > 0 and stages > 1:
            x = torch.empty(microbatch.activation, dtype=dtype, device=mesh.device)
            before = (stage - 1) % stages
            dist.recv(x, mesh.peer(before), group=mesh.channel(FORWARD, before).process_group)
        y = chunks[virtual // stages](x, microbatch)
        if virtual < last and stages > 1:
            dist.send(y.contiguous(), mesh.peer(stage + 1), group=mesh.channel(FORWARD, stage).process_group)
    return y if stage == stages - 1 else None


@lru_cache(maxsize=16)
def _planned(
    build: Callable[[int, int, int], Schedule], stages: int, chunks: int, microbatches: int
) -> tuple[Schedule, tuple[tuple[tuple[Request, ...], ...], ...]]:
    """Return a schedule, and when its stages ask for messages: the same in every step."""
    schedule = build(stages, chunks, microbatches)
    return schedule, requests(schedule)


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
        schedule, asked = _planned(build, self.stages, len(pipeline.chunks), len(microbatches))
        self.actions, self.requests = schedule[self.stage], asked[self.stage]
        dtype = torch.promote_types(pipeline.dtype, torch.float32)
        self.loss = torch.zeros(pipeline.loss, dtype=dtype, device=mesh.device)
        self.scale = scale.to(self.loss.dtype)
        # (input, edge of the output) of each forward whose backward is still to come; the output itself is let go. It
        # has no edge where the first chunk trains nothing.
        self.alive: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = {}
        self.waiting: dict[tuple[int, int], Callable[[], None]] = {}
        self.local: dict[tuple[Direction, Message], Tensor] = {}
        self.inboxes: dict[Direction, Inbox] = {}
        self.outboxes: dict[Direction, Outbox] = {}
        if self.stages > 1:
            expected = arrivals(schedule, self.stage)
            for direction, step in STEP.items():
                source, target = (self.stage - step) % self.stages, (self.stage + step) % self.stages
                at = {
                    (action.chunk, action.microbatch): position
                    for position, action in enumerate(schedule[source])
                    if action.kind in KINDS[direction]
                }
                sent_at = {
                    message: at[self._neighbour(message.chunk, -step), message.microbatch]
                    for message in expected[direction]
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
        step = {"F": self._forward, "B": self._backward, "I": self._input_gradients, "W": self._weight_gradients}
        self._make_room(0)
        self._ask()
        for position, action in enumerate(self.actions, 1):
            enter(action.kind)
            self._make_room(position)
            with self.pipeline.mesh.recorder.over(action.kind, action.chunk, action.microbatch):
                step[action.kind](action.chunk, action.microbatch)
            self._ask()
        for outbox in self.outboxes.values():
            outbox.reached(math.inf)
        return self.loss

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
        x = None if self._virtual(chunk) == 0 else self._take(FORWARD, chunk, m)
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        y = self.pipeline.chunks[chunk](x, self.microbatches[m])
        if self._virtual(chunk) == self._last:
            y = y * self.scale
            self.loss += y.detach()
        else:
            self._send(FORWARD, chunk, m, y.detach())
        if torch.is_grad_enabled():
            self.alive[chunk, m] = x, get_gradient_edge(y) if y.requires_grad else None

    def _backward(self, chunk: int, m: int) -> None:
        x, edge = self.alive.pop((chunk, m))
        if self._virtual(chunk) == self._last:
            gradient = torch.ones(self.pipeline.loss, dtype=self.loss.dtype, device=self.loss.device)
        else:
            gradient = self._take(BACKWARD, chunk, m)
        if edge is not None:
            torch.autograd.backward([edge], [gradient])
        if x is not None:
            assert x.grad is not None  # each chunk's output depends on its input
            self._send(BACKWARD, chunk, m, x.grad)

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
        return chunk * self.stages + self.stage

    def _neighbour(self, chunk: int, step: int) -> int:
        """Return the chunk that the next virtual stage (or the one before, with step -1) is on its own stage."""
        return (self._virtual(chunk) + step) // self.stages

    def _send(self, direction: Direction, chunk: int, m: int, tensor: Tensor) -> None:
        message = Message(self._neighbour(chunk, STEP[direction]), m)
        if self.outboxes:
            self.outboxes[direction].send(message, tensor)
        else:
            self.local[direction, message] = tensor

    def _take(self, direction: Direction, chunk: int, m: int) -> Tensor:
        message = Message(chunk, m)
        if not self.inboxes:
            return self.local.pop((direction, message))
        inbox = self.inboxes[direction]
        tensor = inbox.take(message)
        # Its sender is the receiver of what leaves in the other direction.
        self.outboxes[OPPOSITE[direction]].reached(inbox.sent_at[message])
        return tensor

    def _buffer(self, message: Message) -> Tensor:
        shape = self.microbatches[message.microbatch].activation
        return torch.empty(shape, dtype=self.pipeline.dtype, device=self.loss.device)
