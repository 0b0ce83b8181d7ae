"""What the end of a rank costs a run: replaced in place, started again from a checkpoint, and by torchrun.

    python benchmarks/recovery.py [--faults 20] [--ranks 2] [--steps 400] [--json results.json] [section.key=value ...]
    python benchmarks/recovery.py --protection [--rounds 8] [--json results.json] [section.key=value ...]

Each way trains the same small model on the same data, its ranks are killed (SIGKILL) one after the other at the same
steps, and the ways take turns. Prints, for each way, the seconds from a kill to the next record of a step that was not
done before (median and worst), the steps that were done twice, the seconds of the whole run, and whether the last
checkpoint is that of a run that nothing befell, byte for byte.

With ``--protection``: what all of it costs where nothing befalls a run. The quickstart's model trains on two ranks with
beats, the hang watch, a process in reserve, replicas compared and copies in peers' memory, and by torchrun without all
of them. Both runs are there at once; in each round one stands still (SIGSTOP) while the other does its steps, and then
the other way round.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import yaml

from megacore.data.indexed import IndexedWriter
from megacore.run.launch import VARIABLES

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, LENGTH = 512, 64
RECIPE = {
    "model": {
        "family": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
    },
    "data": {"sequence_length": LENGTH},
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"lr": 1e-3},
    "train": {"precision": "fp32", "device": "cpu"},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 20, "at_end": True},
    "recovery": {"max_restarts": 1000, "max_recoveries": 1000},
    "log": {"peak_tflops": 1.0},
}
LIMIT_S = 900.0
PROTECTIONS: Mapping[str, Sequence[str]] = {
    "replicas compared": ("mesh.tp=1", "mesh.pp=1", "mesh.dp=2"),
    "peers' copies": ("mesh.tp=1", "mesh.pp=1", "mesh.dp=2", "zero.shard=optimizer"),
}
"""{what is on beside beats and the hang watch: the layout that has it}."""
SLICE = 8
"""Steps that a run does before the other one's turn; the first two, across the stop, are not counted."""
ON, OFF = ("recovery.compare_every=20",), ("recovery.compare_every=0", "recovery.in_place=false")


@dataclass(frozen=True)
class Found:
    """What one run has cost.

    Args:
        seconds: From each kill to the next record of a new step.
        again: Steps that were done twice.
        whole_s: The seconds of the run.
        same: Whether its last checkpoint is that of the undisturbed run; None for that run.
        status: The exit status.
    """

    seconds: Sequence[float]
    again: int
    whole_s: float
    same: bool | None
    status: int


def command(way: str, ranks: int, given: Sequence[str]) -> list[str]:
    if way == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        return [*torchrun, "--max-restarts", "1000", "-m", "megacore.run.train", *given]
    return [sys.executable, "-m", "tools.main", "train", *given, f"recovery.in_place={str(way != 'restart').lower()}"]


def last_step(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    lines = metrics.read_bytes().splitlines()
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):  # just being written
            continue
    return 0


def descendants(parent: int) -> list[int]:
    """Return the processes below another one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, open_ones = list[int](), [parent]
    while open_ones:
        new = children.get(open_ones.pop(), [])
        open_ones += new
        found += new
    return sorted(found)


def victim(parent: int, rank: int) -> int | None:
    """Return the process of a rank among the descendants of another one.

    In the folder of a launcher ``rank-N`` names the file that the rank maps; under torchrun the environment tells.
    """
    for process in descendants(parent):
        try:
            mapped = Path(f"/proc/{process}/maps").read_text()
            environment = dict(
                each.partition("=")[::2] for each in Path(f"/proc/{process}/environ").read_text().split("\0")
            )
        except OSError:
            continue
        beat = re.search(r"/\S*/beat-\d+$", mapped, re.MULTILINE)
        if beat is not None and os.path.realpath(Path(beat[0]).with_name(f"rank-{rank}")) == beat[0]:
            return process
        if "MEGACORE_BEAT" not in environment and environment.get("RANK") == str(rank):
            return process
    return None


@dataclass
class Paused:
    """A run that stands still but for its turns.

    Args:
        way: The way it is started.
        out: Its folder.
        given: The recipe and its overrides.
    """

    way: str
    out: Path
    given: Sequence[str]

    def __post_init__(self) -> None:
        own = {"NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.log = (self.out.parent / f"{self.out.name}.log").open("w")
        given = [*self.given, f"out={self.out}"]
        self.process = subprocess.Popen(
            command(self.way, 2, given), env=os.environ | VARIABLES | own, cwd=ROOT, stdout=self.log, stderr=self.log
        )
        self.turn(0)

    def turn(self, steps: int) -> list[float]:
        """Let it do so many steps and two more -> the seconds of those."""
        self._signal(signal.SIGCONT)
        first = last_step(self.out / "metrics.jsonl") + 2
        deadline = time.monotonic() + LIMIT_S
        while last_step(self.out / "metrics.jsonl") < first + steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.way}: it does not train\n{Path(self.log.name).read_text()[-2000:]}")
            time.sleep(0.01)
        self._signal(signal.SIGSTOP)
        lines = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return [line["seconds_per_step"] for line in lines if first < line["step"] <= first + steps]

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def _signal(self, number: int) -> None:
        for process in (self.process.pid, *descendants(self.process.pid)):
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue


def protect(folder: Path, rounds: int, overrides: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Return {what is on: {"on" or "off": the seconds of steps}}."""
    recipe = yaml.safe_load((ROOT / "launch" / "recipes" / "quickstart.yaml").read_text())
    write_corpus(folder / "corpus", recipe["model"]["vocab_size"], 2000)
    recipe["data"]["train"] = str(folder / "corpus")
    path = folder / "quickstart.yaml"
    path.write_text(yaml.safe_dump(recipe))
    common = ["train.steps=100000", "evaluate.every=0", "checkpoint.at_end=false", "log.peak_tflops=1", *overrides]
    found: dict[str, dict[str, list[float]]] = {}
    for number, (name, layout) in enumerate(PROTECTIONS.items()):
        ways = {"on": ("in place", ON), "off": ("torchrun", OFF)}
        runs = dict[str, Paused]()
        try:
            for way, (started, recovery) in ways.items():
                given = [str(path), *common, *layout, *recovery]
                runs[way] = Paused(started, folder / f"{way}-{number}", given)
            seconds = found[name] = {way: [] for way in ways}
            for turn in range(rounds):
                for way in (*ways,) if turn % 2 else (*reversed(ways),):
                    seconds[way] += runs[way].turn(SLICE)
        finally:
            for run in runs.values():
                run.end()
        print(f"{name}: {cost(seconds)}", flush=True)
    return found


