"""Runs of several modes in turn, each in processes of its own: so that a drift of the machine meets all alike."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import environments, results, workload

FOLDER = Path(__file__).resolve().parent
PEERS = FOLDER.parent.parent / "shared" / "peers"
CORES = len(os.sched_getaffinity(0))
TIMEOUT_S = 1200


@dataclass(frozen=True)
class Group:
    """Modes that are compared with each other, all in so many processes, and each of these in so many threads; None:
    in as many as there are cores for."""

    name: str
    processes: int
    each: int | None = None

    @property
    def threads(self) -> int:
        return self.each or max(1, CORES // self.processes)


@dataclass(frozen=True)
class Mode:
    """One row: `script argument *options`, run by the interpreter of `environment`.

    Args:
        name: Of the mode.
        group: With whom it is compared.
        environment: See `environments.find`.
        script: A file of this folder, or of the peers'.
        argument: Of the script.
        differs: How its work differs from the others'.
        options: Of a script of this folder.
    """

    name: str
    group: Group
    environment: str
    script: str
    argument: str
    differs: str = ""
    options: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        return self.environment == "ours"

    @property
    def here(self) -> bool:
        """Whether its script is one of this folder, which takes options; the peers' are told by the environment."""
        return (FOLDER / self.script).exists()


@dataclass(frozen=True)
class Job:
    """What a run does: a shape of `workload`, the dtype, the steps that are not counted and those that are."""

    shape: str
    dtype: str
    warm_up: int
    steps: int


@dataclass
class Row:
    """What was measured of one mode: seconds of the counted steps of each run; of the last run the first loss and the
    last; of rank 0 the most memory. Where steps differ, also the tokens of each."""

    mode: Mode
    runs: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    first_loss: float = float("nan")
    last_loss: float = float("nan")
    gib: float = 0.0
    failure: str = ""

    @property
    def seconds(self) -> float:
        """The median of all counted steps."""
        return statistics.median(self.steps)

    @property
    def steps(self) -> list[float]:
        return [s for run in self.runs for s in run]

    @property
    def medians(self) -> list[float]:
        """Of each run."""
        return [statistics.median(run) for run in self.runs]

    def add(self, result: Mapping[str, Any]) -> None:
        """What a script has printed."""
        self.runs.append(result["steps"])
        self.tokens.append(result.get("tokens", []))
        self.first_loss, self.last_loss = result["loss0"], result["lossN"]
        self.gib = max(self.gib, result["rss_gib"])

    def take(self, machine: Machine, job: Job, what: str) -> None:
        """Run the mode once more, and say what came of it."""
        load = os.getloadavg()[0]
        try:
            self.add(machine.run(self.mode, job))
            shown = " ".join(f"{s:.2f}" for s in self.runs[-1]) + f" s   (load before: {load:.1f})"
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.failure = str(error)[-300:]
            shown = f"failed: {self.failure}"
        print(f"  {what}: {self.mode.name:30s} {shown}", flush=True)

    def summary(self) -> dict[str, Any]:
        """For the JSON file."""
        if not self.runs:
            return {"group": self.mode.group.name, "failure": self.failure}
        return {
            "group": self.mode.group.name,
            "differs": self.mode.differs,
            "median_s": self.seconds,
            "runs_s": self.runs,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "gib": self.gib,
            "failure": self.failure,
        }


