"""Kernels are launched here, and told how wide to compute: the one place that a trace needs to stand in for."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run so many programs of a Triton kernel on the current device; where there are none, nothing is launched."""
    if programs:
        kernel[(programs,)](*arguments, **constants)


@triton.jit
def _write(x: tl.tensor) -> None:
    tl.store(x, 1)


def try_out(device: torch.device) -> None:
    """Launch a kernel that does next to nothing; nobody waits for it.

    Raises:
        Exception: of many kinds, where Triton cannot compile or launch.
    """
    launch(_write, 1, torch.empty(1, dtype=torch.int32, device=device))


def wide(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype to compute in: fp32, and fp64 for fp64."""
    return tl.float64 if dtype == torch.float64 else tl.float32
