"""A run on Ray Train: a worker is killed, and the cluster shrinks and grows, while losses stay those of a quiet run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train", reason="needs megacore[ray]")

from engine import train, write_recipe
from pool import Pool

from megacore.exits import FAILED, MISUSED
from megacore.launch import ray_cluster as trained
from megacore.recipe import ConfigError
from megacore.tools.ray import workers_of

ROOT = Path(__file__).parents[2]
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # addresses stay on the loopback interface
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
NODE: dict[str, Any] = {"object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}
PATIENCE_S = 120


class Nodes:
    """A cluster on this machine: a head without CPUs, and nodes of one."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **NODE})
        self.nodes = [self.add() for _ in range(2)]

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, **NODE)

    def drain(self) -> None:
        """Announce that a node will be taken away, and take it."""
        node = self.nodes.pop()
        drain = ["drain-node", "--address", self.cluster.address, "--node-id", node.node_id, "--reason-message", "spot"]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", "5"]
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *drain], check=True, capture_output=True)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    made = Nodes()
    yield made
    made.cluster.shutdown()


@pytest.mark.slow
def test_a_killed_worker_and_a_cluster_that_shrinks_and_grows_change_no_loss(
    nodes: Nodes, pool: Pool, tmp_path: Path
) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    settings = ["batch.global_size=32", "evaluate.every=0", "schedule.name=constant", "schedule.warmup_steps=0"]
    run = [recipe, f"out={out}", *settings, "train.steps=100000", "checkpoint.every=10", "checkpoint.background=false"]
    options = ["--workers", "1:2", "--look", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "megacore", "ray", *run, *options],
        env=os.environ | {"RAY_ADDRESS": nodes.cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        goes_on(process, out, workers=2)
        os.kill(parent(launchers_of(out)[-1]), signal.SIGKILL)  # Ray's worker
        goes_on(process, out, workers=2)
        nodes.drain()
        goes_on(process, out, workers=1)
        nodes.nodes.append(nodes.add())
        goes_on(process, out, workers=2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    nodes.cluster.shutdown()
    wait(lambda: not launchers_of(out), "a launcher is left over")
    found = {record["step"]: record["loss"] for record in records(out)}
    steps = max(found)
    assert list(found) == [*range(1, int(steps) + 1)]
    (quiet,) = pool.run(1, train, recipe, [f"out={tmp_path / 'quiet'}", *settings, f"train.steps={steps}"])
    assert list(found.values()) == pytest.approx(quiet.values("loss"), rel=1e-9)


def goes_on(process: subprocess.Popen[bytes], out: Path, workers: int) -> None:
    """Wait until so many workers have done 20 more steps."""

    def done() -> bool:
        assert process.poll() is None, process.communicate()[0].decode()
        there = launchers_of(out)
        if len(there) != workers or there != seen:
            seen[:], first[:] = there, [len(records(out))]
            return False
        return len(there) == workers and len(records(out)) > first[0] + 20

    seen, first = list[int](), [0]
    wait(done, f"{workers} workers did not go on")


def wait(done: Callable[[], bool], told: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, told
        time.sleep(0.1)


def records(out: Path) -> list[dict[str, float]]:
    file = out / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def launchers_of(out: Path) -> list[int]:
    """Return the processes that watch over the ranks of a run, one for each of Ray's workers."""
    found = list[int]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                given = (folder / "cmdline").read_text().split("\0")
            except OSError:  # it has just ended
                continue
            if any("megacore.launcher.command" in each for each in given) and f"out={out}" in given:
                found.append(int(folder.name))
    return sorted(found)


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(("text", "workers"), [("3", 3), ("2:8", (2, 8))])
def test_a_number_of_workers_or_a_range(text: str, workers: int | tuple[int, int]) -> None:
    assert workers_of(text) == workers


@pytest.mark.parametrize("text", ["", "0", "a", "8:2", "1:2:3", "0:2"])
def test_what_is_no_number_of_workers_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="give a number, or the least and the most"):
        workers_of(text)


@pytest.mark.parametrize(("status", "final"), [(FAILED, True), (MISUSED, True), (75, False), (143, False)])
def test_what_a_retry_would_not_mend_ends_the_run(status: int, final: bool) -> None:
    errors = {0: trained.EndedError(75, "a"), 1: trained.EndedError(status, "b"), 2: ValueError()}
    if not final:
        trained.RayVerdict().after_exception(None, errors)
        return
    with pytest.raises(trained.EndedError, match=f"on b ended with status {status}"):
        trained.RayVerdict().after_exception(None, errors)
