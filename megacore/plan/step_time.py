"""How long a step takes, from a device's data sheet and a few stated assumptions: an estimate to rank by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megacore.plan.activations import Activations
from megacore.plan.devices import Device
from megacore.plan.setting import SHARDS, Setting
from megacore.plan.state import Held, Part, state, updated
from megacore.plan.traffic import SEND, Traffic, traffic
from megacore.plan.unit import Unit
from models.config import flops_per_token
from parallel.layout import MeshShape
from parallel.pipeline.schedules import SCHEDULES, simulate

PRECISE = 4096
"""Actions of a stage up to which a schedule is simulated rather than its bubble looked up."""


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes, and what is assumed of them.

    Args:
        device: Each of them.
        tflops: That matrix products could reach.
        efficiency: The share of it that a block reaches while nothing is waited for: products are not ideal, and norms,
            activation functions and the softmax take time beside them.
        overlap: The share that is really hidden of messages that could be, as both want the same memory and units.
        latency: Seconds that a message takes however short it is.
    """

    device: Device
    tflops: float
    efficiency: float = 0.6
    overlap: float = 0.8
    latency: float = 20e-6

    def bandwidth(self, mesh: MeshShape, axis: str) -> float:
        """Of a ring along some dimensions, bytes/s for each rank.

        Between nodes every device of a group that lies in the same node brings its own adapter.
        """
        dims = axis.split(" x ")
        places = [mesh.place(rank) for rank in range(min(self.device.per_node, mesh.world))]
        here = sum(all(getattr(place, dim) == 0 for dim in mesh.DIMS if dim not in dims) for place in places)
        total = 1
        for dim in dims:
            total *= mesh[dim]
        return self.device.link if here == total else min(self.device.link, here * self.device.network)

    def shown(self, moving: float, beside: float) -> float:
        """Seconds of messages that compute of so many seconds does not hide."""
        return max(moving - beside, (1 - self.overlap) * moving)

    def seconds(self, mesh: MeshShape, messages: Iterable[Traffic]) -> float:
        return sum(x.count * self.latency + x.sent / self.bandwidth(mesh, x.axis) for x in messages)


@dataclass(frozen=True)
class Estimate:
    """Of one step, in seconds, on the slowest stage; they add up to ``total``.

    ``tensor``, ``data`` and ``offload`` are what compute does not hide. ``bubble`` is the time in which a stage waits
    for others.
    """

    compute: float
    recompute: float
    tensor: float
    bubble: float
    data: float
    offload: float
    optimizer: float
    tokens: int
    model_tflop: float

    @property
    def total(self) -> float:
        parts = self.compute, self.recompute, self.tensor, self.bubble, self.data, self.offload, self.optimizer
        return sum(parts)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total

    @property
    def tflops_per_device(self) -> float:
        """Of the model's own operations, recomputation not counted."""
        return self.model_tflop / self.total


@dataclass(frozen=True)
class Flops:
    """Of a rank for one microbatch.

    Args:
        forward: Of a forward.
        backward: Of its backward: as many for the gradients of what is read, where one is asked for, and as many for
            those of the weights that are trained; twice as many if all is.
        again: Of the forward that full recomputation repeats.
    """

    forward: int = 0
    backward: int = 0
    again: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward, self.again + other.again)

    def __mul__(self, times: int) -> Flops:
        return Flops(self.forward * times, self.backward * times, self.again * times)


def flops(act: Activations, virtual: int) -> Flops:
    """In a virtual stage."""
    forward, backward = _flops(act.units(virtual))
    _, plain = _flops(act.without_recomputation.units(virtual))
    return Flops(forward, plain, backward - plain)


def _flops(units: Mapping[Unit, int]) -> tuple[int, int]:
    """Forward, and backward."""
    forward = sum(unit.forward.flops * number for unit, number in units.items())
    return forward, sum(unit.backward.flops * number for unit, number in units.items())


def bubble(schedule: str, stages: int, chunks: int, microbatches: int) -> float:
    """Idle time over busy time of a schedule, all stages alike and messages free, by the simulator."""
    return simulate(SCHEDULES[schedule](stages, chunks, microbatches)).bubble


