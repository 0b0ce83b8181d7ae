"""The clock and the heat of this machine's GPUs, as NVML tells them. No torch.

NVML is asked through the package ``nvidia-ml-py``, where it is installed; nothing else needs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_SLOWED: Mapping[int, str] = {
    0x04: "its power limit",
    0x08: "the hardware",
    0x20: "heat",
    0x40: "heat",
    0x80: "the power supply",
}
"""{bit of NVML's clock event reasons: what slows a GPU down}; the other bits are no faults."""


def gpu_in_words(number: int) -> str:
    """Return "GPU 3 at 1,005 of 1,980 MHz and 87 C, slowed down by heat"; nothing where NVML does not tell, or nobody
    computes on it.

    Args:
        number: The number of the GPU among those that the environment shows to this process, as CUDA counts.
    """
    try:
        import pynvml as nvml
    except ImportError:
        return ""
    try:
        nvml.nvmlInit()
        try:
            shown = (os.environ.get("CUDA_VISIBLE_DEVICES") or "").replace(" ", "").split(",")
            name = shown[number] if number < len(shown) and shown[0] else str(number)
            by = nvml.nvmlDeviceGetHandleByIndex if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID
            gpu = by(int(name) if name.isdecimal() else name)
            if not nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                return ""
            clock, most = (
                ask(gpu, nvml.NVML_CLOCK_SM) for ask in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
            )
            heat = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            why = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return ""
    slowed = dict.fromkeys(what for bit, what in _SLOWED.items() if why & bit)
    by_what = f", slowed down by {' and '.join(slowed)}" if slowed else ""
    return f"GPU {name} at {clock:,} of {most:,} MHz and {heat} C{by_what}"
