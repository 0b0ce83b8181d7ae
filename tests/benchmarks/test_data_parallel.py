"""The benchmark of data parallelism: everyone trains the same model on the same tokens, and is judged by its bars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool

from benchmarks import data_parallel, hugging_face, ours
from benchmarks.interleaved import Mode, Row
from benchmarks.steps import LR
from benchmarks.workload import TINY
from megacore.parallel.weights import transfer

ROOT = Path(__file__).parents[2]


def curve(mode: str) -> list[float]:
    """Losses of three steps in fp32 from one set of weights, over both ranks."""
    if mode in hugging_face.MODES:
        take = hugging_face.train_step(TINY, mode, torch.float32)
        found = torch.tensor([take() for _ in range(3)])
        dist.all_reduce(found)
        return (found / 2).tolist()
    step = ours.train_step(TINY, mode, torch.float32, masters=False)
    theirs = {name: p.detach().numpy() for name, p in hugging_face.create(TINY, torch.float32).named_parameters()}
    layout = step.gradients.parameters.layout
    source, target = transfer.hugging_face(layout.schema), transfer.native(layout, [step.mesh.rank])
    for stored, copies in transfer.plan(layout.schema, source, target):
        array = np.zeros(stored.shape, np.float32)
        for copy in copies:
            transfer.execute(copy, theirs[copy.source.name], array)
        step.optimizer.load_weight(stored.name, torch.from_numpy(array))
    batch = ours.microbatches(TINY, step.mesh)
    return [step(batch, LR).loss.item() for _ in range(3)]


def test_everyone_trains_the_same_model_on_the_same_tokens(pool: Pool) -> None:
    """Up to weight decay, which here leaves out norms."""
    want, _ = pool.run(2, curve, "ddp")
    assert want[2] < want[0] - 0.05
    for mode in ("fsdp2-keeps", "fsdp2", *ours.SHARDS):
        for found in pool.run(2, curve, mode):
            np.testing.assert_allclose(found, want, rtol=1e-5, err_msg=mode)


@pytest.mark.in_turn(6, 4)
@pytest.mark.slow
def test_it_runs_without_peers(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--shape", "tiny", "--rounds", "1", "--warm-up", "1", "--steps", "1", "--peers", str(tmp_path)]
    options += ["--only", "parameters, masters", "FSDP2, not", "DeepSpeed", "--json", str(results)]
    done = subprocess.run(
        [sys.executable, "benchmarks/data_parallel.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(results.read_text())
    assert list(report["modes"]) == ["FSDP2, not resharded", "megacore parameters, masters"]
    for found in report["modes"].values():
        assert found["failure"] == "" and found["median_s"] > 0
        assert found["last_loss"] < found["first_loss"]
        assert found["gib"] > min(report["without_a_model_gib"].values()) > 0.1
    assert "skipped: DeepSpeed 3: there is no deepspeed_zero.py" in done.stdout
    assert "- not judged: megacore none against DDP" in done.stdout
    assert "- the same work" in done.stdout


# -- the words


def row(name: str, seconds: float, first: float = 10.5, last: float = 9.5) -> Row:
    mode: Mode = next(mode for mode in data_parallel.MODES if mode.name == name)
    made = Row(mode)
    made.add({"steps": [seconds, 9 * seconds, seconds], "loss0": first, "lossN": last, "rss_gib": 1.5})
    return made


@pytest.mark.quick
def test_each_rung_is_judged_by_the_fastest_peer_on_it() -> None:
    rows = [row("megacore none", 1.0), row("DDP", 1.05), row("megacore gradients", 0.97)]
    rows += [row("FSDP2, not resharded", 1.2), row("DeepSpeed 2", 1.0), row("FSDP2", 1.0)]
    lines = data_parallel.judged(rows).splitlines()
    assert lines[0] == "- MISSED: megacore none takes 0.95 of the time of DDP (bar: 0.95)"
    assert lines[2] == "- MISSED: megacore gradients takes 0.97 of the time of DeepSpeed 2 (bar: 0.95)"
    assert lines[3] == "- not judged: megacore parameters against FSDP2 and DeepSpeed 3"
    assert "met: megacore none takes 0.90 of" in data_parallel.judged([row("megacore none", 0.9), row("DDP", 1.0)])


@pytest.mark.quick
def test_the_table_has_ratios_within_a_rung_and_to_the_lowest() -> None:
    rows = [row("megacore none", 1.0), row("megacore parameters", 2.0), row("FSDP2", 4.0)]
    rows.append(row("megacore parameters, masters", 3.0))
    lines = data_parallel.table(rows, {"ours": 0.5}).splitlines()[2:]
    assert lines == [
        "| none | megacore none | 1.00 | 1.00 .. 9.00 | 1.00 | 1.00 | 1,024 | 10.500 .. 9.500 |",
        "| parameters | megacore parameters | 2.00 | 2.00 .. 18.00 | 1.00 | 2.00 | 1,024 | 10.500 .. 9.500 |",
        "| parameters | megacore parameters, masters | 3.00 | 3.00 .. 27.00 | 1.50 | 3.00 | 1,024 | 10.500 .. 9.500 |",
        "| parameters | FSDP2 | 4.00 | 4.00 .. 36.00 | 2.00 |  |  | 10.500 .. 9.500 |",
    ]


@pytest.mark.quick
def test_who_trains_something_else_is_named() -> None:
    alike = [row("megacore none", 1.0), row("DDP", 1.0, 10.52, 9.4), row("FSDP2", 1.0)]
    assert data_parallel.strangers(alike) == []
    stranger, still = row("DeepSpeed 1", 1.0, 10.8, 9.8), row("DeepSpeed 2", 1.0, 10.5, 10.5)
    found = data_parallel.strangers([*alike, stranger, still, row("DeepSpeed 3", 1.0, float("nan"), 9.5)])
    assert [line.split(" begins")[0] for line in found] == [
        f"- DIFFERS: {name}" for name in ("DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3")
    ]
