"""Our own checkpoints on disk: ``index.json`` and safetensors files per state and model-parallel coordinate.

``docs/checkpoints.md`` describes the format. Data parallelism does not show: a file is what every replica
holds, or a part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megacore.parallel.weights.transfer import Stored
from megacore.store.io.errors import listed
from megacore.store.io.objects import place
from megacore.store.io.strict_json import StoreError, read_file, read_json, short
from megacore.store.tensor_files.accounting import summary
from megacore.store.tensor_files.companions import Companion, companions
from megacore.store.tensor_files.dtypes import kinds_of
from megacore.store.tensor_files.object_files import Files
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders import hugging_face_files
from megacore.store.weight_folders.folder import SafetensorsFolder
from megacore.store.weight_folders.index import EMA, FORMAT, INDEX, FileRecord, path_of, read_index

TRAINER, COMPANIONS = "trainer.json", "tokenizer"


@dataclass(frozen=True)
class Checkpoint(SafetensorsFolder):
    """An opened checkpoint: everything is checked but the bytes of the tensors, by this process or another."""

    format = FORMAT
    kind = "a checkpoint"

    @classmethod
    def open(cls, path: Path | str, checked: bool = False) -> Checkpoint:
        """Open a folder. ``checked``: whether another process checks its tensor files, of which this one then opens
        what it reads. Raises StoreError: it is no checkpoint, or is damaged; sizes and headers of all files are
        compared with the index."""
        path = place(path)
        index = read_index(path / INDEX)
        trainer = read_json(path / TRAINER, path) if (path / TRAINER).exists() else None
        if trainer is not None and not isinstance(trainer, dict):
            raise StoreError(f"{path / TRAINER} does not hold a JSON object")
        if trainer is None and index.step is not None:
            raise StoreError(f"{path / TRAINER} is missing, and {INDEX} says that this is step {index.step} of a run")
        step = None if trainer is None else trainer.get("step")
        if trainer is not None and (type(step) is not int or step != index.step):
            raise StoreError(f"{path} is damaged: {TRAINER} has step {short(step)}, {INDEX} {index.step}")
        made = cls(path, index, files := Files(path), trainer=trainer)
        states = () if checked else index.states
        files.open_ahead(() if checked else index.files)
        problems = [problem for state in states for problem in made._problems(state)]
        problems += () if checked else made._of_carried()
        if problems:
            raise StoreError("\n".join([f"{path} is damaged:", *listed(problems)]))
        return made

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        return self.index.stored(state) if state in self.states else iter(())

    def location(self, state: str, stored: Stored) -> tuple[str, str]:
        return path_of(state, stored.where), stored.name

    def companions(self) -> Mapping[str, Companion]:
        return companions(self.path / COMPANIONS, self.path)

    def trainer_json(self) -> bytes | None:
        return None if self.trainer is None else read_file(self.path / TRAINER, self.path)

    def averaged(self) -> AveragedCheckpoint:
        """Return the averages of its weights as a model. Raises StoreError: it has none."""
        if EMA not in self.states:
            raise StoreError(f"{self.path} has no averages of weights: its run had no ema.decay")
        raw = hugging_face_files.with_dtype(self.raw, next(self.dtype(EMA, stored) for stored in self.stored(EMA)))
        index = replace(self.index, raw=raw, states=("weights",), step=None)
        return AveragedCheckpoint(self.path, index, self.files)

    def _problems(self, state: str) -> Iterator[str]:
        # Files of which nothing would be trained are not there.
        for where, tensors in itertools.groupby(self.stored(state), key=lambda stored: stored.where):
            yield from self._of_file(path_of(state, where), {stored.name: stored for stored in tensors})

    def _of_carried(self) -> Iterator[str]:
        for name, record in self.index.carried.files.items() if self.index.carried else ():
            file = yield from self._opened(name, record)
            if file and (differ := file.entries.keys() ^ record.fingerprints.keys()):
                yield f"{name} and {INDEX} do not have the same tensors: {', '.join(summary(sorted(differ)))}"
            for tensor in sorted(each for each, of in record.fingerprints.items() if [*of] != [""]) if file else ():
                yield f"{INDEX} has no fingerprint of {tensor} in {name}"

    def _of_file(self, name: str, wanted: Mapping[str, Stored]) -> Iterator[str]:
        record = self.index.files[name]
        if (file := (yield from self._opened(name, record))) is None:
            return
        if missing := wanted.keys() - file.entries.keys():
            yield f"{name} lacks {', '.join(summary(sorted(missing)))}"
        if unknown := file.entries.keys() - wanted.keys():
            yield f"{name} also holds {', '.join(summary(sorted(unknown)))}"
        for tensor in sorted(wanted.keys() & file.entries.keys()):
            entry, stored = file.entries[tensor], wanted[tensor]
            kinds = kinds_of(self.schema[stored.param])
            if entry.shape != stored.shape or entry.dtype not in kinds:
                here = f"{entry.dtype}{list(entry.shape)}"
                yield f"{name}: {tensor} is {here} instead of {'/'.join(kinds)}{list(stored.shape)}"
            if set(record.fingerprints.get(tensor, ())) != set(stored.labels):
                yield f"{INDEX} has no fingerprints of {tensor} in {name}"

    def _opened(self, name: str, record: FileRecord) -> Generator[str, None, TensorFile | None]:
        """Yield what is wrong with a file as a whole -> the file, if it can be opened."""
        try:
            file = self.files[name]
        except StoreError as error:
            yield str(error)
            return None
        if file.size != record.size:
            yield f"{name} has {file.size} bytes, not {record.size}"
        return file


@dataclass(frozen=True)
class AveragedCheckpoint(Checkpoint):
    """A checkpoint whose weights are their averages, where there are some, and that is no state of a run."""

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        states = (EMA, state) if state in self.states else ()
        return (each for of in states for each in self.index.stored(of) if self._holder(each) == of)

    def location(self, state: str, stored: Stored) -> tuple[str, str]:
        return path_of(self._holder(stored), stored.where), stored.name

    def _holder(self, stored: Stored) -> str:
        """Return the state that has a tensor."""
        return EMA if self.index.has(EMA, stored.name) else "weights"
