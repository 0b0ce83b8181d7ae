"""What a cluster's size costs each rank, on one machine: small, large, and the bar.

    python benchmarks/scale.py [--sections data groups control tokenize save resume] [--json results.json]

Corpora have a real index and a sparse file of tokens. Each measurement is a process of its own.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import processes, results
from megacore.data.indexed import HEADER, MAGIC, VERSION
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.transfer import Stored, native, plan
from megacore.store.tensor_files.shares import share_out, share_reads
from megacore.store.weight_folders.index import holder, on_disk, path_of

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 4096
TOKENS_PER_DOCUMENT = 1000
SMALL, LARGE = 10**8, 10**10
"""Tokens of the corpora."""
TEXTS = 2 * 10**7
"""Bytes of the smaller corpus to tokenize."""


@dataclass(frozen=True)
class Row:
    """What was measured of a small and of a large case, and the most that the large one may take; None: no bar."""

    what: str
    unit: str
    small: float
    large: float
    bar: float | None = None
    least: bool = False

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.large >= self.bar if self.least else self.large <= self.bar


# -- data


def write_corpus(prefix: Path, tokens: int) -> None:
    """A corpus of ``tokens`` zeros in documents of random lengths: a whole index, and a file without blocks."""
    documents = tokens // TOKENS_PER_DOCUMENT
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 2 * TOKENS_PER_DOCUMENT, documents, dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        file.write(lengths.tobytes())
        file.write(np.concatenate([np.zeros(1, np.int64), ends[:-1]]).tobytes())
        file.write(np.arange(documents + 1, dtype=np.int64).tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(ends[-1]))


OPENED = """
import json, sys, time
from megacore.config import Config, CorpusConfig, DataConfig
from megacore.data.corpora import Corpora
prefix, length, checked = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "checked"

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

