"""A session of tests takes the cores that there are, and its processes let each other work."""

import gc
import math
import os
import sys
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
from conftest import MOST_WORKERS, pytest_xdist_auto_num_workers
from pool import Pool


@pytest.mark.parametrize(
    ("arguments", "capture", "cores", "workers"),
    [
        (["tests"], "fd", 2, 2),
        (["tests/parity", "tests/store/test_kill.py"], "fd", 4, 4),
        (["tests"], "fd", 64, MOST_WORKERS),
        (["tests"], "no", 2, 0),
        (["tests/store/test_kill.py", "tests/house/test_floors.py::test_imports_go_down"], "fd", 2, 0),
    ],
    ids=["all", "folders", "many cores", "output is shown", "files"],
)
def test_a_worker_for_each_core(
    arguments: list[str], capture: str, cores: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {*range(cores)}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    config: Any = SimpleNamespace(args=arguments, getoption={"capture": capture}.get)
    assert pytest_xdist_auto_num_workers(config) == workers
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert pytest_xdist_auto_num_workers(config) == 0


@pytest.mark.parametrize("every", [(), (4,), (4, 6)])
def test_each_case_has_its_turn_once(every: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many days as the product of its marks, whatever its number."""
    config: Any = SimpleNamespace(args=["tests"])
    marks, days = [pytest.mark.in_turn(n).mark for n in every], range(739_947, 739_947 + math.prod(every))
    for number in range(9):
        had = 0
        for day in days:
            monkeypatch.setattr(conftest, "TURN", day)
            had += conftest._has_its_turn(config, marks, "a::test", number)
        assert had == 1
    assert conftest._has_its_turn(SimpleNamespace(args=["a::test"]), marks, "a::test", 0)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this class")
def test_ranks_take_no_core_from_each_other(pool: Pool) -> None:
    assert pool.run(2, os.sched_getscheduler, 0) == [os.SCHED_BATCH] * 2


def imports_much() -> None:
    import matplotlib.pyplot  # noqa: F401


def looked_at() -> int:
    """The objects that a garbage collection looks at."""
    return len(gc.get_objects())


def test_a_rank_looks_once_for_cycles_in_what_it_has_imported(pool: Pool) -> None:
    """Twice would be once for every job: a tenth of a second in each rank, which is more than most jobs take."""
    pool.run(1, imports_much)
    assert pool.run(1, looked_at)[0] < 10_000


def is_imported(module: str) -> bool:
    return module in sys.modules


def test_ranks_are_forked_from_what_has_imported_torchs_compiler() -> None:
    fresh = Pool()
    assert fresh.run(1, is_imported, "torch._dynamo") == [True]
    fresh.close()
