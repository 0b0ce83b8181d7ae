"""The executor: whatever the blocks, threads and dtypes, files hold what whole copies give, and know what they hold."""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import meshes, sizes_for, splits
from sentences import params as tables

from megacore.parallel.weights.fingerprint import Logical, add_up, fingerprint
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.schema import Param, Schema
from megacore.parallel.weights.transfer import Stored, native, plan, strided, whole_name
from megacore.store.io.direct import LEAST, DirectFile
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files import stream
from megacore.store.tensor_files.dtypes import FLOATS, as_dtype
from megacore.store.tensor_files.tensors import DTYPES, TensorFile

pytestmark = pytest.mark.usefixtures("not_durable")

Arrays = dict[tuple[object, str], np.ndarray]


def arrays_of(stored: Sequence[Stored], dtype: str, seed: int) -> Arrays:
    rng, bits = np.random.default_rng(seed), DTYPES[dtype]
    return {(s.where, s.name): rng.integers(0, 1 << 8 * bits.itemsize, s.shape, bits) for s in stored}


def files_of(
    schema: Schema, sources: Sequence[Stored], targets: Sequence[Stored], arrays: Arrays, held: str, wanted: str
) -> tuple[stream.File, ...]:
    """One file for each rank of the targets."""

    def read(stored: Stored, view: Piece | None = None) -> tuple[str, np.ndarray]:
        return held, arrays[stored.where, stored.name]

    by_rank: dict[object, list[stream.Tensor]] = {}
    for target, copies in plan(schema, sources, targets):
        by_rank.setdefault(target.where, []).append(stream.Tensor(target, wanted, copies))
    return tuple(stream.File(f"weights/{rank}.safetensors", tuple(of), read) for rank, of in by_rank.items())


def logical_fingerprints(schema: Schema, stored: Sequence[Stored], arrays: Arrays) -> dict[Logical, int]:
    """Straight from whole pieces of the layout of one rank."""
    found = {}
    for s in stored:
        for label, piece in s.pieces.items():
            bits = strided(arrays[s.where, s.name], piece)
            starts = {axis: s.box[axis][0] for axis in piece.axes}
            found[whole_name(schema, s), label] = fingerprint(bits, piece.axes, starts)
    return found


