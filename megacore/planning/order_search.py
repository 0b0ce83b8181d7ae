"""The search for an order of a pipeline's actions that is fastest within the memory of its devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megacore.parallel.enum_errors import SPLIT_BACKWARD
from megacore.parallel.pipeline.schedules import Cost, Costs, Schedule, Timeline, builder, simulate
from megacore.parallel.pipeline.search import search
from megacore.parallel.virtual_stages import placement_of, virtual_stage
from megacore.planning.peak_memory import memory
from megacore.planning.setting import Setting
from megacore.planning.step_time import Cluster, virtual_costs

ROUNDS = 4
"""The most times that an order is searched for of one schedule, in room that the plan corrects."""


@dataclass(frozen=True)
class OrderedPipeline:
    """A schedule on paper, in an order of its own or in one that was searched for.

    Args:
        setting: The run, with that order.
        schedule: The actions of each stage.
        timeline: Those, simulated.
        peaks: The bytes of each stage at the peak of a step, by the plan.
    """

    setting: Setting
    schedule: Schedule
    timeline: Timeline
    peaks: tuple[int, ...]

    @classmethod
    def of(cls, setting: Setting, costs: Costs) -> OrderedPipeline:
        layout = setting.layout
        build = builder(setting.schedule, setting.group)
        schedule = setting.order or build(layout.mesh.pp, layout.chunks, setting.microbatches)
        timeline = simulate(schedule, costs, layout.placement)
        return cls(setting, schedule, timeline, tuple(each.peak for each in memory(setting)))

    def fits(self, room: float) -> bool:
        """Return whether each stage has so many bytes."""
        return max(self.peaks) <= room

    @property
    def beside(self) -> list[float]:
        """The bytes of each stage at its peak beside the microbatches that it holds: weights, states, buffers, and what
        a backward works with."""
        return [peak - sum(held) for peak, held in zip(self.peaks, self.timeline.peaks, strict=True)]


def pipelines(
    setting: Setting, names: Iterable[str], cluster: Cluster, room: float, measured: Sequence[Cost] | None = None
) -> Iterator[OrderedPipeline]:
    """Yield each schedule of some names on a run's stages and chunks, and behind it the fastest order of its actions
    that is found within so many bytes of each rank, if one is.

    Args:
        measured: The times of each virtual stage, instead of those of the plan.
    """
    for name in names:
        layout = replace(setting.layout, placement=placement_of(name))
        own = replace(setting, schedule=name, layout=layout, order=None)
        if name in SPLIT_BACKWARD and not own.may_split:
            continue
        virtual = [*virtual_costs(own, cluster)]
        if measured is not None:
            virtual = [_as_measured(cost, took) for cost, took in zip(virtual, measured, strict=True)]
        stages, chunks = range(layout.mesh.pp), range(layout.chunks)
        costs = [[virtual[virtual_stage(s, c, len(stages), layout.placement)] for c in chunks] for s in stages]
        named = last = OrderedPipeline.of(own, costs)
        yield named
        for _ in range(ROUNDS):
            left = [room - beside for beside in last.beside]
            late = name in SPLIT_BACKWARD
            order = search(costs, own.microbatches, left, late, layout.placement, [named.schedule])
            if order is None:
                break
            last = OrderedPipeline.of(replace(own, order=order), costs)
            if last.fits(room):
                yield last
                break


def _as_measured(planned: Cost, took: Cost) -> Cost:
    """Return what a virtual stage takes as it was measured; a backward that was whole has the parts of the plan."""
    inputs, weights = took.inputs, took.weights
    if not weights:
        share = planned.weights / (planned.inputs + planned.weights)
        inputs, weights = inputs * (1 - share), inputs * share
    return replace(planned, forward=took.forward, inputs=inputs, weights=weights)