config = Config(data=DataConfig((CorpusConfig(prefix),), (), 0.01, length))
before, begin = anonymous(), time.perf_counter()
corpora = Corpora.open(config, checked=checked)
opened = time.perf_counter() - begin
corpora.train.sample(0)
begin, per_epoch = time.perf_counter(), corpora.train.per_epoch
corpora.train.sample(5 * per_epoch + per_epoch // 2)
seek = time.perf_counter() - begin
begin = time.thread_time()
count = 2000
for index in range(count):
    corpora.train.sample(index + 7)
rate = count * length / (time.thread_time() - begin)
print(json.dumps({"open": opened, "seek": seek, "memory": anonymous() - before, "rate": rate}))
"""


def opened(prefix: Path, checked: bool) -> dict[str, float]:
    """Medians of three processes."""
    found = [_json_of(OPENED, prefix, LENGTH, "checked" if checked else "") for _ in range(3)]
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


def data(folder: Path) -> Iterator[Row]:
    """Opening a corpus, reaching a sample, and the memory of both; of a rank that need not check the index."""
    for name, tokens in (("small", SMALL), ("large", LARGE)):
        write_corpus(folder / name, tokens)
    small, large = (opened(folder / name, checked=True) for name in ("small", "large"))
    yield Row("data: open, each rank", "s", small["open"], large["open"], 1)
    first_small, first = (opened(folder / name, checked=False) for name in ("small", "large"))
    yield Row("data: open and check the index, one rank of a node", "s", first_small["open"], first["open"], 1)
    yield Row("data: memory of a rank", "MB", small["memory"] / 1e6, large["memory"] / 1e6, 20)
    yield Row("data: memory of the rank that checks", "MB", first_small["memory"] / 1e6, first["memory"] / 1e6, 20)
    yield Row("data: to a sample in the middle of epoch 5", "ms", small["seek"] * 1e3, large["seek"] * 1e3, 10)
    yield Row("data: samples of 4,096, a thread", "Mtokens/s", small["rate"] / 1e6, large["rate"] / 1e6, 20, least=True)


# -- start-up


GROUPS = """
import json, sys, time
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.mesh import Mesh
shape = MeshShape(pp=8, dp=int(sys.argv[1]) // 64, tp=8)
config = configure({"preset": "llama-3.1-70b"})
dist.init_process_group("fake", rank=shape.world // 2, world_size=shape.world, store=FakeStore())
real, calls = dist.new_group, 0
def new_group(*given, **more):
    global calls
    calls += 1
    return real(*given, **more)
dist.new_group = new_group
begin = time.process_time()
mesh = Mesh.create(shape)
mesh.make_groups(layout_of(config, shape, 1).replica_sets())
print(json.dumps({"calls": calls, "seconds": time.process_time() - begin}))
"""


def groups(folder: Path) -> Iterator[Row]:
    """The groups of one rank of a 70B, on a backend that talks to nobody."""
    small, large, larger = (_json_of(GROUPS, world) for world in (1024, 4096, 16384))
    yield Row("start: calls for groups, 1,024 and 4,096 ranks", "calls", small["calls"], large["calls"], 20)
    yield Row("start: CPU time for groups, 1,024 and 4,096 ranks", "s", small["seconds"], large["seconds"], 2)
    yield Row("start: CPU time for groups, 4,096 and 16,384 ranks", "s", large["seconds"], larger["seconds"], 2)


# -- between steps


CONTROL = """
import json, sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megacore.control import Control
from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.mesh import Mesh
world = int(sys.argv[1])
dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
dist.new_group = lambda ranks, **_: dist.group.WORLD
mesh = Mesh(MeshShape(dp=world), 0, torch.device("cuda"))
print(json.dumps([group.size for group in Control.create(mesh).levels]))
"""
MESSAGE_S = 50e-6
"""Assumed of a small message between hosts over TCP."""


def rounds(sizes: Sequence[int]) -> int:
    """Messages one after the other until all know the largest of a number: gloo sums around a ring, and tells by
    halves."""
    return sum(2 * (size - 1) for size in sizes) + sum((size - 1).bit_length() for size in sizes[:-1])


def control(folder: Path) -> Iterator[Row]:
    """What ranks tell each other in each step, beside what one group of all would take."""
    small, large = (list[int](_json_of(CONTROL, world)) for world in (1024, 16384))
    few, many = (float(sum(size - 1 for size in sizes)) for sizes in (small, large))
    yield Row("control: sockets of rank 0, 1,024 and 16,384 ranks", "sockets", few, many, 64)
    short, long, flat_short, flat_long = (rounds(sizes) * MESSAGE_S * 1e3 for sizes in (small, large, [1024], [16384]))
    yield Row("control: a step, at 50 us a message, 1,024 and 16,384 ranks", "ms", short, long, 10)
    yield Row("  one group of all: a step", "ms", flat_short, flat_long)


# -- checkpoints


@dataclass(frozen=True)
class Shares:
    """What the ranks of a cluster write and read of a 405B with fp32 masters and moments.

    Args:
        ranks: That write something.
        most: Bytes that the busiest of them writes.
        files: In all.
        seconds: Of CPU to share out the writing, on each rank.
        held: Bytes of the states that a resume reads.
        read: Bytes that all ranks read of them.
        most_read: Bytes that the busiest of them reads.
        opened: Files that a rank opens for it.
    """

    ranks: int
    most: int
    files: int
    seconds: float
    held: int
    read: int
    most_read: int
    opened: int


@cache
def shares(dp: int) -> Shares:
    """On pp=16 x dp x tp=8."""
    disk = on_disk(layout_of(configure({"preset": "llama-3.1-405b"}), MeshShape(pp=16, dp=dp, tp=8), 1))
    ranks, most, files, seconds, held, reads = 0, 0, 0, 0.0, 0, list[int]()
    resumed, sources = [state for state in WIDTHS if state != "weights"], dict[str, list[Stored]]()
    for place in range(disk.mesh.world):
        stored, begin = list(native(disk, [place])), time.process_time()
        states = {state: [(each, width) for each in stored] for state, width in WIDTHS.items()}
        written = share_out(disk, states, dp)
        seconds = max(seconds, time.process_time() - begin)
        sizes = [
            sum(WIDTHS[part.state] * math.prod(s.shape) for part in share for s in part.tensors) for share in written
        ]
        ranks, most, files = ranks + sum(map(bool, sizes)), max(most, *sizes), files + sum(map(len, written))
        for part in (part for share in written for part in share):
            where = path_of(part.state, holder(disk.mesh.place(place), part.number))
            sources.setdefault(part.state, []).extend(replace(each, where=where) for each in part.tensors)
        width, load = sum(WIDTHS[state] for state in resumed), [0] * dp
        for _, slices in share_reads(stored, dp):
            for each, reader in slices:
                load[reader] += width * math.prod(each.shape)
        held += width * sum(math.prod(each.shape) for each in stored)
        reads += load
    # One of the first pipeline stage and of the first tensor parallel rank: replicas are read where they lie last.
    planned = (each for state in resumed for each in plan(disk.schema, sources[state], native(disk, [0])))
    opened = {copy.source.where for _, copies in planned for copy in copies}
    return Shares(ranks, most, files, seconds, held, sum(reads), max(reads), len(opened))


WIDTHS = {"weights": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}


def save(folder: Path) -> Iterator[Row]:
    """Who writes what of a checkpoint of a 405B."""
    small, large = shares(8), shares(128)
    total = 405.85e9 * sum(WIDTHS.values())
    yield Row("save: ranks that write, of 1,024 and 16,384", "ranks", small.ranks, large.ranks, 1024, least=True)
    yield Row("save: the busiest rank", "GB", small.most / 1e9, large.most / 1e9, 1.05 * total / 1024 / 1e9)
    yield Row("save: files", "files", small.files, large.files, 4096)
    yield Row("save: CPU time to share it out", "s", small.seconds, large.seconds, 1)
    whole = 405.85e9 * 4 / 128 / 1e9
    yield Row("  a state of a place by one rank: the busiest rank", "GB", whole, whole)


def resume(folder: Path) -> Iterator[Row]:
    """Who reads what of it, on the layout that wrote it."""
    small, large = shares(8), shares(128)
    yield Row("resume: read by all, of what there is", "times", small.read / small.held, large.read / large.held, 1.05)
    busiest = 1.05 * small.held / 1024 / 1e9
    yield Row("resume: the busiest rank", "GB", small.most_read / 1e9, large.most_read / 1e9, busiest)
    yield Row(
        "resume: files that a rank opens, but for the one that checks all", "files", small.opened, large.opened, 128
    )
    yield Row("  each replica by itself: read by all, of what there is", "times", 8, 128)


# -- tokenizing


def write_texts(path: Path, size: int) -> None:
    """Lines of .jsonl, each up to 400 characters of the source of Python's own library: many documents to the byte."""
    draw, left = random.Random(0), size
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sources = [file.read_text("utf-8", errors="replace") for file in files]
    with open(path, "w", encoding="utf-8") as file:
        while left > 0:
            source = draw.choice(sources)
            start = draw.randrange(len(source) + 1)
            left -= file.write(json.dumps({"text": source[start : start + draw.randrange(400)]}) + "\n")


def tokenize(folder: Path) -> Iterator[Row]:
    """The memory of all processes together, of one corpus and of one ten times as large."""
    usages = list[processes.Usage]()
    for name, size in (("small", TEXTS), ("large", 10 * TEXTS)):
        write_texts(folder / f"{name}.jsonl", size)
    tokenizer = ["--train-vocab", "8000"]
    for name, out in (("small", "tokenizer"), ("small", "small"), ("large", "large")):
        given = [str(folder / f"{name}.jsonl"), "--out", str(folder / out), *tokenizer, "--workers", "2"]
        usages.append(processes.run([sys.executable, "-m", "megacore", "tokenize", *given], ROOT))
        tokenizer = ["--tokenizer", str(folder / "tokenizer")]
    _, small, large = usages
    yield Row("tokenize: memory of all processes", "MB", small.peak / 1e6, large.peak / 1e6, 1.1 * small.peak / 1e6)
    rate, rate_large = (
        size / 1e6 / (usage.user + usage.system) for size, usage in ((TEXTS, small), (10 * TEXTS, large))
    )
    yield Row("tokenize: text, a second of CPU", "MB", rate, rate_large)


# -- all


SECTIONS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "data": data,
    "groups": groups,
    "control": control,
    "save": save,
    "resume": resume,
    "tokenize": tokenize,
}


def _json_of(script: str, *arguments: object) -> Any:
    """Return what a script prints, which finds this repository where it runs."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[-1]} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def table(rows: Sequence[Row]) -> str:
    shown = []
    for row in rows:
        bar = "" if row.bar is None else f"{'>=' if row.least else '<='} {row.bar:,g}"
        met = {None: "", True: "met", False: "MISSED"}[row.met]
        shown.append((f"{row.what}, {row.unit}", f"{row.small:,.3g}", f"{row.large:,.3g}", bar, met))
    return results.table(("", "small:", "large:", "bar:", ""), shown)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every bar is met."""
    parser = results.parser(__doc__)
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    arguments = parser.parse_args(argv)
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        for name in arguments.sections:
            rows += SECTIONS[name](Path(folder))
    print(table(rows))
    results.write([asdict(row) for row in rows], arguments.json)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
