"""Object stores: names, retries, ranges, uploads; in memory, and on an S3 server where moto and s3fs are installed."""

import copy
import errno
import sys
import uuid
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from faulty import Faulty
from tiny import LLAMA

from megacore import checkpoints
from megacore.models.registry import configure
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Stored, native, plan
from megacore.store.conversions.formats import open_folder
from megacore.store.io.objects import NoObject, ObjectPath, place
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files import object_files, stream
from megacore.store.tensor_files.object_files import ObjectTensors, upload
from megacore.store.tensor_files.tensors import TensorFile


@pytest.fixture
def folder() -> ObjectPath:
    return ObjectPath(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """Tells what the store does next; nobody waits for the next try."""
    yield Faulty.put_in(monkeypatch)


# -- names


@pytest.mark.quick
def test_a_url_is_a_path() -> None:
    path = place("s3://bucket/a//b/")
    assert isinstance(path, ObjectPath) and str(path) == f"{path}" == "s3://bucket/a/b"
    assert str(path / "step-1" / "index.json") == "s3://bucket/a/b/step-1/index.json"
    assert (str(path.parent), path.name, str(path.with_name("c"))) == ("s3://bucket/a", "b", "s3://bucket/a/c")
    assert place(path) == path and place(str(path)) == path and copy.deepcopy(path) == path
    assert str((path / "x" / "y").relative_to(path)) == "x/y" and path.resolve() is path
    assert str(place("file:///tmp/x")) == "file:///tmp/x"
    assert type(place("a/b")) is type(place(Path("a/b"))) is type(Path())


@pytest.mark.quick
@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:SECRET@bucket/a",
        "s3://KEY@bucket",
        "s3://bucket/a?secret=SECRET",
        "s3://bucket:9000/a",
        "http://host/SECRET",
        "simplecache::s3://SECRET",
        "s3://a::file://SECRET",
        "s3://",
    ],
)
def test_a_url_holds_a_name_and_nothing_else(url: str) -> None:
    with pytest.raises(StoreError, match="is no URL of a store: name one as s3://bucket/prefix") as error:
        place(url)
    assert "SECRET" not in str(error.value)


@pytest.mark.quick
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, scheme, extra in ("s3fs", "s3", "s3"), ("gcsfs", "gs", "gcs"):
        monkeypatch.setitem(sys.modules, package, None)
        imported = import_module("fsspec.registry")._registry
        monkeypatch.delitem(imported, scheme, raising=False)
        with pytest.raises(
            StoreError, match=rf"{scheme}://bucket needs the package {package}: .*'megacore\[{extra}\]'"
        ):
            place(f"{scheme}://bucket").exists()


# -- what a store refuses


def test_what_may_pass_is_tried_again(folder: ObjectPath, faults: Faulty) -> None:
    for error in (OSError(errno.EBUSY, "SlowDown"), TimeoutError(), RuntimeError("connection reset")):
        faults.fail("pipe_file", error, times=5)
        (folder / "a").write(b"sound")
        assert faults.calls["pipe_file"] == 6
        assert (folder / "a").open().read() == b"sound"
    faults.fail("pipe_file", OSError(errno.EIO, "InternalError"), times=6)
    with pytest.raises(StoreError, match=f"{folder}/a: InternalError \\(tried 6 times\\)"):
        (folder / "a").write(b"sound")


def test_what_will_not_pass_is_told_at_once(folder: ObjectPath, faults: Faulty) -> None:
    no_credentials = type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")
    for error in (PermissionError("Access Denied"), no_credentials):
        faults.fail("pipe_file", error, times=1)
        with pytest.raises(StoreError, match=f"{folder}/a: {error}: give credentials that may do so"):
            (folder / "a").write(b"")
        assert faults.calls["pipe_file"] == 1
    with pytest.raises(NoObject, match=f"{folder}/none: there is no such object, or no such bucket"):
        (folder / "none").open()
    assert not (folder / "none").exists() and not folder.is_dir() and folder.objects() == {}
    folder.remove()


