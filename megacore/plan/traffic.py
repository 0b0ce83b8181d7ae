"""Bytes that a rank sends in a step, by kind of collective and axis of the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megacore.plan.activations import Activations
from megacore.plan.setting import SHARDS, Setting
from megacore.plan.state import Held, Part, sharing

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND = "all-reduce", "all-gather", "reduce-scatter", "send"


def ring(kind: str, size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring for a tensor of ``size`` bytes (Patarasuk and Yuan 2009): 2 (n-1)/n of it
    for an all-reduce, (n-1)/n for its halves."""
    if kind == SEND:
        return size
    return (2 if kind == ALL_REDUCE else 1) * size * (ranks - 1) / ranks


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind of a rank in a step.

    Args:
        kind: Of collective.
        axis: Dimensions of the mesh that the group lies along, as "dp" or "dp x tp".
        what: What is moved.
        ranks: In the group.
        count: Messages.
        size: Bytes of one: of the whole tensor that is summed or gathered.
        hidden: Whether compute of the same step can go on beside it.
    """

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


def traffic(setting: Setting, held: Held, stage: int) -> tuple[Traffic, ...]:
    """All messages of a rank of a stage."""
    act = Activations(setting, held.block)
    found = [*_tensor(act, stage), *_pipeline(setting, stage), *_data(setting, held.stages[stage])]
    return tuple(each for each in found if each.ranks > 1 and each.count and each.size)


def _tensor(act: Activations, stage: int) -> Iterator[Traffic]:
    setting, layout = act.setting, act.setting.layout
    m, tp = setting.microbatches, layout.mesh.tp
    layers = sum(len(layout.chunk_layers(stage, chunk)) for chunk in range(layout.chunks))
    columns, rows = sum(x.column for x in act.linears), sum(not x.column for x in act.linears)
    blocks = layers * m
    # Recomputed blocks gather and scatter once more, all but the last scatter: what it gives is kept.
    again = {"none": 0, "selective": 0, "full": blocks}[setting.recompute]
    first, last = stage == 0, stage == layout.mesh.pp - 1
    size = setting.activation * tp

    def moved(kind: str, what: str, count: int, hidden: bool) -> Traffic:
        return Traffic(kind, "tp", what, tp, count, size, hidden)

    yield moved(ALL_GATHER, "tokens, forward", (blocks + again) * columns + m * last, False)
    yield moved(REDUCE_SCATTER, "tokens, forward", blocks * rows + again * (rows - 1) + m * first, False)
    yield moved(ALL_GATHER, "tokens again, backward", blocks * columns + m * last, True)
    yield moved(ALL_GATHER, "gradients of tokens", blocks * rows + m * first, False)
    yield moved(REDUCE_SCATTER, "gradients of tokens", blocks * columns + m * last, True)
    if last:  # maximum; exponentials and the label's logit
        yield Traffic(ALL_REDUCE, "tp", "sums of the loss", tp, 2 * m, 6 * setting.tokens, False)


def _pipeline(setting: Setting, stage: int) -> Iterator[Traffic]:
    layout, pp = setting.layout, setting.layout.mesh.pp
    virtual = [chunk * pp + stage for chunk in range(layout.chunks)]
    there = sum(v < pp * layout.chunks - 1 for v in virtual) * setting.microbatches
    back = sum(v > 0 for v in virtual) * setting.microbatches
    yield Traffic(SEND, "pp", "activations", pp, there, setting.activation, True)
    yield Traffic(SEND, "pp", "gradients of activations", pp, back, setting.activation, True)


def _data(setting: Setting, held: Sequence[Part]) -> Iterator[Traffic]:
    """Gradients, by who shares them, and split parameters."""
    mesh, widths, rung = setting.layout.mesh, setting.widths, SHARDS.index(setting.shard)
    data = mesh.dp * mesh.cp
    alike: dict[tuple[tuple[str, ...], int], list[Part]] = {}
    for part in held:
        alike.setdefault((part.dims, part.model_replicas), []).append(part)
    for (dims, _), group in alike.items():
        own = (*(("dp",) if mesh.dp > 1 else ()), *(("cp",) if mesh.cp > 1 else ()), *dims)
        numel = sum(part.elements for part in group)
        ranks, split = data * group[0].model_replicas, sharing(group[0], setting)
        axis, gradient = " x ".join(own), numel * widths.gradient
        what = "gradients" if not dims else "gradients of what these ranks share"
        if rung == 0:
            yield _buckets(setting, ALL_REDUCE, axis, what, ranks, gradient, 1)
            continue
        times = setting.microbatches if rung >= 2 else 1
        yield _buckets(setting, REDUCE_SCATTER, axis, what, split, gradient, times)
        others = ranks // split  # HSDP's replicas, and the other end of the pipeline
        yield _buckets(setting, ALL_REDUCE, axis, "gradients of the same slice", others, gradient // split, 1)
        weights = numel * widths.parameter
        uses = 2 * setting.microbatches if rung == 3 else 1
        yield _buckets(setting, ALL_GATHER, axis, "parameters", split, weights, uses)


def _buckets(setting: Setting, kind: str, axis: str, what: str, ranks: int, size: int, times: int) -> Traffic:
    """A tensor of so many bytes in buckets, so many times in a step."""
    count = max(1, round(size / setting.bucket_bytes))
    return Traffic(kind, axis, what, ranks, times * count, size // count, True)
