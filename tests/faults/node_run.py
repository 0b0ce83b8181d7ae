"""Faults of whole nodes: several launchers on this machine, each in a network namespace of its own.

``python node_run.py KIND ...`` plays them, as root: agents are killed and stopped, cables are cut, nodes come, leave,
and spares step in. Every run ends with the weights of one that nothing befell, within 1e-9 in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = map(str, (Path(__file__).parents[2], Path(__file__).parents[1]))

from engine import RECIPE, write_recipe
from live_run import ROOT, metrics_of
from safetensors.torch import load_file

from megacore import checkpoints
from megacore.recovery import incidents
from megacore.recovery.phases import Reading, read

STEPS = ("train.steps=120", "train.timeout=2", "evaluate.every=0", "checkpoint.every=40", "checkpoint.at_end=true")
PORT = 29611


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def networks(count: int) -> Iterator[Sequence[str]]:
    """Make network namespaces that are connected by a bridge -> their names; node n has the address 10.77.0.n + 1."""
    name = f"m{os.getpid()}-{time.time_ns() // 10**6 % 1000}"
    made = [f"{name}{n}" for n in range(count)]
    with contextlib.ExitStack() as stack:
        bridge = f"{name}-br"
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        for n, each in enumerate(made):
            ip("netns", "add", each)
            stack.callback(ip, "netns", "del", each)
            ip("link", "add", f"{each}-out", "type", "veth", "peer", "name", "eth0", "netns", each)
            ip("link", "set", f"{each}-out", "master", bridge, "up")
            ip("-n", each, "addr", "add", f"10.77.0.{n + 1}/24", "dev", "eth0")
            ip("-n", each, "link", "set", "eth0", "up")
            ip("-n", each, "link", "set", "lo", "up")
        yield made


@dataclass
class NodeRun:
    """A run over nodes.

    Args:
        folder: The folder of all of it.
        names: The network namespaces of the nodes.
        nodes: NNODES.
        overrides: Those of the recipe.
    """

    folder: Path
    names: Sequence[str]
    nodes: str
    overrides: Sequence[str] = ()
    launchers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.out = self.folder / "out"
        self.recipe = write_recipe(self.folder, RECIPE)

    def start(self, node: int, *more: str) -> None:
        temporary = self.folder / f"tmp-{node}"
        temporary.mkdir(exist_ok=True)
        own = {"NNODES": self.nodes, "NODE_RANK": str(min(node, 1)), "NPROC_PER_NODE": "1", "TMPDIR": str(temporary)}
        own |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        own |= {"GLOO_SOCKET_IFNAME": "eth0"}
        given = [self.recipe, f"out={self.out}", *STEPS, *self.overrides, *more]
        with (self.folder / f"said-{node}").open("a") as said:
            self.launchers[node] = subprocess.Popen(
                ["ip", "netns", "exec", self.names[node], sys.executable, "-m", "tools.main", "train", *given],
                cwd=ROOT,
                env=os.environ | own,
                stdout=said,
                stderr=said,
            )

    def beat(self, node: int) -> Reading | None:
        found = [read(link) for link in (self.folder / f"tmp-{node}").glob("megacore-*/rank-*")]
        return max((beat for beat in found if beat is not None), key=lambda beat: beat.since, default=None)

    def step(self, node: int) -> int:
        seen = self.beat(node)
        return -1 if seen is None or seen.phase in ("start", "recover") else seen.step

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.005)
        return False

    def seconds(self, node: int = 0) -> float | None:
        """Wait until a node has finished a step after a break -> the seconds until then; None where there was none."""
        at = time.monotonic()
        if not self.wait(lambda: self.step(node) < 0 or self.launchers[node].poll() is not None, 60):
            return None
        if not self.wait(lambda: self.step(node) >= 0, 60):
            return None
        first = self.step(node)
        return time.monotonic() - at if self.wait(lambda: self.step(node) > first, 30) else None

    def processes(self, node: int) -> list[int]:
        """Return the launcher of a node and all that it has started."""
        found, more = list[int](), [self.launchers[node].pid]
        while more:
            pid = more.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for each in Path(f"/proc/{pid}/task").glob("*/children"):
                    more += map(int, each.read_text().split())
        return found

    def send(self, node: int, number: signal.Signals, all_of_it: bool = True) -> None:
        for pid in self.processes(node) if all_of_it else [self.launchers[node].pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, seconds: float = 120.0) -> dict[int, int | None]:
        """Wait for the end of all launchers -> {node: status}."""
        deadline = time.monotonic() + seconds
        for each in self.launchers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(max(0.1, deadline - time.monotonic()))
        found = {node: each.poll() for node, each in self.launchers.items()}
        for node, status in found.items():
            if status is None:
                self.send(node, signal.SIGCONT)
                self.send(node, signal.SIGKILL)
                self.launchers[node].wait()
        return found

    def said(self, node: int) -> str:
        return (self.folder / f"said-{node}").read_text(errors="replace")


# -- kinds


def killed(run: NodeRun) -> None:
    run.send(1, signal.SIGKILL, all_of_it=False)


def node_killed(run: NodeRun) -> None:
    run.send(1, signal.SIGKILL)


def lead_killed(run: NodeRun) -> None:
    run.send(0, signal.SIGKILL, all_of_it=False)


def stopped(run: NodeRun) -> None:
    run.send(1, signal.SIGSTOP)


def cut_off(run: NodeRun) -> None:
    ip("link", "set", f"{run.names[1]}-out", "down")


def leaves(run: NodeRun) -> None:
    run.send(1, signal.SIGTERM, all_of_it=False)


def rank_killed(run: NodeRun) -> None:
    launcher = run.processes(1)[0]
    children = [pid for pid in run.processes(1) if pid != launcher]
    for pid in children:
        if any(link.resolve().name in _maps(pid) for link in (run.folder / "tmp-1").glob("megacore-*/rank-*")):
            os.kill(pid, signal.SIGKILL)


def comes(run: NodeRun) -> None:
    run.start(len(run.launchers))


def _maps(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text()
    return ""


@dataclass(frozen=True)
class NodeKind:
    """A kind of fault of a node.

    Args:
        strike: Does it.
        nodes: NNODES.
        first: The nodes that begin.
        named: The incidents that must be there.
        ends: The statuses that node 0 may end with; what ends with 75 is started again.
    """

    strike: Callable[[NodeRun], None]
    nodes: str
    first: int
    named: Sequence[str]
    ends: Sequence[int | None] = (0,)


KINDS: Mapping[str, NodeKind] = {
    "rank killed": NodeKind(rank_killed, "2", 2, ("killed",)),
    "agent killed": NodeKind(killed, "1:2", 2, ("agent_lost",)),
    "node killed": NodeKind(node_killed, "1:2", 2, ("agent_lost",)),
    "node stopped": NodeKind(stopped, "1:2", 2, ("agent_lost",)),
    "partition": NodeKind(cut_off, "1:2", 2, ("agent_lost",)),
    "leave": NodeKind(leaves, "1:2", 2, ("node_leaves",)),
    "join": NodeKind(comes, "1:2", 1, ("node_joins",)),
    "spare steps in": NodeKind(node_killed, "1:2", 3, ("agent_lost", "node_joins")),
    "lead killed": NodeKind(lead_killed, "1:2", 2, (), (-signal.SIGKILL,)),
}


def whole(folder: Path) -> Path:
    """Return the folder of a run that nothing befalls, on one node."""
    with networks(1) as names:
        run = NodeRun(folder, names, "1")
        run.start(0)
        if run.end() != {0: 0}:
            raise AssertionError(run.said(0))
    return run.out


def distance(out: Path, other: Path) -> float:
    """Return how far the last weights of two runs are apart, relative to the largest of each tensor."""
    ours, theirs = checkpoints.newest_of(out), checkpoints.newest_of(other)
    if ours.name != theirs.name:
        return float("inf")
    apart = [0.0]
    for file in sorted(theirs.glob("weights/*.safetensors")):
        mine = load_file(ours / file.relative_to(theirs))
        for name, tensor in load_file(file).items():
            apart.append(float((mine[name] - tensor).abs().max() / tensor.abs().max()))
    return max(apart)


def play(name: str, folder: Path, undisturbed: Path) -> bool:
    """Play a fault -> whether it left no trace, and was told by the right name."""
    kind, seconds = KINDS[name], None
    with networks(max(2, kind.first)) as names:
        run = NodeRun(folder, names, kind.nodes)
        for node in range(kind.first):
            run.start(node)
            if node == 1 and kind.first > 2:
                run.wait(lambda: run.step(1) >= 0, 90)
        if began := run.wait(lambda: run.step(0) >= 20, 90):
            kind.strike(run)
            seconds = run.seconds(1 if name == "lead killed" else 0)
        statuses = run.end(100)
        if name == "lead killed":
            for node in range(kind.first):
                run.start(node, "checkpoint.resume=auto")
            again = run.end(100)
    told = [(each.event.kind, each.event.node, each.decision.action) for each in incidents.read(run.out)]
    took = "-" if seconds is None else f"{seconds:.2f} s"
    wrong = [] if began else ["did not begin"]
    if statuses[0] not in kind.ends or (name == "lead killed" and (statuses[1], again[0]) != (75, 0)):
        wrong.append("status")
    wrong += [f"no {each}" for each in kind.named if each not in {kind for kind, *_ in told}]
    steps, apart = len(metrics_of(run.out)), distance(run.out, undisturbed)
    wrong += ["weights"] * (apart > 1e-9) + ["steps"] * (steps != len(metrics_of(undisturbed)))
    verdict = ", ".join(wrong) or "as undisturbed"
    print(f"{name} | {took} | {verdict} | statuses {statuses} | {apart:.1e} apart | {told}", flush=True)
    for node in run.launchers if wrong else ():
        lines = [line for line in run.said(node)[-2500:].split("\n") if "step/s" not in line]
        print("\n".join([f"-- node {node}", *lines]), flush=True)
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults of whole nodes.")
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    undisturbed = whole(folder / "whole")
    well = [play(name, folder / name.replace(" ", "-"), undisturbed) for name in given.kinds]
    shutil.rmtree(folder, ignore_errors=True)
    return int(not all(well))


if __name__ == "__main__":
    sys.exit(main())
