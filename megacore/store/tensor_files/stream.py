"""The one executor of transfers to files: block by block, whatever the size of the model.

Workers take runs of blocks of the target files in turn. A block is copied from the mapped sources into a small window,
its fingerprints are taken there, and it is written to its place; nothing larger is ever held.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megacore.parallel.weights.fingerprint import MODULUS, fingerprint
from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Copy, Stored, TargetChunk, blocks, strided
from megacore.store.io.direct import WriteWindow
from megacore.store.tensor_files.dtypes import as_dtype
from megacore.store.tensor_files.tensors import DTYPES, TensorWriter, lay_out, os_errors


class Read(Protocol):
    """A function of a source tensor: (safetensors dtype, its bits as unsigned integers in the stored shape). Where only
    a view of it is asked for, the rest may be anything."""

    def __call__(self, stored: Stored, view: Piece | None = None, /) -> tuple[str, np.ndarray]: ...


Fingerprints = dict[str, dict[str, int]]
"""{tensor: {label: fingerprint}} of a file."""

METADATA = {"format": "pt"}
"""The metadata that readers of safetensors files expect of PyTorch's."""

BLOCK_BYTES = 2 << 20
_RUN = 32
"""Blocks that a worker takes at once."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a target file, and what fills it."""

    stored: Stored
    dtype: str
    copies: Sequence[Copy]


@dataclass(frozen=True)
class File:
    """A target file: its path within the target folder, its tensors, and what reads their sources."""

    path: str
    tensors: tuple[Tensor, ...]
    read: Read

    @property
    def headers(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of each tensor."""
        return [(tensor.stored.name, tensor.dtype, tensor.stored.shape) for tensor in self.tensors]

    @property
    def size(self) -> int:
        """Bytes it will have."""
        return lay_out(self.headers, METADATA)[2]


def write(
    folder: Path,
    files: Iterable[File],
    schema: Schema,
    jobs: int = 2,
    progress: Callable[[int], object] = lambda written: None,
) -> dict[str, Fingerprints]:
    """Fill the files and make them durable -> the fingerprints of what each holds, padding left out. ``progress``: is
    told the bytes of each block when it is filled. Raises StoreError: a file cannot be written."""
    tasks, lock = _tasks(folder, files), threading.Lock()
    failed = threading.Event()
    results: dict[str, Fingerprints] = {}
    unfinished: dict[str, TensorWriter] = {}

    def work() -> None:
        window = WriteWindow(BLOCK_BYTES)
        while not failed.is_set():
            with lock:
                task = next(tasks, None)
            if task is None:
                return
            opened, run = task
            unfinished[opened.file.path] = writer = opened.writer
            try:
                for tensor, block in run:
                    if failed.is_set():
                        return
                    name, dtype = tensor.stored.name, DTYPES[tensor.dtype]
                    memory = window.take(writer.put, writer.offset(name, block.start), block.numel * dtype.itemsize)
                    found = fill(block, tensor, opened.file.read, schema, memory.view(dtype))
                    with lock:
                        add_to(opened.fingerprints[name], found)
                    progress(memory.size)
                window.flush()
                with lock:
                    opened.runs -= 1
                    whole = not opened.runs  # of several that end at once, one sees it
                if whole:
                    unfinished.pop(opened.file.path).close()
                    results[opened.file.path] = opened.fingerprints
            except BaseException:
                failed.set()
                raise

    try:
        with ThreadPoolExecutor(jobs) as pool:
            workers = [pool.submit(work) for _ in range(jobs)]
            try:
                for worker in workers:
                    worker.result()
            finally:  # after an interrupt too: nobody shall wait for what is thrown away
                failed.set()
    finally:
        for writer in unfinished.values():
            writer.abandon()
    return results


@dataclass
class _Open:
    """A file that is being written, and how many of its runs are not done yet."""

    file: File
    writer: TensorWriter
    fingerprints: Fingerprints
    runs: int = 1


_Task = tuple[_Open, Sequence[tuple[Tensor, TargetChunk]]]


def _tasks(folder: Path, files: Iterable[File]) -> Iterator[_Task]:
    """Yield runs of blocks; a file is opened when its first one is reached, so that few are open at once."""
    for file in files:
        empty = {t.stored.name: dict.fromkeys(t.stored.labels, 0) for t in file.tensors}
        if (parent := (folder / file.path).parent) != folder:  # which may be gone: then nobody wants it any more
            with os_errors(parent):
                parent.mkdir(exist_ok=True)
        opened = _Open(file, TensorWriter.create(folder / file.path, file.headers, METADATA), empty)
        chunks = (
            (tensor, block)
            for tensor in file.tensors
            for block in blocks(tensor.copies, BLOCK_BYTES // DTYPES[tensor.dtype].itemsize)
        )
        while run := list(itertools.islice(chunks, _RUN)):
            opened.runs += 1
            yield opened, run
        yield opened, ()  # the file's own count: it is closed by whoever ends last


def fill(block: TargetChunk, tensor: Tensor, read: Read, schema: Schema, made: np.ndarray) -> dict[str, int]:
    """Fill ``made``, the elements of a block -> the fingerprints of its pieces."""
    if not block.is_full:
        made.fill(0)
    for copy in block.copies:
        held, bits = read(copy.source, copy.source_view)
        strided(made, copy.target_view)[...] = as_dtype(strided(bits, copy.source_view), held, tensor.dtype)
    fingerprints: dict[str, int] = {}
    for copy in block.copies:
        axes = schema[copy.target.param].sentence.piece_axes(copy.label)
        add_to(fingerprints, {copy.label: of_copy(copy, copy.target_view, made, axes)})
    return fingerprints


def assemble(
    stored: Stored, copies: Sequence[Copy], read: Read, dtype: str, found: dict[str, int] | None = None
) -> np.ndarray:
    """Assemble one whole target tensor, as unsigned integers in its stored shape; padding is zero. ``found``: is given
    {label: fingerprint} of what the target was made of, in the source's dtype and order of axes, so that they compare
    with those of when the source was written. Where the dtype stays, they are taken from what was made: from the bits
    that are used."""
    made = np.zeros(stored.shape, DTYPES[dtype])
    for block in blocks(copies, BLOCK_BYTES // made.itemsize):
        part = made.reshape(-1)[block.start : block.start + block.numel]
        for copy in block.copies:
            held, bits = read(copy.source, copy.source_view)
            strided(part, copy.target_view)[...] = as_dtype(strided(bits, copy.source_view), held, dtype)
            if found is not None:
                view, seen = (copy.target_view, part) if held == dtype else (copy.source_view, bits)
                add_to(found, {copy.label: of_copy(copy, view, seen, copy.source.pieces[copy.label].axes)})
    return made


def add_to(found: dict[str, int], more: Mapping[str, int]) -> None:
    """Add the fingerprints of a further part of the same pieces."""
    for label, value in more.items():
        found[label] = (found.get(label, 0) + value) % MODULUS


def of_copy(copy: Copy, view: Piece, bits: np.ndarray, axes: Sequence[str]) -> int:
    """Return the fingerprint of what a copy moves, read from one of its two views; it takes the axes in this order."""
    array = strided(bits, view)
    # Axes that live in a name on one side have one index here.
    order = [view.axes.index(axis) for axis in axes if axis in view.axes]
    array = array.transpose(order)[tuple(slice(None) if axis in view.axes else None for axis in axes)]
    return fingerprint(array, axes, {axis: copy.box[axis][0] for axis in axes})
