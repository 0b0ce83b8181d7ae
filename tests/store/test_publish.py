"""Publishing is atomic: a folder appears whole or not at all, whoever writes, fails or is killed."""

import errno
import fcntl
import os
import random
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial as partial_of
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from pool import forkserver

from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files import publish as module
from megacore.store.tensor_files.publish import (
    LOCK,
    Publication,
    leftovers,
    partial,
    publish,
    remove_leftovers,
    write_file,
)
from megacore.store.tensor_files.stream import File, write


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def fill(folder: Path) -> None:
    (folder / "weights").mkdir()
    write_file(folder / "weights" / "a", b"A")
    write_file(folder / "index.json", b"{}")


def published(target: Path) -> dict[str, str]:
    with publish(target) as folder:
        fill(folder)
    return content(target)


def refuse(code: int, *_: object) -> None:
    raise OSError(code, os.strerror(code))


FILLED = {"index.json": "{}", "weights/a": "A"}


def leftover(target: Path) -> Path:
    """What a killed writer of the target leaves."""
    folder = partial(target)
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "old").write_text("half")
    (folder / LOCK).touch()
    return folder


# -- the way that it goes well


@pytest.mark.quick
def test_appears_at_the_end(tmp_path):
    with publish(tmp_path / "out", 100) as folder:
        assert folder == tmp_path / ".out.partial" == partial(tmp_path / "out")
        fill(folder)
        assert not (tmp_path / "out").exists()
    assert content(tmp_path / "out") == FILLED
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_in_steps(tmp_path):
    publication = Publication.begin(tmp_path / "out")
    fill(publication.folder)
    for step in (publication.finish, publication.abandon):  # which comes too late
        step()
        assert content(publication.target) == FILLED


def test_missing_parents_are_made_and_an_empty_target_is_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    assert published(tmp_path / "a" / "b" / "out") == published(tmp_path / "empty") == FILLED


@pytest.mark.parametrize("given", ["out", "out/", "./out", "sub/../out", "../here/out", "out/.", "."])
def test_relative_targets(tmp_path, monkeypatch, given):
    working = tmp_path / "here"
    (working if given == "." else working / "sub").mkdir(parents=True)
    monkeypatch.chdir(working)
    target = working if given == "." else working / "out"
    with publish(given) as folder:
        assert folder == target.with_name(f".{target.name}.partial")
        monkeypatch.chdir(tmp_path)  # does not move it
        fill(folder)
    assert content(target) == FILLED


def test_a_link_to_another_disk_is_written_beside_what_it_leads_to(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    with publish(tmp_path / "out") as folder:
        assert folder == tmp_path / "disk" / ".real.partial"
        fill(folder)
    assert content(tmp_path / "out") == FILLED and (tmp_path / "out").is_symlink()


def test_nobody_else_sees_it_before_it_appears(tmp_path):
    """Then it is a folder like any other: as the umask has it, which is not ours to change, or the folder around it."""
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o2775)
    for mask in (0o022, 0o027, 0o002):
        before = os.umask(mask)
        try:
            for around in (tmp_path, tmp_path / "group"):
                (around / f"like{mask}").mkdir()
                with publish(around / f"out{mask}") as folder:
                    assert folder.stat().st_mode & 0o777 == 0o700
                    write_file(folder / "a", b"A")
                assert (around / f"out{mask}").stat().st_mode == (around / f"like{mask}").stat().st_mode
                assert (around / f"out{mask}/a").stat().st_mode & 0o777 == 0o666 & ~mask
                assert content(around / f"out{mask}") == {"a": "A"}
        finally:
            os.umask(before)


