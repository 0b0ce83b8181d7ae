"""How long launch/pretrain.sh takes from the command to a first word, and to a first step.

    python benchmarks/startup.py [--rounds 5] [--root FOLDER] [--json FILE]

The cases take turns. A problem is timed until the command has ended, a first step until its line stands in
metrics.jsonl. ``--root`` names another checkout, with a .venv of its own, to compare with.
"""

from __future__ import annotations

import os
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
    "first step, tp=1": ("mesh.tp=1",),
    "first step, tp=2": ("mesh.tp=2",),
}
SAID = {"a typo": "trian: unknown key", "a missing corpus": "there is no nowhere/corpus.bin"}
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


def seconds(case: str, root: Path, data: str, folder: Path) -> float:
    """From the command to what the case waits for.

    Raises:
        RuntimeError: it has ended otherwise.
    """
    out, errors = folder / "run", folder / "errors"
    shutil.rmtree(out, ignore_errors=True)
    recipe = str(root / "launch/recipes/quickstart.yaml")
    command = [str(root / "launch/pretrain.sh"), recipe, f"out={out}", f"data.train={data}", *RUN, *CASES[case]]
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
    return taken


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
    rows = [
        (case, f"{statistics.median(taken):.2f}", f"{min(taken):.2f} .. {max(taken):.2f}")
        for case, taken in times.items()
    ]
    print(results.table(("", "median s:", "min .. max:"), rows))
    results.write(times, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
