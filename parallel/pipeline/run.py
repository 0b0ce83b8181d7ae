"""The executor: runs the actions of any schedule, and derives every message from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallel.mesh import BACKWARD, FORWARD, Group, Mesh
from parallel.pipeline.schedules import SCHEDULES, Action, Direction, Message, arrivals, forward_only

STEPS: tuple[tuple[Direction, int], ...] = ((FORWARD, 1), (BACKWARD, -1))
"""Where each channel leads, in stages."""


class Microbatch(Protocol):
    """What a step is made of; chunks read from it whatever they need."""

    @property
    def activation(self) -> tuple[int, ...]:
        """Shape of the activations between stages: (tokens/tp, embed)."""
        ...


@dataclass
class Inbox:
    """Receives the messages of one channel in the order in which they are sent, some ahead of their use."""

    channel: Group
    source: int
    expected: deque[Message]
    allocate: Callable[[Message], Tensor]
    ahead: int = 2
    posted: deque[tuple[Message, dist.Work | None, Tensor]] = field(default_factory=deque)
    arrived: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def post(self) -> None:
        while self.expected and len(self.posted) < self.ahead:
            message = self.expected.popleft()
            buffer = self.allocate(message)
            work = dist.irecv(buffer, self.source, group=self.channel.process_group)
            self.posted.append((message, work, buffer))

    def take(self, chunk: int, microbatch: int) -> Tensor:
        """Wait for the message to this chunk about this microbatch."""
        while (chunk, microbatch) not in self.arrived:
            message, work, buffer = self.posted.popleft()
            if work:
                work.wait()
            self.arrived[message.chunk, message.microbatch] = buffer
            self.post()
        return self.arrived.pop((chunk, microbatch))


@dataclass
class Outbox:
    """Sends on one channel without waiting, and keeps a tensor only until it is known to have left."""

    channel: Group
    target: int
    leaving: dict[tuple[int, int], tuple[dist.Work | None, Tensor]] = field(default_factory=dict)

    def send(self, chunk: int, microbatch: int, tensor: Tensor) -> None:
        self.leaving = {k: v for k, v in self.leaving.items() if v[0] and not v[0].is_completed()}
        work = dist.isend(tensor.contiguous(), self.target, group=self.channel.process_group)
        self.leaving[chunk, microbatch] = work, tensor

    def replied(self, chunk: int, microbatch: int) -> None:
        """The other side has answered this message, so it has arrived (gloo would not tell otherwise)."""
        work, _ = self.leaving.pop((chunk, microbatch), (None, None))
        if work:
            work.wait()

    def drain(self) -> None:
        for key in list(self.leaving):
            self.replied(*key)


@dataclass
class Pipeline:
    """The chunks of one stage and the schedule that drives them.

    The chunk of the last virtual stage returns the loss of its microbatch, every other one its activations.

    Args:
        mesh: The live mesh.
        chunks: This rank's modules, chunk by chunk: ``chunk(activations or None, microbatch) -> activations or loss``.
        dtype: Of the activations between stages.
        schedule: A name from :data:`~parallel.pipeline.schedules.SCHEDULES`.
    """

    mesh: Mesh
    chunks: Sequence[nn.Module]
    dtype: torch.dtype
    schedule: str = "1f1b"

    def train(self, microbatches: Sequence[Microbatch], scale: Tensor) -> Tensor:
        """Forward and backward of a step; gradients accumulate on the parameters.

        Args:
            microbatches: Of this data-parallel rank.
            scale: What each loss is multiplied by, a scalar: one over the global number of counted tokens.

        Returns:
            This rank's part of the step's loss, a scalar; the loss is the sum over all ranks.
        """
        schedule = SCHEDULES[self.schedule](self.mesh.shape.pp, len(self.chunks), len(microbatches))
        return _Run(self, schedule, microbatches, scale).run()

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch], scale: Tensor) -> Tensor:
        """Forward only; arguments and result as :meth:`train`'s."""
        schedule = forward_only(self.mesh.shape.pp, len(self.chunks), len(microbatches))
        return _Run(self, schedule, microbatches, scale).run()


class _Run:
    """One step: what is in flight, and nothing that outlives it."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: tuple[tuple[Action, ...], ...],
        microbatches: Sequence[Microbatch],
        scale: Tensor,
    ) -> None:
        self.pipeline, self.microbatches = pipeline, microbatches
        mesh = pipeline.mesh
        self.stages, self.stage = mesh.shape.pp, mesh.place.pp
        self.actions = schedule[self.stage]
        self.loss = torch.zeros((), dtype=torch.promote_types(pipeline.dtype, torch.float32), device=mesh.device)
        self.scale = scale.to(self.loss.dtype)
        # (input, edge of the output) of each forward whose backward is still to come; the output itself is let go.
        self.alive: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        self.local: dict[tuple[str, int, int], Tensor] = {}
        self.inboxes: dict[str, Inbox] = {}
        self.outboxes: dict[str, Outbox] = {}
        if self.stages > 1:
            expected = arrivals(schedule, self.stage)
            for direction, step in STEPS:
                source = (self.stage - step) % self.stages
                self.inboxes[direction] = Inbox(
                    mesh.channel(direction, source), mesh.peer(source), deque(expected[direction]), self._buffer
                )
                self.outboxes[direction] = Outbox(mesh.channel(direction, self.stage), mesh.peer(self.stage + step))

    def run(self) -> Tensor:
        for inbox in self.inboxes.values():
            inbox.post()
        step = {"F": self._forward, "B": self._backward}
        for action in self.actions:
            step[action.kind](action.chunk, action.microbatch)
        for outbox in self.outboxes.values():
            outbox.drain()
        return self.loss

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
            self.alive[chunk, m] = x, get_gradient_edge(y)

    def _backward(self, chunk: int, m: int) -> None:
        x, edge = self.alive.pop((chunk, m))
        if self._virtual(chunk) == self._last:
            gradient = torch.ones((), dtype=self.loss.dtype, device=self.loss.device)
        else:
            gradient = self._take(BACKWARD, chunk, m)
            if self.outboxes:
                self.outboxes[FORWARD].replied(chunk, m)
        torch.autograd.backward([edge], [gradient])
        if x is not None:
            assert x.grad is not None  # each chunk's output depends on its input
            self._send(BACKWARD, chunk, m, x.grad)

    @property
    def _last(self) -> int:
        return self.stages * len(self.pipeline.chunks) - 1

    def _virtual(self, chunk: int) -> int:
        return chunk * self.stages + self.stage

    def _send(self, direction: str, chunk: int, m: int, tensor: Tensor) -> None:
        if self.outboxes:
            self.outboxes[direction].send(chunk, m, tensor)
        else:
            self.local[direction, chunk + (1 if direction == FORWARD else -1), m] = tensor

    def _take(self, direction: str, chunk: int, m: int) -> Tensor:
        if self.inboxes:
            return self.inboxes[direction].take(chunk, m)
        return self.local.pop((direction, chunk, m))

    def _buffer(self, message: Message) -> Tensor:
        shape = self.microbatches[message.microbatch].activation
        return torch.empty(shape, dtype=self.pipeline.dtype, device=self.loss.device)
