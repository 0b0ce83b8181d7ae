"""What matrix products reach at our shapes; the calibration has copies, launches, and products of other sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from benchmarks.gpu.rows import Machine, Row, failed, skipped
from benchmarks.gpu.work import SHAPES, Shape
from megacore.parallel.layers import fp8


def ceilings(machine: Machine) -> Iterator[Row]:
    for name in ("tiny",) if machine.tiny else ("1b", "8b"):
        yield from _products(machine, name, SHAPES[name])


def _linears(shape: Shape) -> Mapping[str, tuple[int, int]]:
    """{linear: (outputs, inputs)}."""
    s = shape.config.sizes
    return {
        "qkv": ((s["heads"] + 2 * s["kv"]) * s["head"], s["embed"]),
        "out": (s["embed"], s["heads"] * s["head"]),
        "up": (2 * s["mlp"], s["embed"]),
        "down": (s["embed"], s["mlp"]),
        "head": (s["vocab"], s["embed"]),
    }


def _products(machine: Machine, name: str, shape: Shape) -> Iterator[Row]:
    device, times = machine.device, 3 if machine.tiny else 20
    for linear, (outputs, inputs) in _linears(shape).items():
        flops = 2 * shape.tokens * outputs * inputs / 1e12
        x, weight, dy = (
            torch.randn(size, device=device, dtype=torch.bfloat16)
            for size in ((shape.tokens, inputs), (outputs, inputs), (shape.tokens, outputs))
        )
        for what, (a, b) in {
            "forward": (x, weight.t()),
            "input's gradient": (dy, weight),
            "weight's gradient": (dy.t(), x),
        }.items():
            seconds = machine.seconds(partial(torch.mm, a, b), times)
            yield Row(f"{name} {linear}, {what}", flops / seconds, machine.cluster("bf16").tflops, "TFLOP/s bf16")
        what = f"{name} {linear}, forward fp8"
        if fp8.multiply_on(device) is fp8.multiply_wide:
            yield skipped(what, "the device has no fp8")
            continue
        left, right = (fp8.quantise(y, fp8.units(y.abs().max().float(), fp8.E4M3), fp8.E4M3) for y in (x, weight))
        try:
            seconds = machine.seconds(partial(fp8.multiply_scaled, left, right, torch.bfloat16, fast=True), times)
            yield Row(what, flops / seconds, machine.cluster("fp8").tflops, "TFLOP/s fp8")
        except RuntimeError as error:
            yield failed(what, error)
