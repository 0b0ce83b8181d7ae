"""Training steps at the shapes of 1B and 8B models, ours beside the peers', each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from benchmarks.gpu import work
from benchmarks.gpu.rows import Machine, Row, failed, number, skipped
from benchmarks.gpu.work import SHAPES, Shape, Step, Way
from megacore.hardware import peak_memory_gib
from megacore.models.config import flops_per_token
from megacore.parallel.memory.recompute import Activations
from megacore.planning.peak_memory import memory
from megacore.planning.step_time import Estimate, estimate

WAYS: Mapping[str, Way] = {
    "ours": Way(),
    "ours, compiled": Way(compiled=True),
    "ours, compiled, masters": Way(compiled=True, masters=True),
    "ours, compiled, fp8": Way(compiled=True, precision="fp8"),
    "ours, loss chunks": Way(loss_chunk=2048),
    "ours, selective": Way(activations=Activations("selective")),
    "ours, full": Way(activations=Activations("full")),
    "ours, activations on host": Way(activations=Activations("none", True)),
}
PEERS: Mapping[str, Callable[[Shape, torch.device], Step]] = {
    "like torchtitan, compiled": partial(work.like_torchtitan, compiled=True),
    "Hugging Face": partial(work.hugging_face, compiled=False),
    "Hugging Face, compiled": partial(work.hugging_face, compiled=True),
    "litgpt": partial(work.litgpt, compiled=False),
    "litgpt, compiled": partial(work.litgpt, compiled=True),
}


def speed(machine: Machine, name: str, mode: str) -> Iterator[Row]:
    """tokens/s, MFU and GiB of one mode at one shape, or why there are none."""
    shape, what = SHAPES["tiny" if machine.tiny else name], f"{name} {mode}"
    if "compiled" in mode and not machine.compiles:
        yield skipped(what, "nothing is compiled in a tiny run on a CPU")
        return
    way = WAYS.get(mode)
    try:
        step = work.ours(shape, machine.device, way) if way else PEERS[mode](shape, machine.device)
    except ImportError as error:
        yield skipped(what, error)
        return
    try:
        first = number(step())
        seconds = machine.seconds(step, 2 if machine.tiny else 10, 1 if machine.tiny else 3)
        last = number(step())
    except RuntimeError as error:  # out of memory, say
        yield failed(what, error)
        return
    mfu = flops_per_token(shape.config, shape.sequence_length) / 1e12 / machine.cluster("bf16").tflops
    tokens, expected, gib = shape.tokens / seconds, None, None
    if way:
        time, gib = plan(machine, shape, way)
        expected = time.tokens_per_second
    yield Row(what, tokens, expected, "tokens/s", last < first, f"loss {first:.3f} to {last:.3f}")
    yield Row(what, tokens * mfu, None if expected is None else expected * mfu, "MFU (of bf16)")
    yield Row(what, peak_memory_gib(machine.device), gib, "GiB")


def plan(machine: Machine, shape: Shape, way: Way) -> tuple[Estimate, float]:
    """(a step, GiB at its peak) on paper."""
    setting = way.setting(shape, machine.device)
    cluster = machine.cluster(way.precision)
    return estimate(setting, cluster), memory(setting)[0].peak / 2**30