@dataclass(frozen=True)
class Machine:
    """Where rows are run: interpreters, the folder of the peers' scripts, environment variables for all alike."""

    pythons: Mapping[str, Path]
    peers: Path
    variables: Mapping[str, str]

    def command(self, mode: Mode, job: Job) -> list[str]:
        script = [str((FOLDER if mode.here else self.peers) / mode.script), mode.argument, *mode.options]
        if mode.here:
            script += ["--shape", job.shape, "--dtype", job.dtype, "--threads", str(mode.group.threads)]
            script += ["--warm-up", str(job.warm_up), "--steps", str(job.steps)]
        python = str(self.pythons[mode.environment])
        if mode.group.processes == 1:
            return [python, *script]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(mode.group.processes)]
        return [python, *launcher, "--master-port", str(free_port()), *script]

    def run(self, mode: Mode, job: Job) -> dict[str, Any]:
        """The script's result. Raises RuntimeError with the end of its output if it has none."""
        threads = str(mode.group.threads)
        settings = {"BDT": job.dtype, "NT": threads, "WARM": str(job.warm_up), "N": str(job.steps), "LABEL": mode.name}
        variables = {**os.environ, **environments.VARIABLES, **self.variables, **settings, "OMP_NUM_THREADS": threads}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        done = subprocess.run(
            self.command(mode, job),
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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def with_anchor(modes: Sequence[Mode], anchor: Mode | None, every: int) -> Iterator[Mode]:
    """The modes in turn, and the anchor again after every few of them."""
    for i, mode in enumerate(modes, 1):
        yield mode
        if anchor and i % every == 0 and mode != anchor:
            yield anchor


def measure(
    machine: Machine,
    modes: Sequence[Mode],
    job: Job,
    rounds: int,
    anchor: str,
    every: int,
    before_round: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Rows of all modes, that of the anchor with some runs more."""
    rows = {mode: Row(mode) for mode in modes}
    repeated = next((mode for mode in modes if mode.name == anchor), None)
    for turn in range(rounds):
        before_round()
        for mode in with_anchor(modes, repeated, every):
            if not rows[mode].failure:
                rows[mode].take(machine, job, f"{job.dtype} round {turn + 1}")
    return list(rows.values())


def anchor_line(rows: Sequence[Row], anchor: str) -> str:
    row = next((row for row in rows if row.mode.name == anchor and row.runs), None)
    if row is None:
        return ""
    return f"anchor ({anchor}), median of each run in order: " + ", ".join(f"{s:.2f}" for s in row.medians) + " s"


def available(modes: Sequence[Mode], machine: Machine, arguments: argparse.Namespace) -> list[Mode]:
    """The modes that are asked for and can be run here; each that cannot is named with the reason."""
    chosen, only, peers = [], arguments.only, machine.peers
    for mode in modes:
        if only and not any(word.lower() in mode.name.lower() for word in only):
            continue
        if not mode.here and not (peers / mode.script).exists():
            print(f"skipped: {mode.name}: there is no {mode.script} in {peers}")
        elif not mode.here and arguments.shape != "full":
            print(f"skipped: {mode.name}: {mode.script} knows the full shape alone")
        elif mode.environment not in machine.pythons:
            print(f"skipped: {mode.name}: no environment {mode.environment!r} (--setup makes it, --python names it)")
        else:
            chosen.append(mode)
    return chosen


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all have."""
    made = results.parser(description)
    made.add_argument("--shape", choices=workload.WORKLOADS, default="full", help="tiny: that it runs")
    made.add_argument("--rounds", type=int, default=3, help="turns of all modes")
    made.add_argument("--warm-up", type=int, default=2, help="steps of each run that are not counted")
    made.add_argument("--steps", type=int, default=2, help="counted steps of each run")
    made.add_argument("--anchor-every", type=int, default=5, help="runs between runs of the anchor")
    made.add_argument("--only", nargs="+", metavar="WORD", help="modes whose name has one of these words")
    made.add_argument("--peers", type=Path, default=PEERS, help="folder of their scripts")
    environments.add_options(made)
    made.add_argument(
        "--malloc",
        choices=("heap", "default"),
        default="heap",
        help="heap: glibc keeps large allocations, as our launch scripts set it; for everyone alike",
    )
    return made


def ready(arguments: argparse.Namespace) -> Machine:
    """The machine that the options tell of; with `--setup`, its environments are made and that is all."""
    pythons = environments.ready(arguments)
    if arguments.rounds * arguments.steps < 6 or arguments.warm_up < 2:
        print("note: fewer than 6 counted or 2 warm-up steps: good for a look, not for a record")
    heap = workload.HEAP if arguments.malloc == "heap" else {}
    return Machine(pythons, arguments.peers, heap)


def heading(arguments: argparse.Namespace) -> dict[str, Any]:
    """For the JSON file: when a benchmark has begun, and where."""
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"started": started, "machine": platform.platform(), "malloc": arguments.malloc}


def differences(modes: Sequence[Mode]) -> str:
    return "Where the work differs: " + "; ".join(f"{m.name}: {m.differs}" for m in modes if m.differs)
