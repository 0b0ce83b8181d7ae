"""`megacore plan --trace`: a step on simulated GPUs as tables, and as a file for https://ui.perfetto.dev."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megacore.config import Config
from megacore.planning import efficiency
from megacore.planning.run_plan import CPU, Plan
from megacore.planning.step_time import Cluster
from megacore.planning.trace.run import KINDS, StepTrace, trace
from megacore.planning.trace.timeline import StepTimeline
from megacore.recipe import ConfigError
from megacore.store.tensor_files.publish import replace_file
from megacore.tools.tables import table
from megacore.training.traces import ChromeSpan, chrome_events


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a trace."""
    parser.add_argument("--trace", action="store_true", help="run a step on simulated GPUs, by shapes alone")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="with --trace: write its timeline, a Chrome trace"
    )


def check(arguments: argparse.Namespace) -> None:
    """Refuse what a trace does not go with. Raises ConfigError: there is some of it."""
    if arguments.perfetto and not arguments.trace:
        raise ConfigError(["--perfetto belongs to --trace: give that, or leave it out"])
    if not arguments.trace:
        return
    others = {
        "--fit": arguments.fit,
        "--documents": arguments.documents,
        "--imbalance": arguments.imbalance != 1,
        f"--gpu {CPU}": arguments.gpu == CPU,
    }
    if found := [name for name, given in others.items() if given]:
        raise ConfigError([f"--trace does not go with {', '.join(found)}: leave one of them out"])


def run(arguments: argparse.Namespace, config: Config, plan: Plan, name: str) -> str:
    """Trace a step -> what is to be printed."""
    found = trace(config, plan.cluster, plan.setting.layout.mesh.world)
    if arguments.perfetto:
        replace_file(arguments.perfetto, json.dumps(chrome_trace(found.timeline)).encode())
    if arguments.json:
        return json.dumps(found.as_data() | {"planned_seconds": plan.time.total}, indent=2)
    return "\n\n".join(["\n".join(_headline(found, plan, name)), stages(found), messages(found), assumed(plan.cluster)])


def _headline(found: StepTrace, plan: Plan, name: str) -> Iterator[str]:
    mesh, (every, *traced) = plan.setting.layout.mesh, found.microbatches
    sizes = " x ".join(f"{dim}={mesh[dim]}" for dim in mesh.DIMS if mesh[dim] > 1) or "one rank"
    yield f"Simulated, not measured: {plan.setting.model.family} on {mesh.world} x {name} as {sizes}"
    yield (
        f"  a step of {every} microbatches: {found.seconds:,.3f} s ({plan.time.total:,.3f} s by the plan), "
        f"MFU {found.mfu:.1%}, {found.tokens / found.seconds:,.0f} tokens/s"
    )
    if every not in traced:
        yield f"  traced: steps of {traced[0]} and {traced[1]} microbatches; the others are like those"


def stages(found: StepTrace) -> str:
    """Return a table of the seconds of a rank of each stage."""
    seconds = dict.fromkeys((*KINDS, "exposed", "host gaps", "waits"), ",.3f")
    head = {"stage": "", "launches": ",.0f", **seconds, "GB at peak": ",.2f"}
    kinds = (*KINDS, "exposed", "host", "waits")
    rows = [
        (stage, each.launches, *(getattr(each, kind) for kind in kinds), each.peak / 1e9)
        for stage, each in enumerate(found.stages)
    ]
    return "A rank of each stage, seconds of a step; exposed: messages go, and no kernel runs\n" + table(head, rows)


def messages(found: StepTrace) -> str:
    """Return a table of the messages by axis."""
    if not found.messages:
        return "No messages"
    head = {"axis": "", "messages of": "", "number": ",.0f", "MB each": ",.2f", "s": ",.3f", "exposed s": ",.3f"}
    rows = [
        (*key, each.count, each.size / each.count / 1e6, each.seconds, each.exposed)
        for key, each in sorted(found.messages.items())
    ]
    return "Messages of the rank that has most of them\n" + table(head, rows)


def assumed(cluster: Cluster) -> str:
    """Return what the seconds rest on."""
    device = cluster.device
    return (
        f"Assumed: large products reach {device.reach:.0%} of {cluster.tflops:,.0f} TFLOP/s, attention "
        f"{device.attention:.0%},\n  memory {efficiency.MEMORY:.0%} of {device.bandwidth / 1e12:.2f} TB/s, links "
        f"{efficiency.LINKS:.0%}; kernels beside messages run at {cluster.overlap:.0%} in a node, "
        f"{cluster.overlap_between:.0%}\n  between nodes; a launch of eager Python takes "
        f"{efficiency.LAUNCH_S * 1e6:.0f} us.\n  In compiled code successive operators that multiply nothing are one "
        "kernel, the fewest there\n  could be. Not traced: recovery.checksums."
    )


def chrome_trace(timeline: StepTimeline) -> dict[str, Any]:
    """Return a timeline in the format of Chrome's traces: a process for each rank, a track for each of its streams."""
    events: list[dict[str, Any]] = []
    for rank, ran in timeline.ran.items():
        tracks = dict[str, list[ChromeSpan]]()
        for each in ran:
            given = {"place": each.launch.place, "bytes": each.launch.moved, "axis": each.axis}
            span = each.launch.name, each.kind, each.start * 1e6, each.seconds * 1e6, given
            tracks.setdefault(each.launch.stream, []).append(span)
        events += chrome_events(rank, f"rank {rank}, simulated", tracks)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
