"""Training steps on the CPU, this project beside its peers, in one interleaved run.

    python benchmarks/train_step.py [--dtypes bf16 fp32] [--rounds 3] [--json results.json]
    python benchmarks/train_step.py --setup                      # makes the environments of the peers, with pip

Everyone trains the LLaMA of `workload.py` on the same tokens, with gradient clipping at 1.0, fused AdamW, and
parameters, gradients and optimizer state in the named dtype. Each run is a process of its own: warm-up steps, then
counted steps; runs of all modes take turns, and one of them, the anchor, runs again every few runs, so that a drift of
the machine shows.

The peers' scripts lie outside of this repository (`--peers`, by default ../shared/peers beside it); where they or an
environment are not found, those rows are skipped and said to be.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import interleaved, workload
from benchmarks.interleaved import CORES, Group, Job, Machine, Mode, Row

ROOT = Path(__file__).resolve().parent.parent
ONE, TP, PP, DP = Group("1 process", 1), Group("tp=2", 2), Group("pp=2", 2), Group("dp=2", 2)
GROUPS = (ONE, TP, PP, DP)

UPCAST = "all logits are upcast to fp32"
OWN_LOSS = "its own vocab-parallel cross entropy, in fp32"

OURS = (
    Mode("megacore", ONE, "ours", "ours.py", "eager"),
    Mode("megacore compiled", ONE, "ours", "ours.py", "compile", "blocks are compiled, the head is not"),
    Mode("megacore tp", TP, "ours", "ours.py", "tp", "sequence parallel, as always here"),
    Mode("megacore pp", PP, "ours", "ours.py", "pp"),
    Mode("megacore dp", DP, "ours", "ours.py", "dp"),
)
PEERS = (
    Mode("Hugging Face", ONE, "hf", "hf_llama.py", "eager", UPCAST),
    Mode("Hugging Face compiled", ONE, "hf", "hf_llama.py", "compile", f"the whole model is compiled; {UPCAST}"),
    Mode("litgpt", ONE, "litgpt", "lit.py", "eager", "cross entropy in the dtype of the logits"),
    Mode("litgpt compiled", ONE, "litgpt", "lit.py", "compile", "cross entropy in the dtype of the logits"),
    Mode("megatron-core", ONE, "mcore", "mcore.py", "w1", OWN_LOSS),
    Mode("megatron-core tp", TP, "mcore", "mcore.py", "tp", OWN_LOSS),
    Mode("megatron-core tp+sp", TP, "mcore", "mcore.py", "sp", f"sequence parallel; {OWN_LOSS}"),
    Mode("DTensor tp", TP, "hf", "hf_llama.py", "tp", f"transformers' LLaMA; logits are gathered; {UPCAST}"),
    Mode("megatron-core pp", PP, "mcore", "mcore.py", "pp", OWN_LOSS),
    Mode("DDP", DP, "hf", "hf_llama.py", "ddp", f"transformers' LLaMA; {UPCAST}"),
    Mode("FSDP2", DP, "hf", "hf_llama.py", "fsdp2", f"transformers' LLaMA, sharded; {UPCAST}"),
    Mode(
        "megatron-core dp",
        DP,
        "mcore",
        "mcore.py",
        "dp",
        f"its script leaves out the sum of the gradients, so no bar names it; {OWN_LOSS}",
    ),
)
ANCHOR = "Hugging Face"


@dataclass(frozen=True)
class Bar:
    """`ours` (the fastest of these) shall be `ratio` times as fast as the fastest of `peers`."""

    ours: tuple[str, ...]
    peers: tuple[str, ...]
    ratio: float


BARS = (
    Bar(("megacore",), ("Hugging Face",), 1.25),
    Bar(("megacore",), ("Hugging Face", "litgpt", "megatron-core"), 1.0),
    Bar(("megacore", "megacore compiled"), ("Hugging Face compiled", "litgpt compiled"), 1.0),
    Bar(("megacore tp",), ("megatron-core tp", "megatron-core tp+sp"), 1.1),
    Bar(("megacore tp",), ("DTensor tp",), 1.7),
    Bar(("megacore pp",), ("megatron-core pp",), 1.1),
    Bar(("megacore dp",), ("DDP", "FSDP2"), 1.1),
)


def gemm_tflops(machine: Machine, dtype: str) -> float:
    """The best matrix product of all cores, in TFLOP/s, in a process of its own."""
    code = (
        f"import torch; from megacore.hardware import peak_tflops; torch.set_num_threads({CORES}); "
        f"print(peak_tflops(torch.device('cpu'), torch.{ {'bf16': 'bfloat16', 'fp32': 'float32'}[dtype] }))"
    )
    done = subprocess.run(
        [str(machine.pythons["ours"]), "-c", code],
        env={**os.environ, **machine.variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def measure(machine: Machine, modes: Sequence[Mode], job: Job, rounds: int, every: int) -> tuple[list[Row], float]:
    """Rows of all modes, and the machine's GEMM peak in TFLOP/s, seen in every round."""
    peaks: list[float] = []

    def look() -> None:
        peaks.append(gemm_tflops(machine, job.dtype))

    return interleaved.measure(machine, modes, job, rounds, ANCHOR, every, look), max(peaks)


