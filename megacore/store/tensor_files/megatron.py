"""Megatron-Core's checkpoints of the format ``torch_dist``: those of torch.distributed.checkpoint, beside which
``common.pt`` has what all ranks share. No torch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from megacore.store.io.files import open_file
from megacore.store.tensor_files.distributed import DistributedFiles
from megacore.store.tensor_files.tensors import os_errors
from megacore.store.tensor_files.torch_files import numbers_of, read_saved

COMMON = "common.pt"
_STATE = re.compile(r"(.*\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
_STEPS = ("step", "common_step")
_OF_OPTIMIZER = ".optimizer/"


def open_megatron(path: Path) -> DistributedFiles:
    """Open a checkpoint, with the states of its optimizer as torch's own name them: ``<weight>.exp_avg``, and
    ``<weight>.master`` for weights in fp32. Raises StoreError: as of :meth:`DistributedFiles.open`, or ``common.pt`` is
    damaged."""
    source = DistributedFiles.open(path)
    tensors = {_renamed(name): tensor for name, tensor in source.tensors.items()}
    with os_errors(path / COMMON), open_file(path / COMMON, path) as file:
        where = path / COMMON
        common = read_saved(file, where, 0, file.seek(0, 2), any_names=True)
        updates = {*numbers_of(common.get("optimizer") if isinstance(common, dict) else None, _STEPS, file, where)}
    for name in source.values:
        if _OF_OPTIMIZER in name:  # as each group of ranks has it, of the optimizer that is split over them
            updates.update(source.numbers(name, _STEPS))
    unread = any(name.startswith("optimizer.distributed.") for name in source.tensors) and tensors == source.tensors
    return replace(
        source,
        tensors=tensors,
        kind="a checkpoint of Megatron-Core",
        updates=frozenset(updates),
        unread="they lie in the buckets of its distributed optimizer, whichever weights these are of: with "
        "--dist-ckpt-optim-fully-reshardable Megatron saves them by weight" * unread,
    )


def has_states(source: DistributedFiles) -> bool:
    """Return whether there are states of Megatron-Core's optimizer, by weight."""
    return any(_renamed(name) != name for name in source.tensors)


def _renamed(name: str) -> str:
    if (found := _STATE.fullmatch(name)) is None:
        return name
    root, kind, weight = found.groups(default="")
    return f"{root}optimizer.state.{weight}.{'master' if kind.endswith('param') else kind}"
