"""Whether the disk of a node has room for what its ranks will keep there, before any of them starts. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from megacore.config import Config
from megacore.plan.of_config import setting_of
from megacore.plan.state import Held, state
from models.config import ModelConfig


def room_problems(config: Config, model: ModelConfig, world_size: int, local_ranks: int) -> Iterator[str]:
    """Of ``memory.offload_folder``; `megacore.problems` has nothing to say any more."""
    if config.memory.offload_folder is None:
        return
    folder = Path(config.memory.offload_folder)
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    setting = setting_of(config, model, world_size, "cuda")
    states = [state(held, setting) for held in Held.of(setting).stages]
    needed = local_ranks * max(each.masters + each.moments for each in states)
    free = shutil.disk_usage(there).free
    if needed > free:
        yield (
            f"memory.offload_folder ({folder}) has {free / 1e9:,.2f} GB free, and the optimizer's states of "
            f"{local_ranks} ranks take {needed / 1e9:,.2f} GB: free some, name another folder, share them out over "
            "more ranks (data.shard), or set optimizer.moments=bf16"
        )
