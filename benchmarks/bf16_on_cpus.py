"""Training steps in bf16 and fp32 on CPUs with and without instructions for bf16: ours beside transformers', in turns.

    python -m benchmarks.bf16_on_cpus [--threads 1 2] [--instructions native avx2 ...] [--json results.json]

The CPU is this one, of which processes may use fewer instructions. `avx2` and `avx512` are what such a CPU is: oneDNN,
MKL and torch's own loops are held to its instructions. `avx2-onednn` and `avx512-onednn` hold oneDNN alone, which is
what multiplies bf16, so that fp32 is as fast as it can be.

All train 4 layers of SmolLM2-135M on the same tokens. Ours keeps fp32 masters and gradients beside weights in bf16, as
a run does; transformers' has all in bf16. Its step in bf16 takes minutes without such instructions: it is taken once
(`--peer-rounds`), and nothing is warmed up for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import interleaved, results, steps, workload
from benchmarks.interleaved import Group, Job, Machine, Mode, Row

BAR = 1.3
"""What a step of ours in bf16 may take of one in fp32, without instructions for bf16."""

_ONEDNN, _MKL, _TORCH = "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"
INSTRUCTIONS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "avx2": {_ONEDNN: "AVX2", _MKL: "AVX2", _TORCH: "avx2"},
    "avx512": {_ONEDNN: "AVX512_CORE", _MKL: "AVX512", _TORCH: "avx512"},
    "avx2-onednn": {_ONEDNN: "AVX2"},
    "avx512-onednn": {_ONEDNN: "AVX512_CORE"},
}
"""{name: what holds a process to the instructions}."""


def modes(threads: int, clock: str) -> list[tuple[Mode, str]]:
    """Each mode with its dtype."""
    group = Group("1 process", 1, threads)
    ours = Mode("megacore", group, "ours", "ours.py", "eager", options=("--clock", clock, "--masters"))
    peer = Mode(
        "transformers", group, "hf", "hugging_face.py", "alone", "logits are upcast to fp32", ("--clock", clock)
    )
    return [(mode, dtype) for mode in (ours, peer) for dtype in ("bf16", "fp32")]


def table(rows: Mapping[tuple[str, int, str, str], Row]) -> str:
    """Markdown: medians of all counted steps; of both dtypes in a round, the median of their ratios."""
    head = ("instructions", "threads:", "", "bf16 s/step:", "fp32 s/step:", "bf16 / fp32:", "GiB bf16, fp32:")
    shown = []
    for instructions, threads, name, dtype in rows:
        narrow, wide = (rows[instructions, threads, name, each] for each in ("bf16", "fp32"))
        if dtype == "fp32" or not narrow.runs or not wide.runs:
            continue
        ratio, gib = results.over(narrow.medians, wide.medians), f"{narrow.gib:.2f}, {wide.gib:.2f}"
        numbers = (f"{each:.2f}" for each in (narrow.seconds, wide.seconds, ratio))
        shown.append((instructions, str(threads), name, *numbers, gib))
    return results.table(head, shown)


def main() -> None:
    parser = interleaved.parser(__doc__)
    parser.add_argument("--instructions", nargs="+", choices=INSTRUCTIONS, default=list(INSTRUCTIONS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--peer-rounds", type=int, default=1, help="rounds with slow steps of transformers")
    parser.add_argument("--clock", choices=steps.CLOCKS, default="wall", help="cpu: where others use the machine too")
    parser.set_defaults(shape="smollm2", warm_up=1)
    arguments = parser.parse_args()
    machine = interleaved.ready(arguments)
    rows: dict[tuple[str, int, str, str], Row] = {}
    for turn in range(arguments.rounds):
        for threads in arguments.threads:
            for instructions in arguments.instructions:
                held = Machine(machine.pythons, machine.peers, {**machine.variables, **INSTRUCTIONS[instructions]})
                for mode, dtype in modes(threads, arguments.clock):
                    slow = not mode.ours and dtype == "bf16" and instructions != "native"
                    if (slow and turn >= arguments.peer_rounds) or (arguments.only and mode.name not in arguments.only):
                        continue
                    job = Job(arguments.shape, dtype, arguments.warm_up, arguments.steps)
                    row = rows.setdefault((instructions, threads, mode.name, dtype), Row(mode))
                    what = f"{turn + 1}: {instructions} x{threads} {dtype}"
                    row.take(held, replace(job, warm_up=0, steps=1) if slow else job, what)
    print(f"\n{table(rows)}\n\n{workload.WORKLOADS[arguments.shape].tokens} tokens a step. Bar: {BAR} for megacore.")
    results.write({" ".join(map(str, key)): row.summary() for key, row in rows.items()}, arguments.json)


if __name__ == "__main__":
    main()
