"""Bytes on every rank at the peak of a step, term by term."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from operator import ge
from typing import NamedTuple

from megacore.parallel.budgets import NORM_BLOCK, OFFLOAD_AHEAD, REDUCE_SCATTERS
from megacore.parallel.pipeline.schedules import Schedule, builder
from megacore.parallel.virtual_stages import stage_of
from megacore.planning.activations import ActivationMemory
from megacore.planning.setting import SHARDS, Setting
from megacore.planning.state_bytes import ParameterShare, Shares, cast_bytes, matrix_groups, sharing, state

TERMS = ("parameters", "gradients", "masters", "moments", "activations", "logits", "working", "buffers")
"""The terms whose sum is the peak."""
_MESSAGES = 3
"""Activations that a stage of a pipeline holds for each neighbour: up to two asked for, one on its way out."""


@dataclass(frozen=True)
class Memory:
    """The memory of each rank of one stage of the pipeline, all alike; in bytes.

    Args:
        elements: Parameters on each.
        terms: {term of ``TERMS``: bytes on the device at the peak}.
        per_microbatch: Activations that one microbatch leaves in all chunks of the stage, logits included.
        in_flight: The most chunks times microbatches at once some of whose backward is still to come.
        peak_at: The point of the step at which the stage holds most.
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


@dataclass(frozen=True)
class Load:
    """The fullest rank of those that experts are spread over: the rows that its experts get over the mean of all ranks,
    these rows, of one microbatch in one layer, and the bytes at the peak of a step, of the stage that has most."""

    times: float
    rows: int
    peak: int


def loads(setting: Setting) -> tuple[Load, ...]:
    """Return the fullest rank where all ranks get as many rows, where they don't as the setting says, and where one
    gets all of them; nothing where experts are not spread over ranks."""
    layout, routing = setting.layout, setting.model.anatomy.routing
    ranks = layout.mesh.size(layout.split["experts"])
    if routing is None or ranks == 1:
        return ()
    mean = setting.tokens * layout.mesh.ep * routing.top_k // ranks
    found = []
    for times in sorted({1.0, min(setting.imbalance, float(ranks)), float(ranks)}):
        peak = max(peaks(replace(setting, imbalance=times)))
        found.append(Load(times, round(mean * times), peak))
    return tuple(found)


class Crowd(NamedTuple):
    """What a stage holds when a backward, or weight gradients, of a chunk start: microbatches of chunk 0, 1, ... whose
    backward is still to come, and those of whose backward weight gradients are left; and the chunk whose forward runs
    beside it, if one does, which counts as if it had ended."""

    late: bool
    chunk: int
    beside: int | None
    alive: tuple[int, ...]
    waiting: tuple[int, ...]

    def covers(self, other: Crowd) -> bool:
        """Return whether it is another with at least as much of every chunk."""
        own, others = self.alive + self.waiting, other.alive + other.waiting
        return self[:3] == other[:3] and self != other and all(map(ge, own, others))


def _flying(setting: Setting) -> tuple[frozenset[Crowd], ...]:
    """Return the crowds of each stage of a run."""
    if setting.order is not None:
        return crowds_of(setting.order)
    layout = setting.layout
    return crowds(setting.schedule, layout.mesh.pp, layout.chunks, setting.microbatches, setting.group)


@cache
def crowds(
    schedule: str, stages: int, chunks: int, microbatches: int, group: int | None = None
) -> tuple[frozenset[Crowd], ...]:
    """Return the crowds of each stage, but for those of which another covers."""
    return crowds_of(builder(schedule, group)(stages, chunks, microbatches))


@lru_cache(maxsize=16)
def crowds_of(schedule: Schedule) -> tuple[frozenset[Crowd], ...]:
    """Return the crowds of each stage, as :func:`crowds`."""
    found, chunks = [], 1 + max(action.chunk for action in schedule[0])
    for row in schedule:
        alive, waiting, seen, beside = [0] * chunks, [0] * chunks, set[Crowd](), None
        for action in row:
            kind, chunk = action.kind, action.chunk
            if kind == "F":
                alive[chunk] += 1
                beside = chunk if action.beside else None
                continue
            seen.add(Crowd(kind == "W", chunk, beside, tuple(alive), tuple(waiting)))
            beside = None
            if kind == "W":
                waiting[chunk] -= 1
            else:
                alive[chunk] -= 1
                waiting[chunk] += kind == "I"
        largest = dict[tuple[bool, int, int | None], list[Crowd]]()
        for crowd in sorted(seen, key=lambda crowd: -sum(crowd.alive + crowd.waiting)):
            others = largest.setdefault(crowd[:3], [])
            if not any(other.covers(crowd) for other in others):
                others.append(crowd)
        found.append(frozenset(chain.from_iterable(largest.values())))
    return tuple(found)


