import gc
import os
import signal
import sys
import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Cases that take turns do so by the day, one for a session and all its workers: after some days all have run.
os.environ.setdefault("MEGACORE_DAY", str(datetime.now(UTC).date().toordinal()))
# The library uses no threads in processes that are forked from one that has used them, and says so unless told.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Kernels for GPUs run here as they are written, by Triton's interpreter, which is chosen when triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from pool import Pool
from turns import ROTATION, TURN

MOST_WORKERS = 8
torch.set_num_threads(1)
# gloo's loop threads poll their sockets while another thread holds the lock of the connection. Ranks share cores here,
# and a thread that polls may have taken the core of the one that it waits for: jobs take two to three times as long.
# Work of this class takes the core of nobody who is on it. Child processes inherit it.
if sys.platform == "linux":
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# What a script starts in the background ignores Ctrl-C, and so would all that it starts; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Time depends on who else uses the machine.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_report_header() -> str:
    return f"MEGACORE_DAY={TURN - ROTATION} MEGACORE_ROTATION={ROTATION}"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of a session: one for each core, but not very many, for each has ranks of its own.

    None for single files, which would wait for the imports and the ranks of several workers; inside a worker, whose
    core is taken; and with -s, for workers show nothing while they run.
    """
    files = all(str(argument).partition("::")[0].endswith(".py") for argument in config.args)
    if files or config.getoption("capture") == "no" or "PYTEST_XDIST_WORKER" in os.environ:
        return 0
    return min(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1, MOST_WORKERS)


_LEFT_OUT = pytest.StashKey[int]()
"""The number of cases that are left out."""


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Mark the cases whose turn it is not as of the grid, if no test is named by itself. Where the grid is left out,
    they are not even made: there are more of them than of all others."""
    yield
    calls, config = metafunc._calls, metafunc.config
    for number, call in enumerate(calls):
        marks = [mark for mark in (*call.marks, *metafunc.definition.iter_markers()) if mark.name == "in_turn"]
        if not _has_its_turn(config, marks, metafunc.definition.nodeid, number):
            call.marks.append(pytest.mark.grid.mark)
    if not _takes_the_grid(config):
        # Of none pytest would make a test without parameters.
        taken = [call for call in calls if all(mark.name != "grid" for mark in call.marks)] or calls[:1]
        config.stash[_LEFT_OUT] = config.stash.get(_LEFT_OUT, 0) + len(calls) - len(taken)
        calls[:] = taken


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the grids, unless the expression of -m speaks of them."""
    for item in items:
        marks = [*item.iter_markers("in_turn")]
        if not hasattr(item, "callspec") and not _has_its_turn(config, marks, item.nodeid, 0):
            item.add_marker(pytest.mark.grid)
    if not _takes_the_grid(config):
        left_out = [item for item in items if item.get_closest_marker("grid")]
        items[:] = [item for item in items if not item.get_closest_marker("grid")]
        config.hook.pytest_deselected(items=left_out)
        config.stash[_LEFT_OUT] = config.stash.get(_LEFT_OUT, 0) + len(left_out)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    count = config.stash.get(_LEFT_OUT, 0)
    return [f"{count:,} cases are of the grid or of other days; FILE::TEST runs all cases of a test"] if count else []


def _takes_the_grid(config: pytest.Config) -> bool:
    return "grid" in str(config.getoption("markexpr"))


def _has_its_turn(config: pytest.Config, marks: Sequence[pytest.Mark], test: str, number: int) -> bool:
    """One in n of a test's cases has, on any day: its number says which. Of what has several marks, such as a case that
    has one of its own, it is one in their product. All have where a test is named by itself."""
    if any("::" in str(argument) for argument in config.args):
        return True
    turn = TURN
    for mark in marks:
        every, place = (*mark.args, zlib.crc32(test.encode()) + number)[:2]
        if (turn - place) % every:
            return False
        turn //= every
    return True


def pytest_collection_finish() -> None:
    # What is imported stays: no garbage collection need look at it again.
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The session's ranks: ``pool.run(world, function, *arguments)``."""
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    """The recipe of a tiny run, but for the sections that a module has as RECIPE_CHANGES."""
    from engine import RECIPE, write_recipe

    return write_recipe(tmp_path_factory.mktemp("recipe"), RECIPE | getattr(request.module, "RECIPE_CHANGES", {}))


@pytest.fixture(scope="module")
def not_durable() -> Iterator[None]:
    """Files reach the disk when it suits the system: for tests that write many and cut no power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Path:
    """The Hugging Face folder of a real model, for the modules that say how to make one."""
    folder = os.environ.get("MEGACORE_REAL_MODEL")
    if not folder:
        pytest.skip(f"MEGACORE_REAL_MODEL names no folder with a real model: {request.module.__doc__}")
    return Path(folder)
