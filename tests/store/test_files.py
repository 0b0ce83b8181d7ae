"""Nothing that lies in the way is followed: files are opened within a folder, and replaced, never written through."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megacore.store.io import files as module
from megacore.store.io.files import append, leaves, open_file, open_lock, replacing

Act = Callable[[Path], object]


def read(path: Path, root: Path | None = None) -> bytes:
    with open_file(path, root) as file:
        return file.read()


def add(path: Path) -> None:
    with append(path) as file:
        file.write(b"more")


def replace(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"new")


def hold(path: Path) -> None:
    open_lock(path).close()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"precious")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "a").write_bytes(b"A")
    return tmp_path / "folder"


# -- to read


def test_links_stay_in_their_folder(folder: Path, secret: Path) -> None:
    for name, target in (("in", "inner/a"), ("out", secret), ("inner/up", "../../secret"), ("dir", folder.parent)):
        (folder / name).symlink_to(target)
    assert read(folder / "in", folder) == read(folder / "inner/a", folder) == b"A"
    for name in ("out", "inner/up", "dir/secret"):
        assert read(folder / name) == b"precious" and leaves(folder / name, folder)  # where the user has named it
        with pytest.raises(PermissionError, match=f"leads to {secret}, outside of {folder}"):
            open_file(folder / name, folder)


def test_the_hub_s_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x/snapshots/1"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x/blobs").mkdir()
    (tmp_path / "models--x/blobs/b").write_bytes(b"B")
    (snapshot / "a").symlink_to("../../blobs/b")
    assert read(snapshot / "a", snapshot) == b"B" and not leaves(snapshot / "a", snapshot)


def test_blobs_that_repositories_share(tmp_path: Path) -> None:
    """As the library keeps what comes from Xet: the blob of a repository is a link to one of the whole cache."""
    from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store

    cache = tmp_path / "hub"
    repository = cache / "models--own--model"
    snapshot, blob, digest = repository / "snapshots" / ("0" * 40), repository / "blobs" / "etag", "ab" * 32
    for folder in (snapshot, blob.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(b"weights")
    assert publish_blob_to_shared_store(blob_path=str(blob), xet_hash=digest, cache_dir=cache, expected_size=7)
    (snapshot / "a").symlink_to("../../blobs/etag")
    assert blob.is_symlink() and not leaves(snapshot / "a", snapshot)
    with open_file(snapshot / "a", snapshot) as file:
        assert file.read() == b"weights"
    (cache / "token").write_bytes(b"precious")
    (cache / "blobs/ab/other").write_bytes(b"precious")
    for name, target in {"up": "../../../token", "other": "../../../blobs/ab/other"}.items():
        (snapshot / name).symlink_to(target)
        with pytest.raises(PermissionError, match="leads to"):
            open_file(snapshot / name, snapshot)
    (cache / "plain/snapshots/1").mkdir(parents=True)
    (cache / "plain/snapshots/1/a").symlink_to(f"../../../blobs/ab/{digest}")
    assert leaves(cache / "plain/snapshots/1/a", cache / "plain/snapshots/1")  # no repository of the cache


@pytest.mark.parametrize("at", ["a", "inner"])
def test_what_is_exchanged_while_it_is_looked_at(
    folder: Path, secret: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between resolving a name and opening it somebody puts a link in its place, or in that of a folder above it."""
    (folder / "a").write_bytes(b"A")
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere/a").write_bytes(b"precious")
    resolve = os.path.realpath

    def racing(path: Path) -> str:
        found = resolve(path)
        if Path(found).name == "a":
            (folder / at).rename(folder.parent / "before")
            (folder / at).symlink_to(secret if at == "a" else folder.parent / "elsewhere")
        return found

    monkeypatch.setattr(module.os.path, "realpath", racing)
    with pytest.raises(OSError, match=r"Too many levels|Not a directory"):
        open_file(folder / ("a" if at == "a" else "inner/a"), folder)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("use", [read, add, hold], ids=["read", "append", "lock"])
def test_what_is_no_file(tmp_path: Path, make: Act, use: Act) -> None:
    """A pipe is not waited for."""
    make(tmp_path / "x")
    with pytest.raises(OSError, match=r"is a (pipe|folder), and no file|Is a directory|No such device"):
        use(tmp_path / "x")


# -- to write


def test_files_are_replaced_at_once(tmp_path: Path, secret: Path) -> None:
    path = tmp_path / "a"
    replace(path)
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    (tmp_path / ".a.new").symlink_to(secret)  # what a kill has left, or somebody has put there
    replace(path)
    assert path.read_bytes() == b"new" and secret.read_bytes() == b"precious"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "secret"]


@pytest.mark.parametrize("use", [add, replace, hold], ids=["append", "replace", "lock"])
@pytest.mark.parametrize("target", ["secret", "nowhere"])
def test_nothing_is_written_through_links(tmp_path: Path, secret: Path, use: Act, target: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / target)
    if use is replace:
        replace(tmp_path / "link")
        assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_bytes() == b"new"
    else:
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            use(tmp_path / "link")
    assert secret.read_bytes() == b"precious" and not (tmp_path / "nowhere").exists()


def test_only_files_of_ours_are_added_to(tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path / "a")
    add(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"moremore"
    os.link(secret, tmp_path / "b")
    with pytest.raises(PermissionError, match="has another name too"):
        append(tmp_path / "b")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        append(tmp_path / "a")
    assert secret.read_bytes() == b"precious"
