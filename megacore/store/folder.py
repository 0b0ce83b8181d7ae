"""Opening a folder of weights, whichever format it has."""

from __future__ import annotations

from pathlib import Path

from megacore.store.checkpoint import Checkpoint
from megacore.store.hugging_face import HuggingFace
from megacore.store.index import INDEX
from megacore.store.strict_json import StoreError

Folder = Checkpoint | HuggingFace


def open_folder(path: Path, adapters: bool = False) -> Folder:
    """A checkpoint of ours, or a Hugging Face folder.

    Args:
        path: The folder.
        adapters: Whether a checkpoint of adapters will do, which is no model by itself.

    Raises:
        StoreError: it is neither, or is damaged, or holds adapters.
    """
    if not path.is_dir():
        raise StoreError(f"{path} is not a folder")
    if not (path / INDEX).exists():
        return HuggingFace.open(path)
    checkpoint = Checkpoint.open(path)
    held = checkpoint.index.adapters
    if held is not None and not adapters:
        raise StoreError(
            f"{path} holds adapters (LoRA of rank {held.lora.rank}) of {held.base}, and no model: merge the two by "
            f"`megacore convert {path} FOLDER --to hf --base {held.base}` and take that folder"
        )
    return checkpoint
