"""Saving a run while it goes on: copy to host memory, write in the background, publish when every rank has written."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore import checkpoints
from megacore.control import Control
from megacore.say import err
from megacore.store.checkpoint import COMPANIONS, TRAINER
from megacore.store.companions import Companion, copy_companion
from megacore.store.dtypes import FLOATS
from megacore.store.index import INDEX, STATES, Adapters, FileRecord, Index, Range, file_name, on_disk
from megacore.store.object_files import upload
from megacore.store.objects import ObjectPath, place
from megacore.store.publish import Publication, Upload, write_file
from megacore.store.scratch import mapped
from megacore.store.shares import FileContents, share_out
from megacore.store.stream import File, write
from megacore.store.stream import Tensor as Written
from megacore.store.strict_json import StoreError, read_json
from megacore.training.optimizer import Optimizer
from parallel.gradients.buckets import Take, all_of_it
from parallel.parameters import Parameters, view
from parallel.weights.layout import Layout
from parallel.weights.transfer import Stored, native, plan

WEIGHTS = STATES[0]
_ALIGNED = 64
_MOVES = ("mesh", "context", "pipeline", "zero", "memory", "checkpoint")
"""The sections that say how a run is laid out and kept, as the size of its microbatches does."""
_ABANDONED_S = 10.0
"""The seconds for which a save that is given up may end by itself."""
NAMES = {getattr(torch, kind): name for name, kind in FLOATS.items()}
"""{torch's dtype: its name in a file}."""

Wrote = tuple[str, int, dict[str, dict[str, int]], dict[str, tuple[str, int, int]]]
"""Path, bytes, fingerprints and ranges of a file, as they travel to the rank that publishes."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on all ranks, and names those that failed."""


@dataclass(frozen=True)
class Contents:
    """All that a checkpoint of a run holds, as this rank has it.

    Args:
        state: The tensors that this rank holds.
        raw: Fields of the model's Hugging Face config.
        companions: {name: file} of what travels with the model.
        adapters, frozen: The fields of :class:`~megacore.store.index.Index`.
    """

    state: TrainingState
    raw: Mapping[str, Any]
    companions: Mapping[str, Companion]
    adapters: Adapters | None = None
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Retention:
    """The checkpoints that a run keeps: the newest checkpoints (None: all of them), and those of every so many steps
    (0: no others)."""

    newest: int | None
    every: int


class TrainingState:
    """The tensors of this rank that a checkpoint holds, by state and name.

    Args:
        parameters: The weights.
        optimizer: Their masters and moments.
        folder: The folder of files that copies lie in while they are saved; None for host memory.
        layout: The layout of what is saved, where that is not all of the weights.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer: Optimizer,
        folder: Path | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.parameters, self._optimizer, self.folder = parameters, optimizer, folder
        self.layout = layout or parameters.layout
        weights = {shard.name: parameters[shard.name].dtype for shard in self.layout.shards(parameters.mesh.place)}
        there = {WEIGHTS: weights, **optimizer.states()}
        self.dtypes: dict[str, Mapping[str, torch.dtype]] = {state: there[state] for state in STATES if state in there}

    def read_into(self, state: str, name: str, host: Tensor | None, take: Take = all_of_it) -> None:
        """Copy a tensor, or what is taken of it; all ranks do so for all states and names in one order, with None where
        it is not wanted."""
        if state == WEIGHTS:
            self._optimizer.read_weight(name, host, take)
        else:
            self._optimizer.read_into(state, name, host, take)


def _of_any_layout(trainer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a ``trainer.json`` without what may change while a run goes on."""
    recipe = {name: section for name, section in trainer.get("recipe", {}).items() if name not in _MOVES}
    return {**trainer, "recipe": {**recipe, "batch": {**recipe.get("batch", {}), "micro_size": None}}}


@dataclass(frozen=True)
class _Written:
    """A file of this rank.

    Args:
        file: The contents of the file.
        state: The state that it is of.
        ranges: The ranges of its tensors that are slices.
        host: Copies of them.
    """

    file: File
    state: str
    ranges: Mapping[str, Range]
    host: Mapping[str, Tensor]


class Snapshot:
    """This rank's share of a checkpoint's files, and host memory for it that is kept from save to save."""

    def __init__(self, state: TrainingState) -> None:
        parameters = state.parameters
        self.state, self.schema, mesh = state, state.layout.schema, parameters.mesh
        disk, place = on_disk(state.layout), replace(mesh.place, dp=0, cp=0)
        self._held = {stored.name: stored for stored in native(state.layout, [mesh.rank])}
        kept = list(native(disk, [disk.mesh.rank(place)]))
        held = {
            name: found
            for name, dtypes in state.dtypes.items()
            # None where nothing of this rank is trained, or all of it is another's to write.
            if (found := [(stored, dtypes[stored.name].itemsize) for stored in kept if stored.name in dtypes])
        }
        replicas = mesh.shape.along(mesh.rank, "dp", "cp")
        self._device, on_device = mesh.device, mesh.device.type == "cuda"
        self.written = [
            self._written(part, file_name(part.state, place, part.number), on_device)
            for part in share_out(disk, held, len(replicas))[replicas.index(mesh.rank)]
        ]
        self._taken = torch.cuda.Event() if on_device else None

    def take(self) -> None:
        """Copy what is to be written. On a GPU the host does not wait: later steps come after it in the stream."""
        wanted = {
            (each.state, tensor.stored.name): (each.host[tensor.stored.name], tensor.stored)
            for each in self.written
            for tensor in each.file.tensors
        }
        for state, dtypes in self.state.dtypes.items():
            for name in dtypes:
                host, stored = wanted.get((state, name), (None, self._held[name]))
                self.state.read_into(state, name, host, _slice(self._held[name], stored))
        if self._taken is not None:
            self._taken.record()

    def write(self, folder: Path) -> list[Wrote]:
        """Write what was taken."""
        if self._taken is not None:
            # This is a thread of its own, which would wait through a context on GPU 0, and take memory for it there.
            torch.cuda.set_device(self._device)
            self._taken.synchronize()
        files = [each.file for each in self.written]
        fingerprints = (
            upload(folder, files, self.schema) if isinstance(folder, ObjectPath) else write(folder, files, self.schema)
        )
        return [
            (file.path, file.size, fingerprints[file.path], {name: astuple(cut) for name, cut in each.ranges.items()})
            for file, each in zip(files, self.written, strict=True)
        ]

    def _written(self, part: FileContents, path: str, on_device: bool) -> _Written:
        dtypes = self.state.dtypes[part.state]
        host = _copies({s.name: (s.shape, dtypes[s.name]) for s in part.tensors}, on_device, self.state.folder)

        def read(stored: Stored) -> tuple[str, Any]:
            copy = host[stored.name]
            return NAMES[copy.dtype], copy.view(getattr(torch, f"uint{8 * copy.itemsize}")).numpy()

        planned = plan(self.schema, part.tensors, part.tensors)
        file = File(path, tuple(Written(s, NAMES[dtypes[s.name]], copies) for s, copies in planned), read)
        cuts = {stored.name: self._held[stored.name].cut(stored) for stored in part.tensors}
        ranges = {name: Range(*cut) for name, cut in cuts.items() if cut is not None}
        return _Written(file, part.state, ranges, host)


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
class _Future:
    """A function that runs in a thread; its result and its exception stay until they are asked for."""

    do: Callable[[], Any]
    result: Any = None
    error: Exception | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="save", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self.do()
        except Exception as error:
            self.error = error


@dataclass
class _Saving:
    """A checkpoint on its way: first every rank writes its files, then rank 0 publishes the folder."""

    step: int
    trainer: Mapping[str, Any]
    publication: Publication | Upload | None
    work: _Future | None
    publishing: bool = False


class Saver:
    """Saves checkpoints of a run; every rank has one, and all call it at the same steps.

    Args:
        folder: The folder of the run's checkpoints.
        contents: All that a checkpoint of the run holds.
        control: The messages between the ranks.
        kept: The checkpoints that stay.
    """

    def __init__(self, folder: Path, contents: Contents, control: Control, kept: Retention) -> None:
        self.folder = folder
        self._state, self._companions = state, _ = contents.state, contents.companions
        index = Index(contents.raw, on_disk(state.layout), tuple(state.dtypes), None, {})
        self.index = replace(index, adapters=contents.adapters, frozen=contents.frozen)
        self._control, self._kept = control, kept
        self._snapshot: Snapshot | None = None
        self._saving: _Saving | None = None
        self._failing_since: float | None = None
        self.waited_s = 0.0
        """The seconds for which this rank has waited for the files that it writes."""

    def save(self, step: int, trainer: Mapping[str, Any]) -> None:
        """Take the state as it is and begin to write it; waits for an earlier save first. A checkpoint that is there
        already is left as it is: the run had come so far before, and has gone back after a fault.

        Args:
            step: The last step that was done.
            trainer: The fields of ``trainer.json``.

        Raises:
            SaveError: it cannot begin, for want of room say, or the earlier one failed.
        """
        self.finish()
        snapshot = self.reserve()
        publication, begun = None, dict[str, str]()
        if self._control.mesh.rank == 0:
            try:
                if not self._has(step, trainer):
                    publication = checkpoints.begin(self.folder, step, self._bytes)
                    begun = {"folder": str(publication.folder)}
            except (StoreError, OSError) as error:
                begun = {"error": str(error)}
        begun = self._control.tell(begun)
        if not begun:
            self._failing_since = None
            return
        if "error" in begun:
            raise self._failed(f"cannot save step {step}: {begun['error']}")
        folder = place(begun["folder"])
        snapshot.take()
        self._saving = _Saving(step, trainer, publication, _Future(lambda: snapshot.write(folder)))

    def _has(self, step: int, trainer: Mapping[str, Any]) -> bool:
        """Return whether this run has a checkpoint of a step already, on whatever layout it was then."""
        path = checkpoints.complete(self.folder).get(step)
        if path is None:
            return False
        ours, theirs = map(_of_any_layout, (json.loads(json.dumps(trainer)), read_json(path / TRAINER, path)))
        return ours == theirs

    def reserve(self) -> Snapshot:
        """Reserve room for a copy of what is written, kept from save to save.

        Raises:
            SaveError: it lies in files, and a rank has no room for them.
        """
        if self._snapshot is None:
            try:
                self._snapshot = self._control.attempt(lambda: Snapshot(self._state))
            except StoreError as error:
                raise self._failed(f"cannot copy the state to save it: {error}") from error
        return self._snapshot

    @property
    def failing_s(self) -> float | None:
        """Seconds since the first save that failed after the last one that did not; None where the last one did not.

        By this rank's clock: all ranks know whether, but not quite since when.
        """
        return None if self._failing_since is None else time.monotonic() - self._failing_since

    def _failed(self, reason: str) -> SaveError:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        return SaveError(reason)

    def news(self) -> tuple[bool, bool]:
        """Return whether this rank is still at work, and whether it has failed: for :meth:`advance`."""
        if self._saving is None or self._saving.work is None:
            return False, False
        busy = self._saving.work.thread.is_alive()
        return busy, not busy and self._saving.work.error is not None

    def advance(self, busy: bool, failed: bool) -> None:
        """Go on with a save in the background, as far as it can without waiting.

        Args:
            busy, failed: Whether any rank's :meth:`news` says so.

        Raises:
            SaveError: a rank could not write its files.
        """
        saving = self._saving
        if saving is None:
            return
        if failed:
            self._fail(saving)
        elif not busy and saving.publishing:
            self._saving = self._failing_since = None
        elif not busy:
            written = self._control.gather(saving.work.result if saving.work else None)
            saving.publishing = True
            saving.work = _Future(lambda: self._publish(saving, written)) if saving.publication else None

    def abandon(self) -> bool:
        """Give up a save in the background, for it needs other ranks -> whether there was one that is not known to be
        published: what rank 0 publishes needs nobody else."""
        saving, self._saving = self._saving, None
        if saving is None:
            return False
        work = saving.work
        if work is not None:  # a disk that does not answer is no reason to wait
            work.thread.join(_ABANDONED_S)
        ended = work is None or not work.thread.is_alive()
        if saving.publication is not None and (ended or not saving.publishing):
            saving.publication.abandon()  # nothing, if it is published
        return not (saving.publication and saving.publishing and ended and work is not None and work.error is None)

    def finish(self) -> None:
        """Wait until the save in the background is published, if there is one. Raises as :meth:`advance`."""
        while self._saving is not None:
            if self._saving.work is not None:
                began = time.monotonic()
                self._saving.work.thread.join()
                # All ranks write as much, one of them publishes.
                self.waited_s += 0.0 if self._saving.publishing else time.monotonic() - began
            busy, failed = self._control.largest(*self.news())
            self.advance(bool(busy), bool(failed))

    def _fail(self, saving: _Saving) -> None:
        if saving.work is not None:
            saving.work.thread.join()
        error = saving.work.error if saving.work else None
        errors = self._control.exchange(error and (str(error) or repr(error)))
        if saving.publication is not None:
            saving.publication.abandon()
        self._saving = None
        said = [f"{self._control.who(rank)}: {reason}" for rank, reason in enumerate(errors) if reason]
        raise self._failed("\n".join([f"cannot save step {saving.step}:", *said]))

    @cached_property
    def _bytes(self) -> int:
        """Return the bytes of all tensors of a checkpoint, on all ranks."""
        index = self.index
        places = [index.layout.mesh.place(rank) for rank in range(index.layout.mesh.world)]
        size = 0
        for state, dtypes in self._state.dtypes.items():
            shards = (shard for place in places for shard in index.layout.shards(place) if index.has(state, shard.name))
            # Where this rank has none of a state, it is as wide as it can be on others.
            size += sum(shard.numel for shard in shards) * next((dtype.itemsize for dtype in dtypes.values()), 8)
        return size

    def _copy_companions(self, folder: Path) -> None:
        """Copy what travels with the model from where the run began. That may be removed by now: a process that does
        not hold it takes what the newest checkpoint has of it."""
        folder.mkdir(exist_ok=True)
        files = dict(self._companions)
        for newest in [*checkpoints.complete(self.folder).values()][-1:]:
            gone = [
                name for name, companion in files.items() if companion.content is None and not companion.path.exists()
            ]
            files |= {name: Companion(newest / COMPANIONS / name, newest) for name in gone}
        for name, companion in files.items():
            copy_companion(companion, folder / name)

    def _publish(self, saving: _Saving, written: list[list[Wrote]]) -> None:
        publication = saving.publication
        assert publication is not None
        folder = publication.folder
        records = {
            name: FileRecord(size, found, {tensor: Range(*cut) for tensor, cut in ranges.items()})
            for files in written
            for name, size, found, ranges in files
        }
        there = publication.sizes()
        for name, record in records.items():
            if there.get(name) != record.size:
                raise StoreError(
                    f"{folder / name}: another rank has written it, and it is not seen here: {publication.unseen}"
                )
        index = replace(self.index, step=saving.step, files=records)
        write_file(folder / TRAINER, json.dumps(saving.trainer, indent=1, allow_nan=False).encode() + b"\n")
        self._copy_companions(folder / COMPANIONS)
        write_file(folder / INDEX, index.to_json())
        publication.finish()
        try:
            checkpoints.prune(self.folder, self._kept.newest, self._kept.every)
        except (OSError, StoreError) as error:  # this one is there
            err(f"{self.folder}: older checkpoints that are not to be kept could not be removed: {error}")
