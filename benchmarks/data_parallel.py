"""The ladder of data parallelism on two ranks of a CPU: ours beside torch and DeepSpeed, in one interleaved run.

    python benchmarks/data_parallel.py [--rounds 3] [--json results.json]
    python benchmarks/data_parallel.py --setup                   # makes the environments of the peers, with pip
    python benchmarks/data_parallel.py --shape tiny --rounds 1 --only megacore DDP FSDP2     # that it runs

Everyone trains the LLaMA of `workload.py` on the same tokens, each rank on its half of them, with clipping at 1.0,
fused AdamW, and bf16 parameters, gradients and optimizer state; DeepSpeed alone keeps fp32 masters and moments, so
beside our rungs there are those with masters. Each run is two processes, with half of the cores each: warm-up steps,
then counted ones. Runs take turns, and one of them, the anchor, runs again every few runs.

Memory is the peak of rank 0's resident memory less that of a process which imports the same and has the same process
group, but no model. The scripts of torch's modes lie here, DeepSpeed's outside of this repository (`--peers`, by
default ../shared/peers beside it); where it or an environment is not found, those rows are skipped and said to be.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import interleaved, results
from benchmarks.interleaved import Group, Job, Machine, Mode, Row
from benchmarks.results import Bar

RANKS = 2
NONE, OPTIMIZER, GRADIENTS, PARAMETERS = RUNGS = tuple(
    Group(name, RANKS) for name in ("none", "optimizer", "gradients", "parameters")
)

LLAMA = "transformers' LLaMA, all logits are upcast to fp32"
DEEPSPEED = f"{LLAMA}; fp32 masters and moments; the loss is rank 0's own"
MASTERS = "fp32 gradients, masters and moments"

MODES = (
    Mode("megacore none", NONE, "ours", "ours.py", "dp"),
    Mode("DDP", NONE, "hf", "hugging_face.py", "ddp", LLAMA),
    Mode("megacore optimizer", OPTIMIZER, "ours", "ours.py", "zero1"),
    Mode("megacore optimizer, masters", OPTIMIZER, "ours", "ours.py", "zero1", MASTERS, ("--masters",)),
    Mode("DeepSpeed 1", OPTIMIZER, "deepspeed", "deepspeed_zero.py", "1", DEEPSPEED),
    Mode("megacore gradients", GRADIENTS, "ours", "ours.py", "zero2"),
    Mode("megacore gradients, masters", GRADIENTS, "ours", "ours.py", "zero2", MASTERS, ("--masters",)),
    Mode("FSDP2, not resharded", GRADIENTS, "hf", "hugging_face.py", "fsdp2-keeps", LLAMA),
    Mode("DeepSpeed 2", GRADIENTS, "deepspeed", "deepspeed_zero.py", "2", DEEPSPEED),
    Mode("megacore parameters", PARAMETERS, "ours", "ours.py", "zero3"),
    Mode("megacore parameters, masters", PARAMETERS, "ours", "ours.py", "zero3", MASTERS, ("--masters",)),
    Mode("FSDP2", PARAMETERS, "hf", "hugging_face.py", "fsdp2", LLAMA),
    Mode("DeepSpeed 3", PARAMETERS, "deepspeed", "deepspeed_zero.py", "3", DEEPSPEED),
)
ANCHOR = "DDP"
AT_MOST = 0.95
"""The part of the time of the fastest peer on it that a rung shall take at the most."""
RIVALS: Mapping[str, tuple[str, ...]] = {
    "megacore none": ("DDP",),
    "megacore optimizer": ("DeepSpeed 1",),
    "megacore gradients": ("FSDP2, not resharded", "DeepSpeed 2"),
    "megacore parameters": ("FSDP2", "DeepSpeed 3"),
    # As DeepSpeed does it.
    "megacore optimizer, masters": ("DeepSpeed 1",),
    "megacore gradients, masters": ("DeepSpeed 2",),
    "megacore parameters, masters": ("DeepSpeed 3",),
}
BARS = [Bar((ours,), peers, 1 / AT_MOST) for ours, peers in RIVALS.items()]

SAME_FIRST, SAME_FALL = 0.05, 0.25
"""How far a first loss, and relatively how far what the loss falls by, may lie from the median of all."""


def baselines(machine: Machine, modes: Sequence[Mode], job: Job) -> dict[str, float]:
    """{environment: GiB of a process without a model}, of those environments that run one."""
    group, found = Group("baseline", RANKS), dict[str, float]()
    for environment in dict.fromkeys(mode.environment for mode in modes):
        mode = Mode(f"baseline {environment}", group, environment, "baseline.py", environment)
        try:
            found[environment] = machine.run(mode, job)["rss_gib"]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"  no baseline of {environment}: {str(error)[-300:]}")
    return found


def table(rows: Sequence[Row], bases: Mapping[str, float]) -> str:
    """Markdown; `x ours` is a time over that of our plain row of the rung, `x none` over the same one's rung none."""
    good = [row for row in rows if row.runs]
    ours = {row.mode.group: row.seconds for row in good if row.mode.ours and not row.mode.options}
    none = {row.mode.environment: row.seconds for row in good if row.mode.group == NONE}
    numbers = ("s/step:", "min .. max:", "x ours:", "x none:", "MiB above no model:", "loss, first .. last:")
    shown = []
    for rung in RUNGS:
        for row in sorted((row for row in good if row.mode.group == rung), key=lambda row: row.seconds):
            base = bases.get(row.mode.environment)
            cells = (
                rung.name,
                row.mode.name,
                f"{row.seconds:.2f}",
                f"{min(row.steps):.2f} .. {max(row.steps):.2f}",
                _over(row.seconds, ours.get(rung)),
                _over(row.seconds, none.get(row.mode.environment)),
                "" if base is None else f"{(row.gib - base) * 1024:,.0f}",
                f"{row.first_loss:.3f} .. {row.last_loss:.3f}",
            )
            shown.append(cells)
    return results.table(("rung", "mode", *numbers), shown)


