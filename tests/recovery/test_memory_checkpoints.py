"""Checkpoints in memory: what a run that is started again finds, where it may not look, what it leaves behind."""

import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool

from megacore import checkpoints
from megacore.rank import RankPlace
from megacore.recovery import memory_checkpoints, partners
from megacore.recovery.memory_checkpoints import LEFTOVER_S, RUN_ID, MemoryCheckpoints, private, sweep
from megacore.recovery.partners import HeldFiles
from megacore.store.io.strict_json import StoreError
from megacore.training import build, main, metrics, save
from megacore.training.check import check
from megacore.training.trainer import Callback, Trainer

QUIET = ["train.steps=6", "evaluate.every=0", "checkpoint.every=0", "recovery.overhead=1e9"]
AGAIN = "checkpoint.resume=auto"


class Killed(Exception):
    pass


class Ends(Callback):
    """Ends this life of a run after a step: by a pause, or as a kill does; and keeps what it has come to."""

    def __init__(self, at: int = 0, pauses: bool = False) -> None:
        self.at, self.pauses = at, pauses
        self.first, self.told = 0, list[str]()
        self.weights: dict[str, np.ndarray] = {}

    def on_start(self, run: Trainer) -> None:
        self.first, plain = run.step, run.tell

        def tell(text: str) -> None:
            self.told.append(text)
            plain(text)

        run.tell = tell  # type: ignore[method-assign]

    def ask(self, run: Trainer) -> Mapping[str, float]:
        ends = self.pauses and run.step == self.at
        return {"pause": ends, "look": ends, "keep": ends}

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        self.weights = engine.weights(run)
        if run.step == self.at and not self.pauses:
            raise Killed


Told = tuple[int, list[int], dict[str, np.ndarray], list[str]]
"""The step that a life began after, the steps in memory after it, the weights at its end, what it told."""


