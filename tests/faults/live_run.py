"""A live run of `megacore train`: its processes, where its ranks are, and what becomes of it after a fault."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import write_recipe

from megacore.recovery.phases import Reading, read

ROOT = Path(__file__).parents[2]
HOOKS = Path(__file__).parent / "hooks"
LONG_S = 20.0
"""A recovery that takes longer is looked at."""
POLL_S = 0.004
TIMEOUT_MIN = 0.5
OUTSIDE = ("start", "recover")
"""The phases in which no step is done."""


def patient(limit: float) -> float:
    """Return a limit of time that is for a machine of its own, on this one, as busy as it is."""
    return limit * max(1.0, os.getloadavg()[0] / (2 * len(os.sched_getaffinity(0))))


@dataclass(frozen=True)
class Layout:
    """A layout of a run.

    Args:
        world: Ranks.
        overrides: Those of the recipe that tell it from others.
        recipe: Sections that replace those of the common recipe.
        on: The bytes of the filesystem of its own that the run's folder lies on, 0 for none.
        like: The layout whose undisturbed run is that of this one, too; this one.
    """

    world: int
    overrides: Sequence[str]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    on: int = 0
    like: str = ""


@dataclass
class Strike:
    """A fault that was done.

    Args:
        fault: The words for it.
        rank: The rank that it has hit.
        at: When, by ``time.monotonic``.
        spared: Whether no step may be lost by it, and no process.
        after: The number of the last incident before it.
    """

    kind: str
    rank: int
    at: float
    spared: bool = False
    after: int = 0


class LiveRun:
    """A run, which may be launched several times.

    Args:
        folder: The folder that all of it lies in.
        layout: Its layout.
        common: Overrides of all layouts.
        recipe: The recipe of all layouts.
    """

    def __init__(self, folder: Path, layout: Layout, common: Sequence[str], recipe: Mapping[str, Any]) -> None:
        self.folder, self.layout = folder, layout
        self.out, self.orders, self.temporary = folder / "out", folder / "orders", folder / "tmp"
        for each in (self.out, self.orders, self.temporary):
            each.mkdir(parents=True)
        if layout.on:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={layout.on}", "none", self.out], check=True)
        self.given = [
            write_recipe(folder, {**recipe, **layout.recipe}), f"out={self.out}", *common, *layout.overrides
        ]  # fmt: skip
        self.said, self.strikes = list[str](), list[Strike]()
        self.statuses = list[int | None]()
        """Those of the launches that a fault has ended."""
        self.orphans = list[int]()
        self.incidents = 0
        """The number of incidents before the fault that is being done."""
        self._steps, self._breaks, self._broken = list[float](), list[tuple[float, float]](), 0.0
        self._watching = True
        self.launch()
        threading.Thread(target=self._watch, daemon=True).start()

    def launch(self, *more: str) -> None:
        self.process = self.start(*more)
        self._listening = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
        self._listening.start()

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "NPROC_PER_NODE": str(self.layout.world),
            "OMP_NUM_THREADS": "1",
            "FAULTS": str(self.orders),
            "PYTHONPATH": f"{HOOKS}:{ROOT}",
            "TMPDIR": str(self.temporary),
        }
        limit = f"train.timeout={patient(TIMEOUT_MIN)}"
        command = [sys.executable, "-m", "tools.main", "train", *self.given, limit, *more]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").rstrip("\n").split("\r")[-1]
            if text and not re.search(r"(step/s|s/step)[,\]]", text):  # the progress bar
                self.tell(text)

    def tell(self, text: str) -> None:
        self.said.append(f"{time.monotonic() % 1000:.2f} {text}")
        with (self.folder / "said").open("a") as file:
            file.write(f"{self.said[-1]}\n")

    def hears(self, kind: str, times: int, seconds: float) -> bool:
        """Wait until the launcher has answered to a kind of event so many times -> whether it came to that."""
        answer = re.compile(rf"[\d.]+ {kind} .*\) -> ")
        return self.wait(lambda: sum(map(bool, map(answer.match, self.said))) >= times, seconds)

    # -- where it is

    @property
    def ends(self) -> bool:
        return self.process.poll() is not None

    def beat(self, rank: int) -> Reading | None:
        found = [*self.temporary.glob(f"megacore-*/rank-{rank}"), *self.temporary.glob(f"megacore-*/beat-{rank}")]
        alive = [path for path in found if path.parent.name not in self._gone]
        with contextlib.suppress(OSError):
            return read(alive[0]) if alive else None
        return None

    _gone: frozenset[str] = frozenset()
    """The folders of launchers that were killed."""

    @property
    def step(self) -> int:
        """The step that is being done; -1 where none is."""
        seen = self.beat(0)
        return -1 if seen is None or seen.phase in OUTSIDE else seen.step

    def ranks(self) -> dict[int, int]:
        """Return {rank: process} of those that have a place."""
        lives = {
            os.path.realpath(path): int(path.name.partition("-")[2])
            for pattern in ("beat-*", "rank-*")  # the second, where there is one, is a link to the first
            for path in self.temporary.glob(f"megacore-*/{pattern}")
            if path.name.partition("-")[2].isdigit()
        }
        found = dict[int, int]()
        for pid in self.processes():
            for mapped in re.findall(r"(/\S*/beat-\d+)$", _text(f"/proc/{pid}/maps"), re.MULTILINE):
                if mapped in lives:
                    found[lives[mapped]] = pid
            ranks = re.findall(r"(?:^|\0)RANK=(\d+)", environment := _text(f"/proc/{pid}/environ"))
            if ranks and "MEGACORE_STANDBY=1" not in environment:
                found.setdefault(int(ranks[0]), pid)
        return found

    def processes(self) -> list[int]:
        """Return the launcher's processes that live."""
        found = [int(each) for each in _text(f"/proc/{self.process.pid}/task/{self.process.pid}/children").split()]
        return [pid for pid in found if _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] != ["Z"]]

    def wait(self, condition: Callable[[], object], seconds: float, poll_s: float = POLL_S) -> bool:
        deadline = time.monotonic() + patient(seconds)
        while not self.ends and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(poll_s)
        return False

    def reaches(self, step: int, seconds: float) -> bool:
        return self.wait(lambda: self.step >= step, seconds)

    def _watch(self) -> None:
        """Note when steps are finished, and when none can be."""
        before, asked = None, 0.0
        while self._watching:
            now, at = self.beat(0), time.monotonic()
            if now is None or now.phase in OUTSIDE:
                self._broken = self._broken or at
                if before is None and asked < self._broken < at - LONG_S and not self.ends:
                    asked = at
                    self.process.send_signal(signal.SIGUSR2)  # where all stand, to stderr
                before = None
            else:
                if self._broken:
                    self._breaks.append((self._broken, at))
                    self._broken = 0.0
                if before is not None and now.step > before.step:
                    self._steps.append(at)
                before = now
            time.sleep(0.01)

    def seconds(self, strike: Strike) -> float | None:
        """Return the seconds from a fault to the next step that is finished; None where it has stopped nobody."""
        end = next((end for begin, end in self._breaks if end > strike.at and begin < strike.at + 120), None)
        begins = next((each.at for each in self.strikes if each.at > strike.at), float("inf"))
        if end is None or (strike.spared and end > begins):
            return None
        return next((at - strike.at for at in self._steps if at > end), None)

    # -- what befalls it

    def struck(self, kind: str, rank: int, at: float | None = None, spared: bool = False) -> None:
        self.strikes.append(Strike(kind, rank, time.monotonic() if at is None else at, spared, self.incidents))
        self.tell(f"---- {kind}, rank {rank}")

    def order(self, pid: int, kind: str, seconds: float = 20.0) -> float | None:
        """Have a process do a fault to itself -> when it did; None where it has not come to it."""
        self.arm(pid, kind)
        return self.done(pid, seconds)

    def arm(self, pid: int, kind: str) -> None:
        """Have a process do a fault to itself once it comes to where it can."""
        made = self.orders / f"{pid}.made"
        made.write_text(kind)
        made.rename(self.orders / str(pid))

    def done(self, pid: int, seconds: float) -> float | None:
        """Wait until a process has done what it was ordered -> when; None where it has not come to it."""
        done, deadline = self.orders / f"{pid}.done", time.monotonic() + patient(seconds)
        while time.monotonic() < deadline and Path(f"/proc/{pid}").exists() and not done.exists():
            time.sleep(0.002)
        with contextlib.suppress(OSError, ValueError):
            at = float(done.read_text())
            done.unlink()
            return at
        return None

    def ended(self, seconds: float = 60.0) -> None:
        """Wait for the end of this launch, and for that of all of its processes."""
        self.statuses.append(self.end(seconds))
        self._gone |= {path.name for path in self.temporary.glob("megacore-*")}
        deadline = time.monotonic() + 3
        while (left := self.left_over()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.orphans += left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self, seconds: float) -> int | None:
        """Wait for the end -> status; None where it did not come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patient(seconds))
        if not self.ends:
            self.process.send_signal(signal.SIGUSR2)
            time.sleep(4)
            self.process.kill()
            self.process.wait()
            self._listening.join(5)
            return None
        self._listening.join(5)
        return self.process.returncode

    def close(self) -> None:
        self._watching = False
        if self.layout.on:
            self.let_be()

    def let_be(self) -> None:
        """Copy what lies on a filesystem of its own to where it was mounted."""
        kept = self.folder / "kept"
        subprocess.run(["cp", "-a", f"{self.out}/.", kept], check=True)
        subprocess.run(["umount", "-l", self.out], check=True)
        self.out.rmdir()
        kept.rename(self.out)

    def left_over(self) -> list[int]:
        """Return the processes that were given the folder, but for the launcher that lives."""
        found = []
        for entry in Path("/proc").iterdir():
            own = not entry.name.isdigit() or int(entry.name) in (os.getpid(), self.process.pid)
            if not own and f"{self.folder}/" in _text(entry / "cmdline") + _text(entry / "environ"):
                found.append(int(entry.name))
        return found


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def metrics_of(out: Path) -> dict[int, list[dict[str, float]]]:
    """Return {step: its records}, without times."""
    found = dict[int, list[dict[str, float]]]()
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {key: record[key] for key in ("loss", "grad_norm", "lr", "validation_loss") if key in record}
        found.setdefault(record["step"], []).append(kept)
    return found


def tensors_of(out: Path) -> dict[str, bytes]:
    """Return {file: bytes} of all checkpoints."""
    folder = out / "checkpoints"
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.safetensors"))
        if re.fullmatch(r"step-\d+", path.relative_to(folder).parts[0])
    }
