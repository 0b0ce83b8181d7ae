"""How a kernel is launched, and how wide it computes: the one place that a trace needs to stand in for."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run so many programs of a Triton kernel on the current device; where there are none, nothing is launched."""
    if programs:
        kernel[(programs,)](*arguments, **constants)


def wide(dtype: torch.dtype) -> tl.dtype:
    """What is computed in: fp32, and fp64 for fp64."""
    return tl.float64 if dtype == torch.float64 else tl.float32
