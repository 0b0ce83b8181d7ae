"""Saving: what is written, by whom, when, and what becomes of it when something goes wrong."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import torch
from engine import fit, in_steps, of, path_of, same, train, trainer, write_recipe
from pool import Pool

from megacore import checkpoints
from megacore.parallel.weights.layout import MeshShape
from megacore.recipe import ConfigError
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files import publish
from megacore.store.weight_folders import audit
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.tools import reshard
from megacore.training import main, save
from megacore.training.callbacks.bad_steps import NonFinite
from megacore.training.callbacks.checkpoints import Checkpoints
from megacore.training.check import check
from megacore.training.save import SaveError, Saver
from megacore.training.trainer import Trainer

QUIET = ["evaluate.every=0", "train.precision=fp32"]


def saved(out: Path) -> list[int]:
    """The steps of the checkpoints; and nothing half done is left."""
    folder = checkpoints.folder_of(out)
    found = list(checkpoints.complete(folder))
    assert sorted(path.name for path in folder.glob("*")) == [f"step-{step:08d}" for step in found]
    return found


def saver_of(made: Trainer) -> Saver:
    return of(made, Checkpoints)._saver


def opened(out: Path, step: int) -> Checkpoint:
    return Checkpoint.open(path_of(out, step))


def arrays(checkpoint: Checkpoint, state: str) -> dict[tuple[object, str], np.ndarray]:
    read = checkpoint.read(state)
    return {(stored.where, stored.name): read(stored)[1].copy() for stored in checkpoint.stored()}


def saved_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- pure parts


@pytest.mark.quick
@pytest.mark.parametrize(
    ("newest", "every", "kept"),
    [(None, 0, [1, 2, 3, 4, 5, 6]), (2, 0, [5, 6]), (1, 3, [3, 6]), (1, 2, [2, 4, 6]), (9, 4, [1, 2, 3, 4, 5, 6])],
)
def test_which_checkpoints_are_kept(newest: int | None, every: int, kept: list[int]) -> None:
    assert sorted(checkpoints.kept(list(range(1, 7)), newest, every)) == kept


def test_pruning_takes_the_name_away_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        folder = checkpoints.path_of(tmp_path, step)
        folder.mkdir()
        (folder / "index.json").touch()
    killed: list[Path] = []
    monkeypatch.setattr(checkpoints.shutil, "rmtree", killed.append)
    checkpoints.prune(tmp_path, 1, 0)
    monkeypatch.undo()
    # As if the process had been killed instead of removing: nothing that looks like a checkpoint is left.
    assert len(killed) == 2 and all(path.is_dir() and path.name.startswith(".") for path in killed)
    assert list(checkpoints.complete(tmp_path)) == [3]
    checkpoints.clean(tmp_path)
    assert saved_names(tmp_path) == ["step-00000003"]


# -- what is there


def test_a_checkpoint_holds_the_run(recipe: str, tmp_path: Path) -> None:
    (Path(recipe).parent / "tokenizer.json").write_text("{}")
    out = tmp_path / "run"
    result = train(recipe, [f"out={out}", "checkpoint.at_end=true", "train.precision=bf16", "evaluate.every=0"])
    (Path(recipe).parent / "tokenizer.json").unlink()
    checkpoint = opened(out, 5)
    assert saved(out) == [5] and checkpoint.index.step == 5
    assert checkpoint.index.states == ("weights", "master", "exp_avg", "exp_avg_sq")
    assert list(checkpoint.companions()) == ["tokenizer.json"]
    for (_, name), bits in arrays(checkpoint, "weights").items():
        assert np.array_equal((bits.astype(np.uint32) << 16).view(np.float32), result.weights[name])
    # Weights are the rounded masters, and moments have moved.
    for (where, name), bits in arrays(checkpoint, "master").items():
        rounded = torch.from_numpy(bits.view(np.float32)).bfloat16().double().numpy()
        assert np.array_equal(rounded, result.weights[name]), where
    assert all(bits.any() for moment in ("exp_avg", "exp_avg_sq") for bits in arrays(checkpoint, moment).values())
    told = dict(checkpoint.trainer or {})
    assert (told["step"], told["consumed_samples"], told["tokens"], told["optimizer_steps"]) == (5, 40, 320, 5)
    assert told["lr"] == result.values("lr")[-1] and told["scaler"] is None
    assert told["recipe"]["train"]["seed"] == 0 and set(told["recipe"]["mesh"].values()) == {1}


def shares(recipe: str, overrides: list[str]) -> tuple[list[str], list[str]]:
    made = trainer(recipe, overrides, log=True)
    snapshots = save.Snapshot(made.contents)
    made.fit()
    held = [each.state for each in snapshots.written if {s.stored.name for s in each.file.tensors} == {*each.host}]
    return sorted(each.state for each in snapshots.written), sorted(held)


@pytest.mark.in_turn(2, 1)
def test_replicas_share_out_the_writing_and_copy_no_more(pool: Pool, recipe: str, tmp_path: Path) -> None:
    overrides = [f"out={tmp_path / 'run'}", "mesh.tp=2", "checkpoint.at_end=true", *QUIET]
    ranks = pool.run(4, shares, recipe, overrides)
    # Ranks 0 and 2, 1 and 3 hold the same.
    for one, other in ((0, 2), (1, 3)):
        assert sorted(ranks[one][0] + ranks[other][0]) == ["exp_avg", "exp_avg_sq", "weights"]
        assert ranks[one][0] and ranks[other][0]
    assert all(files == held for files, held in ranks)
    checkpoint = opened(tmp_path / "run", 5)
    assert checkpoint.layout.mesh == MeshShape(tp=2)
    for state in checkpoint.index.states:
        checkpoint.fingerprints(state)  # replicated pieces agree


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    "overrides",
    [["mesh.dp=4"], ["mesh.tp=2"], ["mesh.pp=2", "zero.shard=optimizer"], ["mesh.tp=2", "zero.shard=parameters"]],
    ids=" ".join,
)
def test_every_rank_writes_its_part_of_a_large_model(
    overrides: list[str], pool: Pool, recipe: str, tmp_path: Path
) -> None:
    """And it is the checkpoint that few would have written, bit for bit, wherever it goes."""
    out = tmp_path / "run"
    ranks = pool.run(4, engine.saved_twice, recipe, [f"out={out}", "train.precision=bf16", *overrides])
    checkpoint, plain = opened(out, 3), opened(out, 2)
    assert (plain.index.version, checkpoint.index.version) == (1, 2)
    held = sum(record.size for record in plain.index.files.values())
    for wrote, host in ranks:
        assert wrote == host and 0.2 * held < wrote < 0.27 * held
    assert not audit.check(checkpoint, jobs=1)
    for each, name in ((plain, "plain"), (checkpoint, "parts")):
        assert reshard.main([str(each.path), str(tmp_path / name), "--tp", "4"]) == 0
    engine.assert_same_files(tmp_path / "plain", tmp_path / "parts", 4 * 4)


def test_the_thread_that_writes_waits_on_the_device_of_its_rank(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread of CUDA begins on GPU 0."""
    snapshot = save.Snapshot(trainer(recipe, [f"out={tmp_path / 'run'}", *QUIET]).contents)
    snapshot.take()
    did = list[object]()

    class Taken:
        def synchronize(self) -> None:
            did.append("waited")

        def elapsed_time(self, later: object) -> float:
            return 1500.0

    monkeypatch.setattr(torch.cuda, "set_device", did.append)
    device = snapshot._device = torch.device("cuda", 3)
    snapshot._copy_begins = snapshot._copy_ends = Taken()  # type: ignore[assignment]
    assert snapshot.write(tmp_path) and did == [device, "waited"] and snapshot.copied_s == 1.5


