"""What the loss of a node and its return cost: Megacore, torchrun with distributed checkpoints, and torchft.

    python benchmarks/recovery_peers.py --setup
    python benchmarks/recovery_peers.py [--nodes 3] [--faults 3] [--steps 600] [--rounds 1] [--ways ...] [--json FILE]

Each node is a launcher with one rank. Nodes are killed (SIGKILL, all of their processes at once) one after the other
at the same steps and started again once the others go on; the next one follows when that one is back. Node 0, which
hosts the store of Megacore's and torchrun's rendezvous, is spared. The ways take turns; each has a run of its own that
nothing befalls. Prints, for each way, the seconds from a kill to the next new step, those of the longest pause until
the node is back (medians and worst), the steps done twice, the samples lost, the goodput (samples that counted, at the
pace of the undisturbed run, over the time), and the distance of the final weights from those of the undisturbed run.

``restart`` is one launcher of Megacore with as many ranks, of which one is killed, and all start again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import yaml
from safetensors.torch import load_file

from benchmarks import environments
from benchmarks.recovery import RECIPE, ROOT, VOCABULARY, descendants, victim, write_corpus
from megacore import checkpoints
from megacore.recovery.phases import read

BATCH, EVERY, LENGTH = 12, 20, 64
WAYS = ("in place", "restart", "torchrun", "torchft")
LIMIT_S = 120.0
WORKER = Path(__file__).with_name("recovery_worker.py")


@dataclass(frozen=True)
class Cost:
    """What the faults of one run have cost.

    Args:
        pauses: Seconds from each kill to the next new step.
        joins: Seconds of the longest pause until the node that was killed is back.
        again: Steps that were done twice.
        lost: Samples that did not count.
        whole_s: Seconds from the first step to the last one.
        counted: Samples that counted.
        distance: Of the final weights from those of the undisturbed run, over their norm.
    """

    pauses: Sequence[float]
    joins: Sequence[float]
    again: int
    lost: int
    whole_s: float
    counted: int
    distance: float = 0.0


@dataclass(frozen=True)
class Record:
    """A step that counted."""

    step: int
    time: float
    samples: int


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Run:
    """A run of one way over several nodes.

    Args:
        way: One of `WAYS`.
        folder: A new folder for it.
        recipe: Megacore's recipe.
        python: The interpreter of the peers.
        nodes: The number of nodes.
        steps: The number of steps.
    """

    def __init__(self, way: str, folder: Path, recipe: Path, python: Path, nodes: int, steps: int) -> None:
        folder.mkdir()
        self.way, self.folder, self.nodes, self.python = way, folder, nodes, python
        self.out, self.port, self.steps = folder / "out", free_port(), steps
        self.given = [str(recipe), f"out={self.out}", f"train.steps={steps}"]
        self.started = 0
        self.processes = dict[int, subprocess.Popen[bytes]]()
        self.homes = dict[int, Path]()
        self.lighthouse: subprocess.Popen[bytes] | None = None
        if way == "torchft":
            bind = ["--bind", f"127.0.0.1:{self.port}", "--min_replicas", "1", "--join_timeout_ms", "1000"]
            binary = python.with_name("torchft_lighthouse")
            self.lighthouse = subprocess.Popen([binary, *bind], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for node in range(1 if way == "restart" else nodes):
            self.start(node)

    def start(self, node: int) -> None:
        home = self.homes[node] = self.folder / f"start-{self.started}"
        home.mkdir()
        self.started += 1
        with (home / "log").open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(home)} | self._own(node)
            self.processes[node] = subprocess.Popen(
                self._command(), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def _own(self, node: int) -> dict[str, str]:
        match self.way:
            case "in place":
                own = {"NNODES": f"1:{self.nodes}", "NODE_RANK": str(node), "NPROC_PER_NODE": "1"}
                return own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "PYTHONPATH": str(ROOT)}
            case "restart":
                return {"NPROC_PER_NODE": str(self.nodes), "PYTHONPATH": str(ROOT)}
            case "torchft":
                return {"REPLICA": str(node), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}"}
        return {}

    def _command(self) -> list[str]:
        if self.way in ("in place", "restart"):
            given = [*self.given, f"recovery.in_place={str(self.way == 'in place').lower()}"]
            return [sys.executable, "-m", "tools.main", "train", *given]
        model = {key: value for key, value in RECIPE["model"].items() if key != "family"}  # type: ignore[attr-defined]
        task = {"out": str(self.out), "model": model, "lr": 1e-3, "length": LENGTH, "batch": BATCH}
        task |= {"steps": self.steps, "every": EVERY, "nodes": self.nodes}
        worker = [str(WORKER), self.way, json.dumps(task)]
        if self.way == "torchft":
            return [str(self.python), *worker]
        torchrun = [str(self.python), "-m", "torch.distributed.run", "--nnodes", f"1:{self.nodes}"]
        torchrun += ["--nproc-per-node", "1", "--max-restarts", "100", "--rdzv-backend", "c10d"]
        # The least that torchrun's own options allow; by default it waits 30 s for more nodes, and 5 s between beats.
        torchrun += ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"]
        return [*torchrun, "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "run", *worker]

    def records(self) -> list[Record]:
        """Return the steps that counted in the order in which they were done; of a replica's, the first one's."""
        names = "metrics.jsonl" if self.way in ("in place", "restart") else "steps-*.jsonl"
        found = list[Record]()
        for path in sorted(self.out.glob(names)):
            for line in path.read_text().splitlines():
                try:
                    made = json.loads(line)
                    found.append(Record(made["step"], made["time"], made.get("samples", BATCH)))
                except (ValueError, KeyError, TypeError):  # just being written
                    continue
        if self.way != "torchft":
            return sorted(found, key=lambda each: each.time)
        first = {each.step: each for each in sorted(found, key=lambda each: -each.time)}
        return sorted(first.values(), key=lambda each: each.time)

    def world(self) -> int:
        """Return the number of ranks that take part, as far as one can see."""
        if self.way == "restart":
            return self.nodes
        if self.way == "in place":
            beats = [read(link) for home in self.homes.values() for link in home.rglob("rank-*")]
            return sum(beat is not None and beat.step > 0 for beat in beats)
        newest = list[dict[str, float]]()
        for path in self.out.glob("steps-*.jsonl"):
            newest += [json.loads(line) for line in path.read_text().splitlines()[-1:] if line.endswith("}")]
        return int(max(newest, key=lambda each: each["time"])["world"]) if newest else 0

    def kill(self, node: int) -> None:
        """Kill all processes of a node at once; of one launcher, one rank."""
        launcher = self.processes[0 if self.way == "restart" else node]
        if self.way == "restart":
            rank = victim(launcher.pid, node)
            doomed = [rank] if rank else []
        else:
            doomed = [*descendants(launcher.pid), launcher.pid]
        for process in doomed:
            os.kill(process, signal.SIGKILL)

    def until(self, what: str, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not true():
            if time.monotonic() > deadline or self.processes[0].poll() is not None:
                log = (self.homes[0] / "log").read_text()[-1500:]
                raise SystemExit(f"{self.way}: {what} did not come, {len(self.records())} steps\n{log}")
            time.sleep(0.05)

    def has(self, step: int) -> bool:
        return self.most() >= step

    def most(self) -> int:
        return max((each.step for each in self.records()), default=0)

    def end(self) -> None:
        for process in self.processes.values():
            for each in (*descendants(process.pid), process.pid) if process.poll() is None else ():
                os.kill(each, signal.SIGKILL)
            process.wait()
        if self.lighthouse is not None:
            self.lighthouse.kill()
            self.lighthouse.wait()

    def weights(self) -> torch.Tensor:
        """Return the final weights as one vector."""
        if self.way in ("in place", "restart"):
            files = sorted(checkpoints.newest_of(self.out).rglob("*.safetensors"))
            named = {
                f"{name}": value for file in files if "model" in str(file) for name, value in load_file(file).items()
            }
        else:
            named = load_file(self.out / "final.safetensors")
        return torch.cat([named[name].double().flatten() for name in sorted(named)])

    def costs(self, pauses: Sequence[float], joins: Sequence[float]) -> Cost:
        records = self.records()
        last = {each.step: each for each in records}
        counted = sum(each.samples for each in last.values())
        again = len(records) - len(last)
        whole = records[-1].time - records[0].time
        return Cost(pauses, joins, again, self.steps * BATCH - counted, whole, counted)


def play(run: Run, kills: Sequence[tuple[int, int]]) -> Cost:
    """Kill these nodes, each when a step is done and all are there, and end the run."""
    pauses, joins = list[float](), list[float]()
    try:
        for step, node in kills:
            run.until(f"step {step}", partial(run.has, step))
            run.until("a whole world", lambda: run.world() >= run.nodes)
            reached = run.most()
            run.kill(node)
            killed = time.time()
            run.until("a new step", partial(run.has, reached + 2))
            pauses.append(next(each.time for each in run.records() if each.step > reached + 1) - killed)
            if run.way == "restart":
                continue
            back = time.time()
            run.start(node)
            run.until("the node", lambda: run.world() >= run.nodes)
            times = [each.time for each in run.records() if each.time >= back]
            joins.append(max(after - before for before, after in pairwise(times)))
        run.processes[0].wait(LIMIT_S)
        return run.costs(pauses, joins)
    finally:
        run.end()


def set_up() -> Path:
    environments.set_up("torchft")
    return environments.find({})["torchft"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--setup", action="store_true", help="make the peers' environment first")
    parser.add_argument("--python", type=Path, help="the interpreter of the peers' environment")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    python = given.python or (set_up() if given.setup else environments.find({})["torchft"])
    draw, found = random.Random(1), dict[str, list[Cost]]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_corpus(folder / "corpus", VOCABULARY, 2000)
        recipe = folder / "recipe.yaml"
        data = {"train": str(folder / "corpus"), "sequence_length": LENGTH}
        batch = {"global_size": BATCH, "micro_size": 2}
        recipe.write_text(yaml.safe_dump(RECIPE | {"data": data, "batch": batch}))
        straight = dict[str, tuple[Cost, torch.Tensor]]()
        for number in range(given.rounds):
            gap = given.steps // (given.faults + 1)
            kills = [
                (gap * (at + 1) + draw.randrange(gap // 4), draw.randrange(1, given.nodes))
                for at in range(given.faults)
            ]
            for way in given.ways:
                if way not in straight:
                    run = Run(way, folder / f"{way}-straight", recipe, python, given.nodes, given.steps)
                    straight[way] = play(run, []), run.weights()
                    print(f"{way}, undisturbed: {straight[way][0].whole_s:.1f} s", flush=True)
                run = Run(way, folder / f"{way}-{number}", recipe, python, given.nodes, given.steps)
                cost = play(run, kills)
                away = (run.weights() - straight[way][1]).norm() / straight[way][1].norm()
                cost = Cost(**{**asdict(cost), "distance": float(away)})
                found.setdefault(way, []).append(cost)
                print(f"round {number + 1}, {way}: {told([cost], straight[way][0])}", flush=True)
    print()
    for way, costs in found.items():
        print(f"{way:<10} {told(costs, straight[way][0])}")
    if given.json is not None:
        given.json.write_text(json.dumps({way: [asdict(each) for each in costs] for way, costs in found.items()}))


def told(costs: Sequence[Cost], straight: Cost) -> str:
    pauses = [each for cost in costs for each in cost.pauses]
    joins = [each for cost in costs for each in cost.joins]
    share = sum(each.counted for each in costs) * straight.whole_s / straight.counted / sum(c.whole_s for c in costs)
    back = f"{statistics.median(joins):.2f} / {max(joins):.2f} s" if joins else "-"
    return (
        f"lost {statistics.median(pauses):.2f} / {max(pauses):.2f} s, back {back} (median / worst of {len(pauses)}), "
        f"{sum(each.again for each in costs)} steps twice, {sum(each.lost for each in costs)} samples lost, "
        f"goodput {share:.1%}, weights {max(each.distance for each in costs):.1e} away"
    )


if __name__ == "__main__":
    main()
