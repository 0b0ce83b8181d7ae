"""Writing around the page cache: every byte lands where it belongs, whatever can go that way."""

import errno
import fcntl
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whole import write_tensor

from megacore.store.io import direct
from megacore.store.io.direct import ALIGNMENT, LEAST, DirectFile, WriteWindow, aligned_memory
from megacore.store.tensor_files.tensors import TensorFile, TensorWriter

SIZE = 12 * LEAST + 12_345


@pytest.fixture
def there(tmp_path: Path) -> DirectFile:
    """Another way into a file of ones."""
    (tmp_path / "file").write_bytes(b"\1" * (SIZE + 2 * ALIGNMENT))
    opened = DirectFile.open(tmp_path / "file")
    if opened is None:
        pytest.skip(f"the filesystem of {tmp_path} has no way around its cache")
    return opened


def bits(size: int, seed: int = 0, lead: int = 0) -> np.ndarray:
    """Return random bytes in memory that begins ``lead`` bytes after a multiple of ALIGNMENT."""
    memory = aligned_memory(lead + size)[lead:]
    memory[:] = np.random.default_rng(seed).integers(2, 256, size, np.uint8)
    return memory


@pytest.mark.parametrize("offset", [0, 1, 17, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 8])
def test_what_it_says_it_has_written_is_there_and_nothing_else(tmp_path: Path, there: DirectFile, offset: int) -> None:
    data = bits(SIZE, lead=offset % ALIGNMENT)
    start, stop = there.write(data, offset)
    there.close()
    assert start == -offset % ALIGNMENT and data.size - stop < ALIGNMENT
    expected = np.ones(SIZE + 2 * ALIGNMENT, np.uint8)
    expected[offset + start : offset + stop] = data[start:stop]
    np.testing.assert_array_equal(np.fromfile(tmp_path / "file", np.uint8), expected)


def test_small_pieces_and_those_that_are_aligned_otherwise_are_left_to_the_cache(there: DirectFile) -> None:
    assert there.write(bits(LEAST - 1), 0) == (0, 0)
    assert there.write(bits(LEAST), 0) == (0, LEAST)
    assert there.write(bits(SIZE, lead=8), 0) == there.write(bits(SIZE), 8) == (0, 0)


@settings(max_examples=50)
@given(st.data())
def test_pieces_through_a_window(data: st.DataObject) -> None:
    """Those that adjoin are written together, in order, and all is where it belongs, whatever their sizes."""
    pieces = data.draw(st.lists(st.tuples(st.sampled_from([0, 0, 0, 5, 9000]), st.integers(1, LEAST)), max_size=8))
    window, at = WriteWindow(data.draw(st.sampled_from([1, ALIGNMENT, LEAST]))), data.draw(st.integers(0, 9000))
    written, starts = bytearray(9 * (LEAST + 9000)), list[int]()

    def write(memory: np.ndarray, offset: int) -> None:
        assert (memory.ctypes.data - offset) % ALIGNMENT == 0
        written[offset : offset + memory.size] = memory.tobytes()
        starts.append(offset)

    expected = bytes(len(written))
    for i, (gap, size) in enumerate(pieces):
        at += gap
        piece = bits(size, i)
        window.take(write, at, size)[:] = piece
        expected = expected[:at] + piece.tobytes() + expected[at + size :]
        at += size
    window.flush()
    window.flush()
    assert written == expected and starts == sorted(set(starts))


@settings(max_examples=25)
@given(st.data())
def test_a_tensor_in_pieces_from_several_threads(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6 * LEAST))
    cuts = sorted(data.draw(st.sets(st.integers(0, size), max_size=6)) | {0, size})
    path = tmp_path_factory.mktemp("pieces") / "f.safetensors"
    expected = bits(2 * size).view("<u2")
    with (
        TensorWriter.create(path, [("small", "U8", (3,)), ("a", "BF16", (size,))]) as writer,
        ThreadPoolExecutor(3) as pool,
    ):
        pieces = list(itertools.pairwise(cuts))
        list(pool.map(lambda piece: write_tensor(writer, "a", expected[slice(*piece)], piece[0]), pieces))
        write_tensor(writer, "small", np.array([7, 8, 9], "u1"))
    file = TensorFile.open(path)
    np.testing.assert_array_equal(file.array("a"), expected)
    np.testing.assert_array_equal(file.array("small"), [7, 8, 9])


def write_and_compare(path: Path) -> None:
    expected, window = bits(SIZE), WriteWindow(LEAST)
    with TensorWriter.create(path, [("a", "U8", (SIZE,))]) as writer:
        for start in range(0, SIZE, LEAST):
            piece = expected[start : start + LEAST]
            window.take(writer.put, writer.offset("a", start), piece.size)[:] = piece
        window.flush()
    np.testing.assert_array_equal(TensorFile.open(path).array("a"), expected)


def test_systems_and_filesystems_without_it_write_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.object(direct, "_open", side_effect=OSError(errno.EINVAL, "no")):
        assert DirectFile.open(tmp_path) is None
        write_and_compare(tmp_path / "refused")
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    assert DirectFile.open(tmp_path) is None
    write_and_compare(tmp_path / "unknown")


def test_a_filesystem_that_asks_for_more_gets_the_rest_by_its_cache(
    tmp_path: Path, there: DirectFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses the second write, and is not asked again."""
    asked = []
    plain = os.pwrite

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            asked.append(offset)
            if len(asked) == 2:
                raise OSError(errno.EINVAL, "unaligned")
        return plain(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    write_and_compare(tmp_path / "f")
    assert len(asked) == 2
    asked.clear()
    assert [there.write(bits(LEAST), 0) for _ in range(3)] == [(0, LEAST), (0, 0), (0, 0)]


def test_short_writes_are_gone_on_with(tmp_path: Path, there: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.pwrite
    for cut in (ALIGNMENT, 1000):  # the second leaves the disk at an unaligned place

        def pwrite(file: int, data: memoryview, offset: int, cut: int = cut) -> int:
            return plain(file, data[:-cut] if len(data) > 2 * cut else data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        write_and_compare(tmp_path / str(cut))


def test_a_full_disk_is_an_error(tmp_path: Path, there: DirectFile) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "pwrite", side_effect=full), pytest.raises(OSError, match="No space"):
        there.write(bits(SIZE), 0)


def test_after_closing_nothing_is_written(there: DirectFile) -> None:
    """Not to another file that has its number by now, either."""
    there.close()
    with pytest.raises(ValueError, match="closed file"):
        there.write(bits(SIZE), 0)
