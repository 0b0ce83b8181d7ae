"""Files that travel with a model's weights, and which files of a folder from strangers are read at all."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path

from megacore.parallel import limits
from megacore.store.io.files import open_file
from megacore.store.io.strict_json import StoreError, parse_json
from megacore.store.tensor_files.publish import write_file
from megacore.store.tensor_files.tensors import os_errors

TEMPLATES = "additional_chat_templates"
TEXT = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v*",
    "tekken.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "*.tiktoken", "tiktoken.model", "chat_template.jinja", "chat_template.json", f"{TEMPLATES}/*.jinja",
)  # fmt: skip
"""Files that text needs to become tokens and back, and those that say how to generate."""
SIGHT = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that say how images become what a model sees."""
COMPANIONS = (*TEXT, *SIGHT, "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Those files and the terms of use, which licences want to see passed on. Not the model card: it describes the model
that the weights were, with its results. And no code."""

_NAMES = re.compile(r"auto_map|init_inputs|\w*_files?")
"""Fields of a tokenizer's or processor's config that name code, or files wherever they are."""


@dataclass(frozen=True)
class Companion:
    """A file that travels with a model. ``root``: the folder that its links may not leave; None where the user has
    named the file."""

    path: Path
    root: Path | None = None
    content: bytes | None = field(default=None, repr=False)

    def held(self) -> Companion:
        """Return the file with its content, which outlives the file; errors as of :meth:`open`."""
        return self if self.content is not None else replace(self, content=self.read())

    def open(self) -> BufferedReader:
        """Open the file to be read. Raises StoreError: it cannot be, its links lead out, or it is too large for what it
        is called."""
        with os_errors(self.path):
            file = open_file(self.path, self.root)
            if (size := _size(file)) > limits.COMPANION:
                file.close()
                raise StoreError(
                    f"{self.path} has {size} bytes, and no file that goes with a model has more than "
                    f"{limits.COMPANION} (if it is sound, raise the limit in parallel/limits.py)"
                )
            return file

    def read(self) -> bytes:
        """Return its content; errors as of :meth:`open`."""
        if self.content is not None:
            return self.content
        with self.open() as file, os_errors(self.path):
            return file.read(limits.COMPANION)

    @property
    def size(self) -> int:
        with self.open() as file:
            return _size(file)


def _size(file: BufferedReader) -> int:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size


def travelling(folder: Path, patterns: Sequence[str] = COMPANIONS) -> list[str]:
    """Return the names of the companions in a folder that match a pattern, links to nothing among them."""
    # Not by glob, which passes over links to nothing.
    found = itertools.chain(folder.iterdir() if folder.is_dir() else (), (folder / TEMPLATES).glob("*"))
    each = (file.relative_to(folder) for file in found)
    return sorted(str(name) for name in each if any(name.match(pattern) for pattern in patterns))


def companions(folder: Path, root: Path, patterns: Sequence[str] = COMPANIONS) -> Mapping[str, Companion]:
    """Return {name within the folder: file} of those that travel along. ``root``: the folder of the model, which their
    links may not leave. Raises StoreError: links do, or a file is too large for what it is called."""
    found = {name: Companion(folder / name, root) for name in travelling(folder, patterns) if (folder / name).is_file()}
    for companion in found.values():
        companion.open().close()
    return found


def copy_companion(file: Companion, path: Path, durable: bool = True) -> None:
    """Copy a companion into a folder; of a config, all but the names of code and files to load it with.
    Raises StoreError: it cannot be read or written."""
    data = file.read()
    if path.name in ("tokenizer_config.json", *SIGHT):
        found = parse_json(data, file.path, wide=True)
        fields = found if isinstance(found, dict) else {}
        kept = {key: value for key, value in fields.items() if value is None or not _NAMES.fullmatch(key)}
        if len(kept) < len(fields):
            data = (json.dumps(kept, indent=2) + "\n").encode()
    with os_errors(path):
        path.parent.mkdir(exist_ok=True)
    write_file(path, data, durable)
