"""`megacore schedule --search`: an order of a recipe's pipeline, made for its times and its memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megacore.config import Config
from megacore.devices import DEVICES
from megacore.models.registry import configure
from megacore.parallel.pipeline.schedules import Cost
from megacore.parallel.virtual_stages import stage_of
from megacore.planning.order_search import OrderedPipeline, pipelines
from megacore.planning.pipeline_order import order_text
from megacore.planning.recipe_setting import setting_of
from megacore.planning.run_plan import CPU, cluster_of, problems_on_paper, ranks_of
from megacore.recipe import ConfigError, changed, load
from megacore.say import say
from megacore.store.io.files import replacing
from megacore.tools.options import above_0, count
from megacore.tools.tables import table
from megacore.training.schedule_gaps import ComparedSchedule
from megacore.training.traces import read_trace


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--search",
        metavar="RECIPE",
        help="look for a faster order for a recipe, which overrides may follow, within the memory of its devices; with "
        "--trace of a run of it, by the times of that",
    )
    group.add_argument("--to", type=Path, metavar="FILE", help="where to write it, for pipeline.order")
    known = ", ".join([*DEVICES, CPU])
    group.add_argument(
        "--gpu", metavar="NAME", default="h100-80", help=f"{known}, or a measured FILE.json (%(default)s)"
    )
    group.add_argument("--world", type=count, metavar="N", help="ranks; by default what the mesh needs")
    group.add_argument("--memory-gb", type=above_0, metavar="X", help="of one device")


def run(arguments: argparse.Namespace) -> None:
    """Search, say what was found, and write the fastest order that fits.

    Raises:
        ConfigError: the recipe is wrong, has no pipeline, or nothing fits.
        OSError, StoreError: the file cannot be written, or the trace not be read.
    """
    if arguments.to.is_dir() or not arguments.to.parent.is_dir():
        raise ConfigError([f"--to {arguments.to}: give the name of a file in a folder that is there"])
    config = load(arguments.search, [*arguments.names, "pipeline.order=null"])
    given = {} if arguments.memory_gb is None else {"memory": arguments.memory_gb * 1e9}
    model, world = configure(config.model, config.scores), arguments.world or ranks_of(config)
    cluster = cluster_of(arguments.gpu, config.train.precision, None, given, world)
    if found := problems_on_paper(config, world, model):
        raise ConfigError(found)
    if config.mesh.pp == 1:
        raise ConfigError(["mesh.pp is 1: an order is one of the stages of a pipeline, choose more"])
    setting = setting_of(config, model, world, "cpu" if arguments.gpu == CPU else "cuda")
    possible = {
        name: problems_on_paper(changed(config, [f"pipeline.schedule={name}"]), world, model) for name in _names(config)
    }
    names = [name for name, problems in possible.items() if not problems]
    if not names:
        raise ConfigError([each for problems in possible.values() for each in problems])
    room = cluster.room
    measured = None if arguments.trace is None else _measured(arguments.trace, config)
    ways = [*pipelines(setting, names, cluster, room, measured)]
    fitting = [each for each in ways if each.fits(room)]
    say(
        f"{setting.microbatches} microbatches on {config.mesh.pp} stages of {config.pipeline.chunks} "
        f"chunk{'s' * (config.pipeline.chunks > 1)}, with {room / 1e9:,.2f} GB on each rank"
    )
    say(table(("schedule", "order", "ms", "bubble", "GB", ""), [_row(each, room) for each in ways]))
    if not fitting:
        least = min(max(each.peaks) for each in ways)
        raise ConfigError(
            [
                f"nothing fits: the least is {least / 1e9:,.2f} GB of {room / 1e9:,.2f}: give more memory, or look for "
                "a layout that fits with `megacore plan --fit`"
            ]
        )
    best = min(fitting, key=lambda each: each.timeline.total)
    name = best.setting.schedule
    with replacing(arguments.to) as file:
        file.write(order_text(name, best.schedule))
    own = " (no order was found that is faster than its own)" if best.setting.order is None else ""
    say(f"The fastest that fits{own}: pipeline.schedule={name} pipeline.order={arguments.to}")


def _names(config: Config) -> tuple[str, ...]:
    """Return the schedules that take a recipe's chunks and whose actions may be in another order."""
    if config.pipeline.chunks == 1:
        return "1f1b", "zb-h1"
    return "interleaved", "zb-interleaved", *(("zb-v",) if config.pipeline.chunks == 2 else ())


def _measured(path: Path, config: Config) -> Sequence[Cost]:
    """Return the medians of each virtual stage of a traced step."""
    found = ComparedSchedule.last(read_trace(path))
    stages, chunks = len(found.costs), len(found.costs[0])
    if (stages, chunks) != (config.mesh.pp, config.pipeline.chunks):
        raise ConfigError(
            [
                f"--trace {path} has {stages} stages of {chunks} chunks, and the recipe {config.mesh.pp} of "
                f"{config.pipeline.chunks}: give a trace of this layout"
            ]
        )
    return [found.costs[stage_of(v, stages, found.placement)][v // stages] for v in range(stages * chunks)]


def _row(way: OrderedPipeline, room: float) -> tuple[str, ...]:
    timeline, own = way.timeline, way.setting.order is None
    return (
        way.setting.schedule,
        "its own" if own else "searched",
        f"{1e3 * timeline.total:,.1f}",
        f"{100 * timeline.bubble:.1f}%",
        f"{max(way.peaks) / 1e9:,.2f}",
        "fits" if way.fits(room) else "does not fit",
    )