def _over(seconds: float, other: float | None) -> str:
    return "" if other is None else f"{seconds / other:.2f}"


def strangers(rows: Sequence[Row]) -> list[str]:
    """Those whose losses say that they train something else, one line each."""
    good = [row for row in rows if row.runs]
    numbers = [row for row in good if math.isfinite(row.first_loss + row.last_loss)] or good
    if not numbers:
        return []
    first = statistics.median(row.first_loss for row in numbers)
    fall = statistics.median(row.first_loss - row.last_loss for row in numbers)
    return [
        f"- DIFFERS: {row.mode.name} begins at {row.first_loss:.3f} and falls by {row.first_loss - row.last_loss:.3f}, "
        f"where the median begins at {first:.3f} and falls by {fall:.3f}"
        for row in good
        if not (
            abs(row.first_loss - first) <= SAME_FIRST
            and abs(row.first_loss - row.last_loss - fall) <= SAME_FALL * abs(fall)
        )
    ]


def main() -> None:
    arguments = interleaved.parser(__doc__).parse_args()
    machine = interleaved.ready(arguments)
    modes = interleaved.available(MODES, machine, arguments)
    report = interleaved.heading(arguments)
    job = Job(arguments.shape, "bf16", arguments.warm_up, arguments.steps)
    bases = baselines(machine, modes, job)
    rows = interleaved.measure(machine, modes, job, arguments.rounds, ANCHOR, arguments.anchor_every)
    same = "\n".join(strangers(rows)) or "- the same work: all losses begin alike and fall alike"
    bars = results.judged(BARS, {row.mode.name: 1 / row.seconds for row in rows if row.runs})
    print(f"\n{table(rows, bases)}\n\n{bars}\n{same}\n\n{interleaved.anchor_line(rows, ANCHOR)}\n")
    print("without a model: " + ", ".join(f"{name} {gib * 1024:,.0f} MiB" for name, gib in bases.items()))
    print(interleaved.differences(modes))
    report |= {"without_a_model_gib": bases, "modes": {row.mode.name: row.summary() for row in rows}}
    results.write(report, arguments.json)


if __name__ == "__main__":
    main()
