"""Bytes on every rank at the peak of a step, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megacore.plan.activations import Activations
from megacore.plan.setting import SHARDS, Setting
from megacore.plan.state import Held, Part, state
from parallel.budgets import OFFLOAD_AHEAD, REDUCE_SCATTERS
from parallel.pipeline.schedules import SCHEDULES

TERMS = (
    "parameters",
    "gradients",
    "masters",
    "moments",
    "activations",
    "logits",
    "working",
    "buffers",
)
"""What the peak is the sum of."""
_MESSAGES = 3
"""Activations that a stage of a pipeline holds for each neighbour: up to two asked for, one on its way out."""


@dataclass(frozen=True)
class Memory:
    """Of the ranks of one stage of the pipeline, which are all alike; in bytes.

    Args:
        stage: The stage.
        ranks: How many ranks there are.
        elements: Parameters on each.
        terms: {term of ``TERMS``: bytes on the device at the peak}.
        host: Bytes in host memory.
        disk: Bytes in a file.
        per_microbatch: Activations that one microbatch leaves in all chunks of the stage, logits included.
        in_flight: The most chunks times microbatches at once whose backward is still to come.
        peak_at: What the stage does when it holds most.
    """

    stage: int
    ranks: int
    elements: int
    terms: dict[str, int]
    host: int
    disk: int
    per_microbatch: int
    in_flight: int
    peak_at: str

    @property
    def peak(self) -> int:
        return sum(self.terms.values())

    @property
    def largest(self) -> str:
        return max(self.terms, key=lambda term: self.terms[term])


@cache
def crowds(schedule: str, stages: int, chunks: int, microbatches: int) -> tuple[frozenset[tuple[int, ...]], ...]:
    """Per stage: what is in flight when a backward starts, as (its chunk, microbatches in flight of chunk 0, 1, ...).

    Left out are those of which another has at least as much of every chunk.
    """
    found = []
    for row in SCHEDULES[schedule](stages, chunks, microbatches):
        alive, seen = [0] * chunks, set()
        for action in row:
            if action.kind == "F":
                alive[action.chunk] += 1
            else:
                seen.add((action.chunk, *alive))
                alive[action.chunk] -= 1
        found.append(frozenset(crowd for crowd in seen if not any(_covers(other, crowd) for other in seen - {crowd})))
    return tuple(found)


def _covers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one[0] == other[0] and all(a >= b for a, b in zip(one, other, strict=True))


COMMUNICATOR = 500_000_000
"""Bytes that NCCL takes for a group, beside what torch allocates. It depends on links and versions, and nothing here
has measured it: others have seen 0.54 to 0.69 GB on an A100 with NVLink (github.com/NVIDIA/nccl/issues/964)."""


def groups(setting: Setting) -> int:
    """The most groups that a rank talks in, each of which is a communicator of NCCL: those of the mesh, the channels of
    the pipeline, and who holds the same of some piece, or shares it out."""
    mesh = setting.layout.mesh
    return max(len(_groups(setting, rank)) for rank in mesh.ranks(dp=(0,), ep=(0,), cp=(0,))) + 4 * (mesh.pp > 1)


def _groups(setting: Setting, rank: int) -> set[tuple[int, ...]]:
    layout, mesh = setting.layout, setting.layout.mesh
    found = {mesh.along(rank, *dims) for dims in (("tp",), ("dp", "ep", "cp"), mesh.DIMS)}
    sets = {
        layout.replicas(shard, label)
        for shard in layout.shards(mesh.place(rank))
        for label in shard.param.sentence.labels
    }
    if setting.shard == "none":
        return {ranks for ranks in found | sets if len(ranks) > 1}

    def part(other: int) -> tuple[int, int]:
        """Who shares with whom: ranks of one stage, of one group of replicas."""
        place = mesh.place(other)
        return place.pp, place.dp * setting.replicas // mesh.dp

    for ranks in sets:
        own = tuple(other for other in ranks if part(other) == part(rank))
        at = own.index(rank)
        parts = {part(other): [each for each in ranks if part(each) == part(other)] for other in ranks}
        found |= {own, tuple(sorted(each[at] for each in parts.values()))}
    return {ranks for ranks in found if len(ranks) > 1}


def memory(setting: Setting, held: Held) -> tuple[Memory, ...]:
    """Of every stage, whose ranks hold what they hold."""
    act = Activations(setting, held)
    return tuple(_stage(setting, act, stage, own) for stage, own in enumerate(held.stages))


@dataclass(frozen=True)
class _Moment:
    """A candidate for the peak: bytes of the terms that change within a step."""

    what: str
    activations: int = 0
    logits: int = 0
    working: int = 0
    gradients: int | None = None

    def total(self, gradients: int) -> int:
        return self.activations + self.logits + self.working + (gradients if self.gradients is None else self.gradients)


def _stage(setting: Setting, act: Activations, stage: int, held: Sequence[Part]) -> Memory:
    layout = setting.layout
    whole = state(held, setting)
    everything = whole.device(setting)
    states = whole.masters + whole.moments
    disk = states if setting.offload_optimizer == "file" else 0
    host = whole.total - everything.total - disk
    if setting.offload_optimizer != "none":
        host += min(setting.offload_buffer, whole.gradients + disk)
    moments = list(_moments(setting, act, stage, held))
    worst = max(moments, key=lambda moment: moment.total(everything.gradients))
    kept = [act.kept(virtual) for virtual in range(stage, len(layout.layers), layout.mesh.pp)]
    flying = crowds(setting.schedule, layout.mesh.pp, layout.chunks, setting.microbatches)[stage]
    if setting.offload_activations:
        host += max(sum(n * k for n, k in zip(alive, kept, strict=True)) for _, *alive in flying)
    last = stage == layout.mesh.pp - 1
    terms = {
        "parameters": everything.parameters,
        "gradients": everything.gradients if worst.gradients is None else worst.gradients,
        "masters": everything.masters,
        "moments": everything.moments,
        "activations": worst.activations,
        "logits": worst.logits,
        "working": worst.working,
        "buffers": _buffers(setting, act, stage),
    }
    assert tuple(terms) == TERMS
    return Memory(
        stage,
        layout.mesh.world // layout.mesh.pp,
        sum(part.elements for part in held),
        terms,
        host,
        disk,
        sum(kept) + (act.head + act.logits) * last,
        max(sum(alive) for _, *alive in flying),
        worst.what,
    )


def _moments(setting: Setting, act: Activations, stage: int, held: Sequence[Part]) -> list[_Moment]:
    """The start of every backward at the head, at the last block of each kind, at the first one and at the embedding,
    for all that is in flight."""
    layout = setting.layout
    last = layout.mesh.pp * layout.chunks - 1
    tables = [part for part in held if "vocab" in part.param.sentence.axes]
    twice = act.head_table if layout.mesh.pp == 1 and layout.chunks == 1 and len(tables) == 1 else 0
    lazy = _lazy(held, setting)
    sharing = _Sharing.of(setting, act, stage, held)
    kept = [_on_device(act, virtual) for virtual in range(stage, len(layout.layers), layout.mesh.pp)]
    found = []
    for chunk, *alive in crowds(setting.schedule, layout.mesh.pp, layout.chunks, setting.microbatches)[stage]:
        virtual = chunk * layout.mesh.pp + stage
        own = kept[chunk]
        # Only the last virtual stage has a head, and it is the last chunk of its stage.
        heads = (alive[-1] - (virtual == last)) * (stage == layout.mesh.pp - 1)
        others = sum(n * size for n, size in zip(alive, kept, strict=True)) - own + heads * act.head
        logits = heads * act.logits
        if virtual == last:
            loss = act.loss - (act.head_table if lazy else 0) + sharing.head
            gradients = act.head_table if lazy else None
            found.append(_Moment("backward of the head", others + own + act.head, logits + act.logits, loss, gradients))
        tied = twice if virtual == last else 0
        for visit in act.visits[virtual]:
            left, working = others + own - visit.freed, visit.block.backward + tied + sharing.block
            # At the first block all gradients are there; if they only come to be, less is there before.
            coming = act.head_table + visit.learned * setting.widths.gradient
            partly = coming if lazy and visit.which != "first" else None
            if lazy or visit.which != "first":
                what = f"backward of a chunk's {visit.which} block"
                found.append(_Moment(what, left, logits, working, partly))
        if not act.chunks[virtual][-1].left:
            found.append(_Moment("forward of a chunk", others, logits, act.forward(virtual) + sharing.block))
        if virtual == 0 and act.embeds:
            working = act.embedding - (act.embedding_table if lazy else 0) + tied + sharing.embedding
            found.append(_Moment("backward of the embedding", others, logits, working))
    found.append(_Moment("optimizer step"))
    return found


def _on_device(act: Activations, virtual: int) -> int:
    """What a chunk keeps; where it is offloaded, what is on its way."""
    kept = act.kept(virtual)
    most = max(block.kept for block in act.chunks[virtual])
    return min(kept, OFFLOAD_AHEAD + most) if act.setting.offload_activations else kept


def _lazy(held: Sequence[Part], setting: Setting) -> bool:
    """Whether gradients only come to be in the backward: nobody shares them, they need no wider type, and there is one
    microbatch (the next one finds those of the one before)."""
    mesh, widths = setting.layout.mesh, setting.widths
    shared = mesh.dp * mesh.cp > 1 or any(part.model_replicas > 1 for part in held if part.trained)
    one = setting.microbatches * setting.layout.chunks == 1
    return not shared and widths.gradient == widths.parameter and one


@dataclass(frozen=True)
class _Sharing:
    """What split gradients and parameters need while they are whole (`gradients.zero`): at the head, in a block, at the
    embedding."""

    head: int = 0
    block: int = 0
    embedding: int = 0

    @classmethod
    def of(cls, setting: Setting, act: Activations, stage: int, held: Sequence[Part]) -> _Sharing:
        """A bucket that fills, and those whose sums are under way; of parameters a unit, and the one gathered next."""
        rung, widths = SHARDS.index(setting.shard), setting.widths
        if rung < 2:
            return cls()
        head, embedding = (
            table // widths.parameter * widths.gradient for table in (act.head_table, act.embedding_table)
        )
        everything = sum(part.trained for part in held)
        learning = max(block.learning for block in act.stage(stage))
        bucket = learning if rung == 3 else min(setting.bucket_bytes // widths.gradient, everything)
        sums = (1 + REDUCE_SCATTERS) * bucket * widths.gradient
        if rung == 2:
            return cls(head, sums, embedding + sums)
        unit, table = act.chunks[0][0].elements * widths.parameter, act.rows * widths.parameter
        return cls(table + head + unit, 2 * unit + sums, table + embedding + unit + sums)


def _buffers(setting: Setting, act: Activations, stage: int) -> int:
    """The batch, and messages between stages."""
    size = act.batch
    pp, chunks = setting.layout.mesh.pp, setting.layout.chunks
    if pp > 1:
        alone = chunks == 1 and stage in (0, pp - 1)
        size += (1 if alone else 2) * _MESSAGES * setting.activation
    return size
