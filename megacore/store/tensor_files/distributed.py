"""Checkpoints of ``torch.distributed.checkpoint`` (DCP): tensors in parts, each of which some rank wrote. No torch.

``.metadata`` is a pickle that says which parts a tensor has and where they lie; the others, ``__0_0.distcp`` and so on,
have parts as ``torch.save`` writes them, one after the other. Both are read as
:mod:`~megacore.store.tensor_files.pickles` has it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.transfer import strided
from megacore.store.io.errors import listed
from megacore.store.io.files import is_inside, open_file
from megacore.store.io.strict_json import StoreError, read_file, short
from megacore.store.tensor_files.pickles import Call, Name, read_pickle
from megacore.store.tensor_files.tensor_cache import TensorCache
from megacore.store.tensor_files.tensors import DTYPES, MAX_DIMENSIONS, Bits, Entry, TensorFile, os_errors
from megacore.store.tensor_files.torch_files import KINDS, SavedTensor, numbers_of, read_saved

METADATA = ".metadata"
_UNFLATTENED = "nd_reformulated_orig_global_shape"  # of what Megatron-Core before 0.14 saved in flat blocks
_OF = "torch.distributed.checkpoint.metadata."
_FILES, _PLANS = "torch.distributed.checkpoint.filesystem.", "torch.distributed.checkpoint.planner."
_KNOWN = {
    *(f"{_OF}{name}" for name in ("Metadata", "StorageMeta", "MetadataIndex", "_MEM_FORMAT_ENCODING")),
    *(f"{_OF}{name}" for name in ("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    f"{_OF}BytesStorageMetadata",
    f"{_FILES}_StorageInfo",
    # Megatron-Core leaves what each rank wrote there, too.
    *(f"{_PLANS}{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
    *KINDS,
    *(f"torch.{name}" for name in ("uint16", "uint32", "uint64", "complex64", "complex128", "bfloat16")),
    *(f"torch.float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")),
}


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor: where it begins in it, its shape, and the bytes [start, start + length) of a file."""

    origin: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class PartedTensor:
    """A tensor in parts. ``dtype``: as in safetensors files, or torch's name of one that these do not have; ``blocks``:
    how many blocks lie along each dimension, where each lies by itself, flat: the parts are in [blocks, elements of
    one]."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DistributedFiles:
    """The files of a checkpoint.

    Args:
        values: {name: what holds it} of what is no tensor.
        sizes: {file: bytes}.
        updates: The numbers of updates that its optimizers have seen, where the tensors do not say so one by one.
        unread: Why moments that are there are not among the tensors.
        flat: Whether a tensor may have lost its shape.
        key: The one of a dict that a tensor may be by, where other things are saved beside it.
    """

    path: Path
    tensors: Mapping[str, PartedTensor]
    values: Mapping[str, StoredPart]
    sizes: Mapping[str, int]
    kind: str = "a checkpoint of torch.distributed.checkpoint"
    updates: frozenset[Any] | None = None
    unread: str = ""
    flat: bool = False
    key: str | None = None

    @classmethod
    def open(cls, path: Path) -> DistributedFiles:
        """Read what the metadata say, and compare it with the sizes of the files. Raises StoreError: the metadata are
        damaged or of no such checkpoint, or files are missing or too short."""
        where = path / METADATA
        tree = read_pickle(read_file(where, path), where, _KNOWN)
        try:
            said, lie = _state(tree, f"{_OF}Metadata", "state_dict_metadata", "storage_data")
            flat = tree.state.get("mcore_data") or {}
            where_parts = _storage(lie)
            tensors, values = dict[str, PartedTensor](), dict[str, StoredPart]()
            for name, value in said.items():
                if value.name == f"{_OF}BytesStorageMetadata":
                    # What no rank wrote has no place.
                    if (at := where_parts.get((name, None))) is not None:
                        values[name] = StoredPart((), (), *at)
                else:
                    tensors[name] = _parted(name, value, where_parts, flat.get(name, {}).get(_UNFLATTENED))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise StoreError(
                f"{where} does not describe a checkpoint of torch.distributed.checkpoint as this release knows them, "
                f"or is damaged: {short(str(error))}"
            ) from error
        parts = [*values.values(), *(part for tensor in tensors.values() for part in tensor.parts)]
        return cls(path, tensors, values, _sizes(path, parts))

    def files_of(self, names: Iterable[str]) -> Mapping[str, Sequence[str]]:
        """Return {file: those of some tensors of which it has parts}."""
        found: dict[str, dict[str, None]] = {}
        for name in names:
            for part in self.tensors[name].parts:
                found.setdefault(part.file, {})[name] = None
        return {file: list(of) for file, of in sorted(found.items())}

    def tensor(self, name: str, index: tuple[int, ...] = ()) -> Bits:
        """Return the bits of a tensor, [shape], or of what it has at an index of its first dimensions. Raises
        StoreError: what lies in the files is not what the metadata say."""
        tensor, first = self.tensors[name], len(index)
        blocks = tensor.blocks or ()
        elements = [math.prod(tensor.shape) // math.prod(blocks)] if blocks else []
        made = np.empty((*(blocks or tensor.shape), *elements)[first:], DTYPES[tensor.dtype])
        for part in tensor.parts:
            inside = [at - start for at, start in zip(index, part.origin, strict=False)]
            if all(0 <= at < size for at, size in zip(inside, part.shape, strict=False)):
                box = tuple(slice(at, at + size) for at, size in zip(part.origin, part.shape, strict=True))
                made[box[first:]] = self._part(name, part, tensor.dtype)[tuple(inside)]
        if blocks:
            shape, of = tensor.shape[first:], blocks[first:]
            each = [size // count for size, count in zip(shape, of, strict=True)]
            order = [dim for pair in zip(range(len(of)), range(len(of), 2 * len(of)), strict=True) for dim in pair]
            made = np.ascontiguousarray(made.reshape(*of, *each).transpose(order)).reshape(shape)
        return made

    def number(self, name: str) -> Any:
        """Return what a name holds that is no tensor, or a tensor of one number. Raises StoreError: it is damaged, or
        more than plain values."""
        parts = self.tensors[name].parts if name in self.tensors else (self.values[name],)
        if len(parts) != 1:
            raise StoreError(f"{self.path}: {short(name)} has {len(parts)} parts, and is no number")
        with self._saved(name, parts[0]) as (file, where, saved):
            return saved.number(file, where) if isinstance(saved, SavedTensor) else saved

    def numbers(self, name: str, keys: Collection[str]) -> list[Any]:
        """Return what stands by some keys in what a name holds that is no tensor. Raises StoreError: it is damaged."""
        with self._saved(name, self.values[name], any_names=True) as (file, where, tree):
            return [*numbers_of(tree, keys, file, where)]

    @contextmanager
    def _saved(self, name: str, part: StoredPart, any_names: bool = False) -> Iterator[tuple[BinaryIO, str, Any]]:
        """Open the file of a part -> it, what is read of it in words, and what is saved there."""
        path, where = self.path / part.file, f"{self.path / part.file}: {short(name)}"
        with os_errors(path), open_file(path, self.path) as file:
            yield file, where, saved_at(file, where, part, self.key, any_names)

    def _part(self, name: str, part: StoredPart, dtype: str) -> Bits:
        with self._saved(name, part) as (file, where, saved):
            if not isinstance(saved, SavedTensor) or (saved.dtype, saved.shape) != (dtype, part.shape):
                found = f"{saved.dtype}{list(saved.shape)}" if isinstance(saved, SavedTensor) else short(saved)
                raise StoreError(f"{where}: is {found}, and {METADATA} says {dtype}{list(part.shape)}: it is damaged")
            return saved.read(file, where)


def saved_at(file: BinaryIO, where: str, part: StoredPart, key: str | None, any_names: bool = False) -> Any:
    """Return what is saved in a part of a file; of a dict with other things beside it what is by a key, if there is one
    to look for. Raises StoreError: it is damaged."""
    saved = read_saved(file, where, part.start, part.length, any_names or key is not None)
    return saved.get(key) if key is not None and isinstance(saved, dict) else saved


def _state(value: Any, name: str, *fields: str) -> list[Any]:
    """Return fields of what is to be a record of a class."""
    if not isinstance(value, Call) or value.name != name:
        raise ValueError(f"{short(value)} is no {name.rpartition('.')[2]}")
    return [value.state[field] for field in fields]


def _counts(value: Any) -> tuple[int, ...]:
    """Return the numbers of what is to be a torch.Size."""
    if not isinstance(value, Call) or value.name != "torch.Size":
        raise ValueError(f"{short(value)} are no sizes")
    (numbers,) = value.arguments
    if not isinstance(numbers, tuple) or not all(map(_is_count, numbers)) or len(numbers) > MAX_DIMENSIONS:
        raise ValueError(f"{short(numbers)} are no sizes")
    return numbers


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


def _storage(said: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
    """Return {(name, where a part begins): (file, first byte, bytes)}."""
    found: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for key, value in said.items():
        (name,) = _state(key, f"{_OF}MetadataIndex", "fqn")
        begins = key.state.get("offset")
        file, start, length = _state(value, f"{_FILES}_StorageInfo", "relative_path", "offset", "length")
        if value.state.get("transform_descriptors"):
            raise ValueError(f"{short(name)} was transformed by {short(value.state['transform_descriptors'])}")
        if not is_inside(file):
            raise ValueError(f"{short(file)} is no file of the folder")
        if not _is_count(start) or not _is_count(length):
            raise ValueError(f"{short(name)} lies at {short(start)} with {short(length)} bytes")
        found[name, None if begins is None else _counts(begins)] = (file, start, length)
    return found


def _parted(
    name: str,
    value: Any,
    where: Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]],
    unflattened: tuple[int, ...] | None,
) -> PartedTensor:
    properties, size, chunks = _state(value, f"{_OF}TensorStorageMetadata", "properties", "size", "chunks")
    (kind, *_) = properties.state
    if not isinstance(kind, Name):
        raise ValueError(f"{short(name)} has dtype {short(kind)}")
    shape, dtype, parts = _counts(size), KINDS.get(kind.name, kind.name), list[StoredPart]()
    for chunk in chunks:
        begins, sizes = map(_counts, _state(chunk, f"{_OF}ChunkStorageMetadata", "offsets", "sizes"))
        at = where.get((name, begins)) or (where.get((name, None)) if len(chunks) == 1 else None)
        if at is None:
            raise ValueError(f"the part of {short(name)} at {list(begins)} lies in no file")
        width = DTYPES[dtype].itemsize if dtype in DTYPES else 1
        if len(begins) != len(shape) or len(sizes) != len(shape) or math.prod(sizes) * width > at[2]:
            raise ValueError(f"the part of {short(name)} at {list(begins)} of {list(sizes)} has {at[2]} bytes")
        parts.append(StoredPart(begins, sizes, *at))
    whole = [part for part in parts if 0 not in part.shape]  # a rank may have none of a small tensor
    if 0 not in shape and not _tile(whole, shape, 0):
        raise ValueError(f"the parts of {short(name)} do not make up {list(shape)}, or overlap")
    if unflattened is None:
        return PartedTensor(dtype, shape, tuple(whole))
    *blocks, elements = shape
    fits = all(n and size % n == 0 for n, size in zip(blocks, unflattened, strict=True))
    if not fits or math.prod(unflattened) != math.prod(shape):
        raise ValueError(f"{short(name)} of {short(unflattened)} lies in {blocks} blocks of {elements} elements")
    return PartedTensor(dtype, unflattened, tuple(whole), tuple(blocks))


def _tile(parts: Sequence[StoredPart], shape: Sequence[int], dim: int) -> bool:
    """Return whether parts, alike in the dimensions before one, fill it and those after it without overlap or hole: as
    the squares of a grid do, whose lines may differ from one row to another."""
    if dim == len(shape):
        return len(parts) == 1
    ordered = sorted(parts, key=lambda part: (part.origin[dim], part.shape[dim]))
    at = 0
    for (begin, size), of in itertools.groupby(ordered, key=lambda part: (part.origin[dim], part.shape[dim])):
        if begin != at or not _tile(list(of), shape, dim + 1):
            return False
        at += size
    return at == shape[dim]


def _sizes(path: Path, parts: Iterable[StoredPart]) -> Mapping[str, int]:
    """Return {file: its bytes}. Raises StoreError: files are missing, or end before their parts."""
    ends: dict[str, int] = {}
    for part in parts:
        ends[part.file] = max(ends.get(part.file, 0), part.start + part.length)
    sizes, problems = dict[str, int](), list[str]()
    for name, end in sorted(ends.items()):
        try:
            with open_file(path / name, path) as file:
                sizes[name] = file.seek(0, 2)
            if sizes[name] < end:
                problems.append(f"{short(name)} has {sizes[name]} bytes, and its last part ends at {end}")
        except OSError as error:
            problems.append(f"{short(name)}: {error.strerror or error}")
    if problems:
        told = [f"{path} is not there to its end: copy all files of all ranks:", *listed(problems, 10)]
        raise StoreError("\n- ".join(told))
    return sizes


@dataclass(frozen=True)
class Origin:
    """Where a tensor that is asked for lies: it is another one, or views of it. ``name``: the name of the other;
    ``index``: where it lies along the first dimensions of the other, which are of layers or experts; ``views``: pieces
    of the rest, each with the piece of the tensor that is made which it fills; an axis that is only there has size 1.
    None: all of it, as it is."""

    name: str
    index: tuple[int, ...] = ()
    views: tuple[tuple[Piece, Piece], ...] = ()


@dataclass(frozen=True)
class PartedFile(TensorFile):
    """Tensors in parts that are read as those of one file, each put together when it is asked for."""

    source: DistributedFiles = field(kw_only=True)
    origins: Mapping[str, Origin] = field(kw_only=True)
    kept: TensorCache = field(default_factory=TensorCache)

    @classmethod
    def of(
        cls, source: DistributedFiles, origins: Mapping[str, Origin], shapes: Mapping[str, tuple[int, ...]]
    ) -> PartedFile:
        """Return tensors by the names that they are asked for by. ``shapes``: of those that are views of others."""
        entries, end = dict[str, Entry](), 0
        for name, origin in origins.items():
            of = source.tensors[origin.name]
            shape = shapes.get(name, of.shape)
            size = math.prod(shape) * DTYPES[of.dtype].itemsize if of.dtype in DTYPES else 0
            entries[name] = Entry(of.dtype, shape, end, end + size)
            end += size
        return cls(source.path / METADATA, entries, {}, end, source.path, source=source, origins=origins)

    def array(self, name: str, view: Piece | None = None) -> Bits:
        return self.kept.get(name, lambda: self._made(name))

    def _made(self, name: str) -> Bits:
        origin, shape = self.origins[name], self.entry(name).shape
        bits = self.source.tensor(origin.name, origin.index)
        if not origin.views:
            return bits.reshape(shape)
        made = np.empty(shape, bits.dtype)
        for taken, filled in origin.views:
            order = [taken.axes.index(axis) for axis in filled.axes if axis in taken.axes]
            target = strided(made, filled)
            target[...] = strided(bits, taken).transpose(order).reshape(target.shape)
        return made