def test_an_answer_that_is_cut_is_asked_for_again(folder: ObjectPath, faults: Faulty) -> None:
    (folder / "a").write(bytes(range(100)))
    faults.cut("cat_ranges", times=2)
    memory = bytearray(50)
    (folder / "a").fill(memoryview(memory), 25)
    assert memory == bytes(range(25, 75))
    faults.cut("cat_ranges", times=6)
    with pytest.raises(StoreError, match="bytes 25 to 75 were asked for, 49 came"):
        (folder / "a").fill(memoryview(memory), 25)


def test_an_upload_that_fails_midway_leaves_nothing_and_is_begun_anew(tmp_path: Path, faults: Faulty) -> None:
    folder, begun = ObjectPath(f"file://{tmp_path}/bucket"), list[int]()

    def pieces(fails: int) -> Iterator[bytes]:
        begun.append(0)
        yield b"one"
        if len(begun) <= fails:
            raise OSError(errno.EIO, "InternalError")
        yield b"two"

    (folder / "a").stream(lambda: pieces(2), 6)
    assert len(begun) == 3 and (folder / "a").open().read() == b"onetwo"
    with pytest.raises(StoreError, match="InternalError"):
        (folder / "b").stream(lambda: pieces(99), 6)
    assert folder.objects() == {"a": 6}


# -- tensor files


def drawn_files(schema: Schema, tp: int) -> list[stream.File]:
    """Of each rank of tp, with padding, in two dtypes of which the narrower comes first."""
    rng, layout = np.random.default_rng(3), Layout(schema, MeshShape(tp=tp), (schema.sizes["layer"],))
    files = []
    for rank in range(tp):
        held = list(native(layout, [rank]))
        dtypes = {s.name: ("BF16", "F32")[n % 2] for n, s in enumerate(held)}
        bits = {s.name: rng.integers(0, 1 << 16, s.shape).astype(f"u{2 + 2 * (n % 2)}") for n, s in enumerate(held)}

        def read(stored: Stored, view: object = None, dtypes: Any = dtypes, bits: Any = bits) -> tuple[str, np.ndarray]:
            return dtypes[stored.name], bits[stored.name]

        tensors = tuple(stream.Tensor(s, dtypes[s.name], copies) for s, copies in plan(schema, held, held))
        files.append(stream.File(f"weights/{rank}.safetensors", tensors, read))
    return files


@pytest.mark.quick
@pytest.mark.parametrize("block", [stream.BLOCK_BYTES, 64])
def test_an_upload_has_the_bytes_of_a_file(
    folder: ObjectPath, tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "BLOCK_BYTES", block)
    schema = configure({**LLAMA, "intermediate_size": 10}).schema  # the last rank's are padded, after gate and after up
    files = drawn_files(schema, tp=4)
    assert upload(folder, files, schema) == stream.write(tmp_path, files, schema)
    assert folder.objects() == {file.path: (tmp_path / file.path).stat().st_size for file in files}
    for file in files:
        assert (folder / file.path).open().read() == (tmp_path / file.path).read_bytes()


