"""`megacore plan`: what a recipe needs of memory, network, time and storage, before anything is started.

With --fit it searches instead: layouts, rungs, recomputation and micro-batches that fit the devices with the recipe's
model and global batch, estimated fastest first. With --trace it runs a rank of each stage on a simulated GPU, by shapes
alone, and says what a step takes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megacore.config import Config
from megacore.devices import DEVICES
from megacore.models.config import ModelConfigError, parameters_in_words
from megacore.models.registry import configure
from megacore.pictures import bars, pyplot, save
from megacore.planning.fit import Candidate, fit, spelled
from megacore.planning.layout_choice import overrides
from megacore.planning.overheads import COMMUNICATOR, Overheads
from megacore.planning.packed_documents import with_documents
from megacore.planning.peak_memory import TERMS
from megacore.planning.recipe_setting import alone, setting_of
from megacore.planning.run_plan import CPU, Plan, Survival, cluster_of, ranks_of
from megacore.planning.step_time import MARGIN, Cluster
from megacore.planning.traffic import Traffic
from megacore.recipe import ConfigError, load
from megacore.say import err, say, say_data
from megacore.tools import folders, plan_trace, scaling
from megacore.tools.options import above_0, command_parser, count, counts, number
from megacore.tools.tables import gb, table

DAY_S = 86400.0
_SHORT = {"parameters": "weights", "gradients": "grads", "activations": "activ.", "working": "work"}
"""{term of the memory: the head of its column}, where that is shorter."""


def main(argv: Sequence[str]) -> int:
    parser = command_parser("plan", __doc__)
    parser.add_argument("recipe", nargs="?", help="a recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--world",
        "--gpus",
        type=counts,
        metavar="N",
        help="ranks; by default what the mesh needs. Several (16,128) are put beside each other, with as much dp",
    )
    parser.add_argument("--weak", action="store_true", help="of several: the batch grows with the ranks")
    known = ", ".join([*DEVICES, CPU])
    parser.add_argument(
        "--gpu", default="h100-80", metavar="NAME", help=f"{known}, or a measured FILE.json (%(default)s)"
    )
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="8 by default")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--imbalance",
        type=number("from 1 on: the fullest rank has no less than the mean", lambda value: 1 <= value < math.inf),
        default=1.0,
        metavar="X",
        help="the rows that the experts of the fullest rank get, over the mean of all ranks (1)",
    )
    parser.add_argument(
        "--documents",
        metavar="CORPUS",
        help="a token file, NAME of NAME.bin and NAME.idx: attention stays within its documents, as they are packed",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the memory of each stage: a PNG")
    search = parser.add_argument_group("search")
    search.add_argument("--fit", metavar="GPU=NAME", type=_fitted, help="what fits such devices: GPU=h100-80")
    search.add_argument("--nodes", type=count, metavar="N", help="of the devices (1)")
    search.add_argument("--best", type=count, default=5, metavar="N", help="how many to print (5)")
    plan_trace.add_options(parser)
    given = parser.add_argument_group("instead of the table's numbers")
    given.add_argument("--peak-tflops", type=above_0, metavar="X", help="of one device in the recipe's precision")
    given.add_argument("--memory-gb", type=above_0, metavar="X", help="of one device")
    given.add_argument("--host-memory-gb", type=above_0, metavar="X", help="of a node, for each device (250)")
    given.add_argument("--memory-bandwidth", type=above_0, metavar="GB/S", help="of a device's memory")
    given.add_argument("--bandwidth", type=above_0, metavar="GB/S", help="between devices of a node, one direction")
    given.add_argument("--network", type=above_0, metavar="GB/S", help="of each device to other nodes, one direction")
    given.add_argument("--storage", type=above_0, metavar="GB/S", help="of the shared storage (0.12 for each device)")
    given.add_argument("--storage-per-node", type=above_0, metavar="GB/S", help="between a node and it (4)")
    given.add_argument(
        "--mtbf", type=above_0, metavar="DAYS", help="from one fault of a node to the next (264 for 8 devices: Llama 3)"
    )
    given.add_argument("--efficiency", type=above_0, metavar="X", help="share of it that large products reach")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.recipe is None:
        parser.error("name a recipe")
    try:
        return run(arguments)
    except (ConfigError, ModelConfigError) as error:
        err(error)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        err("megacore plan runs a block of the model on tensors without numbers: install torch (one for CPUs will do)")
        return 2


def run(arguments: argparse.Namespace) -> int:
    config, (world, *others) = load(arguments.recipe, arguments.overrides), arguments.world or (None,)
    name = arguments.fit or arguments.gpu
    gb_per_s = {
        "memory": arguments.memory_gb,
        "host_memory": arguments.host_memory_gb,
        "bandwidth": arguments.memory_bandwidth,
        "link": arguments.bandwidth,
        "network": arguments.network,
    }
    changed = {"per_node": arguments.gpus_per_node, "reach": arguments.efficiency}
    changed |= {key: value and value * 1e9 for key, value in gb_per_s.items()}
    given = {key: value for key, value in changed.items() if value}
    cluster = cluster_of(name, config.train.precision, arguments.peak_tflops, given, world or ranks_of(config))
    plan_trace.check(arguments)
    if arguments.picture and (arguments.fit or arguments.trace):
        raise ConfigError(["--picture draws the memory of a plan: leave out --fit and --trace"])
    if arguments.weak and not others:
        raise ConfigError(["--weak is about several numbers of ranks: give --world 16,128, say"])
    if others:
        _scale(arguments, config, cluster, name)
        return 0
    if arguments.fit and config.sync.every is not None:
        raise ConfigError(
            ["--fit looks for layouts whose gradients are summed in each step: leave it out, or set sync.every=null"]
        )
    if arguments.fit:
        world = (arguments.nodes or 1) * cluster.device.per_node
        base = replace(
            setting_of(alone(config), configure(config.model, config.scores), 1, "cuda"), imbalance=arguments.imbalance
        )
        base, _ = with_documents(base, arguments.documents, config.data.seed)
        found = fit(base, world, cluster, max(2, arguments.best))  # what the next best loses is told
        _show_fit(found, arguments.best, config, world, name, cluster, arguments.json)
        return 0
    total, per_node = (each and each * 1e9 for each in (arguments.storage, arguments.storage_per_node))
    beside = (total, per_node), arguments.imbalance, arguments.documents, arguments.mtbf and arguments.mtbf * DAY_S
    plan = Plan.of(config, cluster, name == CPU, world, *beside)
    if arguments.trace:
        say(plan_trace.run(arguments, config, plan, name))
        return 0
    if arguments.json:
        say_data(plan.as_data(), indent=2)
    else:
        say(show(plan, name))
    if arguments.picture:
        draw(plan, name, arguments.picture)
        folders.drawn(arguments.picture)
    return 0


def _scale(arguments: argparse.Namespace, config: Config, cluster: Cluster, name: str) -> None:
    """Say what becomes of a step on several numbers of ranks."""
    if arguments.fit or arguments.trace or arguments.picture:
        raise ConfigError(["--world with several numbers shows plans alone: leave out --fit, --trace, --picture"])
    if name == CPU:
        raise ConfigError(["--gpu cpu is this machine, whose memory each number of ranks shares: give one --world"])
    plans = [
        Plan.of(each, cluster, False, world, imbalance=arguments.imbalance, documents=arguments.documents)
        for world, each in zip(arguments.world, scaling.on_each(config, arguments.world, arguments.weak), strict=True)
    ]
    if arguments.json:
        say_data([each.as_data() for each in plans], indent=2)
    else:
        say(scaling.show(plans, name))


def _fitted(text: str) -> str:
    key, _, name = text.partition("=")
    if key.upper() != "GPU" or not (name in DEVICES or name.endswith(".json")):
        raise argparse.ArgumentTypeError(f"{text!r} is not GPU= and one of {', '.join(DEVICES)}, or a .json file")
    return name


# -- for people


def show(plan: Plan, name: str) -> str:
    """Return the plan as tables."""
    sections = (
        _headline(plan, name),
        _memory(plan),
        _loads(plan),
        _packed(plan),
        _traffic(plan),
        _time(plan),
        _beside(plan.overheads),
        _survival(plan.survival),
        (f"Warning: {each}" for each in plan.warnings()),
        (plan.in_a_sentence,),
    )
    return "\n\n".join(text for section in sections if (text := "\n".join(section)))


def draw(plan: Plan, name: str, picture: Path) -> None:
    """Draw the memory of a rank of each stage at its peak, beside that of the device."""
    figure, axes = pyplot().subplots(figsize=(7, 1.6 + 0.32 * len(plan.memory)), layout="constrained")
    terms = {term: [m.terms[term] for m in plan.memory] for term in TERMS}
    bars(axes, [f"stage {m.stage}" for m in plan.memory], terms, 1e9)
    axes.axvline(plan.cluster.device.memory / 1e9, color="black", label=name)
    axes.axvline(plan.cluster.room / 1e9, color="black", linestyle="--", label=f"less {MARGIN:.0%}")
    axes.set(xlabel="GB of a rank at the peak of a step")
    figure.legend(loc="outside upper center", ncols=4, fontsize=8)
    save(figure, picture)


def _headline(plan: Plan, name: str) -> Iterator[str]:
    s, mesh = plan.setting, plan.setting.layout.mesh
    sizes = " x ".join(f"{dim}={mesh[dim]}" for dim in mesh.DIMS if mesh[dim] > 1) or "one rank"
    w = s.widths
    yield (
        f"{s.model.family} of {parameters_in_words(s.model, s.tuning)} on {mesh.world} x {name} as {sizes}: "
        f"{s.schedule}, {s.layout.chunks} chunk{'s' * (s.layout.chunks > 1)} a stage, {s.microbatches} microbatches of "
        f"{s.tokens:,} tokens"
    )
    yield (
        f"bytes of a parameter {w.parameter}, its gradient {w.gradient}, master {w.master}, moments {w.moments}"
        f"{f', start and momentum of outer steps {w.outer}' if w.outer else ''}; "
        f"split over data parallel ranks: {s.shard}; recomputed: {spelled(s.recompute)}"
        f"{', what is kept in 8 bits' * s.compress_activations}"
    )


def _memory(plan: Plan) -> Iterator[str]:
    world, pp = plan.setting.layout.mesh.world, plan.setting.layout.mesh.pp
    per_stage = world // pp
    yield "Memory at the peak of a step, GB on each rank of a stage (1 GB = 10^9 bytes)"
    shown = [term for term in TERMS if any(m.terms[term] for m in plan.memory)]
    rows = [
        (
            str(m.stage),
            f"{m.stage * per_stage}-{(m.stage + 1) * per_stage - 1}" if per_stage > 1 else str(m.stage),
            *(size / 1e9 for size in (*(m.terms[term] for term in shown), m.peak)),
        )
        for m in plan.memory
    ]
    terms = (*(_SHORT.get(term, term) for term in shown), "peak")
    yield table({"stage": "", "ranks": "", **dict.fromkeys(terms, ",.2f")}, rows)
    # Stages that are alike in it stand in one line.
    alike = dict[tuple[str, ...], list[int]]()
    for m in plan.memory:
        told = f"{m.elements / 1e6:,.1f}", gb(m.per_microbatch), str(m.in_flight), m.peak_at
        alike.setdefault(told, []).append(m.stage)
    rows = [(", ".join(map(str, stages)), *told) for told, stages in alike.items()]
    yield table(("stage", "M params", "GB of a microbatch", "in flight", "peak in"), rows)
    most, room = plan.fullest, plan.cluster.device.memory
    fits = "fits" if most.peak <= plan.cluster.room else "does not fit"
    yield (
        f"  The fullest ranks are those of stage {most.stage}: {gb(most.peak)} GB, most of it {most.largest} "
        f"({gb(most.terms[most.largest])} GB). It {fits} {gb(room)} GB less {MARGIN:.0%}."
    )
    number = plan.overheads.start.communicators
    if number and plan.setting.device == "cuda":
        yield (
            f"  Of these {gb(room * MARGIN)} GB NCCL takes about {gb(number * COMMUNICATOR)} GB, for the {number} "
            f"group{'s' * (number > 1)} of a rank (an assumption, not measured)."
        )
    if plan.host:
        yield f"  In host memory, for each rank: {gb(plan.host)} GB."
    if most.disk:
        yield f"  In a file, for each rank: {gb(most.disk)} GB."


def _loads(plan: Plan) -> Iterator[str]:
    if plan.loads:
        yield "Rows that the experts of the fullest rank get of a microbatch in a layer, and its memory at the peak"
        worst = plan.loads[-1].times
        rows = [
            (
                f"{each.times:g}" + (", all there are" if each.times == worst else ""),
                *(each.rows, each.peak / 1e9, "fits" if each.peak <= plan.cluster.room else "does not fit"),
            )
            for each in plan.loads
        ]
        yield table({"times the mean": "", "rows": ",", "GB": ",.2f", "": ""}, rows)


def _packed(plan: Plan) -> Iterator[str]:
    if plan.packed:
        yield "Microbatches as the corpus is packed, and a step if all were like them; above and below it is the median"
        head = {"": "", "documents": ",", "longest": ",", "scores of a head": ",", "over the mean of ranks": ".2f"}
        rows = [
            (x.which, x.documents, x.longest, x.scores, x.imbalance, x.keys, x.peak / 1e9, x.seconds)
            for x in plan.packed
        ]
        yield table({**head, "keys taken": ",", "GB": ",.2f", "s": ",.3f"}, rows)


def _traffic(plan: Plan) -> Iterator[str]:
    yield "Sent by each rank in a step (that of the stage that sends most of a kind)"
    most: dict[tuple[str, str, str], list[Traffic]] = {}
    for row in plan.traffic:
        alike: dict[tuple[str, str, str], list[Traffic]] = {}
        for each in row:
            alike.setdefault((each.axis, each.kind, each.what), []).append(each)
        for key, some in alike.items():
            most[key] = max(most.get(key, []), some, key=_sent)
    mesh, cluster = plan.setting.layout.mesh, plan.cluster
    rows = list[tuple[object, ...]]()
    for key, some in most.items():
        (x, *_), count = some, sum(each.count for each in some)
        mean, speed = sum(each.count * each.size for each in some) / count, cluster.bandwidth(mesh, *key[:2], x.ranks)
        rows.append((*key, x.ranks, count, mean / 1e6, _sent(some) / 1e9, speed / 1e9, cluster.seconds(mesh, some)))
    head = {"axis": "", "collective": "", "of": "", "ranks": "", "messages": ",", "MB each": ",.2f", "GB sent": ",.2f"}
    yield table({**head, "GB/s": ",.0f", "s": ",.3f"}, rows) if rows else "  nothing"


def _sent(messages: Sequence[Traffic]) -> float:
    return sum(each.sent for each in messages)


def _time(plan: Plan) -> Iterator[str]:
    time, cluster = plan.time, plan.cluster
    parts = ("compute", "recompute", "tensor", "experts", "context", "bubble", "data", "offload", "optimizer")
    yield (
        f"A step is estimated at {time.total:,.3f} s, if large products reach {cluster.device.reach:.0%} of "
        f"{cluster.tflops:,.1f} TFLOP/s, attention {cluster.device.attention:.0%} of {cluster.wide_tflops:,.1f}, and "
        f"{cluster.overlap:.0%} of what can be hidden in a node is, and {cluster.overlap_between:.0%} between nodes"
    )
    taken = [(part, each) for part, each in asdict(time).items() if part in parts and each]
    values = [(part, each, each / time.total) for part, each in (*taken, ("total", time.total))]
    yield table({"of it": "", "s": ",.3f", "share": ".1%"}, values)
    yield (
        f"  {time.tokens_per_second:,.0f} tokens/s, {time.tflops_per_device:,.1f} TFLOP/s on each rank, "
        f"MFU {time.tflops_per_device / cluster.tflops:.1%}"
    )


def _beside(x: Overheads) -> Iterator[str]:
    start, save, resume, data, connections = x.start, x.save, x.resume, x.data, x.connections
    yield (
        f"Beside the steps, on {x.nodes:,} node{'s' * (x.nodes > 1)}, if the storage reaches {gb(x.storage.total)} "
        f"GB/s in all and {gb(x.storage.per_node)} GB/s for a node"
    )
    took = "" if start.seconds is None else f", {start.seconds:,.0f} s (an order of magnitude)"
    each = "" if save.interval is None else f"; one is due every {save.interval:,.0f} s"
    rows = [
        (
            "start",
            f"{start.calls} calls that make groups; a rank is in {start.groups}, of up to {start.largest:,}{took}",
        ),
        (
            "save",
            f"{gb(save.size)} GB in {save.files:,} files by {save.writers:,} ranks on {save.nodes:,} nodes, at most "
            f"{gb(save.busiest)} GB of a rank and {gb(save.busiest_node)} GB of a node: {save.seconds:,.1f} s{each}",
        ),
        (
            "memory",
            "no checkpoints are kept there (recovery.memory)"
            if x.in_memory is None
            else f"{gb(x.in_memory)} GB of a node's memory for checkpoints there, a copy of the state among them",
        ),
        (
            "resume",
            f"{gb(resume.read)} GB are read, {resume.read / resume.size:.2f} times what there is, at most "
            f"{gb(resume.busiest)} GB by a rank, and {gb(resume.received)} GB sent to it: {resume.seconds:,.1f} s",
        ),
        (
            "data",
            "of examples: known when they are prepared"
            if data is None
            else f"{_mb(data.order)} MB of host memory in each rank for the order of samples, {_mb(data.batches)} for "
            "batches ahead",
        ),
        (
            "sockets",
            f"up to {connections.sockets:,} of a rank to others on the host; {connections.files:,} files open at the "
            f"most, where the soft limit is {connections.soft:,} and the hard one {connections.hard:,} here",
        ),
    ]
    for what, said in rows:
        yield f"  {what:<8}{said}"


def _survival(x: Survival) -> Iterator[str]:
    yield (
        f"Goodput, the share of the time that goes into steps that count, if a node is faulty every "
        f"{x.node_s / DAY_S:,.1f} days (--mtbf)"
    )
    if x.share is not None:
        where = "in memory" if x.in_memory else "on disk"
        yield f"  {x.share:.2%} with one checkpoint {where} every {x.interval:,.0f} s, which takes {x.stall:,.2f} s"
    yield f"  {x.best_share:.2%} from disk alone with one every {x.best_interval:,.0f} s, the best interval (Daly)"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}"


def _show_fit(
    candidates: Sequence[Candidate], best: int, config: Config, world: int, name: str, cluster: Cluster, as_json: bool
) -> None:
    if as_json:
        data = [
            {
                "overrides": overrides(each, config),
                "memory": [asdict(m) | {"peak": m.peak} for m in each.memory],
                "time": each.time.as_data(cluster),
                "behind": each.time.behind(candidates[0].time) if each is not candidates[0] else None,
            }
            for each in candidates[:best]
        ]
        say_data(data, indent=2)
        return
    if not candidates:
        say(
            f"Nothing fits {world} x {name}: take more nodes, set memory.loss_chunk, or choose a "
            "batch.global_size that divides over the ranks"
        )
        return
    say(f"What fits {world} x {name} less {MARGIN:.0%} of memory, estimated fastest first")
    rows = [
        (
            *(each.time.total, each.time.tflops_per_device / cluster.tflops, each.fullest.peak / 1e9),
            " ".join(f"{key}={value}" for key, value in overrides(each, config).items()),
        )
        for each in candidates[:best]
    ]
    say(table({"s": ",.2f", "MFU": ".1%", "GB": ",.2f", "overrides": ""}, rows))
    say(_why(candidates, config, cluster))


def _why(candidates: Sequence[Candidate], config: Config, cluster: Cluster) -> str:
    """Return why the first one, what the next best loses, and of which peak the MFU is."""
    found, *others = candidates
    own = overrides(found, config)
    sizes = " ".join(f"{key}={own[f'mesh.{key}']}" for key in ("tp", "pp", "dp", "cp", "ep") if f"mesh.{key}" in own)
    next_best = "no other was found"
    if others:
        keys = {key: value for key, value in overrides(others[0], config).items() if value != own.get(key)}
        spelled_out = " ".join(f"{key}={value}" for key, value in keys.items())
        next_best = f"the next best, with {spelled_out}, {others[0].time.behind(found.time)}"
    return (
        f"{sizes} is estimated the fastest that fits: {next_best}; the MFU of "
        f"{found.time.tflops_per_device / cluster.tflops:.1%} is of {cluster.peak}."
    )
