"""bf16 moments in training: how far they lead from fp32's, and that a run with them is sharded and resumed."""

from pathlib import Path

import numpy as np
import pytest
from engine import train
from pool import Pool

COMMON = ["train.precision=bf16", "train.steps=6", "evaluate.every=0", "checkpoint.every=3", "checkpoint.at_end=false"]
NARROW = [*COMMON, "optimizer.moments=bf16"]


@pytest.mark.in_turn(6, 3)
def test_they_train_as_fp32_s_do(recipe: str, tmp_path: Path) -> None:
    wide = train(recipe, [f"out={tmp_path / 'wide'}", *COMMON, "train.steps=30", "checkpoint.every=0"]).values("loss")
    narrow = train(recipe, [f"out={tmp_path / 'narrow'}", *NARROW, "train.steps=30", "checkpoint.every=0"])
    losses = narrow.values("loss")
    assert losses[-1] < losses[0] - 0.3
    np.testing.assert_allclose(losses, wide, rtol=0.01)
    assert losses != wide


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_replicas_share_them_out(pool: Pool, recipe: str, tmp_path: Path, shard: str) -> None:
    common = [*NARROW, "checkpoint.every=0"]
    whole, shared = (
        pool.run(2, train, recipe, [f"out={tmp_path / name}", f"zero.shard={name}", *common])[0]
        for name in ("none", shard)
    )
    np.testing.assert_allclose(shared.values("loss"), whole.values("loss"), rtol=1e-3)
