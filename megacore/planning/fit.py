"""The search for what fits and is estimated fastest."""

from __future__ import annotations

import gc
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from megacore.data.batches import filled_up
from megacore.models.config import ModelConfig
from megacore.models.stages import layout_of, source_apart
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.enum_errors import ContextBalance, ContextExchange, PipelineSchedule, Recompute, ZeroShard
from megacore.parallel.virtual_stages import of_stage
from megacore.parallel.weights.layout import Layout, MeshShape, heads_problem, layers_problems, split_problems
from megacore.parallel.weights.schema import split_of
from megacore.planning.activations import ActivationMemory
from megacore.planning.peak_memory import Memory, memory, stage_memory, unlike
from megacore.planning.setting import SHARDS, WHOLE, Setting
from megacore.planning.state_bytes import Shares, state
from megacore.planning.step_time import Cluster, Estimate, estimate, share_beside

BEHIND = 2.0
"""A candidate that takes so many times as long as the fastest is not looked at any closer."""
CHUNK = 4096
"""Tokens whose feed-forward activations are there at a time, where nothing fits that has those of a microbatch."""
_MICRO = (1, 2, 4, 8, 16, 32)
_CHUNKS = 10
"""The most chunks of a stage."""
_MOST, _LEAST = 64, 64
"""Ranks that share a sequence at the most, and a rank's tokens of it, of which it has a multiple."""
_HOPS: tuple[ContextExchange, ...] = ("ring", "gather")
_BALANCES: tuple[ContextBalance, ...] = ("auto", "documents", "rows")


class Kept(NamedTuple):
    """What a stage computes again of its blocks, and whether what it keeps goes to the host."""

    recompute: Recompute
    offload: bool = False


_KEPT = Kept("none"), Kept("selective"), Kept("full")
"""The choices of a stage, of which each keeps less than the one before and takes longer."""
_OFFLOADED = *_KEPT[:2], *(Kept(each.recompute, True) for each in _KEPT)
"""Those where activations may go to the host."""


@dataclass(frozen=True)
class Candidate:
    """A setting that fits, with its memory, once it is among the fastest, and its time."""

    setting: Setting
    memory: tuple[Memory, ...]
    time: Estimate

    @property
    def fullest(self) -> Memory:
        return max(self.memory, key=lambda each: each.peak)

    @property
    def _etp(self) -> int:
        """The ranks over which the features of an expert are split."""
        layout = self.setting.layout
        return layout.mesh.size(layout.split["expert_mlp"])

    @property
    def gain(self) -> float:
        """The most seconds that a rank could save if it had fewer tokens of each sequence: what it computes again."""
        return self.time.recompute if self.setting.micro_size == 1 else 0.0

    @property
    def _context(self) -> Mapping[str, object]:
        context = self.setting.context
        return {
            "context.exchange": "heads" if context.parts == 1 else context.exchange,
            "context.balance": context.balance,
            "context.heads": 1 if context.parts == 1 else context.heads,
        }

    @property
    def overrides(self) -> Mapping[str, object]:
        """{key of a recipe: value} that make this of the recipe."""
        s, mesh = self.setting, self.setting.layout.mesh
        return {
            "mesh.tp": mesh.tp,
            "mesh.pp": mesh.pp,
            "mesh.dp": mesh.dp,
            "mesh.cp": mesh.cp,
            **(self._context if mesh.cp > 1 else {}),
            **({"mesh.ep": mesh.ep, "mesh.etp": self._etp} if s.has_experts else {}),
            "pipeline.schedule": s.schedule,
            "pipeline.chunks": s.layout.chunks,
            "batch.micro_size": s.micro_size,
            "pipeline.layers_per_stage": "null",
            "zero.shard": s.shard,
            "zero.replicas": s.replicas,
            "memory.recompute": spelled(s.recompute),
            **({"memory.mlp_chunk": s.mlp_chunk} if s.mlp_chunk else {}),
        }


