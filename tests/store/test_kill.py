"""A kill at any time, and a full disk: the source and what was published stay, and the next run succeeds."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock

import pytest
from families import drawn
from pool import forkserver
from tiny import LLAMA, Section, hugging_face_folder, layout_of, run_checkpoint, snapshot

from megacore.store.tensor_files import stream
from megacore.store.tensor_files.publish import LOCK, partial
from megacore.store.weight_folders import audit
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.tools import convert, reshard

ONE_AT_A_TIME = Lock()
"""Held to read how a process has ended: one that is started asks all others too, and an end is told once."""
KILLS = 18
"""Of each command."""

_LARGER = {"hidden_size": 192, "intermediate_size": 512, "vocab_size": 3001}
MEDIUM: Section = {**LLAMA, **_LARGER, "head_dim": 24}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "num_attention_heads": 8}
# Heads in pairs, fused linears, heads one after the other, norms around, listed experts: families of each kind of
# storage on disk.
KINDS: Mapping[str, Section] = {
    "llama": MEDIUM,
    **{name: {**drawn(name), **_LARGER, **_PLAIN} for name in ("cohere", "gemma2", "gpt_neox", "phi3", "mixtral")},
}


def work(program: str, arguments: Sequence[str], up: Connection) -> None:
    pytest.MonkeyPatch().setattr(os, "fsync", lambda file: None)  # a kill cuts no power
    up.send("begun")
    sys.exit({"convert": convert.main, "reshard": reshard.main}[program]([*map(str, arguments)]))


def run(
    program: str, *arguments: object, kill_after: float | None = None, begun: Path | None = None
) -> tuple[int, float]:
    """(exit status, seconds) of a process of its own; the time to the kill counts from when there is ``begun``, or from
    its start."""
    ours, theirs = forkserver().Pipe()
    process = forkserver().Process(target=work, args=(program, arguments, theirs))
    with ONE_AT_A_TIME:
        process.start()
    ours.recv()
    started = time.monotonic()
    if kill_after is not None:
        while begun and not begun.exists() and not wait([process.sentinel], 0):
            time.sleep(1e-3)
        time.sleep(kill_after)
        process.kill()
    wait([process.sentinel])
    with ONE_AT_A_TIME:
        process.join()
    assert process.exitcode is not None
    return process.exitcode, time.monotonic() - started


def published(folder: Path) -> dict[str, str]:
    """All but the lock, which a kill right after the renaming may leave."""
    return {name: digest for name, digest in snapshot(folder).items() if name != LOCK}


def is_sound(folder: Path) -> bool:
    if (folder / "index.json").exists():
        return not audit.check(Checkpoint.open(folder), jobs=1)
    return bool(HuggingFace.open(folder).weights)


def kill_again_and_again(program: str, source: Path, options: Sequence[str], seed: int) -> Counter[str]:
    """What was seen after each of the kills."""
    folder, seen, dice = source.parent, Counter[str](), random.Random(seed)
    target, reference = folder / "target", folder / "reference"
    # Published before, by another run; and how long one takes.
    assert run(program, source, reference, *options)[0] == 0
    _, takes = run(program, source, target, *options)
    shutil.rmtree(target)
    before, wanted = snapshot(source), snapshot(reference)
    for i in range(KILLS):
        # Every other one while it writes, which is a small part of the time, and a loaded machine's times vary.
        most, begun = (takes / 4, partial(target)) if i % 2 else (1.1 * takes, None)
        status, _ = run(program, source, target, *options, kill_after=dice.uniform(0, most), begun=begun)
        assert status in (0, -signal.SIGKILL)
        assert snapshot(source) == before
        assert snapshot(reference) == wanted
        left = {path.name for path in folder.iterdir()} - {source.name, reference.name}
        assert left <= {"target", ".target.partial"} and len(left) < 2, left
        seen[", ".join(left) or "nothing"] += 1
        if target.exists():
            assert published(target) == wanted
            assert is_sound(target)
            shutil.rmtree(target)
        elif i % 4 == 3:
            assert run(program, source, target, *options)[0] == 0
            assert snapshot(target) == wanted
            assert {path.name for path in folder.iterdir()} == {source.name, reference.name, "target"}
            shutil.rmtree(target)
    assert run(program, source, target, *options)[0] == 0
    assert snapshot(target) == wanted and not (folder / ".target.partial").exists()
    return seen


@pytest.mark.in_turn(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.grid] * (kind != "llama")) for kind in KINDS])
def test_kill_at_any_time(kind: str, tmp_path: Path) -> None:
    """54 kills, two at a time: during conversions, reshards with optimizer state, and exports."""
    section = KINDS[kind]
    for name in ("convert", "reshard", "export"):
        (tmp_path / name).mkdir()
    hugging_face_folder(tmp_path / "convert/source", section)
    run_checkpoint(tmp_path / "reshard/source", section, layout_of(section, (2, 3), pp=2, tp=2))
    run_checkpoint(tmp_path / "export/source", section, layout_of(section, tp=4))
    runs = [
        ("convert", tmp_path / "convert/source", ["--tp", "2", "--pp", "2", "--jobs", "2"], 1),
        ("reshard", tmp_path / "reshard/source", ["--tp", "4", "--jobs", "2"], 2),
        ("convert", tmp_path / "export/source", ["--to", "hf", "--max-shard-size", "4MB", "--jobs", "2"], 3),
    ]
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(lambda run: kill_again_and_again(*run), runs))
    print(f"{3 * KILLS} kills in {time.monotonic() - started:.0f} s:", *map(dict, seen))
    for of in seen:  # most of them hit a run at work
        assert of[".target.partial"] >= KILLS // 6, of


# -- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB, where the user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no filesystem can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_too_small(small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hugging_face_folder(tmp_path / "hf", {**MEDIUM, "vocab_size": 13})
    assert convert.main([str(tmp_path / "hf"), str(small_disk / "c")]) == 1
    said = capsys.readouterr().err
    assert str(small_disk / "c") in said and "MiB are free" in said and "make room" in said and "Traceback" not in said
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The room was there when it was asked for."""
    hugging_face_folder(tmp_path / "hf", {**MEDIUM, "vocab_size": 13})
    monkeypatch.setattr("megacore.store.tensor_files.publish.free_bytes", lambda folder: 10**12)
    assert convert.main([str(tmp_path / "hf"), str(small_disk / "c"), "--tp", "2"]) == 1
    said = capsys.readouterr().err
    assert "No space left on device: it needs" in said and "are free in" in said
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("fails", ["posix_fallocate", "pwrite", "fsync"])
@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_whatever_the_disk_refuses(command: str, fails: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """At the third time it is asked: in the middle of the work."""
    if command == "convert":
        hugging_face_folder(tmp_path / "source", LLAMA)
    else:
        run_checkpoint(tmp_path / "source", LLAMA, layout_of(LLAMA, tp=2))
    before, real, asked = snapshot(tmp_path), getattr(os, fails), Counter[str]()

    def refuse(*arguments: int) -> int:
        asked[fails] += 1
        if asked[fails] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(real(*arguments) or 0)

    monkeypatch.setattr(os, fails, refuse)
    main = {"convert": convert, "reshard": reshard}[command].main
    assert main([str(tmp_path / "source"), str(tmp_path / "target"), "--tp", "4"]) == 1
    said = capsys.readouterr().err
    assert "No space left on device: it needs" in said and len(said.strip().splitlines()) == 1
    assert snapshot(tmp_path) == before
    monkeypatch.undo()
    assert main([str(tmp_path / "source"), str(tmp_path / "target"), "--tp", "4"]) == 0


def test_an_interrupt_does_not_wait_for_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Ctrl-C stops the workers: they write no more than the block that they are at, and nothing is left."""
    hugging_face_folder(tmp_path / "hf", {**LLAMA, "hidden_size": 64})
    before, real, filled = snapshot(tmp_path), stream.fill, Counter[str]()

    def slow(*arguments: object) -> object:
        filled["blocks"] += 1
        if filled["blocks"] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stream, "fill", slow)
    assert convert.main([str(tmp_path / "hf"), str(tmp_path / "c"), "--jobs", "2"]) == 130
    assert "nothing was left behind" in capsys.readouterr().err
    assert filled["blocks"] < 20  # of 60
    assert snapshot(tmp_path) == before
