"""Where a step's time goes: its parts timed alone, and the device's kernels by what they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.profiler
from torch import Tensor

from benchmarks.gpu import work
from benchmarks.gpu.rows import Machine, Row
from benchmarks.gpu.speed import WAYS, plan
from benchmarks.gpu.work import SHAPES, Shape
from megacore.models.config import flops_per_token, matmul_parameters
from megacore.parallel.layers.loss import Objective

GROUPS: Mapping[str, str] = {
    "attention": r"flash|fmha|attention|softmax",
    "products": r"gemm|nvjet|cutlass|xmma|splitk|(^|:)(add|b|)mm\b|addmm|bmm",
    "optimizer": r"adam",
    "norms": r"norm",
    "loss": r"cross_entropy",
    "copies and casts": r"copy|memcpy|memset|cat|fill",
    "sums": r"reduce|dot|sum",
    "elementwise": r"elementwise|vectorized|mul|add|sub|exp|silu|gated|rotate",
}
"""{group: how the names of its kernels (on a CPU: operators) are recognised}; the first that fits."""
STEPS = 2


def profile(machine: Machine, name: str) -> Iterator[Row]:
    shape = SHAPES["tiny" if machine.tiny else name]
    model, step = work.live(shape, machine.device, WAYS["ours"])
    given = work.microbatch(shape, machine.device)

    def once() -> Tensor:
        return step([given], work.LR).loss

    seconds = machine.seconds(once, STEPS, 2)
    for part, (call, expected) in _parts(machine, shape, model, step).items():
        yield Row(f"{name} {part}", machine.seconds(call, 3, 1) * 1e3, expected * 1e3, "ms of a step")
    yield from _kernels(machine, name, shape, once, seconds)


def _parts(machine: Machine, shape: Shape, model: Any, step: Any) -> Mapping[str, tuple[Callable[[], object], float]]:
    """{part: (what does it as often as a step does, the seconds that its bytes take)}."""
    device, config = machine.device, shape.config
    sizes, bandwidth = config.sizes, machine.known.bandwidth
    embed, layers = sizes["embed"], sizes["layer"]
    numel = sum(p.numel() for p in model.parameters.values())
    block = model.chunks[0].layers["0"]
    stats = step.backward([work.microbatch(shape, device)])
    labels = work.batch(shape, device)[:, 1:].flatten()
    objective = Objective(step.mesh.tp, config.vocab_size)

    def drawn(width: int) -> Tensor:
        return torch.randn(shape.tokens, width, device=device).bfloat16().requires_grad_()

    x, gate_up, logits = drawn(embed), drawn(2 * sizes["mlp"]), drawn(sizes["vocab"])

    def backward(times: int, function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
        def call() -> None:
            for _ in range(times):
                y = function(*inputs)
                torch.autograd.grad(y, inputs, torch.ones_like(y))

        return call

    # Bytes, at best: what is read and written once in the forward, and once in the backward.
    return {
        "loss, without its product": (
            backward(1, lambda z: objective(z, labels).sum(), logits),
            3 * logits.nbytes / bandwidth,
        ),
        "norms": (backward(2 * layers + 1, block.attn_norm, x), (2 * layers + 1) * 5 * x.nbytes / bandwidth),
        "activation functions": (
            backward(layers, block.mlp.activation, gate_up),
            layers * 4 * gate_up.nbytes / bandwidth,
        ),
        "norm of the gradient": (step.gradients.norm, 2 * numel / bandwidth),
        "clipping and update": (
            lambda: (step.optimizer.update(0.0, stats.grad_norm), step.gradients.updated()),
            plan(machine, shape, WAYS["ours"])[0].optimizer,
        ),
    }


def _kernels(machine: Machine, name: str, shape: Shape, once: Callable[[], object], seconds: float) -> Iterator[Row]:
    """Milliseconds of a step in the kernels of each group, and in none."""
    with torch.profiler.profile() as found:
        for _ in range(STEPS):
            once()
        machine.wait()
    spent, counted = Counter[str](), 0
    for event in found.key_averages():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device == machine.gpu:
            time = event.self_device_time_total if machine.gpu else event.self_cpu_time_total
            spent[group(event.key)] += time / STEPS / 1e3
            counted += event.count
    products, attention = _tflop(shape)
    speed = machine.cluster("bf16").tflops
    expected = {"products": products / speed * 1e3, "attention": attention / speed * 1e3}
    for each, milliseconds in spent.most_common():
        yield Row(f"{name} kernels: {each}", milliseconds, expected.get(each), "ms of a step")
    yield Row(f"{name} kernels: none", seconds * 1e3 - sum(spent.values()), 0.0, "ms of a step")
    yield Row(f"{name} kernels", counted / STEPS, None, "launches a step")


def group(kernel: str) -> str:
    lower = kernel.lower()
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, lower)), "others")


def _tflop(shape: Shape) -> tuple[float, float]:
    """Of a step, in products of weights and in attention."""
    weights = 6 * matmul_parameters(shape.config)
    everything = flops_per_token(shape.config, shape.sequence_length)
    return shape.tokens * weights / 1e12, shape.tokens * (everything - weights) / 1e12