def live(recipe: str, overrides: list[str], root: Path, at: int = 0, pauses: bool = False, node: int = 8) -> Told:
    """A life of a run on this rank; each machine of ``node`` ranks has a folder of its own."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    node = min(node, world)
    root = root / f"machine-{rank // node}"
    root.mkdir(exist_ok=True)
    memory, ends = MemoryCheckpoints(root), Ends(at, pauses)
    here = RankPlace(rank, world, rank % node, node, True)
    # Machines of one name each have it at the same path.
    with mock.patch.object(build, "_agree"):
        try:
            main.fit(check(recipe, [*QUIET, *overrides], world, node), torch.device("cpu"), here, [memory, ends])
        except Killed:
            assert memory._saver is not None
            memory._saver.abandon()  # by now a kill has ended what was under way
    assert memory.folder is not None
    if world > 1:
        dist.barrier()
    return ends.first, list(checkpoints.complete(memory.folder)), ends.weights, ends.told


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("layout", ["mesh.dp=2 zero.shard=optimizer", "mesh.tp=2", "mesh.pp=2"])
def test_a_run_that_is_started_again_ends_as_if_nothing_had_been(
    layout: str, pool: Pool, recipe: str, tmp_path: Path
) -> None:
    """Whether its ranks were paused, and lose nothing, or killed."""
    run = [f"out={tmp_path / 'run'}", *layout.split()]
    undisturbed = pool.run(2, live, recipe, [*run, f"out={tmp_path / 'calm'}"], tmp_path)
    assert [each[:2] for each in undisturbed] == [(0, [])] * 2
    assert [each[1][-1] for each in pool.run(2, live, recipe, run, tmp_path, 3, True)] == [3, 3]
    killed = pool.run(2, live, recipe, [*run, AGAIN], tmp_path, 5)
    assert [each[0] for each in killed] == [3, 3] and killed[0][1] in ([3], [3, 4], [3, 5])
    ended = pool.run(2, live, recipe, [*run, AGAIN], tmp_path)
    for (first, kept, weights, _), (_, _, expected, _) in zip(ended, undisturbed, strict=True):
        assert first == killed[0][1][-1] and kept == [] and engine.same(weights, expected)
    assert not [*(tmp_path / "machine-0").glob(f"*/{(tmp_path / 'run' / RUN_ID).read_text().strip()}")]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("before", "after"), [((2, "mesh.tp=2"), (1, "")), ((1, ""), (2, "mesh.pp=2"))])
def test_it_goes_on_with_other_ranks(
    before: tuple[int, str], after: tuple[int, str], pool: Pool, recipe: str, tmp_path: Path
) -> None:
    """The numbers are the same but for the order of sums: the losses say so, for layouts hold other parts."""
    (ranks, layout), (others, other) = before, after
    pool.run(ranks, live, recipe, [f"out={tmp_path / 'run'}", *layout.split()], tmp_path, 3, True)
    assert pool.run(others, live, recipe, [f"out={tmp_path / 'run'}", AGAIN, *other.split()], tmp_path)[0][0] == 3
    pool.run(1, live, recipe, [f"out={tmp_path / 'calm'}"], tmp_path)
    losses = [[each["loss"] for each in metrics.read(tmp_path / name / metrics.METRICS)] for name in ("run", "calm")]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("memory", ["keeps", "fails", "is off"])
def test_a_pause_loses_nothing_where_memory_keeps_nothing(recipe: str, tmp_path: Path, memory: str) -> None:
    def write(folder: Path, *arguments: Any) -> Any:
        if memory == "fails" and any(part.startswith("megacore-") for part in folder.parts):
            raise StoreError("no room")
        return plain(folder, *arguments)

    plain = save.write
    run, ends = [f"out={tmp_path / 'run'}", *QUIET, "checkpoint.every=100"], Ends(3, pauses=True)
    with mock.patch.object(save, "write", write):
        engine.fit(recipe, run, [ends] if memory == "is off" else [MemoryCheckpoints(tmp_path), ends])
    on_disk = checkpoints.complete(tmp_path / "run" / checkpoints.FOLDER)
    assert [*on_disk] == ([] if memory == "keeps" else [3])


# -- several machines


def test_partners_are_on_other_machines() -> None:
    for world, node in ((2, 1), (8, 2), (6, 2), (7, 2), (5, 4), (24, 8)):
        there = partners.machines(world, node)
        sets = partners.partners(there)
        assert sorted(rank for ranks in sets for rank in ranks) == list(range(world))
        for ranks in sets:
            for rank in ranks:
                other = partners.keeper(rank, ranks, there)
                assert other in ranks and other // node != rank // node


def test_a_checkpoint_is_whole_if_the_machines_have_all_of_it_between_them() -> None:
    def held(step: int, index: str, files: str, lacking: str) -> HeldFiles:
        return HeldFiles(step, index, dict.fromkeys(files.split(), (1, "F32", {})), {}, lacking.split())

    told = [
        [held(3, "x", "a b", ""), held(6, "y", "a", "b"), held(9, "z", "a", "b")],
        [held(6, "y", "b", "a"), held(9, "other", "b", "a")],
    ]
    assert partners.whole(told) == [(6, [told[0][1], told[1][0]]), (3, [told[0][0], None])]


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("layout", ["mesh.dp=4 zero.shard=optimizer", "mesh.pp=2 mesh.dp=2"])
def test_a_machine_that_is_lost_takes_nothing_along(layout: str, pool: Pool, recipe: str, tmp_path: Path) -> None:
    """Its files are at its partner; a new machine in its place is brought what it lacks."""
    run = [f"out={tmp_path / 'run'}", *layout.split()]
    with_shares = pool.run(4, live_in_shares, recipe, run, tmp_path, 3, True, 2)
    assert [each[1][-1] for each in with_shares] == [3] * 4
    shutil.rmtree(tmp_path / "machine-1")
    undisturbed = pool.run(4, live, recipe, [*run, f"out={tmp_path / 'calm'}"], tmp_path)
    ended = pool.run(4, live, recipe, [*run, AGAIN], tmp_path, 0, False, 2)
    for (first, _, weights, _), (_, _, expected, _) in zip(ended, undisturbed, strict=True):
        assert first == 3 and engine.same(weights, expected)


def live_in_shares(*arguments: Any) -> Told:
    """A life in which each rank writes its part of each state, however small."""
    with mock.patch("megacore.store.tensor_files.shares.SHARE_BYTES", 1):
        return live(*arguments)


@pytest.mark.in_turn(4, 2)
def test_machines_read_what_they_have(pool: Pool, recipe: str, tmp_path: Path) -> None:
    """Of four machines two have each file: these read it for all, and what is brought is what lies across two files."""
    run = [f"out={tmp_path / 'run'}", "mesh.dp=4"]
    pool.run(4, live_in_shares, recipe, run, tmp_path, 3, True, 1)
    folders = [next((tmp_path / f"machine-{n}").glob("*/*/step-00000003")) for n in range(4)]
    before = [files(folder) for folder in folders]
    assert before[0] == before[1] and before[2] == before[3] and not before[0] & before[2]
    undisturbed = pool.run(4, live, recipe, [*run, f"out={tmp_path / 'calm'}"], tmp_path)
    ended = pool.run(4, live_in_shares, recipe, [*run, AGAIN], tmp_path, 6, False, 1)
    for (first, _, weights, _), (_, _, expected, _) in zip(ended, undisturbed, strict=True):
        assert first == 3 and engine.same(weights, expected)
    brought = [files(folder) - there for folder, there in zip(folders, before, strict=True)]
    assert sum(map(len, brought)) == 1, brought


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*.safetensors")}


@pytest.mark.in_turn(2, 1)
def test_a_machine_without_room_for_the_rest_goes_on_from_the_disk(pool: Pool, recipe: str, tmp_path: Path) -> None:
    run = [f"out={tmp_path / 'run'}", "mesh.dp=2"]
    pool.run(2, live, recipe, [*run, "checkpoint.every=2"], tmp_path, 3, True, 1)
    shutil.rmtree(tmp_path / "machine-1")
    assert [each[0] for each in pool.run(2, live_without_room, recipe, [*run, AGAIN], tmp_path, 0, False, 1)] == [2, 2]


def live_without_room(*arguments: Any) -> Told:
    with mock.patch.object(partners, "free_memory", lambda: 1000 if dist.get_rank() else None):
        return live(*arguments)


@pytest.mark.in_turn(2, 1)
def test_fewer_machines_go_on_after_a_loss(pool: Pool, recipe: str, tmp_path: Path) -> None:
    run = [f"out={tmp_path / 'run'}"]
    pool.run(2, live_in_shares, recipe, [*run, "mesh.dp=2"], tmp_path, 3, True, 1)
    (held,) = partners.held(next((tmp_path / "machine-0").glob("*/*/step-00000003")).parent)[-1:]
    assert held.step == 3 and not held.lacking and len(held.tensors) > 3
    shutil.rmtree(tmp_path / "machine-1")
    assert pool.run(1, live, recipe, [*run, AGAIN], tmp_path, 0, False, 1)[0][0] == 3


# -- what is damaged, and what is another's


@pytest.mark.in_turn(4, 3)
def test_a_damaged_one_is_passed_over_for_the_one_before_and_then_for_the_disk(
    pool: Pool, recipe: str, tmp_path: Path
) -> None:
    run = [f"out={tmp_path / 'run'}", "mesh.tp=2"]
    pool.run(2, live, recipe, [*run, "checkpoint.every=1"], tmp_path, 1, True)
    assert pool.run(2, live, recipe, [*run, AGAIN], tmp_path, 3, True)[0][0] == 1
    folder = next((tmp_path / "machine-0").glob("*/*/step-00000003")).parent
    kept = sorted(folder.glob("step-*"))
    assert len(kept) == 2
    flip(kept[1])
    assert pool.run(2, live, recipe, [*run, AGAIN], tmp_path, 5, True)[0][0] == int(kept[0].name[5:])
    for path in folder.glob("step-*"):
        flip(path)
    assert pool.run(2, live, recipe, [*run, AGAIN], tmp_path)[0][0] == 1


def flip(folder: Path) -> None:
    path = max(folder.rglob("*.safetensors"), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.in_turn(2, 0)
def test_a_run_that_begins_anew_does_not_go_on_from_another_s(recipe: str, tmp_path: Path) -> None:
    run = [f"out={tmp_path / 'run'}"]
    live(recipe, run, tmp_path, 3, True)
    known = (tmp_path / "run" / RUN_ID).read_text().strip()
    for name in ("config.yaml", metrics.METRICS):
        (tmp_path / "run" / name).unlink()
    assert live(recipe, run, tmp_path, 2, True)[0] == 0
    assert (tmp_path / "run" / RUN_ID).read_text().strip() != known
    assert live(recipe, [*run, AGAIN], tmp_path)[0] == 2
    assert not [*(tmp_path / "machine-0").glob(f"*/{known}")]  # nobody held it any more


@pytest.mark.parametrize("plant", ["link", "open", "file"])
def test_nothing_is_kept_where_another_user_may_look(plant: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "megacore-0", tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    if plant == "link":
        folder.symlink_to(elsewhere)
    elif plant == "open":
        folder.mkdir()
        folder.chmod(0o750)
    else:
        folder.touch()
    with pytest.raises(StoreError, match="megacore-0: is no folder that this user alone may enter"):
        private(folder)


def test_a_run_whose_folder_is_another_s_goes_on_without(
    recipe: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"megacore-{os.geteuid()}").mkdir()
    (tmp_path / f"megacore-{os.geteuid()}").chmod(0o777)
    memory = MemoryCheckpoints(tmp_path)
    assert engine.fit(recipe, [f"out={tmp_path / 'run'}", *QUIET], [memory]) == 6 and memory.folder is None
    assert "No checkpoints are kept in memory" in capfd.readouterr().out


def test_leftovers_are_swept_unless_somebody_holds_them(tmp_path: Path) -> None:
    old, young, held = (private(tmp_path / name) for name in ("old", "young", "held"))
    (old / "held").touch()
    for folder in (old, held):
        os.utime(folder, (time.time() - 2 * LEFTOVER_S,) * 2)
    with (held / "held").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(held, (time.time() - 2 * LEFTOVER_S,) * 2)
        sweep(tmp_path, LEFTOVER_S)
    assert not old.exists() and young.exists() and held.exists()
    sweep(tmp_path, 0, but="young")
    assert [*tmp_path.iterdir()] == [young]


# -- what it costs


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("lack", ["free_bytes", "free_memory"])
def test_without_room_a_run_says_so_and_goes_on(
    lack: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_checkpoints, lack, lambda *_: 1000)
    assert engine.fit(recipe, [f"out={tmp_path / 'run'}", *QUIET], [MemoryCheckpoints(tmp_path)]) == 6
    assert capfd.readouterr().err.count("No checkpoints are kept in memory: they need ") == 1


def test_a_save_that_fails_is_told_once_and_ends_nothing(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_checkpoints, "RETRY_S", 0.0)
    with mock.patch.object(save, "write", side_effect=StoreError("no room")):
        _, kept, _, told = live(recipe, [f"out={tmp_path / 'run'}", "train.steps=9"], tmp_path)
    assert kept == [] and len(told) == 1 and "no room" in told[0] and "The run goes on" in told[0]


@pytest.mark.in_turn(3, 2)
def test_it_saves_as_seldom_as_its_cost_demands(recipe: str, tmp_path: Path) -> None:
    """A clock on which each look takes a second: a save takes some seconds, and thirty times as long passes."""
    now, begun = 0.0, list[tuple[int, float]]()

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    memory = MemoryCheckpoints(tmp_path, clock)
    plain = save.Saver.save

    def noted(saver: save.Saver, step: int, document: Mapping[str, Any]) -> None:
        begun.append((step, now))
        plain(saver, step, document)
        saver.finish()

    overrides = [f"out={tmp_path / 'run'}", *QUIET, "recovery.overhead=0.03", "train.steps=100"]
    with mock.patch.object(save.Saver, "save", noted):
        assert engine.fit(recipe, overrides, [memory]) == 100
    times = [at for _, at in begun]
    assert begun[0][0] <= 3 and len(begun) >= 3
    assert all(33 <= later - at <= 170 for at, later in itertools.pairwise(times))
