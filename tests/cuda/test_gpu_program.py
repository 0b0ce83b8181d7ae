"""The program for the first minutes with a GPU, on fake CUDA tensors: its path there is one that nothing else runs."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from host_waits import PLAYED, Everywhere, HostWaits
from test_trace import in_a_process, pytestmark

from benchmarks.gpu import correctness
from benchmarks.gpu.rows import Machine
from benchmarks.gpu_first import SECTIONS
from megacore import hardware
from megacore.planning.trace import fake_cuda

__all__ = ["pytestmark"]

NUMBERS = ("correctness", "repeats", "pretraining", "sanitizer")
"""Sections that read numbers, which fake tensors have not."""


def sections(names: Sequence[str]) -> dict[str, Any]:
    """{section: rows, or what is wrong}."""
    reads = {"benchmarks/gpu/rows.py:number"}
    downloads = {"benchmarks/gpu/rows.py:Machine.seconds", "parallel/memory/offload.py:HostMemory.send"}
    found: dict[str, Any] = {}
    with fake_cuda.fake_cuda(PLAYED):
        with patch.object(hardware, "near", lambda device: set[int]()):
            machine = Machine.of("cuda", True, Path(tempfile.mkdtemp()))
        for name in names:
            try:
                with HostWaits(reads, downloads, Everywhere()):
                    found[name] = [(row.what, row.note) for row in SECTIONS[name].rows(machine)]
            except Exception:
                found[name] = traceback.format_exc()
    return found


ALL = [name for name in SECTIONS if name not in NUMBERS and "8b" not in name and "Hugging Face" not in name]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["ceilings", "calibration", "1b: ours"], id="ours"),
        pytest.param(["1b: like torchtitan, compiled"], id="compiled"),
        pytest.param(ALL, id="all", marks=pytest.mark.grid),
    ],
)
def test_sections_run_on_fake_cuda(names: Sequence[str]) -> None:
    found = in_a_process(sections, names)
    for name, rows in found.items():
        assert isinstance(rows, list), f"{name}: {rows}"
        wrong = [(what, note) for what, note in rows if ": " in note and "litgpt" not in note]
        assert rows and not wrong, f"{name}: {wrong}"


def waiting(names: Sequence[str]) -> dict[str, str]:
    """{run: what is wrong with its second step}."""
    found, device = {}, fake_cuda.DEVICE
    with fake_cuda.fake_cuda(PLAYED):
        for name in names:
            run = correctness.WAITING[name]
            torch._dynamo.reset()
            _, step = correctness.live(run, device, Path())
            step([correctness.microbatch(run, 0, device)], correctness.LR)
            try:
                with HostWaits((), {"parallel/memory/offload.py:HostMemory.send"}):
                    step([correctness.microbatch(run, 1, device)], correctness.LR)
                found[name] = ""
            except Exception as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["bf16, documents", "bf16, activations on host"], id="some"),
        pytest.param(list(correctness.WAITING), id="all", marks=pytest.mark.grid),
    ],
)
def test_its_steps_wait_for_nothing(names: Sequence[str]) -> None:
    """What ``set_sync_debug_mode`` is to say on a GPU."""
    assert in_a_process(waiting, names) == dict.fromkeys(names, "")
