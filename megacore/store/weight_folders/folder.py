"""The interface of an opened folder of weights, whichever format it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megacore.models.block_fp8 import BlockFp8
from megacore.models.config import ModelConfig
from megacore.parallel.weights.fingerprint import Logical, add_up
from megacore.parallel.weights.layout import Layout
from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Copy, Stored, whole_name
from megacore.store.io.hub import HubName
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.companions import Companion
from megacore.store.tensor_files.stream import Read
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders.index import Index


@dataclass(frozen=True)
class WeightFolder(ABC):
    """The weights of a model, or adapters of one, and what goes with them. Tensors are read when they are asked for.

    Args:
        trainer: The state of a training run, None where it is of none.
        base: The folder of the model that adapters are read with.
        ignored: Tensors that hold no weights, by the names they have.
        others: Tensors of other parts of a model of which this is one, likewise.
        fp8: How the weights lie that are read in a wider dtype; None: all are read as they lie.
        told: What else is to be said of how it is read.
        hub: The name of the hub, with its commit, that the folder was fetched by.
    """

    path: Path
    index: Index
    trainer: Mapping[str, Any] | None = field(default=None, kw_only=True)
    base: SafetensorsFolder | None = field(default=None, kw_only=True)
    ignored: tuple[str, ...] = field(default=(), kw_only=True)
    others: tuple[str, ...] = field(default=(), kw_only=True)
    fp8: BlockFp8 | None = field(default=None, kw_only=True)
    told: tuple[str, ...] = field(default=(), kw_only=True)
    hub: HubName | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        """The text that names it, here and on other machines if it is of the hub; else its path."""
        return str(self.hub or self.path)

    @property
    def raw(self) -> Mapping[str, Any]:
        """The Hugging Face config of the model."""
        return self.index.raw

    @property
    def config(self) -> ModelConfig:
        return self.index.config

    @property
    def schema(self) -> Schema:
        """The schema, in this release's sentences, of what it holds: the model, or adapters of it."""
        return self.index.schema

    @property
    def layout(self) -> Layout:
        """The layout on the model-parallel coordinates, in the sentences that its tensors were written by."""
        return self.index.layout

    @property
    def states(self) -> tuple[str, ...]:
        """Those of :data:`~megacore.store.weight_folders.index.STATES` that it has."""
        return self.index.states

    @property
    def folders(self) -> tuple[SafetensorsFolder, ...]:
        """Those whose files are read."""
        return ()

    @property
    def left_out(self) -> str | None:
        """A sentence about what is not read of it; None where all is."""
        if not self.others:
            return None
        further = self.config.left_out
        begin = {next((part[:-1] for part in further if name.startswith(part)), "") for name in self.others} - {""}
        parts = ", ".join(sorted(begin or {name.partition(".")[0] for name in self.others}))
        read = "the model without layers that predict further tokens" if begin else "its text model"
        return f"only {read} is read; {len(self.others)} tensors of {parts} are left out"

    @property
    def remarks(self) -> list[str]:
        """Sentences about what is not read of it, or not as it lies there."""
        found = [f"{self.path}: {each}" for each in (*([self.left_out] if self.left_out else []), *self.told)]
        if self.fp8 is not None:
            blocks = f"a scale for each {self.fp8.rows} x {self.fp8.columns}"
            found.append(f"{self.path}: its weights in fp8, with {blocks} of them, are read as {self.fp8.dtype}")
        return found

    @abstractmethod
    def stored(self, state: str = "weights") -> Iterator[Stored]:
        """Return the tensors of a state and the slices of them; none of a state that is not there."""

    @abstractmethod
    def dtype(self, state: str, stored: Stored) -> str:
        """Return the safetensors dtype of one of :meth:`stored`."""

    @abstractmethod
    def read(self, state: str = "weights") -> Read:
        """Return a function that reads the tensors of a state, each by its
        :class:`~parallel.weights.transfer.Stored`."""

    def read_for(self, state: str, copies: Sequence[Copy]) -> Read:
        """Return a function that reads what some copies take of their sources; the rest of these may be anything."""
        return self.read(state)

    def near(self, state: str, copies: Sequence[Copy]) -> Set[int]:
        """Return the ranks that need not wait for a network to read what some copies take of their sources; none where
        all ranks are alike. It is the same on all of them."""
        return frozenset()

    def bring(self, state: str, copies: Sequence[Copy]) -> None:
        """Get ready for :meth:`read_for` what some copies take of their sources; all ranks of a run call this."""
        return

    def fingerprints(self, state: str) -> Mapping[Logical, int]:
        """Return {piece: its fingerprint when it was written}, of those for which that is known. Raises StoreError:
        replicas differ."""
        return {}

    def companions(self) -> Mapping[str, Companion]:
        """Return {name: file} of what travels with the model: tokenizer, generation config, chat templates."""
        return {}

    def trainer_json(self) -> bytes | None:
        """Return the file that :attr:`trainer` was read from, as it stands."""
        return None

    def names(self, state: str) -> set[str]:
        """Return the whole names of the tensors that have a state."""
        return {whole_name(self.schema, stored) for stored in self.stored(state)}


@dataclass(frozen=True)
class SafetensorsFolder(WeightFolder):
    """A folder whose tensors lie in safetensors files."""

    format: ClassVar[str]

    files: Mapping[str, TensorFile]

    @abstractmethod
    def location(self, state: str, stored: Stored) -> tuple[str, str]:
        """Return (path of the file within the folder, name of the tensor there) of one of :meth:`stored`."""

    @property
    def folders(self) -> tuple[SafetensorsFolder, ...]:
        return (self,)

    def dtype(self, state: str, stored: Stored) -> str:
        file, name = self.location(state, stored)
        return self.files[file].entries[name].dtype

    def read(self, state: str = "weights") -> Read:
        def read(stored: Stored, view: Piece | None = None) -> tuple[str, np.ndarray]:
            path, name = self.location(state, stored)
            file = self.files[path]
            return file.entries[name].dtype, file.array(name, view)

        return read

    def read_for(self, state: str, copies: Sequence[Copy]) -> Read:
        views: dict[tuple[str, str], list[Piece]] = {}
        for copy in copies:
            views.setdefault(self.location(state, copy.source), []).append(copy.source_view)
        found = dict[tuple[str, str], tuple[str, np.ndarray]]()
        for (path, name), of in views.items():
            file = self.files[path]
            found[path, name] = file.entry(name).dtype, file.part(name, of)
        return lambda stored, view=None: found[self.location(state, stored)]

    def written(self, state: str, stored: Stored) -> Mapping[str, int]:
        """Return {label: fingerprint when it was written} of one of :meth:`stored`; empty where none was kept."""
        file, name = self.location(state, stored)
        return self.index.files[file].fingerprints[name]

    def fingerprints(self, state: str) -> Mapping[Logical, int]:
        try:
            return add_up(self.layout.schema, ((stored, self.written(state, stored)) for stored in self.stored(state)))
        except ValueError as error:
            raise StoreError(f"{self.path}, {state}: {error}") from error
