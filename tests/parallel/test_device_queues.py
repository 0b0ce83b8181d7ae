"""Pipelines on devices that have queues: hosts launch, and may have to wait for their device wherever they launch.

A host waits where it loads a kernel, or where memory is freed in order to be allocated anew: for all that it has
launched, receives and sends included. What it would launch afterwards may be what these depend on.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from drawn_orders import drawn_order
from in_flight import takes
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.baton import Baton
from megacore.parallel.enum_errors import IN_GROUPS
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.mesh import BACKWARD, FORWARD, Group, Mesh
from megacore.parallel.pipeline.run import Pipeline, _Run
from megacore.parallel.pipeline.schedules import SCHEDULES, Schedule
from megacore.parallel.virtual_stages import placement_of, virtual_stage
from megacore.parallel.weights.layout import MeshShape

COMPUTE, ALLOCATE, SEND, RECEIVE, WAIT = "compute", "allocate", "send", "receive", "wait"
Channel = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Call:
    """What a host calls: to send or receive on a channel, or to have what is launched later wait until that is done."""

    kind: str
    channel: Channel | None = None
    of: Call | None = None


Program = list[Call]


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, launch: Callable[[], None]) -> Tensor:
        ctx.launch = launch
        launch()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.launch()
        return dy, None


class Chunk(nn.Module):
    def __init__(self, launch: Callable[[], None], last: bool) -> None:
        super().__init__()
        self.launch, self.last, self.weight = launch, last, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor | None, microbatch: Tokens) -> Tensor:
        y: Tensor = _Chunk.apply(self.weight if x is None else x, self.launch)
        return y[0] if self.last else y


class Tokens:
    activation = (1,)


@dataclass
class Weights:
    """Whose gradients are launched when they are asked for."""

    launch: Callable[[], None]

    def deferred(self) -> nullcontext[Callable[[], None]]:
        return nullcontext(self.launch)


@dataclass
class Work:
    """Of a message."""

    program: Program
    call: Call

    def wait(self) -> None:
        self.program.append(Call(WAIT, of=self.call))


@contextmanager
def recorded(program: Program) -> Iterator[None]:
    """What this process sends, receives and allocates goes into the program, and nowhere else."""

    def call(kind: str) -> Callable[..., Work]:
        def called(tensor: Tensor, peer: int, group: Any) -> Work:
            program.append(Call(kind, group))
            return Work(program, program[-1])

        return called

    def allocate(run: _Run, message: Any) -> Tensor:
        program.append(Call(ALLOCATE))
        return torch.zeros(1)

    with patch.multiple(dist, isend=call(SEND), irecv=call(RECEIVE)), patch.object(_Run, "_buffer", allocate):
        yield


def _compute(program: Program, baton: Baton) -> None:
    """Compute before and behind a place where what runs beside it may go on."""
    program.append(Call(COMPUTE))
    baton.pass_on()
    program.append(Call(COMPUTE))


def programs(
    schedule: str,
    stages: int,
    chunks: int,
    microbatches: int,
    trains: bool = True,
    order: Schedule | None = None,
    group: int | None = None,
) -> list[Program]:
    """What the executor has the host of each stage call."""
    found: list[Program] = []
    for stage in range(stages):
        program: Program = []
        mesh = Mesh(MeshShape(pp=stages), stage, torch.device("cpu"))
        for direction, source in itertools.product((FORWARD, BACKWARD), range(stages)):
            channel: Any = (direction, source)
            mesh._channels[direction, source] = Group((0, 1), 0, channel)
        launch, last = partial(_compute, program, mesh.baton), chunks * stages - 1
        placed = (virtual_stage(stage, chunk, stages, placement_of(schedule)) for chunk in range(chunks))
        modules = [Chunk(launch, virtual == last) for virtual in placed]
        pipeline = Pipeline(mesh, modules, torch.float32, schedule, Weights(launch), order=order, group=group)
        with recorded(program):
            (pipeline.train if trains else pipeline.evaluate)([Tokens()] * microbatches, torch.ones(()))
        found.append(program)
    return found


@dataclass
class Device:
    """What its host has launched: the computation in one queue, the messages of each channel in another.

    Args:
        program: Of the host.
        left: In each queue, what is not done yet.
        after: Of a message: how much of the computation has to be done before.
        done: What is.
    """

    program: Program
    left: dict[Channel | None, deque[Call]] = field(default_factory=lambda: {None: deque()})
    after: dict[Call, int] = field(default_factory=dict)
    done: set[Call] = field(default_factory=set)
    at: int = 0
    launched: int = 0
    computed: int = 0

    def launch(self, waits: bool) -> bool:
        """Go on with the program as far as it goes -> whether it did."""
        before = self.at
        while self.at < len(self.program):
            call = self.program[self.at]
            if waits and call.kind in (COMPUTE, ALLOCATE) and any(self.left.values()):
                break
            if call.kind != ALLOCATE:
                self.left.setdefault(call.channel, deque()).append(call)
                self.after[call] = self.launched
                self.launched += call.channel is None
            self.at += 1
        return self.at > before

    def compute(self) -> bool:
        queue, before = self.left[None], self.computed
        while queue and (queue[0].of is None or queue[0].of in self.done):
            queue.popleft()
            self.computed += 1
        return self.computed > before

    def ready(self, channel: Channel, kind: str) -> bool:
        """Whether the next message of a channel can be sent from here, or received."""
        queue = self.left.get(channel, deque())
        return bool(queue) and queue[0].kind == kind and self.after[queue[0]] <= self.computed

    def finish(self, channel: Channel) -> None:
        self.done.add(self.left[channel].popleft())


def stuck(hosts: Sequence[Program], waits: bool = True) -> list[str]:
    """Run the programs -> where each host stands that does not come to the end of its own.

    With ``waits`` every host waits for its device wherever it could. Each such wait only adds to what comes before
    something else: where this ends, it ends with any of them left out, and whatever is faster or slower.
    """
    devices = [Device(program) for program in hosts]
    channels = {call.channel for program in hosts for call in program if call.channel is not None}
    goes_on = True
    while goes_on:
        goes_on = False
        for device in devices:
            goes_on |= device.launch(waits) | device.compute()
        for channel in channels:
            senders = [device for device in devices if device.ready(channel, SEND)]
            receivers = [device for device in devices if device.ready(channel, RECEIVE)]
            if senders and receivers:
                goes_on = True
                senders[0].finish(channel)
                receivers[0].finish(channel)
    return [
        f"stage {stage} at {device.at} of {len(device.program)}"
        for stage, device in enumerate(devices)
        if device.at < len(device.program) or any(device.left.values())
    ]


SIZES = [
    (schedule, stages, chunks)
    for schedule in SCHEDULES
    for stages in (2, 3, 4, 7)
    for chunks in (1, 2, 3)
    if takes(schedule, chunks)
]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("trains", [True, False], ids=["train", "evaluate"])
@pytest.mark.parametrize(("schedule", "stages", "chunks"), SIZES)
def test_hosts_may_wait_for_their_devices(schedule: str, stages: int, chunks: int, trains: bool) -> None:
    for microbatches in (1, 2, 3, 5, 8):
        hosts = programs(schedule, stages, chunks, microbatches, trains)
        assert stuck(hosts) == stuck(hosts, waits=False) == [], f"{microbatches} microbatches"
        anywhere = [[each for call in program for each in (call, Call(ALLOCATE))] for program in hosts]
        assert stuck(anywhere) == [], f"{microbatches} microbatches"


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("schedule", "stages", "chunks"), [each for each in SIZES if each[0] in IN_GROUPS])
def test_hosts_may_wait_with_groups_of_any_size(schedule: str, stages: int, chunks: int) -> None:
    for microbatches in (3, 5, 8):
        for group in (stages, stages + 1, 8):
            hosts = programs(schedule, stages, chunks, microbatches, group=group)
            assert stuck(hosts) == stuck(hosts, waits=False) == [], f"{microbatches} microbatches in groups of {group}"


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("schedule", "stages", "chunks"), [each for each in SIZES if each[0] != "gpipe"])
def test_hosts_may_wait_in_orders_that_were_searched_for(schedule: str, stages: int, chunks: int) -> None:
    for microbatches in (1, 2, 3, 5, 8):
        for seed in (1, 2):
            order = drawn_order(seed, schedule, stages, chunks, microbatches)
            hosts = programs(schedule, stages, chunks, microbatches, order=order)
            assert stuck(hosts) == stuck(hosts, waits=False) == [], f"{microbatches} microbatches, {seed}"


def two_ahead(program: Program) -> Program:
    """Two receives of each channel are always posted."""
    receives: dict[Channel | None, deque[Call]] = {}
    for call in program:
        if call.kind == RECEIVE:
            receives.setdefault(call.channel, deque()).append(call)
    moved = [queue.popleft() for queue in receives.values() for _ in range(2) if queue]
    for call in program:
        if call.kind != RECEIVE:
            moved.append(call)
        if call.of is not None and call.of.kind == RECEIVE and receives[call.of.channel]:
            moved.append(receives[call.of.channel].popleft())
    return moved


def at_their_use(program: Program) -> Program:
    """Each receive is posted by who needs it next."""
    moved: Program = []
    for call in program:
        if call.of is not None and call.of.kind == RECEIVE:
            moved.append(call.of)
        if call.kind != RECEIVE:
            moved.append(call)
    return moved


@pytest.mark.parametrize(("rule", "schedule", "chunks"), [(two_ahead, "1f1b", 1), (at_their_use, "gpipe", 2)])
def test_other_rules_are_circles(rule: Callable[[Program], Program], schedule: str, chunks: int) -> None:
    """Each host waits for what the other one would launch after its own wait."""
    hosts = [rule(program) for program in programs(schedule, 2, chunks, 4)]
    assert len(stuck(hosts)) == 2 and stuck(hosts, waits=False) == []


def test_ends_of_a_pipeline_sum_their_table_after_its_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage has its part first, and what it sends last is what the first stage's part is made of."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    mesh, config = Mesh.create(MeshShape(pp=2)), configure({"preset": "llama-tiny", "tie_word_embeddings": True})
    model = Model.create(config, layout_of(config, mesh.shape), mesh, torch.float32)
    gradients = Gradients(model.parameters, model.chunks)
    calls: list[str] = []
    monkeypatch.setattr(dist, "isend", lambda *_, **__: calls.append(SEND))
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: calls.append(RECEIVE))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: calls.append("sum"))
    tokens = torch.zeros(8, dtype=torch.int64)
    microbatch = Microbatch(tokens, tokens, torch.arange(8), 1, (8, config.sizes["embed"]))
    gradients.begin(2)
    Pipeline(mesh, model.chunks, torch.float32).train([microbatch] * 2, torch.ones(()))
    gradients.finish()
    dist.destroy_process_group()
    assert calls == [RECEIVE, RECEIVE, SEND, SEND, "sum"]
