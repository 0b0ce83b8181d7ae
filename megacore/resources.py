"""The GPUs, the memory and the cores of this machine, or of the container that this process is in. No torch without a
GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def queued_s() -> float:
    """Return the seconds in which this thread was ready and others had its core; 0 where the system does not tell.

    Without them a loaded machine would make a straggler of whichever rank it let wait.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def gpus() -> int:
    """Return the number of GPUs of this machine. torch, slow to import, is asked only where there is a driver."""
    drivers = ("nvidia*", "nvhost*", "dxg", "kfd")
    if not any(device for driver in drivers for device in Path("/dev").glob(driver)):
        return 0
    import torch

    return torch.cuda.device_count()


def memory_of_gpus() -> int:
    """Return the bytes of memory of the largest GPU of this machine, which has one."""
    import torch

    return max(torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count()))


def host_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that the processes of this machine, or of this container, can hold together, swap included; None
    where Linux does not say so."""
    try:
        known, limits = _known(root), _limits(root)
        return min([known["MemTotal"], *(limit for limit, _ in limits)]) + known.get("SwapTotal", 0)
    except (OSError, ValueError, KeyError):
        return None


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that are to be had now, but for an eighth of all, which stays for what comes; None
    where Linux does not say so."""
    try:
        known, limits = _known(root), list(_limits(root))
        free = min([known["MemAvailable"], *(limit - used for limit, used in limits)])
        return free - min([known["MemTotal"], *(limit for limit, _ in limits)]) // 8
    except (OSError, ValueError, KeyError):
        return None


def _known(root: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+): +(\d+) kB", (root / "proc" / "meminfo").read_text(), re.MULTILINE)
    return {name: 1024 * int(size) for name, size in found}


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes that are in use and are not just a cache of files) of each control group around this
    process."""
    own, groups = root / "proc" / "self" / "cgroup", root / "sys" / "fs" / "cgroup"
    lines = own.read_text().splitlines() if own.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        top, old = groups / controllers, bool(controllers)
        name, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
        inside = top / path.lstrip("/")
        for folder in (each for each in (inside, *inside.parents) if each.is_relative_to(top)):
            limit = (folder / name).read_text().strip() if (folder / name).is_file() else "max"
            if limit != "max":
                used = int((folder / usage).read_text()) if (folder / usage).is_file() else 0
                stat = (folder / "memory.stat").read_text() if (folder / "memory.stat").is_file() else ""
                cached = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
                yield int(limit), used - (int(cached[1]) if cached else 0)
