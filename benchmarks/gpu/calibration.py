"""The figures that ``megacore plan`` assumes of a device, as this one has them: ``--gpu device.json`` plans with them.

Products are measured over a grid of sides, and ``reach`` and ``half`` of :class:`~megacore.devices.Device` are those
whose formula comes nearest to all of them; the rows say how near. What takes several devices stays as it is assumed.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.rows import Machine, Row, failed, number
from megacore.planning import efficiency
from megacore.planning.costs import MatMul

DEVICE = "device.json"
"""The file of the figures, in the folder of what was found."""
SIDES, TINY_SIDES = (512, 1024, 2048, 4096, 8192, 16384), (32, 64, 128)
HALVES = range(8, 2048, 2)
"""Candidates for ``half``."""
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
Products = Sequence[tuple[MatMul, float]]
"""Products, and the share of the peak that each has reached."""


def calibration(machine: Machine) -> Iterator[Row]:
    known, products = machine.known, list(_products(machine))
    reach, half = fitted(products)
    figures = {"reach": reach, "half": half}
    yield Row("large products reach", reach, known.reach, "of the bf16 peak")
    yield Row("side of a product that reaches half", half, known.half, "elements")
    apart = [abs(reach * efficiency.reached(each, half) / share - 1) for each, share in products]
    yield Row("products beside the formula, median", sorted(apart)[len(apart) // 2], 0.1, "relative error")
    yield from _attention(machine)
    numel = 1 << (16 if machine.tiny else 29)
    source = torch.zeros(numel, dtype=torch.bfloat16, device=machine.device)
    target = torch.empty_like(source)
    figures["bandwidth"] = 2 * source.nbytes / machine.seconds(lambda: target.copy_(source), 10)
    yield Row("memory, read and written", figures["bandwidth"] / 1e9, known.bandwidth / 1e9, "GB/s")
    if machine.gpu:
        host = torch.empty(numel, dtype=torch.bfloat16, pin_memory=True)
        for way, here, there in (("from", host, target), ("to", source, host)):  # the plan takes the last one
            figures["host"] = source.nbytes / machine.seconds(partial(there.copy_, here, non_blocking=True), 3)
            yield Row(f"{way} the host, pinned", figures["host"] / 1e9, known.host / 1e9, "GB/s")
    yield from _launches(machine)
    name = torch.cuda.get_device_name(machine.device) if machine.gpu else "a CPU"
    measured = f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    device = asdict(known) | figures | {"per_node": 8}
    (machine.out / DEVICE).write_text(json.dumps({"measured": measured, "device": device}, indent=2) + "\n")


def fitted(products: Products) -> tuple[float, float]:
    """Return the ``reach`` and the ``half`` whose formula is nearest to what was measured, in the logarithm."""

    def of(half: float) -> tuple[float, float, float]:
        logs = [math.log(share / efficiency.reached(each, half)) for each, share in products]
        mean = sum(logs) / len(logs)
        return sum((log - mean) ** 2 for log in logs), math.exp(mean), half

    _, reach, half = min(map(of, HALVES))
    return reach, half


def _products(machine: Machine) -> Iterator[tuple[MatMul, float]]:
    peak = machine.cluster("bf16").tflops * 1e12
    for m, n, k in product(TINY_SIDES if machine.tiny else SIDES, repeat=3):
        if 2 * m * n * k > 2e12:  # a few ms suffice
            continue
        a, b = (torch.randn(size, device=machine.device, dtype=torch.bfloat16) for size in ((m, k), (n, k)))
        seconds = machine.seconds(partial(torch.mm, a, b.t()), 2 if machine.tiny else 10)
        yield MatMul(m, n, k), 2 * m * n * k / seconds / peak


def _attention(machine: Machine) -> Iterator[Row]:
    """The causal attention of each kernel that torch has for the device, forward and backward."""
    heads, head = (2, 16) if machine.tiny else (32, 128)
    for length in (64,) if machine.tiny else (4096, 16384):
        q, k, v = (
            torch.randn(1, heads, length, head, device=machine.device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        flops = 3 * 2 * heads * length**2 * head  # causal: half of both products, and twice that in the backward

        def call(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(y, (q, k, v), y)

        for kernel in KERNELS if machine.gpu else (SDPBackend.FLASH_ATTENTION,):
            what = f"{kernel.name.lower().replace('_', ' ')}, {length} tokens"
            try:
                with sdpa_kernel(kernel):
                    share = flops / machine.seconds(call, 5) / machine.cluster("bf16").tflops / 1e12
                yield Row(what, share, machine.known.attention, "of the bf16 peak")
            except RuntimeError as error:
                yield failed(what, error)


def _launches(machine: Machine) -> Iterator[Row]:
    """What the host takes for a launch, and for one that it waits for."""
    one, times = torch.zeros(1, device=machine.device), 100 if machine.tiny else 2000
    launched = machine.seconds(lambda: one.add_(1), times)
    waited = machine.seconds(lambda: number(one.add_(1)), times)
    yield Row("launch of a kernel", launched * 1e6, None, "us")
    yield Row("launch that the host waits for", waited * 1e6, None, "us")
