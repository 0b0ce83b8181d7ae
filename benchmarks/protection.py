"""What protection from faults costs a run that nothing befalls.

    python benchmarks/protection.py [--rounds 8] [--json results.json] [section.key=value ...]

The quickstart's model trains on two ranks with beats, the hang watch, replicas compared, checksums of shards and
checkpoints in memory, and by torchrun without all of them. Both runs are there at once; in each round one stands
still (SIGSTOP) while the other does its steps, and then the other way round.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import yaml

from benchmarks import results
from benchmarks.processes import family
from benchmarks.recovery import ROOT, write_corpus
from megacore.launcher.command import VARIABLES
from megacore.training import metrics

LIMIT_S = 900.0
PROTECTIONS: Mapping[str, Sequence[str]] = {
    "replicas compared": ("mesh.tp=1", "mesh.pp=1", "mesh.dp=2"),
    "checksums of shards": ("mesh.tp=1", "mesh.pp=1", "mesh.dp=2", "zero.shard=optimizer"),
}
"""{what is on beside beats, the hang watch and checkpoints in memory: the layout that has it}."""
SLICE = 8
"""Steps that a run does before the other one's turn; the first two, across the stop, are not counted."""
ON: Sequence[str] = ()
"""What protects a run is on by default."""
OFF = ("recovery.compare_every=0", "recovery.checksums=0", "recovery.memory=false")


def command(way: str, given: Sequence[str]) -> list[str]:
    if way == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        return [*torchrun, "--max-restarts", "1000", "-m", "megacore.training", *given]
    return [sys.executable, "-m", "megacore.tools.main", "train", *given]


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
            command(self.way, given), env=os.environ | VARIABLES | own, cwd=ROOT, stdout=self.log, stderr=self.log
        )
        self.turn(0)

    def turn(self, steps: int) -> list[float]:
        """Let it do so many steps and two more -> the seconds of those."""
        self._signal(signal.SIGCONT)
        first = self.last_step + 2
        deadline = time.monotonic() + LIMIT_S
        while self.last_step < first + steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.way}: it does not train\n{Path(self.log.name).read_text()[-2000:]}")
            time.sleep(0.01)
        self._signal(signal.SIGSTOP)
        records = metrics.read(self.out / metrics.METRICS)
        return [each["seconds_per_step"] for each in records if first < each["step"] <= first + steps]

    @property
    def last_step(self) -> int:
        records = metrics.newest(self.out / metrics.METRICS)
        return int(records[-1]["step"]) if records else 0

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def _signal(self, number: int) -> None:
        for process in list(family(self.process.pid)):
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
        ways = {"on": ("megacore", ON), "off": ("torchrun", OFF)}
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


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each run")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = protect(Path(folder), given.rounds, given.overrides)
    results.write(seconds, given.json)


if __name__ == "__main__":
    main()
