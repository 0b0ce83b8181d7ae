"""Tensor files in object stores: written from memory in one go, and read in the ranges that are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import blocks
from megacore.store.io.errors import StoreError
from megacore.store.io.objects import ObjectPath
from megacore.store.tensor_files.stream import BLOCK_BYTES, METADATA, File, Fingerprints, add_to, fill
from megacore.store.tensor_files.tensor_cache import TensorCache
from megacore.store.tensor_files.tensors import DTYPES, Bits, TensorFile, lay_out

_JOBS = 4
"""Files that a rank writes beside each other."""
_AHEAD = 16
"""Headers that are asked for beside each other."""
_NEAR = 1 << 20
"""Bytes between two that are wanted which cost less than to ask twice."""


def upload(folder: ObjectPath, files: Sequence[File], schema: Schema) -> dict[str, Fingerprints]:
    """Write the files as objects, as :func:`~megacore.store.tensor_files.stream.write` does on a disk -> the
    fingerprints of what each holds, padding left out. Their sources are read again where a store fails midway. Raises
    StoreError: a file cannot be written."""

    def put(file: File) -> Fingerprints:
        found = Fingerprints()

        def pieces() -> Iterator[np.ndarray | bytes]:
            found.update({each.stored.name: dict.fromkeys(each.stored.labels, 0) for each in file.tensors})
            return _pieces(file, schema, found)

        (folder / file.path).stream(pieces, file.size)
        return found

    with ThreadPoolExecutor(_JOBS) as pool:
        return dict(zip((file.path for file in files), pool.map(put, files), strict=True))


def _pieces(file: File, schema: Schema, found: Fingerprints) -> Iterator[np.ndarray | bytes]:
    """Yield the bytes of a file in order, and add up the fingerprints of its tensors."""
    header, entries, _ = lay_out(file.headers, METADATA)
    tensors = {each.stored.name: each for each in file.tensors}
    yield header
    for name, entry in sorted(entries.items(), key=lambda each: (each[1].start, each[1].stop)):
        tensor, width, at = tensors[name], DTYPES[entry.dtype].itemsize, entry.start
        for block in blocks(tensor.copies, BLOCK_BYTES // width):
            begin = entry.start + block.start * width
            yield bytes(begin - at)  # padding is in no block
            bits = np.empty(block.numel, DTYPES[entry.dtype])
            add_to(found[name], fill(block, tensor, file.read, schema, bits))
            yield bits.view(np.uint8)
            at = begin + bits.nbytes
        yield bytes(entry.stop - at)


@dataclass(frozen=True)
class ObjectTensors(TensorFile):
    """A safetensors file in an object store: what is read of it comes over the network. ``kept``: whole tensors of this
    file and others of its folder that were read last."""

    kept: TensorCache = field(default_factory=TensorCache)

    def hold(self) -> None:
        """Do nothing: an object cannot be held."""

    def array(self, name: str, view: Piece | None = None) -> Bits:
        entry = self.entry(name)
        return self.kept.get((self.path, name), lambda: self._filled(name, [(0, entry.stop - entry.start)]))

    def part(self, name: str, views: Iterable[Piece]) -> Bits:
        return self._filled(name, _spans(views, DTYPES[self.entry(name).dtype].itemsize))

    def _filled(self, name: str, spans: Sequence[tuple[int, int]]) -> Bits:
        entry, path = self.entry(name), self.path
        assert isinstance(path, ObjectPath)
        made = np.empty(entry.shape, DTYPES[entry.dtype])  # what nobody touches takes no memory
        memory = made.reshape(-1).view(np.uint8).data
        for start, stop in spans:
            path.fill(memory[start:stop], entry.start + start)
        return made


def _spans(views: Iterable[Piece], width: int) -> list[tuple[int, int]]:
    """Return the bytes [start, stop) of a tensor that views of it lie in, those that are near each other in one."""
    spans = list[tuple[int, int]]()
    for view in sorted(views, key=lambda view: view.offset):
        last = view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.strides, strict=True))
        start, stop = view.offset * width, (last + 1) * width
        if spans and start <= spans[-1][1] + _NEAR:
            start, stop = spans[-1][0], max(spans.pop()[1], stop)
        spans.append((start, stop))
    return spans


class Files(dict[str, TensorFile]):
    """The tensor files of a checkpoint, opened when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._kept = folder, TensorCache()

    def __missing__(self, name: str) -> TensorFile:
        self[name] = self._opened(name)
        return self[name]

    def open_ahead(self, names: Iterable[str]) -> None:
        """Open files of a store beside each other, for each waits for an answer or two; what fails will be told in its
        turn."""

        def ahead(name: str) -> None:
            with suppress(StoreError):
                self[name] = self._opened(name)

        if isinstance(self.folder, ObjectPath):
            with ThreadPoolExecutor(_AHEAD) as pool:
                list(pool.map(ahead, names))

    def _opened(self, name: str) -> TensorFile:
        path = self.folder / name
        if isinstance(path, ObjectPath):
            return replace(ObjectTensors.open(path), kept=self._kept)
        return TensorFile.open(path, self.folder)
