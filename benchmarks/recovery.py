"""What faults cost a run: Megacore from memory, Megacore from disk, torchrun with distributed checkpoints, torchft.

    python benchmarks/recovery.py --setup
    python benchmarks/recovery.py [--rounds 2] [--steps 600] [--ways NAME ...] [--folder FOLDER] [--most RUNS]

All ways train the same model from the same weights on the same samples in the same order, on two nodes of one rank
each, which are launchers on this machine; a supervisor starts again at once what ends before the run does. In each
round every way meets the same faults (SIGKILL) at the same steps, once all nodes are there: a rank ends, or a node with
all of its processes, or node 0, the lead, which hosts the store of Megacore's and torchrun's rendezvous. torchft's
lighthouse is no node, and lives. Before its first round each way has a run that nothing befalls.

Prints, for each way, the seconds from a kill to the next step that anybody has finished, and until all nodes go on
beyond where they were; the steps done twice, and the samples in no update; the goodput: samples that count, at the pace
where all nodes are there, over the time; and the distance of the last weights from those of the undisturbed run.

A run in which nobody finishes another step for LIMIT_S seconds has ended by that: it has no costs, and is told.

With ``--folder`` finished runs stay there: called again, it does those that lack, ``--most`` at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import yaml
from safetensors.numpy import load_file

from benchmarks import environments, results
from benchmarks.interleaved import free_port
from benchmarks.processes import family
from megacore.data.corpora import Corpora
from megacore.data.indexed import IndexedWriter
from megacore.recipe import load
from megacore.recovery.beats import read

ROOT = Path(__file__).resolve().parent.parent
NODES, BATCH, LENGTH, VOCABULARY, EVERY = 2, 16, 64, 512, 20
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
OPTIONS: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "decay": 0.1, "clip": 1.0}
RECIPE = {
    "model": {"family": "llama", **MODEL},
    "batch": {"global_size": BATCH, "micro_size": BATCH // NODES},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "clip": 1.0},
    "schedule": {"name": "constant"},
    "train": {"precision": "fp32", "device": "cpu", "timeout": 1.0},
    "evaluate": {"every": 0},
    "checkpoint": {"every": EVERY},
    "recovery": {"max_restarts": 1000},
    "log": {"peak_tflops": 1.0},
}
KINDS = ("rank", "rank", "rank", "node", "lead")
FIRST = 20
"""The step from which the time counts: before it groups are made and nodes come together."""
LIMIT_S, POLL_S = 90.0, 0.01
INITIAL, TOKENS, FINAL, COST, ENDED = "initial", "tokens.npy", "final.safetensors", "cost.json", "ended"
"""The first two and the last weights have these names in `recovery_worker.py` too."""


class NotBack(RuntimeError):
    """A run does not go on."""


@dataclass(frozen=True)
class Strike:
    """A fault: of a rank, of a node, or of the node that leads, once a step is done."""

    kind: str
    step: int
    node: int


def strikes(seed: int, steps: int) -> list[Strike]:
    """Return the faults of a round, evenly apart but for chance."""
    draw = random.Random(seed)
    kinds, gap = draw.sample(KINDS, len(KINDS)), steps // (len(KINDS) + 1)
    nodes = {"rank": range(NODES), "node": range(1, NODES), "lead": range(1)}
    return [
        Strike(kind, gap * at + draw.randrange(gap // 5), draw.choice(nodes[kind])) for at, kind in enumerate(kinds, 1)
    ]


@dataclass(frozen=True)
class FinishedStep:
    """A step that somebody has finished at a time, and the samples [first, end) of their part."""

    step: int
    time: float
    first: int
    end: int


@dataclass(frozen=True)
class Got:
    """What became of a fault: the seconds from it to the next step that was finished, and until all nodes went on
    beyond where they were; and the steps done twice."""

    strike: Strike
    pause_s: float
    back_s: float
    again: int


@dataclass(frozen=True)
class RunCost:
    """What the faults of a run have cost.

    Args:
        faults: What became of each.
        lost: Samples that are in no update.
        whole_s: Seconds from the step `FIRST` to the last one.
        pace_s: Seconds of a step where all nodes are there: from each return to the next fault.
        steps: The number of steps.
    """

    faults: Sequence[Got]
    lost: int
    whole_s: float
    pace_s: float
    steps: int

    @classmethod
    def of(cls, done: Sequence[FinishedStep], killed: Sequence[tuple[Strike, float, float]], steps: int) -> RunCost:
        """Return the costs of a run.

        Args:
            done: All steps that were finished, those done twice among them.
            killed: Each fault with its time, and that at which all nodes had gone on.
            steps: The number of steps of the run.
        """
        done = sorted(done, key=lambda each: each.time)
        got = list[Got]()
        for number, (strike, at, back) in enumerate(killed):
            until = killed[number + 1][1] if number + 1 < len(killed) else float("inf")
            before = {each.step for each in done if each.time <= at}
            after = [each for each in done if at < each.time <= until]
            again = len({each.step for each in after} & before)
            got.append(Got(strike, after[0].time - at, back - at, again))
        counts = np.zeros(steps * BATCH, bool)
        for each in done:
            counts[each.first : each.end] = True
        began = min(each.time for each in done if each.step == FIRST)
        taken, seconds = 0, 0.0
        begins, ends = [began, *(back for *_, back in killed)], [*(at for _, at, _ in killed), float("inf")]
        for begin, end in zip(begins, ends, strict=True):
            times = {each.step: each.time for each in reversed(done) if begin <= each.time <= end}
            taken += max(len(times) - 1, 0)
            seconds += max(times.values(), default=0.0) - min(times.values(), default=0.0)
        return cls(got, int((~counts).sum()), done[-1].time - began, seconds / taken, steps)

    @property
    def goodput(self) -> float:
        """The share of the time that went into samples that count, at the pace where all nodes are there."""
        return (self.steps - FIRST - self.lost / BATCH) * self.pace_s / self.whole_s


class Lines:
    """The lines of JSON that are added to a file, which may also be written anew."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._inode = path, 0, 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return
        if found.st_ino != self._inode or found.st_size < self._at:
            self._at, self._inode = 0, found.st_ino
        if found.st_size == self._at:
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            whole, end, _ = file.read().rpartition(b"\n")
        self._at += len(whole + end)
        yield from map(json.loads, whole.splitlines())