def test_everything_is_on_the_disk_before_it_appears(tmp_path, monkeypatch):
    """Files and folders are synced, inner ones first, then renamed, then the parent is synced."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record(file: int) -> None:
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), tmp_path))
        fsync(file)

    def move(source: Path, target: Path) -> None:
        events.append(f"rename {source.name} {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", move)
    with publish(tmp_path / "new" / "out") as folder:
        fill(folder)
    assert events == [
        ".",
        "new/.out.partial/weights/a",
        "new/.out.partial/index.json",
        "new/.out.partial/weights",
        "new/.out.partial",
        "rename .out.partial out",
        "new/out",
        "new",
    ]


# -- the ways that it fails


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path, error):
    with pytest.raises(error), publish(tmp_path / "out") as folder:
        fill(folder)
        raise error
    assert not list(tmp_path.iterdir())
    assert published(tmp_path / "out") == FILLED


def make_file(path: Path) -> None:
    path.write_text("precious")


def make_full(path: Path) -> None:
    make_strange(path)
    (path / "y").mkdir()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_file, "out: exists and is no folder: choose another name, or remove it"),
        (make_full, "out: exists and holds 2 files or folders: choose another name, or remove it"),
        (os.mkfifo, "out: exists and is no folder"),
    ],
)
def test_what_exists_is_not_touched(tmp_path, make, message):
    make(tmp_path / "out")
    with pytest.raises(StoreError, match=message), publish(tmp_path / "out"):
        pytest.fail("began")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_target_that_appears_meanwhile(tmp_path):
    with pytest.raises(StoreError, match="out: exists and holds 2 files"), publish(tmp_path / "out") as folder:
        fill(folder)
        make_full(tmp_path / "out")
    assert content(tmp_path / "out") == {"x": "precious"} and not partial(tmp_path / "out").exists()


def test_places_that_cannot_be_renamed_to(tmp_path, monkeypatch):
    with pytest.raises(StoreError, match="/: has no folder around it"):
        Publication.begin("/")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(StoreError, match=r"out: is where a disk is mounted.*choose a folder in it"):
        Publication.begin(tmp_path / "out")


def test_room_is_checked_first(tmp_path, monkeypatch):
    usage = namedtuple("usage", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: usage(3 * 2**18, 4096))
    with publish(tmp_path / "fits", 3 * 2**30):
        pass
    old = leftover(tmp_path / "out") / "weights" / "old"
    with pytest.raises(StoreError, match=rf"out: needs 3\.50 GiB and 3\.00 GiB are free in {tmp_path}: make room, or"):
        Publication.begin(tmp_path / "out", 7 * 2**29)
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]
    old.parent.mkdir(parents=True)
    (partial(tmp_path / "out") / LOCK).touch()
    old.touch()
    monkeypatch.setattr(os, "statvfs", lambda path: usage(0 if old.exists() else 1, 4096))
    Publication.begin(tmp_path / "out", 4096).abandon()


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (5 << 20, "5.00 MiB"), (7 << 30, "7.00 GiB")],
)
def test_sizes_are_in_units_that_say_something(size: int, words: str) -> None:
    assert module.spelled(size) == words


def test_parents_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    for target in ("file/out", "file/deep/out", "x" * 300 + "/out", "y" * 250):
        with pytest.raises(StoreError, match=r"Not a directory|File name too long"):
            Publication.begin(tmp_path / target)
    for target in ("a\x00b", "\ud800"):
        with pytest.raises(StoreError):
            Publication.begin(tmp_path / target)
    (tmp_path / "theirs").mkdir(mode=0o555)
    user = os.geteuid()
    try:
        if user == 0:  # to whom nothing is forbidden
            os.seteuid(65534)
        with pytest.raises(StoreError, match=r"out: Permission denied"):
            Publication.begin(tmp_path / "theirs" / "out")
    finally:
        os.seteuid(user)


def test_filesystems_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", partial_of(refuse, errno.ENOLCK))
    with pytest.raises(StoreError, match=r"\.out\.partial/\.lock: its filesystem has no locks \(No locks available\)"):
        Publication.begin(tmp_path / "out")


@pytest.mark.parametrize(("code", "goes_on"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_filesystems_that_cannot_sync_folders(tmp_path, monkeypatch, code, goes_on):
    publication = Publication.begin(tmp_path / "out")
    monkeypatch.setattr(os, "fsync", partial_of(refuse, code))
    with nullcontext() if goes_on else pytest.raises(StoreError, match="Input/output error"):
        publication.finish()
    publication.abandon()
    assert (tmp_path / "out").exists() == goes_on
    assert not publication.folder.exists()


def test_write_file(tmp_path, monkeypatch):
    write_file(tmp_path / "f", b"12")
    assert (tmp_path / "f").read_bytes() == b"12"
    with pytest.raises(StoreError, match="f: File exists"):
        write_file(tmp_path / "f", b"3")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="File exists"):
        write_file(tmp_path / "link", b"3")
    assert (tmp_path / "f").read_bytes() == b"12" and not (tmp_path / "elsewhere").exists()
    monkeypatch.setattr(os, "fsync", partial_of(refuse, errno.ENOSPC))
    with pytest.raises(StoreError, match=r"g: No space left on device: it needs 3 bytes and \d+ are free in"):
        write_file(tmp_path / "g", b"123")


# -- others who write


def test_a_live_writer_is_left_alone(tmp_path):
    publication = Publication.begin(tmp_path / "out")
    fill(publication.folder)
    with pytest.raises(StoreError, match=r"\.out\.partial: another process is writing it: wait for it, or choose"):
        Publication.begin(tmp_path / "out")
    assert leftovers(tmp_path) == [] == remove_leftovers(tmp_path)
    with publish(tmp_path / "other"):
        pass
    publication.finish()
    assert content(tmp_path / "out") == FILLED


def test_a_leftover_is_taken_over(tmp_path):
    folder = leftover(tmp_path / "out")
    (folder / "link").symlink_to(tmp_path / "source")
    (folder / "file").write_text("half")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x").write_text("precious")
    with publish(tmp_path / "out") as new:
        assert [path.name for path in new.iterdir()] == [LOCK]
        fill(new)
    assert content(tmp_path / "out") == FILLED and content(tmp_path / "source") == {"x": "precious"}
    partial(tmp_path / "next").mkdir()  # from before its lock
    assert leftovers(tmp_path) == [partial(tmp_path / "next")]
    assert published(tmp_path / "next") == FILLED


def make_strange(path: Path) -> None:
    path.mkdir()
    (path / "x").write_text("precious")


def make_link(path: Path) -> None:
    make_strange(path.parent / "elsewhere")
    (path.parent / "elsewhere" / LOCK).touch()
    path.symlink_to(path.parent / "elsewhere")


def make_theirs(path: Path) -> None:
    """A leftover as another user would make it for us to go on with."""
    (path / LOCK).parent.mkdir()
    (path / LOCK).touch()
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:  # as if
        path.chmod(0o777)


def make_open(path: Path) -> None:
    """Others may put into it what we would publish."""
    path.mkdir()
    path.chmod(0o775)


@pytest.mark.parametrize(
    "make", [make_strange, make_file, make_link, make_theirs, make_open, lambda path: path.symlink_to("gone")]
)
def test_what_is_not_ours_is_not_removed(tmp_path, make):
    """A folder without our lock, a file, a link to a folder (even to one like ours), somebody's, a link to nothing."""
    make(partial(tmp_path / "out"))
    before = content(tmp_path)
    with pytest.raises(StoreError, match=r"\.out\.partial: is in the way and was not made here: remove it"):
        Publication.begin(tmp_path / "out")
    assert leftovers(tmp_path) == [] == remove_leftovers(tmp_path)
    assert content(tmp_path) == before and os.path.lexists(partial(tmp_path / "out"))


