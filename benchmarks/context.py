"""Attention and whole steps over cp beside one process, tp, dp and the exchanges of others, in one interleaved run.

    python -m benchmarks.context [--rounds 3] [--json results.json]
    python -m benchmarks.context --tokens 512 --rounds 1         # that it runs
    python -m benchmarks.context --deepspeed FOLDER --picotron FOLDER

One process has two threads, each of two processes has one, and all stay there: they take turns in each round. What is
told is the median of the rounds, and the median over the rounds of a way's time over that of one process in the same
round: a drift of the machine meets all alike. A round's time is that of its slower process. Before it is timed, the
output of every way of attention and its gradient of the queries are held against those of one process.

FOLDER is where the peer can be imported from: the site-packages with DeepSpeed, a checkout of picotron. DeepSpeed's
DistributedAttention calls torch's kernel, on tokens that lie in their order. picotron's ring makes all scores of its
half of the tokens; it runs up to 8,192 of them here (more takes gigabytes), each rank has one stretch of them, and its
torch.cuda.synchronize is taken out. Neither knows documents.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import results
from benchmarks.interleaved import free_port
from benchmarks.steps import DTYPES, LR
from benchmarks.workload import HEAP, llama
from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.registry import configure
from megacore.models.stages import layout_of
from megacore.parallel import context_split
from megacore.parallel.context_split import ContextParallel, ContextSplit
from megacore.parallel.enum_errors import ContextBalance, ContextExchange
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.kernels.documents import Documents
from megacore.parallel.kernels.scoring import PLAIN
from megacore.parallel.layers import context_attention
from megacore.parallel.layers.context_attention import ContextAttention
from megacore.parallel.layers.whole_attention import CausalAttention, DocumentAttention, MaskedAttention
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.rank_sets import inner_ranks, of_context
from megacore.parallel.weights.layout import MeshShape
from megacore.training.states.optimizer import Optimizer
from megacore.training.step import TrainStep

HEADS, KV, HEAD, VOCAB = 8, 4, 64, 4096
MODEL = {"family": "llama", **llama(vocab=VOCAB, hidden=HEADS * HEAD, layers=2, heads=HEADS, kv=KV, mlp=1376)}
PACKED = 16
"""Documents in the packed cases."""
PICOTRON_MOST = 8192
TIMEOUT = timedelta(seconds=300)
ONE, TP, DP, STRAIGHT = "one process", "tp=2", "dp=2", "ring, straight"
DEEPSPEED, PICOTRON = "DeepSpeed", "picotron"
EXCHANGES: tuple[ContextExchange, ...] = ("ring", "gather", "heads")


@dataclass(frozen=True)
class Case:
    """Some tokens, of one document or of several of one length, through attention alone or a whole step."""

    tokens: int
    documents: int
    step: bool
    dtype: str

    def __str__(self) -> str:
        documents = "one document" if self.documents == 1 else f"{self.documents} documents"
        return f"{'step' if self.step else 'attention'}, {self.tokens} tokens, {documents}, {self.dtype}"

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.tokens // self.documents,) * self.documents

    def ways(self, peers: Mapping[str, Path]) -> list[str]:
        """Which ways there are, in their turns."""
        found = [ONE, TP, *EXCHANGES]
        if self.documents > 1:
            return [*found, DP]
        if self.step:
            return found
        others = [name for name in peers if name == DEEPSPEED or self.tokens <= PICOTRON_MOST]
        return [*found, STRAIGHT, *others]


# -- in a process


Timed = Callable[[], object]


@dataclass(frozen=True)
class Rank:
    """A process: one of two, or the one that is alone."""

    index: int
    size: int
    peers: Mapping[str, Path]

    def make(self, case: Case, way: str) -> Timed:
        """What is timed. Raises AssertionError where it gives something else than one process."""
        return self.step(case, way) if case.step else self.attention(case, way)

    def attention(self, case: Case, way: str) -> Timed:
        drawn = _drawn(case)
        rows, heads, attend = self._attention(case, way)
        group = heads.stop - heads.start if heads.stop is not None else HEADS
        shared = slice(heads.start * KV // HEADS, heads.stop * KV // HEADS) if group < HEADS else slice(None)
        parts = zip(drawn, (heads, shared, shared, heads), strict=True)
        q, k, v, dy = (x[rows][:, some].contiguous().requires_grad_() for x, some in parts)

        def run() -> tuple[Tensor, ...]:
            y = attend("", q, k, v, PLAIN)
            return y, *torch.autograd.grad(y, (q, k, v), dy)

        if case.tokens <= 2048 and self.size > 1:
            _check(way, run(), case, drawn, rows, heads)
        return run

    def _attention(self, case: Case, way: str) -> tuple[Any, slice, MaskedAttention]:
        """The rows and the heads that a process has, and what computes."""
        documents, every = Documents.of(case.lengths, torch.device("cpu")), slice(None)
        whole: MaskedAttention = CausalAttention(1) if case.documents == 1 else DocumentAttention(documents, 1)
        half = slice(self.index * case.tokens // 2, (self.index + 1) * case.tokens // 2)
        if way == ONE:
            return every, every, whole
        if way == TP:
            return every, slice(self.index * HEADS // 2, (self.index + 1) * HEADS // 2), whole
        if way == DP:
            own = Documents.of(case.lengths[: case.documents // 2], torch.device("cpu"))
            return half, every, DocumentAttention(own, 1)
        if way == DEEPSPEED:
            return half, every, _deepspeed()
        if way == PICOTRON:
            return half, every, _picotron()
        mesh, context = Mesh.create(MeshShape(cp=2)), _context(way)
        mesh.make_groups(of_context(mesh.shape, context.heads))
        split = context.split(case.lengths, case.tokens)
        inner = mesh.group(inner_ranks(mesh.cp.ranks, mesh.cp.index, context.heads))
        exchange = ContextAttention.of(split, case.tokens, context, mesh.cp, inner, whole)
        return torch.from_numpy(split.indices(self.index)), every, exchange

    def step(self, case: Case, way: str) -> Timed:
        shape = {ONE: MeshShape(), TP: MeshShape(tp=2), DP: MeshShape(dp=2)}.get(way, MeshShape(cp=2))
        mesh, dtype = Mesh.create(shape), DTYPES[case.dtype]
        config = configure(MODEL | {"max_position_embeddings": case.tokens})
        context = _context(way) if shape.cp > 1 else None
        model = Model.create(config, layout_of(config, shape), mesh, dtype, context=context)
        model.parameters.initialise(seed=0)
        gradients = Gradients(model.parameters, list(model.chunks), dtype, "none")
        optimizer = Optimizer(gradients, lr=LR, master_weights=False)
        step = TrainStep(mesh, Pipeline(mesh, list(model.chunks), dtype), gradients, optimizer)
        batch = [self._microbatch(case, mesh, model)]

        def take() -> float:
            return step(batch, LR).loss.item()

        return take

    def _microbatch(self, case: Case, mesh: Mesh, model: Model) -> Microbatch:
        drawn = torch.randint(VOCAB, (case.tokens + 1,), generator=torch.Generator().manual_seed(7))
        positions = torch.cat([torch.arange(length) for length in case.lengths])
        lengths, split = case.lengths, None
        own: slice | Tensor = slice(None)
        if mesh.shape.dp > 1:
            lengths = lengths[: case.documents // 2]
            own = slice(self.index * case.tokens // 2, (self.index + 1) * case.tokens // 2)
        if mesh.shape.cp > 1:
            split = model.context.split(lengths, case.tokens)
            own = torch.from_numpy(split.indices(mesh.place.cp))
        tokens, labels, at = (x[own] for x in (drawn[:-1], drawn[1:], positions))
        activation = len(tokens) // mesh.shape.tp, HEADS * HEAD
        return Microbatch(tokens, labels, at, 1, activation, lengths if case.documents > 1 else None, split=split)


def _context(way: str) -> ContextParallel:
    exchange: ContextExchange = "ring" if way == STRAIGHT else way  # type: ignore[assignment]
    return ContextParallel(2, exchange, "auto", 2 if exchange == "heads" else 1)


@cache
def _straight(documents: tuple[int, ...], length: int, parts: int, balance: ContextBalance, heads: int) -> ContextSplit:
    """One stretch of tokens for each part, as it was before zigzags."""
    ends = [part * length // parts for part in range(parts + 1)]
    return ContextSplit(documents, tuple((span,) for span in pairwise(ends)), heads)


def _deepspeed() -> MaskedAttention:
    comm: Any = importlib.import_module("deepspeed.comm")
    comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

    sequence: Any = importlib.import_module("deepspeed.sequence.layer")

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)

    layer = sequence.DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=0)

    def attend(name: str, q: Tensor, k: Tensor, v: Tensor, scoring: object) -> Tensor:
        y: Tensor = layer(q[:, None], k[:, None], v[:, None], 1)
        return y[:, 0]

    return attend


def _picotron() -> MaskedAttention:
    manager: Any = importlib.import_module("picotron.process_group_manager")
    ring: Any = importlib.import_module("picotron.context_parallel.context_parallel")
    torch.cuda.synchronize = lambda *_: None
    if getattr(manager, "process_group_manager", None) is None:
        manager.setup_process_group_manager(tp_size=1, cp_size=2, pp_size=1, dp_size=1)

    def attend(name: str, q: Tensor, k: Tensor, v: Tensor, scoring: object) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV, 1) for x in (k, v))  # as its model does
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
        y: Tensor = ring.ring_attention(q, k, v, HEAD**-0.5, True)
        return y[0].transpose(0, 1)

    return attend


def _drawn(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of what comes out, of all tokens."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(case.tokens, heads, HEAD, generator=generator).to(DTYPES[case.dtype])
        for heads in (HEADS, KV, KV, HEADS)
    ]


def _check(way: str, got: tuple[Tensor, ...], case: Case, drawn: list[Tensor], rows: Any, heads: slice) -> None:
    q, k, v, dy = (x.detach().requires_grad_() for x in drawn)
    y = DocumentAttention(Documents.of(case.lengths, torch.device("cpu")), 1)("", q, k, v, PLAIN)
    want = y, torch.autograd.grad(y, q, dy)[0]
    for some, all_ in zip(got[:2], want, strict=True):
        exact = all_.detach()[rows][:, heads].float()
        away = float((some.detach().float() - exact).norm() / exact.norm())
        if away > (2e-2 if case.dtype == "bf16" else 1e-5):
            raise AssertionError(f"{way} gives something else: {away:.2g} away from one process")


def serve(pipe: Connection, index: int, size: int, port: int, peers: Mapping[str, Path]) -> None:
    """Take (case, way) from the pipe and answer (seconds, bytes sent), or what went wrong, until there is None."""
    torch.set_num_threads(1 if size > 1 else 2)
    sys.path += [str(folder) for folder in peers.values()]
    rank, ready, current = Rank(index, size, peers), dict[str, Timed](), None
    if size > 1:
        store = dist.TCPStore("127.0.0.1", port, size, index == 0, timeout=TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=index, world_size=size, timeout=TIMEOUT)
    sent, start_messages = [0], context_attention.start_messages

    def counted(messages: Any, *others: Any) -> Any:
        sent[0] += sum(x.numel() * x.itemsize for _, x in messages)
        return start_messages(messages, *others)

    with patch.object(context_attention, "start_messages", counted):
        while (job := pipe.recv()) is not None:
            case, way = job
            if case != current:
                ready.clear()
                current = case
            with ExitStack() as inside:
                if way == STRAIGHT:
                    for module in (context_split, context_attention):
                        inside.enter_context(patch.object(module, "split", _straight))
                try:
                    pipe.send(_time(rank, case, way, ready, sent))
                except Exception:
                    pipe.send(traceback.format_exc())
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _time(rank: Rank, case: Case, way: str, ready: dict[str, Timed], sent: list[int]) -> tuple[float, int]:
    if way not in ready:
        ready[way] = rank.make(case, way)
    if rank.size > 1:
        dist.barrier()
    sent[0], start = 0, time.perf_counter()
    ready[way]()
    return time.perf_counter() - start, sent[0]


# -- beside each other


@dataclass(frozen=True)
class Processes:
    """Two processes of one thread, and one of two."""

    pair: tuple[Connection, Connection]
    alone: Connection

    def run(self, case: Case, way: str) -> tuple[float, int]:
        """Seconds of the slower process; the bytes of keys, values and gradients that all have sent.

        Raises:
            RuntimeError: a process failed, with what it said, or said nothing in time.
        """
        pipes = (self.alone,) if way == ONE else self.pair
        for pipe in pipes:
            pipe.send((case, way))
        answers = []
        for pipe in pipes:
            if not pipe.poll(TIMEOUT.total_seconds()):
                raise RuntimeError(f"{case}: {way}: no answer in {TIMEOUT}")
            answers.append(pipe.recv())
        if failed := [answer for answer in answers if isinstance(answer, str)]:
            raise RuntimeError(f"{case}: {way}: {failed[0]}")
        seconds, sent = zip(*answers, strict=True)
        return max(seconds), sum(sent)


@dataclass(frozen=True)
class Measured:
    """Seconds of each round, and bytes sent in one, of each way."""

    case: Case
    seconds: Mapping[str, list[float]]
    sent: Mapping[str, int]

    def over(self, way: str, other: str) -> float:
        """The median of the ratios of the rounds."""
        return results.over(self.seconds[way], self.seconds[other])

    def bars(self) -> Iterator[tuple[str, float, bool]]:
        """(what is asked, what is, whether it is met)."""
        case = self.case

        def at_most(way: str, other: str, most: float) -> tuple[str, float, bool]:
            ratio = self.over(way, other)
            return f"{way} <= {most} x {other}", ratio, ratio <= most

        if case.documents > 1:
            yield at_most("ring", DP, 1.05)
            yield "ring sends no byte", self.sent["ring"], not self.sent["ring"]
            return
        if case.tokens == 8192:
            for way in EXCHANGES:
                yield at_most(way, ONE, 1.10 if case.step else 1.05)
                if case.step:
                    yield at_most(way, TP, 1.0)
        if STRAIGHT in self.seconds and case.tokens == 8192:
            ratio = self.over(STRAIGHT, "ring")
            yield f"{STRAIGHT} >= 1.5 x ring", ratio, ratio >= 1.5
        best = min(EXCHANGES, key=lambda way: statistics.median(self.seconds[way]))
        for peer in (DEEPSPEED, PICOTRON):
            if peer in self.seconds:
                ratio = self.over(peer, best)
                yield f"{peer} >= 1.3 x {best}", ratio, ratio >= 1.3


def measure(processes: Processes, case: Case, rounds: int, peers: Mapping[str, Path]) -> Measured:
    sent = dict[str, int]()

    def run(way: str) -> float:
        took, sent[way] = processes.run(case, way)
        return took

    seconds = results.in_turns({way: partial(run, way) for way in case.ways(peers)}, rounds)
    return Measured(case, seconds, sent)


def report(found: Measured) -> dict[str, Any]:
    print(f"\n{found.case}: ms, x one process, MiB sent by the exchange")
    for way, times in found.seconds.items():
        mib = found.sent[way] / 2**20
        print(f"  {way:16s} {statistics.median(times) * 1e3:8.1f}   {found.over(way, ONE):5.2f}   {mib:6.1f}")
    bars = list(found.bars())
    for asked, ratio, met in bars:
        print(f"  bar: {asked}: {ratio:.2f}: {met}")
    return {"case": asdict(found.case), "seconds": found.seconds, "sent": found.sent, "bars": bars}


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of all ways, behind one that is not counted")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192, 16384])
    parser.add_argument("--steps", type=int, nargs="*", default=[2048, 8192], help="tokens of the whole steps")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--deepspeed", type=Path, help="site-packages with DeepSpeed")
    parser.add_argument("--picotron", type=Path, help="a checkout")
    arguments = parser.parse_args()
    given = {DEEPSPEED: arguments.deepspeed, PICOTRON: arguments.picotron}
    peers = {name: folder for name, folder in given.items() if folder is not None}
    os.environ.update(HEAP | {"DS_ACCELERATOR": "cpu"})  # of the processes that are started
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    pipes, started = [], []
    for index, size in ((0, 2), (1, 2), (0, 1)):
        here, there = spawn.Pipe()
        started.append(spawn.Process(target=serve, args=(there, index, size, port, peers), daemon=True))
        pipes.append(here)
    for process in started:
        process.start()
    processes = Processes((pipes[0], pipes[1]), pipes[2])
    make = partial(Case, dtype=arguments.dtype)
    shapes = [(tokens, step) for step, each in ((False, arguments.tokens), (True, arguments.steps)) for tokens in each]
    cases = [make(tokens, documents, step) for tokens, step in shapes for documents in (1, PACKED)]
    reports = [report(measure(processes, case, arguments.rounds, peers)) for case in cases]
    for pipe in pipes:
        pipe.send(None)
    for process in started:
        process.join()
    results.write(reports, arguments.json)


if __name__ == "__main__":
    main()