class FaultyRun(ABC):
    """A run under a supervisor.

    Args:
        folder: The folder of the run; the first weights and the samples are beside it.
        pythons: The interpreters of all environments.
        steps: The number of steps.
    """

    launchers = NODES

    def __init__(self, folder: Path, pythons: Mapping[str, Path], steps: int) -> None:
        folder.mkdir()
        self.folder, self.pythons, self.steps = folder, pythons, steps
        self.out, self.shared, self.port = folder / "out", folder.parent, free_port()
        self.out.mkdir()
        self.done = set[FinishedStep]()
        self.most = 0
        self.processes = dict[int, subprocess.Popen[bytes]]()
        self.homes, self.starts = dict[int, Path](), [0] * NODES
        self.newest = dict[Path, FinishedStep]()
        self._files = dict[Path, Lines]()

    @abstractmethod
    def command(self, node: int) -> list[str]: ...

    def environment(self, node: int) -> dict[str, str]:
        return {"NODE": str(node)}

    @abstractmethod
    def files(self) -> Iterator[Path]:
        """Yield the files that steps are recorded in."""

    def finished(self, line: Mapping[str, Any]) -> FinishedStep | None:
        """Return the step that a line records, if it does."""
        return FinishedStep(**line)

    @abstractmethod
    def rank(self, node: int) -> int:
        """Return the process of the rank of a node."""

    @abstractmethod
    def step(self, node: int) -> int:
        """Return the step that the rank of a node has come to."""

    @abstractmethod
    def weights(self) -> Path:
        """Return the file of the last weights, by Hugging Face's names."""

    def start(self, node: int) -> None:
        home = self.homes[node] = self.folder / f"start-{node}-{self.starts[node]}"
        home.mkdir()
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(home), "RESTART_COUNT": str(self.starts[node])}
        self.starts[node] += 1
        with (home / "log").open("w") as log:
            self.processes[node] = subprocess.Popen(
                self.command(node), cwd=ROOT, env=os.environ | own | self.environment(node), stdout=log, stderr=log
            )

    def look(self) -> None:
        """Take note of the steps that were finished, and start again who has ended before all were."""
        for path in self.files():
            for line in self._files.setdefault(path, Lines(path)).new():
                if each := self.finished(line):
                    self.done.add(each)
                    self.newest[path] = each
                    self.most = max(self.most, each.step)
        for node, process in self.processes.items():
            if process.poll() and self.most < self.steps:
                self.start(node)

    def until(self, what: str, true: Callable[[], bool]) -> None:
        since, most = time.monotonic(), self.most
        self.look()
        while not true():
            if self.most > most:
                since, most = time.monotonic(), self.most
            if time.monotonic() > since + LIMIT_S or max(self.starts) > 20:
                logs = "\n".join((home / "log").read_text()[-1500:] for home in self.homes.values())
                waited = f"for {LIMIT_S:.0f} s" if max(self.starts) <= 20 else "with 20 starts"
                raise NotBack(f"{what} did not come after step {self.most}, {waited}\n{logs}")
            time.sleep(POLL_S)
            self.look()

    def kill(self, strike: Strike) -> None:
        if strike.kind == "rank":
            os.kill(self.rank(strike.node), signal.SIGKILL)
            return
        for process in list(family(self.processes[min(strike.node, self.launchers - 1)].pid)):
            os.kill(process, signal.SIGKILL)

    def whole(self, beyond: int) -> bool:
        """Return whether all nodes have gone on beyond a step."""
        return self.most > beyond + 2 and all(self.step(node) >= self.most - 1 for node in range(NODES))

    def finished_by_all(self, step: int) -> bool:
        """Return whether all nodes have finished the newest step, which is at least this one: none is still at it."""
        return self.most >= step and all(self.step(node) >= self.most for node in range(NODES))

    def play(self, faults: Sequence[Strike]) -> RunCost:
        killed = list[tuple[Strike, float, float]]()
        try:
            for node in range(self.launchers):
                self.start(node)
            self.until("all nodes", partial(self.whole, 0))
            for strike in faults:
                self.until(f"step {strike.step}", partial(self.finished_by_all, strike.step))
                reached = self.most
                if reached > self.steps - FIRST:
                    raise RuntimeError(f"step {reached} of {self.steps} is too late for {strike}: give more --steps")
                self.kill(strike)
                at = time.time()
                # A node may also come back too late for the last step.
                self.until(f"all nodes after {strike}", lambda to=reached: self.whole(to) or self.most == self.steps)  # type: ignore[misc]
                killed.append((strike, at, time.time()))
            self.until("the last step", lambda: self.most >= self.steps)
            self.until("the last weights", lambda: self.weights().exists())
            self.until("the end", lambda: self.processes[0].poll() is not None)
            return RunCost.of(list(self.done), killed, self.steps)
        finally:
            self.end()

    def end(self) -> None:
        for process in self.processes.values():
            for each in list(family(process.pid)) if process.poll() is None else ():
                os.kill(each, signal.SIGKILL)
            process.wait()


