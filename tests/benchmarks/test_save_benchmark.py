"""The benchmark of saving measures every way of saving, on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import save

ROOT = Path(__file__).parents[2]


@pytest.mark.in_turn(6, 1)
def test_every_way_is_measured(tmp_path: Path) -> None:
    """In a process of its own, for it makes a process group."""
    results = tmp_path / "results.json"
    command = [sys.executable, "benchmarks/save.py", "--shape", "tiny", "--rounds", "2", "--threads", "1"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--json", str(results)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    saves = json.loads(results.read_text())["saves"]
    assert list(saves) == list(save.WAYS)
    assert all(len(found) == 2 for found in saves.values())
    assert all(0 < one["pause"] <= one["done"] for found in saves.values() for one in found)
    waited_for = [name for name in saves if "background" not in name and "async" not in name]
    assert all(not one["during"] for name in waited_for for one in saves[name])
    assert list(tmp_path.iterdir()) == [results]
