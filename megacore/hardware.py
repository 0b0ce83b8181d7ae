"""The device of this process: how it is taken, the peak that utilisation is measured against, and memory."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.devices import PEAK_TFLOPS


def claim(kind: str, number: int) -> torch.device:
    """Make a device this process's own, of GPUs the one with this number; its matrix products are summed in fp32.

    The process stays on the CPUs that are near a GPU: launches, pinned memory and offloaded states cross no socket.
    """
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, number)
    torch.cuda.set_device(device)
    stay_on(near(device))
    # By default parts of a sum may be added in the dtype of the product.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return device


def near(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Return the CPUs on the NUMA node of a GPU; none where the system does not say."""
    at: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack these
    found = devices / f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0" / "local_cpulist"
    try:
        spans = [span.split("-") for span in found.read_text().strip().split(",") if span]
    except OSError:
        return set()
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


def stay_on(cpus: set[int]) -> None:
    """Run on these CPUs alone, as far as this process may: threads from here on, and no more of torch's than CPUs."""
    if sys.platform == "linux" and (own := cpus & os.sched_getaffinity(0)):
        os.sched_setaffinity(0, own)
        torch.set_num_threads(min(torch.get_num_threads(), len(own)))


Multiply = Callable[[Tensor, Tensor], Tensor]


def peak_tflops(device: torch.device, dtype: torch.dtype, multiply: Multiply = torch.mm) -> float | None:
    """Return the TFLOP/s that the device can reach in matrix products of ``dtype``; None for a GPU that the table
    lacks.

    On a CPU it is measured, in about a second, with the threads that this process has and with what ``multiply``
    is there: when all ranks of a machine measure at once, each finds its share.
    """
    if device.type == "cpu":
        return _gemm_tflops(dtype, multiply)
    name = torch.cuda.get_device_name(device)
    bf16, fp32 = next((peak for key, peak in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), (None, None))
    return bf16 if dtype.itemsize == 2 else fp32


def _gemm_tflops(dtype: torch.dtype, multiply: Multiply, size: int = 1024, seconds: float = 0.5) -> float:
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        before = time.perf_counter()
        multiply(a, b)
        best = max(best, 2 * size**3 / (time.perf_counter() - before) / 1e12)
    return best


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory that this process has held: on the GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
