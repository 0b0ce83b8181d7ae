"""Places that are spread over several files: equal shares, and a checkpoint as any other for all who read it."""

import itertools
import json
import math
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import GPT2, LLAMA, OF_ADAMW, Section, layout_of, run_checkpoint, snapshot, spread

from megacore.models.registry import configure
from megacore.models.stages import layout_of as staged
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.transfer import Stored, native, strided
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.shares import MOST_FILES, SHARE_BYTES, FileContents, States, divide, share_out
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders import audit
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.index import on_disk, read_index
from megacore.tools import convert, inspect, reshard

pytestmark = pytest.mark.usefixtures("not_durable")

WIDTHS = {"weights": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}
adamw_checkpoint = partial(run_checkpoint, states=OF_ADAMW)


def states(layout: Layout, rank: int = 0, widths: Mapping[str, int] = WIDTHS) -> States:
    held = list(native(on_disk(layout), [rank]))
    return {state: [(stored, width) for stored in held] for state, width in widths.items()}


def size(part: FileContents) -> int:
    return sum(math.prod(stored.shape) * WIDTHS[part.state] for stored in part.tensors)


# -- who writes what


@pytest.mark.quick
def test_small_states_are_shared_out_whole() -> None:
    held = states(layout_of(LLAMA))
    for replicas in range(1, 7):
        shares = share_out(layout_of(LLAMA), held, replicas)
        assert len(shares) == replicas
        assert sorted(part.state for share in shares for part in share) == sorted(OF_ADAMW)
        assert all(part.number is None and len(part.tensors) == len(held["weights"]) for s in shares for part in s)
    names = [[part.state for part in share] for share in share_out(layout_of(LLAMA), held, 2)]
    assert names == [["master", "exp_avg_sq"], ["exp_avg", "weights"]]
    assert [bool(share) for share in share_out(layout_of(LLAMA), held, 8)] == [True, False] * 4  # on several machines


