"""The time of a step, from a device's data sheet and a few stated assumptions: an estimate to rank by."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, reduce

import numpy as np
import numpy.typing as npt

from megacore.devices import CPU_TFLOPS, PEAK_TFLOPS, Device
from megacore.models.config import flops_per_token
from megacore.parallel.budgets import BLOCK
from megacore.parallel.enum_errors import OVERLAPPED
from megacore.parallel.pipeline.schedules import Cost, Costs, builder, simulate
from megacore.parallel.weights.layout import MeshShape
from megacore.planning import efficiency
from megacore.planning.activations import ActivationMemory
from megacore.planning.costs import ALL_REDUCE, ALL_TO_ALL, SEND, Collective, KeyExchange, LayerCost, MatMul
from megacore.planning.peak_memory import held_bytes
from megacore.planning.setting import SHARDS, ExchangeWork, Packing, Setting
from megacore.planning.state_bytes import ParameterShare, Shares, casts, matrix_groups, state, updated
from megacore.planning.traffic import GATHERED, RETURNED, WAYS, Traffic, traffic

_Of = npt.NDArray[np.float64]
PRECISE = 512
"""Actions of a stage up to which all of a schedule is simulated."""


MARGIN = 0.1
"""The share of a device's memory that is left to its driver, the libraries' workspaces, fragments, and what this
arithmetic misses."""


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes, and what is assumed of them.

    Args:
        tflops: The speed that matrix products could reach.
        overlap, overlap_between: The share of messages within a node, and of those between nodes, that is really hidden
            of what could be: both want the same memory and units, and those between nodes wait for each other too.
    """

    device: Device
    tflops: float
    overlap: float = 0.9
    overlap_between: float = 0.7

    @property
    def room(self) -> float:
        """The bytes of a device that a run may take."""
        return self.device.memory * (1 - MARGIN)

    @property
    def host_room(self) -> float:
        """The bytes of host memory that a rank may take."""
        return self.device.host_memory * (1 - MARGIN)

    @property
    def wide_tflops(self) -> float:
        """The speed of what is never in fp8: the attention and the head."""
        return min(self.tflops, PEAK_TFLOPS[self.device.peak][0])

    @property
    def peak(self) -> str:
        """The speed of which a MFU is a share, and where it is from."""
        bf16, fp32 = PEAK_TFLOPS[self.device.peak]
        kind = {bf16: "dense bf16", fp32: "fp32 without TF32", self.device.fp8: "dense fp8"}.get(self.tflops)
        assumed = "a round number for CPUs" if self.tflops == CPU_TFLOPS else "as given"
        return f"{self.tflops:,.1f} TFLOP/s, {f'{kind} on the data sheet of {self.device.peak}' if kind else assumed}"

    @property
    def narrow(self) -> bool:
        """Whether the other products are in fp8."""
        return self.tflops > self.wide_tflops

    def product_s(self, product: MatMul) -> float:
        """Return the seconds of a product, in fp8 with what casts its factors but weights (:func:`_casts`)."""
        if not product.dtype.startswith("float8"):
            return self.multiplied_s(product, self.wide_tflops)
        factors = product.batch * product.k * (product.m + product.n * (not product.weight))
        return self.multiplied_s(product, self.tflops) + efficiency.CAST_BYTES * factors / self.device.bandwidth

    def multiplied_s(self, product: MatMul, tflops: float) -> float:
        """Return the seconds of a product alone."""
        if product.attention:
            return product.flops / (self.wide_tflops * 1e12 * self.device.attention)
        reached = self.device.reach * efficiency.reached(product, self.device.half)
        return product.flops / (tflops * 1e12 * reached)

    def bandwidth(self, mesh: MeshShape, axis: str, kind: str = ALL_REDUCE, ranks: int | None = None) -> float:
        """Return the bandwidth of a ring along some dimensions, or of an all-to-all, bytes/s for each rank; of some
        successive ``ranks`` of them, or of all.

        Between nodes every device of a group that lies in the same node brings its own adapter. Through it goes, of an
        all-to-all, what is for other nodes: of n ranks, h of them in a node, n - h of n - 1 parts.
        """
        (total, here), device = _ring(mesh, axis, self.device.per_node, ranks), self.device
        if here == total:
            return device.link
        if kind == SEND:
            return min(device.link, device.network)
        if kind == ALL_TO_ALL:
            return min(device.link * (total - 1) / max(here - 1, 1), device.network * (total - 1) / (total - here))
        return min(device.link, here * device.network)

    def latency(self, mesh: MeshShape, message: Traffic) -> float:
        """Return the seconds that a message takes however short it is: those of a ring grow with its length."""
        total, here = _ring(mesh, message.axis, self.device.per_node, message.ranks)
        if message.kind in (SEND, ALL_TO_ALL):  # each to each at once
            return efficiency.ring_s(1, int(here < total))
        here, rounds = min(here, message.ranks), 2 if message.kind == ALL_REDUCE else 1
        nodes = -(-message.ranks // here)
        return efficiency.ring_s(rounds * (message.ranks - 1), rounds * (nodes - 1))

    def shown(self, mesh: MeshShape, messages: Sequence[Traffic], beside: float) -> float:
        """Return the seconds of messages that compute of so many seconds does not hide."""
        moving, never = 0.0, 0.0
        for x in messages:
            seconds, (total, here) = self.seconds(mesh, [x]), _ring(mesh, x.axis, self.device.per_node, x.ranks)
            moving += seconds
            never += seconds * (1 - (self.overlap if here == total else self.overlap_between))
        return max(moving - beside, never)

    def seconds(self, mesh: MeshShape, messages: Iterable[Traffic]) -> float:
        return sum(
            x.count * self.latency(mesh, x)
            + x.sent / (self.bandwidth(mesh, x.axis, x.kind, x.ranks) * efficiency.LINKS)
            for x in messages
        )

    def exposed(self, mesh: MeshShape, work: ExchangeWork, exchange: KeyExchange) -> float:
        """Return the seconds that an attention takes longer among the parts of cp than the products of the busiest.

        What a hop brings is sent while the scores of the turn before are computed, and in a backward what goes back
        while those of the turn behind are.
        """
        between = _between_nodes(mesh, len(work.taken), self.device.per_node)
        link = np.where(between, min(self.device.link, self.device.network), self.device.link) * efficiency.LINKS
        start = np.where(between, efficiency.ring_s(1, 1), efficiency.ring_s(1, 0))
        never = 1 - np.where(between, self.overlap_between, self.overlap)
        most = np.maximum(work.taken, work.given)
        ahead, back = ((most * size / link + start) * (most * size > 0) for size in (exchange.keys, exchange.gradients))
        if work.gathered:
            ahead, back, never = ahead.sum(1, keepdims=True), back.sum(1, keepdims=True), never.max(1, keepdims=True)
        nothing = np.zeros((len(most), 1))

        def beside(ahead: _Of, back: _Of) -> _Of:
            return np.hstack([ahead, nothing]) + np.hstack([nothing, nothing, back[:, :-1]])

        busy = work.pairs * (exchange.flops / (self.wide_tflops * 1e12 * self.device.attention))
        shown = np.maximum(beside(ahead, back) - busy, beside(ahead * never, back * never)).sum(1) + back[:, -1]
        return float((busy.sum(1) + shown).max() - busy.sum(1).max())


@lru_cache(maxsize=4096)
def _ring(mesh: MeshShape, axis: str, per_node: int, ranks: int | None = None) -> tuple[int, int]:
    """Return the number of ranks of a ring along some dimensions, or along successive ``ranks`` of one, and of those
    of them in a node."""
    dims = axis.split(" x ")
    places = [mesh.place(rank) for rank in range(min(per_node, mesh.world))]
    here = sum(all(getattr(place, dim) == 0 for dim in mesh.DIMS if dim not in dims) for place in places)
    total = math.prod(mesh[dim] for dim in dims)
    return (total, here) if axis != "cp" or ranks is None else (ranks, min(ranks, here))


@lru_cache(maxsize=4096)
def _between_nodes(mesh: MeshShape, parts: int, per_node: int) -> npt.NDArray[np.bool_]:
    """Return whether each part of cp has another node than some rank of the one 1, 2, ... before or behind it:
    [parts, parts - 1]."""
    nodes = np.array(mesh.along(0, "cp")).reshape(parts, -1) // per_node
    places, distances = np.arange(parts)[:, None], np.arange(1, parts)
    near, far = (nodes[(places + way * distances) % parts] for way in (-1, 1))
    return ((near != nodes[:, None]) | (far != nodes[:, None])).any(-1)


@dataclass(frozen=True)
class Estimate:
    """The seconds of one step, on the slowest stage; they add up to ``total``.

    ``tensor``, ``experts``, ``context``, ``data`` and ``offload`` are what compute does not hide. ``bubble`` is the
    time in which a stage waits for others.
    """

    compute: float
    recompute: float
    tensor: float
    experts: float
    context: float
    bubble: float
    data: float
    offload: float
    optimizer: float
    tokens: int
    model_tflop: float

    @property
    def total(self) -> float:
        sent = self.tensor + self.experts + self.context + self.data + self.offload
        return self.compute + self.recompute + sent + self.bubble + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total

    @property
    def tflops_per_device(self) -> float:
        """The TFLOP/s of the model's own operations, recomputation not counted."""
        return self.model_tflop / self.total

    @property
    def spent(self) -> Mapping[str, float]:
        """{what a step is spent on: its seconds}, which add up to it."""
        return {
            "products": self.compute,
            "recomputation": self.recompute,
            "bubble": self.bubble,
            "messages of tp": self.tensor,
            "messages of ep": self.experts,
            "messages of cp": self.context,
            "messages of dp": self.data,
            "offload": self.offload,
            "optimizer": self.optimizer,
        }

    def behind(self, faster: Estimate) -> str:
        """Return how much longer this takes than a step that is no slower, and what most of it is spent on."""
        more = {what: seconds - faster.spent[what] for what, seconds in self.spent.items()}
        what = max(more, key=lambda each: more[each])
        return f"takes {self.total / faster.total - 1:.1%} longer, above all for {what} ({more[what]:+,.3f} s)"

    def as_data(self, cluster: Cluster) -> Mapping[str, object]:
        return asdict(self) | {
            "total": self.total,
            "tokens_per_second": self.tokens_per_second,
            "tflops_per_device": self.tflops_per_device,
            "mfu": self.tflops_per_device / cluster.tflops,
            "peak": cluster.peak,
        }


def parts(act: ActivationMemory, virtual: int) -> Iterator[tuple[LayerCost, LayerCost, int, int]]:
    """Yield each part of a virtual stage: what it costs, and without recomputation; the bytes that it would keep
    without that and fp8, by which what passes through memory beside casts is estimated; and how often it is there."""
    act = act.uncompressed
    plain, kept = act.without_recomputation, (block.kept for block in act.wide.chunks[virtual])
    blocks = Counter(zip(act.chunks[virtual], plain.chunks[virtual], kept, strict=True))
    for (block, like, passed), number in blocks.items():
        yield block, like, passed, number
    if virtual == 0:
        yield act.embedding, plain.embedding, plain.embedding.kept, 1
    if virtual == len(act.chunks) - 1:
        yield act.head, plain.head, plain.head.kept, 1


@dataclass(frozen=True)
class _Seconds:
    """The seconds of a rank for one microbatch: of a forward, its backward, what recomputation repeats, and what of the
    backward comes later."""

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    late: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def plus(self, other: _Seconds, times: int = 1) -> _Seconds:
        return _Seconds(*(getattr(self, name) + times * more for name, more in vars(other).items()))


@lru_cache(maxsize=4096)
def _seconds(cluster: Cluster, part: LayerCost, plain: LayerCost, passed: int) -> _Seconds:
    """Return the seconds of a part of a virtual stage, see :func:`parts`."""
    bandwidth = cluster.device.bandwidth

    def taken(products: Mapping[MatMul, int], passes: int) -> float:
        return sum(count * cluster.product_s(each) for each, count in products.items()) + passes / bandwidth

    again, late = Counter(part.backward.products) - Counter(plain.backward.products), plain.weights.products
    made_again = plain.kept - part.kept if part.left else 0
    one = efficiency.PASSES / 3 / bandwidth  # a third of the passes are the forward's
    return _Seconds(
        taken(part.forward.products, part.forward.passes) + one * passed,
        taken(plain.backward.products + late, plain.backward.passes) + 2 * one * passed,
        taken(again, part.backward.passes - plain.backward.passes) + one * made_again,
        taken(late, 0),
    )


def estimate(setting: Setting, cluster: Cluster, simulated: bool = True) -> Estimate:
    """Estimate the time of a step. Where the pipeline is not simulated its bubble is 1/v of a forward and a backward of
    each other stage, less two weight gradients where these come later, which the simulator confirms."""
    layout, m = setting.layout, setting.microbatches
    mesh, pp, chunks = layout.mesh, layout.mesh.pp, layout.chunks
    act, shares = ActivationMemory.of(setting), Shares.of(setting)
    sent = {stage: traffic(setting, stage) for stage in act.unlike}
    virtual = _virtual_times(setting, act, cluster)
    rows = [reduce(_Times.plus, act.of_stage(stage, virtual)) for stage in range(pp)]
    slowest = max(rows, key=lambda row: row.total)
    hop = _hop(setting, cluster)
    busy, hidden = m * slowest.total, 0.0
    share = share_beside(setting, cluster)

    def in_schedule(share: float) -> float:
        costs = [each.cost(hop, share) for each in virtual]
        return _simulated(setting, [act.of_stage(stage, costs) for stage in range(pp)])

    in_turn = in_schedule(0.0) if share or (simulated and pp > 1) else busy
    if share:
        hidden = in_turn - in_schedule(share)
    if pp == 1:
        idle = 0.0
    elif simulated:
        idle = in_turn - busy
    else:
        waits = [max(0.0, row.total - 2 * row.products.late) for row in rows]
        idle = (sum(waits) - waits[rows.index(slowest)]) / chunks + 2 * (pp - 1) * hop
    data = max(_data(setting, cluster, sent[stage], rows[stage]) for stage in act.unlike)
    kept = {stage: sum(b.kept * number for b, number in act.blocks[stage].items()) for stage in act.unlike}
    away = 2 * m * max(size * act.offload[stage] for stage, size in kept.items())
    if setting.offload_parameters:  # a slice comes with each gathering: for the forward and for the backward
        away += 2 * m * max(state(shares.stages[stage], setting).parameters for stage in act.unlike)
    away_s = away / cluster.device.host
    offload = max(away_s - busy, (1 - cluster.overlap) * away_s)
    per_token = flops_per_token(setting.model, setting.sequence_length, setting.tuning)
    cast = max(_casts(setting, cluster, shares.stages[stage], stage) for stage in act.unlike)
    return Estimate(
        m * slowest.products.total + cast,
        m * slowest.products.again,
        m * slowest.tensor.total,
        m * slowest.experts.total - hidden,
        m * slowest.context.total,
        idle,
        data,
        offload,
        max(_optimizer(setting, cluster, shares.stages[stage]) for stage in act.unlike),
        setting.global_tokens,
        per_token * setting.global_tokens / mesh.world / 1e12,
    )


def _hop(setting: Setting, cluster: Cluster) -> float:
    """Return the seconds of a message between stages."""
    mesh = setting.layout.mesh
    message = Traffic(SEND, "pp", "", mesh.pp, 1, setting.activation, True)
    return cluster.seconds(mesh, [message]) if mesh.pp > 1 else 0.0


def share_beside(setting: Setting, cluster: Cluster) -> float:
    """Return the share of the messages of experts that the action beside hides where actions run two by two."""
    if setting.schedule not in OVERLAPPED or not setting.may_overlap:
        return 0.0
    total, here = _ring(setting.layout.mesh, " x ".join(setting.layout.split["experts"]), cluster.device.per_node)
    return cluster.overlap if here == total else cluster.overlap_between


def virtual_costs(setting: Setting, cluster: Cluster) -> Sequence[Cost]:
    """Return what each virtual stage takes for a microbatch, and what it holds of it."""
    times = _virtual_times(setting, ActivationMemory.of(setting), cluster)
    hop, share, held = _hop(setting, cluster), share_beside(setting, cluster), held_bytes(setting)
    return [
        replace(each.cost(hop, share), kept=kept, waiting=waiting)
        for each, (kept, waiting) in zip(times, held, strict=True)
    ]


def _simulated(setting: Setting, costs: Costs) -> float:
    """Return the seconds of all microbatches in a pipeline; of many, those of few and what a group of others takes."""
    placement, m = setting.layout.placement, setting.microbatches
    build, stages, chunks = builder(setting.schedule, setting.group), len(costs), len(costs[0])
    group = setting.group or stages

    def seconds(m: int) -> float:
        return simulate(build(stages, chunks, m), costs, placement).total

    if setting.order is not None:
        return simulate(setting.order, costs, placement).total
    few = 5 * group + m % group
    if 2 * chunks * m <= PRECISE or m <= few:
        return seconds(m)
    less, more = seconds(few - group), seconds(few)
    return more + (m - few) / group * (more - less)


@dataclass(frozen=True)
class _Times:
    """The seconds of one microbatch in some parts of a stage: of products, and of the messages that they show."""

    products: _Seconds = _Seconds()
    tensor: _Seconds = _Seconds()
    experts: _Seconds = _Seconds()
    context: _Seconds = _Seconds()

    @property
    def forward(self) -> float:
        return self.products.forward + self.tensor.forward + self.experts.forward + self.context.forward

    @property
    def backward(self) -> float:
        sent = self.tensor.backward + self.experts.backward + self.context.backward
        return self.products.backward + self.products.again + sent

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def plus(self, other: _Times, times: int = 1) -> _Times:
        return _Times(*(getattr(self, name).plus(more, times) for name, more in vars(other).items()))

    def cost(self, hop: float, beside: float = 0.0) -> Cost:
        """Return what a schedule is simulated with; ``hop``: the seconds of a message to another stage; ``beside``: the
        share of messages of experts that the action beside hides."""
        late, experts = self.products.late, self.experts
        exchanges = {"exchange": beside * experts.forward, "exchange_back": beside * experts.backward}
        return Cost(self.forward, self.backward - late, late, hop, **exchanges)


def _virtual_times(setting: Setting, act: ActivationMemory, cluster: Cluster) -> Sequence[_Times]:
    """Return the seconds of one microbatch in each virtual stage."""
    per_byte = [passes / cluster.device.bandwidth for passes in efficiency.COMPRESS_PASSES]
    mesh, packing = setting.layout.mesh, setting.packing
    known = dict[object, _Times]()
    found = []
    for virtual in range(len(act.chunks)):
        key = tuple(parts(act, virtual))
        if key not in known:
            known[key] = _Times()
            for part, plain, passed, number in key:
                known[key] = known[key].plus(_part_times(cluster, mesh, packing, part, plain, passed), number)
        kept, whole = (sum(block.kept for block in each.chunks[virtual]) for each in (act, act.uncompressed))
        rounded = (whole - kept) / (1 - 1 / act.rank.width - 1 / BLOCK)  # to a byte of each element, and scales
        found.append(known[key].plus(_Times(_Seconds(*(rounded * each for each in per_byte)))))
    return found


@lru_cache(maxsize=4096)
def _part_times(
    cluster: Cluster, mesh: MeshShape, packing: Packing, part: LayerCost, plain: LayerCost, passed: int
) -> _Times:
    """Return the seconds of a part of a virtual stage, see :func:`parts`."""
    seconds = _seconds(cluster, part, plain, passed)

    def shown(work: Mapping[Collective, int], beside: float, of: Callable[[Collective], bool]) -> float:
        """Return what is not hidden: such as gathers and scatters of a column-parallel product's backward, which run
        beside its two products."""
        sent = [Traffic(x.kind, x.axis, "", x.ranks, n, x.size, x.hidden) for x, n in work.items() if of(x)]
        alone = cluster.seconds(mesh, (x for x in sent if not x.hidden))
        return alone + cluster.shown(mesh, [x for x in sent if x.hidden], beside)

    def both(of: Callable[[Collective], bool]) -> _Seconds:
        back = part.backward.messages + part.weights.messages
        return _Seconds(shown(part.forward.messages, seconds.forward, of), shown(back, seconds.backward, of))

    tensor = both(lambda x: x.axis not in ("cp", "ep") and x.kind != ALL_TO_ALL)
    experts = both(lambda x: x.axis == "ep" or (x.axis != "cp" and x.kind == ALL_TO_ALL))
    ahead, back = (
        sum(
            n * cluster.exposed(mesh, packing.exchange(each.window, each.chunk), each)
            for each, n in work.exchanges.items()
        )
        for work in (part.forward, part.backward)
    )
    return _Times(seconds, tensor, experts, both(lambda x: x.axis == "cp").plus(_Seconds(ahead, back)))


def _data(setting: Setting, cluster: Cluster, sent: Sequence[Traffic], times: _Times) -> float:
    """Return the seconds that the sums of gradients and the gathering of parameters and matrices add to a step."""
    mesh, m, rung = setting.layout.mesh, setting.microbatches, SHARDS.index(setting.shard)
    gathers = [x for x in sent if x.what == "parameters"]
    whole = cluster.seconds(mesh, [x for x in sent if x.what in (GATHERED, RETURNED, WAYS)])
    sums = [x for x in sent if "gradients" in x.what and x.kind != SEND]
    if rung == 3:
        return whole + cluster.shown(mesh, [*sums, *gathers], m * times.total)
    # A sum starts with the last gradient of the step, so it hides behind one backward; what is split goes with each.
    beside = times.backward * (m if rung == 2 else 1)
    return whole + cluster.shown(mesh, sums, beside) + cluster.shown(mesh, gathers, times.forward)


def _casts(setting: Setting, cluster: Cluster, shares: Sequence[ParameterShare], stage: int) -> float:
    """Return the seconds of casting weights to fp8: once a step those that change, wholes or slices, with a transposed
    copy, which what is gathered gets for each backward; or for both products of each microbatch."""
    moved, m = 0.0, setting.microbatches
    for part, (elements, ranks) in zip(shares, casts(shares, setting, stage), strict=True):
        changed = elements * part.trained // part.elements
        if ranks > 1:
            moved += changed * efficiency.CAST_SLICE_BYTES / ranks + elements * efficiency.TURN_BYTES * m
        elif ranks:
            moved += 2 * efficiency.CAST_BYTES * changed
        else:  # the bf16 is read for a copy each, and of experts for the largest magnitude too
            moved += (2 * efficiency.CAST_BYTES + (4 if part.param.leading else 2)) * elements * m
    return moved / cluster.device.bandwidth


def _optimizer(setting: Setting, cluster: Cluster, shares: Sequence[ParameterShare]) -> float:
    """Return the seconds of reading and writing what an update works on, and of its products of whole matrices.

    Offloaded, the host does it, window by window: gradients come and parameters go beside its work, each in a
    direction of its own, and states are read and written; the slowest of these shows.
    """
    own = updated(shares, replace(setting, widths=replace(setting.widths, outer=0)))  # which few steps touch
    states, products = own.masters + own.moments, 0.0
    for group in matrix_groups(setting, shares):
        own_s = (count * cluster.multiplied_s(each, cluster.tflops) for each, count in group.products.items())
        products += sum(own_s) / group.ranks
    if setting.offload_optimizer == "none":
        return (own.gradients * 2 + states * 2 + own.parameters) / cluster.device.bandwidth + products
    device, values = cluster.device, own.masters or own.parameters
    ways = [(own.gradients * 2 + states * 2 + values) / device.cpu, max(own.gradients, values) / device.host]
    if setting.offload_optimizer == "file":
        ways.append(2 * states / device.disk)
    return max(ways)