def table(rows: Sequence[Row], work: workload.Workload, peak: float) -> str:
    """Markdown; `x ours` says how many times as long a peer takes as this project's eager row of its group."""
    ours = {row.mode.group: row.seconds for row in reversed(rows) if row.mode.ours and row.runs}
    lines = [
        "| | mode | s/step | min .. max | tokens/s | x ours | GEMM peak | GiB (rank 0) | first loss |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for group in GROUPS:
        for row in sorted((r for r in rows if r.mode.group == group and r.runs), key=lambda r: r.seconds):
            ratio = f"{row.seconds / ours[group]:.2f}" if group in ours else ""
            share = work.flops / row.seconds / peak / 1e12
            spread = f"{min(row.steps):.2f} .. {max(row.steps):.2f}"
            lines.append(
                f"| {group.name} | {row.mode.name} | {row.seconds:.2f} | {spread} | "
                f"{work.tokens / row.seconds:,.0f} | {ratio} | {share:.0%} | {row.gib:.2f} | {row.first_loss:.3f} |"
            )
    return "\n".join(lines)


def judged(rows: Sequence[Row]) -> str:
    """One line for each bar, of the rows that were measured."""
    seconds = {row.mode.name: row.seconds for row in rows if row.runs}
    lines = []
    for bar in BARS:
        ours = [name for name in bar.ours if name in seconds]
        peers = [name for name in bar.peers if name in seconds]
        if not ours or not peers:
            lines.append(f"- not judged: {' or '.join(bar.ours)} against {', '.join(bar.peers)}")
            continue
        best, rival = min(ours, key=seconds.__getitem__), min(peers, key=seconds.__getitem__)
        ratio = seconds[rival] / seconds[best]
        verdict = "met" if ratio >= bar.ratio else "MISSED"
        lines.append(f"- {verdict}: {best} is {ratio:.2f} times as fast as {rival} (bar: {bar.ratio})")
    return "\n".join(lines)


def main() -> None:
    parser = interleaved.parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    arguments = parser.parse_args()
    machine = interleaved.ready(arguments)
    work = workload.WORKLOADS[arguments.shape]
    modes = interleaved.available((*OURS, *PEERS), machine.peers, machine.pythons, arguments.shape, arguments.only)
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    report: dict[str, Any] = {"started": started, "machine": platform.platform(), "malloc": arguments.malloc}
    for dtype in arguments.dtypes:
        job = Job(arguments.shape, dtype, arguments.warm_up, arguments.steps)
        rows, peak = measure(machine, modes, job, arguments.rounds, arguments.anchor_every)
        print(f"\n{dtype}, malloc {arguments.malloc}: {work.flops / 1e12:.3f} TFLOP a step, GEMM {peak:.3f} TFLOP/s")
        anchor = interleaved.anchor_line(rows, ANCHOR)
        print(f"{table(rows, work, peak)}\n\n{judged(rows)}\n\n{anchor}\n", flush=True)
        report[dtype] = {"gemm_tflops": peak, "modes": {row.mode.name: row.summary() for row in rows}}
        interleaved.write(report, arguments.json)
    print("\n" + interleaved.differences(modes))


if __name__ == "__main__":
    main()
