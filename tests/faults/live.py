"""Live runs of `megacore train`: what happens to their processes, and what becomes of them."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megacore import checkpoints, incidents
from megacore.training import metrics

ROOT = Path(__file__).parents[2]
ENDS_S = 120.0
"""The most seconds that a run may take."""
COMMON = ["train.steps=30", "evaluate.every=0", "checkpoint.every=10", "checkpoint.at_end=true", "log.every=1"]
TWO_NODES = "two nodes"
LAYOUTS: Mapping[str, tuple[int, Sequence[str]]] = {
    "one": (1, ()),
    "dp": (2, ()),
    "tp": (2, ("mesh.tp=2",)),
    "pp": (2, ("mesh.pp=2",)),
    "zero 1": (2, ("zero.shard=optimizer",)),
    "zero 3": (2, ("zero.shard=parameters",)),
    "tp pp": (4, ("mesh.tp=2", "mesh.pp=2")),
    TWO_NODES: (2, ("zero.shard=optimizer",)),
}


@dataclass
class Live:
    """A run, launched once or several times.

    Args:
        recipe: The recipe.
        out: Its folder.
        overrides: Overrides of the recipe.
        what: What happens to its ranks (:mod:`live_rank`).
        world: Its ranks.
        nodes: The launchers that share them, each with a memory of its own where there are several.
        terminal: The file that they write to; None for a log.
    """

    recipe: str
    out: Path
    overrides: Sequence[str]
    world: int
    what: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1
    terminal: int | None = None
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher of the first node."""
        return self.launchers[0]

    def start(self, *more: str) -> None:
        """Launch it."""
        self.launchers = [self._launched(node, *more) for node in range(self.nodes)]

    def memory(self, node: int) -> Path:
        """Return the folder that is the memory of a node, one of several."""
        return Path(f"{self.out}-memory-{node}")

    def lose(self, node: int) -> None:
        """Kill a node with all of its processes, and its memory with it; start another one in its place."""
        self._kill(self.launchers[node])
        shutil.rmtree(self.memory(node), ignore_errors=True)
        self.launchers[node] = self._launched(node, RESTART_COUNT="1")

    def _launched(self, node: int, *more: str, **variables: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **variables, "PYTHONPATH": path, "CAMPAIGN": json.dumps(self.what)}
        environment |= {"NPROC_PER_NODE": str(self.world // self.nodes), "OMP_NUM_THREADS": "1"}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        if self.nodes > 1:
            self.memory(node).mkdir(exist_ok=True)
            environment |= {"NNODES": str(self.nodes), "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1"}
            environment |= {"MASTER_PORT": str(self._port), "CAMPAIGN_MEMORY": str(self.memory(node))}
        arguments = ["train", self.recipe, f"out={self.out}", *COMMON, *self.overrides, *more]
        with open(f"{self.out}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("live_launch.py")), *arguments],
                env=environment,
                stdout=log if self.terminal is None else self.terminal,
                stderr=log if self.terminal is None else self.terminal,
                start_new_session=True,
            )

    def wait(self) -> int:
        """Wait until it ends -> its status, which all nodes have."""
        until = time.monotonic() + ENDS_S
        try:
            (status,) = {each.wait(max(0.0, until - time.monotonic())) for each in self.launchers}
            return status
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end in {ENDS_S:g} s:\n{self.said[-3000:]}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """End what is left of it."""
        for each in self.launchers:
            self._kill(each)

    @staticmethod
    def _kill(launcher: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()

    @property
    def _pids(self) -> Path:
        return Path(f"{self.out}-pids")

    @property
    def said(self) -> str:
        return Path(f"{self.out}.log").read_text(errors="replace")

    @property
    def step(self) -> int:
        """The furthest step that a rank is at now."""
        return max((int(each.read_text() or 0) for each in self._pids.glob("step-*")), default=0)

    def pid(self, rank: int) -> int:
        """The newest process of a rank; 0 where there is none yet."""
        path = self._pids / f"rank-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(lines[-1].split()[0]) if lines else 0

    def starts(self, rank: int = 0) -> list[int]:
        """Return the step after which each process of a rank went on."""
        path = self._pids / f"rank-{rank}"
        return [int(line.split()[1]) for line in path.read_text().splitlines()]

    def heeds(self, number: int) -> bool:
        """Return whether the launcher handles a signal."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (number - 1) & 1)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, or the run has ended."""
        deadline = time.monotonic() + ENDS_S
        while not holds() and self.process.poll() is None:
            assert time.monotonic() < deadline, self.said[-3000:]
            time.sleep(0.005)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.kill()

    def state(self) -> dict[str, bytes]:
        """Return {file: bytes} of the weights and states of its last checkpoint, and the losses of its steps."""
        steps = checkpoints.complete(checkpoints.folder_of(self.out))
        assert steps, self.said[-3000:]
        path = steps[max(steps)]
        found = {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*.safetensors")}
        losses = metrics.curve(metrics.read(self.out / metrics.METRICS), "loss")
        return found | {"losses": repr(losses).encode(), "step": str(max(steps)).encode()}

    @property
    def incidents(self) -> list[incidents.Incident]:
        return incidents.read(self.out)


def live(recipe: str, out: Path, layout: str, what: Mapping[str, Any] | None = None, *overrides: str) -> Live:
    """Return a run of a layout."""
    world, own = LAYOUTS[layout]
    return Live(recipe, out, [*own, *overrides], world, what or {}, 2 if layout == TWO_NODES else 1)


def calm(recipe: str, folder: Path, layout: str) -> dict[str, bytes]:
    """Return the state at the end of the undisturbed run of a layout, which all workers of a session share."""
    run = live(recipe, folder / layout.replace(" ", "-"), layout)
    with (folder / f"{run.out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not run.out.exists():
            run.start()
            assert run.wait() == 0, run.said
    state = run.state()
    assert state["step"] == b"30"
    return state


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder of all workers of a session."""
    mine = factory.getbasetemp()
    folder = (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "undisturbed"
    folder.mkdir(exist_ok=True)
    return folder
