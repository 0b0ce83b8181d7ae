"""The program for the first minutes with a GPU runs, tiny and on a CPU; what it finds, only a GPU can tell."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megacore
from benchmarks import gpu_first
from benchmarks.gpu import calibration, rows, work
from benchmarks.gpu.rows import Machine
from megacore.recipe import ConfigError

TINY = Machine.of("cpu", True, Path())
SPEEDS = '"bandwidth": 1, "link": 1, "network": 1, "host": 1'
RUN = (
    "ceilings",
    "sanitizer",
    "correctness",
    "waits",
    "1b: ours",
    "1b: Hugging Face",
    "1b: ours, compiled",
    "profile 1b",
    "kernels",
)


def test_a_call_takes_ten_minutes_at_most() -> None:
    seconds = Counter[int]()
    for section in gpu_first.SECTIONS.values():
        seconds[section.call] += section.limit
    assert sorted(seconds) == [1, 2, 3, 4, 5]
    assert max(seconds.values()) <= gpu_first.CALL_S


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", RUN)
def test_a_section_runs(name: str, tmp_path: Path) -> None:
    gpu_first.run(name, TINY, tmp_path)
    found = rows.read(tmp_path / gpu_first.ROWS)[name]
    assert found and not [row for row in found if row.good is False]


@pytest.mark.in_turn(3, 1)
def test_the_plan_reads_what_was_measured(tmp_path: Path) -> None:
    gpu_first.run("calibration", replace(TINY, out=tmp_path), tmp_path)
    found = {row.what: row.measured for row in rows.read(tmp_path / gpu_first.ROWS)["calibration"]}
    device = json.loads((tmp_path / calibration.DEVICE).read_text())["device"]
    assert device["half"] == found["side of a product that reaches half"]
    run, expected = ("experts", ["train.precision=bf16"]), {"device": device, "tflops": 70.0}
    measured = megacore.plan(*run, gpu=str(tmp_path / calibration.DEVICE))["time"]
    assert measured == megacore.plan(*run, **expected)["time"]
    assert measured != megacore.plan(*run, tflops=70.0, device=device | {"reach": device["reach"] / 2})["time"]


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "{": "is not JSON",
        "[]": "fields of megacore.devices.Device",
        '{"device": {"peak": "H100"}}': "missing 6 required positional arguments: 'fp8'",
        f'{{"device": {{"peak": "H1", "fp8": 1, "memory": 1, {SPEEDS}}}}}': "a field has no such value",
        f'{{"device": {{"peak": "H100", "fp8": 1, "memory": -1, {SPEEDS}}}}}': "a field has no such value",
    }.items(),
)
def test_a_file_of_no_device_is_said(tmp_path: Path, text: str, said: str) -> None:
    (file := tmp_path / "device.json").write_text(text)
    with pytest.raises(ConfigError, match=r"device\.json") as error:
        megacore.plan("experts", gpu=str(file))
    assert said in str(error.value)


@pytest.mark.in_turn(6, 5)
def test_a_run_is_resumed_to_the_same_losses(tmp_path: Path) -> None:
    gpu_first.run("pretraining", TINY, tmp_path)
    found = {row.what: row for row in rows.read(tmp_path / gpu_first.ROWS)["pretraining"]}
    assert found["resumed at half of it: losses apart"].measured == 0
    assert all(row.good is not False for row in found.values())


@pytest.mark.in_turn(2, 0)
def test_steps_of_the_peers_begin_like_ours() -> None:
    """With the loss of a model that knows nothing, and a lower one on the same tokens later."""
    shape, device = work.SHAPES["tiny"], torch.device("cpu")
    for step in (
        work.ours(shape, device, work.Way()),
        work.like_torchtitan(shape, device, compiled=False),
        work.hugging_face(shape, device, compiled=False),
    ):
        losses = [step().item() for _ in range(4)]
        assert losses[0] == pytest.approx(math.log(512), rel=0.02)
        assert losses[-1] < losses[0]


@pytest.mark.in_turn(6, 4)
def test_what_is_missing_is_skipped_and_said(tmp_path: Path) -> None:
    """On a machine with torch, numpy and einops alone; nothing else is imported before it is needed."""
    for name in ("pydantic", "transformers"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('there is no {name} here')")
    arguments = ("--device", "cpu", "--tiny", "--out", str(tmp_path), "--run", "pretraining")
    command = [sys.executable, gpu_first.__file__, *arguments]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    (row,) = rows.read(tmp_path / gpu_first.ROWS)["pretraining"]
    assert row.note == "skipped: there is no pydantic here"
