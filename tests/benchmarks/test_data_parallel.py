"""The benchmark of data parallelism: everyone trains the same model on the same tokens, and is judged by its bars."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool

from benchmarks import ours
from benchmarks.steps import LR
from benchmarks.workload import TINY
from megacore.parallel.weights import transfer

ROOT = Path(__file__).parents[2]


def curve(mode: str) -> list[float]:
    """Losses of three steps in fp32 from one set of weights, over both ranks."""
    from benchmarks import hugging_face  # which takes seconds to import

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


@pytest.mark.in_turn(6, 4)
def test_everyone_trains_the_same_model_on_the_same_tokens(pool: Pool) -> None:
    """Up to weight decay, which here leaves out norms."""
    want, _ = pool.run(2, curve, "ddp")
    assert want[2] < want[0] - 0.05
    for mode in ("fsdp2-keeps", "fsdp2", *ours.SHARDS):
        for found in pool.run(2, curve, mode):
            np.testing.assert_allclose(found, want, rtol=1e-5, err_msg=mode)


@pytest.mark.in_turn(12, 9)
@pytest.mark.slow
def test_it_runs_without_peers(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--shape", "tiny", "--rounds", "1", "--warm-up", "1", "--steps", "1", "--peers", str(tmp_path)]
    options += ["--only", "parameters, masters", "FSDP2, not", "DeepSpeed", "--json", str(results)]
    done = subprocess.run(
        [sys.executable, "benchmarks/data_parallel.py", *options], cwd=ROOT, capture_output=True, text=True, check=False
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
