"""States and parameters off the device: the same bits, wherever they live and however small the buffer is."""

import ctypes
import gc
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import engine
import numpy as np
import pytest
import torch
from engine import path_of, same, train, trainer, weights
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor, nn

from megacore.checks.machine import surroundings
from megacore.models.registry import configure
from megacore.parallel.enum_errors import ZeroShard
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.mesh import Mesh
from megacore.parallel.parameters import Parameters
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.schema import Param, Schema
from megacore.planning import capacity
from megacore.planning.setting import SHARDS
from megacore.recipe import load
from megacore.store.weight_folders.index import MASTER, MOMENTS
from megacore.training.states.offload import Offload, OffloadedStore
from megacore.training.states.optimizer import Optimizer
from megacore.training.states.windows import ALIGNED, BUFFERS, WindowStore, cut

# -- windows


@pytest.mark.quick
@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(1, 6).map(lambda n: n * ALIGNED))
def test_each_element_is_in_one_window(sizes: list[int], numel: int) -> None:
    seen = [np.zeros(size, int) for size in sizes]
    for number, window in enumerate(cut(sizes, numel)):
        taken = np.zeros(numel, int)
        for each in window:
            assert each.window == number and each.here.start % ALIGNED == 0 == each.there.start % ALIGNED
            assert each.here.stop <= numel
            taken[each.here] += 1
            seen[each.part][each.there] += 1
        assert taken.max() == 1
    assert all((each == 1).all() for each in seen)


# -- the same numbers

# With 2 kv heads on 4 ranks the pieces have other replicas each; beside each other in dim 1, they lie in gaps.
SIZES = {"layer": 1, "embed": 6, "heads": 8, "kv": 2, "head": 30}
SCHEMA = Schema(
    (
        Param("qkv", "embed (q: heads head + k: kv head + v: kv head)", std=1.0),
        Param("rows", "(q: heads head + k: kv head) embed", std=1.0),
        Param("plain", "embed", std=1.0),
    ),
    SIZES,
)


def states_after(
    mesh: MeshShape,
    shard: ZeroShard,
    dtypes: tuple[torch.dtype, torch.dtype | None, bool],
    offload: Offload | None,
    parameters_too: bool = False,
) -> tuple[dict[str, Tensor], int, int]:
    """(what is there after steps of which one is left out, updates, windows)."""
    dtype, moments, masters = dtypes
    live = Mesh.create(mesh)
    parameters = Parameters(Layout(SCHEMA, mesh, (1,)), live, dtype)
    parameters.initialise(0)
    wide = torch.float32 if masters and dtype.itemsize < 4 else dtype
    gradients = Gradients(parameters, [nn.ParameterList(parameters.values())], wide, shard, 1, 400, parameters_too)
    optimizer = Optimizer(gradients, lr=0.1, master_weights=masters, moments=moments, offload=offload)
    for step in range(4):
        gradients.begin(1)
        for name, parameter in parameters.items():
            numbers = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
            for values in gradients._values_of(name):  # no module is called, whose hooks would do so
                values.gather()
                values.wait()
            (parameter.float().square() * (numbers + live.rank + step).sin()).sum().backward()
        gradients.finish()
        optimizer.update(0.1 / (step + 1), gradients.norm(), torch.tensor(step != 2))
        gradients.updated()
    found = {}
    for state, kept in optimizer.states().items():
        for name, kind in kept.items():
            host = torch.empty(parameters[name].shape, dtype=kind)
            optimizer.read_into(state, name, host)
            found[f"{state}/{name}"] = host
    assert all((values >= 0).all() for key, values in found.items() if key.startswith(MOMENTS[1])), "mean squares"
    for name, parameter in parameters.items():
        found[name] = torch.empty(parameter.shape, dtype=dtype)
        optimizer.read_weight(name, found[name])
    assert takes_what_is_given(optimizer, parameters)
    windows = len(optimizer.store._windows) if isinstance(optimizer.store, OffloadedStore) else 0
    return found, optimizer.updates, windows


def takes_what_is_given(optimizer: Optimizer, parameters: Parameters) -> bool:
    """Whether every state, and every weight with its master, is filled and read in the shape of its parameter."""
    good, given = True, {n: torch.arange(p.numel()).view(p.shape) / 3 + 1 for n, p in parameters.items()}
    for name, weight in given.items():
        optimizer.load_weight(name, weight)
        got, updated = (torch.empty(weight.shape, dtype=parameters.dtype) for _ in range(2))
        optimizer.read_weight(name, got)
        optimizer.read_into(MASTER, name, updated)  # a copy where the parameter lies in gaps
        good &= torch.equal(got, weight.to(parameters.dtype)) and torch.equal(updated, got)
    for state, kept in optimizer.states().items():
        for name, kind in kept.items():
            host = torch.empty(given[name].shape, dtype=kind)
            if state != MASTER:
                optimizer.load_from(state, name, given[name])
            optimizer.read_into(state, name, host)
            good &= torch.equal(host, given[name].to(kind))
    return good


