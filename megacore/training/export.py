"""Export of a finished run: its last checkpoint, or its best, in Hugging Face's format."""

from __future__ import annotations

import os
from pathlib import Path

from megacore import checkpoints
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.store.conversions.adapters import to_peft
from megacore.store.conversions.conversion import to_hugging_face
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.checkpoint import Checkpoint
from megacore.store.weight_folders.hugging_face_files import SHARD_SIZE, parse_size


def export(config: Config, step: int, last: int) -> str:
    """Make ``checkpoint.export`` -> what to tell of it. One process does so, while no other writes checkpoints.

    Of a run that has trained adapters it is a folder of the peft library.

    Args:
        step: The last step that was done.
        last: The one that ends the run; where steps are left, nothing is exported.

    Raises:
        StoreError: there is no checkpoint of that step, or none with the loss of an evaluation where the best is
            asked for, or the folder cannot be made.
    """
    target = Path(str(config.checkpoint.export))
    folder = checkpoints.folder_of(config.out, config.checkpoint.folder)
    if step < last:
        return f"  not exported     {target} (step {step} of {last})"
    if config.checkpoint.resume == AUTO and target.is_dir() and any(target.iterdir()):
        return f"  not exported     {target} (it is there already, and stays as it is)"
    found = checkpoints.complete(folder)
    chosen = checkpoints.best(found) if config.checkpoint.best else last
    if chosen is None or chosen not in found:
        which = "with the loss of an evaluation" if chosen is None else f"of step {chosen}"
        raise StoreError(f"cannot export to {target}: there is no checkpoint {which} in {folder}")
    checkpoint = found[chosen]
    opened = Checkpoint.open(checkpoint)
    adapters = opened.index.adapters is not None
    plan = to_peft(opened) if adapters else to_hugging_face(opened, parse_size(SHARD_SIZE))
    try:
        plan.write(target, os.cpu_count() or 1)
    except StoreError as error:
        way_out = f"`megacore convert {checkpoint} {target} --to {'peft' if adapters else 'hf'}` does it again"
        raise StoreError(f"cannot export {checkpoint}: {error}\n{way_out}") from error
    return f"  exported         {target}{f' (of step {chosen}, the best)' * config.checkpoint.best}"
