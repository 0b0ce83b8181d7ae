"""Pipeline schedules on processes whose stages sleep: what the executor and its messages add to the simulator's time.

    python -m benchmarks.pipeline --stages 2 4
    python -m benchmarks.pipeline --products --stages 2 --microbatches 4

A stage that sleeps needs no core, so a loaded machine tells as much as an idle one. Schedules take turns, and medians
are compared; input gradients and weight gradients take as long as a forward.

With --products stages multiply, one thread each, beside the same schedules of torch.distributed.pipelining, whose
stages have torch's linears of the same sizes: it needs an idle core for each stage, and ends if others have them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

from benchmarks.interleaved import free_port
from benchmarks.results import in_turns, over
from megacore.parallel.enum_errors import SPLIT_BACKWARD
from megacore.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear, hand_to
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import WeightGradient
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


class Deferred:
    """Weight gradients, computed at once or when they are asked for."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] | None = None

    @contextmanager
    def deferred(self) -> Iterator[Callable[[], None]]:
        waiting = self._waiting = deque[Callable[[], None]]()

        def compute() -> None:
            while waiting:
                waiting.popleft()()

        try:
            yield compute
        finally:
            self._waiting = None

    def take(self, compute: Callable[[], None]) -> None:
        if self._waiting is None:
            compute()
        else:
            self._waiting.append(compute)


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, weights: Deferred) -> Tensor:
        ctx.seconds, ctx.weights = seconds, weights
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        ctx.weights.take(partial(time.sleep, ctx.seconds))
        return dy.clone(), None, None


@dataclass(frozen=True)
class Tokens:
    activation: tuple[int, ...] = (64, 64)


class Chunk(nn.Module):
    def __init__(self, last: bool, seconds: float, weights: Deferred) -> None:
        super().__init__()
        self.last, self.seconds, self.weights = last, seconds, weights

    def forward(self, x: Tensor | None, microbatch: Tokens) -> Tensor:
        x = torch.ones(microbatch.activation, requires_grad=True) if x is None else x
        y: Tensor = _Nap.apply(x, self.seconds, self.weights)
        return y.sum() if self.last else y


def run(rank: int, stages: int, port: int, options: argparse.Namespace) -> None:
    """Run all schedules in turns; the first process prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=stages)
    (compare if options.products else measure)(Mesh.create(MeshShape(pp=stages)), options)
    dist.barrier()
    dist.destroy_process_group()


def seconds(step: Callable[[], object]) -> float:
    """Return those that a step of all ranks takes."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def measure(mesh: Mesh, options: argparse.Namespace) -> None:
    """Run stages that sleep."""
    stages, rank = mesh.shape.pp, mesh.place.pp

    def step_of(name: str, chunks: int) -> Callable[[], object]:
        weights = Deferred()
        virtual = [virtual_stage(rank, chunk, stages, placement_of(name)) for chunk in range(chunks)]
        modules = [Chunk(v == stages * chunks - 1, options.unit / chunks, weights) for v in virtual]
        pipeline = Pipeline(mesh, modules, torch.float32, name, weights)
        return lambda: pipeline.train([Tokens()] * options.microbatches, torch.ones(()))

    found = in_turns({each: partial(seconds, step_of(*each)) for each in RUNS}, options.rounds)
    if rank == 0:
        print(f"{stages} stages, {options.microbatches} microbatches, forwards of {options.unit:g} s")
        print(f"{'schedule':<16}{'chunks':>7}{'seconds':>9}{'simulated':>11}{'ratio':>7}{'of 1f1b':>9}{'bubble':>8}")
        plain = statistics.median(found["1f1b", 1])
        for (name, chunks), times in found.items():
            schedule, cost = SCHEDULES[name](stages, chunks, options.microbatches), Cost(*[options.unit / chunks] * 3)
            timeline = simulate(schedule, cost, placement_of(name))
            median = statistics.median(times)
            print(
                f"{name:<16}{chunks:>7}{median:>9.2f}{timeline.total:>11.2f}{median / timeline.total:>7.2f}"
                f"{median / plain:>9.2f}{timeline.bubble:>8.1%}"
            )


# -- stages that multiply

PEERS: Mapping[tuple[str, int], Any] = {
    ("gpipe", 1): pipelining.ScheduleGPipe,
    ("1f1b", 1): pipelining.Schedule1F1B,
    ("interleaved", 2): pipelining.ScheduleInterleaved1F1B,
    ("zb-interleaved", 2): pipelining.ScheduleInterleavedZeroBubble,
    ("zb-v", 2): pipelining.ScheduleZBVZeroBubble,
}
"""{ours: torch's of the same kind}; of ZB-H1 it has none."""
BLOCKS, TOKENS, WIDTH = 8, 512, 512
"""Blocks of all stages together, and the sizes of an activation."""
BUSY = 0.1
"""The share of a core that others may have."""


