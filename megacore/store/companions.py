"""Files that travel with a model's weights, and which files of a folder from strangers are read at all."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path

from megacore.store.publish import copy_file, write_file
from megacore.store.strict_json import StoreError, read_json

TEMPLATES = "additional_chat_templates"
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    f"{TEMPLATES}/*.jinja",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""What text needs to become tokens and back, how to generate, and the terms of use, which licences want to see passed
on. Not the model card: it describes the model that the weights were, with its results. And no code."""

LARGEST = 256 << 20
"""Bytes of such a file; those of the largest tokenizers have a tenth of it."""


def inside(folder: Path, name: str | Path) -> Path:
    """A file of a folder, whose links may lead to another file of the folder.

    The hub's cache counts as one: there, files in ``snapshots/REVISION`` are links to those in ``blobs``.

    Raises:
        StoreError: its links lead out, so that whoever made the folder would have us read what is not theirs.
    """
    root, target = (Path(os.path.realpath(path)) for path in (folder, folder / name))
    homes = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if target.exists() and not any(target.is_relative_to(home) for home in homes):
        raise StoreError(f"{folder / name} leads to {target}, outside of {root}: put the file itself there")
    return folder / name


def travelling(folder: Path) -> list[str]:
    """The names of the companions in a folder, those that are links to nothing among them."""
    # Not by glob, which passes over links to nothing.
    found = itertools.chain(folder.iterdir() if folder.is_dir() else (), (folder / TEMPLATES).glob("*"))
    each = (file.relative_to(folder) for file in found)
    return sorted(str(name) for name in each if any(name.match(pattern) for pattern in COMPANIONS))


def companions(folder: Path, root: Path) -> Mapping[str, Path]:
    """{name within the folder: file} of those that travel along.

    Args:
        folder: Which they lie in.
        root: The folder of the model, which their links may not leave.

    Raises:
        StoreError: links do, or a file is too large for what it is called.
    """
    within = folder.relative_to(root)
    found = {name: inside(root, within / name) for name in travelling(folder) if (folder / name).is_file()}
    for file in found.values():
        if (size := file.stat().st_size) > LARGEST:
            raise StoreError(f"{file} has {size} bytes, and no file that goes with a model has more than {LARGEST}")
    return found


def copy_companion(file: Path, path: Path) -> None:
    """Copy a companion into a folder; of a tokenizer's config, all but the name of code to load it with.

    Raises:
        StoreError: it cannot be read or written.
    """
    found = read_json(file) if path.name == "tokenizer_config.json" else None
    if isinstance(found, dict) and found.pop("auto_map", None) is not None:
        write_file(path, json.dumps(found, indent=2, ensure_ascii=False).encode() + b"\n")
    else:
        copy_file(file, path)
