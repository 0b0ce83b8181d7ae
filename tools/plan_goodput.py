"""`megacore plan --goodput`: what a run keeps of its time under faults, at each level of protection."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megacore import incidents
from megacore.config import Config
from megacore.incidents import Incident
from megacore.pictures import pyplot, save
from megacore.planning.efficiency import LINKS
from megacore.planning.goodput import (
    DAY_S,
    LEVELS,
    LLAMA_3,
    FaultCosts,
    FaultRates,
    Goodput,
    best_interval,
    goodput,
    levels,
)
from megacore.planning.run_plan import Plan
from megacore.recipe import ConfigError
from megacore.tools.options import above_0, share
from megacore.tools.tables import gb, table

NOTICE_S, DETECT_S, PROCESSES_S = 1800.0, 3.0, 60.0
COSTS = tuple(each.name for each in fields(FaultCosts) if each.name != "step")
LARGEST = 4096
"""Nodes up to which curves are drawn, at least."""
STUCK = 0.01
"""The goodput below which a run gets nowhere."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan of goodput."""
    parser.add_argument("--goodput", action="store_true", help="say what faults leave of the time, and what to do")
    group = parser.add_argument_group("with --goodput")
    rate = group.add_mutually_exclusive_group()
    rate.add_argument(
        "--mtbf", type=above_0, metavar="DAYS", help="from one fault of a node to the next (264: Llama 3)"
    )
    rate.add_argument("--faults", type=above_0, metavar="PERCENT", help="of all devices that are faulty in a day")
    group.add_argument(
        "--hardware", type=share, metavar="X", help="share of the faults that take the node away (0.78: Llama 3)"
    )
    group.add_argument(
        "--away", type=above_0, metavar="S", help="until another node takes its place (600); a day where it is repaired"
    )
    group.add_argument(
        "--together",
        type=share,
        metavar="X",
        help="share of the faults that take a node and the one that keeps its copy; by default as if they were "
        "independent",
    )
    group.add_argument(
        "--cost", type=_cost, action="append", default=[], metavar="NAME=S", help=f"seconds of {', '.join(COSTS)}"
    )
    group.add_argument("--incidents", type=Path, metavar="OUT", help="take what the restarts of this run have cost")
    group.add_argument(
        "--overhead", type=share, metavar="X", help="share of the time for checkpoints in memory (recovery.overhead)"
    )


_OPTIONS = ("mtbf", "faults", "hardware", "away", "together", "cost", "incidents", "overhead")


def given(arguments: argparse.Namespace) -> list[str]:
    """Return those options of a plan of goodput that were given, beside ``--goodput`` itself."""
    return [f"--{name}" for name in _OPTIONS if getattr(arguments, name) not in (None, [])]


