"""Our own checkpoints on disk: ``index.json`` and safetensors files per state and model-parallel coordinate.

``docs/checkpoints.md`` describes the format. Data parallelism does not show: a file is what every replica
holds, or a part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megacore.store.accounting import summary
from megacore.store.companions import Companion, companions
from megacore.store.dtypes import FLOATS
from megacore.store.index import INDEX, STATES, Index, path_of, read_index
from megacore.store.stream import Read
from megacore.store.strict_json import StoreError, read_json, short
from megacore.store.tensors import TensorFile
from models.config import ModelConfig
from parallel.fingerprint import Logical, add_up
from parallel.layout import Layout
from parallel.schema import Schema
from parallel.transfer import Stored

TRAINER, COMPANIONS = "trainer.json", "tokenizer"
LISTED = 20  # problems of a checkpoint that are spelled out


def listed(problems: Sequence[object]) -> list[str]:
    """The first of the problems, and how many more there are."""
    return [*map(str, problems[:LISTED]), *[f"and {len(problems) - LISTED} more"] * (len(problems) > LISTED)]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: everything is checked but the bytes of the tensors, by this process or another.

    Args:
        path: Its folder.
        index: What it says about itself.
        trainer: The state of the training run, None for converted weights.
    """

    path: Path
    index: Index
    trainer: Mapping[str, Any] | None

    @classmethod
    def open(cls, path: Path | str, checked: bool = False) -> Checkpoint:
        """Open a folder.

        Args:
            path: The folder.
            checked: Whether another process checks its tensor files, of which this one then opens what it reads.

        Raises:
            StoreError: it is no checkpoint, or is damaged; sizes and headers of all files are compared with the index.
        """
        path = Path(path)
        index = read_index(path / INDEX)
        trainer = read_json(path / TRAINER, path) if (path / TRAINER).exists() else None
        if trainer is not None and not isinstance(trainer, dict):
            raise StoreError(f"{path / TRAINER} does not hold a JSON object")
        if trainer is None and index.step is not None:
            raise StoreError(f"{path / TRAINER} is missing, and {INDEX} says that this is step {index.step} of a run")
        step = None if trainer is None else trainer.get("step")
        if trainer is not None and (type(step) is not int or step != index.step):
            raise StoreError(f"{path} is damaged: {TRAINER} has step {short(step)}, {INDEX} {index.step}")
        made = cls(path, index, trainer)
        states = () if checked else index.states
        problems = [problem for state in states for problem in made._problems(state)]
        if problems:
            raise StoreError("\n".join([f"{path} is damaged:", *listed(problems)]))
        return made

    @property
    def raw(self) -> Mapping[str, Any]:
        """The Hugging Face config of the model."""
        return self.index.raw

    @property
    def config(self) -> ModelConfig:
        return self.index.config

    @property
    def schema(self) -> Schema:
        """What this release declares for what it holds: the model, or adapters of it."""
        return self.index.schema

    @property
    def layout(self) -> Layout:
        """On the model-parallel coordinates."""
        return self.index.layout

    def stored(self, state: str = STATES[0]) -> Iterator[Stored]:
        """The tensors of a state, see :meth:`~megacore.store.index.Index.stored`."""
        return self.index.stored(state)

    def dtype(self, state: str, stored: Stored) -> str:
        return self._file(state, stored).entries[stored.name].dtype

    def read(self, state: str) -> Read:
        """What reads the tensors of a state."""

        def read(stored: Stored) -> tuple[str, np.ndarray]:
            file = self._file(state, stored)
            return file.entries[stored.name].dtype, file.array(stored.name)

        return read

    def companions(self) -> Mapping[str, Companion]:
        """{name: file} of what travels with the model: tokenizer, generation config, chat templates."""
        return companions(self.path / COMPANIONS, self.path)

    def fingerprints(self, state: str) -> dict[Logical, int]:
        """Of the logical pieces, as they were when the files were written.

        Raises:
            StoreError: replicas differ.
        """
        files = self.index.files
        found = ((s, files[path_of(state, s.where)].fingerprints[s.name]) for s in self.stored(state))
        try:
            return add_up(self.layout.schema, found)
        except ValueError as error:
            raise StoreError(f"{self.path}, {state}: {error}") from error

    @cached_property
    def _files(self) -> Mapping[str, TensorFile]:
        return _Files(self.path)

    def _file(self, state: str, stored: Stored) -> TensorFile:
        return self._files[path_of(state, stored.where)]

    def _problems(self, state: str) -> Iterator[str]:
        # Files of which nothing would be trained are not there.
        for where, tensors in itertools.groupby(self.stored(state), key=lambda stored: stored.where):
            yield from self._of_file(path_of(state, where), {stored.name: stored for stored in tensors})

    def _of_file(self, name: str, wanted: Mapping[str, Stored]) -> Iterator[str]:
        record = self.index.files[name]
        try:
            file = self._files[name]
        except StoreError as error:
            yield str(error)
            return
        if file.size != record.size:
            yield f"{name} has {file.size} bytes, not {record.size}"
        if missing := wanted.keys() - file.entries.keys():
            yield f"{name} lacks {', '.join(summary(sorted(missing)))}"
        if unknown := file.entries.keys() - wanted.keys():
            yield f"{name} also holds {', '.join(summary(sorted(unknown)))}"
        for tensor in sorted(wanted.keys() & file.entries.keys()):
            entry, stored = file.entries[tensor], wanted[tensor]
            if entry.shape != stored.shape or entry.dtype not in FLOATS:
                yield f"{name}: {tensor} is {entry.dtype}{list(entry.shape)}, not floats of {list(stored.shape)}"
            if set(record.fingerprints.get(tensor, ())) != set(stored.labels):
                yield f"{INDEX} has no fingerprints of {tensor} in {name}"


class _Files(dict[str, TensorFile]):
    """The files of a folder, opened when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> TensorFile:
        self[name] = TensorFile.open(self.folder / name, self.folder)
        return self[name]