def memory(setting: Setting) -> tuple[Memory, ...]:
    """Return the memory of every stage."""
    return tuple(stage_memory(setting, stage) for stage in range(setting.layout.mesh.pp))


def held_bytes(setting: Setting) -> list[tuple[int, int]]:
    """Return the bytes that each virtual stage holds of a microbatch for a backward to come, and for weight gradients
    to come, on the device."""
    act = ActivationMemory.of(setting)
    held = [(_on_device(act, virtual), waiting) for virtual, waiting in enumerate(act.waiting)]
    kept, waiting = held[-1]
    return [*held[:-1], (kept + act.head.kept, waiting + act.head.waiting)]


def peaks(setting: Setting) -> Iterator[int]:
    """Yield the bytes at the peaks of the stages, one after the other. Of those that are alike it is that of the first:
    before each of its backwards it has run as many forwards of each chunk as the others, or more. Where weight
    gradients come later, the later a stage the more of them wait."""
    return (each.peak for each in unlike(setting))


def unlike(setting: Setting) -> Iterator[Memory]:
    """Yield the memory of the stages of which :func:`peaks` has the peaks."""
    act = ActivationMemory.of(setting)
    return (stage_memory(setting, stage) for stage in (range(act.stages) if act.rank.late else act.unlike))


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


def stage_memory(setting: Setting, stage: int) -> Memory:
    layout, act, shares = setting.layout, ActivationMemory.of(setting), Shares.of(setting).stages[stage]
    whole = state(shares, setting)
    everything = whole.device(setting)
    states = whole.masters + whole.moments
    disk = states if setting.offload_optimizer == "file" else 0
    host = whole.total - everything.total - disk
    if setting.offload_optimizer != "none":
        host += min(setting.offload_buffer, whole.gradients + disk)
    moments = list(_moments(setting, act, stage, shares))
    worst = max(moments, key=lambda moment: moment.total(everything.gradients))
    kept = act.of_stage(stage, act.kept)
    flying = _flying(setting)[stage]
    if act.offload[stage]:
        host += max(sum(n * k for n, k in zip(crowd.alive, kept, strict=True)) for crowd in flying)
    last = stage == layout.last_stage
    terms = {
        "parameters": everything.parameters + cast_bytes(shares, setting, stage) + setting.tower_bytes(stage),
        "gradients": everything.gradients if worst.gradients is None else worst.gradients,
        "masters": everything.masters,
        "moments": everything.moments,
        "activations": worst.activations,
        "logits": worst.logits,
        "working": worst.working,
        "buffers": _buffers(setting, stage),
    }
    assert tuple(terms) == TERMS
    return Memory(
        stage,
        layout.mesh.world // layout.mesh.pp,
        sum(part.elements for part in shares),
        terms,
        host,
        disk,
        sum(kept) + act.head.kept * last,
        max(sum(crowd.alive + crowd.waiting) for crowd in flying),
        worst.what,
    )


