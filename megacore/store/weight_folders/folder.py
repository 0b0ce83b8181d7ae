"""The interface of an opened folder of weights, whichever format it has."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megacore.models.config import ModelConfig
from megacore.models.names import PROJECTOR
from megacore.models.quantization import Quantization
from megacore.models.wrappers import WRAPPERS
from megacore.parallel.weights.fingerprint import Logical, add_up
from megacore.parallel.weights.layout import Layout, MeshShape
from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.schema import Param, Schema
from megacore.parallel.weights.transfer import Copy, Stored, native, whole_name
from megacore.store.io.hub import HubName
from megacore.store.io.strict_json import StoreError, short
from megacore.store.tensor_files.companions import Companion
from megacore.store.tensor_files.stream import Read
from megacore.store.tensor_files.tensors import TensorFile
from megacore.store.weight_folders.index import FileRecord, Index


@dataclass(frozen=True)
class WeightFolder(ABC):
    """The weights of a model, or adapters of one, and what goes with them. Tensors are read when they are asked for.

    ``trainer``: the state of a training run, None where it is of none; ``base``: the folder of the model that adapters
    are read with; ``ignored``: tensors that hold no weights, by the names they have; ``others``: those that the model
    leaves out; ``quantization``: how the weights lie that are read in a wider dtype, None: all are read as they lie;
    ``told``: what else is to be said of how it is read; ``hub``: the name of the hub, with its commit, that it was
    fetched by.
    """

    path: Path
    index: Index
    trainer: Mapping[str, Any] | None = field(default=None, kw_only=True)
    base: SafetensorsFolder | None = field(default=None, kw_only=True)
    ignored: tuple[str, ...] = field(default=(), kw_only=True)
    others: tuple[str, ...] = field(default=(), kw_only=True)
    quantization: Quantization | None = field(default=None, kw_only=True)
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
    def carried(self) -> SafetensorsFolder | None:
        """The tensors of other parts of the model of which this is the text part, as weights of names and sizes of
        their own, which nothing here computes with; None where it is all of it."""
        return None

    def check_predicts(self) -> None:
        """Raise StoreError: its head gives scores of a sequence, where the next token is asked for."""
        if self.config.labels:
            raise StoreError(
                f"{self.path} is a {self.config.scoring_architecture()}, whose head scores a sequence and predicts no "
                "token: take a language model; megacore.load_model gives the scores (logits)"
            )

    @property
    def remarks(self) -> list[str]:
        """Sentences about what is not read of it, or not as it lies there."""
        found = list[str]()
        if self.others:
            further = self.config.left_out
            begin = sorted({next((part[:-1] for part in further if part in name), name) for name in self.others})
            shown = f"{', '.join(begin[:3])}{', ...' * (len(begin) > 3)}"
            found.append(f"{self.config.without}; {len(self.others)} tensors of {shown} are left out")
        found += self.told
        if (carried := self.carried) is not None:
            names = carried.schema.by_name
            parts = ", ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in names}))
            found.append(f"its text model is read; {len(names)} tensors of {parts} are carried as they are")
        if self.quantization is not None:
            found.append(self.quantization.remark)
        return [f"{self.path}: {each}" for each in found]

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
    kind: ClassVar[str]
    """The format in words: ``a checkpoint``."""

    files: Mapping[str, TensorFile]

    @cached_property
    def carried(self) -> SafetensorsFolder | None:
        of = self.index.carried
        return None if of is None else CarriedFolder.of(self.path, of.config, of.files, self.files)

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
        if not any(of for record in self.index.files.values() for of in record.fingerprints.values()):
            return {}  # the format keeps none
        try:
            return add_up(self.layout.schema, ((stored, self.written(state, stored)) for stored in self.stored(state)))
        except ValueError as error:
            raise StoreError(f"{self.path}, {state}: {error}") from error


@dataclass(frozen=True)
class CarriedFolder(SafetensorsFolder):
    """Tensors that are no weights of ours: each is declared by the shape that it has, an axis for each dimension."""

    format = "carried"
    kind = "tensors that are carried"

    holders: Mapping[str, str]

    @classmethod
    def of(
        cls,
        path: Path,
        config: Mapping[str, Any],
        records: Mapping[str, FileRecord],
        files: Mapping[str, TensorFile],
        prefix: str = "",
    ) -> CarriedFolder:
        """Return the tensors that are recorded of some files; ``prefix``: what they are declared with in place of
        ``model.``. Raises StoreError: a file cannot be opened, or a tensor has no name or size that can be declared.
        """
        sizes, params = dict[str, int](), list[Param]()
        holders = {name: file for file, record in records.items() for name in record.fingerprints}
        for name, file in holders.items():
            shape = files[file].entry(name).shape
            if not re.fullmatch(r"[\w.-]{1,500}", name, re.ASCII) or 0 in shape:
                raise StoreError(f"{path}: the tensor {short(name)} of {list(shape)} cannot be carried")
            axes = {f"d{dim}_{size}": size for dim, size in enumerate(shape)}
            sizes |= axes
            ours = prefix + name.removeprefix("model.") if prefix else name
            params.append(Param(ours, " ".join(axes), name if prefix else ""))
        layout = Layout(Schema(tuple(params), sizes), MeshShape(), ())
        return cls(path, Index(config, layout, ("weights",), None, records), files, holders)

    @property
    def schema(self) -> Schema:
        return self.layout.schema

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        return native(self.layout, [0]) if state in self.states else iter(())

    def location(self, state: str, stored: Stored) -> tuple[str, str]:
        name = self.schema[stored.param].hf or stored.name
        return self.holders[name], name


@dataclass(frozen=True)
class JoinedFolder(WeightFolder):
    """Folders that are read as one, of which the first counts that has a tensor; ``rest``: what of them is carried."""

    joined: Sequence[WeightFolder] = field(kw_only=True)
    rest: SafetensorsFolder | None = field(default=None, kw_only=True)

    @property
    def carried(self) -> SafetensorsFolder | None:
        return self.rest

    @property
    def folders(self) -> tuple[SafetensorsFolder, ...]:
        return tuple(each for folder in self.joined for each in folder.folders)

    def stored(self, state: str = "weights") -> Iterator[Stored]:
        for folder in self.joined if state in self.states else ():
            yield from folder.stored(state)

    def dtype(self, state: str, stored: Stored) -> str:
        return self._holder(stored).dtype(state, stored)

    def read(self, state: str = "weights") -> Read:
        return lambda stored, view=None: self._holder(stored).read(state)(stored, view)

    def read_for(self, state: str, copies: Sequence[Copy]) -> Read:
        reads = [
            (folder, folder.read_for(state, [copy for copy in copies if self._holder(copy.source) is folder]))
            for folder in self.joined
        ]
        return lambda stored, view=None: next(r for f, r in reads if f is self._holder(stored))(stored, view)

    def fingerprints(self, state: str) -> Mapping[Logical, int]:
        known = [folder.fingerprints(state) for folder in self.joined]
        return {piece: value for each in reversed(known) for piece, value in each.items()}

    def companions(self) -> Mapping[str, Companion]:
        """Return the companions of the first folder that has some."""
        return next(filter(None, (folder.companions() for folder in self.joined)), {})

    def _holder(self, stored: Stored) -> WeightFolder:
        return next(folder for folder in self.joined if stored.param in folder.schema.by_name)


def together(*schemas: Schema) -> Schema:
    """Return the schema of all parameters of some."""
    params = tuple(param for schema in schemas for param in schema.params)
    return Schema(params, {axis: size for schema in schemas for axis, size in schema.sizes.items()})


def with_projector(folder: WeightFolder) -> WeightFolder:
    """Return a folder whose projector, where it carries one, is one of its weights: the rest is carried."""
    carried, of = folder.carried, folder.index.carried
    if carried is None or of is None:
        return folder
    kind, files = WRAPPERS[str(of.config["model_type"])], carried.files

    def part(projects: bool, prefix: str = "") -> CarriedFolder:
        found = {
            file: {name: each for name, each in record.fingerprints.items() if kind.projects(name) == projects}
            for file, record in of.files.items()
        }
        records = {file: replace(of.files[file], fingerprints=each) for file, each in found.items() if each}
        return CarriedFolder.of(folder.path, of.config, records, files, prefix)

    own, rest = part(True, PROJECTOR), part(False)
    if not own.holders:
        return folder
    layout = replace(folder.layout, schema=together(folder.layout.schema, own.schema))
    index = replace(folder.index, layout=layout, carried=replace(of, files=rest.index.files))
    about = {name: getattr(folder, name) for name in ("ignored", "others", "quantization", "told", "hub")}
    return JoinedFolder(folder.path, index, joined=(folder, own), rest=rest, **about)
