"""The checkpoints of a run, by their names: which there are, which one is the newest, which are kept. No torch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from megacore.store.index import INDEX
from megacore.store.publish import remove_leftovers

FOLDER = "checkpoints"
AUTO = "auto"
"""Instead of a checkpoint to resume from: the newest one of the run's own folder, if it has one."""

_DOOMED = ".{}.doomed"


def folder_of(out: str | Path) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(out) / FOLDER


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def complete(folder: Path) -> dict[int, Path]:
    """{step: checkpoint} in ascending order. A folder has its name only when all of it is there."""
    found = (re.fullmatch(r"step-(\d+)", path.parent.name) for path in folder.glob(f"step-*/{INDEX}"))
    steps = sorted(int(match.group(1)) for match in found if match)
    return {step: path_of(folder, step) for step in steps}


def kept(steps: list[int], newest: int | None, every: int) -> set[int]:
    """Which of some steps are kept: the newest (None: all of them), and multiples of ``every`` if it is not 0."""
    last = steps if newest is None else sorted(steps)[-newest:]
    return {step for step in steps if step in last or (every and step % every == 0)}


def prune(folder: Path, newest: int | None, every: int) -> None:
    """Remove the checkpoints that are not kept. One that is being removed has lost its name before."""
    found = complete(folder)
    for step in found.keys() - kept(list(found), newest, every):
        doomed = found[step].with_name(_DOOMED.format(found[step].name))
        found[step].rename(doomed)
        shutil.rmtree(doomed)


def clean(folder: Path) -> None:
    """Remove what a killed run has left behind half written or half removed."""
    if folder.is_dir():
        remove_leftovers(folder)
        for doomed in folder.glob(_DOOMED.format("step-*")):
            shutil.rmtree(doomed)