def test_a_lock_that_is_a_link(tmp_path):
    folder = leftover(tmp_path / "out")
    (folder / LOCK).unlink()
    (folder / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="Too many levels of symbolic links"):
        Publication.begin(tmp_path / "out")
    assert not (tmp_path / "elsewhere").exists()


def test_leftovers_are_found_and_removed(tmp_path):
    found = [leftover(tmp_path / name) for name in ("a", "b")]
    live = Publication.begin(tmp_path / "c")
    (tmp_path / "step-1").mkdir()
    assert leftovers(tmp_path) == found
    assert remove_leftovers(tmp_path) == found
    assert sorted(path.name for path in tmp_path.iterdir()) == [".c.partial", "step-1"]
    live.abandon()
    assert leftovers(tmp_path / "missing") == []


def test_abandoning_what_became_anothers(tmp_path):
    """The folder was moved away, and someone else has made a new one of its name."""
    first = Publication.begin(tmp_path / "out")
    first.folder.rename(tmp_path / "moved")
    second = Publication.begin(tmp_path / "out")
    fill(second.folder)
    first.abandon()
    second.finish()
    assert content(tmp_path / "out") == FILLED


def test_a_folder_that_goes_while_its_lock_is_waited_for(tmp_path, monkeypatch):
    """Its writer is done between our opening the lock and our holding it: what we hold then is not our folder."""
    flock = fcntl.flock

    def racing(act: Callable[[], object]) -> Callable[[int, int], None]:
        def race(lock: int, kind: int) -> None:
            monkeypatch.setattr(fcntl, "flock", flock)
            act()
            flock(lock, kind)

        return race

    first = Publication.begin(tmp_path / "out")
    monkeypatch.setattr(fcntl, "flock", racing(first.abandon))
    second = Publication.begin(tmp_path / "out")
    fill(second.folder)
    monkeypatch.setattr(fcntl, "flock", racing(second.finish))
    with pytest.raises(StoreError, match="out: exists and holds 2 files"):
        Publication.begin(tmp_path / "out")
    assert content(tmp_path / "out") == FILLED and not partial(tmp_path / "out").exists()