def fit(base: Setting, world: int, cluster: Cluster, best: int = 5) -> tuple[Candidate, ...]:
    """Return the best settings that fit ``world`` devices, fastest first; if none does, those that do in chunks of
    tokens. All keep the global batch of ``base``, its model, widths, sequence length and offloads; where it offloads
    activations, only stages that must do."""
    with _uncollected():
        candidates = sorted(_candidates(base, world, cluster), key=lambda each: each.time.total)
        again = list[Candidate]()
        finalists = sorted(_distinct(candidates, 3 * best), key=partial(_if_overlapped, cluster))
        finalists[best:] = sorted(finalists[best:], key=lambda each: each.time.total)
        for at, each in enumerate(finalists):
            if at >= best and again[best - 1].time.total <= each.time.total:
                break  # a simulated pipeline is no faster than its formula
            settings = (each.setting, *with_other_schedules(each.setting, cluster, overlapped=at < best))
            again.append(
                min((Candidate(x, memory(x), estimate(x, cluster)) for x in settings), key=lambda one: one.time.total)
            )
            again.sort(key=lambda each: each.time.total)
    if not again and base.mlp_chunk is None and not cluster.narrow:  # each chunk would have a scale of its own
        return fit(replace(base, mlp_chunk=CHUNK), world, cluster, best)
    return tuple(again[:best])


def _if_overlapped(cluster: Cluster, each: Candidate) -> float:
    """Return the seconds of a candidate of whose messages of experts all are hidden that another action may hide."""
    return each.time.total - share_beside(replace(each.setting, schedule="overlapped"), cluster) * each.time.experts


def with_other_schedules(setting: Setting, cluster: Cluster, overlapped: bool = True) -> Iterator[Setting]:
    """Yield what fits of the settings whose weight gradients come later, where it has a pipeline, and of that whose
    messages of experts go under another microbatch, where experts are spread, if it is asked for."""
    layout, choices = setting.layout, _choices(setting)
    in_pairs = [each for each in choices if each.recompute != "full" or not setting.drops]
    overlapped = overlapped and setting.may_overlap
    ways: list[tuple[PipelineSchedule, Layout, Sequence[Kept]]] = []
    if layout.mesh.pp > 1 and setting.may_split:
        as_much = choices[: 1 + max(map(choices.index, _kept(setting)))]
        ways.append(("zb-h1" if layout.chunks == 1 else "zb-interleaved", layout, as_much))
        if layout.chunks <= 2 and _divides(setting.model, layout.mesh.pp, 2):
            # Two chunks in a V hold what one of 1F1B does, so they may fit where interleaved ones did not.
            in_two = layout_of(setting.model, layout.mesh, 2, tuning=setting.tuning, split=layout.split, placement="v")
            ways.append(("zb-v", in_two, as_much))
            if overlapped and (both := [each for each in as_much if each in in_pairs]):
                ways.append(("dualpipe-v", in_two, both))
    if overlapped:
        ways.append(("overlapped", layout, in_pairs))
    for schedule, placed, (*others, least) in ways:
        made = _keeping(replace(setting, schedule=schedule, layout=placed), [least] * layout.mesh.pp)
        if all(_fits(cluster, each) for each in unlike(made)):
            yield _keeping_most(made, others, cluster)


def _candidates(base: Setting, world: int, cluster: Cluster) -> Iterator[Candidate]:
    """Yield the settings that fit and that others do not leave far behind."""
    fastest = _Fastest()
    for shorter in _layouts(base, world, cluster):
        for alike in shorter:
            found = (list(_of_layout(base, layout, cluster, fastest)) for layout in alike)
            own = list(fastest.while_it_pays(found))
            yield from own
            if own and not fastest.may_gain(own):
                break


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave cycles of references alone: Python would look for them among all models that are measured, and find few."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def _distinct(candidates: Sequence[Candidate], count: int) -> Iterator[Candidate]:
    """Yield the fastest of each mesh: a list of its variants would say little."""
    seen = set[tuple[MeshShape, int, int]]()
    for each in candidates:
        key = (each.setting.layout.mesh, each._etp, each.setting.layout.chunks)
        if key not in seen and len(seen) < count:
            seen.add(key)
            yield each


@dataclass
class _Fastest:
    """The seconds of the fastest candidate so far."""

    seconds: float = math.inf

    def while_it_pays(self, ways: Iterable[list[Candidate]]) -> Iterator[Candidate]:
        """Yield the candidates of ways of which each next one takes more of something, until it is no faster than the
        one before, or far behind."""
        least = math.inf
        for found in ways:
            yield from found
            own = min((each.time.total for each in found), default=math.inf)
            self.seconds = min(self.seconds, own)
            if own >= least or own > BEHIND * self.seconds:
                return
            least = own

    def may_gain(self, found: Iterable[Candidate]) -> bool:
        """Return whether more ranks for each sequence may make one of these the fastest."""
        return any(each.gain and each.time.total - each.gain < self.seconds for each in found)


