"""Plans of whole folders: a checkpoint from a Hugging Face folder or another checkpoint, and the way back.

A plan names every file and where each of its elements comes from before anything is written. :meth:`FolderPlan.write`
streams it into a folder that appears under its name only when all of it is there and is what the source was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megacore.parallel.weights.fingerprint import Logical, add_up, of_layers, spell
from megacore.parallel.weights.layout import Layout
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Stored, native, plan, whole_name
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.companions import Companion, copy_companion
from megacore.store.tensor_files.publish import publish, write_file
from megacore.store.tensor_files.stream import File, Fingerprints, Tensor, write
from megacore.store.weight_folders import hugging_face_files
from megacore.store.weight_folders.checkpoint import COMPANIONS, TRAINER, Checkpoint
from megacore.store.weight_folders.folder import JoinedFolder, WeightFolder, together
from megacore.store.weight_folders.hugging_face import HuggingFace
from megacore.store.weight_folders.index import CARRIED, INDEX, FileRecord, file_name, on_disk

Writer = Callable[[Path, Iterable[File], Schema, int, Callable[[int], object]], dict[str, Fingerprints]]
_CARRIED = "carried"
"""What is carried beside the states, as errors name it."""


@dataclass(frozen=True)
class StateFiles:
    """The files of one state, the schema of their tensors, and the fingerprints that these must have in the end, as far
    as they are known."""

    files: tuple[File, ...]
    schema: Schema
    expected: Mapping[Logical, int]

    @classmethod
    def of(cls, schema: Schema, source: WeightFolder, state: str, files: tuple[File, ...]) -> StateFiles:
        """Return files with the source's fingerprints of a state, as far as it knows them and if no number changes on
        the way. Less those of pieces that another release stored with another axis last: fingerprints take the elements
        along it together."""
        known = dict(source.fingerprints(state))
        for tensor in itertools.chain.from_iterable(file.tensors for file in files) if known else ():
            for copy in tensor.copies:
                if source.dtype(state, copy.source) != tensor.dtype:
                    return cls(files, schema, {})
                sentences = copy.source.pattern, schema[tensor.stored.param].sentence
                if len({sentence.piece_axes(copy.label)[-1:] for sentence in sentences}) > 1:
                    known.pop((whole_name(schema, tensor.stored), copy.label), None)
            if tensor.stored.sizes.get("layer", 1) > 1:
                known |= of_layers(schema, tensor.stored, known)
        return cls(files, schema, known)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file in self.files)

    def compare(self, state: str, fingerprints: Mapping[str, Fingerprints]) -> None:
        """Compare what was written with the source. Raises StoreError: it is not what the source was."""
        of_boxes = [(t.stored, fingerprints[file.path][t.stored.name]) for file in self.files for t in file.tensors]
        try:
            made = add_up(self.schema, of_boxes)
        except ValueError as error:
            raise StoreError(f"{state}: {error}") from error
        wrong = [piece for piece in made if made[piece] != self.expected.get(piece, made[piece])]
        if wrong:
            names = ", ".join(map(spell, wrong))
            raise StoreError(
                f"{state}: the source does not have the fingerprints that it had when it was written: {names}. "
                "`megacore inspect --check` tells which files are damaged"
            )


@dataclass(frozen=True)
class FolderPlan:
    """The contents of a folder that is to be written. ``states``: {state: its files}; ``texts``: (fingerprints of each
    file) -> {path: content} of the small files; ``reader``: opens such a folder, StoreError if it is none: asked before
    the folder is published; ``writer``: fills files, as :func:`~megacore.store.tensor_files.stream.write` does."""

    kind: str
    schema: Schema
    states: Mapping[str, StateFiles]
    texts: Callable[[Mapping[str, Fingerprints]], Mapping[str, bytes]]
    companions: Mapping[str, Companion]
    reader: Callable[[Path], object]
    writer: Writer = write

    @property
    def files(self) -> Iterator[File]:
        return itertools.chain.from_iterable(of.files for of in self.states.values())

    @property
    def size(self) -> int:
        """Bytes of all files but the texts."""
        copied = sum(companion.size for companion in self.companions.values())
        return copied + sum(part.size for part in self.states.values())

    def write(self, target: Path, jobs: int, progress: Callable[[int], object] = lambda written: None) -> None:
        """Make the folder. Raises StoreError: it exists, there is no room, or what was written is not what the source
        was or is not what we would read; nothing is left."""
        with publish(target, self.size) as folder:
            fingerprints: dict[str, Fingerprints] = {}
            for schema, parts in itertools.groupby(self.states.values(), key=lambda part: part.schema):
                files = itertools.chain.from_iterable(part.files for part in parts)
                fingerprints |= self.writer(folder, files, schema, jobs, progress)
            for state, part in self.states.items():
                part.compare(state, fingerprints)
            for name, companion in self.companions.items():
                copy_companion(companion, folder / name)
            for name, content in self.texts(fingerprints).items():
                write_file(folder / name, content)
            try:
                self.reader(folder)
            except StoreError as error:
                raise StoreError(f"{target} is not published, for it could not be read again: {error}") from error


def to_checkpoint(source: WeightFolder, layout: Layout, dtype: str | None = None) -> FolderPlan:
    """Plan a checkpoint of all that a folder holds, in a layout. Raises StoreError: pieces that are stored together
    have different dtypes."""
    layout = on_disk(layout)
    raw = source.raw if dtype is None else hugging_face_files.with_dtype(source.raw, dtype)
    made, trainer = replace(source.index, raw=raw, layout=layout, files={}), source.trainer_json()
    states = {}
    for state in source.states:
        wanted = dtype if state == "weights" else None
        targets = (s for s in native(layout, range(layout.mesh.world)) if made.has(state, s.name))
        filled = tensors(layout.schema, source, state, targets, wanted)
        by_rank = itertools.groupby(filled, key=lambda tensor: tensor.stored.where)
        files = tuple(
            File(file_name(state, layout.mesh.place(rank)), tuple(found), source.read(state))
            for rank, found in by_rank
            if isinstance(rank, int)
        )
        states[state] = StateFiles.of(layout.schema, source, state, files)
    if source.carried is not None:
        states[_CARRIED] = carried_files(source.carried)

    def texts(fingerprints: Mapping[str, Fingerprints]) -> Mapping[str, bytes]:
        records = {
            state: {file.path: FileRecord(file.size, fingerprints[file.path]) for file in of.files}
            for state, of in states.items()
        }
        carried = None if made.carried is None else replace(made.carried, files=records.pop(_CARRIED))
        own = {name: record for of in records.values() for name, record in of.items()}
        index = replace(made, files=own, carried=carried)
        return {INDEX: index.to_json()} | ({TRAINER: trainer} if trainer is not None else {})

    beside = {f"{COMPANIONS}/{name}": companion for name, companion in source.companions().items()}
    mesh = ", ".join(f"{dim}={size}" for dim, size in asdict(layout.mesh).items() if size > 1)
    kind = f"a checkpoint in {mesh}" if mesh else "a checkpoint"
    return FolderPlan(kind, layout.schema, states, texts, beside, Checkpoint.open)


def to_hugging_face(source: WeightFolder, max_shard_bytes: int, dtype: str | None = None) -> FolderPlan:
    """Plan a Hugging Face folder of a folder's weights and companions; fp32 masters are not used. Where they are a part
    of a larger model it is that model, and what is carried of it keeps its dtypes. Raises StoreError: as
    :func:`to_checkpoint`."""
    schema, of = source.config.schema, source.index.carried
    targets = hugging_face_files.named(schema, source.raw, None if of is None else of.naming)
    made = {t.stored.name: t for t in tensors(schema, source, "weights", targets, dtype)}
    if source.carried is not None:
        own = [*source.carried.stored()]
        made |= {t.stored.name: t for t in tensors(source.carried.schema, source.carried, "weights", own, None)}
        targets, schema = [*targets, *own], together(source.schema, source.carried.schema)
        source = JoinedFolder(source.path, source.index, joined=(source, source.carried))
    dtypes = {name: tensor.dtype for name, tensor in made.items()}
    shards = hugging_face_files.export_files(targets, dtypes, max_shard_bytes)
    files = tuple(File(name, tuple(made[s.name] for s in stored), source.read()) for name, stored in shards)
    raw = source.raw if dtype is None else hugging_face_files.with_dtype(source.raw, dtype)
    texts = hugging_face_files.texts(raw, schema, shards, dtypes, None if of is None else of.config)
    part = StateFiles.of(schema, source, "weights", files)
    beside = source.companions()
    return FolderPlan("a Hugging Face folder", schema, {"weights": part}, lambda _: texts, beside, HuggingFace.open)


def carried_files(carried: WeightFolder) -> StateFiles:
    """Return the file of a checkpoint that has the tensors which are carried, byte for byte."""
    made = tuple(tensors(carried.schema, carried, "weights", carried.stored(), None))
    files = (File(CARRIED, made, carried.read()),)
    return StateFiles.of(carried.schema, carried, "weights", files)


def tensors(
    schema: Schema, source: WeightFolder, state: str, targets: Iterable[Stored], dtype: str | None
) -> Iterator[Tensor]:
    """Yield the targets with what fills them of a state, in the dtype that is asked for or, as buffers, in their own.
    Raises StoreError: pieces that are stored together have different dtypes."""
    planned, dtypes = list(plan(schema, source.stored(state), targets)), dict[str, set[str]]()
    for target, copies in planned:
        dtypes.setdefault(whole_name(schema, target), set()).update(source.dtype(state, copy.source) for copy in copies)
    if dtype is None and (mixed := {name: found for name, found in dtypes.items() if len(found) > 1}):
        listed = ", ".join(f"{name} ({' and '.join(sorted(found))})" for name, found in mixed.items())
        raise StoreError(
            f"pieces that are stored as one tensor have different dtypes: {listed}: choose one with --dtype"
        )
    for target, copies in planned:
        asked = None if schema[target.param].buffer else dtype
        yield Tensor(target, asked or next(iter(dtypes[whole_name(schema, target)])), copies)
