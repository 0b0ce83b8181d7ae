"""JSON from files that nobody vouches for: no duplicate keys, no NaN, no endless numbers, no endless nesting."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from reprlib import Repr
from typing import Any

from megacore.parallel import limits
from megacore.store.io.errors import StoreError
from megacore.store.io.files import open_file

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def short(value: object) -> str:
    """Return the text to show of a value that may be of any size."""
    return _SHORT.repr(value)


def parse_json(data: bytes, where: object, wide: bool = False, infinite: bool = False) -> Any:
    """Return the value of a JSON text. Raises StoreError: it is not JSON, or only Python's relaxed idea of it.

    ``where``: the file, in words; ``wide``: whether whole numbers may have more than 64 bits, as the settings of
    tokenizers have 10^30 where there is no limit; ``infinite``: whether ``Infinity`` may stand there, as in a
    ``config.json`` of transformers 4; it is returned as transformers 5 writes it, ``{"__float__": "Infinity"}``.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
            raise StoreError(f"{where}: {', '.join(map(repr, twice))} stands twice in one object")
        return made

    def constant(name: str) -> dict[str, str]:
        if infinite and name == "Infinity":
            return {"__float__": name}
        raise StoreError(f"{where}: {name} is not JSON")

    def integer(text: str) -> int:
        if len(text) > 40 or not (wide or -(2**63) <= int(text) < 2**64):
            raise StoreError(f"{where}: {text[:40]} is an integer of more than 64 bits")
        return int(text)

    def number(text: str) -> float:
        if not math.isfinite(float(text)):
            raise StoreError(f"{where}: {text[:40]} is beyond the range of a float")
        return float(text)

    try:
        value = json.loads(
            data.decode(), object_pairs_hook=unique, parse_constant=constant, parse_int=integer, parse_float=number
        )
    except StoreError:
        raise
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where} is not JSON: {error}") from error
    if _is_deeper(value, limits.JSON_DEEPEST):
        raise StoreError(f"{where} is nested more than {limits.JSON_DEEPEST} levels deep")
    return value


def _is_deeper(value: object, levels: int) -> bool:
    inner = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        held = (each.values() if isinstance(each, dict) else each for each in inner)
        inner = [each for values in held for each in values if isinstance(each, dict | list)]
    return bool(inner)


def read_json(path: Path, root: Path | None = None, *, limit: int = limits.JSON, wide: bool = False) -> Any:
    """Return the value in a JSON file of at most ``limit`` bytes. ``root``: the folder that its links may not leave,
    see :func:`~megacore.store.io.files.open_file`. Raises StoreError: it cannot be read."""
    return parse_json(read_file(path, root, limit), path, wide, infinite=path.name == "config.json")


def read_file(path: Path, root: Path | None = None, limit: int = limits.JSON) -> bytes:
    """Read a file of at most ``limit`` bytes. Raises StoreError: it cannot be read."""
    try:
        with open_file(path, root) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > limit:
        raise StoreError(
            f"{path} has more than {limit:,} bytes, which no such file needs (if it is sound, raise the limit in "
            "parallel/limits.py)"
        )
    return data


def text_problem(value: object, what: str) -> str | None:
    """Return why a value is no text that can be encoded; None where it is one."""
    if not isinstance(value, str):
        return f"{what} is {kind_of(value)}, not text"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"{what} has the lone surrogate {value[error.start]!r} at {error.start}"
    return None


def kind_of(value: object) -> str:
    """Return the type of a JSON value, for a message."""
    return "null" if value is None else f"a {type(value).__name__}"
