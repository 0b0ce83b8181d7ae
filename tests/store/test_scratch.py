"""Files without a name: what is written is read, their room is theirs, and nothing of them is ever left."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megacore.store.io.direct import ALIGNMENT, aligned_memory
from megacore.store.io.scratch import Scratch, mapped
from megacore.store.io.strict_json import StoreError

pytestmark = pytest.mark.quick
SIZE = 8 * ALIGNMENT


def noise(size: int) -> np.ndarray:
    memory = aligned_memory(size)
    memory[:] = np.random.default_rng(0).integers(0, 256, size)
    return memory


def test_it_is_zero_and_then_what_was_written(tmp_path: Path) -> None:
    file, found = Scratch(tmp_path / "made", SIZE, "a test"), noise(SIZE)
    file.read(found, 0)
    assert not found.any()
    written = noise(2 * ALIGNMENT)
    file.write(written, 3 * ALIGNMENT)
    file.read(found, 0)
    assert np.array_equal(found[3 * ALIGNMENT : 5 * ALIGNMENT], written)
    assert not found[: 3 * ALIGNMENT].any() and not found[5 * ALIGNMENT :].any()
    with pytest.raises(EOFError, match="beyond"):
        file.read(found, ALIGNMENT)


def test_what_a_disk_refuses_goes_through_the_page_cache(tmp_path: Path) -> None:
    file, written = Scratch(tmp_path, SIZE, "a test"), noise(1000)
    direct = file.direct
    file.write(written[1:], 77)
    found = np.zeros(999, np.uint8)
    file.read(found, 77)
    assert np.array_equal(found, written[1:])
    assert not file.direct
    if not direct:
        pytest.skip("there is no way around the page cache here: nothing was refused")


def test_nothing_is_seen_of_it_and_its_room_is_taken(tmp_path: Path) -> None:
    file, memory = Scratch(tmp_path, 1 << 22, "a test"), mapped(tmp_path, 1 << 22, "a test")
    memory[:] = 7
    assert not list(tmp_path.iterdir())
    assert os.fstat(file._file).st_blocks * 512 >= 1 << 22


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from megacore.store.io.direct import aligned_memory
from megacore.store.io.scratch import Scratch
file = Scratch(Path({str(tmp_path)!r}), 1 << 20, "a test")
file.write(aligned_memory(1 << 20), 0)
print("written", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == -9 and done.stdout == "written\n", done.stderr
    assert not list(tmp_path.iterdir())


def test_no_room_and_no_folder_are_said(tmp_path: Path) -> None:
    size = shutil.disk_usage(tmp_path).total * 2
    with pytest.raises(StoreError, match=rf"{tmp_path}: no room for a test: .* GB are needed and .* GB are free"):
        Scratch(tmp_path, size, "a test")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot make a file for a test"):
        mapped(tmp_path / "file", SIZE, "a test")
