"""Pipeline schedules on processes whose stages sleep: what the executor and its messages add to the simulator's time.

    python -m benchmarks.pipeline --stages 2 4

A stage that sleeps needs no core, so a loaded machine tells as much as an idle one. Schedules take turns, and medians
are compared; input gradients and weight gradients take as long as a forward.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.pipeline.schedules import SCHEDULES, Cost, simulate
from megacore.parallel.virtual_stages import placement_of, virtual_stage
from megacore.parallel.weights.layout import MeshShape

RUNS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb-h1", 1),
    *((name, v) for v in (2, 4) for name in ("interleaved", "zb-interleaved")),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


class Naps:
    """Weight gradients that take a nap each, at once or when they are asked for."""

    def __init__(self) -> None:
        self.now: deque[float] | None = None

    @contextmanager
    def deferred(self) -> Iterator[Callable[[], None]]:
        naps = self.now = deque[float]()
        try:
            yield lambda: time.sleep(sum(naps))
        finally:
            self.now = None

    def take(self, seconds: float) -> None:
        if self.now is None:
            time.sleep(seconds)
        else:
            self.now.append(seconds)


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, naps: Naps) -> Tensor:
        ctx.seconds, ctx.naps = seconds, naps
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        ctx.naps.take(ctx.seconds)
        return dy.clone(), None, None


@dataclass(frozen=True)
class Tokens:
    activation: tuple[int, ...] = (64, 64)


class Chunk(nn.Module):
    def __init__(self, last: bool, seconds: float, naps: Naps) -> None:
        super().__init__()
        self.last, self.seconds, self.naps = last, seconds, naps

    def forward(self, x: Tensor | None, microbatch: Tokens) -> Tensor:
        x = torch.ones(microbatch.activation, requires_grad=True) if x is None else x
        y: Tensor = _Nap.apply(x, self.seconds, self.naps)
        return y.sum() if self.last else y


def measure(rank: int, stages: int, port: int, options: argparse.Namespace) -> None:
    """Run all schedules in turns; the first process prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=stages)
    mesh, found = Mesh.create(MeshShape(pp=stages)), dict[tuple[str, int], list[float]]()
    batch = [Tokens()] * options.microbatches
    for turn in range(options.rounds + 1):
        for name, chunks in RUNS:
            naps, placement = Naps(), placement_of(name)
            virtual = [virtual_stage(rank, chunk, stages, placement) for chunk in range(chunks)]
            modules = [Chunk(v == stages * chunks - 1, options.unit / chunks, naps) for v in virtual]
            pipeline = Pipeline(mesh, modules, torch.float32, name, naps)
            dist.barrier()
            start = time.perf_counter()
            pipeline.train(batch, torch.ones(()))
            dist.barrier()
            if turn:
                found.setdefault((name, chunks), []).append(time.perf_counter() - start)
    if rank == 0:
        print(f"{stages} stages, {options.microbatches} microbatches, forwards of {options.unit:g} s")
        print(f"{'schedule':<16}{'chunks':>7}{'seconds':>9}{'simulated':>11}{'ratio':>7}{'of 1f1b':>9}{'bubble':>8}")
        plain = statistics.median(found["1f1b", 1])
        for (name, chunks), seconds in found.items():
            schedule, cost = SCHEDULES[name](stages, chunks, options.microbatches), Cost(*[options.unit / chunks] * 3)
            timeline = simulate(schedule, cost, placement_of(name))
            median = statistics.median(seconds)
            print(
                f"{name:<16}{chunks:>7}{median:>9.2f}{timeline.total:>11.2f}{median / timeline.total:>7.2f}"
                f"{median / plain:>9.2f}{timeline.bubble:>8.1%}"
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.12, help="seconds of a forward of all chunks of a stage")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count; one more comes before")
    options = parser.parse_args()
    for stages in options.stages:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        multiprocessing.spawn(measure, (stages, port, options), nprocs=stages)


if __name__ == "__main__":
    main()
