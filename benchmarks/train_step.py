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

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import environments, workload

ROOT = Path(__file__).resolve().parent.parent
ONE, TP, PP, DP = "1 process", "tp=2", "pp=2", "dp=2"
GROUPS = (ONE, TP, PP, DP)
TIMEOUT_S = 1200

UPCAST = "all logits are upcast to fp32"
OWN_LOSS = "its own vocab-parallel cross entropy, in fp32"


@dataclass(frozen=True)
class Mode:
    """One row: `script argument`, run by the interpreter of `environment` in one process, or in two if not of ONE."""

    name: str
    group: str
    environment: str
    script: str
    argument: str
    differs: str = ""

    @property
    def processes(self) -> int:
        return 1 if self.group == ONE else 2


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


@dataclass
class Row:
    """What was measured of one mode: seconds of the counted steps of each run, the first loss, memory of rank 0."""

    mode: Mode
    runs: list[list[float]] = field(default_factory=list)
    first_loss: float = float("nan")
    gib: float = 0.0
    failure: str = ""

    @property
    def seconds(self) -> float:
        """The median of all counted steps."""
        return statistics.median(s for run in self.runs for s in run)


@dataclass(frozen=True)
class Machine:
    """Where rows are run: interpreters, the folder of the peers' scripts, environment variables for all alike."""

    pythons: Mapping[str, Path]
    peers: Path
    variables: Mapping[str, str]

    def command(self, mode: Mode, dtype: str, warm_up: int, steps: int) -> list[str]:
        ours = mode in OURS
        script = [str((Path(__file__).parent if ours else self.peers) / mode.script), mode.argument]
        if ours:
            script += ["--dtype", dtype, "--threads", str(threads(mode))]
            script += ["--warm-up", str(warm_up), "--steps", str(steps)]
        python = str(self.pythons[mode.environment])
        if mode.processes == 1:
            return [python, *script]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
        return [python, *launcher, *script]

    def run(self, mode: Mode, dtype: str, warm_up: int, steps: int) -> dict[str, Any]:
        """The script's result. Raises RuntimeError with the end of its output if it has none."""
        settings = {"BDT": dtype, "NT": threads(mode), "WARM": warm_up, "N": steps, "OMP_NUM_THREADS": threads(mode)}
        variables = {**os.environ, **self.variables, **{name: str(value) for name, value in settings.items()}}
        variables |= {"LABEL": mode.name, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        done = subprocess.run(
            self.command(mode, dtype, warm_up, steps),
            env=variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                return dict(json.loads(line.removeprefix("RESULT ")))
        errors = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
        raise RuntimeError(errors[-1] if errors else f"no result, exit status {done.returncode}")


def threads(mode: Mode) -> int:
    return 2 // mode.processes


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def gemm_tflops(machine: Machine, dtype: str) -> float:
    """The best matrix product of both cores, in TFLOP/s, in a process of its own."""
    code = (
        "import torch; from megacore.hardware import peak_tflops; torch.set_num_threads(2); "
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


def with_anchor(modes: Sequence[Mode], anchor: Mode | None, every: int) -> Iterator[Mode]:
    """The modes in turn, and the anchor again after every few of them."""
    for i, mode in enumerate(modes, 1):
        yield mode
        if anchor and i % every == 0 and mode != anchor:
            yield anchor


def measure(
    machine: Machine, modes: Sequence[Mode], dtype: str, rounds: int, warm_up: int, steps: int, every: int
) -> tuple[list[Row], float]:
    """Rows of all modes, and the machine's GEMM peak in TFLOP/s, seen in every round."""
    rows = {mode: Row(mode) for mode in modes}
    anchor = next((mode for mode in modes if mode.name == ANCHOR), modes[0])
    peak = 0.0
    for turn in range(rounds):
        peak = max(peak, gemm_tflops(machine, dtype))
        for mode in with_anchor(modes, anchor, every):
            row = rows[mode]
            if row.failure:
                continue
            load = os.getloadavg()[0]
            try:
                result = machine.run(mode, dtype, warm_up, steps)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                row.failure = str(error)[-300:]
                print(f"  {dtype} round {turn + 1}: {mode.name} failed: {row.failure}", flush=True)
                continue
            row.runs.append(result["steps"])
            row.first_loss, row.gib = result["loss0"], max(row.gib, result["rss_gib"])
            shown = " ".join(f"{s:.2f}" for s in result["steps"])
            print(f"  {dtype} round {turn + 1}: {mode.name:24s} {shown} s   (load before: {load:.1f})", flush=True)
    return list(rows.values()), peak


def table(rows: Sequence[Row], peak: float) -> str:
    """Markdown; `x ours` says how many times as long a peer takes as this project's eager row of its group."""
    ours = {row.mode.group: row.seconds for row in reversed(rows) if row.mode in OURS and row.runs}
    lines = [
        "| | mode | s/step | min .. max | tokens/s | x ours | GEMM peak | GiB (rank 0) | first loss |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for group in GROUPS:
        for row in sorted((r for r in rows if r.mode.group == group and r.runs), key=lambda r: r.seconds):
            steps = [s for run in row.runs for s in run]
            ratio = f"{row.seconds / ours[group]:.2f}" if group in ours else ""
            share = workload.FLOPS / row.seconds / peak / 1e12
            lines.append(
                f"| {group} | {row.mode.name} | {row.seconds:.2f} | {min(steps):.2f} .. {max(steps):.2f} | "
                f"{workload.TOKENS / row.seconds:,.0f} | {ratio} | {share:.0%} | {row.gib:.2f} | {row.first_loss:.3f} |"
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


def anchor_line(rows: Sequence[Row]) -> str:
    row = next((row for row in rows if row.mode.name == ANCHOR and row.runs), None)
    if row is None:
        return ""
    medians = [statistics.median(run) for run in row.runs]
    return f"anchor ({ANCHOR}), median of each run in order: " + ", ".join(f"{s:.2f}" for s in medians) + " s"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=3, help="turns of all modes")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each run that are not counted")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each run")
    parser.add_argument("--anchor-every", type=int, default=5, help="runs between runs of the anchor")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="modes whose name has one of these words")
    parser.add_argument("--peers", type=Path, default=ROOT.parent / "shared" / "peers", help="folder of their scripts")
    parser.add_argument("--python", nargs="+", default=[], metavar="NAME=PATH", help="an environment's interpreter")
    parser.add_argument("--setup", action="store_true", help="make the environments of the peers and stop")
    parser.add_argument(
        "--malloc",
        choices=("heap", "default"),
        default="heap",
        help="heap: glibc keeps large allocations, as our launch scripts set it; for everyone alike",
    )
    parser.add_argument("--json", type=Path, help="where the results are written")
    arguments = parser.parse_args()
    if arguments.rounds * arguments.steps < 6 or arguments.warm_up < 2:
        print("note: fewer than 6 counted or 2 warm-up steps: good for a look, not for a record")
    return arguments


def available(peers: Path, pythons: Mapping[str, Path], only: Sequence[str] | None) -> list[Mode]:
    """The modes that can be run here; each that cannot is named with the reason."""
    chosen = []
    for mode in (*OURS, *PEERS):
        if only and not any(word.lower() in mode.name.lower() for word in only):
            continue
        if mode in PEERS and not (peers / mode.script).exists():
            print(f"skipped: {mode.name}: there is no {mode.script} in {peers}")
        elif mode.environment not in pythons:
            print(f"skipped: {mode.name}: no environment {mode.environment!r} (--setup makes it, --python names it)")
        else:
            chosen.append(mode)
    return chosen


def main() -> None:
    arguments = parse()
    if arguments.setup:
        environments.set_up()
        return
    given = {name: Path(path) for name, path in (pair.split("=", 1) for pair in arguments.python)}
    pythons = environments.find(given)
    modes = available(arguments.peers, pythons, arguments.only)
    machine = Machine(pythons, arguments.peers, workload.HEAP if arguments.malloc == "heap" else {})
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    report: dict[str, Any] = {"started": started, "machine": platform.platform(), "malloc": arguments.malloc}
    for dtype in arguments.dtypes:
        rows, peak = measure(
            machine, modes, dtype, arguments.rounds, arguments.warm_up, arguments.steps, arguments.anchor_every
        )
        print(
            f"\n{dtype}, malloc {arguments.malloc}: {workload.FLOPS / 1e12:.3f} TFLOP a step, GEMM {peak:.3f} TFLOP/s"
        )
        print(f"{table(rows, peak)}\n\n{judged(rows)}\n\n{anchor_line(rows)}\n", flush=True)
        report[dtype] = {"gemm_tflops": peak, "modes": {row.mode.name: summary(row) for row in rows}}
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print("\nWhere the work differs: " + "; ".join(f"{m.name}: {m.differs}" for m in modes if m.differs))


def summary(row: Row) -> dict[str, Any]:
    if not row.runs:
        return {"group": row.mode.group, "failure": row.failure}
    return {
        "group": row.mode.group,
        "differs": row.mode.differs,
        "median_s": row.seconds,
        "runs_s": row.runs,
        "first_loss": row.first_loss,
        "gib": row.gib,
        "failure": row.failure,
    }


if __name__ == "__main__":
    main()