def all_alike(mesh: MeshShape, shard: ZeroShard, folder: Path) -> list[str]:
    """What differs from states on the device."""
    wrong = []
    bf16 = torch.bfloat16
    for dtypes in (
        (torch.float64, None, True),
        (bf16, None, True),
        (bf16, bf16, True),
        (bf16, None, False),
        (torch.float32, bf16, True),
    ):
        want, updates, _ = states_after(mesh, shard, dtypes, None)
        assert updates == 3
        for offload in (Offload(None, 1 << 12), Offload(folder, 1 << 13), Offload(folder)):
            for parameters_too in (False, True)[: 1 + (shard == "parameters")]:
                found, count, windows = states_after(mesh, shard, dtypes, offload, parameters_too)
                assert windows > BUFFERS or offload.buffer_bytes > 1 << 13, windows
                same = found.keys() == want.keys() and all(torch.equal(found[key], want[key]) for key in want)
                if not same or count != updates:
                    wrong.append(f"{dtypes}, {offload}, {parameters_too}")
    return wrong


DP, TP = MeshShape(dp=2), MeshShape(tp=4)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(
    ("mesh", "shard"),
    [
        pytest.param(mesh, shard, id=f"{'tp4' if mesh == TP else 'dp2'}-{shard}")
        for mesh, shard in [(TP, "none"), (TP, "parameters"), *((DP, shard) for shard in SHARDS)]
    ],
)
def test_wherever_they_live_they_are_bitwise_the_same(
    pool: Pool, mesh: MeshShape, shard: ZeroShard, tmp_path: Path
) -> None:
    """Parts with gaps, parts of several windows, several parts in a window; a step that is left out."""
    for wrong in pool.run(mesh.world, all_alike, mesh, shard, tmp_path):
        assert not wrong
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
def test_a_window_is_read_after_it_was_written_and_one_that_fails_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"a": torch.float32, "b": torch.bfloat16}
    store = WindowStore([100] * 11, kept, torch.device("cpu"), tmp_path)
    for turn in range(3):
        for number in range(11):
            store.fetch((number + 2) % 11)
            for tensor in store.open(number).values():
                assert (tensor == (turn and turn * 11 + number)).all()
                tensor.fill_((turn + 1) * 11 + number)
            store.changed(number)
            if turn:  # otherwise whoever takes its place has it written
                store.put_back(number)
    monkeypatch.setattr(store._file, "read", mock.Mock(side_effect=OSError(5, "the disk is gone")))
    with pytest.raises(OSError, match="the disk is gone"):
        for number in range(11):
            store.open(number)


def test_in_memory_each_state_of_a_window_is_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is given out in powers of two, as windows are: two or three states together would take four's."""
    taken = list[int]()

    def zeros(size: int, pinned: bool) -> torch.Tensor:
        taken.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr("megacore.training.states.windows._zeros", zeros)
    kept = {"a": torch.float32, "b": torch.float32, "c": torch.bfloat16}
    store = WindowStore([4096, 1024], kept, torch.device("cpu"), None)
    assert taken == [16384, 16384, 8192, 4096, 4096, 4096]
    assert {state: len(tensor) for state, tensor in store.open(1).items()} == dict.fromkeys("abc", 1024)


