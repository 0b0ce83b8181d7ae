"""The layouts that a recipe may take instead of its own: as overrides of it, and on another number of nodes. torch is
asked only where dp alone cannot follow.

The global batch, the order of the samples and the learning rate are those of the recipe on every number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

from megacore.checks.rules import problems
from megacore.config import Config, ContextConfig
from megacore.devices import CPU_TFLOPS, DEVICES
from megacore.models.config import ModelConfig
from megacore.planning.capacity import capacity_problems, cpu_of
from megacore.planning.fit import Candidate, fit, spelled
from megacore.planning.recipe_setting import alone, setting_of
from megacore.planning.step_time import Cluster
from megacore.recipe import ConfigError, changed
from megacore.resources import gpus, memory_of_gpus

KEYS = (
    *(f"mesh.{dim}" for dim in ("pp", "dp", "cp", "ep", "tp", "etp")),
    *(f"context.{key}" for key in ("exchange", "balance", "heads")),
    *(f"pipeline.{key}" for key in ("schedule", "order", "chunks", "group", "layers_per_stage")),
    *("zero.shard", "zero.replicas", "batch.micro_size"),
    *(f"memory.{key}" for key in ("recompute", "offload_activations", "mlp_chunk")),
)
"""The keys of a recipe that a layout may change."""


def overrides_of_nodes(
    config: Config, model: ModelConfig, least: int, most: int, processes: int
) -> Mapping[int, list[str]]:
    """Return {number of nodes: the overrides by which a recipe fits them}; each names all keys that any of them has, so
    that it can follow on any other. Each node has so many processes. Raises ConfigError: all numbers that no layout
    fits; or all that is wrong with the recipe on any number."""
    counts = range(least, most + 1)
    plain = [_problems(next(_replicas(config, n * processes)), model, n * processes, processes) for n in counts]
    if anyway := [each for each in plain[0] if all(each in others for others in plain)]:
        raise ConfigError(anyway)
    found, wrong = dict[int, Config](), dict[int, str]()
    for nodes in counts:
        there = f"{nodes} node{'s' * (nodes > 1)}, {nodes * processes} process{'es' * (nodes * processes > 1)}"
        fits = layout_on(config, model, nodes * processes, processes)
        if isinstance(fits, Config):
            found[nodes] = fits
        else:
            wrong[nodes] = f"NNODES={least}:{most} may leave {there}, and no layout fits: {fits}"
    if wrong:
        fits_from = max(wrong) + 1
        way_out = f"start with NNODES={fits_from}:{most}" if fits_from <= most else "give more nodes"
        raise ConfigError([f"{text}; or {way_out}" for text in wrong.values()])
    moved = [key for key in KEYS if any(_value(each, key) != _value(config, key) for each in found.values())]
    return {nodes: [f"{key}={spelled(_value(each, key))}" for key in moved] for nodes, each in found.items()}


def layout_on(config: Config, model: ModelConfig, world: int, processes: int) -> Config | str:
    """Return a recipe on so many ranks, or why it does not fit them.

    Where whole replicas fit, dp alone follows; else the layout is the one that the plan takes for the fastest. Each
    node has so many processes.
    """
    reasons = list[str]()
    plain = replace(config, pipeline=replace(config.pipeline, order=None))
    ways = [config] if config.pipeline.order is None else [config, plain]  # an order is for one number of microbatches
    replicas = (each for way in ways for each in _replicas(way, world))
    for each in chain(replicas, _planned(config, model, world, processes)):
        if not (wrong := _problems(each, model, world, processes)):
            return each
        reasons += wrong
    return reasons[0]


def _replicas(config: Config, world: int) -> Iterator[Config]:
    """Yield the recipe with more or fewer replicas: first with as many ranks that share out a state as it has."""
    mesh, zero = config.mesh, config.zero
    dp, left = divmod(world, mesh.model_ranks)
    if left:
        yield config
        return
    if mesh.dp is not None:
        config = replace(config, mesh=replace(mesh, dp=dp))
    share = mesh.dp // zero.replicas if mesh.dp else 0
    groups = [dp // share] if share and dp % share == 0 else []
    for replicas in (*groups, *range(min(zero.replicas, dp), 1, -1), 1):
        if dp % replicas == 0:
            yield replace(config, zero=replace(zero, replicas=replicas))


def _planned(config: Config, model: ModelConfig, world: int, processes: int) -> Iterator[Config]:
    """Yield the layouts that the plan likes best, the fastest first."""
    there = gpus()
    kind = config.train.device_type(there)
    device, tflops = cpu_of(processes), CPU_TFLOPS
    if kind == "cuda":
        device = replace(DEVICES["h100-80"], memory=memory_of_gpus())
        tflops = device.tflops(config.train.precision)
    cluster = Cluster(replace(device, per_node=processes), tflops)
    base = setting_of(alone(config), model, 1, kind)
    for each in fit(base, world, cluster):
        yield changed(config, [f"{key}={spelled(value)}" for key, value in overrides(each, config).items()])


def overrides(each: Candidate, config: Config) -> Mapping[str, object]:
    """Return what makes a candidate of a recipe; one without cp takes back what the recipe says of its context, and all
    the order and the groups of its pipeline."""
    plain = ContextConfig()
    asked = {f"context.{key}": value for key, value in vars(plain).items()} if config.context != plain else {}
    order = {f"pipeline.{key}": "null" for key in ("order", "group") if getattr(config.pipeline, key) is not None}
    offload = {"memory.offload_activations": spelled(each.setting.offload_activations)}
    return {**asked, **order, **each.overrides, **(offload if config.memory.offload_activations else {})}


def _problems(config: Config, model: ModelConfig, world: int, processes: int) -> list[str]:
    there = gpus()
    found = problems(config, world, model, gpus=there, local_ranks=processes)
    if found:
        return found
    memory = memory_of_gpus() if config.train.device_type(there) == "cuda" else None
    try:
        return list(capacity_problems(config, model, world, processes, memory))
    except ConfigError as error:  # the order of the pipeline
        return [*error.problems]


def _value(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