class FromMemory(FaultyRun):
    """Megacore, a launcher for each node: all ranks start again from the newest checkpoint in memory."""

    overrides: Sequence[str] = ()

    def command(self, node: int) -> list[str]:
        given = [f"out={self.out}", f"train.steps={self.steps}", f"checkpoint.export={self.out / 'exported'}"]
        recipe = str(self.shared / "recipe.yaml")
        return [str(self.pythons["ours"]), "-m", "megacore.tools.main", "train", recipe, *given, *self.overrides]

    def environment(self, node: int) -> dict[str, str]:
        nodes = {"NNODES": f"1:{NODES}", "NODE_RANK": str(node), "NPROC_PER_NODE": "1"}
        return nodes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}

    def files(self) -> Iterator[Path]:
        yield self.out / "metrics.jsonl"

    def finished(self, line: Mapping[str, Any]) -> FinishedStep | None:
        if "loss" not in line:
            return None
        return FinishedStep(line["step"], line["time"], (line["step"] - 1) * BATCH, line["step"] * BATCH)

    def beat(self, node: int) -> Path:
        """Return the beat of the rank of a node, whose name ends with its process."""
        beats = self.homes[node].rglob("beat-*")
        return max(beats, key=lambda path: path.lstat().st_ctime, default=self.folder / "none")

    def rank(self, node: int) -> int:
        beat = self.beat(node).name.partition("-")[2]
        if not beat:
            raise RuntimeError(f"node {node} has no rank")
        return int(beat)

    def step(self, node: int) -> int:
        try:
            beat = read(self.beat(node))
        except OSError:
            return 0
        return 0 if beat is None else beat.step

    def weights(self) -> Path:
        return self.out / "exported" / "model.safetensors"


class FromDisk(FromMemory):
    """Megacore, from the newest checkpoint on disk."""

    overrides = ("recovery.memory=false",)