def add(parameter: nn.Parameter, gradient: WeightGradient | Tensor) -> None:
    """Add a weight gradient to those of the microbatches before."""
    assert isinstance(gradient, WeightGradient)
    first = parameter.grad is None
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    gradient.add_to(parameter.grad, first)


class Block(nn.Module):
    """x + down(gelu(up(x))): [tokens, width] -> the same."""

    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down: nn.Module = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        if mesh is not None:
            self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, mesh=mesh, bias=False)
            self.down = RowParallelLinear(4 * WIDTH, WIDTH, mesh=mesh, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class Products(nn.Module):
    """The blocks of a virtual stage, of ours or of torch's."""

    def __init__(self, blocks: int, last: bool, mesh: Mesh | None) -> None:
        super().__init__()
        self.blocks, self.last = nn.Sequential(*(Block(mesh) for _ in range(blocks))), last

    def forward(self, x: Tensor | None, microbatch: Tokens | None = None) -> Tensor:
        if x is None:
            assert microbatch is not None
            x = torch.ones(microbatch.activation, requires_grad=True)
        y: Tensor = self.blocks(x)
        return y.sum() if self.last and microbatch is not None else y


def step_of(mesh: Mesh, name: str, chunks: int, microbatches: int, ours: bool) -> Callable[[], object]:
    """Return what runs a step."""
    stages, rank = mesh.shape.pp, mesh.place.pp
    virtual = [virtual_stage(rank, chunk, stages, placement_of(name)) for chunk in range(chunks)]
    ends, blocks = stages * chunks - 1, BLOCKS // (stages * chunks)
    modules = [Products(blocks, v == ends, mesh if ours else None) for v in virtual]
    batch, x = [Tokens((TOKENS, WIDTH))] * microbatches, torch.ones(microbatches * TOKENS, WIDTH)
    if ours:
        weights, parts = Deferred(), [each for module in modules for each in module.modules()]
        hand_to(lambda *given: weights.take(partial(add, *given)), parts, name in SPLIT_BACKWARD)
        pipeline = Pipeline(mesh, modules, torch.float32, name, weights)
        return lambda: pipeline.train(batch, torch.ones(()))
    sample = torch.ones(TOKENS, WIDTH)
    placed = [
        pipelining.PipelineStage(each, v, ends + 1, mesh.device, input_args=sample)
        for each, v in zip(modules, virtual, strict=True)
    ]
    several = issubclass(PEERS[name, chunks], pipelining.schedules.PipelineScheduleMulti)
    schedule = PEERS[name, chunks](placed if several else placed[0], microbatches, lambda y, _: y.sum())
    given, target = (x,) * (0 in virtual), x if ends in virtual else None
    return lambda: schedule.step(*given, target=target)


def compare(mesh: Mesh, options: argparse.Namespace) -> None:
    """Run ours and torch's that multiply."""
    runs = [(*run, who) for run in RUNS if run[1] < 4 for who in ("ours", "torch") if who == "ours" or run in PEERS]
    steps = {run: step_of(mesh, run[0], run[1], options.microbatches, run[2] == "ours") for run in runs}
    found = in_turns({run: partial(seconds, step) for run, step in steps.items()}, options.rounds)
    if mesh.rank == 0:
        each = f"{TOKENS} tokens, {BLOCKS} blocks {WIDTH} wide"
        print(f"{mesh.shape.pp} stages, {options.microbatches} microbatches of {each}")
        print(f"{'schedule':<16}{'chunks':>7}{'of':>7}{'seconds':>9}{'of 1f1b':>9}{'of torch':>10}")
        for (name, chunks, who), times in found.items():
            plain, peer = found["1f1b", 1, "ours"], found.get((name, chunks, "torch"))
            own = f"{name:<16}{chunks:>7}{who:>7}{statistics.median(times):>9.3f}{over(times, plain):>9.2f}"
            print(own + (f"{over(times, peer):>10.2f}" if peer and who == "ours" else ""))


def refuse_a_busy_machine(stages: int) -> None:
    """End unless there is a core for each stage, which nobody else had in the last two seconds."""

    def busy() -> float:
        numbers = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return (sum(numbers[:3]) + sum(numbers[5:8])) / os.sysconf("SC_CLK_TCK")

    before = busy()
    time.sleep(2)
    others, cores = (busy() - before) / 2, len(os.sched_getaffinity(0))
    if cores < stages or others > BUSY:
        sys.exit(
            f"--products needs {stages} idle cores: this process may use {cores}, and others had {others:.2f} of one "
            f"for two seconds (at most {BUSY}): run it alone, or leave --products out"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.12, help="seconds of a forward of all chunks of a stage")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count; one more comes before")
    parser.add_argument("--products", action="store_true", help="stages multiply, ours and torch's in turns")
    options = parser.parse_args()
    for stages in options.stages:
        if options.products:
            refuse_a_busy_machine(stages)
        multiprocessing.spawn(run, (stages, free_port(), options), nprocs=stages)


if __name__ == "__main__":
    main()
