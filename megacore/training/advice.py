"""Changes of a recipe that would make its steps shorter, with what they promise by the times of a traced step.

They are such as fit: no rule of recipes is against them, and by the plan there is memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megacore.config import Config
from megacore.parallel.pipeline.schedules import SCHEDULES, Cost, Schedule, simulate
from megacore.parallel.virtual_stages import placement_of
from megacore.training.diagnosis import EVALUATE, PRODUCTS, RECOMPUTATION, SAVE, WAITING, StepSplit, axes_of
from megacore.training.planned_parts import StepPlan
from megacore.training.schedule_gaps import ComparedSchedule
from megacore.training.traces import TracedStep

MOST = 3
"""Changes that are told, the best ones."""
UNEVEN = 1.15
"""The rows of the fullest rank's experts over the mean, from which on they are to be balanced."""
LEAST = 0.02
"""The share of a step that a change promises at least."""


class Advice(NamedTuple):
    """Overrides of a recipe, and the share of a step that they promise to save."""

    overrides: str
    gain: float


def advise(
    found: StepSplit, step: TracedStep, config: Config, plan: StepPlan | None, loads: Sequence[float] = ()
) -> list[Advice]:
    """Return up to three changes, the best first, of which each is one by itself.

    Args:
        plan: The plan of the run; without one no layout is looked for, and nobody knows what fits.
        loads: Of each rank along ep, the rows that its experts are sent, over the mean.

    Raises:
        ScheduleError: the actions of the trace are no schedule.
    """
    gains = {each.name: each.gain / found.seconds for each in found.parts}

    def fits(overrides: str) -> bool:
        return plan is None or plan.fits(overrides)

    made = [*_of_pipelines(step, config, found, plan)]
    if not config.checkpoint.background:
        made.append(Advice("checkpoint.background=true", gains.get(SAVE, 0.0)))
    if every := config.evaluate.every:
        made.append(Advice(f"evaluate.every={4 * every}", 0.75 * gains.get(EVALUATE, 0.0)))
    experts = config.experts
    if max(loads, default=1.0) > UNEVEN and not (
        experts.sequence_balance or experts.batch_balance or experts.bias_rate
    ):
        keys = "experts.bias_rate=0.001", "experts.sequence_balance=0.01"
        made.append(Advice(next((x for x in keys if fits(x)), keys[-1]), gains.get(WAITING, 0.0)))
    if plan is not None and any(axes_of(each.name) for each in found.findings):
        made.append(Advice(*plan.as_measured(found).best()))
    made = [each for each in made if each.gain >= LEAST and fits(each.overrides)]
    return sorted(made, key=lambda each: -each.gain)[:MOST]


def _of_pipelines(step: TracedStep, config: Config, found: StepSplit, plan: StepPlan | None) -> Iterator[Advice]:
    """Yield what no recomputation, another schedule, smaller microbatches and other stages promise."""
    compared = ComparedSchedule.last(step)
    name, chunks, m = config.pipeline.schedule, config.pipeline.chunks, config.batch.micro_size
    stages, microbatches = len(compared.ranks), 1 + max(action.microbatch for action in compared.schedule[0])

    def gain(schedule: Schedule, costs: Sequence[Sequence[Cost]]) -> float:
        return (compared.planned.total - simulate(schedule, costs, placement_of(name)).total) / found.seconds

    if config.memory.recompute != "none":
        work = [sum(x.seconds for x in found.parts if x.name == name) for name in (RECOMPUTATION, PRODUCTS)]
        again = work[0] / (sum(work) or 1.0)
        without = [[replace(x, inputs=x.inputs - again * _total(x)) for x in row] for row in compared.costs]
        yield Advice("memory.recompute=none", gain(compared.schedule, without))
    if stages == 1:
        return
    whole = config.lora is None and not config.train.compile and config.memory.recompute == "none"
    if name in ("1f1b", "gpipe") and chunks == 1 and whole:  # a weight gradient takes as long as an input gradient
        halves = [[replace(x, inputs=x.inputs / 2, weights=x.inputs / 2) for x in row] for row in compared.costs]
        yield Advice("pipeline.schedule=zb-h1", gain(SCHEDULES["zb-h1"](stages, 1, microbatches), halves))
    if name == "1f1b" and chunks == 1:
        two = [[_scaled(row[0], 0.5)] * 2 for row in compared.costs]
        schedule = SCHEDULES["interleaved"](stages, 2, microbatches)
        yield Advice("pipeline.schedule=interleaved pipeline.chunks=2", gain(schedule, two))
    if m % 2 == 0:
        smaller = [[_scaled(cost, 0.5) for cost in row] for row in compared.costs]
        yield Advice(f"batch.micro_size={m // 2}", gain(SCHEDULES[name](stages, chunks, 2 * microbatches), smaller))
    layers = [len(plan.setting.layout.chunk_layers(stage, 0)) for stage in range(stages)] if plan else []
    if chunks == 1 and layers and all(layers):
        moved = _moved(layers, [row[0] for row in compared.costs])
        costs = [[_scaled(row[0], new / old)] for row, new, old in zip(compared.costs, moved, layers, strict=True)]
        yield Advice(f"pipeline.layers_per_stage={','.join(map(str, moved))}", gain(compared.schedule, costs))


def _moved(layers: Sequence[int], costs: Sequence[Cost]) -> list[int]:
    """Return the layers of each stage so that the slowest is as fast as can be, if each takes what it takes now."""
    each = [_total(cost) / count for cost, count in zip(costs, layers, strict=True)]
    found = [*layers]
    while True:
        times = [time * count for time, count in zip(each, found, strict=True)]
        slow = max(range(len(times)), key=lambda stage: times[stage])
        fast = min(range(len(times)), key=lambda stage: times[stage] + each[stage])
        if found[slow] == 1 or times[fast] + each[fast] >= times[slow]:
            return found
        found[slow] -= 1
        found[fast] += 1


def _scaled(cost: Cost, factor: float) -> Cost:
    return replace(cost, forward=cost.forward * factor, inputs=cost.inputs * factor, weights=cost.weights * factor)


def _total(cost: Cost) -> float:
    return cost.forward + cost.inputs + cost.weights
