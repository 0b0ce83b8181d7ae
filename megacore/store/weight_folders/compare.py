"""Whether two folders hold the same model: by the fingerprints of its pieces, in any layouts; or bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from megacore.models.config import ModelConfig
from megacore.parallel.weights.fingerprint import Logical
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Copy, Stored, blocks, plan, strided, whole_name
from megacore.store.tensor_files.dtypes import NUMBERS, as_dtype
from megacore.store.tensor_files.stream import BLOCK_BYTES
from megacore.store.tensor_files.tensors import DTYPES
from megacore.store.weight_folders.audit import OnBytes, fingerprints, silent
from megacore.store.weight_folders.folder import SafetensorsFolder, WeightFolder, with_projector

Sides = tuple[Any, Any]
"""The values of the two folders; None where one has none."""
Folders = tuple[SafetensorsFolder, SafetensorsFolder]
_CARRIED = "carried"


# -- by fingerprints


@dataclass(frozen=True)
class Difference:
    """A piece that differs. ``state``: weights, something of the optimizer's, or carried; ``what``: ``presence``,
    ``shape``, ``dtype`` or ``values``, the first that differs; ``both``: the two sides' name, sizes of the axes, dtypes
    or fingerprints."""

    state: str
    name: str
    label: str
    what: str
    both: Sides


@dataclass(frozen=True)
class Differences:
    """All that tells two folders apart. ``config``: {field: what each has}, of the fields that change the maths;
    ``step``: the steps of two checkpoints of training runs, if they differ; ``states``: {state: which of the two has
    it}, of states that one lacks, though it could have them."""

    config: Mapping[str, Sides]
    step: Sides | None
    states: Mapping[str, int]
    pieces: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return bool(self.config or self.step or self.states or self.pieces)


def compare(folders: Folders, jobs: int, progress: OnBytes = silent) -> Differences:
    """Compare two folders without holding either. The fingerprints of checkpoints are those of their indexes, so their
    tensors are not read. Raises StoreError: replicas in a checkpoint differ."""
    one: WeightFolder
    other: WeightFolder
    one, other = folders
    alone = {each: which for which in (0, 1) for each in folders[which].states if each not in folders[1 - which].states}
    told = alone if folders[0].format == folders[1].format else {}
    if bool(one.config.projector) != bool(other.config.projector):
        one, other = with_projector(one), with_projector(other)
    steps = one.index.step, other.index.step
    shared = [state for state in one.states if state in other.states]
    pieces = [each for state in shared for each in _differences(state, (one, other), state, jobs, progress)]
    if (one.carried is None) == (other.carried is None):
        pieces += carried_differences((one, other), jobs, progress)
    else:
        told[_CARRIED] = int(one.carried is None)
    return Differences(
        config_differences(one.config, other.config) | _adapters(folders),
        steps if None not in steps and steps[0] != steps[1] else None,
        told,
        tuple(pieces),
    )


def config_differences(one: ModelConfig, other: ModelConfig) -> dict[str, Sides]:
    """Return {field: values of both} of all that a config means, where they differ."""
    told = {field.name for config in (one, other) for field in fields(config) if not field.compare}
    ours, theirs = ({"model_type": config.family} | asdict(config) for config in (one, other))
    return {name: both for name, both in _differing(ours, theirs).items() if name not in told}


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Sides]:
    found = {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}
    return {name: both for name, both in found.items() if both[0] != both[1]}


def _adapters(folders: Folders) -> dict[str, Sides]:
    """Return {fact about the adapters of two checkpoints: what each has}, where they differ."""
    held = (folder.index.adapters for folder in folders)
    ours, theirs = ({} if each is None else asdict(each.lora) | {"base": each.fingerprint} for each in held)
    return {f"lora.{name}": both for name, both in _differing(ours, theirs).items()}


def carried_differences(
    folders: tuple[WeightFolder, WeightFolder], jobs: int, progress: OnBytes = silent
) -> Iterator[Difference]:
    """Yield the tensors that are carried and differ, or that one of the two does not carry."""
    return _differences(_CARRIED, [folder.carried for folder in folders], "weights", jobs, progress)


def _differences(
    name: str, folders: Sequence[WeightFolder | None], state: str, jobs: int, progress: OnBytes
) -> Iterator[Difference]:
    one, other = ({} if each is None else _held(each, state, jobs, progress) for each in folders)
    for piece in {**one, **other}:
        here, there = one.get(piece), other.get(piece)
        if here is None or there is None:
            yield Difference(name, *piece, "presence", (here and piece[0], there and piece[0]))
        elif differ := [what for what in here if here[what] != there[what]]:
            yield Difference(name, *piece, differ[0], (here[differ[0]], there[differ[0]]))


def _held(folder: WeightFolder, state: str, jobs: int, progress: OnBytes) -> dict[Logical, dict[str, Any]]:
    """Return {piece: what is compared of it}."""
    schema, values = folder.schema, folder.fingerprints(state)
    # Those of another release may have taken the axes in another order.
    if not values or _orders(folder.layout.schema) != _orders(schema):
        values = fingerprints(folder, state, jobs, progress)
    held = {}
    for stored in folder.stored(state):
        dtype = folder.dtype(state, stored)
        for label in stored.labels:
            piece = whole_name(schema, stored), label
            sizes = {axis: schema.sizes[axis] for axis in schema[stored.param].sentence.piece_axes(label)}
            # What is carried may have any dtype.
            held[piece] = {"shape": sizes, "dtype": NUMBERS.get(dtype, dtype), "values": f"{values[piece]:016x}"}
    return held


def _orders(schema: Schema) -> dict[Logical, tuple[str, ...]]:
    return {(p.name, label): p.sentence.piece_axes(label) for p in schema.params for label in p.sentence.labels}


# -- bit for bit


@dataclass(frozen=True)
class PieceComparison:
    """A piece of a checkpoint's tensor beside the same elements in another source. ``dtypes``: the other source's, and
    the checkpoint's. Where these are not one, elements that differ are those of which neither is the other one
    rounded."""

    tensor: Stored
    label: str
    elements: int
    differ: int
    dtypes: tuple[str, str]


def compare_bits(
    checkpoint: WeightFolder, tensors: Iterable[Stored], other: WeightFolder, jobs: int
) -> Iterator[PieceComparison]:
    """Compare weights of a checkpoint bit for bit, replicas and all, with the elements that the plan finds elsewhere.
    Raises TransferError: it is not the same model."""
    read, read_other = checkpoint.read(), other.read()

    def of(planned: tuple[Stored, list[Copy]]) -> list[PieceComparison]:
        tensor, copies = planned
        dtype, bits = read(tensor)
        elements, differ, dtypes = Counter[str](), Counter[str](), dict[str, str]()
        for block in blocks(copies, BLOCK_BYTES // DTYPES[dtype].itemsize):
            here = bits.reshape(-1)[block.start :]
            for copy in block.copies:
                held, there = read_other(copy.source, copy.source_view)
                equal = _equal(strided(here, copy.target_view), dtype, strided(there, copy.source_view), held)
                elements[copy.label] += equal.size
                differ[copy.label] += equal.size - int(np.count_nonzero(equal))
                dtypes[copy.label] = held
        return [
            PieceComparison(tensor, label, elements[label], differ[label], (dtypes[label], dtype)) for label in dtypes
        ]

    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(of, plan(checkpoint.schema, other.stored(), tensors)):
            yield from found


def _equal(one: np.ndarray, dtype: str, other: np.ndarray, other_dtype: str) -> np.ndarray:
    if dtype == other_dtype:
        return np.asarray(one == other)
    return np.asarray((as_dtype(other, other_dtype, dtype) == one) | (as_dtype(one, dtype, other_dtype) == other))
