"""`megacore plan --goodput`: what a run keeps of its time under faults, at each level of protection."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.pictures import pyplot, save
from megacore.plan.cluster import Overheads
from megacore.plan.efficiency import LINKS
from megacore.plan.goodput import (
    DAY_S,
    LEVELS,
    LLAMA_3,
    FaultCosts,
    FaultRates,
    Goodput,
    Protection,
    Simulated,
    best_interval,
    curves,
    daly,
    goodput,
    per_device,
    protections,
    simulate,
    with_best_spares,
    young,
)
from megacore.plan.setting import Setting
from megacore.plan.state import Shares
from megacore.plan.step_time import Cluster
from megacore.plan.survival import OVERHEAD, PeerCopies, PieceHolders, Survival, image_bytes, piece_holders
from megacore.recipe import ConfigError
from megacore.recovery import incidents
from megacore.recovery.policy import Incident
from tools.tables import table

NOTICE_S, DETECT_S, PROCESSES_S, TOGETHER_S = 1800.0, 3.0, 60.0, 1.0
COSTS = tuple(each.name for each in fields(FaultCosts) if each.name != "step")
IN_PLACE = ("rebuild", "replace", "evict")
LARGEST = 4096
STUCK = 0.01
"""The goodput below which a run gets nowhere."""
"""Nodes up to which curves are drawn, at least."""


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
        "--hardware", type=_share, metavar="X", help="share of the faults that take the node away (0.78: Llama 3)"
    )
    group.add_argument(
        "--away",
        type=above_0,
        metavar="S",
        help="until another node takes its place (600); a day where it is repaired",
    )
    group.add_argument(
        "--apart",
        action="store_true",
        help="simulate faults that wait until all nodes are there, as those of a test do",
    )
    group.add_argument(
        "--cost", type=_cost, action="append", default=[], metavar="NAME=S", help=f"seconds of {', '.join(COSTS)}"
    )
    group.add_argument("--incidents", type=Path, metavar="OUT", help="take what the faults of this run have cost")
    group.add_argument(
        "--overhead", type=_share, default=OVERHEAD, metavar="X", help="share of a step for copies (%(default)s)"
    )
    group.add_argument("--picture", type=Path, metavar="FILE", help="draw goodput over nodes: a PNG")


def above_0(text: str) -> float:
    """Return the number that an option gives.

    Raises:
        argparse.ArgumentTypeError: it is none, or not above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    value = above_0(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, above 0 and up to 1")
    return value


def _cost(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in COSTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SECONDS with a name of {', '.join(COSTS)}")
    return name, above_0(seconds)


@dataclass(frozen=True)
class Outlook:
    """The goodput of a run, and all that it was computed from.

    Args:
        rates: The faults of nodes.
        costs: Seconds that things cost.
        sources: {cost: where it is from}.
        bare, copied: The places of the images of all ranks, without copies and with them.
        copies: The cost of copies, where there are any.
        image: The largest image of a rank, in bytes.
        pieces: The holders of each piece.
        levels: The goodput of each level, and the simulated one.
        per_node: Devices of a node.
    """

    rates: FaultRates
    costs: FaultCosts
    sources: Mapping[str, str]
    bare: Survival
    copied: Survival
    copies: PeerCopies | None
    image: int
    pieces: Sequence[PieceHolders]
    levels: Sequence[tuple[Goodput, Simulated]]
    per_node: int

    @classmethod
    def of(
        cls,
        arguments: argparse.Namespace,
        config: Config,
        setting: Setting,
        cluster: Cluster,
        step_s: float,
        beside: Overheads,
    ) -> Outlook:
        """Return the outlook of a recipe.

        Args:
            arguments: The options of :func:`add_options`.
            config: The recipe.
            setting: The recipe on paper.
            cluster: The devices.
            step_s: Seconds of a step.
            beside: The costs of starting, saving and resuming.

        Raises:
            ConfigError: the run named has had no faults that it has got over.
        """
        per_node, shares, mesh = cluster.device.per_node, Shares.of(setting), setting.layout.mesh
        if arguments.faults:
            node_s = per_device(arguments.faults, per_node)
        else:
            node_s = arguments.mtbf * DAY_S if arguments.mtbf else LLAMA_3 * 8 / per_node
        usual = FaultRates()
        rates = FaultRates(
            node_s, arguments.hardware or usual.hardware, arguments.away or usual.away_s, arguments.apart
        )
        bare, copied = Survival.of(setting, per_node, copies=False), Survival.of(setting, per_node)
        image = max(image_bytes(setting, shares))
        costs, sources = _costs(config, cluster, step_s, beside, image)
        given = dict(arguments.cost)
        if arguments.incidents:
            measured = measured_costs(incidents.read(arguments.incidents))
            if not measured:
                raise ConfigError(
                    [f"--incidents {arguments.incidents}: it has no fault that was got over: leave it out"]
                )
            sources |= dict.fromkeys(measured, f"measured in {arguments.incidents}")
            given = {**measured, **given}
        sources |= dict.fromkeys(dict(arguments.cost), "given")
        costs = replace(costs, **given)
        copies = PeerCopies.of(setting, shares, copied, cluster, step_s, arguments.overhead)
        replica = mesh.world / mesh.dp / per_node if mesh.dp > 1 else bare.nodes
        levels = []
        for level in protections(costs, bare, copied, copies, replica):
            best = with_best_spares if level.name == LEVELS[-1] else goodput
            expected = best(level, bare.nodes, rates, costs)
            seen = simulate(expected.protection, bare.nodes, rates, costs, expected.interval)
            levels.append((expected, seen))
        pieces = tuple(piece_holders(setting, shares))
        return cls(rates, costs, sources, bare, copied, copies, image, pieces, levels, per_node)

    @property
    def protections(self) -> list[Protection]:
        return [expected.protection for expected, _ in self.levels]

    @property
    def run_s(self) -> float:
        """Mean seconds from one fault of the run to the next."""
        return self.rates.node_s / self.bare.nodes


def measured_costs(met: Sequence[Incident]) -> Mapping[str, float]:
    """Return {cost: its median among the incidents of a run that were got over}, of those that it has met."""
    seen = [each.seen_after for each in met if each.seen_after is not None]
    lost = {
        name: [each.seconds_lost for each in met if each.decision.action in actions and each.seconds_lost is not None]
        for name, actions in (("rebuild", IN_PLACE), ("restart", ("restart",)))
    }
    found = {name: statistics.median(some) for name, some in lost.items() if some}
    return {**found, "detect": statistics.median(seen)} if found and seen else found


def _costs(
    config: Config, cluster: Cluster, step_s: float, beside: Overheads, image: int
) -> tuple[FaultCosts, dict[str, str]]:
    groups, device, background = beside.start.seconds or 0.0, cluster.device, config.checkpoint.background
    to_host = beside.save.busiest / device.host
    moved = image / min(device.network * LINKS, device.host)
    costs = FaultCosts(
        NOTICE_S,
        DETECT_S,
        PROCESSES_S + groups + beside.resume.seconds,
        TOGETHER_S + groups + moved,
        to_host if background else beside.save.seconds,
        beside.save.seconds if background else 0.0,
        step_s,
    )
    sources = {
        "notice": "assumed: half an hour until somebody has seen it",
        "detect": "four processes on a small machine",
        "restart": f"assumed {PROCESSES_S:g} s for processes, planned {_seconds(groups)} for groups and "
        f"{_seconds(beside.resume.seconds)} for loading",
        "rebuild": f"assumed {TOGETHER_S:g} s to agree, planned {_seconds(groups)} for groups and "
        f"{_seconds(moved)} for an image",
        "stall": f"planned: {'a copy to the host' if background else 'the whole save'}",
        "publish": "planned: a save",
    }
    return costs, sources


# -- for people


def show(x: Outlook) -> str:
    """Return the outlook as tables."""
    sections = (_faults(x), _survival(x), _levels(x), _paid(x))
    return "\n\n".join("\n".join(section) for section in sections)


def _faults(x: Outlook) -> Iterator[str]:
    nodes, rates, devices = x.bare.nodes, x.rates, len(x.bare.alike)
    a_day = DAY_S / rates.node_s / x.per_node
    yield (
        f"Faults: {devices:,} devices on {nodes:,} node{'s' * (nodes > 1)}; a node is faulty every "
        f"{rates.node_s / DAY_S:,.1f} days ({a_day:.3%} of all devices in a day), the run every {_duration(x.run_s)}"
    )
    if rates == FaultRates(LLAMA_3 * 8 / x.per_node):
        yield "  As Llama 3's 16,384 GPUs: 419 in 54 days, 78 % of them hardware (arXiv 2407.21783, 3.3.4)."
    yield (
        f"  {rates.hardware:.0%} of them take the node away, until another takes its place after "
        f"{_duration(rates.away_s)}; after the others processes are started again."
    )


def _survival(x: Outlook) -> Iterator[str]:
    bare, copied = x.bare, x.copied
    single = [each for each in x.pieces if each.state == 1]
    yield "What is lost with a node, of weights that are trained, their masters and moments"
    yield f"  {len(bare.images):,} different images of up to {_gb(x.image)} GB on {len(bare.alike):,} ranks."
    if single:
        weights = sum(each.values == 1 for each in single)
        names = ", ".join(dict.fromkeys(each.name for each in single[:3])) + (", ..." if len(single) > 3 else "")
        yield (
            f"  One rank alone has the state of {len(single)} of {len(x.pieces)} kinds of pieces ({names}), and the "
            f"values of {weights}."
        )
    alone = sum(map(bool, bare.one_node.values()))
    yield (
        f"  {alone:,} of {bare.nodes:,} nodes have images that no other node has"
        + (f", node 0 {len(bare.one_node[0])} of them." if alone else ".")
    )
    yield f"  From replicas alone: {_at_once(bare)}"
    if x.copies:
        y = x.copies
        rarer = max(y.every, round(young(1 / x.run_s, y.seconds) / x.costs.step))
        yield f"  With copies on other nodes: {_at_once(copied)}"
        yield (
            f"  {y.ranks:,} ranks send up to {_gb(max(y.sizes))} GB each, {y.seconds:,.2f} s over the network: every "
            f"{y.every} step{'s' * (y.every > 1)}, which takes {y.seconds / (y.every * x.costs.step):.2%} of the time; "
            f"for so rare faults every {rarer:,} would be best."
        )
    elif bare.nodes > 1:
        yield "  Copies on other nodes are not needed: every image is on two nodes."


def _at_once(where: Survival) -> str:
    safe = where.any_at_once
    if where.nodes == 1:
        return "all is lost with the one node."
    if safe == 0:
        return f"{sum(len(nodes) == 1 for nodes in where.fatal):,} of {where.nodes:,} nodes may not end."
    fatal, first = where.fatal_share(safe + 1), where.fatal[0]
    shown = ", ".join(map(str, sorted(first)[:4])) + (", ..." if len(first) > 4 else "")
    return (
        f"any {safe} node{'s' * (safe > 1)} may end at once; of {safe + 1} at once {fatal:.2g} of all sets may not "
        f"(as {shown})."
    )


def _levels(x: Outlook) -> Iterator[str]:
    yield "Goodput: the share of the time of all nodes, spares included, that trains"
    rows = [
        (
            each.protection.name,
            f"{each.share:.2%}",
            f"{seen.share:.2%}",
            f"{seen.error:.2%}",
            f"{each.interval:,.0f}",
            f"{max(1, round(each.interval / x.costs.step)):,}",
            f"{each.on_disk:.1%}",
            str(each.protection.spares),
        )
        for each, seen in x.levels
    ]
    yield table(("level", "expected", "simulated", "error", "save every s", "steps", "from disk", "spares"), rows)
    if stuck := [each.protection.name for each, _ in x.levels if each.share < STUCK]:
        yield f"  {' and '.join(stuck)}: faults come faster than these recover, and the run gets nowhere."
    rate, stall = 1 / x.run_s, x.costs.stall
    yield (
        f"  Where each fault ends in a restart, the best interval is {best_interval(rate, stall):,.0f} s, by Young "
        f"{young(rate, stall):,.0f} and by Daly {daly(rate, stall):,.0f}; none is shorter than a save lasts."
    )
    most, away = x.levels[-1][0], x.rates.away_s
    if away < DAY_S:
        slow = with_best_spares(most.protection, x.bare.nodes, replace(x.rates, away_s=DAY_S), x.costs)
        yield (
            f"  {most.protection.spares} spares are worth having where another node comes after {_duration(away)}, "
            f"{slow.protection.spares} where it takes a day."
        )


def _paid(x: Outlook) -> Iterator[str]:
    yield "Seconds that were counted with; --cost NAME=SECONDS gives others, --incidents OUT those of a run"
    yield table(("cost", "s", "from"), [(name, _seconds(asdict(x.costs)[name]), x.sources[name]) for name in COSTS])


def _duration(seconds: float) -> str:
    for unit, size in (("days", DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} s"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 1 or not seconds else f"{seconds:.3f}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f}"


def draw(x: Outlook, picture: Path) -> None:
    """Draw goodput over numbers of nodes, a curve for each level."""
    plot = pyplot()
    sizes = [math.ceil(x.protections[-1].replica)]
    while sizes[-1] < max(LARGEST, x.bare.nodes):
        sizes.append(sizes[-1] * 2)
    figure, axes = plot.subplots(figsize=(7, 4.4), layout="constrained")
    for name, shares in curves(x.protections, sizes, x.rates, x.costs):
        axes.plot(sizes, [100 * share for share in shares], "--" if name == LEVELS[-1] else "-", marker=".", label=name)
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
        "images": len(x.bare.images),
        "image": x.image,
        "pieces": [asdict(piece) for piece in x.pieces],
        "any_at_once": {"replicas": x.bare.any_at_once, "copies": x.copied.any_at_once},
        "fatal": {
            name: [sorted(nodes) for nodes in where.fatal]
            for name, where in (("replicas", x.bare), ("copies", x.copied))
        },
        "copies": x.copies and asdict(x.copies),
        "levels": [
            {
                "level": each.protection.name,
                "goodput": each.share,
                "simulated": seen.share,
                "error": seen.error,
                "interval": each.interval,
                "on_disk": each.on_disk,
                "spares": each.protection.spares,
            }
            for each, seen in x.levels
        ],
    }