@pytest.mark.in_turn(2, 0)
@settings(max_examples=25)
@given(st.data(), st.sampled_from(["BF16", "F32", "F64"]), st.integers(1, 3), st.sampled_from([8, 24, 200, 1 << 21]))
def test_any_tables_between_any_layouts(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: str, jobs: int, block_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    shapes = [data.draw(meshes(8)) for _ in range(2)]
    sizes = data.draw(sizes_for(shapes))
    schema = Schema(data.draw(tables(sizes["layer"])), sizes)
    alone = list(native(Layout(schema, MeshShape(), (sizes["layer"],)), [0]))
    one, two = (
        list(native(Layout(schema, mesh, data.draw(splits(sizes["layer"], mesh))), range(mesh.world)))
        for mesh in shapes
    )
    whole = arrays_of(alone, dtype, data.draw(st.integers(0, 99)))
    wanted = logical_fingerprints(schema, alone, whole)
    before, (stream.BLOCK_BYTES, stream._RUN) = (stream.BLOCK_BYTES, stream._RUN), (block_bytes, 2)
    try:
        arrays, sources = whole, alone
        for step, targets in enumerate((one, two, alone)):
            seen: list[int] = []
            files = files_of(schema, sources, targets, arrays, dtype, dtype)
            (folder / str(step)).mkdir()
            found = stream.write(folder / str(step), files, schema, jobs, seen.append)
            opened = {file.path: TensorFile.open(folder / str(step) / file.path) for file in files}
            boxes = []
            sources, old, arrays = targets, arrays, {}
            for file in files:
                assert opened[file.path].size == file.size == (folder / str(step) / file.path).stat().st_size
                for tensor in file.tensors:
                    s = tensor.stored
                    bits = opened[file.path].array(s.name)
                    arrays[s.where, s.name] = bits
                    assert np.array_equal(bits, stream.assemble(s, tensor.copies, file.read, dtype))
                    boxes.append((s, found[file.path][s.name]))
            assert add_up(schema, boxes) == wanted
            assert sum(seen) <= sum(bits.nbytes for bits in arrays.values())
            assert old is not arrays
        assert all(np.array_equal(arrays[key], whole[key]) for key in whole)
    finally:
        stream.BLOCK_BYTES, stream._RUN = before


ONE = Schema((Param("w", "mlp embed"), Param("norm", "embed")), {"mlp": 64, "embed": 32, "layer": 1})


def whole_layout(schema: Schema = ONE, **mesh: int) -> list[Stored]:
    shape = MeshShape(**mesh)
    return list(native(Layout(schema, shape, (1,)), range(shape.world)))


@pytest.mark.quick
def test_a_block_in_another_order() -> None:
    here = Schema((Param("w", "embed mlp"), Param("norm", "embed")), ONE.sizes)
    arrays = arrays_of(whole_layout(here), "F32", 0)
    (file,) = files_of(ONE, whole_layout(here), whole_layout(), arrays, "F32", "F32")
    tensor, at = file.tensors[0], 0
    for block in stream.blocks(tensor.copies, 1024):
        made = np.empty(block.numel, "<u4")
        stream.fill(block, tensor, file.read, ONE, made)
        assert made.nbytes <= 4096
        assert np.array_equal(made, arrays[0, "w"].T.reshape(-1)[block.start : block.start + block.numel])
        at += block.numel
    assert at == 64 * 32


def test_the_ends_of_blocks_do_not_go_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a way around it: a write through it waits for all direct ones of its file."""
    (tmp_path / "file").touch()
    if not (there := DirectFile.open(tmp_path / "file")):
        pytest.skip(f"the filesystem of {tmp_path} has no way around its cache")
    there.close()
    params = Param("a", "mlp embed"), Param("norm", "embed"), Param("b", "mlp embed")
    schema = Schema(params, {**ONE.sizes, "mlp": 5 * LEAST // 32})
    arrays = arrays_of(whole_layout(schema), "F32", 0)
    files = files_of(schema, whole_layout(schema), whole_layout(schema), arrays, "F32", "F32")
    monkeypatch.setattr(stream, "BLOCK_BYTES", 2 * LEAST)
    plain, written = os.pwrite, list[int]()

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        written.append(len(data))
        return plain(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    stream.write(tmp_path, files, schema, jobs=1)
    small = [size for size in written if size < LEAST]
    assert len(written) - len(small) > 10 and len(small) == 3  # the header, and the two ends of all


def test_a_used_buffer_does_not_show_in_padding(tmp_path: Path) -> None:
    """Columns beyond the vocabulary lie between those within."""
    schema = Schema((Param("w", "embed vocab"),), {"embed": 16, "vocab": 5, "layer": 1})
    alone = whole_layout(schema)
    arrays = arrays_of(alone, "F32", 0)
    files = files_of(schema, alone, whole_layout(schema, tp=2), arrays, "F32", "F32")
    tensor = files[1].tensors[0]
    (block,) = stream.blocks(tensor.copies, 1000)
    bits = np.full(block.numel, 2**32 - 1, np.uint32)
    stream.fill(block, tensor, files[1].read, schema, bits)
    assert not block.is_full and block.numel == 16 * 3 - 1
    made = np.append(bits, 0).reshape(16, 3)
    assert np.array_equal(made[:, :2], arrays[0, "w"][:, 3:]) and not made[:, 2].any()


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_source_that_fails_stops_all(jobs: int, tmp_path: Path) -> None:
    arrays = arrays_of(whole_layout(), "F32", 0)
    files = files_of(ONE, whole_layout(), whole_layout(tp=8), arrays, "F32", "F32")
    read = mock.Mock(side_effect=StoreError("the source is gone"))
    files = tuple(stream.File(file.path, file.tensors, read if i == 1 else file.read) for i, file in enumerate(files))
    with pytest.raises(StoreError, match="the source is gone"):
        stream.write(tmp_path, files, ONE, jobs)
    assert len(list((tmp_path / "weights").iterdir())) < 8


def test_every_file_is_durable_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is closed once, by whoever writes its last block, with many threads at it."""
    closed, lock, close = list[str](), threading.Lock(), stream.TensorWriter.close

    def count(writer: stream.TensorWriter) -> None:
        close(writer)
        with lock:
            closed.append(writer.path.name)

    monkeypatch.setattr(stream.TensorWriter, "close", count)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 64)
    monkeypatch.setattr(stream, "_RUN", 1)
    arrays = arrays_of(whole_layout(), "F32", 0)
    files = files_of(ONE, whole_layout(), whole_layout(tp=4), arrays, "F32", "F32")
    found = stream.write(tmp_path, files, ONE, jobs=8)
    assert sorted(closed) == [f"{rank}.safetensors" for rank in range(4)]
    assert sorted(found) == sorted(file.path for file in files)


def test_bits_of_numbers_in_another_dtype() -> None:
    def bits(numbers: Sequence[float], dtype: str) -> np.ndarray:
        tensor = torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, FLOATS[dtype]))
        found: np.ndarray = tensor.view(getattr(torch, f"int{8 * tensor.itemsize}")).numpy().view(DTYPES[dtype])
        return found

    exact = [0.0, -0.0, 1.0, -1.5, 2.0**-14, float("inf"), float("-inf")]
    for held in FLOATS:
        for wanted in FLOATS:
            made = as_dtype(bits(exact, held), held, wanted)
            assert made.dtype == DTYPES[wanted] and np.array_equal(made, bits(exact, wanted))
    one = np.array(0x3F818000, np.uint32)  # a tie: to even
    assert as_dtype(one, "F32", "BF16").item() == 0x3F82 and as_dtype(one, "F32", "BF16").shape == ()
    assert as_dtype(np.array(0x3F808000, np.uint32), "F32", "BF16").item() == 0x3F80
    assert as_dtype(np.zeros((0, 3), np.uint16), "BF16", "F32").shape == (0, 3)
    for strides in views(np.arange(24, dtype=np.uint16).reshape(4, 6)):
        assert np.array_equal(as_dtype(strides, "BF16", "F32"), strides.astype(np.uint32) << 16)


def views(bits: np.ndarray) -> Iterator[np.ndarray]:
    yield from (bits, bits.T, bits[:, ::2], bits[1:2, 3:4])
    bits.flags.writeable = False
    yield bits
