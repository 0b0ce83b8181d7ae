"""The search for what fits and is estimated fastest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from megacore.plan.memory import Memory, by_stage
from megacore.plan.setting import SHARDS, Setting
from megacore.plan.state import Shares, state
from megacore.plan.step_time import Cluster, Estimate, estimate
from models.stages import layout_of
from parallel.choices import Recompute, ZeroShard
from parallel.weights.layout import Layout, MeshShape, split_problems
from parallel.weights.schema import split_of

MARGIN = 0.1
"""The share of a device's memory that is left to its driver, the libraries' workspaces, fragments, and what this
arithmetic misses."""
BEHIND = 2.0
"""A candidate that takes so many times as long as the fastest is not looked at any closer."""
_MICRO = (1, 2, 4, 8, 16, 32)
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_CHUNKS = (1, 2, 4, 5, 8, 10)


@dataclass(frozen=True)
class Candidate:
    """A setting that fits, with its memory and its time."""

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
    def overrides(self) -> Mapping[str, object]:
        """{key of a recipe: value} that make this of the recipe."""
        s, mesh = self.setting, self.setting.layout.mesh
        return {
            "mesh.tp": mesh.tp,
            "mesh.pp": mesh.pp,
            "mesh.dp": mesh.dp,
            **({"mesh.ep": mesh.ep, "mesh.etp": self._etp} if s.has_experts else {}),
            "pipeline.schedule": s.schedule,
            "pipeline.chunks": s.layout.chunks,
            "batch.micro_size": s.micro_size,
            "pipeline.layers_per_stage": "null",
            "zero.shard": s.shard,
            "zero.replicas": s.replicas,
            "memory.recompute": s.recompute,
        }


def fit(base: Setting, world: int, cluster: Cluster, best: int = 5) -> tuple[Candidate, ...]:
    """Return the settings that fit ``world`` devices, fastest first.

    Args:
        base: Model, widths, sequence length, offloads; its batch is the global one that all of them keep.
        world: Devices in all.
        cluster: The devices.
        best: The number of settings to return.
    """
    room = cluster.device.memory * (1 - MARGIN)
    candidates, fastest = list[Candidate](), _Fastest()
    for alike in _layouts(base, world, cluster):
        found = (list(_of_layout(base, layout, cluster, room, fastest)) for layout in alike)
        candidates += fastest.while_it_pays(found)
    candidates.sort(key=lambda each: each.time.total)
    again = [
        replace(each, time=estimate(each.setting, Shares.of(each.setting), cluster))
        for each in _distinct(candidates, 3 * best)
    ]
    return tuple(sorted(again, key=lambda each: each.time.total)[:best])


def _distinct(candidates: list[Candidate], count: int) -> Iterator[Candidate]:
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


def _layouts(base: Setting, world: int, cluster: Cluster) -> Iterator[Iterator[Layout]]:
    """Yield layouts that differ in ep alone, the most ranks first: with fewer, a rank holds more experts."""
    layers = base.layout.schema.sizes["layer"]
    for tp in _divisors(math.gcd(world, cluster.device.per_node)):
        for pp in _divisors(world // tp):
            for chunks in _CHUNKS if pp > 1 else (1,):
                if pp * chunks <= layers and (chunks == 1 or layers % (pp * chunks) == 0):
                    yield _spread(base, chunks, MeshShape(pp=pp, dp=world // tp // pp, tp=tp))


def _spread(base: Setting, chunks: int, mesh: MeshShape) -> Iterator[Layout]:
    """Yield the layouts of a mesh whose dp is dp x ep: of whole experts where they divide over ep x tp, else of their
    features over tp."""
    sizes = base.layout.schema.sizes
    for ep in reversed(_divisors(math.gcd(mesh.dp, sizes["experts"]))) if base.has_experts else (1,):
        spread = replace(mesh, dp=mesh.dp // ep, ep=ep)
        ways = (split for split in (split_of(1), split_of(mesh.tp)) if not split_problems(sizes, spread, split))
        if (split := next(ways, None)) is not None:
            yield layout_of(base.model, spread, chunks, tuning=base.tuning, split=split)


def _of_layout(base: Setting, layout: Layout, cluster: Cluster, room: float, fastest: _Fastest) -> Iterator[Candidate]:
    """Yield what fits of a layout: microbatches as large as it pays, on every rung the least recomputation."""
    shares = Shares.of(replace(base, layout=layout))

    def rungs(setting: Setting) -> list[Candidate]:
        candidates, tried = list[Candidate](), _RECOMPUTE
        for rung in _rungs(base, layout):
            fits = _least_recomputed(replace(setting, shard=rung), shares, cluster, room, tried)
            candidates += fits
            if fits and rung != "none":  # what splits more only sends more: it must recompute less
                tried = tried[: tried.index(fits[0].setting.recompute)]
        return candidates

    yield from fastest.while_it_pays(map(rungs, _batches(base, layout)))


def _rungs(base: Setting, layout: Layout) -> tuple[ZeroShard, ...]:
    if base.offload_parameters:
        return SHARDS[-1:]
    return SHARDS if layout.mesh.data > 1 else SHARDS[:1]


def _batches(base: Setting, layout: Layout) -> Iterator[Setting]:
    """Yield the global batch in micro-batches of several sizes."""
    sequences = base.micro_size * base.microbatches * base.layout.mesh.data
    own, rest = divmod(sequences, layout.mesh.data)
    schedule = "interleaved" if layout.chunks > 1 else "1f1b"
    for micro in _MICRO:
        if not rest and own and own % micro == 0 and micro * base.sequence_length % layout.mesh.tp == 0:
            yield replace(base, layout=layout, micro_size=micro, microbatches=own // micro, schedule=schedule)


def _least_recomputed(
    setting: Setting, shares: Shares, cluster: Cluster, room: float, choices: Sequence[Recompute]
) -> list[Candidate]:
    """Return the setting with the least of the recomputations that fits, if any does."""
    if not choices or max(state(own, setting).device(setting).total for own in shares.stages) > room:
        return []
    for recompute in choices:
        tried = replace(setting, recompute=recompute)
        needed = tuple(takewhile(lambda each: each.peak <= room, by_stage(tried, shares)))
        if len(needed) == len(shares.stages):
            return [Candidate(tried, needed, estimate(tried, shares, cluster, simulated=False))]
    return []


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