@pytest.mark.in_turn(2, 0)
def test_when_it_saves(recipe: str, tmp_path: Path) -> None:
    def steps(name: str, *overrides: str) -> list[int]:
        train(recipe, [f"out={tmp_path / name}", "train.steps=7", *QUIET, *overrides])
        return saved(tmp_path / name)

    assert steps("end", "checkpoint.every=0", "checkpoint.at_end=true") == [7]
    assert steps("kept", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=3") == [3, 6, 7]
    assert steps("waits", "checkpoint.every=2", "checkpoint.background=false", "checkpoint.keep=null") == [2, 4, 6]


# -- in the background


@pytest.fixture
def slow() -> Iterator[mock.Mock]:
    """A writer that waits before each save until its event ``go`` is set."""
    plain, go = save.write, threading.Event()
    with mock.patch.object(save, "write", side_effect=lambda *given: go.wait(30) and plain(*given)) as made:
        made.go = go
        yield made
        go.set()


def test_training_goes_on_while_what_was_is_written(recipe: str, tmp_path: Path, slow: mock.Mock) -> None:
    out = tmp_path / "run"
    overrides = [f"out={out}", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=1"]
    made = trainer(recipe, [*overrides, *QUIET])
    seen = in_steps(made, lambda step: slow.go.set() if step == 4 else None)
    at_2: dict[str, np.ndarray] = {}
    saver = saver_of(made)
    plain = saver.save

    def noted(step: int, trainer: Mapping[str, Any]) -> None:
        if step == 2:
            at_2.update(engine.weights(made))
            plain(step, trainer)
            assert checkpoints.complete(saver.folder) == {} and slow.call_count == 1

    saver.save = noted  # type: ignore[method-assign]
    assert made.fit() == 6 and len(seen) == 6
    assert saved(out) == [2]
    assert not same(engine.weights(made), at_2)
    for (_, name), bits in arrays(opened(out, 2), "weights").items():
        assert np.array_equal(bits.view(np.float32), at_2[name]), name


def test_a_checkpoint_that_is_to_go_stays_until_its_successor_is_there(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed while it publishes goes on from the one before."""
    plain, before = publish.Publication.finish, list[list[int]]()

    def noted(publication: publish.Publication) -> None:
        before.append(list(checkpoints.complete(publication.target.parent)))
        plain(publication)

    monkeypatch.setattr(publish.Publication, "finish", noted)
    train(recipe, [f"out={tmp_path / 'run'}", "checkpoint.every=2", "checkpoint.keep=1", *QUIET])
    assert before == [[], [2]] and saved(tmp_path / "run") == [4]


def test_a_second_save_waits_for_the_first(recipe: str, tmp_path: Path, slow: mock.Mock) -> None:
    saver = saver_of(trainer(recipe, [f"out={tmp_path / 'run'}", *QUIET]))
    saver.save(1, {"step": 1})
    threading.Timer(0.3, slow.go.set).start()
    saver.save(2, {"step": 2})
    assert saved_names(saver.folder)[-1] == "step-00000001"
    saver.finish()
    assert saved(tmp_path / "run") == [1, 2]


# -- errors


def waits_for_its_saves(made: Trainer) -> list[int]:
    """A run that is at most one step further when a save in the background has ended -> the steps it will begin."""

    saver = saver_of(made)

    def wait(step: int) -> None:
        if saver._saving and saver._saving.work:
            saver._saving.work.exception()

    return in_steps(made, wait)


IMPATIENT = "checkpoint.patience=0"


def fails(recipe: str, overrides: list[str], rank: int) -> tuple[str, int]:
    """A run whose files one rank cannot write -> (the error, the steps begun)."""
    made = trainer(recipe, [*overrides, IMPATIENT])
    seen = waits_for_its_saves(made)
    burning = StoreError("the disk is on fire") if made.mesh.rank == rank else None
    with mock.patch.object(save, "write", side_effect=burning, wraps=save.write), pytest.raises(SaveError) as error:
        made.fit()
    return str(error.value), len(seen)


@pytest.mark.in_turn(2, 0)
def test_without_patience_an_error_ends_all_ranks_after_the_next_step(pool: Pool, recipe: str, tmp_path: Path) -> None:
    overrides = [f"out={tmp_path / 'run'}", "mesh.tp=2", "checkpoint.every=2", *QUIET]
    for message, begun in pool.run(4, fails, recipe, overrides, 3):
        assert message.splitlines()[0] == "cannot save step 2:"
        assert "rank 3 (" in message and "tp=1" in message and "the disk is on fire" in message
        assert "rank 1" not in message and begun == 3
    assert saved(tmp_path / "run") == []


def fails_for_a_while(recipe: str, overrides: list[str], rank: int, times: int) -> tuple[int, list[str]]:
    """A run on which one rank cannot write some of its first checkpoints -> (the last step, what is told)."""
    made = trainer(recipe, overrides, log=True)
    waits_for_its_saves(made)
    plain, tries = save.write, 0

    def burning(*arguments: Any) -> Any:
        nonlocal tries
        tries += 1
        if made.mesh.rank == rank and tries <= times:
            raise StoreError("the disk is on fire")
        return plain(*arguments)

    told: list[str] = []
    with mock.patch.object(save, "write", burning), mock.patch("megacore.training.callbacks.checkpoints.AGAIN_S", 0):
        made.tell = told.append  # type: ignore[assignment, method-assign]
        return made.fit(), told


@pytest.mark.in_turn(3, 0)
def test_a_save_that_fails_is_told_and_tried_again_at_the_next_interval(
    pool: Pool, recipe: str, tmp_path: Path
) -> None:
    """A full disk, until somebody makes room."""
    overrides = ["mesh.tp=2", "checkpoint.every=1", "checkpoint.keep=null", *QUIET]
    good, bad = tmp_path / "good", tmp_path / "bad"
    results = pool.run(2, fails_for_a_while, recipe, [f"out={bad}", *overrides], 1, 2)
    assert [last for last, _ in results] == [5, 5]
    told = results[0][1]
    assert [each.splitlines()[0] for each in told] == ["cannot save step 1:", "cannot save step 2:"]
    for each in told:
        assert "rank 1 (" in each and "the disk is on fire" in each
        assert each.splitlines()[-1] == "The next save tries again, for 4 h (checkpoint.patience)"
    assert saved(bad) == [3, 4, 5]
    pool.run(2, train, recipe, [f"out={good}", *overrides])
    for state in opened(bad, 5).index.states:
        assert opened(bad, 5).fingerprints(state) == opened(good, 5).fingerprints(state)


def test_a_run_that_has_gone_back_after_a_fault_leaves_its_checkpoints_as_they_are(recipe: str, tmp_path: Path) -> None:
    """It comes to the same step once more, maybe on another layout; another run that comes there is told."""
    made = trainer(recipe, [f"out={tmp_path}", "checkpoint.at_end=true", *QUIET])
    assert made.fit() == 5
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    trained = json.loads((path_of(tmp_path, 5) / "trainer.json").read_text())
    batch = {**trained["recipe"]["batch"], "micro_size": 4}
    moved = {"mesh": {"dp": 2}, "batch": batch} | {name: {} for name in ("context", "pipeline", "zero", "memory")}
    saver = saver_of(made)
    saver.save(5, {**trained, "recipe": {**trained["recipe"], **moved}})
    saver.finish()
    assert files and files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    with pytest.raises(SaveError, match=r"(?s)cannot save step 5: .* exists"):
        saver.save(5, {**trained, "lr": 0.5})


def test_the_end_of_a_run_is_saved_again_and_again(recipe: str, tmp_path: Path) -> None:
    last, told = fails_for_a_while(recipe, [f"out={tmp_path}", "checkpoint.at_end=true", *QUIET], 0, 2)
    assert last == 5 and len(told) == 2 and saved(tmp_path) == [5]


def test_patience_ends(recipe: str, tmp_path: Path) -> None:
    """Counted from the first of the saves that have failed since one did not."""
    overrides = [f"out={tmp_path}", "checkpoint.every=1", "checkpoint.patience=1", *QUIET]
    made = trainer(recipe, overrides)
    begun = waits_for_its_saves(made)
    clock = mock.Mock(wraps=time)
    clock.monotonic.side_effect = [1 + 3600 * hours for hours in (0, 0, 0, 0.5, 1.5)]
    broken = mock.patch.object(save, "write", side_effect=StoreError("the disk is on fire"))
    slow = mock.patch("megacore.training.callbacks.checkpoints.time", clock)
    with broken, slow, pytest.raises(SaveError, match=r"Saves have failed for 1\.5 h \(checkpoint\.patience=1\)"):
        made.fit()
    assert len(begun) == 5


@pytest.mark.in_turn(2, 0)
def test_who_ends_a_run_that_cannot_be_saved_does_not_wait(recipe: str, tmp_path: Path) -> None:
    made = trainer(recipe, [f"out={tmp_path}", "checkpoint.every=100", *QUIET])
    in_steps(made, lambda now: os.kill(os.getpid(), signal.SIGTERM) if now == 3 else None)
    with mock.patch.object(save, "write", side_effect=StoreError("no")), pytest.raises(SaveError, match="step 3 could"):
        made.fit()


@pytest.mark.parametrize("works", [True, False])
def test_a_signal_is_heeded_until_the_last_save_is_there(recipe: str, tmp_path: Path, works: bool) -> None:
    plain, unheeded = save.write, list[int]()

    def write(*given: Any) -> Any:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(0.4)
        if not works:
            raise StoreError("no")
        return plain(*given)

    before = signal.signal(signal.SIGTERM, lambda number, _: unheeded.append(number))
    made = trainer(recipe, [f"out={tmp_path}", "checkpoint.at_end=true", "checkpoint.patience=0.005", *QUIET])
    expected = nullcontext() if works else pytest.raises(SaveError, match="step 5 could not be saved before")
    try:
        with mock.patch.object(save, "write", side_effect=write), expected:
            assert made.fit() == 5
    finally:
        signal.signal(signal.SIGTERM, before)
    assert unheeded == [] and saved(tmp_path) == [5] * works


def no_room(recipe: str, overrides: list[str]) -> str:
    made = trainer(recipe, [*overrides, IMPATIENT])
    with mock.patch.object(publish, "free_bytes", return_value=1000), pytest.raises(SaveError) as error:
        made.fit()
    return str(error.value)


def test_no_room_is_said_by_all_ranks_before_anything_is_written(pool: Pool, recipe: str, tmp_path: Path) -> None:
    overrides = [f"out={tmp_path / 'run'}", "checkpoint.every=2", *QUIET]
    for message in pool.run(2, no_room, recipe, overrides):
        assert message.startswith("cannot save step 2: ") and "make room" in message
        assert "KiB and 1000 bytes are free" in message
    assert saved(tmp_path / "run") == []


def test_an_error_while_publishing_is_seen(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "write_file", mock.Mock(side_effect=StoreError("no index today")))
    with pytest.raises(SaveError, match=r"(?s)cannot save step 5:.rank 0 \(.*no index today"):
        train(recipe, [f"out={tmp_path / 'run'}", "checkpoint.at_end=true", IMPATIENT, *QUIET])
    assert saved(tmp_path / "run") == []


def test_what_cannot_be_removed_is_told_and_the_save_counts(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoints, "prune", mock.Mock(side_effect=PermissionError("not yours")))
    train(recipe, [f"out={tmp_path / 'run'}", "checkpoint.at_end=true", IMPATIENT, *QUIET])
    assert saved(tmp_path / "run") == [5] and "could not be removed: not yours" in capfd.readouterr().err


@pytest.mark.in_turn(2, 1)
def test_what_travels_with_a_model_outlives_the_checkpoint_that_a_run_began_from(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    recipe, run = write_recipe(tmp_path / "recipe"), tmp_path / "run"
    (tmp_path / "recipe" / "generation_config.json").write_text('{"temperature": 0.5}')
    often = [f"out={run}", "checkpoint.every=1", "checkpoint.keep=1", "checkpoint.at_end=true", IMPATIENT]
    train(recipe, [*often, "train.steps=3"])
    (tmp_path / "recipe" / "generation_config.json").unlink()
    again = [*often, "train.steps=5", "checkpoint.resume=auto"]
    setup = check(recipe, again, 1, 1)
    train(recipe, again)
    assert saved(run) == [5]
    name = "generation_config.json"
    held = path_of(run, 5) / "tokenizer" / name
    assert held.read_text() == '{"temperature": 0.5}'
    # A process that does not hold them takes those of the newest checkpoint, where its first one is no more.
    made = trainer(recipe, again)
    saver = saver_of(made)
    saver._contents = replace(made.contents, companions=setup.companions)
    saver._copy_companions(tmp_path / "copies")
    assert (tmp_path / "copies" / name).read_text() == '{"temperature": 0.5}'


@pytest.mark.in_turn(2, 0)
def test_a_checkpoint_may_go_once_a_run_has_begun_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run's, which removes it before this one has saved; who joins this run later starts from its newest."""
    recipe, other = write_recipe(tmp_path), tmp_path / "other"
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    train(recipe, [f"out={other}", "train.steps=3", "checkpoint.at_end=true", *QUIET])
    plain = main.trainer_of

    def removed(*given: Any) -> Trainer:
        made = plain(*given)
        shutil.rmtree(other)
        return made

    monkeypatch.setattr(main, "trainer_of", removed)
    there = path_of(other, 3)
    begun = [f"out={tmp_path / 'run'}", f"checkpoint.resume={there}", "checkpoint.at_end=true", IMPATIENT, *QUIET]
    assert fit(recipe, begun) == 5
    assert [each.read() for each in opened(tmp_path / "run", 5).companions().values()] == [b'{"temperature": 0.5}']
    assert check(recipe, begun, 1, 1, goes_on=True).start.progress.step == 5
    with pytest.raises(ConfigError, match="other"):
        check(recipe, [*begun, f"out={tmp_path / 'new'}"], 1, 1, goes_on=True)


def test_the_rest_of_a_checkpoint_is_in_nobody_s_way(recipe: str, tmp_path: Path) -> None:
    """A folder of its name without an index is no checkpoint; what is in it is kept."""
    rest = path_of(tmp_path, 5)
    (rest / "weights").mkdir(parents=True)
    train(recipe, [f"out={tmp_path}", "checkpoint.at_end=true", "checkpoint.resume=auto", *QUIET])
    assert saved_names(rest.parent) == ["step-00000005", "step-00000005.damaged"]
    assert (rest.parent / "step-00000005.damaged" / "weights").is_dir() and opened(tmp_path, 5).index.step == 5


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_link_of_a_checkpoint_s_name_is_set_aside(recipe: str, tmp_path: Path, target: str) -> None:
    """Neither is what it leads to taken for a checkpoint of the run, nor is anything written there, or removed."""
    folder = checkpoints.folder_of(tmp_path / "run")
    folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "index.json").write_text("precious")
    for step in (4, 5):
        checkpoints.path_of(folder, step).symlink_to(tmp_path / target)
    assert checkpoints.named(folder) == {}
    train(recipe, [f"out={tmp_path / 'run'}", "checkpoint.at_end=true", "checkpoint.resume=auto", *QUIET])
    assert saved_names(folder) == ["step-00000004", "step-00000005", "step-00000005.damaged"]
    assert (folder / "step-00000005.damaged").is_symlink() and opened(tmp_path / "run", 5).index.step == 5
    assert saved_names(tmp_path) == ["elsewhere", "run"] and saved_names(tmp_path / "elsewhere") == ["index.json"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("..")], ids=["pipe", "link"])
def test_what_lies_where_checkpoints_will_is_said_when_the_run_starts(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    """Not at its end, when it would wait for room; nor does anything of it hold the start up."""
    make(tmp_path / ".step-00000001.doomed")
    checkpoints.clean(tmp_path)
    assert saved_names(tmp_path) == []
    make(tmp_path / ".step-00000001.partial")
    with pytest.raises(
        StoreError, match=r"\.step-00000001\.partial was not made by this user, or is still being written"
    ):
        checkpoints.clean(tmp_path)
    make(tmp_path / "checkpoints")
    if not (tmp_path / "checkpoints").is_dir():
        with pytest.raises(StoreError, match="checkpoints is no folder"):
            checkpoints.clean(tmp_path / "checkpoints")


def test_a_run_that_is_not_finite_any_more_is_not_saved_and_what_was_is(
    recipe: str, tmp_path: Path, slow: mock.Mock
) -> None:
    """With a record only at the end, the weights stand still from step 3 on: they are not those of step 4."""
    out = tmp_path / "run"
    made = trainer(recipe, [f"out={out}", "optimizer.non_finite=stop", "checkpoint.every=2", "log.every=100", *QUIET])
    engine.scale_losses(made, {3: torch.nan})
    # What was saved is still being written when step 4 ends.
    begun = in_steps(made, lambda step: threading.Timer(0.2, slow.go.set).start() if step == 4 else None)
    with pytest.raises(NonFinite, match="step 3"):
        made.fit()
    assert begun == [1, 2, 3, 4] and saved(out) == [2]


# -- signals


def signalled(recipe: str, overrides: list[str], number: int, rank: int, step: int) -> int:
    made = trainer(recipe, overrides)
    in_steps(made, lambda now: os.kill(os.getpid(), number) if now == step and made.mesh.rank == rank else None)
    return made.fit()


@pytest.mark.in_turn(3)
@pytest.mark.parametrize(
    ("number", "last"), [(signal.SIGUSR1, 5), (signal.SIGTERM, 3), (signal.SIGINT, 3)], ids=["usr1", "term", "int"]
)
def test_a_signal_to_one_rank_saves_after_its_step(
    pool: Pool, recipe: str, tmp_path: Path, number: signal.Signals, last: int
) -> None:
    out = tmp_path / "run"
    overrides = [f"out={out}", "mesh.pp=2", "checkpoint.every=1000", *QUIET]
    assert pool.run(2, signalled, recipe, overrides, number, 1, 3) == [last] * 2
    assert saved(out) == [3]
    assert json.loads((path_of(out, 3) / "trainer.json").read_text())["step"] == 3


@pytest.mark.in_turn(2, 0)
def test_a_signal_saves_nothing_where_checkpoints_are_off_but_when_asked_to(recipe: str, tmp_path: Path) -> None:
    off = ["checkpoint.every=0", *QUIET]
    assert signalled(recipe, [f"out={tmp_path / 'a'}", *off], signal.SIGTERM, 0, 3) == 3
    assert saved(tmp_path / "a") == []
    assert signalled(recipe, [f"out={tmp_path / 'b'}", *off], signal.SIGUSR1, 0, 3) == 5
    assert saved(tmp_path / "b") == [3]