def _cost(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in COSTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SECONDS with a name of {', '.join(COSTS)}")
    return name, above_0(seconds)


@dataclass(frozen=True)
class Outlook:
    """The goodput of a run, and all that it was computed from. ``sources``: {cost: where it is from}; ``of_rank,
    of_node``: bytes of a checkpoint, of the rank and of the node that write most of it; ``every``: steps from one
    checkpoint in memory to the next; ``own``: the goodput with the recipe's own interval of checkpoints on disk; None
    where it has none."""

    devices: int
    nodes: int
    rates: FaultRates
    costs: FaultCosts
    sources: Mapping[str, str]
    of_rank: int
    of_node: int
    every: int
    own: Goodput | None

    @classmethod
    def of(cls, arguments: argparse.Namespace, config: Config, plan: Plan) -> Outlook:
        """Return the outlook of a recipe and its plan, by the options of :func:`add_options`. Raises ConfigError: the
        run named has had no fault after which it went on."""
        per_node, beside = plan.cluster.device.per_node, plan.overheads
        if arguments.faults:
            node_s = DAY_S / (arguments.faults / 100) / per_node  # any of its devices
        else:
            node_s = arguments.mtbf * DAY_S if arguments.mtbf else LLAMA_3 * 8 / per_node
        usual = FaultRates()
        rates = FaultRates(
            node_s,
            arguments.hardware or usual.hardware,
            arguments.away or usual.away_s,
            plan.setting.layout.mesh.dp > 1,
            arguments.together,
        )
        planned, given = _costs(config, plan), dict(arguments.cost)
        costs = FaultCosts(**{name: seconds for name, (seconds, _) in planned.items()}, step=plan.time.total)
        sources = {name: source for name, (_, source) in planned.items()}
        if arguments.incidents:
            measured = measured_costs(incidents.read(arguments.incidents))
            if not measured:
                raise ConfigError(
                    [f"--incidents {arguments.incidents}: it has no restart after which it went on: leave it out"]
                )
            sources |= dict.fromkeys(measured, f"measured in {arguments.incidents}")
            given = {**measured, **given}
        sources |= dict.fromkeys(dict(arguments.cost), "given")
        costs = replace(costs, **given)
        every = costs.every(arguments.overhead or config.recovery.overhead)
        save, kept = beside.save, every if config.recovery.memory else 0
        own = goodput(beside.nodes, rates, costs, kept, save.interval) if save.interval else None
        of_rank, of_node = save.busiest, save.busiest_node
        return cls(beside.ranks, beside.nodes, rates, costs, sources, of_rank, of_node, every, own)

    @property
    def levels(self) -> Mapping[str, Goodput]:
        return dict(levels(self.nodes, self.rates, self.costs, self.every))

    @property
    def run_s(self) -> float:
        """Mean seconds from one fault of the run to the next."""
        return self.rates.node_s / self.nodes


def measured_costs(met: Sequence[Incident]) -> Mapping[str, float]:
    """Return {cost: its median among the restarts of a run after which it went on}, of those that it has met."""
    lost = [each.seconds_lost for each in met if each.action == "restart" and each.seconds_lost is not None]
    return {"restart": statistics.median(lost), "load_memory": 0.0} if lost else {}


def _costs(config: Config, plan: Plan) -> Mapping[str, tuple[float, str]]:
    """Return {cost: seconds, where they are from}."""
    beside, cluster, background = plan.overheads, plan.cluster, config.checkpoint.background
    groups, device = beside.start.seconds or 0.0, cluster.device
    written, loaded = beside.save.busiest, beside.resume
    mesh = plan.setting.layout.mesh
    copied, copies = written / device.host, "a copy to the host"
    if config.zero.shard != "none":  # replicas send each other what each has of the tensors that one of them writes
        whole = beside.save.size * mesh.dp * mesh.cp / mesh.world
        copied += whole / (cluster.bandwidth(mesh, "dp x cp") * LINKS)
        copies = "a broadcast of all states to all replicas, and a copy to the host"
    send = written / min(device.network * LINKS, device.host) if beside.nodes > 1 else 0.0
    shared = loaded.received / cluster.bandwidth(mesh, "dp x cp")
    stall, publish = (copied, beside.save.seconds) if background else (beside.save.seconds, 0.0)
    return {
        "notice": (NOTICE_S, "assumed: half an hour until somebody has seen it"),
        "detect": (DETECT_S, "assumed: an end is seen at once, a node that is gone after seconds"),
        "restart": (
            PROCESSES_S + groups,
            f"assumed {PROCESSES_S:g} s for processes, planned {_seconds(groups)} for groups",
        ),
        "load_memory": (
            send + max(loaded.busiest / device.cpu, shared),
            "planned: what the newcomer gets from another node, then a load at the speed of memory",
        ),
        "load_disk": (loaded.seconds, "planned: a load"),
        "copy": (copied, f"planned: {copies}, as if none of it were hidden"),
        "send": (send, "planned: what a rank keeps, over the network"),
        "stall": (stall, f"planned: {copies if background else 'the whole save'}"),
        "publish": (publish, "planned: a save" if background else ""),
    }


# -- for people


def show(x: Outlook) -> str:
    """Return the outlook as tables."""
    return "\n\n".join("\n".join(section) for section in (_faults(x), _memory(x), _levels(x), _paid(x)))


def _faults(x: Outlook) -> Iterator[str]:
    rates = x.rates
    a_day = DAY_S / rates.node_s / (x.devices / x.nodes)
    yield (
        f"Faults: {x.devices:,} devices on {x.nodes:,} node{'s' * (x.nodes > 1)}; a node is faulty every "
        f"{rates.node_s / DAY_S:,.1f} days ({a_day:.3%} of all devices in a day), the run every {_duration(x.run_s)}"
    )
    if rates == replace(FaultRates(LLAMA_3 * 8 * x.nodes / x.devices), elastic=rates.elastic):
        yield "  As Llama 3's 16,384 GPUs: 419 in 54 days, 78 % of them hardware (arXiv 2407.21783, 3.3.4)."
    yield (
        f"  {rates.hardware:.0%} of them take the node away, until another takes its place after "
        f"{_duration(rates.away_s)}: {'the others train on' if rates.elastic else 'the others wait'}."
    )


def _memory(x: Outlook) -> Iterator[str]:
    kept = x.of_node * (4 if x.nodes > 1 else 2)
    took = x.costs.copy / (x.every * x.costs.step)
    yield "Checkpoints in memory"
    yield (
        f"  Up to {gb(x.of_rank)} GB of a rank, every {x.every:,} step{'s' * (x.every > 1)}, which takes {took:.2%} "
        f"of the time. Two are kept{', and two of another node' * (x.nodes > 1)}: up to {gb(kept)} GB of a node."
    )
    gone = x.levels[LEVELS[-1]].from_disk
    why = "a node and the one that keeps its copy are lost together" if x.nodes > 1 else "the one node is lost"
    yield f"  After {gone:.2g} of all faults the run goes on from disk, for {why}: every {_duration(x.run_s / gone)}."


def _levels(x: Outlook) -> Iterator[str]:
    yield "Goodput: the share of the time of all nodes that goes into steps that count"
    rows = [
        (name, each.share, each.interval, max(1, round(each.interval / x.costs.step)), each.from_disk)
        for name, each in x.levels.items()
    ]
    head = {"level": "", "goodput": ".2%", "save on disk every s": ",.0f", "steps": ",", "from disk": ".2%"}
    yield table(head, rows)
    if stuck := [name for name, each in x.levels.items() if each.share < STUCK]:
        yield f"  {' and '.join(stuck)}: faults come faster than these recover, and the run gets nowhere."
    if x.own:
        without = " without checkpoints in memory," * (x.own.from_disk == 1)
        yield f"  As the recipe has it,{without} with one on disk every {_duration(x.own.interval)}: {x.own.share:.2%}."
    best = max(1, round(best_interval(1 / x.run_s, x.costs.copy) / x.costs.step))
    share = goodput(x.nodes, x.rates, x.costs, best).share
    yield f"  One in memory every {best:,} step{'s' * (best > 1)} would be best (Daly): {share:.2%}."


def _paid(x: Outlook) -> Iterator[str]:
    yield "Seconds that were counted with; --cost NAME=SECONDS gives others, --incidents OUT those of a run"
    yield table(("cost", "s", "from"), [(name, _seconds(asdict(x.costs)[name]), x.sources[name]) for name in COSTS])


def _duration(seconds: float) -> str:
    for unit, size in (("years", 365 * DAY_S), ("days", DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} s"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 1 or not seconds else f"{seconds:.3f}"


def draw(x: Outlook, picture: Path) -> None:
    """Draw goodput over numbers of nodes, a curve for each level; the costs stay those of the run."""
    plot = pyplot()
    sizes = [2**power for power in range(math.ceil(math.log2(max(LARGEST, x.nodes))) + 1)]
    shares = [dict(levels(nodes, x.rates, x.costs, x.every)) for nodes in sizes]
    figure, axes = plot.subplots(figsize=(7, 4.4), layout="constrained")
    for name in LEVELS:
        axes.plot(sizes, [100 * each[name].share for each in shares], marker=".", label=name)
    axes.set(
        xlabel=f"nodes, each faulty every {x.rates.node_s / DAY_S:,.0f} days",
        ylabel="goodput, %",
        xscale="log",
        ylim=(0, 101),
    )
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize=8)
    save(figure, picture)


# -- as data


def as_data(x: Outlook) -> Mapping[str, Any]:
    """Return the outlook as data, in bytes and seconds."""
    return {
        "faults": asdict(x.rates) | {"run_s": x.run_s},
        "costs": asdict(x.costs),
        "sources": x.sources,
        "checkpoint": {"of_rank": x.of_rank, "of_node": x.of_node, "every": x.every},
        "own": x.own and _goodput(x.own),
        "levels": [{"level": name, **_goodput(each)} for name, each in x.levels.items()],
    }


def _goodput(each: Goodput) -> Mapping[str, float]:
    return {"goodput": each.share, "interval": each.interval, "from_disk": each.from_disk}
