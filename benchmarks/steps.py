"""What the scripts that train have in common: arguments, tokens, the counted steps, the line that they print."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.workload import WORKLOADS, Workload

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LR = 3e-4
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def parser(description: str | None, modes: Iterable[str]) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("mode", choices=list(modes))
    made.add_argument("--shape", choices=WORKLOADS, default="full")
    made.add_argument("--dtype", choices=DTYPES, default="bf16")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--warm-up", type=int, default=2)
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: time of this process on the CPUs")
    return made


@contextmanager
def process_group() -> Iterator[None]:
    """This process among those of torchrun, over gloo; without torchrun it is alone."""
    if "WORLD_SIZE" not in os.environ:
        yield
        return
    dist.init_process_group("gloo")
    yield
    # Not after an error: the others may never come.
    dist.barrier()
    dist.destroy_process_group()


def tokens(work: Workload, rank: int, ranks: int) -> tuple[Tensor, ...]:
    """Microbatches of a data parallel rank: [micro_batch, sequence + 1] each, of the tokens that the peers train on."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(work.config.vocab_size, (work.global_batch, work.sequence + 1), generator=generator)
    return drawn.chunk(ranks)[rank].split(work.micro_batch)


def count(step: Callable[[], float], warm_up: int, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
    """Take steps, all ranks at once; rank 0 prints one line, `RESULT {json}`, as the scripts of the peers do.

    Args:
        step: Takes a step and gives its loss, that of this rank or of all.
        warm_up: Steps that are not counted.
        steps: Those that are.
        clock: What tells the seconds.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    losses, seconds = [], []
    for _ in range(warm_up + steps):
        if ranks > 1:
            dist.barrier()
        start = clock()
        losses.append(step())
        seconds.append(clock() - start)
    ends = torch.tensor([losses[0], losses[-1]], dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(ends)
    first, last = (ends / ranks).tolist()
    if ranks == 1 or dist.get_rank() == 0:
        tell(seconds, (first, last), warm_up)


def tell(seconds: Sequence[float], losses: tuple[float, float], warm_up: int, tokens: Sequence[int] = ()) -> None:
    """Print the line of a process: what its steps took, its first loss and its last, its most memory.

    Args:
        seconds: Of each step.
        losses: The first and the last.
        warm_up: How many steps are not counted.
        tokens: Of each step, where steps differ.
    """
    result = {
        "steps": [round(s, 4) for s in seconds[warm_up:]],
        "warm": [round(s, 2) for s in seconds[:warm_up]],
        "tokens": list(tokens[warm_up:]),
        "loss0": round(losses[0], 4),
        "lossN": round(losses[1], 4),
        "rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
    }
    print("RESULT " + json.dumps(result), flush=True)
