"""Faults on live runs: which these are is drawn by MEGACORE_ROTATION, and ``-m grid`` is the campaign at full size."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from campaign import COMMON, LAYOUTS, drawn, kinds_of, play
from engine import RECIPE, write_recipe

from megacore.training.check import check

ROTATION = int(os.environ.get("MEGACORE_ROTATION", "0"))
OWN = ("slow", "poisoned", "disk")
"""The layouts that are for kinds of their own."""
SLICE = [name for name in LAYOUTS if not name.startswith(OWN)]
LONG = ("stop in a recovery", "stop right after a recovery", "second launch")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.mark.quick
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_can_be_run(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    recipe = write_recipe(tmp_path, {**RECIPE, **layout.recipe})
    check(recipe, [f"out={tmp_path / 'run'}", *COMMON, *layout.overrides], layout.world, layout.world)


def test_faults_leave_no_trace(cache: Path, tmp_path: Path) -> None:
    layout = SLICE[ROTATION % len(SLICE)]
    faults = drawn(layout, ROTATION, 3, [kind for kind in kinds_of(layout) if kind not in LONG])
    played = play(layout, faults, tmp_path / "run", cache, ROTATION)
    assert not played.wrong, played.said


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_faults_leave_no_trace(
    layout: str, cache: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if layout == "disk" and os.geteuid() != 0:
        pytest.skip("only root may mount a filesystem")
    faults = drawn(layout, ROTATION, 12)
    played = play(layout, faults, tmp_path / "run", cache, ROTATION)
    record_property("campaign", played.record)
    assert not played.wrong, played.said