def _moments(setting: Setting, act: ActivationMemory, stage: int, shares: Sequence[ParameterShare]) -> list[_Moment]:
    """Return the start of every backward at the head, at the last block of each kind, at the first one and at the
    embedding, and of weight gradients that come later, for all that is in flight."""
    layout, width = setting.layout, setting.widths.gradient
    last = layout.mesh.pp * layout.chunks - 1
    lazy = _lazy(shares, setting)
    split = _Sharing.of(setting, act, stage, shares)
    there = layout.virtual_stages(stage)
    kept = [_on_device(act, virtual) for virtual in there]
    moments = []
    flying = _flying(setting)[stage]
    for weights, chunk, beside, alive, waiting in flying:
        virtual = there[chunk]
        own = 0 if weights else kept[chunk]
        forward = _ForwardBeside() if beside is None else _ForwardBeside.of(act, there[beside], kept[beside])
        # Only the last virtual stage has a head, and it is the last chunk of its stage.
        here = stage == layout.last_stage
        heads = (alive[-1] - (virtual == last and not weights)) * here - bool(forward.logits)
        others = sum(n * size for n, size in zip(alive, kept, strict=True)) - own - forward.kept
        others += sum(n * size for n, size in zip(waiting, act.of_stage(stage, act.waiting), strict=True))
        logits = (heads * act.head.kept if heads else 0) + waiting[-1] * here * act.head.waiting
        if weights:
            late = max((unit.late for unit in act.units(virtual)), default=0)
            moments.append(_Moment("weight gradients of a chunk", others, logits, late + split.block - split.gathered))
            continue
        learned = act.head.learning * width if virtual == last else 0
        if virtual == last:
            working = act.head.peak + split.head - learned * lazy
            gradients, held = learned if lazy else None, others + own + forward.grown(0)
            moments.append(_Moment("backward of the head", held, logits + act.head.kept, working, gradients))
            logits += act.head.waiting
        tied = act.tied if virtual == last else 0
        of_blocks = sum(block.kept for block in act.chunks[virtual])
        for visit in act.visits[virtual]:
            # At the first block all gradients are there; if they only come to be, less is there before.
            partly = learned + visit.learned * width if lazy and visit.which != "first" else None
            if lazy or act.rank.late or visit.which != "first":  # what waits may be more than what was kept
                whole = {"last": split.after_head if virtual == last else split.after_backward, "first": split.first}
                what, working = (
                    f"backward of a chunk's {visit.which} block",
                    visit.block.peak + tied + whole.get(visit.which, split.block) - split.filling * act.rank.late,
                )
                held = others + own - visit.freed + visit.waiting + forward.grown(visit.freed / of_blocks)
                moments.append(_Moment(what, held, logits, working, partly))
                if forward.logits and visit.which == "first":
                    working = forward.head + split.head
                    moments.append(_Moment("forward of the head", held, logits + forward.logits, working, partly))
        if act.chunks[virtual] and not act.chunks[virtual][-1].left:
            # Who runs the chunk holds what its first block was given.
            working = max(block.peak for block in act.chunks[virtual]) + setting.activation + split.block
            moments.append(_Moment("forward of a chunk", others + forward.kept, logits + forward.logits, working))
        if virtual == 0 and act.embedding.left:
            working = act.embedding.peak - act.embedding.learning * width * lazy + tied + split.embedding
            held = others + act.embedding.kept + act.waiting[virtual] + forward.kept
            moments.append(_Moment("backward of the embedding", held, logits + forward.logits, working))
    widened = min(NORM_BLOCK, sum(part.trained for part in shares)) if setting.device == "cpu" else 0
    width = 8 if setting.widths.parameter == 8 else 2
    matrices = max((width * group.at_once for group in matrix_groups(setting, shares)), default=0)
    moments.append(_Moment("optimizer step", working=max(8 * widened, matrices)))
    return moments


@dataclass(frozen=True)
class _ForwardBeside:
    """A forward that runs beside a backward, block by block: what it has kept in the end, the most of a block, what of
    it there is more where it waits, and of the head where it has one. What it keeps grows as that of the backward
    shrinks, or ``pace`` times as fast, where that computes blocks again and has as many turns more."""

    kept: int = 0
    block: int = 0
    more: int = 0
    pace: int = 1
    logits: int = 0
    head: int = 0

    @classmethod
    def of(cls, act: ActivationMemory, virtual: int, kept: int) -> _ForwardBeside:
        blocks, last = act.chunks[virtual], virtual == len(act.chunks) - 1
        most = max((block.kept for block in blocks), default=0)
        paused = max((block.paused for block in blocks), default=0)
        if not paused:  # it has ended before the backward begins
            return cls()
        pace = 2 if act.recompute[stage_of(virtual, act.stages, act.placement)] == "full" else 1
        return cls(kept, most, max(0, paused - most), pace, act.head.kept * last, act.head.peak * last)

    def grown(self, done: float) -> int:
        """Return what it has kept when so much of the backward is done."""
        if self.pace * done >= 1:
            return self.kept
        return min(self.kept, int(self.kept * self.pace * done) + self.block) + self.more


def _on_device(act: ActivationMemory, virtual: int) -> int:
    """Return the bytes that a chunk keeps; where it is offloaded, those on their way."""
    kept, most = act.kept[virtual], max((block.kept for block in act.chunks[virtual]), default=0)
    offloaded = act.offload[stage_of(virtual, act.stages, act.placement)]
    return min(kept, OFFLOAD_AHEAD + most) if offloaded else kept


def _lazy(shares: Sequence[ParameterShare], setting: Setting) -> bool:
    """Return whether gradients only come to be in the backward: nobody shares them, they need no wider type, and there
    is one microbatch (the next one finds those of the one before)."""
    widths = setting.widths
    shared = setting.summing > 1 or any(part.model_replicas > 1 for part in shares if part.trained)
    one = setting.microbatches * setting.layout.chunks == 1
    return not shared and widths.gradient == widths.parameter and one


