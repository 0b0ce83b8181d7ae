"""Whole training steps of a small model with experts: ours beside transformers', and ep=2 beside dp=2, in turns.

    python -m benchmarks.experts_steps [--shape mixtral] [--dtypes bf16 fp32] [--rounds 3] [--json results.json]

All take the same steps as those of `train_step.py`, on a model of `workload.py` that has experts; each process has one
thread. With ep=2 each of two ranks holds half of the experts, and the tokens of both go to them; with dp=2 each holds
all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import interleaved, results, workload
from benchmarks.interleaved import Group, Job, Mode, Row

ALONE, TWO = Group("1 process", 1, each=1), Group("2 processes", 2, each=1)
UPCAST = "logits are upcast to fp32"
MODES = (
    Mode("megacore", ALONE, "ours", "ours.py", "eager"),
    Mode("transformers", ALONE, "hf", "hugging_face.py", "alone", UPCAST),
    Mode("megacore ep", TWO, "ours", "ours.py", "ep"),
    Mode("megacore dp", TWO, "ours", "ours.py", "dp"),
)
BARS = (("megacore", "transformers", 1.0), ("megacore ep", "megacore dp", 1.1))
"""(ours, the other, what ours may take of its time)."""


def report(dtype: str, rows: list[Row]) -> dict[str, Any]:
    found = {row.mode.name: row for row in rows if row.runs}
    print(f"\n{dtype}: s/step, first and last loss")
    for name, row in found.items():
        print(f"  {name:14s} {row.seconds:6.3f}   {row.first_loss:.4f} {row.last_loss:.4f}")
    for ours, other, bar in BARS:
        if {ours, other} <= found.keys():
            ratio = results.over(found[ours].medians, found[other].medians)
            print(f"  bar: {ours} {ratio:.3f} x {other} <= {bar}: {ratio <= bar}")
    return {name: row.summary() for name, row in found.items()}


def main() -> None:
    parser = interleaved.parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.set_defaults(shape="mixtral")
    arguments = parser.parse_args()
    machine = interleaved.ready(arguments)
    reports, modes = {}, interleaved.available(MODES, machine, arguments)
    for dtype in arguments.dtypes:
        job = Job(arguments.shape, dtype, arguments.warm_up, arguments.steps)
        rows = interleaved.measure(machine, modes, job, arguments.rounds, "", len(MODES))
        reports[dtype] = report(dtype, rows)
    print(f"\n{workload.WORKLOADS[arguments.shape].tokens} tokens a step. {interleaved.differences(MODES)}")
    results.write(reports, arguments.json)


if __name__ == "__main__":
    main()
