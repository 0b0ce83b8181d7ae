"""Faults on live runs: which these are is drawn by MEGACORE_ROTATION, and ``-m grid`` is the campaign."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from campaign import LAYOUTS, Fault, drawn, play

ROTATION = int(os.environ.get("MEGACORE_ROTATION", "0"))
KINDS = ("kill", "kill", "kill", "raise", "raise in the update", "raise in a save", "abort", "stop")
SLICE = list(LAYOUTS)[ROTATION % len(LAYOUTS)]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


def told(faults: list[Fault], said: list[str], found: list[str]) -> str:
    return "\n".join([*found, "", *map(str, faults), "", *said[-60:]])


def test_faults_leave_no_trace(cache: Path, tmp_path: Path) -> None:
    faults = drawn(SLICE, ROTATION, 2)
    run, found = play(SLICE, faults, tmp_path, cache)
    assert not found, told(faults, run.said, found)


def test_a_run_whose_ranks_all_die_goes_on_from_its_newest_checkpoint(cache: Path, tmp_path: Path) -> None:
    faults = [Fault("kill", 1, 20), Fault("kill", 0, 20, "recover")]
    run, found = play("dp2", faults, tmp_path, cache)
    assert not found, told(faults, run.said, found)
    assert not any("go on after step 0" in line for line in run.said)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_faults_leave_no_trace(layout: str, seed: int, cache: Path, tmp_path: Path) -> None:
    faults = drawn(layout, seed + 4 * ROTATION, 4, KINDS)
    run, found = play(layout, faults, tmp_path, cache)
    assert not found, told(faults, run.said, found)