class ByTorchrun(FaultyRun):
    """torchrun around `recovery_worker.py`, an agent for each node.

    Signs of life come every second instead of every five, and who is lost is dropped after three. There is room for
    one node more: were there none, the others would go on with one that is lost before it is dropped, and wait for it
    for a minute. For more nodes they wait for five seconds instead of thirty: until a lost one is back.
    """

    def task(self) -> str:
        model = {"model": MODEL, "shared": str(self.shared), "out": str(self.out)}
        return json.dumps({**model, **OPTIONS, "steps": self.steps, "batch": BATCH, "every": EVERY, "nodes": NODES})

    def worker(self, way: str) -> list[str]:
        return [str(ROOT / "benchmarks" / "recovery_worker.py"), way, self.task()]

    def command(self, node: int) -> list[str]:
        torchrun = [str(self.pythons["torchft"]), "-m", "torch.distributed.run", "--nnodes", f"1:{NODES + 1}"]
        torchrun += ["--nproc-per-node", "1", "--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
        rendezvous = f"keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5,is_host={node == 0}"
        torchrun += ["--rdzv-conf", rendezvous]
        return [*torchrun, "--rdzv-endpoint", f"127.0.0.1:{self.port}", *self.worker("torchrun")]

    def files(self) -> Iterator[Path]:
        return self.out.glob("steps-*.jsonl")

    def rank(self, node: int) -> int:
        times = {path: each.time for path, each in self.newest.items() if path.name.startswith(f"steps-{node}-")}
        return int(max(times, key=times.__getitem__).stem.rpartition("-")[2])

    def step(self, node: int) -> int:
        mine = [each for path, each in self.newest.items() if path.name.startswith(f"steps-{node}-")]
        return max(mine, key=lambda each: each.time).step if mine else 0

    def weights(self) -> Path:
        return self.out / FINAL


class ByTorchft(ByTorchrun):
    """torchft: a replica for each node, and a lighthouse.

    A replica is dead after a second without a sign of life, instead of five, and others wait as long for it to join.
    """

    lighthouse = ("--min_replicas", "1", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000")

    def play(self, faults: Sequence[Strike]) -> RunCost:
        binary = self.pythons["torchft"].with_name("torchft_lighthouse")
        with (self.folder / "lighthouse").open("w") as log:
            bound = ["--bind", f"127.0.0.1:{self.port}"]
            process = subprocess.Popen([binary, *bound, *self.lighthouse], stdout=log, stderr=log)
        try:
            return super().play(faults)
        finally:
            process.kill()
            process.wait()

    def command(self, node: int) -> list[str]:
        return [str(self.pythons["torchft"]), *self.worker("torchft")]

    def environment(self, node: int) -> dict[str, str]:
        return super().environment(node) | {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}"}


WAYS: Mapping[str, type[FaultyRun]] = {
    "memory": FromMemory,
    "disk": FromDisk,
    "torchrun": ByTorchrun,
    "torchft": ByTorchft,
}


def write_corpus(prefix: Path, vocabulary: int, documents: int = 2000) -> None:
    rng = np.random.default_rng(1)
    with IndexedWriter(prefix, vocabulary) as writer:
        for _ in range(documents):
            writer.write(np.cumsum(rng.integers(1, 4, 200)) % vocabulary)


def prepare(folder: Path, python: Path, steps: int) -> None:
    """Make what all runs share: the recipe and the corpus, its samples in their order, and the first weights."""
    if (folder / INITIAL).exists():
        return
    write_corpus(folder / "corpus", VOCABULARY)
    data = {"train": str(folder / "corpus"), "sequence_length": LENGTH}
    init = RECIPE["checkpoint"] | {"init": str(folder / INITIAL)}  # type: ignore[operator]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"data": data, "checkpoint": init}))
    source = Corpora.open(load(folder / "recipe.yaml")).train
    tokens = np.stack([source.sample(number).tokens for number in range(steps * BATCH)])
    np.save(folder / TOKENS, tokens.astype(np.int32))
    run = ByTorchrun(folder / "first", {}, steps)
    subprocess.run([str(python), *run.worker("initial")], cwd=ROOT, check=True)
    shutil.rmtree(run.folder)


def distance(weights: Path, from_: Path) -> float:
    """Return the distance of weights from others, over the norm of those."""
    one, other = load_file(weights), load_file(from_)
    if one.keys() != other.keys():
        raise ValueError(f"{weights} and {from_} hold different tensors: {sorted(one.keys() ^ other.keys())}")
    wide = [(one[name].astype(np.float64), other[name].astype(np.float64)) for name in one]
    return float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in wide) / sum((b**2).sum() for _, b in wide)))


def run_one(folder: Path, way: str, pythons: Mapping[str, Path], steps: int, faults: Sequence[Strike]) -> None:
    """Do a run, and keep its costs, its weights and its incidents; or what has ended it."""
    shutil.rmtree(folder, ignore_errors=True)
    run = WAYS[way](folder, pythons, steps)
    try:
        cost = run.play(faults)
    except NotBack as error:
        (folder / ENDED).write_text(str(error))
        return
    shutil.copy(run.weights(), folder / FINAL)
    if (incidents := run.out / "incidents.jsonl").exists():
        shutil.copy(incidents, folder)
    shutil.rmtree(run.out)
    (folder / COST).write_text(json.dumps(asdict(cost), indent=1))


