"""How long launch/pretrain.sh takes from the command to a first word, and to a first step; and launch/finetune.sh to
what is wrong with a recipe.

    python benchmarks/startup.py [--rounds 5] [--root FOLDER] [--json FILE]

The cases take turns. A problem is timed until the command has ended, in seconds of the clock and of CPU, a first step
until its line stands in metrics.jsonl. ``--root`` names another checkout, with a .venv of its own, to compare with.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results

ROOT = Path(__file__).resolve().parent.parent
CASES: Mapping[str, Sequence[str]] = {
    "a typo": ("trian.steps=3",),
    "a missing corpus": ("data.train=nowhere/corpus",),
    "finetuning: a typo": ("trian.steps=3",),
    "finetuning: a wrong value": ("optimizer.lr=0",),
    "finetuning: a bad line": (),
    "first step, tp=1": ("mesh.tp=1",),
    "first step, tp=2": ("mesh.tp=2",),
}
SAID = {
    "a typo": "trian: unknown key",
    "a missing corpus": "there is no nowhere/corpus.bin",
    "finetuning: a typo": "trian: unknown key",
    "finetuning: a wrong value": "optimizer.lr (0.0)",
    "finetuning: a bad line": "line 1000: text is a int",
}
RUN = (
    "model.hidden_size=64",
    "model.intermediate_size=176",
    "model.vocab_size=512",
    "mesh.pp=1",
    "data.sequence_length=64",
    "schedule.warmup_steps=1",
    "evaluate.every=0",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "log.peak_tflops=1",
    "train.steps=100000",
)
"""A tiny model on the recipe of launch/quickstart.sh, whose steps are over at once."""
LIMIT_S = 300


def corpus(folder: Path) -> str:
    """Token files of the project's own pages -> their prefix."""
    command = ["-m", "megacore", "tokenize", "docs", "--out", str(folder), "--name", "pages", "--train-vocab", "512"]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return str(folder / "pages")


def rows(folder: Path) -> str:
    """A file of a thousand texts, whose last one is none -> its path."""
    texts = [json.dumps({"text": "some words of a text " * 20})] * 999
    (folder / "rows.jsonl").write_text("\n".join([*texts, json.dumps({"text": 3})]))
    return str(folder / "rows.jsonl")


def seconds(case: str, root: Path, data: str, folder: Path) -> tuple[float, float]:
    """From the command to what the case waits for, and of CPU.

    Raises:
        RuntimeError: it has ended otherwise.
    """
    out, errors = folder / "run", folder / "errors"
    shutil.rmtree(out, ignore_errors=True)
    script, name, given = "pretrain", "quickstart", [f"data.train={data}", *RUN]
    if case.startswith("finetuning"):
        script, name, given = "finetune", "finetune", [f"data.train={rows(folder)}", "model.preset=llama-tiny"]
    recipe, before = str(root / f"launch/recipes/{name}.yaml"), _cpu()
    command = [str(root / f"launch/{script}.sh"), recipe, f"out={out}", *given, *CASES[case]]
    with errors.open("wb") as said:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, start_new_session=True)
        try:
            while process.poll() is None and not (case not in SAID and _has_line(out / "metrics.jsonl")):
                if time.perf_counter() - started > LIMIT_S:
                    raise RuntimeError(f"{case}: nothing within {LIMIT_S} s")
                time.sleep(0.005)
            taken = time.perf_counter() - started
            ended = process.poll() is not None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    text = errors.read_text("utf-8", errors="replace")
    if ended != (case in SAID) or SAID.get(case, "") not in text:
        raise RuntimeError(f"{case}: {text[-2000:]}")
    return taken, _cpu() - before


def _cpu() -> float:
    """The seconds of CPU of the processes that have ended below this one."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _has_line(path: Path) -> bool:
    return path.exists() and b"\n" in path.read_bytes()


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of all cases (5)")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="the checkout that is started")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        data = corpus(folder / "data")
        ways = {case: partial(seconds, case, arguments.root.resolve(), data, folder) for case in CASES}
        times = results.in_turns(ways, arguments.rounds, warm_up=0)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores\n")
    lines = []
    for case, both in times.items():
        walls, spent = [wall for wall, _ in both], [cpu for _, cpu in both]
        told = f"{statistics.median(spent):.2f}" if case in SAID else ""
        lines.append((case, f"{statistics.median(walls):.2f}", f"{min(walls):.2f} .. {max(walls):.2f}", told))
    print(results.table(("", "median s:", "min .. max:", "median s of CPU:"), lines))
    results.write(times, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
