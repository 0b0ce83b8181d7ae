"""What the device could do: the table of GPUs, the measurement of a CPU, memory."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from megacore import hardware
from megacore.hardware import PEAK_TFLOPS, claim, near, peak_memory_gib, peak_tflops, stay_on

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_gpu_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, key: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert (peak_tflops(CUDA, torch.bfloat16), peak_tflops(CUDA, torch.float32)) == PEAK_TFLOPS[key]
    assert peak_tflops(CUDA, torch.float16) == peak_tflops(CUDA, torch.bfloat16)


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA H20", "NVIDIA A10", "Tesla T4", "NVIDIA B2000"])
def test_a_gpu_that_the_table_lacks_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(CUDA, torch.bfloat16) is None


def test_a_cpu_is_measured_by_the_products_that_are_used() -> None:
    def twice(a: Tensor, b: Tensor) -> Tensor:
        calls.append(a.dtype)
        return (a @ b) @ b

    calls = list[torch.dtype]()
    assert peak_tflops(torch.device("cpu"), torch.float32, twice) and set(calls) == {torch.float32}


@pytest.mark.in_turn(6, 2)
def test_peak_memory_counts_what_is_let_go_too() -> None:
    before = peak_memory_gib(torch.device("cpu"))
    assert 0.05 < before < 64
    size = round((before + 0.25) * 2**30)
    held = np.ones(size, np.uint8)
    del held
    assert peak_memory_gib(torch.device("cpu")) > before + 0.2


@pytest.mark.parametrize("name", ["allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"])
def test_products_on_a_gpu_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By default torch lets cuBLAS add parts of a sum in less."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(hardware, "near", lambda device: set())
    matmul = torch.backends.cuda.matmul
    before = getattr(matmul, name)
    setattr(matmul, name, True)
    try:
        assert claim("cpu", 3) == torch.device("cpu") and getattr(matmul, name)
        assert claim("cuda", 3) == torch.device("cuda", 3) and not getattr(matmul, name)
    finally:
        setattr(matmul, name, before)


def test_cpus_near_a_gpu_are_those_of_its_numa_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    at = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: at)
    assert near(CUDA, tmp_path) == set()
    listed = tmp_path / "0000:c1:00.0" / "local_cpulist"
    listed.parent.mkdir()
    for text, cpus in (("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("\n", set())):
        listed.write_text(text)
        assert near(CUDA, tmp_path) == cpus


def test_a_process_stays_on_cpus_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    stays, threads = list[set[int]](), list[int]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: stays.append(cpus), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for near_it in ({0, 1, 2, 3}, {0, 1}, set[int]()):
        stay_on(near_it)
    assert (stays, threads) == ([{2, 3}], [2])
