"""Triton's interpreter, rounding to the nearest as GPUs do: it cuts off what narrow numbers have no room for."""

from typing import Any

import numpy as np
import pytest
import torch

interpreter = pytest.importorskip("triton.runtime.interpreter")

NARROW = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = interpreter._convert_float

    def nearest(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if source.name != "fp32" or target.name not in NARROW:
            return convert(x, source, target, mode)
        bits = {1: np.uint8, 2: np.uint16}[NARROW[target.name].itemsize]
        return torch.from_numpy(np.array(x)).to(NARROW[target.name]).view(getattr(torch, np.dtype(bits).name)).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", nearest)
