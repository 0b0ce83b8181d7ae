"""The function behind `megacore plan --trace`: a rank of each pipeline stage runs steps on a simulated GPU, and their
logs are played on the devices of a table. Nothing of this is measured.

All microbatches after the first few are alike: steps of two sizes are traced, and the one that a recipe asks for
follows along the line through them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from io import StringIO
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from megacore.config import Config
from megacore.models.config import flops_per_token
from megacore.models.registry import configure
from megacore.parallel.weights.layout import Coordinates
from megacore.planning.costs import ALL_REDUCE
from megacore.planning.run_plan import problems_on_paper, ranks_of
from megacore.planning.step_time import Cluster
from megacore.planning.trace.log import Entry, StepStart
from megacore.planning.trace.timeline import Costs, Interval, StepTimeline, beside, covered, length, play
from megacore.recipe import ConfigError

KINDS = ("products", "attention", "memory", "copies")
"""What bounds the kernels of a stage: seconds of each are in a row of the table."""


@dataclass(frozen=True)
class StageTrace:
    """A step of one rank of a stage.

    Args:
        launches: Kernels, copies and messages that its host launches.
        products, attention, memory, copies: Seconds in which kernels run, by what bounds them; beside messages they are
            slower, and where several run at once each has its share.
        exposed: Seconds in which messages go and no kernel runs.
        host: Seconds in which nothing runs, and what comes next is still to be launched.
        waits: Seconds in which nothing runs, as other ranks are waited for.
        peak: Bytes that tensors take at the most.
    """

    launches: float
    products: float
    attention: float
    memory: float
    copies: float
    exposed: float
    host: float
    waits: float
    peak: float

    @property
    def own(self) -> float:
        """The seconds in which it does not wait for other ranks."""
        return self.products + self.attention + self.memory + self.copies + self.exposed + self.host


@dataclass(frozen=True)
class MessageTrace:
    """The messages of a rank along an axis: how many, their bytes and seconds, and those of these that are exposed."""

    count: float
    size: float
    seconds: float
    exposed: float


@dataclass(frozen=True)
class StepTrace:
    """A step that was traced.

    Args:
        tokens: Those of the step, on all ranks.
        mfu: Model FLOPs utilisation of the peak.
        microbatches: Those of a rank in the step, and those of the two steps that were traced.
        stages: A rank of each stage.
        messages: {(axis, kind): those of the rank that has most of them}.
        timeline: The larger step that was traced.
    """

    seconds: float
    tokens: int
    mfu: float
    microbatches: tuple[int, int, int]
    stages: tuple[StageTrace, ...]
    messages: Mapping[tuple[str, str], MessageTrace]
    timeline: StepTimeline

    def as_data(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "mfu": self.mfu,
            "microbatches": self.microbatches[0],
            "traced_microbatches": self.microbatches[1:],
            "stages": [asdict(each) for each in self.stages],
            "messages": [{"axis": axis, "kind": kind, **asdict(each)} for (axis, kind), each in self.messages.items()],
        }


def trace(config: Config, cluster: Cluster, world: int | None = None) -> StepTrace:
    """Trace a step of a recipe on ranks of a cluster of GPUs; this machine needs none. Raises ConfigError: all that is
    wrong with the recipe, or what a trace does not know; RuntimeError: a traced rank has failed, or some would wait for
    ever."""
    model, world = configure(config.model, config.scores), world or ranks_of(config)
    found = problems_on_paper(config, world, model)
    if found:
        raise ConfigError(found)
    mesh = config.mesh.shape(world)
    microbatches = -(-config.batch.global_size // (config.batch.micro_size * mesh.data))
    # Enough to fill a pipeline, and twice as many.
    counts = min(microbatches, mesh.pp), min(microbatches, 2 * mesh.pp)
    ranks = [mesh.rank(Coordinates(pp=stage)) for stage in range(mesh.pp)]
    # The first step makes what is made once.
    sizes = (min(microbatches, mesh.pp), *sorted({*counts}))
    traced = trace_ranks(between_records(config), world, ranks, sizes)
    costs = Costs(cluster, mesh)
    steps = [play({rank: each.logs[step] for rank, each in traced.items()}, costs) for step in (-2, -1)]

    def along(small: float, large: float) -> float:
        """Return what a step of all microbatches has, of one of the first and one of the second number."""
        first, second = counts
        return large + (microbatches - second) * (large - small) / max(second - first, 1)

    stages = [_between(along, *(_stage(each, step, rank) for step in steps)) for rank, each in traced.items()]
    # The slowest stage may set the pace of many microbatches alone, where that of few is set by filling the pipeline.
    seconds = max(along(steps[0].seconds, steps[1].seconds), *(each.own for each in stages))
    tokens = config.batch.global_size * config.data.sequence_length
    tflop = flops_per_token(model, config.data.sequence_length, config.tuning) * tokens / world / 1e12
    return StepTrace(
        seconds,
        tokens,
        tflop / seconds / cluster.tflops,
        (microbatches, *counts),
        tuple(replace(each, waits=max(seconds - each.own, 0.0)) for each in stages),
        _messages(steps, along),
        steps[1],
    )


def between_records(config: Config) -> Config:
    """Return the recipe for steps between two records, without checksums: these take the share of the time that they
    may."""
    recovery, log = replace(config.recovery, checksums=0.0), replace(config.log, every=10**6)
    return replace(config, recovery=recovery, log=log)


# -- what a timeline says


Row = TypeVar("Row", StageTrace, MessageTrace)


def _between(along: Callable[[float, float], float], small: Row, large: Row) -> Row:
    """Return a row of a step of other microbatches, field by field."""
    values = {
        field.name: max(along(getattr(small, field.name), getattr(large, field.name)), 0.0) for field in fields(large)
    }
    if isinstance(large, StageTrace):
        values["peak"] = large.peak
    return type(large)(**values)


def _times(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    return covered([(each.start, each.end) for each in intervals])


def _stage(traced: TracedRank, step: StepTimeline, rank: int) -> StageTrace:
    ran = step.ran[rank]
    messages, kernels, busy = (
        _times([each for each in ran if each.kind in kinds]) for kinds in (("messages",), KINDS, ("messages", *KINDS))
    )
    seconds = {kind: sum(each.seconds for each in ran if each.kind == kind) for kind in KINDS}
    share = length(kernels) / max(sum(seconds.values()), 1e-12)
    by_host, now, first = 0.0, 0.0, {each.start: each for each in reversed(ran)}
    for start, end in busy:
        by_host += (start - now) * (first[start].launched >= start)
        now = end
    exposed, waits = length(messages) - beside(messages, kernels), step.seconds - length(busy) - by_host
    shares = {kind: each * share for kind, each in seconds.items()}
    return StageTrace(len(ran), **shares, exposed=exposed, host=by_host, waits=waits, peak=traced.peak)


def _of_axes(step: StepTimeline, rank: int) -> dict[tuple[str, str], MessageTrace]:
    kernels = _times([each for each in step.ran[rank] if each.kind != "messages"])
    alike = defaultdict[tuple[str, str], list[Interval]](list)
    for each in step.ran[rank]:
        if each.launch.message is not None and each.axis:
            alike[each.axis, each.launch.message.kind or ALL_REDUCE].append(each)
    found = {}
    for key, some in alike.items():
        size = sum(each.launch.message.size for each in some if each.launch.message)
        shown = length(times := _times(some)) - beside(times, kernels)
        found[key] = MessageTrace(len(some), size, sum(each.seconds for each in some), shown)
    return found


def _messages(
    steps: Sequence[StepTimeline], along: Callable[[float, float], float]
) -> dict[tuple[str, str], MessageTrace]:
    most: dict[tuple[str, str], MessageTrace] = {}
    for rank in steps[1].ran:
        small, large = (_of_axes(step, rank) for step in steps)
        for key, each in large.items():
            row = _between(along, small.get(key, MessageTrace(0, 0, 0, 0)), each)
            most[key] = max(most.get(key, row), row, key=lambda one: one.seconds)
    return most


# -- processes without a GPU


@dataclass(frozen=True)
class TracedRank:
    """What a rank asks of its GPU in each step, and the most bytes that it has in the last one."""

    logs: tuple[tuple[Entry, ...], ...]
    peak: int


def trace_ranks(config: Config, world: int, ranks: Sequence[int], counts: Sequence[int]) -> dict[int, TracedRank]:
    """Have some ranks run steps of so many microbatches, in a process for each CPU: torch believes in GPUs there.
    Raises ConfigError: this is not Linux; RuntimeError: a rank has failed."""
    if sys.platform != "linux":
        raise ConfigError(["--trace has torch believe in GPUs, which is known for Linux alone: run it there"])
    context = multiprocessing.get_context("spawn")
    number = min(len(os.sched_getaffinity(0)), len(ranks))
    processes = []
    for first in range(number):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve, args=(theirs, config, world, ranks[first::number], counts), daemon=True
        )
        process.start()
        theirs.close()
        processes.append((ours, process))
    try:
        found: dict[int, TracedRank] = {}
        for ours, _ in processes:
            try:
                got = ours.recv()
            except EOFError:
                raise RuntimeError("a process that traced has ended: was it killed for want of memory?") from None
            if isinstance(got, str):
                raise RuntimeError(f"a traced rank has failed:\n{got}")
            found |= got
    finally:
        for _, process in processes:
            process.kill()  # what C++ takes down at an end is not made for this
            process.join()
    return {rank: found[rank] for rank in ranks}


def _serve(answers: Connection, config: Config, world: int, ranks: Sequence[int], counts: Sequence[int]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import torch

        from megacore.planning.trace import fake_cuda

        torch.set_num_threads(1)
        fake_cuda.pretend()
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # what a run tells of itself
            found = {rank: trace_rank(config, world, rank, counts) for rank in ranks}
        answers.send(found)
    except Exception:
        answers.send(traceback.format_exc())


def trace_rank(config: Config, world: int, rank: int, counts: Sequence[int]) -> TracedRank:
    """Run steps of so many microbatches on a simulated GPU, in a process that believes in one."""
    from megacore.planning.trace.rank_steps import batches, run_steps
    from megacore.planning.trace.simulated_gpu import SimulatedGpu

    gpu = SimulatedGpu()
    run_steps(config, world, rank, [batches(config, world, rank, count) for count in counts], gpu)
    starts = [number for number, entry in enumerate(gpu.log) if isinstance(entry, StepStart)]
    stops = [*starts[1:], len(gpu.log)]
    return TracedRank(tuple(tuple(gpu.log[at:stop]) for at, stop in zip(starts, stops, strict=True)), gpu.peak)
