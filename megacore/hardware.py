"""What the device could do: the peak that utilisation is measured against, and memory."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Mapping

import torch

# Dense bf16 and fp32 (without TF32) TFLOP/s from the vendors' data sheets; the first name whose words occur in the
# device's own counts, so longer names stand before shorter ones.
PEAK_TFLOPS: Mapping[str, tuple[float, float]] = {
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "GH200": (989.4, 66.9),
    "H200": (989.4, 66.9),
    "H100 PCIe": (756.0, 51.2),
    "H100 NVL": (835.5, 60.0),
    "H100": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "A10G": (70.0, 35.0),
    "L40S": (362.05, 91.6),
    "L4": (121.0, 30.3),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "MI300X": (1307.4, 163.4),
    "MI250X": (191.5, 47.9),
}


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """TFLOP/s that the device can reach in matrix products of ``dtype``; None for a GPU that the table lacks.

    On a CPU it is measured, in about a second, with the threads that this process has: when all ranks of a machine
    measure at once, each finds its share.
    """
    if device.type == "cpu":
        return _gemm_tflops(dtype)
    name = torch.cuda.get_device_name(device)
    bf16, fp32 = next((peak for key, peak in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b", name)), (None, None))
    return bf16 if dtype == torch.bfloat16 else fp32


def _gemm_tflops(dtype: torch.dtype, size: int = 1024, seconds: float = 0.5) -> float:
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        before = time.perf_counter()
        a @ b
        best = max(best, 2 * size**3 / (time.perf_counter() - before) / 1e12)
    return best


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has held: on the GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