def cost(seconds: Mapping[str, Sequence[float]]) -> str:
    on, off = seconds["on"], seconds["off"]
    medians, means = ([how(each) for each in (on, off)] for how in (statistics.median, statistics.fmean))
    return (
        f"a step of {medians[0]:.4f} s on, {medians[1]:.4f} s off: {medians[0] / medians[1] - 1:+.2%} (medians of "
        f"{len(on)} and {len(off)} steps; means {means[0] / means[1] - 1:+.2%})"
    )


def train(
    way: str, recipe: Path, out: Path, ranks: int, overrides: Sequence[str], kills: Sequence[tuple[int, int]]
) -> Found:
    """Train under a schedule of (step, rank to kill once it is done)."""
    environment = os.environ | {"NPROC_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    began, seconds, again = time.monotonic(), list[float](), 0
    with (out.parent / f"{out.name}.log").open("w") as log:
        run = subprocess.Popen(
            command(way, ranks, [str(recipe), f"out={out}", *overrides]),
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
        try:
            for step, rank in kills:
                while (done := last_step(out / "metrics.jsonl")) < step and run.poll() is None:
                    time.sleep(0.002)
                if run.poll() is not None or (process := victim(run.pid, rank)) is None:
                    break
                os.kill(process, signal.SIGKILL)
                killed, least = time.monotonic(), done
                done = last_step(out / "metrics.jsonl")
                while (now := last_step(out / "metrics.jsonl")) <= done and run.poll() is None:
                    least = min(least, now)
                    time.sleep(0.002)
                seconds.append(time.monotonic() - killed)
                again += max(0, done - least)
            status = run.wait(LIMIT_S)
        finally:
            run.kill()
            run.wait()
    return Found(seconds, again, time.monotonic() - began, None, status)


def same(one: Path, other: Path) -> bool:
    """Return whether two runs have the same last checkpoint."""
    files = sorted(path.relative_to(one) for path in one.glob("checkpoints/*/**/*.safetensors"))
    newest = max(path.parts[1] for path in files)
    return all(filecmp.cmp(one / path, other / path, False) for path in files if path.parts[1] == newest)


def write_corpus(prefix: Path, vocabulary: int, documents: int = 400) -> None:
    rng = np.random.default_rng(1)
    with IndexedWriter(prefix, vocabulary) as writer:
        for _ in range(documents):
            writer.write(np.cumsum(rng.integers(1, 4, 200)) % vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, help="turns that the faults are shared out over (2), or of each run (8)")
    parser.add_argument("--protection", action="store_true", help="measure what protection costs a step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    draw = random.Random(1)
    found: dict[str, list[Found]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if given.protection:
            seconds = protect(folder, given.rounds or 8, given.overrides)
            if given.json is not None:
                given.json.write_text(json.dumps(seconds, indent=1))
            return
        rounds = given.rounds or 2
        write_corpus(folder / "corpus", VOCABULARY)
        recipe = folder / "recipe.yaml"
        data = {"train": str(folder / "corpus"), **RECIPE["data"]}  # type: ignore[dict-item]
        recipe.write_text(yaml.safe_dump(RECIPE | {"data": data}))
        overrides = [f"train.steps={given.steps}", *given.overrides]
        train("in place", recipe, folder / "undisturbed", given.ranks, overrides, [])
        each = given.faults // rounds
        for number in range(rounds):
            at = sorted(draw.sample(range(25, given.steps - 25), each))
            kills = [(step, draw.randrange(given.ranks)) for step in at]
            for way in ("in place", "restart", "torchrun"):
                out = folder / f"{way.replace(' ', '-')}-{number}"
                run = train(way, recipe, out, given.ranks, overrides, kills)
                ended = run.status == 0
                run = Found(
                    run.seconds, run.again, run.whole_s, ended and same(folder / "undisturbed", out), run.status
                )
                found.setdefault(way, []).append(run)
                print(f"round {number + 1}, {way}: {_told([run])}", flush=True)
    print()
    for way, runs in found.items():
        print(f"{way:<10} {_told(runs)}")
    if given.json is not None:
        given.json.write_text(json.dumps({way: [asdict(run) for run in runs] for way, runs in found.items()}, indent=1))


def _told(runs: Sequence[Found]) -> str:
    seconds = [each for run in runs for each in run.seconds] or [float("nan")]
    return (
        f"{len(seconds)} faults, {statistics.median(seconds):.2f} s / {max(seconds):.2f} s (median / worst), "
        f"{sum(run.again for run in runs)} steps done twice, {sum(run.whole_s for run in runs):.0f} s in all, "
        f"{'the undisturbed weights' if all(run.same for run in runs) else 'OTHER WEIGHTS'}, "
        f"status {'/'.join(str(run.status) for run in runs)}"
    )


if __name__ == "__main__":
    main()
