"""Launchers of others: what a run does when they start it again, and what their scripts and manifests say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacore import checkpoints
from megacore.checkpoints import AUTO
from megacore.rank import restarts
from megacore.run.resume import again
from megacore.store.index import INDEX

sys.path.append(str(Path(__file__).parents[1] / "megacore"))
from engine import train, write_recipe
from pool import Pool

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def tensors(out: Path) -> dict[str, bytes]:
    """Return the files of the weights and of the optimizer's state of a run's newest checkpoint."""
    folder = checkpoints.newest_of(out)
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}


# -- torchrun


@pytest.mark.slow
def test_torchrun_starts_a_run_again_and_it_ends_as_if_nothing_had_happened(pool: Pool, tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    settings = ["mesh.tp=2", "train.steps=8", "evaluate.every=0", "checkpoint.every=4", "checkpoint.at_end=true"]
    settings += ["checkpoint.background=false"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    ended = subprocess.run(
        [*torchrun, str(HERE / "dies_once.py"), recipe, f"out={out}", *settings],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Resuming after step 4" in ended.stdout, ended.stdout
    undisturbed = tmp_path / "undisturbed"
    pool.run(2, train, recipe, [f"out={undisturbed}", *settings])
    assert tensors(out) and tensors(out) == tensors(undisturbed)


@pytest.mark.parametrize(
    ("variables", "may"),
    [
        ({}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        # The count is of one node: the others, which restart as well, keep theirs.
        ({"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "0"}, True),
        ({"RESTART_COUNT": "3"}, True),
        ({"RESTART_COUNT": ""}, False),
    ],
)
def test_a_rank_knows_that_its_run_may_have_been_started_before(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], may: bool
) -> None:
    for name in ("TORCHELASTIC_MAX_RESTARTS", "RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert restarts() == may


def test_a_run_that_is_started_again_goes_on_from_its_own_checkpoint_else_begins_as_before(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    first, other = [f"out={out}"], [f"out={out}", "checkpoint.resume=elsewhere/step-00000005"]
    assert again(recipe, first) == [*first, f"checkpoint.resume={AUTO}"]
    assert again(recipe, other) == other
    (checkpoint := checkpoints.path_of(checkpoints.folder_of(out), 3)).mkdir(parents=True)
    assert again(recipe, other) == other  # it was not written to its end
    (checkpoint / INDEX).touch()
    assert again(recipe, other) == [*other, f"checkpoint.resume={AUTO}"]
