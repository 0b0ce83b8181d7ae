"""Changes of a recipe that would make its steps shorter, with what they promise by the times of a traced step.

They are such as fit: no rule of recipes is against them, and by the plan there is memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megacore.config import Config
from megacore.parallel.pipeline.schedules import SCHEDULES, Cost, Schedule, builder, simulate
from megacore.parallel.virtual_stages import of_stage, placement_of
from megacore.training.diagnosis import EVALUATE, PRODUCTS, RECOMPUTATION, SAVE, WAITING, StepSplit, axes_of
from megacore.training.planned_parts import StepPlan
from megacore.training.schedule_gaps import ComparedSchedule, pipelines
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
    """Return up to three changes, the best first, of which each is one by itself. ``plan``: that of the run, without
    which no layout is looked for, and nobody knows what fits; ``loads``: of each rank along ep, the rows that its
    experts are sent, over the mean. Raises ScheduleError: the actions of the trace are no schedule."""
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
    """Yield what no recomputation, another schedule, smaller microbatches and other stages promise: a step ends with
    the slowest of all pipelines."""
    all_of_them = [ComparedSchedule.of(step, ranks) for ranks in pipelines(step.mesh)]
    own, now = all_of_them[0].schedule, max(each.planned.total for each in all_of_them)
    name, chunks, m = config.pipeline.schedule, config.pipeline.chunks, config.batch.micro_size
    stages, microbatches = len(own), 1 + max(action.microbatch for action in own[0])

    def gain(schedule: Schedule, change: Callable[[int, Cost], Sequence[Cost]]) -> float:
        """Return what is gained where each chunk of a stage becomes one or several others."""
        then = max(
            simulate(
                schedule, [_changed(stage, row, change) for stage, row in enumerate(each.costs)], placement_of(name)
            ).total
            for each in all_of_them
        )
        return (now - then) / found.seconds

    if config.memory.recompute != "none":
        work = [sum(x.seconds for x in found.parts if x.name == name) for name in (RECOMPUTATION, PRODUCTS)]
        again = work[0] / (sum(work) or 1.0)

        def kept(stage: int, x: Cost) -> Sequence[Cost]:
            less = again * _total(x) * (of_stage(config.memory.recompute, stage) != "none")
            return [replace(x, inputs=x.inputs - less)]

        yield Advice("memory.recompute=none", gain(own, kept))
    if stages == 1:
        return
    whole = config.lora is None and not config.train.compile and config.memory.recompute == "none"
    if name in ("1f1b", "gpipe") and chunks == 1 and whole:  # a weight gradient takes as long as an input gradient
        split = SCHEDULES["zb-h1"](stages, 1, microbatches)
        halves = gain(split, lambda _, x: [replace(x, inputs=x.inputs / 2, weights=x.inputs / 2)])
        yield Advice("pipeline.schedule=zb-h1", halves)
    if name == "1f1b" and chunks == 1:
        two = gain(SCHEDULES["interleaved"](stages, 2, microbatches), lambda _, x: [_scaled(x, 0.5)] * 2)
        yield Advice("pipeline.schedule=interleaved pipeline.chunks=2", two)
    if m % 2 == 0:
        build = builder(name, config.pipeline.group)
        smaller = gain(build(stages, chunks, 2 * microbatches), lambda _, x: [_scaled(x, 0.5)])
        yield Advice(f"batch.micro_size={m // 2}", smaller)
    layers = [len(plan.setting.layout.chunk_layers(stage, 0)) for stage in range(stages)] if plan else []
    if chunks == 1 and layers and all(layers):
        slowest = [max((each.costs[stage][0] for each in all_of_them), key=_total) for stage in range(stages)]
        moved = _moved(layers, slowest)
        other = gain(own, lambda stage, x: [_scaled(x, moved[stage] / layers[stage])])
        yield Advice(f"pipeline.layers_per_stage={','.join(map(str, moved))}", other)


def _changed(stage: int, row: Sequence[Cost], change: Callable[[int, Cost], Sequence[Cost]]) -> list[Cost]:
    return [new for cost in row for new in change(stage, cost)]


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