@pytest.mark.quick
def test_only_the_bytes_that_are_wanted_come(
    folder: ObjectPath, tmp_path: Path, faults: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = configure(LLAMA).schema
    files = drawn_files(schema, tp=1)
    upload(folder, files, schema)
    stream.write(tmp_path, files, schema)
    there, here = ObjectTensors.open(folder / files[0].path), TensorFile.open(tmp_path / files[0].path)
    assert there.entries == here.entries and there.size == here.size
    name = "embed.weight"
    faults.read = 0
    monkeypatch.setattr(object_files, "_NEAR", 0)
    part = there.part(name, [Piece("", ("n",), (8,), (1,), 2), Piece("", ("n",), (4,), (1,), 30)])
    assert faults.read == 24
    bits, whole = part.reshape(-1).view(np.uint8), here.array(name).reshape(-1).view(np.uint8)
    assert np.array_equal(bits[4:20], whole[4:20]) and np.array_equal(bits[60:68], whole[60:68])
    for _ in range(3):  # of a whole tensor, block by block, the bytes come once
        assert np.array_equal(there.array(name), here.array(name))
    assert faults.read == 24 + whole.nbytes


@pytest.mark.quick
def test_what_is_no_checkpoint_is_told(folder: ObjectPath) -> None:
    with pytest.raises(StoreError, match=f"{folder} is not a folder"):
        open_folder(folder)
    (folder / "config.json").write(b"{}")
    with pytest.raises(StoreError, match=r"has no index\.json: a Hugging Face folder must lie on a disk"):
        open_folder(folder)


# -- the folders of checkpoints


def put(folder: ObjectPath, *names: str) -> None:
    for name in names:
        (folder / name).write(b"{}")


def removals(faults: Faulty) -> list[str]:
    return [key.rpartition("run/")[2] for key in faults.keys["rm"]]


def test_a_checkpoint_is_one_by_its_index_which_comes_last_and_goes_first(folder: ObjectPath, faults: Faulty) -> None:
    old, torn, new = (f"step-0000000{n}-0000000{n}" for n in (2, 3, 4))
    put(folder, f"{old}/weights/a", f"{old}/index.json", f"{torn}/weights/a", f"{new}/weights/a", f"{new}/index.json")
    put(folder, "step-00000005/index.json", "run.lock", "other/index.json", "step-00000009-0000000x/index.json")
    assert [str(path.name) for path in checkpoints.complete(folder).values()] == [old, new, "step-00000005"]
    aside = checkpoints.set_aside(folder / "step-00000005")
    assert str(aside) == f"{folder}/step-00000005/index.json.damaged" and aside.exists()
    assert max(checkpoints.complete(folder)) == 4
    checkpoints.clean(folder)  # of those without an index, what was set aside stays
    left = {"run.lock", "other", "step-00000009-0000000x", "step-00000005", old, new}
    assert {path.name for path in folder.iterdir()} == left
    faults.keys.clear()
    checkpoints.prune(folder, 1, 0)
    assert list(checkpoints.complete(folder)) == [4] and not (folder / old).is_dir()
    assert removals(faults) == [f"{old}/index.json", old]


def test_two_tries_to_save_a_step_share_no_name(folder: ObjectPath) -> None:
    one, other = (checkpoints.begin(folder, 7, 0) for _ in range(2))
    assert one.folder != other.folder and one.folder.name[:13] == other.folder.name[:13] == "step-00000007"
    put(ObjectPath(one.folder), "weights/a")
    one.abandon()
    assert not folder.is_dir()


class Leftovers:
    """A store as s3fs is, with uploads that nobody completes; it lists two at once."""

    def __init__(self) -> None:
        keys = ("run/a", "run/b", "run/step-1/c", "run-2/d")
        self.uploads = [{"Key": key, "UploadId": f"id of {key}"} for key in keys]

    def call_s3(self, call: str, Bucket: str, **given: str) -> dict[str, Any]:
        assert Bucket == "bucket"
        if call == "abort_multipart_upload":
            self.uploads.remove({"Key": given["Key"], "UploadId": given["UploadId"]})
            return {}
        below = [each for each in self.uploads if each["Key"].startswith(given["Prefix"])]
        after = [each for each in below if each["Key"] > given.get("KeyMarker", "")]
        last = after[:2][-1] if after else {"Key": "", "UploadId": ""}
        more = {"NextKeyMarker": last["Key"], "NextUploadIdMarker": last["UploadId"]}
        return {"IsTruncated": len(after) > 2, **more, **({"Uploads": after[:2]} if after else {})}


@pytest.mark.quick
def test_uploads_that_a_killed_run_has_left_behind_are_aborted(
    folder: ObjectPath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of its own folder, when it is cleaned; a store that forbids it costs no run."""
    store, path = Leftovers(), ObjectPath("s3://bucket/run")
    monkeypatch.setattr(ObjectPath, "objects", lambda self: {})
    monkeypatch.setattr(ObjectPath, "store", lambda self: (store, "bucket/run"))
    checkpoints.clean(path)
    assert [each["Key"] for each in store.uploads] == ["run-2/d"] and path.abort_uploads() == 0
    assert folder.abort_uploads() == 0  # of another kind of store
    monkeypatch.setattr(store, "call_s3", mock.Mock(side_effect=PermissionError("Access Denied")))
    checkpoints.clean(path)
    assert "left behind stay in the store: s3://bucket/run: Access Denied" in capsys.readouterr().err
