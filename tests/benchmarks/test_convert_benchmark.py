"""The benchmark of converting measures what it says, on a checkpoint of a few MB."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import convert
from megacore.store.tensor_files.tensors import TensorFile

CONVERT, RESHARD = (f"{a} {b}" for a, b in zip((convert.CONVERT, convert.RESHARD), convert.DENSE_MESHES, strict=True))


@pytest.mark.in_turn(6, 4)
def test_it_copies_converts_reshards_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    arguments = ["--size", "0.01", "--rounds", "1", "--no-peers", "--no-double", "--states", "cold", "chained"]
    convert.main([*arguments, "--folder", str(tmp_path), "--json", str(results)])
    rows = json.loads(results.read_text())["rows"]
    ours = [CONVERT, RESHARD, convert.EXPORT]
    cold, chained = ([f"{name}, {state}" for name in ours] for state in (convert.COLD, convert.CHAINED))
    copies = [[f"{convert.COPY} {name}" for name in names] for names in (cold, chained)]
    # Beside each its own copy, which would warm what a chain reads: there it comes afterwards.
    assert list(rows) == [*(name for pair in zip(copies[0], cold, strict=True) for name in pair), *chained, *copies[1]]
    assert all(len(runs) == 1 for runs in rows.values())
    assert all(0 < run["seconds"] < 60 for runs in rows.values() for run in runs)
    assert all(run["peak"] > 5e6 for name in rows if not name.startswith(convert.COPY) for run in rows[name])
    assert "met: the export is the source, bit for bit" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [results]  # gigabytes are not left behind


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    for name in ("source", "export"):
        convert.make_checkpoint(tmp_path / name, 4_000_000)
    assert convert.differing(tmp_path / "source", tmp_path / "export") == []
    path = tmp_path / "export" / "model-00002-of-00005.safetensors"
    name, entry = next(iter(TensorFile.open(path).entries.items()))
    np.memmap(path, np.uint8, "r+", entry.start, (1,))[0] ^= 1
    assert convert.differing(tmp_path / "source", tmp_path / "export") == [name]
