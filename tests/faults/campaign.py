"""Faults on live runs, drawn by a seed: `megacore train` of a tiny model, whose ranks are killed, stopped and broken.

After each run its metrics and its checkpoints are those of a run of the same layout that nothing befell, bit for bit;
its incidents name what was done to it; and nothing of it is left, no process and no folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine import write_recipe

from megacore.recovery import incidents
from megacore.recovery.phases import Reading, beat_of, read

ROOT = Path(__file__).parents[2]
HOOKS = Path(__file__).parent / "hooks"
STEPS = 60
COMMON = (
    f"train.steps={STEPS}",
    "train.timeout=0.5",
    "log.every=1",
    "evaluate.every=7",
    "checkpoint.every=9",
    "checkpoint.at_end=true",
)
LAYOUTS: Mapping[str, tuple[int, Sequence[str]]] = {
    "dp2": (2, ("mesh.dp=2",)),
    "tp2": (2, ("mesh.tp=2",)),
    "pp2": (2, ("mesh.pp=2",)),
    "pp2 x dp2": (4, ("mesh.pp=2", "mesh.dp=2")),
    "tp2 x dp2": (4, ("mesh.tp=2", "mesh.dp=2")),
    "dp3": (3, ("mesh.dp=3", "batch.global_size=12")),
    "dp4": (4, ("mesh.dp=4",)),
    "pp2 x dp2 interleaved": (4, ("mesh.pp=2", "mesh.dp=2", "pipeline.chunks=2")),
    "zero optimizer": (2, ("mesh.dp=2", "zero.shard=optimizer")),
    "zero gradients": (2, ("mesh.dp=2", "zero.shard=gradients")),
    "zero parameters": (2, ("mesh.dp=2", "zero.shard=parameters")),
    "bf16": (2, ("mesh.dp=2", "train.precision=bf16")),
    "background": (2, ("mesh.dp=2", "checkpoint.background=true", "checkpoint.every=2")),
    "tp2 protected": (2, ("mesh.tp=2", "recovery.overhead=100")),
    "pp2 x dp2 zero": (4, ("mesh.pp=2", "mesh.dp=2", "zero.shard=optimizer", "recovery.overhead=100")),
}
"""{name: ranks, overrides}."""

INCIDENTS: Mapping[str, set[str]] = {
    "kill": {"killed"},
    "stop": {"hung"},
    "raise": {"raised"},
    "raise in the update": {"raised"},
    "raise in a save": {"raised"},
    "abort": {"aborted"},
    "leave out": {"hung", "aborted", "lost_contact"},
    "sleep in the loader": {"hung"},
}
"""{kind of fault: the kinds of incident that name it}."""


@dataclass(frozen=True)
class Fault:
    """A fault: it strikes a rank once that is at a step, in a phase if one is named, or in the next recovery."""

    kind: str
    rank: int
    step: int
    phase: str | None = None


@dataclass
class Run:
    """A live run."""

    folder: Path
    layout: str
    overrides: Sequence[str] = ()
    said: list[str] = field(default_factory=list)
    struck: list[tuple[Fault, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world, overrides = LAYOUTS[self.layout]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.out, self.orders, self.temporary = self.folder / "out", self.folder / "orders", self.folder / "tmp"
        self.orders.mkdir()
        self.temporary.mkdir()
        environment = {
            **os.environ,
            "NPROC_PER_NODE": str(self.world),
            "OMP_NUM_THREADS": "1",
            "FAULTS": str(self.orders),
            "PYTHONPATH": str(HOOKS),
            "TMPDIR": str(self.temporary),
        }
        given = [write_recipe(self.folder), f"out={self.out}", *COMMON, *overrides, *self.overrides]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.main", "train", *given],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        self.listening = threading.Thread(target=self._listen, daemon=True)
        self.listening.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip("\n").split("\r")[-1]
            if text and "step/s" not in text and "s/step" not in text:
                self.said.append(f"{time.time() % 1000:.2f} {text}")

    @property
    def ends(self) -> bool:
        return self.process.poll() is not None

    def beat(self, rank: int) -> Reading | None:
        for folder in self.temporary.glob("megacore-*"):
            return read(beat_of(folder, rank))
        return None

    def ranks(self) -> dict[int, int]:
        """Return {rank: process} of those that have a place."""
        found = dict[int, int]()
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue
                beats = set(re.findall(r"/beat-(\d+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE))
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if beats:
                    found[int(beats.pop())] = pid
                elif b"MEGACORE_STANDBY=1" not in environment:
                    ranks = [each[5:] for each in environment if each.startswith(b"RANK=")]
                    if ranks:
                        found.setdefault(int(ranks[0]), pid)
        return found

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.ends and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.001)
        return False

    def strike(self, fault: Fault) -> None:
        """Wait for the place of a fault, and do it."""

        def there() -> bool:
            seen = self.beat(fault.rank)
            if seen is None:
                return fault.step <= 0
            if fault.phase in ("recover", "start"):
                return seen.phase == fault.phase
            return seen.step >= fault.step and seen.phase not in ("start", "recover")

        if not self.wait(there, 60):
            return
        if fault.phase not in (None, "recover", "start"):
            self.wait(lambda: (seen := self.beat(fault.rank)) is None or seen.phase == fault.phase, 1.0)
        pid = self.ranks().get(fault.rank)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            match fault.kind:
                case "kill":
                    os.kill(pid, signal.SIGKILL)
                case "stop":
                    os.kill(pid, signal.SIGSTOP)
                case "end":
                    self.process.send_signal(signal.SIGTERM)
                case kind:
                    order = self.orders / f"{pid}.made"
                    order.write_text(kind)
                    order.rename(self.orders / str(pid))
            self.struck.append((fault, pid))
            self.said.append(f"{time.time() % 1000:.2f} ---- {fault} (process {pid})")

    def end(self, seconds: float) -> int | None:
        """Wait for the end -> status; None where it did not come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        if not self.ends:
            self.process.send_signal(signal.SIGUSR2)
            time.sleep(4)
            self.process.kill()
            self.process.wait()
            self.listening.join(5)
            return None
        self.listening.join(5)
        return self.process.returncode


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def of_run(folder: Path) -> list[int]:
    """Return the processes that have a folder in their command line or environment, zombies aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def metrics_of(out: Path) -> dict[int, list[dict[str, float]]]:
    found = dict[int, list[dict[str, float]]]()
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {key: record[key] for key in ("loss", "grad_norm", "lr", "validation_loss") if key in record}
        found.setdefault(record["step"], []).append(kept)
    return found


def tensors_of(out: Path) -> dict[str, bytes]:
    folder = out / "checkpoints"
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def reference(layout: str, cache: Path) -> Path:
    """Return the folder of a run of a layout that nothing befalls."""
    folder = cache / re.sub(r"\W+", "-", layout)
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run = Run(folder, layout)
        status = run.end(120)
        if status != 0:
            raise AssertionError("\n".join(run.said))
        (folder / "done").touch()
    return folder / "out"


def differences(run: Run, whole: Path) -> list[str]:
    """Return what is wrong with what a run has left."""
    found = list[str]()
    ours, theirs = metrics_of(run.out), metrics_of(whole)
    if ours != theirs:
        steps = [step for step in sorted(theirs | ours) if ours.get(step) != theirs.get(step)]
        first = steps[0] if steps else None
        found.append(f"metrics differ at {steps}: {first and (ours.get(first), theirs.get(first))}")
    ours_of, theirs_of = tensors_of(run.out), tensors_of(whole)
    last = max(theirs_of).split("/")[0]
    for name in sorted(ours_of | theirs_of):
        both = name in ours_of and name in theirs_of
        if (both or name.startswith(last)) and ours_of.get(name) != theirs_of.get(name):
            found.append(f"{name} differs" if name in ours_of else f"{name} is missing")
    return found


def leftovers(run: Run) -> list[str]:
    found = list[str]()
    deadline = time.monotonic() + 3
    while (left := of_run(run.folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        found.append(f"orphans {left}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for path in [*run.temporary.glob("megacore-*"), *run.out.rglob(".*.partial")]:
        found.append(f"left over: {path.relative_to(run.folder)}")
    return found


def misnamed(run: Run) -> list[str]:
    """Return the faults that no incident names."""
    told = [(each.event.kind, each.event.rank) for each in incidents.read(run.out)]
    found = list[str]()
    for fault, _ in run.struck:
        wanted = INCIDENTS.get(fault.kind)
        if wanted is None:
            continue
        hit = next((each for each in told if each[0] in wanted and each[1] == fault.rank), None)
        if hit is None:
            found.append(f"{fault} is not among the incidents {told}")
        else:
            told.remove(hit)
    return found


def play(
    layout: str, faults: Sequence[Fault], folder: Path, cache: Path, limit_s: float = 150.0
) -> tuple[Run, list[str]]:
    """Run a layout under faults -> the run, and what was wrong with it."""
    whole = reference(layout, cache)
    run = Run(folder, layout)

    def strike_all() -> None:
        for fault in faults:
            run.strike(fault)

    striking = threading.Thread(target=strike_all, daemon=True)
    striking.start()
    status = run.end(limit_s)
    found = [] if status == 0 else [f"status {status}" if status is not None else f"no end within {limit_s:g} s"]
    with contextlib.suppress(OSError, ValueError):
        found += differences(run, whole) + misnamed(run)
    return run, found + leftovers(run)


def drawn(layout: str, seed: int, number: int, kinds: Sequence[str] = ("kill",)) -> list[Fault]:
    """Return faults that are drawn by a seed."""
    random_ = random.Random(f"{layout} {seed}")
    world, steps = LAYOUTS[layout][0], sorted(random_.sample(range(1, STEPS), number))
    phases = (None, None, "data", "forward", "backward", "reduce", "update", "log", "save", "evaluate")
    faults = []
    for step in steps:
        rank = random_.randrange(world)
        faults.append(Fault(random_.choice(kinds), rank, step, random_.choice(phases)))
        if faults[-1].kind == "kill" and random_.random() < 0.3:
            other = random_.choice([each for each in range(world) if each != rank])
            faults.append(Fault("kill", other, step, random_.choice((None, "recover"))))
    return faults
