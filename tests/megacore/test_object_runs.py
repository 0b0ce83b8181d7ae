"""Runs whose checkpoints lie in an object store: what is saved, found, refused, set aside and held there."""

import contextlib
import errno
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from engine import train
from faulty import Faulty
from pool import Pool, forkserver

from megacore import checkpoints
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.transfer import native, plan
from megacore.recipe import ConfigError
from megacore.run_lock import LOCK, RunLock, read
from megacore.store.io.objects import ObjectPath, place
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files import object_files
from megacore.store.tensor_files.publish import write_file
from megacore.store.tensor_files.stream import assemble
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.index import INDEX
from megacore.training import main
from megacore.training.check import check
from megacore.training.resume import overrides_of_restart
from megacore.training.save import SaveError

RECIPE_CHANGES = {"checkpoint": {"every": 2}}
STEPS = ["train.steps=6", "train.precision=bf16", "evaluate.every=0", "checkpoint.keep=null", "checkpoint.patience=0"]


def kept(folder: ObjectPath) -> dict[str, bytes]:
    return {name: (folder / name).open().read() for name in folder.objects()}


@pytest.fixture(scope="module")
def straight(pool: Pool, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The objects of a run on tp=2 that saved steps 2, 4 and 6."""
    folder, out = tmp_path_factory.mktemp("bucket"), tmp_path_factory.mktemp("straight") / "run"
    pool.run(2, train, recipe, [f"out={out}", f"checkpoint.folder=file://{folder}", "mesh.tp=2", *STEPS])
    return kept(ObjectPath(f"file://{folder}"))


@pytest.fixture
def folder(straight: dict[str, bytes]) -> ObjectPath:
    made = ObjectPath(f"memory://{uuid.uuid4().hex}/run")
    for name, data in straight.items():
        (made / name).write(data)
    return made


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    yield Faulty.put_in(monkeypatch)


def at(folder: ObjectPath, step: int) -> ObjectPath:
    found = checkpoints.named(folder)[step]
    assert isinstance(found, ObjectPath)
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- what is there


@pytest.mark.in_turn(4, 2)
def test_the_objects_are_the_files_that_a_disk_would_have(
    recipe: str, straight: dict[str, bytes], folder: ObjectPath, tmp_path: Path, pool: Pool
) -> None:
    """Byte for byte, but for the recipe's own words; and a copy of them on a disk is a checkpoint."""
    pool.run(2, train, recipe, [f"out={tmp_path}", "mesh.tp=2", *STEPS])
    for step in (2, 4, 6):
        theirs = files_of(checkpoints.path_of(checkpoints.folder_of(tmp_path), step))
        ours = kept(at(folder, step))
        assert ours.keys() == theirs.keys() and len(ours) == 10
        assert all(ours[name] == theirs[name] for name in ours if name != "trainer.json")
        copied = tmp_path / "copied" / at(folder, step).name
        for name, data in ours.items():
            (copied / name).parent.mkdir(parents=True, exist_ok=True)
            (copied / name).write_bytes(data)
    assert list(checkpoints.complete(tmp_path / "copied")) == [2, 4, 6] and Checkpoint.open(copied).index.step == 6
    assert not (tmp_path / "run").exists()
    assert {name.partition("/")[0] for name in straight} == {at(folder, step).name for step in (2, 4, 6)}  # no lock


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("named", ["resume", "resume of the folder", "init"])
def test_a_run_starts_from_a_url_on_another_layout(
    recipe: str, folder: ObjectPath, tmp_path: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"resume": f"resume={at(folder, 4)}", "resume of the folder": f"resume={folder}", "init": f"init={folder}"}
    assert main.main([recipe, f"out={tmp_path / 'run'}", f"checkpoint.{where[named]}", *STEPS, "train.steps=7"]) == 0
    said = capsys.readouterr().out
    step = 4 if named == "resume" else 6
    assert (
        f"Starting from the weights of {at(folder, 6)}" if named == "init" else f"Resuming after step {step}"
    ) in said
    assert 7 in checkpoints.complete(checkpoints.folder_of(tmp_path / "run"))  # of its own, on its disk


def test_a_rank_reads_the_ranges_that_it_needs(
    folder: ObjectPath, faults: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of tp=4, of what was written on tp=2; with ranges that are far apart, as those of large tensors are."""
    monkeypatch.setattr(object_files, "_NEAR", 0)
    checkpoint = Checkpoint.open(at(folder, 6))
    schema = checkpoint.schema
    held = list(native(Layout(schema, MeshShape(tp=4), (schema.sizes["layer"],)), [3]))
    size = sum(each.size for name, each in checkpoint.files.items() if name.startswith("master"))
    faults.read = 0
    for part, copies in plan(schema, checkpoint.stored("master"), held):
        made = assemble(part, copies, checkpoint.read_for("master", copies), "F32")
        ranged, faults.read = faults.read, 0
        assert np.array_equal(made, assemble(part, copies, checkpoint.read("master"), "F32"))
        faults.read = ranged
    assert 0 < faults.read < 0.4 * size


# -- damage


Change = Callable[[ObjectPath], object]


def changed(name: str, how: Callable[[bytes], bytes]) -> Change:
    """A change of an object of a checkpoint."""
    return lambda path: (path / name).write(how((path / name).open().read()))


def foreign_index(path: ObjectPath) -> None:
    other = min(checkpoints.complete(ObjectPath(path.parent)).values())
    (path / INDEX).write(ObjectPath(other / INDEX).open().read())


flipped = changed("exp_avg_sq/pp0-ep0-tp0.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]))
DAMAGE: dict[str, tuple[Change, str]] = {
    "cut index": (changed(INDEX, lambda data: data[:1000]), "is not JSON"),
    "foreign index": (foreign_index, "trainer.json has step 6, index.json 2"),
    "truncated": (changed("master/pp0-ep0-tp1.safetensors", lambda data: data[:-8]), "it is truncated"),
    "missing": (
        lambda path: (path / "exp_avg/pp0-ep0-tp1.safetensors").remove(),
        "exp_avg/pp0-ep0-tp1.safetensors: there is no such object",
    ),
    "flipped": (flipped, "has the fingerprint"),
}


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_goes_on_from_the_newest_whole_checkpoint_of_a_store(
    recipe: str, folder: ObjectPath, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is damaged stays, without its index; what was never ended is removed."""
    six, (damaged, why) = at(folder, 6), DAMAGE[damage]
    damaged(six)
    left, torn = kept(six), folder / "step-00000008-0000000a" / "weights" / "pp0-ep0-tp0.safetensors"
    torn.write(b"half")
    overrides = [f"checkpoint.folder={folder}", *STEPS]
    with pytest.raises((ConfigError, StoreError), match=why):
        train(recipe, [f"out={tmp_path / 'other'}", f"checkpoint.resume={six}", *STEPS])
    assert main.main([recipe, f"out={tmp_path / 'run'}", "checkpoint.resume=auto", *overrides]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("Set aside as index.json.damaged: ")]
    assert str(six) in line and why in said and "Resuming after step 4" in said
    assert kept(six) == {name.replace("index.json", "index.json.damaged"): data for name, data in left.items()}
    assert at(folder, 6) != six and not torn.exists() and not (folder / LOCK).exists()


# -- a store that fails


def test_a_save_outlives_a_store_that_refuses_for_a_while(recipe: str, tmp_path: Path, faults: Faulty) -> None:
    folder = ObjectPath(f"memory://{uuid.uuid4().hex}/run")
    for call in ("open", "pipe_file", "find"):
        faults.fail(call, OSError(errno.EBUSY, "503 SlowDown"), times=4)
    train(recipe, [f"out={tmp_path / 'run'}", f"checkpoint.folder={folder}", *STEPS])
    assert list(checkpoints.complete(folder)) == [2, 4, 6]


@pytest.mark.in_turn(2, 1)
def test_a_save_that_fails_is_tried_again_when_the_next_is_due(
    recipe: str, tmp_path: Path, faults: Faulty, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ObjectPath(f"memory://{uuid.uuid4().hex}/run")
    overrides = [f"out={tmp_path / 'run'}", f"checkpoint.folder={folder}", *STEPS]
    faults.fail("open", OSError(errno.EREMOTEIO, "500 InternalError"), 99, checkpoints.path_of(Path(), 2).name)
    train(recipe, [*overrides, "checkpoint.patience=1"])
    assert list(checkpoints.complete(folder)) == [4, 6] and len(list(folder.iterdir())) == 2
    assert "cannot save step 2" in (said := capsys.readouterr().err) and "500 InternalError (tried 6 times)" in said
    faults.fail("open", PermissionError("Access Denied"), times=99)
    with pytest.raises(SaveError, match=r"(?s)memory://.*/step-.*/pp0-ep0-tp0.safetensors: Access Denied: give cred"):
        train(recipe, [*overrides, f"out={tmp_path / 'other'}", f"checkpoint.folder={folder}/other"])


def test_an_object_that_the_store_has_lost_is_no_checkpoint(recipe: str, tmp_path: Path, faults: Faulty) -> None:
    folder, plain = ObjectPath(f"memory://{uuid.uuid4().hex}/run"), ObjectPath.objects

    def lossy(path: ObjectPath) -> dict[str, int]:
        return {name: size - name.startswith("exp_avg/") for name, size in plain(path).items()}

    overrides = [f"out={tmp_path / 'run'}", f"checkpoint.folder={folder}", *STEPS]
    with mock.patch.object(ObjectPath, "objects", lossy), pytest.raises(SaveError, match="the store has lost it, or"):
        train(recipe, overrides)
    assert not folder.is_dir()


# -- kill -9


def killed(rank: int, store: str, recipe: str, overrides: list[str], ready: Connection) -> None:
    """A rank of a run; the second stands still in the middle of its second save."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    plain, saved = ObjectPath.stream, list[str]()

    def stream(path: ObjectPath, *arguments: Any) -> None:
        saved.append(path.parts[-3])
        if rank == 1 and len({*saved}) == 2:
            plain(path, *arguments)
            ready.send(True)
            time.sleep(60)
        plain(path, *arguments)

    with mock.patch.object(ObjectPath, "stream", stream), contextlib.redirect_stdout(None):
        train(recipe, overrides)


@pytest.mark.in_turn(4, 2)
def test_a_kill_while_a_rank_uploads_leaves_the_older_one(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ObjectPath(f"file://{tmp_path}/bucket")
    context, overrides = forkserver(), [f"out={tmp_path / 'run'}", f"checkpoint.folder={folder}", *STEPS]
    ours, theirs = context.Pipe()
    ranks = [
        context.Process(target=killed, args=(rank, str(tmp_path / "s"), recipe, [*overrides, "mesh.tp=2"], theirs))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    assert ours.poll(60) and ours.recv()
    for process in ranks:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    names = {name.partition("/")[0] for name in folder.objects()}
    assert list(checkpoints.complete(folder)) == [2] and len(names) == 2  # and the half of another
    assert main.main([recipe, *overrides, "checkpoint.resume=auto"]) == 0
    assert "Resuming after step 2" in capsys.readouterr().out
    assert list(checkpoints.complete(folder)) == [2, 4, 6]
    assert not {path.name for path in folder.iterdir()} & (names - {at(folder, 2).name})


def test_what_is_published_is_not_abandoned(folder: ObjectPath) -> None:
    """A fault may come between the last object of a checkpoint and the word of it."""
    before = kept(folder)
    upload = checkpoints.begin(folder, 8, 0)
    write_file(upload.folder / "a", b"a")
    upload.abandon()
    assert kept(folder) == before
    upload = checkpoints.begin(folder, 8, 0)
    write_file(upload.folder / INDEX, b"{}")
    upload.finish()
    upload.abandon()
    assert list(checkpoints.complete(folder)) == [2, 4, 6, 8]


def test_a_run_that_has_saved_elsewhere_goes_on_from_there(recipe: str, folder: ObjectPath, tmp_path: Path) -> None:
    """Whatever it was told to start from."""
    began = [f"out={tmp_path / 'run'}", "checkpoint.resume=/somewhere/step-00000002", f"checkpoint.folder={folder}"]
    assert overrides_of_restart(recipe, began) == [*began, "checkpoint.resume=auto"]
    empty = [*began[:2], f"checkpoint.folder={folder}/empty"]
    assert overrides_of_restart(recipe, empty) == empty


# -- one run at a time


def test_a_second_run_is_refused(
    recipe: str, folder: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take: Any = RunLock.take
    monkeypatch.setattr(RunLock, "take", lambda out, by=None: take(out, 0.02, by=by))
    overrides = [f"out={tmp_path / 'run'}", f"checkpoint.folder={folder}", *STEPS, "train.steps=8"]
    with take(folder, 0.02, by=tmp_path / "other"):
        assert main.main([recipe, *overrides, "checkpoint.resume=auto"]) == 1
    assert f"checkpoint.folder ({folder}) is held by a run" in capsys.readouterr().err
    assert list(checkpoints.complete(folder)) == [2, 4, 6]


def test_a_folder_whose_run_has_died_is_taken(tmp_path: Path) -> None:
    """At once by a run of the same out on this machine, which has its lock; else when the heart stands still."""
    folder, told, lost = ObjectPath(f"memory://{uuid.uuid4().hex}/run"), list[str](), list[str]()
    take: dict[str, Any] = {"interval_s": 0.02, "tell": told.append}
    first = RunLock.take(folder, by=tmp_path / "one", interval_s=3600, lost=lost.append)
    with RunLock.take(folder, by=tmp_path / "one", **take):
        assert not told
        first.release()  # not its own any more
        assert (folder / LOCK).exists()
    second = RunLock.take(folder, by=tmp_path / "one", interval_s=3600)
    with RunLock.take(folder, by=tmp_path / "other", **take):
        assert len(told) == 1 and "waiting for 0.12 s" in told[0]
    second.release()


def test_a_run_whose_folder_was_taken_is_told(tmp_path: Path) -> None:
    folder, lost = ObjectPath(f"memory://{uuid.uuid4().hex}/run"), list[str]()
    with RunLock.take(folder, 0.02, lost=lost.append):
        held = read(folder / LOCK)
        assert held is not None
        (folder / LOCK).write((folder / LOCK).open().read().replace(held.token.encode(), b"0" * 32))
        until = time.monotonic() + 10
        while not lost and time.monotonic() < until:
            time.sleep(0.01)
    assert f"{folder} was taken by process" in lost[0]


# -- before anything starts


def test_what_a_recipe_asks_for_is_looked_at_before(
    recipe: str, folder: ObjectPath, tmp_path: Path, faults: Faulty
) -> None:
    def problems(*overrides: str) -> str:
        with pytest.raises(ConfigError) as error:
            check(recipe, [f"out={tmp_path / 'run'}", *STEPS, *overrides], 1, 1)
        return str(error.value)

    assert f"checkpoint.folder ({folder}) already holds a run" in problems(f"checkpoint.folder={folder}")
    assert "(elsewhere) is no URL of an object store" in problems("checkpoint.folder=elsewhere")
    said = problems("checkpoint.folder=s3://KEY:SECRET@bucket/run")
    assert "checkpoint.folder: s3://... is no URL of a store" in said and "SECRET" not in said
    older = problems(f"checkpoint.folder={folder}", f"checkpoint.resume={at(folder, 4)}")
    assert f"is older than {at(folder, 6).name} in the same folder: choose another checkpoint.folder=" in older
    faults.fail("find", PermissionError("Access Denied"), times=9)
    assert f"{folder}: Access Denied" in problems(f"checkpoint.folder={folder}", "checkpoint.resume=auto")


def test_one_process_asks_the_store_for_all(recipe: str, tmp_path: Path, faults: Faulty) -> None:
    folder = ObjectPath(f"memory://{uuid.uuid4().hex}/run")
    given = [f"out={tmp_path / 'run'}", *STEPS, f"checkpoint.folder={folder}"]
    check(recipe, given, 1, 1)
    assert faults.calls["find"] == 1
    check(recipe, given, 1, 1, another_looks=True)
    assert faults.calls["find"] == 1


# -- a real server


def test_on_an_s3_server(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    variables = {"ACCESS_KEY_ID": "KEY", "SECRET_ACCESS_KEY": "SECRET", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**variables, "ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    started = server.ThreadedMotoServer("127.0.0.1", port)
    started.start()
    try:
        boto3.client("s3").create_bucket(Bucket="bucket")
        for key in ("run/step-00000009/left", "another/left"):
            boto3.client("s3").create_multipart_upload(Bucket="bucket", Key=key)
        folder, overrides = place("s3://bucket/run"), [*STEPS, "checkpoint.folder=s3://bucket/run"]
        assert isinstance(folder, ObjectPath)
        train(recipe, [f"out={tmp_path / 'run'}", *overrides, "train.steps=4"])
        flipped(at(folder, 4))
        assert main.main([recipe, f"out={tmp_path / 'new'}", *overrides, "checkpoint.resume=auto"]) == 0
        assert list(checkpoints.complete(folder)) == [2, 4, 6]
        assert not any("SECRET" in path.read_text("latin-1") for path in tmp_path.rglob("*") if path.is_file())
        (left,) = boto3.client("s3").list_multipart_uploads(Bucket="bucket")["Uploads"]
        assert left["Key"] == "another/left"
    finally:
        started.stop()