@dataclass(frozen=True)
class _Sharing:
    """The buffers of split gradients and parameters while they are whole (`gradients.zero`): at the head, in the block
    that follows it, in the block that a backward begins with elsewhere, in the others, in that it ends with, and at the
    embedding. Of those in a block, the bucket that fills, which input gradients alone have none of, and the parameters,
    which weight gradients alone have none of."""

    head: int = 0
    after_head: int = 0
    after_backward: int = 0
    block: int = 0
    first: int = 0
    embedding: int = 0
    filling: int = 0
    gathered: int = 0

    @classmethod
    def of(cls, setting: Setting, act: ActivationMemory, stage: int, shares: Sequence[ParameterShare]) -> _Sharing:
        """Return a bucket that fills, and those whose sums are under way; of parameters a unit and the next. What this
        rank alone holds is not sent, and never elsewhere than in its place."""
        rung, widths = SHARDS.index(setting.shard), setting.widths
        first, last = act.embedding, act.head
        most, data = setting.bucket_bytes // widths.gradient, setting.summing

        def under_way(elements: int) -> int:
            """Return the bytes of a sum: what is sent, and on CPUs the shards that come from each of the others."""
            size = setting.sent(elements)
            return size + (size - size * setting.replicas // setting.alone // data) * (setting.device == "cpu")

        sent = setting.sent(1) * (setting.compress != "none")  # a bucket is let go once it is rounded
        if rung < 2:
            if not sent:
                return cls()
            made = (8 if rung == 0 else 4) * setting.feeds_back(1)  # while one is made of 8 bits, or to them
            buckets = sum(part.trained for part in shares if data * part.model_replicas > 1) // most
            own = sent * (2 if made else 1)  # with what comes of others
            rounded = most * min(1 + REDUCE_SCATTERS, buckets) * own  # the last one is after the peak
            rounded += most * (buckets > 0) * made
            larger = max(0, last.learning * (data > 1) - most) * (own + made)
            return cls(0, rounded + larger, rounded, rounded, rounded, rounded)
        backwards = setting.microbatches * setting.layout.chunks
        alone = [part for part in shares if sharing(part, setting) == 1 and "layer" in part.param.named_axes]
        unit = filling = filled = 0  # filled: with what is summed in its place
        if rung == 2:
            shared = sum(part.trained for part in shares) - sum(part.trained for part in alone)
            filling = min(most, shared)
            filled = filling + min(most, sum(part.trained for part in alone))
            rounds = -(-shared // most) if shared else 0
        else:
            rounds = sum(len(blocks) for blocks in act.of_stage(stage, act.chunks))
            for layer, block in act.layers_of(stage).items():
                here = [part for part in alone if part.param.used_in([layer])]
                own = sum(part.trained // part.tensors for part in here)
                sizes = (setting.bytes_of(part.param, part.elements) // part.tensors for part in here)
                unit = max(unit, block.size - (0 if setting.offload_parameters else sum(sizes)))
                filling, filled = max(filling, block.learning - own), max(filled, block.learning)
        # An end of the model is one message, however large; what is tied goes with the embedding.
        ends = [end.learning if rung == 3 or end.learning > filling else 0 for end in (last, first)]
        from_head, from_embedding = (under_way(end) * (data > 1) for end in ends)
        from_head *= not act.tied
        from_embedding *= stage == 0 and backwards > 1
        message = under_way(filling)

        def beside(*ends: int, blocks: int) -> int:
            """Return the bytes of sums under way: those of ends of the model, and of blocks that leave room for."""
            return sum(ends) + message * max(0, min(blocks, REDUCE_SCATTERS - sum(end > 0 for end in ends)))

        before = rounds * (backwards - 1)
        within = rounds - 1 if rung == 2 else 0
        filled = filled * widths.gradient + filling * sent
        learnt = last.learning * (not act.tied), first.learning  # of what is tied, autograd has the head's
        head, embedding = (max(each, filling * (rung == 2)) * widths.gradient for each in learnt)
        return cls(
            last.size + unit + head * (last.learning > 0) + beside(from_embedding, blocks=before),
            2 * unit + filled + beside(from_head, from_embedding, blocks=before + within),
            2 * unit + filled + beside(from_embedding, blocks=before + within),
            2 * unit + filled + beside(blocks=rounds * backwards - 1),
            unit + first.size * (rung == 3 and stage == 0) + filled + beside(blocks=rounds * backwards - 1),
            first.size + unit + embedding + beside(blocks=rounds * backwards - (rung == 2)),
            filling * widths.gradient,
            2 * unit,
        )


def _buffers(setting: Setting, stage: int) -> int:
    """Return the bytes of the batch, and of messages between stages."""
    size = 24 * setting.tokens * setting.microbatches  # tokens, labels and positions, 8 bytes each
    pp, chunks = setting.layout.mesh.pp, setting.layout.chunks
    if pp > 1:
        alone = chunks == 1 and stage in (0, pp - 1)
        size += (1 if alone else 2) * _MESSAGES * setting.activation
    return size
