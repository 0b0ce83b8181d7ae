"""Runs over several nodes, which are several launchers on this machine: what befalls them leaves no trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from engine import train, write_recipe
from pool import Pool
from safetensors.torch import load_file
from torch.distributed import TCPStore

from megacore import checkpoints
from megacore.rank import STORE, Here, join
from megacore.recovery import incidents
from megacore.recovery.channel import Agent, Channel
from megacore.recovery.phases import read
from megacore.training import metrics

ROOT = Path(__file__).parents[2]
STEPS = ["train.steps=60", "evaluate.every=0", "checkpoint.at_end=true", "train.timeout=0.5"]


class Nodes:
    """The launchers of a run, each with a folder of its own for temporary files."""

    def __init__(self, folder: Path, nodes: str, *overrides: str) -> None:
        self.folder, self.nodes, self.out = folder, nodes, folder / "run"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.given = [write_recipe(folder), f"out={self.out}", *STEPS, *overrides]
        self.launchers = list[subprocess.Popen[str]]()
        self.dead = set[int]()
        """The numbers of those that are to end before the run."""

    def start(self) -> subprocess.Popen[str]:
        """Start a launcher; the first one leads."""
        number = len(self.launchers)
        temporary = self.folder / f"tmp-{number}"
        temporary.mkdir()
        own = {"NNODES": self.nodes, "NODE_RANK": str(number), "NPROC_PER_NODE": "1", "TMPDIR": str(temporary)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "OMP_NUM_THREADS": "1"}
        self.launchers.append(
            subprocess.Popen(
                [sys.executable, "-m", "tools.train", *self.given],
                cwd=ROOT,
                env=os.environ | own,
                stdout=subprocess.DEVNULL,
                stderr=(self.folder / f"said-{number}").open("w"),
                text=True,
            )
        )
        return self.launchers[-1]

    def said(self, number: int) -> str:
        return (self.folder / f"said-{number}").read_text()

    def step(self, number: int) -> int:
        """Return the step that the rank of a node is at."""
        beats = [read(link) for link in (self.folder / f"tmp-{number}").rglob("rank-*")]
        return max((beat.step for beat in beats if beat is not None), default=0)

    def rank(self, number: int) -> int:
        """Return the process of the rank of a node."""
        (beat,) = {str(link.resolve()) for link in (self.folder / f"tmp-{number}").rglob("rank-*")}
        pids = Path(f"/proc/{self.launchers[number].pid}/task").glob("*/children")
        for pid in (pid for file in pids for pid in file.read_text().split()):
            if beat in Path(f"/proc/{pid}/maps").read_text():
                return int(pid)
        raise AssertionError(f"node {number} has no rank")

    def wait(self, condition: Callable[[], bool], seconds: float = 150.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [each for number, each in enumerate(self.launchers) if number not in self.dead and each.poll()]
            assert not ended and time.monotonic() < deadline, self.told()
            time.sleep(0.01)

    def ends(self, seconds: float = 150.0) -> list[int]:
        """Wait for the end of all launchers -> their statuses."""
        deadline = time.monotonic() + seconds
        return [each.wait(max(0.1, deadline - time.monotonic())) for each in self.launchers]

    def told(self) -> str:
        return "\n".join(f"-- node {number}\n{self.said(number)}" for number in range(len(self.launchers)))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made = list[Nodes]()

    def make(which: str, *overrides: str) -> Nodes:
        made.append(Nodes(tmp_path, which, *overrides))
        return made[-1]

    yield make
    for each in made:
        for launcher in each.launchers:
            launcher.kill()
            launcher.wait()


def weights(out: Path) -> dict[str, bytes]:
    folder = checkpoints.newest_of(out)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.slow
@pytest.mark.in_turn(2, 0)
def test_ranks_that_are_killed_on_any_node_are_replaced_there(
    nodes: Callable[..., Nodes], pool: Pool, tmp_path: Path
) -> None:
    run = nodes("2", "mesh.dp=2")
    for _ in range(2):
        run.start()
    for turn, number in enumerate((1, 0), start=1):

        def there(step: int = 20 * turn) -> bool:
            return min(run.step(0), run.step(1)) >= step

        def went_on(times: int = turn) -> bool:
            return run.said(0).count("All ranks go on after step") == times

        run.wait(there)
        os.kill(run.rank(number), signal.SIGKILL)
        run.wait(went_on)
    assert run.ends() == [0, 0], run.told()
    found = [
        (each.event.kind, each.event.rank, each.event.node, each.decision.action) for each in incidents.read(run.out)
    ]
    assert found == [("killed", 1, 1, "replace"), ("killed", 0, 0, "replace")]
    pool.run(2, train, run.given[0], [*run.given[2:], f"out={tmp_path / 'straight'}"])
    assert weights(run.out) == weights(tmp_path / "straight")


def test_who_waits_in_the_store_of_an_agent_is_freed_by_the_end_of_its_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank of its generation, which has not come, is waited for in :func:`~megacore.rank.join`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(STORE, f"tcp://127.0.0.1:{store.port}/run-1")
    ours, theirs = socket.socketpair()
    agent, freed = Agent(Channel(theirs)), list[float]()

    def wait() -> None:
        agent.generation = 1
        agent.connecting()
        try:
            join(Here(1, 2, 1, 2, True), "cpu", timedelta(seconds=50))
        except RuntimeError:
            freed.append(time.monotonic())
        agent._free.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive()
    told = time.monotonic()
    Channel(ours).say("over", generation=1)
    waiting.join(20)
    assert freed and freed[0] - told < 10
    assert store.num_keys() >= 0  # it serves the next generation


@pytest.mark.slow
@pytest.mark.in_turn(2, 1)
def test_nodes_that_come_die_and_leave_cost_no_step(nodes: Callable[..., Nodes], tmp_path: Path) -> None:
    """The run is ended by a signal to the agent that leads, with a checkpoint: all nodes end with it."""
    run = nodes("1:3", "train.steps=100000", "schedule.name=constant")
    for _ in range(2):
        run.start()
    run.wait(lambda: min(run.step(0), run.step(1)) >= 5)
    run.start()
    run.wait(lambda: run.step(2) >= 1)
    run.dead.add(1)
    run.launchers[1].kill()
    run.wait(lambda: "All ranks go on after step" in run.said(0))
    run.dead.add(2)
    run.launchers[2].send_signal(signal.SIGTERM)
    assert run.launchers[2].wait(150) == 143, run.told()
    went_on = run.step(0)
    run.wait(lambda: run.step(0) >= went_on + 3)
    run.launchers[0].send_signal(signal.SIGTERM)
    assert run.ends() == [143, -signal.SIGKILL, 143], run.told()
    found = [(each.event.kind, each.event.node, each.decision.action) for each in incidents.read(run.out)]
    assert found[-3:] == [("node_joins", 2, "rebuild"), ("agent_lost", 1, "evict"), ("node_leaves", 2, "evict")]
    done = [int(record["step"] or 0) for record in metrics.read(run.out / metrics.METRICS)]
    assert done == list(range(1, done[-1] + 1))
    straight = tmp_path / "straight"
    train(run.given[0], [*run.given[2:], f"train.steps={done[-1]}", f"out={straight}"])
    ours, theirs = load_weights(run.out), load_weights(straight)
    assert ours and all(torch.allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-12) for name in theirs)


def load_weights(out: Path) -> dict[str, torch.Tensor]:
    files = sorted(checkpoints.newest_of(out).rglob("*.safetensors"))
    return {f"{file.name} {name}": value for file in files for name, value in load_file(file).items()}