def _layouts(base: Setting, world: int, cluster: Cluster) -> Iterator[Iterator[Iterator[Layout]]]:
    """Yield, of more and more cp, layouts that differ in ep alone, the most ranks first: with fewer, a rank holds more
    experts."""
    for tp in _divisors(math.gcd(world, cluster.device.per_node)):
        for pp in _divisors(world // tp):
            for chunks in _chunks(base.model, pp):
                yield _shorter(base, chunks, MeshShape(pp=pp, dp=world // tp // pp, tp=tp))


def _chunks(model: ModelConfig, pp: int) -> Iterator[int]:
    """Yield numbers of chunks, of those with equally many layers in the longest one the least."""
    layers = model.sizes["layer"]
    longest = layers + 1
    for chunks in range(1, _CHUNKS + 1 if pp > 1 else 2):
        each = -(-layers // (pp * chunks))
        if each < longest and _divides(model, pp, chunks):
            yield chunks
            longest = each


def _divides(model: ModelConfig, pp: int, chunks: int) -> bool:
    """Return whether the layers of a model can be dealt to so many virtual stages."""
    if [*layers_problems(model.sizes["layer"], pp, chunks, None)]:
        return False
    return source_apart(model, pp * chunks, bare_ends=chunks > 1) is None


def _shorter(base: Setting, chunks: int, mesh: MeshShape) -> Iterator[Iterator[Layout]]:
    """Yield the layouts of a mesh whose dp is dp x cp."""
    for cp in _divisors(mesh.dp):
        if cp == 1 or (cp <= _MOST and base.sequence_length % (mesh.tp * cp * _LEAST) == 0):
            yield _spread(base, chunks, replace(mesh, dp=mesh.dp // cp, cp=cp))


def _spread(base: Setting, chunks: int, mesh: MeshShape) -> Iterator[Layout]:
    """Yield the layouts of a mesh whose dp is dp x ep: of whole experts where they divide over ep x tp, else of their
    features over tp."""
    sizes = base.layout.schema.sizes
    for ep in reversed(_divisors(math.gcd(mesh.dp, sizes["experts"]))) if base.has_experts else (1,):
        spread = replace(mesh, dp=mesh.dp // ep, ep=ep)
        ways = (split for split in (split_of(1), split_of(mesh.tp)) if not split_problems(sizes, spread, split))
        split = next(ways, None)
        if split is not None and not base.tuning.block_problems(base.model.schema, spread, split):
            yield layout_of(base.model, spread, chunks, tuning=base.tuning, split=split)


def _of_layout(base: Setting, layout: Layout, cluster: Cluster, fastest: _Fastest) -> Iterator[Candidate]:
    """Yield what fits of a layout: microbatches as large as it pays, on every rung the least recomputation."""
    least = math.inf

    def rungs(setting: Setting) -> list[Candidate]:
        nonlocal least
        candidates, choices = list[Candidate](), _choices(base)
        for rung in _rungs(base, layout):
            fits = _least_recomputed(replace(setting, shard=rung), cluster, choices, least, fastest.seconds)
            candidates += fits
            least = min([least, *(each.time.total for each in fits)])
            if fits and rung != "none":  # what splits more only sends more: it must recompute less
                choices = choices[: max(map(choices.index, _kept(fits[0].setting)))]
        return candidates

    if layout.mesh.cp == 1:
        yield from fastest.while_it_pays(map(rungs, _batches(base, layout)))
        return
    for setting in islice(_batches(base, layout), 1):  # more sequences at once would be more tokens again
        for context in _contexts(base, layout, cluster):
            yield from rungs(replace(setting, context=context))


def _contexts(base: Setting, layout: Layout, cluster: Cluster) -> Iterator[ContextParallel]:
    """Yield the ways in which cp may share out a sequence: by hops, by heads, and by heads within a node."""
    cp, tp, drops = layout.mesh.cp, layout.mesh.tp, base.model.drops_attention
    inside = [n for n in (math.gcd(cp, cluster.device.per_node // tp), cp) if n > 1]
    divide = {n for n in inside if heads_problem(base.layout.schema.sizes, tp, n) is None}
    for balance in _BALANCES[:1] if base.documents is None else _BALANCES:
        if cp in divide:
            yield ContextParallel(cp, "heads", balance, cp)
        if not drops:
            yield from (ContextParallel(cp, way, balance, n) for way in _HOPS for n in {1, *divide} - {cp})


def _rungs(base: Setting, layout: Layout) -> tuple[ZeroShard, ...]:
    if base.offload_parameters:
        return SHARDS[-1:]
    return SHARDS if layout.mesh.data * layout.mesh.cp > 1 else SHARDS[:1]


def _batches(base: Setting, layout: Layout) -> Iterator[Setting]:
    """Yield the global batch in micro-batches of several sizes, where each rank has a sequence of it."""
    data, schedule = layout.mesh.data, "interleaved" if layout.chunks > 1 else "1f1b"
    for micro in _MICRO:
        if micro * data <= base.sequences and micro * base.sequence_length % layout.mesh.tp == 0:
            documents = None if base.documents is None else base.documents * micro
            computed = filled_up(base.sequences, micro, data)
            yield replace(
                base,
                layout=layout,
                micro_size=micro,
                microbatches=computed // (micro * data),
                schedule=schedule,
                context=WHOLE,
                documents=documents,
                blank=computed - base.sequences,
            )


def _least_recomputed(
    setting: Setting, cluster: Cluster, choices: Sequence[Kept], least: float, fastest: float
) -> list[Candidate]:
    """Return the setting that fits with the first of the choices, if any does and may take less than ``least`` seconds,
    those of another of its mesh; of those that offload, the one that takes least. Where it may become the ``fastest``
    of all, each stage has a choice of its own."""
    stages, shares = setting.layout.mesh.pp, Shares.of(setting)
    if not choices or any(state(own, setting).device(setting).total > cluster.room for own in shares.unlike):
        return []
    fitting = list[Candidate]()
    for at, choice in enumerate(choices):
        if at == 1 and least < math.inf:
            kept = estimate(_keeping(setting, [choices[0]] * stages), cluster, simulated=False)
            # Recomputation may hide sums of gradients and leave less to offload, and rungs differ in the optimizer too.
            if kept.total - kept.data - kept.offload - kept.optimizer >= least:
                return []
        found = _keeping(setting, [choice] * stages)
        if not all(_fits(cluster, each) for each in unlike(found)):
            continue
        time = estimate(found, cluster, simulated=False)
        fitting.append(Candidate(found, (), time))
        again = time.recompute * time.total / (time.total - time.bubble)  # of which bubbles have a part
        if at and stages > 1 and time.total - again < fastest:
            most = _keeping_most(found, choices[:at], cluster)
            fitting.append(Candidate(most, (), estimate(most, cluster, simulated=False)))
        if not choice.offload:
            break  # the next ones compute more again, and save nothing on the way to the host
    return sorted(fitting, key=lambda each: each.time.total)[:1]


def _keeping_most(setting: Setting, choices: Sequence[Kept], cluster: Cluster) -> Setting:
    """Return a setting that fits, each of whose stages has the first of the choices with which it still does."""
    act, chosen, alike = ActivationMemory.of(setting), [*_kept(setting)], dict[int, list[int]]()
    for stage, like in enumerate(act.alike):
        alike.setdefault(stage if act.rank.late else like, []).append(stage)
    for choice in reversed(choices):
        tried = _keeping(setting, [choice] * act.stages)
        for stages in alike.values():  # of those that are alike a later one holds less
            del stages[: bisect_left(stages, True, key=lambda stage: _fits(cluster, stage_memory(tried, stage)))]
            for stage in stages:
                chosen[stage] = choice
    return _keeping(setting, chosen)


def _fits(cluster: Cluster, stage: Memory) -> bool:
    return stage.peak <= cluster.room and stage.host <= cluster.host_room


def _choices(setting: Setting) -> Sequence[Kept]:
    if setting.compress_activations:  # with which no stage recomputes all
        return _KEPT[:2]
    return _OFFLOADED if setting.offload_activations else _KEPT


def _kept(setting: Setting) -> Iterator[Kept]:
    """Yield what each stage keeps."""
    for stage in range(setting.layout.mesh.pp):
        yield Kept(of_stage(setting.recompute, stage), of_stage(setting.offload_activations, stage))


def _keeping(setting: Setting, kept: Sequence[Kept]) -> Setting:
    """Return the setting whose stages keep this."""
    recompute, offload = (values if len({*values}) > 1 else values[0] for values in zip(*kept, strict=True))
    return replace(setting, recompute=recompute, offload_activations=offload)


def spelled(value: object) -> str:
    """Return the text of a value in an override; of a tuple, such as one of each stage, that of a list."""
    if isinstance(value, tuple):
        return f"[{','.join(map(spelled, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
