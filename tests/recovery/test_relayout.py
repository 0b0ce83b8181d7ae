"""State that moves from one layout to another in memory is to the bit what a checkpoint and a resume give."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import engine
import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine import LLAMA, RECIPE, write_recipe
from extended_family import extended
from families import ROTATION
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool

from megacore.control import Control
from megacore.recovery.protocol import Status
from megacore.store.tensors import DTYPES
from megacore.training import image, recover
from megacore.training.check import Setup, check
from megacore.training.copies import Copies
from megacore.training.recover import Held, Told, hand_over, let_go, recovered
from megacore.training.relayout import LiveFolder, within
from megacore.training.trainer import Asked, Trainer
from parallel.mesh import Mesh
from parallel.weights.pattern import Piece
from parallel.weights.transfer import native, strided

AT = 3
"""The step after which the world changes; the run has two more."""
COMMON = ["train.steps=5", "checkpoint.every=0", "evaluate.every=0", "log.every=1"]


@contextmanager
def group(store: Path, rank: int, world: int) -> Iterator[None]:
    """A process group in the place of the one that there is."""
    dist.barrier()  # others may still be on their way into it
    dist.destroy_process_group()
    made = dist.FileStore(str(store), world)
    dist.init_process_group("gloo", store=made, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    yield


def losses(made: Trainer) -> list[bytes]:
    """Do the steps that are left -> the bits of their losses."""
    plain, found = made.update, []

    def update(step, stats):
        found.append(stats.loss.numpy().tobytes())
        plain(step, stats)

    made.update = update  # type: ignore[method-assign]
    made.run()
    return found


@dataclass(frozen=True)
class Case:
    """A world, the ranks of it that are gone, and the next one, whose first ranks are those that are left.

    Args:
        before, after: Processes and overrides.
        lost: Ranks that die, after one step more where copies are kept.
        leave: Ranks that hand over what they have, and go.
        holders: {rank: rank that keeps a copy of its image}.
    """

    before: tuple[int, list[str]]
    after: tuple[int, list[str]]
    lost: tuple[int, ...] = ()
    leave: tuple[int, ...] = ()
    holders: tuple[tuple[int, int], ...] = ()

    @property
    def gone(self) -> set[int]:
        return {*self.lost, *self.leave}

    @property
    def processes(self) -> int:
        return max(self.before[0], self.after[0] + len(self.gone))

    @property
    def places(self) -> list[int]:
        """The processes of the next world."""
        left = sorted(set(range(self.before[0])) - self.gone)
        new = sorted(set(range(self.processes)) - {*left, *self.gone})
        assert len(left) <= self.after[0]
        return [*left, *new][: self.after[0]]


@dataclass(frozen=True)
class Found:
    """What a rank has, in memory alone and after a resume, at once and at the end."""

    images: list[bytes]
    losses: list[list[bytes]]
    ends: list[bytes]
    given: int
    wanted: int
    left: int
    rewound: bool


def begun(case: Case, recipe: str, overrides: Sequence[str], copies: Copies) -> Trainer:
    """A trainer that has done its steps up to AT, saved them, and where copies are kept has done one more."""
    made = engine.trainer(recipe, overrides)
    listen, ends = made._listen, [AT]

    def stop() -> Asked:
        heard = listen()
        return heard._replace(stop=made.done in ends, save=made.done == AT)

    made._listen = stop  # type: ignore[method-assign]
    assert made.run() == AT
    if case.holders:
        take = partial(recover._copy, made, image.contents(made))
        copies.join(made.mesh.rank, dict(case.holders), recover.everybody(made.mesh), take)
        copies.begin(AT)
        copies.leave()
        ends.append(AT + 1)
        assert made.run() == AT + 1
    return made


def wanted(made: Trainer, folder: LiveFolder) -> int:
    """The bytes of what the replicas of a rank read together, padding left out."""
    sizes, total = made.model.parameters.layout.schema.sizes, 0
    stored = {each.name: each for each in native(made.model.parameters.layout, [made.mesh.rank])}
    weights = {name for name in stored if name not in folder.names("master")} if "master" in folder.states else stored
    for state in folder.states:
        for name in folder.names(state) & (set(weights) if state == "weights" else set(stored)):
            for piece in stored[name].pieces.values():
                box = stored[name].box
                numel = math.prod(max(0, min(box[a][1], sizes[a]) - box[a][0]) for a in piece.axes)
                total += numel * DTYPES[folder.dtype(state, stored[name])].itemsize
    return total


def wrong(kind: str) -> None:
    """Have this rank give others something else than they ask for."""
    plain = LiveFolder._packed

    def packed(self: LiveFolder, state: str, requests: Sequence[tuple[int, ...]], rank: int) -> torch.Tensor:
        if rank == self.group.index or not requests:
            return plain(self, state, requests, rank)  # type: ignore[arg-type]
        if kind == "another state":
            return plain(self, {"exp_avg": "exp_avg_sq"}.get(state, state), requests, rank)  # type: ignore[arg-type]
        found = plain(self, state, requests, rank)  # type: ignore[arg-type]
        if kind == "another range":
            return torch.cat([found[:8], found[8:].roll(8)])
        if kind == "another step":
            return torch.cat([torch.tensor([self.version - 1]).view(torch.uint8), found[8:]])
        return found[:-8]

    LiveFolder._packed = packed  # type: ignore[assignment, method-assign]


def moved(case: Case, recipe: str, folder: str, common: list[str], fault: str = "") -> Found | str | None:
    """The job of a process: its part in the world before, and in the next one."""
    with extended():
        return _moved(case, recipe, Path(folder), [*COMMON, *common], fault)


def _moved(case: Case, recipe: str, path: Path, common: list[str], fault: str) -> Found | str | None:
    process, (world, overrides) = dist.get_rank(), case.before
    held, told = Held(Copies()), Told(Status(0))
    if process < world:
        with group(path / "before", process, world):
            held.trainer = begun(case, recipe, [*common, *overrides, f"out={path / 'out'}"], held.copies)
            if case.leave:
                setup = check(recipe, [*common, *overrides, f"out={path / 'other'}"], world, world)
                hand_over(setup, held, case.leave)
            told = let_go(held, process)
    if process in case.gone:
        held, told = Held(Copies()), Told(Status(0))
    if process not in case.places:
        with group(path / f"alone{process}", 0, 1):
            return None
    (world, overrides), rank = case.after, case.places.index(process)
    with group(path / "after", rank, world):
        asked = [*common, *overrides, f"out={path / 'moved'}"]
        setup = check(recipe, asked, world, world)
        mesh = Mesh.create(setup.config.mesh.shape(world))
        control = Control.create(mesh)
        words = [Told.from_json(each) for each in control.exchange(json.loads(json.dumps(told.to_json())))]
        before = held.trainer
        if fault and rank == 1:
            wrong(fault)
        try:
            made, read = spied(setup, mesh, control, held, words)
        except recover.StateLost as error:
            assert held.trainer is before and held.forming is None  # what it had, it has
            return str(error)
        resumed = engine.trainer(recipe, [*asked[:-1], f"out={path / 'resumed'}", f"checkpoint.resume={path / 'out'}"])
        dist.barrier()
        images = [image.to_bytes(each).numpy().tobytes() for each in (made, resumed)]
        given = sum(control.exchange(sum(read.given.values())))
        total = sum(control.exchange(wanted(made, read) if mesh.place.dp == mesh.place.cp == 0 else 0))
        rewound = made.rewound
        of = [losses(each) for each in (made, resumed)]
        ends = [image.to_bytes(each).numpy().tobytes() for each in (made, resumed)]
        return Found(images, of, ends, given, total, len(read._brought), rewound)


def spied(setup: Setup, mesh: Mesh, control: Control, held: Held, words: list[Told]) -> tuple[Trainer, LiveFolder]:
    """Recover, and see the folder that the state was read from."""
    folders, move = list[LiveFolder](), recover.move

    def spy(*arguments: Any) -> LiveFolder:
        folders.append(move(*arguments))
        return folders[-1]

    recover.move = spy  # type: ignore[assignment]
    try:
        made = recovered(setup, mesh, control, held, words, 7)
    finally:
        recover.move = move
    assert held.trainer is made and made.formed_in == 7 and not held.copies.images
    return made, folders[0]


def compare(pool: Pool, case: Case, recipe: str, folder: Path, common: list[str]) -> list[Found]:
    found = [each for each in pool.run(case.processes, moved, case, recipe, str(folder), common) if each is not None]
    assert len(found) == case.after[0]
    for each in found:
        assert each.images[0] == each.images[1] and each.ends[0] == each.ends[1] and not each.left
        assert each.losses[0] == each.losses[1] and len(each.losses[0]) == 2
        assert each.given == each.wanted
    return found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model some of whose layers have experts, with biases that are moved from step to step."""
    routed = {
        "num_hidden_layers": 3,
        "num_experts": 8,
        "routing": {"top_k": 2, "score": "sigmoid", "normalised": True},
        "experts": [0, 1, 1],
        "correction": True,
    }
    with extended():
        return write_recipe(
            tmp_path_factory.mktemp("experts"), RECIPE | {"model": LLAMA | {"family": "extended"} | routed}
        )


