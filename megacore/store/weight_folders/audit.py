"""Fingerprints taken anew from the bytes of a folder, and what in a checkpoint is not as it was written.

Every tensor is read through its map, block by block: memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megacore.parallel.weights.fingerprint import Logical, add_up, spell
from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Stored, blocks, plan, strided, whole_name
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.stream import BLOCK_BYTES, Read, add_to, of_copy
from megacore.store.tensor_files.tensors import DTYPES
from megacore.store.weight_folders.folder import SafetensorsFolder, WeightFolder

OnBytes = Callable[[int], object]
"""Is told the bytes of each tensor when it has been read."""


class DamageError(StoreError):
    """A checkpoint is not as it was written: another one is to be taken in its place."""

    def __init__(self, path: Path, said: str) -> None:
        super().__init__(said)
        self.path = path

    @classmethod
    def of(cls, path: Path, damage: Sequence[object]) -> DamageError:
        """Return the error of these damages."""
        return cls(path, "\n".join([f"{path} is damaged:", *map(str, damage)]))


def silent(done: int) -> None:
    """Report progress to nobody."""


def tensor_fingerprints(
    stored: Sequence[Stored], read: Read, schema: Schema, jobs: int, progress: OnBytes = silent
) -> Iterator[dict[str, int]]:
    """Yield {label: fingerprint} of each tensor as its bytes are now, padding left out."""

    def take(tensor: Stored) -> dict[str, int]:
        dtype, bits = read(tensor)
        found = dict.fromkeys(tensor.labels, 0)
        for _, copies in plan(schema, [tensor], [tensor]):
            for block in blocks(copies, BLOCK_BYTES // DTYPES[dtype].itemsize):
                for copy in block.copies:
                    axes = schema[tensor.param].sentence.piece_axes(copy.label)
                    add_to(found, {copy.label: of_copy(copy, copy.source_view, bits, axes)})
        progress(bits.nbytes // (1 if tensor.of is None else tensor.of.sizes["layer"]))
        return found

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(take, stored)


def fingerprints(folder: WeightFolder, state: str, jobs: int, progress: OnBytes = silent) -> dict[Logical, int]:
    """Return the fingerprints of the logical pieces of a state, from the bytes of all its tensors. Raises StoreError:
    replicas differ."""
    stored = list(folder.stored(state))
    found = tensor_fingerprints(stored, folder.read(state), folder.schema, jobs, progress)
    try:
        return add_up(folder.schema, zip(stored, found, strict=True))
    except ValueError as error:
        raise StoreError(str(error)) from error


@dataclass(frozen=True)
class Damage:
    """A piece of a tensor in a file that is not what it must be, and how that shows."""

    file: str
    tensor: str
    label: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {spell((self.tensor, self.label))} {self.reason}"


def check(
    folder: SafetensorsFolder, jobs: int, progress: OnBytes = silent, tensors: Mapping[str, Set[str]] | None = None
) -> list[Damage]:
    """Compare every byte of the tensors with the index, replicas with each other, and padding with zero. Tensors
    whose fingerprints the folder does not know are not read. ``tensors``: {state: whole names} of those to compare, if
    not all."""
    schema = folder.layout.schema
    damage = list[Damage]()
    for state in folder.states if tensors is None else tensors:
        read, stored = folder.read(state), [each for each in folder.stored(state) if folder.written(state, each)]
        if tensors is not None:
            stored = [each for each in stored if whole_name(schema, each) in tensors[state]]
        first: dict[tuple[Logical, tuple[tuple[int, int], ...]], tuple[str, int]] = {}
        for tensor, found in zip(stored, tensor_fingerprints(stored, read, schema, jobs, progress), strict=True):
            (file, _), written = folder.location(state, tensor), folder.written(state, tensor)
            for label, value in found.items():
                if value != written[label]:
                    reason = f"has the fingerprint {value:016x}, and had {written[label]:016x} when it was written"
                    damage.append(Damage(file, tensor.name, label, reason))
                    continue
                box = tuple(tensor.box[axis] for axis in schema[tensor.param].sentence.piece_axes(label))
                other, held = first.setdefault(((whole_name(schema, tensor), label), box), (file, value))
                if held != value:
                    damage.append(Damage(file, tensor.name, label, f"differs from its replica in {other}"))
            for label, piece in padding(schema, tensor):
                if strided(read(tensor)[1], piece).any():
                    damage.append(Damage(file, tensor.name, label, "has padding that is not zero"))
    return damage


def padding(schema: Schema, stored: Stored) -> Iterator[tuple[str, Piece]]:
    """Yield the label and view of what a tensor holds beyond the end of an axis."""
    for label, piece in stored.pieces.items():
        for axis, size in zip(piece.axes, piece.shape, strict=True):
            start, stop = stored.box[axis]
            if stop > schema.sizes[axis]:
                whole = {other: (0, extent) for other, extent in zip(piece.axes, piece.shape, strict=True)}
                yield label, piece.box({**whole, axis: (max(0, schema.sizes[axis] - start), size)})
