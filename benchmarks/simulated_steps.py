"""Steps of whole runs on simulated GPUs, with nothing measured: the table of docs/performance.md, and with other names
some of its rows.

    python benchmarks/simulated_steps.py                    # all
    python benchmarks/simulated_steps.py "8B, tp=8"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacore.planning.run_plan import Plan, cluster_of
from megacore.planning.trace.run import trace
from megacore.recipe import load
from megacore.tools.plan_trace import assumed
from megacore.tools.tables import table

GPU = "h100-80"
COMMON = "data.train=corpus data.sequence_length={length} train.precision=bf16 train.device=cuda"
RUNS: Mapping[str, str] = {
    "1B, one GPU": "model.preset=llama-3.2-1b batch.global_size=16",
    "8B, ZeRO-3 on 8": "model.preset=llama-3.1-8b mesh.dp=8 zero.shard=parameters batch.global_size=128",
    "8B, ZeRO-3 on 8, fp8": (
        "model.preset=llama-3.1-8b mesh.dp=8 zero.shard=parameters batch.global_size=128 train.precision=fp8"
    ),
    "8B, tp=8": "model.preset=llama-3.1-8b mesh.tp=8 batch.global_size=128",
    "8B, tp=8, async": "model.preset=llama-3.1-8b mesh.tp=8 batch.global_size=128 train.async_tp=true",
    "Mixtral 8x7B, ep=8": "model.preset=mixtral-8x7b mesh.ep=8 zero.shard=optimizer batch.global_size=128",
    "70B, tp=8 pp=4 dp=2": (
        "model.preset=llama-3.1-70b mesh.tp=8 mesh.pp=4 mesh.dp=2 pipeline.schedule=interleaved pipeline.chunks=5 "
        "batch.global_size=128"
    ),
    "70B, tp=8 pp=4 dp=2, async": (
        "model.preset=llama-3.1-70b mesh.tp=8 mesh.pp=4 mesh.dp=2 pipeline.schedule=interleaved pipeline.chunks=5 "
        "batch.global_size=128 train.async_tp=true"
    ),
}
"""{run: what its recipe says}, of sequences of 8,192 tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="some of the runs; all without")
    names = parser.parse_args().runs or list(RUNS)
    if unknown := set(names) - set(RUNS):
        parser.error(f"no run is called {', '.join(sorted(unknown))}: there are {', '.join(RUNS)}")
    rows = []
    for name in names:
        config = load({}, [*COMMON.format(length=8192).split(), *RUNS[name].split()])
        cluster = cluster_of(GPU, config.train.precision, None, {})
        planned, found = Plan.of(config, cluster, False), trace(config, cluster)
        slowest = max(found.stages, key=lambda each: each.own)
        rows.append(
            (
                name,
                f"{found.seconds:,.2f}",
                f"{planned.time.total:,.2f}",
                f"{found.mfu:.1%}",
                f"{slowest.exposed:,.2f}",
                f"{slowest.host:,.2f}",
                f"{slowest.waits:,.2f}",
                f"{slowest.launches / found.microbatches[0]:,.0f}",
                f"{max(each.peak for each in found.stages) / 1e9:,.1f}",
                f"{planned.fullest.peak / 1e9:,.1f}",
            )
        )
        print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
    head = ("", "s", "plan, s", "MFU", "exposed", "host gaps", "waits", "launches", "GB", "plan, GB")
    print(f"Simulated, not measured: steps on {GPU}, the slowest stage, launches of a microbatch")
    print(table(head, rows))
    print(assumed(cluster_of(GPU, "bf16", None, {})))


if __name__ == "__main__":
    main()
