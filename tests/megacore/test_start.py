"""Real ranks under the launcher: where they listen and import from, and what becomes of one that stands still."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import write_recipe
from pool import Pool
from traps import set_traps

from megacore import exits
from megacore.outcome import RankOutcome
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.layers.linear import ColumnParallelLinear
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.layout import MeshShape
from megacore.rank import LOST, outcome_of
from megacore.recipe import load
from megacore.training import main
from megacore.training.start import in_8_bits


def test_what_waits_in_8_bits_is_said(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    (said,) = in_8_bits(load(recipe, ["memory.compress_activations=true"]))
    assert "losses stay what they are" in said and not [*in_8_bits(load(recipe))]


LOOPBACK = ("0100007F", "00000000000000000000000001000000")


@pytest.mark.in_turn(12, 10)
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are found as Linux lists them")
def test_a_run_is_closed_to_others_and_says_where_its_ranks_stand(tmp_path: Path) -> None:
    """As launch/pretrain.sh starts it, in a folder from a stranger."""
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    (tmp_path / "downloaded").mkdir()
    mark = set_traps(tmp_path / "downloaded")
    settings = [f"out={out}", "mesh.tp=2", "train.steps=100000", "evaluate.every=0", "train.timeout=0.1"]
    settings += ["recovery.max_restarts=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "megacore", "train", recipe, *settings],
        cwd=tmp_path / "downloaded",
        env=os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_text().count("\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        ranks = sorted(rank for child in children(process.pid) for rank in descendants(child))
        assert len(ranks) == 2
        assert {address for each in descendants(process.pid) for address in listening(each)} <= {*LOOPBACK}
        assert {*listening(process.pid)} <= {*LOOPBACK}
        assert any(listening(rank) for rank in ranks), "gloo listens; it was not found"
        os.kill(ranks[1], signal.SIGSTOP)
        process.send_signal(signal.SIGUSR2)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == exits.RETRY
    assert "rank 0 (tp=0) (process" in errors and "trainer.py" in errors
    assert f"rank 1 (tp=1) (process {ranks[1]}) stands here:\n  it does not answer" in errors
    assert re.search(r"^lost contact rank 0 at step \d+ .* ends with status 75", errors, re.M)
    assert errors.rstrip().endswith("start again, with --resume auto")
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert not mark.exists(), mark.read_text()


def children(process: int) -> list[int]:
    return [int(pid) for task in Path(f"/proc/{process}/task").glob("*/children") for pid in task.read_text().split()]


def descendants(process: int) -> Iterator[int]:
    for child in children(process):
        yield child
        yield from descendants(child)


def listening(process: int) -> Iterator[str]:
    """The addresses, in the kernel's spelling, at which a process listens."""
    links = (os.readlink(file) for file in Path(f"/proc/{process}/fd").iterdir())
    held = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in held:
                yield local.partition(":")[0]


def waits_in_vain(backward: bool) -> RankOutcome | None:
    """What is left of a collective in a group whose other rank does not come."""
    mesh = Mesh.create(MeshShape(dp=2, tp=2), timeout=timedelta(seconds=0.5))
    layer = ColumnParallelLinear(4, 4, mesh=mesh).double()
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    if mesh.rank == 3:
        time.sleep(1.5)
        return None
    try:
        if backward:
            y.sum().backward()
        else:
            all_reduce_(torch.ones(3), mesh.tp)
    except RuntimeError as error:
        error.add_note("at step 7")
        return outcome_of(error)
    return None


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("backward", [False, True])
def test_a_wait_in_vain_is_known_as_such(pool: Pool, backward: bool) -> None:
    first, other, waited, _ = pool.run(4, waits_in_vain, backward)
    assert first is None and other is None  # these two have each other
    assert (waited.kind, waited.status) == ("lost_contact", LOST)
    assert waited.detail.endswith(" at step 7") and "500ms" in waited.detail


def test_an_error_of_one_s_own_is_none_of_others() -> None:
    try:
        raise RuntimeError("the connection to the mailbox timed out")
    except RuntimeError as error:
        assert outcome_of(error).kind == "raised"


def test_the_world_waits_as_long_as_the_recipe_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, seen = write_recipe(tmp_path), dict[str, Any]()

    class Stop(Exception):
        pass

    def init(backend: str, **given: Any) -> None:
        seen.update(given, backend=backend)
        raise Stop

    monkeypatch.setattr(dist, "init_process_group", init)
    for name, number in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(number))
    arguments = [recipe, f"out={tmp_path / 'run'}", "mesh.tp=2", "train.timeout=3.5"]
    for method, variables in {"file:///x/store": {"MEGACORE_STORE": "/x/store"}, "env://": {}}.items():
        monkeypatch.delenv("MEGACORE_STORE", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Stop):
            main.main(arguments)
        assert seen["init_method"] == method and (seen["rank"], seen["world_size"]) == (1, 2)
        assert seen["timeout"] == timedelta(minutes=3.5) and seen["backend"] == "gloo"
