"""The checkpoints of a run, by their names: which there are, the newest, which are kept or set aside. No torch.

On a disk a checkpoint is given its name when all of it is there. In an object store nothing can be renamed: each try to
save has a name of its own, the index is written last, and taken away first.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megacore.say import err
from megacore.store.io.objects import ObjectPath, place
from megacore.store.io.strict_json import StoreError, read_file, read_json
from megacore.store.tensor_files.publish import PARTIAL, Publication, Upload, remove_leftovers
from megacore.store.tensor_files.tensors import os_errors
from megacore.store.weight_folders import audit
from megacore.store.weight_folders.checkpoint import TRAINER, Checkpoint
from megacore.store.weight_folders.hugging_face import CONFIG
from megacore.store.weight_folders.index import INDEX

FOLDER = "checkpoints"
AUTO = "auto"
"""Instead of a checkpoint to resume from: the newest one of the run's own folder, if it has one."""

EVALUATIONS = "evaluations"
"""[step, validation loss] in the state of a run: of its best evaluation, and of those after it."""

KEPT_IN_MEMORY = 2
"""The checkpoints that stay in memory: one is whole while the next one is written."""

DAMAGED = f"{INDEX}.damaged"
"""The name of the index of what was set aside in an object store."""
_DOOMED = ".{}.doomed"
_NAME = r"(step-(\d{8,18})(?:-[0-9a-f]{8})?)"
"""(folder, step) of a checkpoint, also one that was copied from a disk to an object store or back."""
_OBJECTS = re.compile(rf"{_NAME}/(.+)", re.DOTALL)
"""(folder, step, name within it) of its objects."""


def folder_of(out: str | Path, elsewhere: str | None = None) -> Path:
    """Return the folder that a run keeps its checkpoints in: elsewhere, if it says so."""
    return place(elsewhere or Path(out) / FOLDER)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def begin(folder: Path, step: int, needed_bytes: int) -> Publication | Upload:
    """Begin a checkpoint, of which these are the bytes; what has its name and is none is set aside. Raises StoreError:
    it cannot be begun."""
    path = path_of(folder, step)
    if isinstance(path, ObjectPath):
        return Upload(path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}"), INDEX)
    # A link, or the rest of one: this run's own name for it.
    if path.is_symlink() or (path.is_dir() and not (path / INDEX).exists()):
        set_aside(path)
    return Publication.begin(path, needed_bytes)


def named(folder: Path) -> dict[int, Path]:
    """Return {step: folder with the name of a checkpoint} in ascending order, whatever is in it; links are not a run's,
    nor is what has no index yet in an object store."""
    if isinstance(folder, ObjectPath):
        found = (_OBJECTS.fullmatch(name) for name in folder.objects())
        return dict(sorted((int(match[2]), folder / match[1]) for match in found if match and match[3] == INDEX))
    there = ((path, re.fullmatch(_NAME, path.name)) for path in folder.glob("step-*") if not path.is_symlink())
    steps = sorted((int(match[2]), path) for path, match in there if match)
    return {step: path for step, path in steps if path.name.startswith(path_of(folder, step).name)}


def complete(folder: Path) -> dict[int, Path]:
    """Return {step: checkpoint} in ascending order. A folder is given its name only when all of it is there."""
    return {step: path for step, path in named(folder).items() if (path / INDEX).exists()}


def step_of(path: Path) -> Any:
    """Return the step that the index of a checkpoint says. Raises StoreError, LookupError: it says none."""
    return read_json(path / INDEX, path)["step"]


def set_aside(path: Path) -> Path:
    """Rename what cannot be used, so that it is in nobody's way and nothing is lost -> its new path; in an object store
    that of its index. Raises StoreError: it cannot be renamed."""
    if isinstance(path, ObjectPath):
        (path / DAMAGED).write(read_file(path / INDEX))
        (path / INDEX).remove()
        return path / DAMAGED
    with os_errors(path):
        names = (f"{path.name}.damaged{f'-{number}' * (number > 1)}" for number in itertools.count(1))
        free = next(new for name in names if not os.path.lexists(new := path.with_name(name)))
        path.rename(free)
    return free


def instead_of(damaged: Path) -> str:
    """Return the checkpoint to resume from in place of a damaged one: the newest whole one beside it, all of which is
    read; nothing where there is no other."""
    others = [path for path in named(damaged.parent).values() if path.resolve() != damaged.resolve()]
    for path in reversed(others):
        with suppress(StoreError):
            if not audit.check(Checkpoint.open(path), jobs=2):
                return f"The newest whole checkpoint beside it is {path}"
    return "There is no whole checkpoint beside it" if others else ""


def newest_of(path: Path) -> Path:
    """Return the newest checkpoint of a run's folder, or of the folder of its checkpoints; any other path is itself."""
    if any((path / name).exists() for name in (INDEX, CONFIG)):
        return path
    steps = complete(path / FOLDER) or complete(path)
    return steps[max(steps)] if steps else path


def kept(steps: list[int], newest: int | None, every: int) -> set[int]:
    """Return those of some steps whose checkpoints are kept: the newest (None: all of them), and multiples of ``every``
    if it is not 0."""
    last = steps if newest is None else sorted(steps)[-newest:]
    return {step for step in steps if step in last or (every and step % every == 0)}


def best(found: Mapping[int, Path]) -> int | None:
    """Return the step whose checkpoint has the lowest validation loss; None where none was evaluated when it was
    saved."""
    losses = dict[int, float]()
    for step, path in found.items():
        with suppress(StoreError, TypeError, ValueError, IndexError, AttributeError):  # no run's, or damaged
            at, loss = read_json(path / TRAINER, path).get(EVALUATIONS)[-1]
            losses |= {step: float(loss)} if at == step else {}
    return min(losses, key=losses.__getitem__, default=None)


def prune(folder: Path, newest: int | None, every: int, keep_best: bool = False) -> None:
    """Remove the checkpoints that are not kept. One that is being removed has lost its name before."""
    steps = complete(folder)
    stay = kept(list(steps), newest, every) | ({best(steps)} if keep_best else set())
    for step in steps.keys() - stay:
        path = steps[step]
        if isinstance(path, ObjectPath):
            (path / INDEX).remove()
            path.remove()
            continue
        doomed = path.with_name(_DOOMED.format(path.name))
        path.rename(doomed)
        shutil.rmtree(doomed)


def clean(folder: Path) -> None:
    """Remove what a killed run has left behind half written or half removed. Raises StoreError: something that is no
    run's lies where checkpoints will be written."""
    if isinstance(folder, ObjectPath):
        found = [match for match in map(_OBJECTS.fullmatch, folder.objects()) if match]
        ended = {match[1] for match in found if match[3] in (INDEX, DAMAGED)}
        for name in sorted({match[1] for match in found} - ended):
            (folder / name).remove()
        try:
            folder.abort_uploads()
        except StoreError as error:  # it costs money, not a run; a rule of the bucket may do it
            err(f"Uploads that a killed run has left behind stay in the store: {error}")
        return
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise StoreError(f"{folder} is no folder, and checkpoints are to lie in it: move it away")
    remove_leftovers(folder)
    for doomed in folder.glob(_DOOMED.format("step-*")):
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed)
        else:
            doomed.unlink()
    for strange in folder.glob(PARTIAL.format("step-*")):
        raise StoreError(f"{strange} was not made by this user, or is still being written: remove it")
