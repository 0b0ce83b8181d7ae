"""Bytes that a rank sends in a step, by kind of collective and axis of the mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megacore.planning.activations import ActivationMemory
from megacore.planning.costs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND, Collective
from megacore.planning.setting import SHARDS, Setting
from megacore.planning.state_bytes import ParameterShare, Shares, cast, matrix_groups, sharing, updated

TOKENS, HEADS, KEYS, GRADIENTS = "tokens", "tokens by heads", "keys and values", "gradients of keys and values"
SPANS = "states of spans"
"""The things that layers send, forward and backward: over tp and ep, over cp by heads, by hops, and what spans of a
document make of a state; each to ranks of its own, so a time is that of one of them."""
GATHERED, RETURNED = "matrices, gathered", "matrices, returned"
"""The things that an update of whole matrices sends."""
WAYS = "ways of replicas, over a round"
"""The things that an outer step sends, of which each step of its round has a share."""


def ring(kind: str, size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring for a tensor of ``size`` bytes (Patarasuk and Yuan 2009): 2
    (n-1)/n of it for an all-reduce, (n-1)/n for its halves; for an all-to-all as much, for its own part stays."""
    if kind == SEND:
        return size
    return (2 if kind == ALL_REDUCE else 1) * size * (ranks - 1) / ranks


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind of a rank in a step: ``count`` of ``size`` bytes, each of the whole tensor that is summed or
    gathered, in groups of so many ranks that lie along some dimensions of the mesh ("dp x tp"); ``hidden``: compute of
    the same step can go on beside them."""

    kind: str
    axis: str
    what: str
    ranks: int
    count: int
    size: int
    hidden: bool

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        return self.count * ring(self.kind, self.size, self.ranks)


def traffic(setting: Setting, stage: int) -> tuple[Traffic, ...]:
    """Return all messages of a rank of a stage."""
    act, shares = ActivationMemory.of(setting), Shares.of(setting).stages[stage]
    messages = [
        *_layers(setting, act, stage),
        *_pipeline(setting, stage),
        *_data(setting, act, shares, stage),
        *_matrices(setting, shares),
        *_ways(setting, shares),
    ]
    return tuple(each for each in messages if each.ranks > 1 and each.count and each.size)


def _layers(setting: Setting, act: ActivationMemory, stage: int) -> Iterator[Traffic]:
    """Yield the messages of the layers themselves."""
    counts = Counter[tuple[Collective, str]]()
    for unit, number in act.stage(stage).items():
        for when, work in (("forward", unit.forward), ("backward", unit.backward), ("backward", unit.weights)):
            for message, count in work.messages.items():
                what = TOKENS if message.axis != "cp" else HEADS if message.kind == ALL_TO_ALL else SPANS
                counts[message, f"{what}, {when}"] += count * number * setting.microbatches
            for exchange, count in work.exchanges.items():
                for what, size, back in ((KEYS, exchange.keys, False), (GRADIENTS, exchange.gradients, True)):
                    for tokens in setting.packing.exchange(exchange.window, exchange.chunk).messages(back):
                        message = Collective(SEND, "cp", setting.layout.mesh.cp, tokens * size, True)
                        counts[message, f"{what}, {when}"] += count * number * setting.microbatches
    for (message, what), count in counts.items():
        yield Traffic(message.kind, message.axis, what, message.ranks, count, message.size, message.hidden)


def _pipeline(setting: Setting, stage: int) -> Iterator[Traffic]:
    layout, pp = setting.layout, setting.layout.mesh.pp
    virtual, last = layout.virtual_stages(stage), pp * layout.chunks - 1
    turns = {pp - 1} if layout.placement == "v" else set[int]()  # from one chunk to the next of the same stage
    there = sum(v < last and v not in turns for v in virtual) * setting.microbatches
    back = sum(v > 0 and v - 1 not in turns for v in virtual) * setting.microbatches
    yield Traffic(SEND, "pp", "activations", pp, there, setting.activation, True)
    yield Traffic(SEND, "pp", "gradients of activations", pp, back, setting.activation, True)


def _data(setting: Setting, act: ActivationMemory, shares: Sequence[ParameterShare], stage: int) -> Iterator[Traffic]:
    """Yield the messages of gradients, by who shares them, and of split parameters."""
    mesh, widths, rung = setting.layout.mesh, setting.widths, SHARDS.index(setting.shard)
    data, units = setting.summing, act.blocks[stage].total() if rung == 3 else 0

    def buckets(kind: str, axis: str, what: str, ranks: int, held: int, times: int, sent: int | None = None) -> Traffic:
        """Return the messages of a tensor whose bytes are held so, and perhaps sent otherwise, ``times`` in a step;
        parameters that are split have a bucket for each block."""
        count = units or max(1, round(held / setting.bucket_bytes))
        return Traffic(kind, axis, what, ranks, times * count, (held if sent is None else sent) // count, True)

    alike: dict[tuple[tuple[str, ...], int], list[ParameterShare]] = {}
    for part in shares:
        alike.setdefault((part.dims, part.model_replicas), []).append(part)
    for (dims, _), group in alike.items():
        own = (*(("dp",) if mesh.dp > setting.alone else ()), *(("cp",) if mesh.cp > 1 else ()), *dims)
        numel = sum(part.trained for part in group)
        ranks, split = data * group[0].model_replicas, sharing(group[0], setting)
        axis, gradient = " x ".join(own), numel * widths.gradient
        sent = setting.sent(numel, group[0].model_replicas)
        what = "gradients" if not dims else "gradients of what these ranks share"
        if rung == 0:
            yield buckets(ALL_REDUCE, axis, what, ranks, gradient, 1, sent)
            continue
        times = setting.microbatches if rung >= 2 else 1
        yield buckets(REDUCE_SCATTER, axis, what, split, gradient, times, sent)
        others = ranks // split  # HSDP's replicas, and the other end of the pipeline
        yield buckets(ALL_REDUCE, axis, "gradients of the same slice", others, gradient // split, 1, sent // split)
        # After the update those that are trained; split ones before their forward and their backward, trained or not.
        used = sum(_gathered(setting, act, stage, part) for part in group) // 2
        moved, uses = (used, 2 * setting.microbatches) if rung == 3 else (numel * widths.parameter, 1)
        yield buckets(ALL_GATHER, axis, "parameters", split, moved, uses)


def _matrices(setting: Setting, shares: Sequence[ParameterShare]) -> Iterator[Traffic]:
    """Yield the messages that bring whole matrices together, and back; of a rank, the mean of all."""
    width = 8 if setting.widths.parameter == 8 else 2
    for group in matrix_groups(setting, shares):
        axis = " x ".join(dim for dim in group.dims if setting.layout.mesh[dim] > 1)
        for what, ranks, elements in (
            (GATHERED, group.owners, group.whole // group.ranks),
            (RETURNED, group.ranks, group.owned),
        ):
            size = elements * width // group.rounds
            yield Traffic(ALL_TO_ALL, axis, what, ranks, group.rounds, size, False)


def _gathered(setting: Setting, act: ActivationMemory, stage: int, part: ParameterShare) -> int:
    """Return the bytes of a part that are gathered for the forward of a microbatch, and for its backward: in fp8 where
    that is what is multiplied."""
    used = _used(act, stage, part)
    narrow = 0 if setting.offload_parameters else used * cast(part, setting, stage) // max(1, part.elements)
    return setting.bytes_of(part.param, used - narrow) + narrow


def _ways(setting: Setting, shares: Sequence[ParameterShare]) -> Iterator[Traffic]:
    """Yield the messages by which replicas that take steps alone are brought together, of one step."""
    if setting.round_steps:
        widths = replace(setting.widths, moments=0, average=0)
        size = updated(shares, replace(setting, widths=widths)).moments // 2  # of the start, and not the momentum
        yield Traffic(ALL_REDUCE, "dp", WAYS, setting.alone, 1, size // setting.round_steps, False)


def _used(act: ActivationMemory, stage: int, part: ParameterShare) -> int:
    """Return the number of elements of a part that are used in the forward of a microbatch, and in its backward."""
    if "layer" not in part.param.named_axes:
        return part.elements * (1 + (act.embeds or part.param.at != "first"))
    blocks = act.blocks[stage]
    layers, reached = blocks.total(), sum(number for block, number in blocks.items() if block.left)
    return part.elements * (layers + reached) // layers