def test_threads_wait_for_events_on_the_device_of_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread of CUDA begins on GPU 0."""
    current, waited = threading.local(), list[object]()

    class Left:
        def synchronize(self) -> None:
            waited.append(getattr(current, "device", None))

    device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    zeros = partial(torch.zeros, dtype=torch.uint8)
    monkeypatch.setattr("megacore.training.states.windows._zeros", lambda size, pinned: zeros(size))
    store = WindowStore([100] * 2 * BUFFERS, {"a": torch.float32}, device, tmp_path)
    for number in range(2 * BUFFERS):
        store.open(number)
        store.changed(number, Left())
    assert waited == [device] * BUFFERS


# -- memory


def device_store() -> int:
    """Bytes of memory that are this process's own, at their highest since :func:`forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def forget() -> None:
    """Have the highest memory be that of now, without what earlier jobs of this process have left free in its heap."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def highest(folder: Path | None, buffer: int) -> int:
    """Bytes above the parameters and gradients: making an optimizer, and three steps."""
    schema = Schema((Param("table", "vocab embed", std=1.0),), {"layer": 1, "vocab": 1 << 13, "embed": 1 << 9})
    mesh = Mesh.create(MeshShape())
    parameters = Parameters(Layout(schema, mesh.shape, (1,)), mesh, torch.bfloat16)
    gradients = Gradients(parameters, [nn.ParameterList(parameters.values())], torch.float32, "optimizer")
    forget()
    before = device_store()
    offload = Offload(folder, buffer) if folder else None
    optimizer = Optimizer(gradients, lr=0.1, offload=offload)
    for _ in range(3):
        optimizer.update(0.1, torch.tensor(1.0))
    return device_store() - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of memory")
def test_memory_is_bounded_by_the_buffer(pool: Pool, tmp_path: Path) -> None:
    numel, buffer = 1 << 22, 4 << 20
    (held,) = pool.run(1, highest, None, 0)
    (bounded,) = pool.run(1, highest, tmp_path, buffer)
    assert held > 11 * numel  # a master and two moments: 12 bytes each
    assert bounded < 2 * buffer, f"{bounded:,} bytes"


# -- in a run

# Parts of a million elements: a buffer of one MiB is several windows.
RECIPE_CHANGES = {"model": engine.LLAMA | {"hidden_size": 64, "intermediate_size": 192}}
COMMON = ["train.steps=6", "train.precision=bf16", "evaluate.every=3", "checkpoint.every=3", "checkpoint.at_end=false"]


def run_of(out: Path, *overrides: str) -> list[str]:
    return [f"out={out}", *COMMON, *overrides]


def offloaded(folder: Path) -> list[str]:
    return ["memory.offload_optimizer=file", f"memory.offload_folder={folder}", "memory.offload_buffer=1"]


@pytest.mark.in_turn(6, 0)
def test_checkpoints_know_nothing_of_it(pool: Pool, recipe: str, tmp_path: Path) -> None:
    """The same bytes on disk; what is saved with it resumes without, and the other way round."""
    shards = ["zero.shard=parameters"]
    file = [*offloaded(tmp_path / "scratch"), "memory.offload_parameters=true"]
    plain = pool.run(2, train, recipe, run_of(tmp_path / "plain", *shards))
    found = pool.run(2, train, recipe, run_of(tmp_path / "file", *shards, *file))
    half = [f"checkpoint.resume={path_of(tmp_path / 'plain', 3)}"]
    onto = pool.run(2, train, recipe, run_of(tmp_path / "onto", *shards, *file, *half))
    half = [f"checkpoint.resume={path_of(tmp_path / 'file', 3)}"]
    off = pool.run(2, train, recipe, run_of(tmp_path / "off", *shards, *half, "memory.offload_optimizer=host"))
    assert found[0].values("loss") == plain[0].values("loss")
    for results, out in ((found, "file"), (onto, "onto"), (off, "off")):
        for one, other in zip(plain, results, strict=True):
            assert same(one.weights, other.weights)
        engine.assert_same_files(path_of(tmp_path / "plain", 6), path_of(tmp_path / out, 6), 4)
    assert not list((tmp_path / "scratch").iterdir())


def test_the_recipe_arrives(recipe: str, tmp_path: Path) -> None:
    made = trainer(recipe, run_of(tmp_path / "run", *offloaded(tmp_path / "scratch")))
    store = made.train_step.optimizer.store
    assert isinstance(store, OffloadedStore) and store.kept[MASTER] == torch.float32
    assert len(store._windows) > BUFFERS == len(store._store._slots)
    made = trainer(recipe, run_of(tmp_path / "run", "memory.offload_optimizer=host"))
    store = made.train_step.optimizer.store
    assert isinstance(store, OffloadedStore) and len(store._store._slots) == len(store._windows)


def test_an_overflow_leaves_everything_as_it_was(recipe: str, tmp_path: Path) -> None:
    changes = ["train.precision=fp16", f"loss_scale.initial={2.0**24}", *offloaded(tmp_path / "scratch")]
    made = trainer(recipe, run_of(tmp_path / "run", *changes))
    batch = made.upload(made.batches.microbatches(0), 1)
    before = weights(made)
    assert made.train_step(batch, 1e-2).overflow and made.train_step.optimizer.updates == 0
    assert same(weights(made), before)
    made.train_step.scaler.scale.fill_(1024.0)
    assert made.train_step(batch, 1e-2).finite and made.train_step.optimizer.updates == 1
    assert not same(weights(made), before)


# -- what is refused


@pytest.mark.quick
def test_a_folder_that_cannot_be_used_is_refused(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()

    def said(folder: Path) -> list[str]:
        config = load(recipe, run_of(tmp_path / "run", *offloaded(folder)))
        return [problem for problem in surroundings(config) if "offload" in problem]

    assert not said(tmp_path / "new" / "folder")
    assert said(tmp_path / "file" / "in") == [
        f"memory.offload_folder ({tmp_path / 'file' / 'in'}) cannot be made, {tmp_path / 'file'} is not a folder: "
        "choose another memory.offload_folder="
    ]
    config, model = load(recipe, run_of(tmp_path / "run", *offloaded(tmp_path))), configure(engine.LLAMA)
    assert not list(capacity.capacity_problems(config, model, 2, 2))
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    (problem,) = capacity.capacity_problems(config, model, 2, 2)
    assert problem.startswith(f"memory.offload_folder ({tmp_path}) has 0.00 GB free, and the optimizer's states of 2 ")