BF16 = ["train.precision=bf16"]
BIASES = [*BF16, "experts.bias_rate=0.01", "experts.sequence_balance=0.1"]
ZERO = {n: [*BF16, f"zero.shard={state}"] for n, state in enumerate(("optimizer", "gradients", "parameters"), start=1)}
TP2, TP4, PP2 = ["mesh.tp=2"], ["mesh.tp=4"], ["mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.chunks=2"]
EP2, CP2 = ["mesh.ep=2"], ["mesh.cp=2"]
CASES: dict[str, tuple[Case, list[str]]] = {
    "dp3 to dp2": (Case((3, []), (2, []), lost=(1,)), BF16),
    "dp2 to dp3": (Case((2, []), (3, [])), BF16),
    "dp4 to tp2": (Case((4, []), (2, TP2), lost=(0, 2)), BF16),
    "tp2 x dp2 to dp3": (Case((4, TP2), (3, []), lost=(2,)), BF16),
    "tp2 x dp2 to tp4": (Case((4, TP2), (4, TP4), lost=(1,)), BF16),  # whose ranks share kv heads
    "tp4 to pp2": (Case((4, TP4), (4, PP2)), BF16),
    "pp2 x dp2 to dp3": (Case((4, PP2), (3, []), lost=(3,)), BF16),
    "dp2 to pp2 x dp2": (Case((2, []), (4, PP2), lost=(0,)), BF16),
    "ep2 x dp2 to dp3": (Case((4, EP2), (3, []), lost=(3,)), BIASES),
    "dp3 to ep2 x tp2": (Case((3, []), (4, [*EP2, *TP2]), lost=(1,)), BIASES),
    "cp2 x dp2 to dp3": (Case((4, CP2), (3, []), lost=(0,)), BF16),
    **{f"ZeRO {n}: dp2 to dp3": (Case((2, []), (3, [])), ZERO[n]) for n in ZERO},
    **{f"ZeRO {n}: dp3 to tp2": (Case((3, []), (2, TP2), leave=(0,)), ZERO[n]) for n in ZERO},
    **{f"ZeRO {n}: tp2 x dp2 to pp2 x dp3": (Case((4, TP2), (6, ["mesh.pp=2"])), ZERO[n]) for n in ZERO},
    "ZeRO 3: tp4 to dp3": (Case((4, TP4), (3, []), leave=(1,)), ZERO[3]),
    "ZeRO 3: ep2 x dp2 to dp3": (Case((4, EP2), (3, []), leave=(3,)), [*ZERO[3], *BIASES]),
    "ZeRO 3: cp2 x dp2 to dp3": (Case((4, CP2), (3, []), leave=(3,)), ZERO[3]),
    "HSDP: dp4 to dp2": (Case((4, ["zero.replicas=2"]), (2, []), lost=(0, 1)), ZERO[3]),
    "HSDP: dp2 to dp4": (Case((2, []), (4, ["zero.replicas=2"])), ZERO[2]),
    "fp16": (Case((2, []), (2, []), lost=(0,)), ["train.precision=fp16", "loss_scale.growth_interval=2"]),
    "fp64": (Case((3, []), (2, TP2), lost=(2,)), []),
    "frozen": (Case((3, []), (2, TP2), lost=(2,)), [*BF16, "train.freeze=[layers.0.*]"]),
    "frozen, ZeRO 3": (Case((2, []), (2, TP2)), [*ZERO[3], "train.freeze=[layers.0.*]"]),
    "offloaded": (Case((2, []), (3, [])), [*ZERO[2], "memory.offload_optimizer=host"]),
    "pp2 leaves": (Case((2, ["mesh.pp=2"]), (1, []), leave=(1,)), BF16),
    "tp2 x dp2 leaves": (Case((4, TP2), (2, []), leave=(0, 2)), BF16),
    "pp2 from a copy": (Case((2, PP2), (1, []), lost=(1,), holders=((0, 1), (1, 0))), BF16),
    "ZeRO 3 from copies": (Case((3, []), (2, []), lost=(2,), holders=((0, 1), (1, 2), (2, 0))), ZERO[3]),
}
QUICK = {"tp2 x dp2 to tp4", "ZeRO 1: tp2 x dp2 to pp2 x dp3", "ZeRO 3 from copies", "dp3 to ep2 x tp2"}
"""Those that are no part of the grid; another rotation gives others."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK or (turn + ROTATION) % 8 == 0 else [pytest.mark.grid])
        for turn, name in enumerate(CASES)
    ],
)
def test_state_moves_as_a_checkpoint_would(pool: Pool, recipe: str, experts: str, tmp_path: Path, name: str) -> None:
    case, common = CASES[name]
    found = compare(pool, case, experts if "experts.bias_rate=0.01" in common else recipe, tmp_path, common)
    assert all(each.rewound == bool(case.holders) for each in found)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("case", "split"), [(Case((3, []), (2, TP2), lost=(1,)), "none"), (Case((2, []), (3, [])), "parameters")]
)
def test_adapters_move_and_their_model_is_read_again(
    pool: Pool, recipe: str, tmp_path: Path, case: Case, split: str
) -> None:
    base = tmp_path / "base"
    pool.run(1, engine.train, recipe, [*COMMON, "train.steps=3", "checkpoint.at_end=true", f"out={base}"])
    lora = [*BF16, "lora.rank=2", "lora.targets=[q_proj,down_proj]", f"checkpoint.init={base}"]
    compare(pool, case, recipe, tmp_path, [*lora, f"zero.shard={split}"])


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("another range", "ranks have read other .* than were written (.*): memory"),
        ("another state", "ranks have read other exp_avg than were written"),
        ("another step", "rank 1 has given what it had at step 2, not 3"),
        ("too little", "rank 1 has given [0-9]+ bytes, and was asked for [0-9]+"),
    ],
)
def test_what_is_given_wrong_is_not_used(pool: Pool, recipe: str, tmp_path: Path, fault: str, says: str) -> None:
    case = Case((2, TP2), (3, []))
    found = pool.run(3, moved, case, recipe, str(tmp_path), [], fault)
    pool.close()  # they are wrong from here on
    assert all(isinstance(each, str) and re.search(says, each) for each in found), found


# -- without processes


@pytest.mark.quick
def test_a_fault_before_all_have_theirs_leaves_both(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine.trainer(recipe, [*COMMON, *BF16, f"out={tmp_path / 'old'}"])
    monkeypatch.setattr(made, "_listen", lambda: Asked(made.done == AT, False, False))
    assert made.run() == AT
    setup = check(recipe, [*COMMON, *ZERO[2], f"out={tmp_path / 'new'}"], 1, 1)
    held = Held(Copies(), made)

    def again() -> Trainer:
        told = Told.from_json(json.loads(json.dumps(let_go(held, 0).to_json())))
        return recovered(setup, made.mesh, made.control, held, [told], 7)

    with monkeypatch.context() as patched:
        largest = Control.largest
        patched.setattr(Control, "largest", lambda self, *here: largest(self, *here) if here else broken())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a fault"):
                again()
            assert held.trainer is made and held.forming is not None
    told = let_go(held, 0)
    assert (
        told.status.world == 0
        and told.forming is not None
        and (told.forming.status.version, told.forming.status.world) == (AT, 7)
    )
    # Another rank has passed the barrier: what was formed counts, and stays where it is.
    forming = held.forming
    found = recovered(setup, made.mesh, made.control, held, [told.forming], 9)
    assert forming is not None and found.formed_in == 7 and held.trainer is found and held.forming is None
    assert image.to_bytes(found).equal(image.to_bytes(forming))


@pytest.mark.quick
def test_what_could_not_be_saved_is_still_to_be_saved(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may stand at its end, and have nothing else to do."""
    made = engine.trainer(recipe, [*COMMON, f"out={tmp_path / 'run'}"])
    monkeypatch.setattr(made, "_listen", lambda: Asked(made.done == AT, False, False))
    assert made.run() == AT
    held = Held(Copies(), made)
    assert not let_go(held, 0).unsaved
    made.saver._failed("no room")
    assert let_go(held, 0).unsaved