def estimate(setting: Setting, held: Held, cluster: Cluster, simulated: bool = True) -> Estimate:
    """Time of a step.

    Args:
        setting: The run.
        held: What its ranks hold.
        cluster: Where it runs.
        simulated: Whether the pipeline is simulated; else its bubble is (p-1)/(v m), which the simulator confirms.
    """
    layout, m = setting.layout, setting.microbatches
    mesh, pp, chunks = layout.mesh, layout.mesh.pp, layout.chunks
    speed = cluster.tflops * 1e12 * cluster.efficiency
    act = Activations.of(setting)
    sent = [traffic(setting, held, stage) for stage in range(pp)]
    rows = [_stage_times(setting, act, cluster, stage, sent[stage], speed) for stage in range(pp)]
    slowest = max(rows, key=lambda row: row.forward + row.backward)
    hop = cluster.latency + setting.activation / cluster.bandwidth(mesh, "pp") if pp > 1 else 0.0
    busy = m * (slowest.forward + slowest.backward)
    if pp == 1:
        idle = 0.0
    elif simulated and 2 * chunks * m <= PRECISE:
        row = SCHEDULES[setting.schedule](pp, chunks, m)
        idle = simulate(row, slowest.forward / chunks, slowest.backward / chunks, hop).total - busy
    else:
        idle = busy * (pp - 1) / (chunks * m) + 2 * (pp - 1) * hop
    data = max(_data(setting, cluster, sent[stage], rows[stage]) for stage in range(pp))
    moved = max(sum(b.kept * number for b, number in act.blocks[stage].items()) for stage in range(pp))
    away = 2 * m * moved if setting.offload_activations else 0
    if setting.offload_parameters:  # a slice comes with each gathering: for the forward and for the backward
        away += 2 * m * max(state(own, setting).parameters for own in held.stages)
    offload = cluster.shown(away / cluster.device.host, busy)
    per_token = flops_per_token(setting.model, setting.sequence_length, setting.tuning)
    return Estimate(
        m * slowest.compute,
        m * slowest.recompute,
        m * slowest.tensor,
        idle,
        data,
        offload,
        max(_optimizer(setting, cluster, own) for own in held.stages),
        setting.global_tokens,
        per_token * setting.global_tokens / mesh.world / 1e12,
    )


@dataclass(frozen=True)
class _Times:
    """Of one microbatch in all chunks of a stage, in seconds."""

    compute_forward: float
    compute_backward: float
    recompute: float
    tensor_forward: float
    tensor_backward: float

    @property
    def compute(self) -> float:
        return self.compute_forward + self.compute_backward

    @property
    def tensor(self) -> float:
        return self.tensor_forward + self.tensor_backward

    @property
    def forward(self) -> float:
        return self.compute_forward + self.tensor_forward

    @property
    def backward(self) -> float:
        return self.compute_backward + self.recompute + self.tensor_backward


def _stage_times(
    setting: Setting, act: Activations, cluster: Cluster, stage: int, sent: Sequence[Traffic], speed: float
) -> _Times:
    layout, m = setting.layout, setting.microbatches
    found = sum((flops(act, chunk * layout.mesh.pp + stage) for chunk in range(layout.chunks)), Flops())
    backward_compute = found.backward / speed
    tensor = [x for x in sent if x.axis == "tp" and "tokens" in x.what]
    forward = cluster.seconds(layout.mesh, (x for x in tensor if "forward" in x.what)) / m
    shown = cluster.seconds(layout.mesh, (x for x in tensor if not x.hidden and "forward" not in x.what)) / m
    # Gathers and scatters of a column-parallel product's backward run beside its two products.
    hidden = cluster.seconds(layout.mesh, (x for x in tensor if x.hidden)) / m
    return _Times(
        found.forward / speed,
        backward_compute,
        found.again / speed,
        forward,
        shown + cluster.shown(hidden, backward_compute),
    )


def _data(setting: Setting, cluster: Cluster, sent: Sequence[Traffic], times: _Times) -> float:
    """What the sums of gradients and the gathering of parameters add to a step."""
    mesh, m, rung = setting.layout.mesh, setting.microbatches, SHARDS.index(setting.shard)
    gathers = [x for x in sent if x.what == "parameters"]
    sums = [x for x in sent if "gradients" in x.what and "tokens" not in x.what and x.kind != SEND]
    reduced, gathered = (cluster.seconds(mesh, messages) for messages in (sums, gathers))
    if rung == 3:
        return cluster.shown(reduced + gathered, m * (times.forward + times.backward))
    # A sum starts with the last gradient of the step, so it hides behind one backward; what is split goes with each.
    beside = times.backward * (m if rung == 2 else 1)
    return cluster.shown(reduced, beside) + cluster.shown(gathered, times.forward)


def _optimizer(setting: Setting, cluster: Cluster, held: Sequence[Part]) -> float:
    """Reading and writing what AdamW works on.

    Offloaded, the host does it, window by window: gradients come and parameters go beside its work, each in a
    direction of its own, and states are read and written; the slowest of these shows.
    """
    own = updated(held, setting)
    states = own.masters + own.moments
    if setting.offload_optimizer == "none":
        return (own.gradients * 2 + states * 2 + own.parameters) / cluster.device.bandwidth
    device, values = cluster.device, own.masters or own.parameters
    ways = [(own.gradients * 2 + states * 2 + values) / device.cpu, max(own.gradients, values) / device.host]
    if setting.offload_optimizer == "file":
        ways.append(2 * states / device.disk)
    return max(ways)
