"""DeepSpeed's universal checkpoints: a folder ``zero`` with one for each weight, in which ``torch.save`` wrote it in
fp32 and each state of its optimizer. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megacore.store.io.files import open_file
from megacore.store.tensor_files.distributed import DistributedFiles, PartedTensor, StoredPart, saved_at
from megacore.store.tensor_files.tensors import os_errors
from megacore.store.tensor_files.torch_files import SavedTensor, numbers_of, read_saved

ZERO = "zero"
_STATES = {"fp32": "", "exp_avg": ".exp_avg", "exp_avg_sq": ".exp_avg_sq", "step": ".step"}
_COMMON = f"{ZERO}/optimizer_state.pt"
_TENSOR = "param"
"""What a tensor is by, where how it was put together is beside it: it is whole."""


def open_universal(path: Path) -> DistributedFiles:
    """Open a universal checkpoint, each of whose files is a tensor of one part: {name of a weight: its fp32}, and the
    states of its optimizer as torch's own optimizers name them. Raises StoreError: a file is damaged."""
    tensors, values, sizes = dict[str, PartedTensor](), dict[str, StoredPart](), dict[str, int]()
    for name, file in _files(path):
        with os_errors(path / file), open_file(path / file, path) as opened:
            part = StoredPart((), (), file, 0, opened.seek(0, 2))
            saved = saved_at(opened, str(path / file), part, _TENSOR)
        sizes[file] = part.length
        if isinstance(saved, SavedTensor):
            part = StoredPart((0,) * len(saved.shape), saved.shape, file, 0, part.length)
            tensors[name] = PartedTensor(saved.dtype, saved.shape, (part,))
        else:
            values[name] = part
    updates = None if any(name.endswith(_STATES["step"]) for name in (*tensors, *values)) else _updates(path)
    kind = "a universal checkpoint of DeepSpeed"
    return DistributedFiles(path, tensors, values, sizes, kind, updates, flat=True, key=_TENSOR)


def is_universal(path: Path) -> bool:
    """Return whether a folder is a universal checkpoint."""
    return any(path.glob(f"{ZERO}/*/fp32.pt"))


def _files(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, file) of all weights and states that are there."""
    with os_errors(path / ZERO):
        for folder in sorted(each for each in (path / ZERO).iterdir() if each.is_dir()):
            for state, end in _STATES.items():
                if (folder / f"{state}.pt").exists():
                    root = "optimizer.state." if end else ""
                    yield f"{root}{folder.name}{end}", f"{ZERO}/{folder.name}/{state}.pt"


def _updates(path: Path) -> frozenset[Any]:
    """Return what the groups of weights say, where the weights themselves say nothing."""
    where = path / _COMMON
    if not where.exists():
        return frozenset()
    with os_errors(where), open_file(where, path) as file:
        common = read_saved(file, where, 0, file.seek(0, 2), any_names=True)
        return frozenset(numbers_of(common, ("step",), file, where))
