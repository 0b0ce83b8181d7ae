"""Plans of whole folders: a checkpoint from a Hugging Face folder or another checkpoint, and the way back.

A plan names every file and where each of its elements comes from before anything is written. :meth:`Plan.write` streams
it into a folder that appears under its name only when all of it is there and is what the source was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megacore.store import export
from megacore.store.checkpoint import COMPANIONS, TRAINER, Checkpoint
from megacore.store.companions import Companion, copy_companion
from megacore.store.hugging_face import HuggingFace
from megacore.store.index import INDEX, Adapters, FileRecord, Index, file_name, on_disk
from megacore.store.publish import publish, write_file
from megacore.store.stream import File, Fingerprints, Read, Tensor, write
from megacore.store.strict_json import StoreError
from parallel.fingerprint import Logical, add_up, spell
from parallel.layout import Layout
from parallel.schema import Schema
from parallel.transfer import Stored, hugging_face, native, plan, whole_name


@dataclass(frozen=True)
class Source:
    """The tensors of one state, wherever they lie.

    Args:
        stored: All of them.
        dtype: Of each.
        read: Reads one.
        fingerprints: Of the logical pieces, where they are known.
    """

    stored: Sequence[Stored]
    dtype: Callable[[Stored], str]
    read: Read
    fingerprints: Mapping[Logical, int] | None = None

    @classmethod
    def of_hugging_face(cls, folder: HuggingFace) -> Source:
        return cls(list(folder.stored()), folder.dtype, folder.read)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, state: str) -> Source:
        def dtype(stored: Stored) -> str:
            return checkpoint.dtype(state, stored)

        return cls(list(checkpoint.stored(state)), dtype, checkpoint.read(state), checkpoint.fingerprints(state))


@dataclass(frozen=True)
class Part:
    """The files of one state, and the fingerprints that they must have in the end."""

    files: tuple[File, ...]
    expected: Mapping[Logical, int] | None


@dataclass(frozen=True)
class Plan:
    """What a folder will hold.

    Args:
        schema: Of the model.
        parts: {state: its files}.
        texts: (fingerprints of each file) -> {path: content} of the small files.
        companions: {path: the file that is copied there}.
        reader: Opens such a folder, StoreError if it is none: asked before the folder is published.
    """

    schema: Schema
    parts: Mapping[str, Part]
    texts: Callable[[Mapping[str, Fingerprints]], Mapping[str, bytes]]
    companions: Mapping[str, Companion]
    reader: Callable[[Path], object]

    @property
    def files(self) -> Iterator[File]:
        return itertools.chain.from_iterable(part.files for part in self.parts.values())

    @property
    def size(self) -> int:
        """Bytes of all files but the texts."""
        copied = sum(companion.size for companion in self.companions.values())
        return copied + sum(file.size for file in self.files)

    def write(self, target: Path, jobs: int, progress: Callable[[int], object] = lambda written: None) -> None:
        """Make the folder.

        Raises:
            StoreError: it exists, there is no room, or what was written is not what the source was or is not what we
                would read; nothing is left.
        """
        with publish(target, self.size) as folder:
            found = write(folder, self.files, self.schema, jobs, progress)
            for state, part in self.parts.items():
                self._compare(state, part, found)
            for name, companion in self.companions.items():
                copy_companion(companion, folder / name)
            for name, content in self.texts(found).items():
                write_file(folder / name, content)
            try:
                self.reader(folder)
            except StoreError as error:
                raise StoreError(f"{target} is not published, for it could not be read again: {error}") from error

    def _compare(self, state: str, part: Part, found: Mapping[str, Fingerprints]) -> None:
        of_boxes = [(t.stored, found[file.path][t.stored.name]) for file in part.files for t in file.tensors]
        try:
            made = add_up(self.schema, of_boxes)
        except ValueError as error:
            raise StoreError(f"{state}: {error}") from error
        expected = part.expected or {}
        wrong = [piece for piece in made if made[piece] != expected.get(piece, made[piece])]
        if wrong:
            names = ", ".join(map(spell, wrong))
            raise StoreError(
                f"{state}: the source does not have the fingerprints that it had when it was written: {names}. "
                "`megacore inspect --check` tells which files are damaged"
            )


def to_checkpoint(
    sources: Mapping[str, Source],
    raw: Mapping[str, Any],
    layout: Layout,
    *,
    dtype: str | None = None,
    step: int | None = None,
    trainer: bytes | None = None,
    companions: Mapping[str, Companion] = MappingProxyType({}),
    adapters: Adapters | None = None,
    frozen: frozenset[str] = frozenset(),
) -> Plan:
    """A checkpoint in a layout.

    Args:
        sources: Of each state.
        raw: Fields of the Hugging Face config.
        layout: Of the new files.
        dtype: Of the weights, if it is to change.
        step, trainer: Of the training run, if it is one.
        companions: {name: file} of what travels with the model.
        adapters, frozen: As of :class:`~megacore.store.index.Index`.

    Raises:
        StoreError: pieces that are stored together have different dtypes.
    """
    layout = on_disk(layout)
    schema = layout.schema
    raw = raw if dtype is None else export.with_dtype(raw, dtype)
    made = Index(raw, layout, tuple(sources), step, {}, adapters, frozen)
    parts = {}
    for state, source in sources.items():
        wanted = dtype if state == "weights" else None
        targets = (s for s in native(layout, range(layout.mesh.world)) if made.has(state, s.name))
        by_rank = itertools.groupby(tensors(schema, source, targets, wanted), key=lambda tensor: tensor.stored.where)
        files = tuple(
            File(file_name(state, layout.mesh.place(rank)), tuple(found), source.read)
            for rank, found in by_rank
            if isinstance(rank, int)
        )
        parts[state] = Part(files, expected(schema, source, files))

    def texts(found: Mapping[str, Fingerprints]) -> Mapping[str, bytes]:
        records = {file.path: FileRecord(file.size, found[file.path]) for part in parts.values() for file in part.files}
        return {INDEX: replace(made, files=records).to_json()} | ({TRAINER: trainer} if trainer is not None else {})

    beside = {f"{COMPANIONS}/{name}": companion for name, companion in companions.items()}
    return Plan(schema, parts, texts, beside, Checkpoint.open)


def to_hugging_face(checkpoint: Checkpoint, max_shard_bytes: int, dtype: str | None = None) -> Plan:
    """A Hugging Face folder of a checkpoint's weights; their fp32 masters are not used.

    Raises:
        StoreError: as :func:`to_checkpoint`.
    """
    source = Source.of_checkpoint(checkpoint, "weights")
    return hugging_face_folder(checkpoint, source, checkpoint.index.raw, max_shard_bytes, dtype)


def hugging_face_folder(
    checkpoint: Checkpoint, source: Source, raw: Mapping[str, Any], max_shard_bytes: int, dtype: str | None
) -> Plan:
    """A Hugging Face folder of the model of a checkpoint, its companions beside it.

    Args:
        checkpoint: Which one.
        source: Of the weights.
        raw: Of the ``config.json``.
        max_shard_bytes: The most that the tensors of a file take.
        dtype: Of the weights, if it is to change.
    """
    schema = checkpoint.config.schema
    made = {t.stored.name: t for t in tensors(schema, source, hugging_face(schema), dtype)}
    dtypes = {name: tensor.dtype for name, tensor in made.items()}
    shards = export.export_files(schema, dtypes, max_shard_bytes)
    files = tuple(File(name, tuple(made[s.name] for s in stored), source.read) for name, stored in shards)
    texts = export.texts(raw if dtype is None else export.with_dtype(raw, dtype), shards, dtypes)
    return Plan(
        schema,
        {"weights": Part(files, expected(schema, source, files))},
        lambda found: texts,
        checkpoint.companions(),
        HuggingFace.open,
    )


def tensors(schema: Schema, source: Source, targets: Iterable[Stored], dtype: str | None) -> Iterator[Tensor]:
    """The targets with what fills them, in the dtype that is asked for or their own.

    Raises:
        StoreError: pieces that are stored together have different dtypes.
    """
    planned, held = list(plan(schema, source.stored, targets)), dict[str, set[str]]()
    for target, copies in planned:
        held.setdefault(whole_name(schema, target), set()).update(source.dtype(copy.source) for copy in copies)
    if dtype is None and (mixed := {name: found for name, found in held.items() if len(found) > 1}):
        listed = ", ".join(f"{name} ({' and '.join(sorted(found))})" for name, found in mixed.items())
        raise StoreError(
            f"pieces that are stored as one tensor have different dtypes: {listed}: choose one with --dtype"
        )
    for target, copies in planned:
        yield Tensor(target, dtype or next(iter(held[whole_name(schema, target)])), copies)


def expected(schema: Schema, source: Source, files: Iterable[File]) -> Mapping[Logical, int] | None:
    """The source's fingerprints, if no number changes on the way.

    Less those of pieces that another release stored with another axis last: fingerprints take the elements along it
    together.
    """
    if source.fingerprints is None:
        return None
    known = dict(source.fingerprints)
    for tensor in (tensor for file in files for tensor in file.tensors):
        for copy in tensor.copies:
            if source.dtype(copy.source) != tensor.dtype:
                return None
            sentences = copy.source.pattern, schema[tensor.stored.param].sentence
            if len({sentence.piece_axes(copy.label)[-1:] for sentence in sentences}) > 1:
                known.pop((whole_name(schema, tensor.stored), copy.label), None)
    return known