def cost_in(folder: Path) -> RunCost:
    tree = json.loads((folder / COST).read_text())
    return RunCost(**tree | {"faults": [Got(**each | {"strike": Strike(**each["strike"])}) for each in tree["faults"]]})


@dataclass(frozen=True)
class WayCosts:
    """The runs of a way that are there.

    Args:
        way: The way.
        runs: {folder: the costs} of those that faults befell.
        distances: Of the last weights of each from those of the undisturbed run.
    """

    way: str
    runs: Mapping[Path, RunCost]
    distances: Sequence[float]

    @classmethod
    def of(cls, way: str, folder: Path) -> WayCosts | None:
        straight = folder / f"{way}-0"
        found = sorted(path.parent for path in folder.glob(f"{way}-*/{COST}") if path.parent != straight)
        if not found or not (straight / COST).exists():
            return None
        away = [distance(path / FINAL, straight / FINAL) for path in found]
        return cls(way, {path: cost_in(path) for path in found}, away)

    def faults(self, *kinds: str) -> list[Got]:
        return [got for run in self.runs.values() for got in run.faults if got.strike.kind in (kinds or KINDS)]

    @property
    def goodput(self) -> float:
        """The goodput of all runs together."""
        whole_s = [cost.whole_s for cost in self.runs.values()]
        return sum(cost.goodput * cost.whole_s for cost in self.runs.values()) / sum(whole_s)

    def row(self) -> tuple[str, ...]:
        got = self.faults()
        kinds = (_seconds([each.pause_s for each in self.faults(kind)]) for kind in dict.fromkeys(KINDS))
        return (
            self.way,
            str(len(got)),
            _seconds([each.pause_s for each in got]),
            *kinds,
            _seconds([each.back_s for each in got]),
            str(sum(each.again for each in got)),
            str(sum(cost.lost for cost in self.runs.values())),
            f"{self.goodput:.1%}",
            f"{max(self.distances):.1e}",
        )


NUMBERS = ("faults", "pause", "rank", "node", "lead", "all on", "twice", "lost", "goodput", "away")


def _seconds(given: Sequence[float]) -> str:
    return f"{statistics.median(given):.2f} / {max(given):.2f}" if given else "-"


def table(ways: Sequence[WayCosts], ended: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown; of seconds it has the median and the worst.

    Args:
        ways: The ways that have runs to the end.
        ended: (way, number, what has ended it) of runs that have none.
    """
    without = [each for each in dict.fromkeys(way for way, *_ in ended) if each not in {way.way for way in ways}]
    rows = [*(way.row() for way in ways), *((way, *("-" for _ in NUMBERS)) for way in without)]
    told = [f"{way}, round {number}, has not come to its end: {why}" for way, number, why in ended]
    return "\n".join([results.table(("way", *(f"{each}:" for each in NUMBERS)), rows), "", *told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    environments.add_options(parser)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--folder", type=Path, help="where runs are kept, and looked for")
    parser.add_argument("--most", type=int, help="runs to do now")
    given = parser.parse_args()
    pythons = environments.ready(given, "torchft")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ways = [way for way in given.ways if issubclass(WAYS[way], FromMemory) or "torchft" in pythons]
    for way in set(given.ways) - set(ways):
        print(f"skipped: {way}: no environment torchft (--setup makes it)")
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, pythons.get("torchft", pythons["hf"]), given.steps)
        runs = [(way, number) for number in range(given.rounds + 1) for way in ways]
        homes = {(way, number): folder / f"{way}-{number}" for way, number in runs}
        lacking = [run for run, home in homes.items() if not ((home / COST).exists() or (home / ENDED).exists())]
        for way, number in lacking[: given.most]:
            home, faults = homes[way, number], strikes(number, given.steps) if number else []
            run_one(home, way, pythons, given.steps, faults)
            told = cost_in(home) if (home / COST).exists() else (home / ENDED).read_text()
            print(f"round {number}, {way}: {told}", flush=True)
        found = [costs for way in ways if (costs := WayCosts.of(way, folder))]
        ended = [
            (way, str(number), (home / ENDED).read_text().partition("\n")[0])
            for (way, number), home in homes.items()
            if (home / ENDED).exists()
        ]
        print(f"\n{table(found, ended)}\n")


if __name__ == "__main__":
    main()
