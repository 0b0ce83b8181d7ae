"""The GPUs of this machine as NVML sees them, through the package ``nvidia-ml-py`` where it is installed. No torch."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

LATELY_S = 600.0
"""The seconds for which an error of a GPU is told together with what befalls a rank."""
SLOWED = "slowed down by"
"""What :func:`gpu_in_words` says of a GPU whose clock something holds down."""
_SLOWED: Mapping[int, str] = {
    0x04: "its power limit",
    0x08: "the hardware",
    0x20: "heat",
    0x40: "heat",
    0x80: "the power supply",
}
"""{bit of NVML's clock event reasons: what slows a GPU down}; the other bits are no faults."""
_XIDS: Mapping[int, str] = {
    13: "an exception in a kernel",
    31: "an access to memory that is not there",
    43: "a program that was stopped",
    45: "a program that was ended",
    48: "a double bit flip in its memory",
    63: "a row of its memory is replaced",
    64: "a row of its memory could not be replaced",
    74: "NVLink",
    79: "it has fallen off the bus",
    94: "a flip in its memory, contained",
    95: "a flip in its memory, not contained",
    119: "its own processor does not answer",
}
"""{number of an error: what it says} by NVIDIA's list; the first four may come from a program."""


def gpu_in_words(number: int) -> str:
    """Return "GPU 3 at 1,005 of 1,980 MHz and 87 C, slowed down by heat", of a GPU of this machine by its number among
    those that the environment shows to this process; nothing where nobody computes on it, or NVML does not tell, which
    is asked through the package ``nvidia-ml-py`` where it is installed."""
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
    by_what = f", {SLOWED} {' and '.join(slowed)}" if slowed else ""
    return f"GPU {name} at {clock:,} of {most:,} MHz and {heat} C{by_what}"


class GpuErrors:
    """Says each kind of critical error (Xid) of a GPU of this machine once, when it comes; nothing without NVML."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._told = deque[tuple[float, str]](maxlen=4)
        try:
            import pynvml as nvml
        except ImportError:
            return
        try:
            nvml.nvmlInit()
            events = nvml.nvmlEventSetCreate()
            for number in range(nvml.nvmlDeviceGetCount()):
                nvml.nvmlDeviceRegisterEvents(
                    nvml.nvmlDeviceGetHandleByIndex(number), nvml.nvmlEventTypeXidCriticalError, events
                )
        except nvml.NVMLError:
            return
        threading.Thread(target=self._listen, args=(nvml, events), name="gpu-errors", daemon=True).start()

    def lately(self) -> str:
        """Return the errors of the last minutes in a few words."""
        return "; ".join(text for at, text in list(self._told) if time.monotonic() < at + LATELY_S)

    def _listen(self, nvml: Any, events: object) -> None:
        known = set[str]()
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(events, 60_000)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_TIMEOUT:
                    continue
                return
            try:
                which = f"GPU {nvml.nvmlDeviceGetIndex(event.device)}"
            except nvml.NVMLError:  # it is gone
                which = "a GPU"
            number = int(event.eventData)
            text = f"{which} has reported Xid {number}{f' ({_XIDS[number]})' if number in _XIDS else ''}"
            self._told.append((time.monotonic(), text))
            if text not in known:
                known.add(text)
                self._say(f"{text[0].upper()}{text[1:]}.")
