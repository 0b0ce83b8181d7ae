"""What a folder is to be made of another: its format, its layout and its dtype, checked against the source; and the
folder that was made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megacore.models.config import ModelConfig
from megacore.models.stages import layout_of
from megacore.parallel.weights.layout import Layout, MeshShape, layers_problems, mesh_problems
from megacore.parallel.weights.schema import split_of
from megacore.store.conversions.block_fp8_folder import in_block_fp8
from megacore.store.conversions.conversion import FolderPlan, to_checkpoint, to_hugging_face
from megacore.store.io.errors import StoreError, below_1
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.weight_folders.folder import WeightFolder
from megacore.store.weight_folders.hugging_face_files import SHARD_SIZE, parse_size

NARROW = "fp8"
"""The dtype of matrices in e4m3, a scale for each block, as folders alone have it."""
MOST_JOBS = 64
"""Threads that a disk may still thank for."""

Progress = Callable[[int, str], AbstractContextManager[Callable[[int], object]]]
"""Shows the progress of so many bytes under a name: (bytes, name) -> a context of what is told of bytes that are done.
"""


def unseen(size: int, name: str) -> AbstractContextManager[Callable[[int], object]]:
    """Show nothing."""
    return nullcontext(lambda done: None)


@dataclass(frozen=True)
class FolderTarget:
    """A folder as it is asked for; the arguments are those of :func:`megacore.convert`."""

    to: str = "megacore"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1
    layers_per_stage: Sequence[int] | None = None
    dtype: str | None = None
    max_shard_size: str | None = None

    @property
    def stored_dtype(self) -> str | None:
        """The name in safetensors files of the dtype that is asked for. Raises StoreError: there is no such dtype."""
        known = [*FLOATS.values(), *[NARROW] * (self.to == "hf")]
        if self.dtype not in (None, *known):
            raise StoreError(f"`dtype={self.dtype}`: choose from {', '.join(known)}")
        return next((name for name, kind in FLOATS.items() if kind == self.dtype), None)

    def layout(self, config: ModelConfig) -> Layout:
        """Return the layout that is asked for, of a model. Raises StoreError: all reasons why it cannot be split so."""
        if low := below_1(tp=self.tp, pp=self.pp, ep=self.ep, etp=self.etp, chunks=self.chunks):
            raise StoreError("\n".join(low))
        mesh = MeshShape(pp=self.pp, ep=self.ep, tp=self.tp)
        problems = mesh_problems(config.sizes, mesh, self.etp)
        given = None if self.layers_per_stage is None else tuple(self.layers_per_stage)
        problems += layers_problems(config.sizes["layer"], mesh.pp, self.chunks, given)
        if problems:
            raise StoreError("\n".join(problems))
        return layout_of(config, mesh, self.chunks, given, split=split_of(self.etp))

    def refuse_layout(self, what: str) -> None:
        """Raise StoreError where a layout is asked for of something that has none."""
        if self.layers_per_stage or max(self.tp, self.pp, self.ep, self.etp, self.chunks) > 1:
            raise StoreError(
                f"{what} has no layout: leave out `tp`, `pp`, `ep`, `etp`, `chunks` and the like, or make a checkpoint "
                "by `to=megacore`"
            )

    def planned(self, source: WeightFolder, of_hugging_face: Callable[[int], FolderPlan] | None = None) -> FolderPlan:
        """Return the plan of what a source becomes. ``of_hugging_face``: plans what is asked for beside a checkpoint,
        given the most bytes of a file. Raises StoreError: it cannot be planned, or arguments are of another format."""
        if self.to == "megacore":
            if self.max_shard_size is not None:
                raise StoreError(
                    "`max_shard_size` is for `to=hf`: a checkpoint has one file per coordinate of its layout"
                )
            return to_checkpoint(source, self.layout(source.config), self.stored_dtype)
        self.refuse_layout("a Hugging Face folder")
        size = parse_size(self.max_shard_size or SHARD_SIZE)
        dtype = self.stored_dtype
        plan = to_hugging_face(source, size, dtype) if of_hugging_face is None else of_hugging_face(size)
        return in_block_fp8(plan, source.config) if self.dtype == NARROW else plan


@dataclass(frozen=True)
class MadeFile:
    """A file of tensors: its path in the folder, its bytes, and how many tensors it has."""

    path: str
    bytes: int
    tensors: int


@dataclass(frozen=True)
class MadeFolder:
    """A folder that was made, or with ``dry_run`` is yet to be; ``written`` says which. ``kind``: what it is, in words;
    ``parameters``: those of what it holds; ``bytes``: those of all files but the small ones of JSON; ``files``: its
    files of tensors."""

    path: Path
    written: bool
    kind: str
    parameters: int
    bytes: int
    files: tuple[MadeFile, ...]

    @property
    def tensors(self) -> int:
        """Tensors of all files; a tensor of which several files have parts counts in each."""
        return sum(file.tensors for file in self.files)

    def __str__(self) -> str:
        number = len(self.files)
        return (
            f"{self.path}: {self.kind}, {self.parameters:,} parameters and {self.bytes:,} bytes in "
            f"{number} file{'s' * (number > 1)} of weights"
        )

    def as_data(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        files = [asdict(file) for file in self.files]
        return {"target": str(self.path), "written": self.written, "bytes": self.bytes, "files": files}


def make_folder(
    plan: FolderPlan,
    source: Path,
    target: Path,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress = unseen,
) -> MadeFolder:
    """Write what is planned of a source, with so many threads (None: two per core) -> what was made. Raises StoreError:
    as :meth:`FolderPlan.write`, or the target lies in the source."""
    check_beside(source, target)
    if not dry_run:
        with progress(plan.size, target.name) as done:
            plan.write(target, threads(jobs), done)
    files = tuple(MadeFile(file.path, file.size, len(file.tensors)) for file in plan.files)
    return MadeFolder(target, not dry_run, plan.kind, plan.schema.parameters, plan.size, files)


def check_beside(source: Path, target: Path) -> None:
    """Check that a target does not lie in its source. Raises StoreError: it does."""
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)):
        raise StoreError(f"{target} lies in {source}, which is only read: choose a folder beside it")


def threads(jobs: int | None) -> int:
    """Return the number of threads to read and write with; None: two per core. Raises StoreError: there would be
    none."""
    if low := below_1(jobs=jobs):
        raise StoreError(*low)
    # Half of the time a thread waits for the disk.
    return min(jobs or 2 * (os.cpu_count() or 1), MOST_JOBS)