@pytest.mark.parametrize(
    ("preset", "mesh", "writers"),
    [
        ("llama-3.1-405b", MeshShape(pp=16, dp=8, tp=8), 8),
        ("llama-3.1-405b", MeshShape(pp=16, dp=128, tp=8), MOST_FILES // 128 - 4),
        ("llama-3.1-8b", MeshShape(dp=1024), 1024),
        ("llama-3.1-8b", MeshShape(dp=8, cp=2, tp=2), 16),
    ],
    ids=["405B on 1,024", "405B on 16,384", "8B on 1,024", "8B on 32"],
)
def test_shares_of_a_cluster_are_equal_and_of_a_sensible_size(preset: str, mesh: MeshShape, writers: int) -> None:
    disk = on_disk(staged(configure({"preset": preset}), mesh, 1))
    replicas, files = mesh.dp * mesh.cp, 0
    for rank in {0, disk.mesh.world // 2, disk.mesh.world - 1}:
        held = states(disk, rank)
        shares = share_out(disk, held, replicas)
        loads = [sum(map(size, share)) for share in shares if share]
        assert len(shares) == replicas and len(loads) == writers
        mean = sum(size(FileContents(state, None, [s for s, _ in each])) for state, each in held.items()) / writers
        assert sum(loads) == round(mean * writers) and mean >= SHARE_BYTES
        assert max(loads) <= 1.05 * mean and min(loads) >= 0.95 * mean
        files = max(files, sum(map(len, shares)))
        at = [replica for replica, share in enumerate(shares) if share]
        gaps = {second - first for first, second in itertools.pairwise(at)}
        assert gaps <= {replicas // writers, -(-replicas // writers)}
    assert files * disk.mesh.world <= MOST_FILES


@pytest.mark.parametrize(
    "section", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, GPT2], ids=["llama", "tied", "gpt2"]
)
@pytest.mark.parametrize("mesh", [{}, {"tp": 4}, {"pp": 2, "tp": 2}])
def test_every_element_is_in_one_share(section: Section, mesh: dict[str, int]) -> None:
    layout = layout_of(section, (2, 3) if "pp" in mesh else (5,), **mesh)
    for rank in range(layout.mesh.world):
        held = states(layout, rank, {"weights": 2, "exp_avg": 4})
        for shares in (1, 2, 3, 7, 40, 500):
            seen = {(state, s.name): np.zeros(s.shape, int) for state, each in held.items() for s, _ in each}
            whole = {s.name: s for s, _ in held["weights"]}
            for share in divide(held, shares):
                for state, tensors in share.items():
                    assert len({stored.name for stored in tensors}) == len(tensors)
                    for stored in tensors:
                        mark(seen[state, stored.name], whole[stored.name], stored)
            assert all((each == 1).all() for each in seen.values())


def mark(array: np.ndarray, whole: Stored, part: Stored) -> None:
    assert math.prod(part.shape)
    for label, piece in part.pieces.items():
        origin = {a: (b[0] - whole.box[a][0], b[1] - whole.box[a][0]) for a, b in part.box.items()}
        view = strided(array, whole.pieces[label].box(origin))
        assert view.shape == piece.shape
        view[...] += 1


# -- what is on the disk


@pytest.fixture(scope="module", params=[(LLAMA, 1), ({**LLAMA, "tie_word_embeddings": True}, 2), (GPT2, 2)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of one file for each state and place, and the same of more."""
    section, pp = request.param
    folder = tmp_path_factory.mktemp("pair")
    adamw_checkpoint(folder / "plain", section, layout_of(section, (5,) if pp == 1 else (2, 3), pp=pp, tp=2))
    spread(folder / "plain", folder / "spread", replicas=40)
    return folder / "plain", folder / "spread"


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    adamw_checkpoint(folder / "plain", LLAMA, layout_of(LLAMA, tp=2))
    return spread(folder / "plain", folder / "spread").path


@pytest.mark.in_turn(3)
def test_it_is_the_same_checkpoint(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain, spread = map(Checkpoint.open, pair)
    assert (plain.index.version, spread.index.version) == (1, 2) and len(spread.index.files) > len(plain.index.files)
    assert any(record.ranges for record in spread.index.files.values())
    for state in OF_ADAMW:
        assert spread.fingerprints(state) == plain.fingerprints(state)
    assert not audit.check(spread, jobs=1)
    again = read_index(pair[1] / "index.json")
    assert again.files == spread.index.files and again.to_json() == spread.index.to_json()
    for number, folder in enumerate(pair):
        for name, arguments in (("a", ["--tp", "2"]), ("b", ["--tp", "1", "--pp", "5"])):
            assert reshard.main([str(folder), str(tmp_path / f"{name}{number}"), *arguments]) == 0
        assert convert.main([str(folder), str(tmp_path / f"hf{number}"), "--to", "hf"]) == 0
    for name in ("a", "b", "hf"):
        assert snapshot(tmp_path / f"{name}0") == snapshot(tmp_path / f"{name}1")


@pytest.mark.in_turn(4)
@pytest.mark.parametrize(("head", "axis"), [(2, "embed"), (16, "head")])
def test_slices_are_put_together_by_hand(head: int, axis: str, tmp_path: Path) -> None:
    """All pieces of a fused tensor are cut at the same places; a plain one is chunked. None of our code reads."""
    adamw_checkpoint(tmp_path / "plain", {**LLAMA, "head_dim": head}, layout_of({**LLAMA, "head_dim": head}, tp=2))
    spread(tmp_path / "plain", tmp_path / "spread", replicas=400)
    files = json.loads((tmp_path / "spread/index.json").read_text())["files"]
    wanted = load_file(tmp_path / "plain/master/pp0-ep0-tp1.safetensors")
    for name, along in (("layers.2.attn.qkv.weight", axis), ("layers.2.mlp.down.weight", "embed")):
        found = []
        for path, record in files.items():
            if path.startswith("master/pp0-ep0-tp1-part") and name in record["fingerprints"]:
                said, start, stop = record["ranges"][name]
                assert said == along
                found.append((start, stop, load_file(tmp_path / "spread" / path)[name]))
        found.sort(key=lambda each: each[0])
        assert len(found) > 1
        if along == "head":  # 4 heads of q, 1 of k and 1 of v for each of two ranks: (heads, head, embed) each
            pieces = [np.split(array, [4 * (stop - start), 5 * (stop - start)]) for start, stop, array in found]
            whole = [np.concatenate([p[i].reshape(n, -1, 6) for p in pieces], 1) for i, n in enumerate((4, 1, 1))]
            made = np.concatenate([piece.reshape(-1, 6) for piece in whole])
        else:
            made = np.concatenate([array for _, _, array in found], 1 if "qkv" in name else 0)
        assert np.array_equal(made.view(np.uint32), wanted[name].view(np.uint32))


# -- damage


def flip(path: Path, name: str) -> None:
    entry = TensorFile.open(path).entries[name]
    raw = bytearray(path.read_bytes())
    raw[(entry.start + entry.stop) // 2] ^= 4
    path.write_bytes(raw)


@pytest.fixture
def damaged(untied: Path, tmp_path: Path) -> Path:
    return shutil.copytree(untied, tmp_path / "damaged")


def a_slice(folder: Path) -> tuple[str, str]:
    """(file, tensor) of a slice of master on tp=1, the same on all calls."""
    files = json.loads((folder / "index.json").read_text())["files"]
    found = ((path, name) for path, of in files.items() for name in of.get("ranges", ()) if "master/" in path)
    return min((path, name) for path, name in found if "tp1" in path)


def test_damage_of_a_part_is_found_and_named(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, name = a_slice(damaged)
    flip(damaged / path, name)
    (found,) = audit.check(Checkpoint.open(damaged), jobs=1)
    assert (found.file, found.tensor) == (path, name)
    assert inspect.main([str(damaged), "--check"]) == 1 and f"{path}: {name}" in capsys.readouterr().out
    assert reshard.main([str(damaged), str(damaged.with_name("new"))]) == 1
    assert name in capsys.readouterr().err and not damaged.with_name("new").exists()


def test_a_part_that_is_missing_or_cut_is_named(damaged: Path) -> None:
    path, _ = a_slice(damaged)
    (damaged / path).write_bytes((damaged / path).read_bytes()[:-1])
    with pytest.raises(StoreError, match=f"{path}.*truncated"):
        Checkpoint.open(damaged)
    (damaged / path).unlink()
    with pytest.raises(StoreError, match=f"{path}: No such file"):
        Checkpoint.open(damaged)
