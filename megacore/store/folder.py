"""Opening a folder of weights, whichever format it has."""

from __future__ import annotations

from pathlib import Path

from megacore.store.checkpoint import Checkpoint
from megacore.store.hugging_face import HuggingFace
from megacore.store.index import INDEX
from megacore.store.strict_json import StoreError

Folder = Checkpoint | HuggingFace


def open_folder(path: Path) -> Folder:
    """A checkpoint of ours, or a Hugging Face folder.

    Raises:
        StoreError: it is neither, or is damaged.
    """
    if not path.is_dir():
        raise StoreError(f"{path} is not a folder")
    return Checkpoint.open(path) if (path / INDEX).exists() else HuggingFace.open(path)
