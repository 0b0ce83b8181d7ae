"""Changes of a recipe that would make its steps shorter, with what they promise by the times of a traced step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megacore.config import Config
from megacore.models.config import ModelConfigError
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.pipeline.schedules import SCHEDULES, Cost, Schedule, simulate
from megacore.parallel.virtual_stages import placement_of
from megacore.training.diagnosis import EVALUATE, RECOMPUTATION, SAVE, StepSplit
from megacore.training.schedule_gaps import ComparedSchedule
from megacore.training.traces import TracedStep

MOST = 3
"""Changes that are told, the best ones."""
LEAST = 0.02
"""The share of a step that a change promises at least."""


class Advice(NamedTuple):
    """Overrides of a recipe, and the share of a step that they promise to save."""

    overrides: str
    gain: float


def advise(found: StepSplit, step: TracedStep, config: Config) -> list[Advice]:
    """Return up to three changes, the best first, of which each is one by itself. Raises ScheduleError: the actions of
    the trace are no schedule."""
    seconds = {each.name: each.seconds for each in found.parts}
    made = [*_of_pipelines(step, config, found.seconds)]
    if config.memory.recompute != "none":
        made.append(Advice("memory.recompute=none", seconds.get(RECOMPUTATION, 0.0) / found.seconds))
    if not config.checkpoint.background:
        made.append(Advice("checkpoint.background=true", seconds.get(SAVE, 0.0) / found.seconds))
    if every := config.evaluate.every:
        made.append(Advice(f"evaluate.every={4 * every}", 0.75 * seconds.get(EVALUATE, 0.0) / found.seconds))
    return sorted((each for each in made if each.gain >= LEAST), key=lambda each: -each.gain)[:MOST]


def _of_pipelines(step: TracedStep, config: Config, seconds: float) -> Iterator[Advice]:
    """Yield what another schedule, smaller microbatches and other stages promise."""
    if step.mesh.pp == 1:
        return
    compared = ComparedSchedule.last(step)
    name, chunks, m = config.pipeline.schedule, config.pipeline.chunks, config.batch.micro_size
    stages, microbatches = len(compared.ranks), 1 + max(action.microbatch for action in compared.schedule[0])

    def gain(schedule: Schedule, costs: Sequence[Sequence[Cost]]) -> float:
        return (compared.planned.total - simulate(schedule, costs, placement_of(name)).total) / seconds

    whole = config.lora is None and not config.train.compile and config.memory.recompute == "none"
    if name in ("1f1b", "gpipe") and chunks == 1 and whole:  # a weight gradient takes as long as an input gradient
        halves = [[replace(x, inputs=x.inputs / 2, weights=x.inputs / 2) for x in row] for row in compared.costs]
        yield Advice("pipeline.schedule=zb-h1", gain(SCHEDULES["zb-h1"](stages, 1, microbatches), halves))
    if m % 2 == 0:
        smaller = [[_scaled(cost, 0.5) for cost in row] for row in compared.costs]
        yield Advice(f"batch.micro_size={m // 2}", gain(SCHEDULES[name](stages, chunks, 2 * microbatches), smaller))
    if chunks == 1 and (layers := _layers(step, config)):
        moved = _moved(layers, [row[0] for row in compared.costs])
        costs = [[_scaled(row[0], new / old)] for row, new, old in zip(compared.costs, moved, layers, strict=True)]
        yield Advice(f"pipeline.layers_per_stage={','.join(map(str, moved))}", gain(compared.schedule, costs))


def _layers(step: TracedStep, config: Config) -> list[int]:
    """Return the layers of each stage; none where they are not known, or a stage has none."""
    try:
        model = configure(config.model)
    except ModelConfigError:  # of a checkpoint that names no family
        return []
    layout = layout_of(model, step.mesh, 1, config.pipeline.layers_per_stage, config.tuning, config.mesh.split)
    found = [len(layout.chunk_layers(stage, 0)) for stage in range(step.mesh.pp)]
    return found if all(found) else []


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
