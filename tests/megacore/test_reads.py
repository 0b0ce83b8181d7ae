"""A resume reads each byte of a checkpoint once, whatever the layout was and is, and all ranks read a part of it."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import pytest
import torch
import torch.distributed as dist
from engine import counting_reads, of, path_of, trainer
from pool import Pool

from megacore import checkpoints
from megacore.rank import RankPlace
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files import shares
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders import loader
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.tools import reshard
from megacore.training import main
from megacore.training.callbacks.checkpoints import Checkpoints
from megacore.training.check import check

PRECISION = ["train.precision=bf16", "evaluate.every=0"]
READ = ("master", "exp_avg", "exp_avg_sq")


def saved(recipe: str, overrides: list[str]) -> None:
    with mock.patch.object(shares, "SHARE_BYTES", 1):
        trainer(recipe, [*overrides, "checkpoint.at_end=true", *PRECISION], log=True).fit()


@pytest.fixture(scope="module")
def source(pool: Pool, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of tp=2 whose places two ranks each have written, and the same resharded to one file a state."""
    out = tmp_path_factory.mktemp("source")
    pool.run(4, saved, recipe, [f"out={out / 'run'}", "mesh.tp=2"])
    made = path_of(out / "run", 5)
    assert Checkpoint.open(made).index.version == 2
    assert reshard.main([str(made), str(out / "one"), "--tp", "1"]) == 0
    return made


def bytes_held(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.read(state)(stored)[1].nbytes for state in READ for stored in checkpoint.stored(state))


def resumed(recipe: str, overrides: list[str]) -> int:
    """Goes on, saves at once -> bytes that this rank has read."""
    with counting_reads() as read, mock.patch.object(shares, "SLICE", 100):
        made = trainer(recipe, [*overrides, "train.steps=9", *PRECISION])
    saver = of(made, Checkpoints)._saver
    saver.save(6, {"step": 6})
    saver.finish()
    return sum(read)


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, []),
        (2, []),
        (4, ["mesh.tp=2"]),
        (2, ["zero.shard=optimizer"]),
        (4, ["zero.shard=parameters"]),
        (4, ["mesh.pp=2"]),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else str(given),
)
def test_every_byte_is_read_once(
    world: int, overrides: list[str], pool: Pool, recipe: str, source: Path, tmp_path: Path
) -> None:
    arguments = [f"out={tmp_path / 'run'}", f"checkpoint.resume={source}", *overrides]
    counts = [resumed(recipe, arguments)] if world == 1 else pool.run(world, resumed, recipe, arguments)
    held = bytes_held(Checkpoint.open(source))
    assert 0.95 * held < sum(counts) < 1.05 * held
    assert max(counts) < 1.2 * held / world
    # All of it has come to where it belongs, bit for bit.
    made = path_of(tmp_path / "run", 6)
    assert reshard.main([str(made), str(tmp_path / "one"), "--tp", "1", "--pp", "1"]) == 0
    engine.assert_same_files(source.parents[2] / "one", tmp_path / "one", 4)


def cannot_read(recipe: str, overrides: list[str], rank: int, error: Exception) -> str:
    plain, made = loader.assemble, 0

    def fails(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made == 5:
            raise error
        return plain(*arguments)

    patched = fails if dist.get_rank() == rank else plain
    with (
        mock.patch.object(loader, "assemble", patched),
        pytest.raises((StoreError, RuntimeError, ValueError)) as raised,
    ):
        trainer(recipe, overrides)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("world", "error", "others", "own"),
    [
        (4, StoreError("on fire"), r"StoreError: rank 2 \(.*\): on fire", r"StoreError: rank 2 \(.*\): on fire"),
        (2, ValueError("none"), r"RuntimeError: rank 1 \(.*\): ValueError: none", "ValueError: none"),
    ],
    ids=["foreseen", "unforeseen"],
)
def test_a_rank_that_cannot_read_its_part_leaves_nobody_waiting(
    world: int, error: Exception, others: str, own: str, pool: Pool, recipe: str, source: Path, tmp_path: Path
) -> None:
    overrides = [f"out={tmp_path / 'run'}", f"checkpoint.resume={source}", "train.steps=9", *PRECISION]
    said = pool.run(world, cannot_read, recipe, overrides, world // 2, error)
    assert all(re.fullmatch(own if rank == world // 2 else others, each) for rank, each in enumerate(said)), said


# -- who opens what


def goes_on(recipe: str, overrides: list[str]) -> tuple[set[str], set[str]]:
    """As the program does -> (the tensor files that this rank opens to check the run, those that it opens then)."""
    opened, plain, rank = list[str](), TensorFile.open, dist.get_rank()

    def noted(path: str | Path, root: Path | None = None) -> TensorFile:
        opened.append(str(Path(path).relative_to(Path(path).parents[1])))
        return plain(path, root)

    with mock.patch.object(TensorFile, "open", noted), contextlib.redirect_stdout(io.StringIO()):
        setup = check(recipe, overrides, dist.get_world_size(), 2, checked=rank % 2 > 0, another_looks=rank > 0)
        dist.barrier()
        before = {*opened}
        opened.clear()
        main.fit(setup, torch.device("cpu"), RankPlace.of_environment())
    return before, {*opened}


@pytest.mark.in_turn(2, 1)
def test_one_rank_checks_and_the_others_open_what_they_read(
    pool: Pool, recipe: str, source: Path, tmp_path: Path
) -> None:
    overrides = [f"out={tmp_path / 'run'}", f"checkpoint.resume={source}", "mesh.tp=2", "train.steps=6", *PRECISION]
    ranks = pool.run(4, goes_on, recipe, overrides)
    files = {*Checkpoint.open(source).index.files}
    assert [before for before, _ in ranks] == [files, set(), set(), set()]
    place = {name for name in files if "tp1" in name and "weights" not in name}
    assert len(place) < len(files) / 2 and all(opened and opened <= place for _, opened in ranks[1::2])


@pytest.mark.in_turn(2, 0)
def test_all_take_the_checkpoint_that_one_has_found_to_be_whole(
    pool: Pool, recipe: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    overrides = [f"out={out}", "checkpoint.every=1", "checkpoint.keep=null", *PRECISION]
    pool.run(2, goes_on, recipe, [*overrides, "train.steps=4"])
    at = path_of(out, 4)
    (at / "exp_avg/pp0-ep0-tp0.safetensors").write_bytes(b"no header")
    again = [*overrides, "train.steps=5", "checkpoint.resume=auto"]
    ranks = pool.run(2, goes_on, recipe, again)
    assert ranks[0][1] | ranks[0][0] and not ranks[1][0]
    names = sorted(path.name for path in checkpoints.folder_of(out).iterdir())
    assert names == [*(f"step-0000000{step}" for step in (1, 2, 3, 4)), "step-00000004.damaged", "step-00000005"]
    made = Checkpoint.open(path_of(out, 5))
    assert made.index.step == 5
