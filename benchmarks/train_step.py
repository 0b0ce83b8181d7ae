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
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import interleaved, results, workload
from benchmarks.interleaved import CORES, Group, Job, Machine, Mode, Row
from benchmarks.results import Bar

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
    head = ("", "mode", "s/step:", "min .. max:", "tokens/s:", "x ours:", "GEMM peak:", "GiB (rank 0):", "first loss:")
    shown = []
    for group in GROUPS:
        for row in sorted((r for r in rows if r.mode.group == group and r.runs), key=lambda r: r.seconds):
            ratio = f"{row.seconds / ours[group]:.2f}" if group in ours else ""
            share = work.flops / row.seconds / peak / 1e12
            spread = f"{min(row.steps):.2f} .. {max(row.steps):.2f}"
            speed, most = f"{work.tokens / row.seconds:,.0f}", (f"{row.gib:.2f}", f"{row.first_loss:.3f}")
            shown.append((group.name, row.mode.name, f"{row.seconds:.2f}", spread, speed, ratio, f"{share:.0%}", *most))
    return results.table(head, shown)


def main() -> None:
    parser = interleaved.parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    arguments = parser.parse_args()
    machine = interleaved.ready(arguments)
    work = workload.WORKLOADS[arguments.shape]
    modes = interleaved.available((*OURS, *PEERS), machine, arguments)
    report = interleaved.heading(arguments)
    for dtype in arguments.dtypes:
        job = Job(arguments.shape, dtype, arguments.warm_up, arguments.steps)
        rows, peak = measure(machine, modes, job, arguments.rounds, arguments.anchor_every)
        print(f"\n{dtype}, malloc {arguments.malloc}: {work.flops / 1e12:.3f} TFLOP a step, GEMM {peak:.3f} TFLOP/s")
        anchor = interleaved.anchor_line(rows, ANCHOR)
        bars = results.judged(BARS, {row.mode.name: 1 / row.seconds for row in rows if row.runs})
        print(f"{table(rows, work, peak)}\n\n{bars}\n\n{anchor}\n", flush=True)
        report[dtype] = {"gemm_tflops": peak, "modes": {row.mode.name: row.summary() for row in rows}}
        results.write(report, arguments.json)
    print("\n" + interleaved.differences(modes))


if __name__ == "__main__":
    main()
