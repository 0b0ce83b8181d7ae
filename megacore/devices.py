"""The speeds of devices, from their vendors' data sheets or a file of what was measured. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megacore.store.io.errors import StoreError
from megacore.store.io.strict_json import read_json

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


@dataclass(frozen=True)
class Device:
    """One device of a cluster.

    Args:
        peak: Its name in ``PEAK_TFLOPS``.
        fp8: Dense fp8 TFLOP/s; None where it has none.
        memory: Bytes.
        bandwidth: The speed of its memory, bytes/s.
        link: The speed to each device of the same node, bytes/s in one direction.
        network: The speed to other nodes, bytes/s in one direction for each device.
        host: The speed to host memory, bytes/s in one direction: PCIe 5 or 4 with 16 lanes.
        cpu: The speed of host memory for the CPU, bytes/s, its share of the node's.
        disk: The speed of the node's local disks, bytes/s in one direction, its share.
        host_memory: Bytes of the node's host memory, its share.
        per_node: Devices of a node.
        reach: Share of its peak that large products reach.
        half: A product with a side as long as this reaches half of that: tiles and waves are not full.
        attention: Share of its bf16 peak that the attention reaches, see :func:`attention_share`.
    """

    peak: str
    fp8: float | None
    memory: float
    bandwidth: float
    link: float
    network: float
    host: float
    per_node: int = 8
    # As of a node like DGX H100, by specifications as generally known, compared with no sheet: two sockets with eight
    # channels of DDR5-4800 each are 614 GB/s for eight devices, with 2 TB in all; a PCIe 4 NVMe disk for each device
    # writes about 4 GB/s.
    cpu: float = 77e9
    disk: float = 4e9
    host_memory: float = 250e9
    # Fitted to runs on H100 (`benchmarks/published_runs.py`); nobody held the others but the A100 against any.
    reach: float = 0.7
    half: float = 470
    attention: float = 0.5

    def tflops(self, precision: str) -> float:
        """Return the peak of matrix products; that of fp8 where the device has it."""
        bf16, fp32 = PEAK_TFLOPS[self.peak]
        if precision == "fp8" and self.fp8 is not None:
            return self.fp8
        return fp32 if precision in ("fp32", "fp64") else bf16


def attention_share(forward: float, backward: float) -> float:
    """Return the share of the peak that an attention reaches of what the plan counts, the causal half of two products
    in the forward and of four in the backward, where its kernels reach these shares: their backward has five, for it
    computes the scores again."""
    return 3 / (1 / forward + 2.5 / backward)


# FlashAttention-2's with heads of 128: 333 and 318 TFLOP/s on an H100 at 8,192 tokens (arXiv 2407.08608, figures 5 and
# 6), and up to 73 % and 63 % on an A100 (arXiv 2307.08691).
_HOPPER, _AMPERE = attention_share(333 / 989.4, 318 / 989.4), attention_share(0.73, 0.63)

DEVICES: Mapping[str, Device] = {
    # As generally known; H100, H200 and B200 were compared with third-party pages, none with a vendor's sheet yet.
    # NVIDIA's data sheets state links in both directions together (H100: 900 GB/s) and fp8 with sparsity (H100: 3,958
    # TFLOP/s): half of both. The network is the usual one of such a node, which is not on the sheet: of H100, H200 and
    # B200 a 400 Gbit/s adapter each (DGX H100), of A100 200 Gbit/s (DGX A100), of L40S 100 Gbit/s.
    "h100-80": Device("H100", 1978.9, 80e9, 3.35e12, 450e9, 50e9, 64e9, attention=_HOPPER),  # H100 SXM5: 80 GB HBM3
    "h200": Device("H200", 1978.9, 141e9, 4.8e12, 450e9, 50e9, 64e9, attention=_HOPPER),  # H200 SXM: 141 GB HBM3e
    "b200": Device("B200", 4500.0, 180e9, 8.0e12, 900e9, 50e9, 64e9),  # HGX B200: 180 GB HBM3e usable, NVLink 5
    "a100-80": Device(
        "A100", None, 80e9, 2.039e12, 300e9, 25e9, 32e9, reach=0.8, attention=_AMPERE
    ),  # A100 SXM4: 80 GB HBM2e
    "a100-40": Device(
        "A100", None, 40e9, 1.555e12, 300e9, 25e9, 32e9, reach=0.8, attention=_AMPERE
    ),  # A100 SXM4: 40 GB HBM2
    "l40s": Device("L40S", 733.0, 48e9, 0.864e12, 32e9, 12.5e9, 32e9),  # L40S: 48 GB GDDR6, PCIe 4 x16
    # AMD Instinct MI300X data sheet: 192 GB HBM3; seven links of 64 GB/s to the other seven in one direction.
    "mi300x": Device("MI300X", 2614.9, 192e9, 5.3e12, 448e9, 50e9, 64e9),
}

SMALL_CPU = Device("A10G", None, 16e9, 50e9, 5e9, 1e9, 50e9, reach=0.6, half=32)
"""A small machine without a GPU, in round numbers: of CPUs nothing is in the table."""
CPU_TFLOPS = 0.5
"""The speed of its matrix products."""


def device_of(name: str) -> Device:
    """Return a device of the table, or of a file that ``benchmarks/gpu_first.py --sections calibration`` has written.
    Raises ValueError: there is no such device."""
    if name in DEVICES:
        return DEVICES[name]
    if not name.endswith(".json"):
        raise ValueError(f"`gpu` ({name}) is no device: choose from {', '.join(DEVICES)}, cpu, or a .json file")
    try:
        device = Device(**read_json(Path(name))["device"])
        numbers = [device.fp8 or 1.0, *(value for key, value in vars(device).items() if key not in ("peak", "fp8"))]
        if device.peak not in PEAK_TFLOPS or not all(0 < number < math.inf for number in numbers):
            raise ValueError("a field has no such value")
    except (StoreError, TypeError, KeyError, ValueError) as error:
        why = f"it needs a device with the fields of megacore.devices.Device ({error})"
        raise ValueError(f"`gpu` ({name}) is no file of a measured device: {why}") from None
    return device
