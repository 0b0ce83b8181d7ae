"""Bytes that a rank sends in a step, by kind of collective and axis of the mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megacore.plan.activations import Activations
from megacore.plan.block import Block, Branch
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
    act = Activations(setting, held)
    found = [*_tensor(act, stage), *_pipeline(setting, stage), *_data(act, stage)]
    return tuple(each for each in found if each.ranks > 1 and each.count and each.size)


@dataclass(frozen=True)
class _Message:
    """What tensor parallel ranks exchange; fields as :class:`Traffic`'s."""

    kind: str
    what: str
    hidden: bool


_GATHER = _Message(ALL_GATHER, "tokens, forward", False)
_SCATTER = _Message(REDUCE_SCATTER, "tokens, forward", False)
_GATHER_AGAIN = _Message(ALL_GATHER, "tokens again, backward", True)
_GRADIENT_GATHER = _Message(ALL_GATHER, "gradients of tokens", False)
_GRADIENT_SCATTER = _Message(REDUCE_SCATTER, "gradients of tokens", True)


def _tensor(act: Activations, stage: int) -> Iterator[Traffic]:
    setting, layout = act.setting, act.setting.layout
    m, tp = setting.microbatches, layout.mesh.tp
    first, last = stage == 0, stage == layout.mesh.pp - 1
    embed, width = layout.schema.sizes["embed"], setting.tokens * setting.widths.parameter
    counts = Counter(
        {
            (_GATHER, embed): m * last,
            (_SCATTER, embed): m * first,
            (_GATHER_AGAIN, embed): m * (last and act.head_table > 0),
            (_GRADIENT_GATHER, embed): m * (first and act.embeds),
            (_GRADIENT_SCATTER, embed): m * (last and act.normed),
        }
    )
    for block, number in act.stage(stage).items():
        for message, features in _of_block(block):
            counts[message, features] += number * m
    for (message, features), count in counts.items():
        what = message.what if features == embed else f"{message.what}, adapters"
        yield Traffic(message.kind, "tp", what, tp, count, features * width, message.hidden)
    if last:  # maximum; exponentials and the label's logit
        yield Traffic(ALL_REDUCE, "tp", "sums of the loss", tp, 2 * m, 6 * setting.tokens, False)


def _of_block(block: Block) -> Iterator[tuple[_Message, int]]:
    """Each message of a block for one microbatch, and how many features of its tokens are moved."""
    forward = [each for branch in block.branches for each in _forward(branch)]
    yield from forward
    if block.setting.recompute == "full" and block.left:
        # What the last scatter gives is kept, if nothing after it is not.
        yield from forward if block.branches[-1].row.rank else forward[:-1]
    for branch in block.branches:
        column, row = branch.column, branch.row
        if column.trained:
            yield _GATHER_AGAIN, column.inputs
        if branch.normed:
            yield _GRADIENT_SCATTER, column.inputs
        if branch.crossed or row.trained:
            yield _GRADIENT_GATHER, row.outputs
        if column.rank:
            yield _GATHER_AGAIN, column.rank
            yield _GRADIENT_SCATTER, column.rank
        if row.rank:
            yield _GRADIENT_GATHER, row.rank


def _forward(branch: Branch) -> Iterator[tuple[_Message, int]]:
    """In their order."""
    if branch.column.rank:
        yield _GATHER, branch.column.rank
    yield _GATHER, branch.column.inputs
    if branch.row.rank:
        yield _SCATTER, branch.row.rank
    yield _SCATTER, branch.row.outputs


def _pipeline(setting: Setting, stage: int) -> Iterator[Traffic]:
    layout, pp = setting.layout, setting.layout.mesh.pp
    virtual = [chunk * pp + stage for chunk in range(layout.chunks)]
    there = sum(v < pp * layout.chunks - 1 for v in virtual) * setting.microbatches
    back = sum(v > 0 for v in virtual) * setting.microbatches
    yield Traffic(SEND, "pp", "activations", pp, there, setting.activation, True)
    yield Traffic(SEND, "pp", "gradients of activations", pp, back, setting.activation, True)


def _data(act: Activations, stage: int) -> Iterator[Traffic]:
    """Gradients, by who shares them, and split parameters."""
    setting, held = act.setting, act.held.stages[stage]
    mesh, widths, rung = setting.layout.mesh, setting.widths, SHARDS.index(setting.shard)
    data = mesh.dp * mesh.cp
    alike: dict[tuple[tuple[str, ...], int], list[Part]] = {}
    for part in held:
        alike.setdefault((part.dims, part.model_replicas), []).append(part)
    for (dims, _), group in alike.items():
        own = (*(("dp",) if mesh.dp > 1 else ()), *(("cp",) if mesh.cp > 1 else ()), *dims)
        numel = sum(part.trained for part in group)
        ranks, split = data * group[0].model_replicas, sharing(group[0], setting)
        axis, gradient = " x ".join(own), numel * widths.gradient
        what = "gradients" if not dims else "gradients of what these ranks share"
        if rung == 0:
            yield _buckets(act, stage, ALL_REDUCE, axis, what, ranks, gradient, 1)
            continue
        times = setting.microbatches if rung >= 2 else 1
        yield _buckets(act, stage, REDUCE_SCATTER, axis, what, split, gradient, times)
        others = ranks // split  # HSDP's replicas, and the other end of the pipeline
        yield _buckets(act, stage, ALL_REDUCE, axis, "gradients of the same slice", others, gradient // split, 1)
        # After the update those that are trained; split ones before their forward and their backward, trained or not.
        used = sum(_used(act, stage, part) for part in group) // 2
        moved, uses = (used, 2 * setting.microbatches) if rung == 3 else (numel, 1)
        yield _buckets(act, stage, ALL_GATHER, axis, "parameters", split, moved * widths.parameter, uses)


def _used(act: Activations, stage: int, part: Part) -> int:
    """How many elements of a part are used in the forward of a microbatch, and in its backward."""
    if "layer" not in part.param.named_axes:
        return part.elements * (1 + (act.embeds or part.param.at != "first"))
    blocks = act.stage(stage)
    layers, reached = blocks.total(), sum(number for block, number in blocks.items() if block.left)
    return part.elements // layers * (layers + reached)


def _buckets(
    act: Activations, stage: int, kind: str, axis: str, what: str, ranks: int, size: int, times: int
) -> Traffic:
    """A tensor of so many bytes in buckets, so many times in a step; split parameters have one for each block."""
    units = act.stage(stage).total() if act.setting.shard == "parameters" else 0
    count = units or max(1, round(size / act.setting.bucket_bytes))
    return Traffic(kind, axis, what, ranks, times * count, size // count, True)