def broken() -> list[float]:
    raise RuntimeError("a fault")


@given(st.data())
def test_the_boxes_within_a_stretch_are_its_elements_in_order(data: st.DataObject) -> None:
    whole = [data.draw(st.integers(1, 4)) for _ in range(3)]
    strides = [whole[1] * whole[2], whole[2], 1]
    order = data.draw(st.permutations(range(3)))
    axes = tuple("abc"[i] for i in order)
    plain = Piece("", axes, tuple(whole[i] for i in order), tuple(strides[i] for i in order), 0)
    bounds = {}
    for axis, size in zip(plain.axes, plain.shape, strict=True):
        first = data.draw(st.integers(0, size))
        bounds[axis] = first, data.draw(st.integers(first, size))
    view = plain.box(bounds)
    start, stop = data.draw(st.integers(0, 64)), data.draw(st.integers(0, 64))
    flat = np.arange(64)
    parts = [strided(flat, view.box(box)).ravel() for box in within(view, start, stop)]
    held = {at for at in strided(flat, view).ravel().tolist() if start <= at < stop} if view.numel else set()
    assert len(parts) <= 5 and sum(map(len, parts)) == len(held)
    assert {at for part in parts for at in part.tolist()} == held
    assert [part.min() for part in parts] == sorted(part.min() for part in parts)
