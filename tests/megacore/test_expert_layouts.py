"""Runs of experts: whole ones over ep x tp, or parts of them over tp; one goes on where the other ended."""

from pathlib import Path

import engine
import numpy as np
import pytest
from engine import LLAMA, Result, assert_near, path_of, train, whole
from pool import Pool

from megacore.parallel.weights.layout import MeshShape
from megacore.parallel.weights.schema import EXPERT_TENSOR_PARALLEL, SPLIT
from megacore.store.weight_folders import audit
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.tools import convert, reshard
from megacore.training import metrics

MIXTRAL = LLAMA | {"family": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 7}
"""An odd number of features, which tp pads."""
RECIPE_CHANGES = {"model": MIXTRAL}
TOLERANCE = 1e-9
SIX = ["train.steps=6", "checkpoint.every=2", "evaluate.every=0"]


@pytest.fixture(scope="module")
def six(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of one process in float64, with checkpoints after 2, 4 and 6."""
    out = tmp_path_factory.mktemp("six") / "run"
    train(recipe, [f"out={out}", *SIX])
    return out


PARTS = ["mesh.ep=2", "mesh.tp=2", "mesh.etp=2"]
WHOLE = ["mesh.ep=2", "mesh.tp=2"]
CHAINS = [
    pytest.param([*PARTS, "zero.shard=parameters"], [*WHOLE, "zero.shard=gradients"], id="parts-whole"),
    pytest.param(["mesh.tp=2", "zero.shard=optimizer"], ["mesh.tp=2", "mesh.etp=2", "zero.shard=parameters"], id="dp"),
]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("there", "then"), CHAINS)
def test_a_run_goes_on_with_the_same_numbers_wherever_experts_lie(
    there: list[str], then: list[str], pool: Pool, recipe: str, six: Path, tmp_path: Path
) -> None:
    """From one process at step 2 to one layout, from there at step 4 to another, with the states of the optimizer."""
    straight = [loss for _, loss in metrics.curve(metrics.read(six / "metrics.jsonl"), "loss")]
    start = path_of(six, 2)
    for done, mesh in ((4, there), (6, then)):
        out = tmp_path / str(done)
        ranks = pool.run(4, train, recipe, [f"out={out}", f"checkpoint.resume={start}", *SIX, *mesh])
        np.testing.assert_allclose(ranks[0].values("loss"), straight[done - 2 :], rtol=TOLERANCE)
        start = path_of(out, done)
        parts = "mesh.etp=2" in mesh
        index = Checkpoint.open(start).index
        assert index.layout.split == (EXPERT_TENSOR_PARALLEL if parts else SPLIT) and index.version == 2
        for state in ("weights", "exp_avg", "exp_avg_sq"):
            assert_near(whole(start, state), whole(path_of(six, done), state), TOLERANCE)
        assert not audit.check(Checkpoint.open(start), jobs=1)  # replicas agree, and padding is zero


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("etp", [1, 2])
def test_replicas_write_parts_of_experts(etp: int, pool: Pool, recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    pool.run(4, engine.saved_twice, recipe, [f"out={out}", "mesh.tp=2", f"mesh.etp={etp}", "zero.shard=parameters"])
    plain, parts = (Checkpoint.open(path_of(out, step)) for step in (2, 3))
    assert plain.layout.mesh == parts.layout.mesh == MeshShape(tp=2)
    assert plain.index.version == parts.index.version == 2
    assert len(parts.index.files) == 8 > len(plain.index.files) and not audit.check(parts, jobs=1)
    for each, name in ((plain, "plain"), (parts, "parts")):
        assert reshard.main([str(each.path), str(tmp_path / name), "--ep", "2", "--tp", "2"]) == 0
    engine.assert_same_files(tmp_path / "plain", tmp_path / "parts", 12)


@pytest.mark.in_turn(4, 0)
def test_listed_experts_start_a_run_on_any_mesh(pool: Pool, recipe: str, six: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    assert convert.main([str(path_of(six, 2)), str(folder), "--to", "hf"]) == 0
    start = [f"checkpoint.init={folder}", "train.steps=3", "evaluate.every=0", "train.seed=7"]
    alone = train(recipe, [f"out={tmp_path / 'one'}", *start])
    one = alone.values("loss")
    assert_near(alone.weights, whole(path_of(six, 2), "weights"), 0.3)  # those that the seed would draw are far away
    for name, mesh in (("whole", WHOLE), ("parts", PARTS)):
        ranks: list[Result] = pool.run(4, train, recipe, [f"out={tmp_path / name}", *start, *mesh])
        np.testing.assert_allclose(ranks[0].values("loss"), one, rtol=TOLERANCE)
