"""The search for what fits and is estimated fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from megacore.plan.memory import Memory, by_stage
from megacore.plan.setting import SHARDS, Setting
from megacore.plan.state import Shares, state
from megacore.plan.step_time import Cluster, Estimate, estimate
from models.stages import layout_of
from parallel.choices import Recompute, ZeroShard
from parallel.weights.layout import Layout, MeshShape, split_problems

MARGIN = 0.1
"""The share of a device's memory that is left to its driver, the libraries' workspaces, fragments, and what this
arithmetic misses."""
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
    def overrides(self) -> Mapping[str, object]:
        """{key of a recipe: value} that make this of the recipe."""
        s, mesh = self.setting, self.setting.layout.mesh
        return {
            "mesh.tp": mesh.tp,
            "mesh.pp": mesh.pp,
            "mesh.dp": mesh.dp,
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
    candidates: list[Candidate] = []
    for layout in _layouts(base, world, cluster):
        shares = Shares.of(replace(base, layout=layout))
        for setting in _batches(base, layout):
            before, tried = len(candidates), _RECOMPUTE
            for rung in _rungs(base, layout):
                fits = _least_recomputed(replace(setting, shard=rung), shares, cluster, room, tried)
                candidates += fits
                if fits and rung != "none":  # what splits more only sends more: it must recompute less
                    tried = tried[: tried.index(fits[0].setting.recompute)]
            if len(candidates) == before:  # larger microbatches take more
                break
    candidates.sort(key=lambda each: each.time.total)
    again = [
        replace(each, time=estimate(each.setting, Shares.of(each.setting), cluster))
        for each in _distinct(candidates, 3 * best)
    ]
    return tuple(sorted(again, key=lambda each: each.time.total)[:best])


def _distinct(candidates: list[Candidate], count: int) -> Iterator[Candidate]:
    """Yield the fastest of each mesh: a list of its variants would say little."""
    seen = set[tuple[MeshShape, int]]()
    for each in candidates:
        key = (each.setting.layout.mesh, each.setting.layout.chunks)
        if key not in seen and len(seen) < count:
            seen.add(key)
            yield each


def _layouts(base: Setting, world: int, cluster: Cluster) -> Iterator[Layout]:
    layers, sizes = base.layout.schema.sizes["layer"], base.layout.schema.sizes
    for tp in _divisors(math.gcd(world, cluster.device.per_node)):
        for pp in _divisors(world // tp):
            mesh = MeshShape(pp=pp, dp=world // tp // pp, tp=tp)
            if pp > layers or split_problems(sizes, mesh):
                continue
            for chunks in _CHUNKS if pp > 1 else (1,):
                if pp * chunks <= layers and (chunks == 1 or layers % (pp * chunks) == 0):
                    yield layout_of(base.model, mesh, chunks, tuning=base.tuning)


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
