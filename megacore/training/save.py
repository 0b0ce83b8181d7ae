"""Saving a run while it goes on: copy to host memory, write in the background, publish when every rank has written."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megacore import checkpoints
from megacore.background import in_background
from megacore.config import CheckpointConfig
from megacore.control import Control
from megacore.models.wrappers import Naming
from megacore.parallel.gradients.buckets import Take, all_of_it
from megacore.parallel.parameters import Parameters, view
from megacore.parallel.weights.layout import Layout
from megacore.parallel.weights.pattern import Piece
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Cut, Stored, native, plan
from megacore.say import err
from megacore.store.conversions.conversion import carried_files
from megacore.store.io.objects import ObjectPath, place
from megacore.store.io.scratch import mapped
from megacore.store.io.strict_json import StoreError, read_json
from megacore.store.tensor_files.companions import Companion, copy_companion
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.tensor_files.object_files import upload
from megacore.store.tensor_files.publish import Publication, Upload, write_file
from megacore.store.tensor_files.shares import FileContents, share_out
from megacore.store.tensor_files.stream import File, Fingerprints, write
from megacore.store.tensor_files.stream import Tensor as Written
from megacore.store.weight_folders.checkpoint import COMPANIONS, TRAINER, Checkpoint
from megacore.store.weight_folders.folder import WeightFolder
from megacore.store.weight_folders.index import (
    INDEX,
    KINDS,
    RESIDUAL,
    STATES,
    Adapters,
    Carried,
    FileRecord,
    Index,
    file_name,
    kind_of,
    on_disk,
)

if TYPE_CHECKING:
    from megacore.training.states.optimizer import Optimizer

WEIGHTS = STATES[0]
_ALIGNED = 64
_MOVES = ("mesh", "context", "pipeline", "zero", "memory", "checkpoint")
"""The sections that say how a run is laid out and kept, as the size of its microbatches does."""
_JOBS = 2
"""Threads that write."""
NAMES = {getattr(torch, kind): name for name, kind in FLOATS.items()}
"""{torch's dtype: its name in a file}."""

Wrote = tuple[str, int, dict[str, dict[str, int]], dict[str, Cut]]
"""Path, bytes, fingerprints and ranges of a file, as they travel to the rank that publishes."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on all ranks, and names those that failed."""


@dataclass(frozen=True)
class Contents:
    """All that a checkpoint of a run holds, as this rank has it: its tensors, the fields of the model's Hugging Face
    config, {name: file} of what travels with the model, and fields of
    :class:`~megacore.store.weight_folders.index.Index`. ``layout``: the layout of what is saved, which may be a part of
    the weights; ``source``: the folder whose carried tensors it carries on, where that has some; ``naming``: how the
    weights are named where they are a part of a larger model; ``folder``: the folder of files that copies lie in while
    they are saved; None for host memory."""

    parameters: Parameters
    optimizer: Optimizer
    layout: Layout
    raw: Mapping[str, Any]
    companions: Mapping[str, Companion] = field(default_factory=dict)
    adapters: Adapters | None = None
    frozen: frozenset[str] = frozenset()
    muon: bool = False
    source: WeightFolder | None = None
    naming: Naming | None = None
    folder: Path | None = None

    @cached_property
    def dtypes(self) -> Mapping[str, Mapping[str, torch.dtype]]:
        """{state: {name: dtype}} of the tensors of this rank that are saved, here or by other replicas."""
        shards = self.layout.shards(self.parameters.mesh.place)
        there = {WEIGHTS: {each.name: self.parameters[each.name].dtype for each in shards}, **self.optimizer.states()}
        order = sorted(there, key=lambda state: (KINDS.index(kind_of(state)[0]), state))
        return {state: there[state] for state in order}

    def writes(self, state: str) -> bool:
        """Return whether this rank's replica writes a state: its own, or those of all if it is the first. A residual is
        written by its rank."""
        kind, replica = kind_of(state)
        return (replica or 0) == (self.optimizer.data_rank if kind == RESIDUAL else self.optimizer.replica)


def _of_any_layout(trainer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a ``trainer.json`` without what may change while a run goes on."""
    recipe = {name: section for name, section in trainer.get("recipe", {}).items() if name not in _MOVES}
    return {**trainer, "recipe": {**recipe, "batch": {**recipe.get("batch", {}), "micro_size": None}}}


@dataclass(frozen=True)
class _Written:
    """A file of this rank, of one state: the ranges of its tensors that are slices, and copies of them on the host."""

    file: File
    state: str
    ranges: Mapping[str, Cut]
    host: Mapping[str, Tensor]


class Snapshot:
    """This rank's share of a checkpoint's files, and host memory for it that is kept from save to save.

    The device took ``copied_s`` for the last copy of them, beside its steps where that ``is_beside``, and to write them
    then took ``cpu_s`` of CPU time.
    """

    def __init__(self, contents: Contents) -> None:
        layout, mesh = contents.layout, contents.parameters.mesh
        self._contents, self._schema = contents, layout.schema
        disk, place = on_disk(layout), replace(mesh.place, dp=0, cp=0)
        self._held = {stored.name: stored for stored in native(layout, [mesh.rank])}
        kept = list(native(disk, [disk.mesh.rank(place)]))
        held = {
            name: found
            for name, dtypes in contents.dtypes.items()
            if contents.writes(name)
            # None where nothing of this rank is trained, or all of it is another's to write.
            and (found := [(stored, dtypes[stored.name].itemsize) for stored in kept if stored.name in dtypes])
        }
        alone = {name: [stored for stored, _ in held.pop(name)] for name in [*held] if kind_of(name)[0] == RESIDUAL}
        replicas = mesh.shape.along(mesh.rank, "dp", "cp")
        self._device, on_device = mesh.device, mesh.device.type == "cuda"
        self.written = [
            self._written(part, file_name(part.state, place, part.number), on_device)
            for part in (
                *share_out(disk, held, len(replicas))[replicas.index(mesh.rank)],
                *(FileContents(state, None, tensors) for state, tensors in alone.items()),
            )
        ]
        self.copied_s = self.cpu_s = 0.0
        self._copy_begins, self._copy_ends = (
            torch.cuda.Event(enable_timing=True) if on_device else None for _ in range(2)
        )
        # What is split is put together by messages, in whose queues those of the next step would wait for the copies.
        self.is_beside = on_device and not contents.optimizer.is_split
        self._stream = torch.cuda.Stream(self._device) if self.is_beside else None

    def take(self) -> None:
        """Copy what is to be written. On a GPU the host does not wait: a stream beside that of the steps copies, and
        the next change of the state comes after it; where that is split over ranks, all that follows does."""
        if self._copy_begins is None or self._copy_ends is None:
            self._take()
            return
        self._copy_begins.record()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._copy_begins.wait()
            self._take()
            self._copy_ends.record()
        self._contents.optimizer.change_after(self._copy_ends)

    def _take(self) -> None:
        """Copy: all ranks do so for all states and names in one order, for some hold a part of what others want."""
        optimizer = self._contents.optimizer
        wanted = {
            (each.state, tensor.stored.name): (each.host[tensor.stored.name], tensor.stored)
            for each in self.written
            for tensor in each.file.tensors
        }
        for state, dtypes in self._contents.dtypes.items():
            if not self._contents.writes(state):
                continue
            read = optimizer.read_weight if state == WEIGHTS else partial(optimizer.read_into, state)
            for name in dtypes:
                host, stored = wanted.get((state, name), (None, self._held[name]))
                read(name, host, _slice(self._held[name], stored))

    def write(self, folder: Path) -> list[Wrote]:
        """Write what was taken."""
        if self._copy_begins is not None and self._copy_ends is not None:
            # This is a thread of its own, which would wait through a context on GPU 0, and take memory for it there.
            torch.cuda.set_device(self._device)
            self._copy_ends.synchronize()
            self.copied_s = self._copy_begins.elapsed_time(self._copy_ends) / 1000
        files, spent = [each.file for each in self.written], dict[int, float]()

        def note(written: int) -> None:
            spent[threading.get_ident()] = time.thread_time()

        fingerprints = _write(folder, files, self._schema, note)
        self.cpu_s = sum(spent.values())
        return [
            (file.path, file.size, fingerprints[file.path], dict(each.ranges))
            for file, each in zip(files, self.written, strict=True)
        ]

    def _written(self, part: FileContents, path: str, on_device: bool) -> _Written:
        dtypes = self._contents.dtypes[part.state]
        host = _copies({s.name: (s.shape, dtypes[s.name]) for s in part.tensors}, on_device, self._contents.folder)

        def read(stored: Stored, view: Piece | None = None) -> tuple[str, Any]:
            copy = host[stored.name]
            return NAMES[copy.dtype], copy.view(getattr(torch, f"uint{8 * copy.itemsize}")).numpy()

        planned = plan(self._schema, part.tensors, part.tensors)
        file = File(path, tuple(Written(s, NAMES[dtypes[s.name]], copies) for s, copies in planned), read)
        cuts = {stored.name: self._held[stored.name].cut(stored) for stored in part.tensors}
        ranges = {name: cut for name, cut in cuts.items() if cut is not None}
        return _Written(file, part.state, ranges, host)


def _write(
    folder: Path, files: Sequence[File], schema: Schema, progress: Callable[[int], object] = lambda written: None
) -> dict[str, Fingerprints]:
    if isinstance(folder, ObjectPath):
        return upload(folder, files, schema)
    return write(folder, files, schema, _JOBS, progress)


def _carried_on(source: WeightFolder, folder: Path) -> Carried:
    """Write what a folder carries into another one. Raises StoreError: it carries nothing, or not what it did."""
    if source.carried is None or source.index.carried is None:
        raise StoreError(f"{source.path} carries nothing")
    part = carried_files(source.carried)
    try:
        made = _write(folder, part.files, part.schema)
        part.compare("carried", made)
    except StoreError:  # so that another source can be tried
        for file in part.files:
            (folder / file.path).unlink(missing_ok=True)
        raise
    records = {file.path: FileRecord(file.size, made[file.path]) for file in part.files}
    return replace(source.index.carried, files=records)


def _slice(whole: Stored, part: Stored) -> Take:
    """Return a function that takes a slice of a tensor as it is stored by itself, in one piece of memory."""
    if part.box == whole.box:
        return all_of_it
    inside = whole.inside(part)

    def take(tensor: Tensor) -> Tensor:
        made = torch.empty(part.shape, dtype=tensor.dtype, device=tensor.device)
        for label, piece in part.pieces.items():
            view(made, piece).copy_(view(tensor, inside[label]))
        return made

    return take


def _copies(
    like: Mapping[str, tuple[tuple[int, ...], torch.dtype]], pinned: bool, folder: Path | None
) -> dict[str, Tensor]:
    """Allocate host tensors of these shapes; in a folder they lie in a file that looks like memory."""
    if folder is None or not like:
        return {name: torch.empty(shape, dtype=dtype, pin_memory=pinned) for name, (shape, dtype) in like.items()}
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in like.values()]
    room = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    flat = torch.from_numpy(mapped(folder, sum(room), "a copy of the state while it is saved")).split(room)
    return {
        name: part[:size].view(dtype).view(shape)
        for (name, (shape, dtype)), size, part in zip(like.items(), sizes, flat, strict=True)
    }


@dataclass
class _Saving:
    """A checkpoint on its way: first every rank writes its files, then the first one of those that share the folder
    publishes it, and last all may send what they have written elsewhere."""

    step: int
    trainer: Mapping[str, Any]
    publication: Publication | Upload | None
    stage: Literal["write", "publish", "send"] = "write"
    work: Future[Any] | None = None

    def begin(self, stage: Literal["write", "publish", "send"], work: Callable[[], object] | None) -> None:
        """Begin a stage, in which this rank may have nothing to do."""
        self.stage, self.work = stage, None if work is None else in_background(work, "save")


class Saver:
    """Saves checkpoints of a run; every rank has one, and all call it at the same steps. ``node``: the number of
    successive ranks that share the folder, where it is in the memory of each machine: the first of them publishes what
    they have written, with the index of all files. None for a folder of all ranks; ``send``: sends the files that this
    rank has written of a checkpoint elsewhere, once that is published; all ranks do so; ``ahead``: whether checkpoints
    that are not to stay go before the next one is written, rather than once it is there."""

    def __init__(
        self,
        folder: Path,
        contents: Contents,
        control: Control,
        section: CheckpointConfig,
        node: int | None = None,
        send: Callable[[Path, Sequence[str]], object] | None = None,
        ahead: bool = False,
    ) -> None:
        self.folder, self._contents = folder, contents
        layout, dtypes = on_disk(contents.layout), tuple(contents.dtypes)
        self.index = Index(contents.raw, layout, dtypes, None, {}, contents.adapters, contents.frozen, contents.muon)
        self._control, self._section, self._several, self._send = control, section, node is not None, send
        self._ahead = ahead
        rank, world = control.mesh.rank, control.mesh.shape.world
        first = rank - rank % (node or world)
        self._sharing = range(first, min(first + (node or world), world))
        self._snapshot: Snapshot | None = None
        self._saving: _Saving | None = None
        if contents.source is not None:
            control.attempt(self._hold_carried)
        self.published: int | None = None
        """The step of the last checkpoint that is published; None since another one has begun."""

    def save(self, step: int, trainer: Mapping[str, Any]) -> None:
        """Take the state as it is and begin to write it; waits for an earlier save first. A checkpoint that is there
        already is left as it is: the run had come so far before, and has gone back after a fault. Raises SaveError: it
        cannot begin, for want of room say, or the earlier one failed."""
        self.finish()
        self.published, snapshot = None, self.reserve()
        publication, begun = None, dict[str, str]()
        if self._publishes:
            try:
                if not self._has(step, trainer):
                    # A folder of its own has room for what this machine writes: the caller has seen to it.
                    publication = checkpoints.begin(self.folder, step, 0 if self._several else self.bytes)
                    begun = {"folder": str(publication.folder)}
            except (StoreError, OSError) as error:
                begun = {"error": str(error)}
        told = self._control.exchange(begun)
        begun = told[self._sharing[0]]
        if errors := [each["error"] for each in told if "error" in each]:
            if publication is not None:
                publication.abandon()
            raise SaveError(f"cannot save step {step}: {errors[0]}")
        if not begun:
            self.published = step
            return
        folder = place(begun["folder"])
        snapshot.take()

        def work() -> list[Wrote]:
            if publication is not None and self._ahead and self._section.keep is not None:
                checkpoints.prune(self.folder, self._section.keep - 1, self._section.keep_every)
            return snapshot.write(folder)

        self._saving = _Saving(step, trainer, publication)
        self._saving.begin("write", work)

    @property
    def _publishes(self) -> bool:
        return self._control.mesh.rank == self._sharing[0]

    def _has(self, step: int, trainer: Mapping[str, Any]) -> bool:
        """Return whether this run has a checkpoint of a step already, on whatever layout it was then."""
        path = checkpoints.complete(self.folder).get(step)
        if path is None:
            return False
        ours, theirs = map(_of_any_layout, (json.loads(json.dumps(trainer)), read_json(path / TRAINER, path)))
        return ours == theirs

    def reserve(self) -> Snapshot:
        """Reserve room for a copy of what is written, kept from save to save. Raises SaveError: it lies in files, and a
        rank has no room for them."""
        if self._snapshot is None:
            try:
                self._snapshot = self._control.attempt(self._reserved)
            except StoreError as error:
                raise SaveError(f"cannot copy the state to save it: {error}") from error
        return self._snapshot

    def _reserved(self) -> Snapshot:
        try:
            return Snapshot(self._contents)
        except RuntimeError as error:  # of torch, where there is no memory that a GPU can copy to
            raise StoreError(str(error)) from error

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way in the background; the same on all ranks."""
        return self._saving is not None

    def news(self) -> tuple[bool, bool]:
        """Return whether this rank is still at work, and whether it has failed: for :meth:`advance`."""
        if self._saving is None or self._saving.work is None:
            return False, False
        busy = not self._saving.work.done()
        return busy, not busy and self._saving.work.exception() is not None

    def advance(self, busy: bool, failed: bool) -> None:
        """Go on with a save in the background, as far as it can without waiting. Raises SaveError: a rank could not
        write its files."""
        saving = self._saving
        if saving is None:
            return
        if failed:
            self._fail(saving)
        elif not busy and saving.stage == "write":
            result = saving.work.result() if saving.work else None
            written = self._control.exchange(result) if self._several else self._control.gather(result)
            saving.begin("publish", (lambda: self._publish(saving, written)) if saving.publication else None)
        elif not busy and saving.stage == "publish" and self._send is not None:
            self.published, path = saving.step, checkpoints.path_of(self.folder, saving.step)
            own = [each.file.path for each in self.reserve().written]
            saving.begin("send", partial(self._send, path, own))
        elif not busy:
            self._saving, self.published = None, saving.step

    def abandon(self) -> None:
        """Give up the save in the background, if there is one that is not published yet; all ranks do so."""
        saving, self._saving = self._saving, None
        if saving is not None and saving.work is not None:
            wait([saving.work])
        if saving is not None and saving.publication is not None:
            saving.publication.abandon()

    def finish(self) -> None:
        """Wait until the save in the background is published, if there is one. Raises as :meth:`advance`."""
        while self._saving is not None:
            if self._saving.work is not None:
                wait([self._saving.work])
            busy, failed = self._control.largest(*self.news())
            self.advance(bool(busy), bool(failed))

    def _fail(self, saving: _Saving) -> None:
        error = saving.work.exception() if saving.work else None
        errors = self._control.exchange(error and (str(error) or repr(error)))
        if saving.publication is not None:
            saving.publication.abandon()
        self._saving = None
        said = [f"{self._control.who(rank)}: {reason}" for rank, reason in enumerate(errors) if reason]
        what = "send a checkpoint to another machine" if saving.stage == "send" else f"save step {saving.step}"
        raise SaveError("\n".join([f"cannot {what}:", *said]))

    @cached_property
    def bytes(self) -> int:
        """Return the bytes of all tensors of a checkpoint, on all ranks."""
        index = self.index
        places = [index.layout.mesh.place(rank) for rank in range(index.layout.mesh.world)]
        size = 0
        for state, dtypes in self._contents.dtypes.items():
            shards = (shard for place in places for shard in index.layout.shards(place) if index.has(state, shard.name))
            # Where this rank has none of a state, it is as wide as it can be on others.
            size += sum(shard.numel for shard in shards) * next((dtype.itemsize for dtype in dtypes.values()), 8)
        return size + self.carried_bytes

    @cached_property
    def carried_bytes(self) -> int:
        """Return the bytes of them that are carried: whoever publishes writes all of these."""
        source = self._contents.source
        return 0 if source is None or source.carried is None else carried_files(source.carried).size

    def _copy_companions(self, folder: Path) -> None:
        """Copy what travels with the model from where the run began. That may be removed by now: a process that does
        not hold it takes what the newest checkpoint has of it."""
        folder.mkdir(exist_ok=True)
        files = dict(self._contents.companions)
        for newest in [*checkpoints.complete(self.folder).values()][-1:]:
            gone = [
                name for name, companion in files.items() if companion.content is None and not companion.path.exists()
            ]
            files |= {name: Companion(newest / COMPANIONS / name, newest) for name in gone}
        for name, companion in files.items():
            copy_companion(companion, folder / name)

    def _hold_carried(self) -> None:
        """Have what is carried be read from here on, whoever removes where the run began."""
        if self._publishes and self._contents.source is not None and (carried := self._contents.source.carried):
            for name in carried.index.files:
                carried.files[name].hold()

    def _write_carried(self, folder: Path) -> Carried | None:
        """Write the tensors that are carried, from the newest checkpoint or, where there is none yet or it is damaged,
        from where the run began: that may be removed meanwhile, as it may with what travels along."""
        source = self._contents.source
        if source is None:
            return None
        for newest in [*checkpoints.complete(self.folder).values()][-1:]:
            with suppress(StoreError):
                return _carried_on(Checkpoint.open(newest, checked=True), folder)
        return _carried_on(source, folder)

    def _publish(self, saving: _Saving, written: list[list[Wrote]]) -> None:
        publication = saving.publication
        assert publication is not None
        folder = publication.folder
        records = {name: FileRecord(size, found, ranges) for files in written for name, size, found, ranges in files}
        there = publication.sizes()
        for rank in self._sharing:
            for name, size, *_ in written[rank]:
                if there.get(name) != size:
                    raise StoreError(
                        f"{folder / name}: another rank has written it, and it is not seen here: {publication.unseen}"
                    )
        index = replace(self.index, step=saving.step, files=records, carried=self._write_carried(folder))
        write_file(folder / TRAINER, json.dumps(saving.trainer, indent=1, allow_nan=False).encode() + b"\n")
        self._copy_companions(folder / COMPANIONS)
        write_file(folder / INDEX, index.to_json())
        publication.finish()
        if self._ahead:
            return
        try:
            checkpoints.prune(self.folder, self._section.keep, self._section.keep_every, self._section.best)
        except (OSError, StoreError) as error:  # this one is there
            err(f"{self.folder}: older checkpoints that are not to be kept could not be removed: {error}")