def test_what_cannot_be_removed_stays_a_leftover(tmp_path, monkeypatch):
    publication = Publication.begin(tmp_path / "out")
    fill(publication.folder)
    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "rmtree", partial_of(refuse, errno.EACCES))
        publication.abandon()
    (found,) = leftovers(tmp_path)
    assert content(found) == {**FILLED, LOCK: ""} and found.name.startswith(f"{publication.folder.name}.")
    assert remove_leftovers(tmp_path) == [found] and not list(tmp_path.iterdir())


def test_what_was_being_removed_when_its_writer_died_goes_with_the_next_one(tmp_path):
    for name in ("out", "other"):
        leftover(tmp_path / "out").rename(tmp_path / f".{name}.partial.12ab34cd.doomed")
    assert published(tmp_path / "out") == FILLED
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.partial.12ab34cd.doomed", "out"]


@pytest.mark.parametrize("name", ["weights/a", "a"])
def test_another_rank_that_writes_still_leaves_nothing_in_the_way(tmp_path, monkeypatch, name):
    publication, plain = Publication.begin(tmp_path / "out"), module.empty
    fill(publication.folder)

    def emptied(folder: Path) -> None:
        plain(folder)
        with pytest.raises(StoreError, match="No such file or directory"):
            write(publication.folder, [File(name, (), None)], None)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(module, "empty", emptied)
        publication.abandon()
    assert not list(tmp_path.iterdir())
    Publication.begin(tmp_path / "out").abandon()


# -- kills


def write_on_and_on(folder: Path, up: Connection) -> None:
    pytest.MonkeyPatch().setattr(os, "fsync", lambda file: None)  # a kill cuts no power
    up.send(True)
    for i in count():
        with publish(folder / f"{i}") as made:
            (made / "weights").mkdir()
            for j in range(3):
                write_file(made / "weights" / f"{j}", b"x" * 1000)
            write_file(made / "index.json", b"{}")


@pytest.mark.in_turn(2, 1)
def test_kills(tmp_path):
    """kill -9 at 20 random moments: each published folder is whole, and the next writer goes on."""
    chance, published, context = random.Random(0), 0, forkserver()
    for _ in range(20):
        ours, theirs = context.Pipe()
        process = context.Process(target=write_on_and_on, args=(tmp_path, theirs))
        process.start()
        ours.recv()
        time.sleep(chance.uniform(0, 0.03))
        process.kill()
        process.join()
        for folder in [path for path in tmp_path.iterdir() if not path.name.startswith(".")]:
            names = {str(path.relative_to(folder)) for path in folder.rglob("*")} - {LOCK}
            assert names == {"index.json", "weights", "weights/0", "weights/1", "weights/2"}
            published += 1
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()
        if chance.random() < 0.5:
            remove_leftovers(tmp_path)
            assert not list(tmp_path.iterdir())
    assert published


def race(folder: Path, name: str, up: Connection) -> None:
    wins = 0
    for i in range(80):
        try:
            with publish(folder / f"{i}") as made:
                write_file(made / "who", name.encode())
                write_file(made / "again", name.encode())
            wins += 1
        except StoreError as error:
            assert "exists" in str(error) or "another process" in str(error), error
    up.send(wins)


def test_races(tmp_path):
    """Two processes want the same 80 names: each is one's alone, whole."""
    context, wins = forkserver(), []
    pipes = [context.Pipe() for _ in "ab"]
    named = zip("ab", pipes, strict=True)
    racers = [context.Process(target=race, args=(tmp_path, name, up)) for name, (_, up) in named]
    for racer in racers:
        racer.start()
    for racer, (ours, _) in zip(racers, pipes, strict=True):
        wins.append(ours.recv())
        racer.join()
    folders = list(tmp_path.iterdir())
    assert sum(wins) == len(folders) > 0 and all(folder.name.isdigit() for folder in folders)
    for folder in folders:
        assert content(folder) in ({"who": "a", "again": "a"}, {"who": "b", "again": "b"})
