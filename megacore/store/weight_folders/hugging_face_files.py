"""A folder in Hugging Face's format as a target: which files, which tensors in each, and the JSON beside them.

Nothing is read or written here; the files are named and cut as ``save_pretrained`` does it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from megacore.models.names import PROJECTOR
from megacore.models.registry import family
from megacore.models.wrappers import Naming, rewrapped, unwrapped
from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Stored, hugging_face
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.tensor_files.tensors import DTYPES
from megacore.store.weight_folders.hugging_face import CONFIG, INDEX, WEIGHTS

Shard = tuple[str, tuple[Stored, ...]]
"""(file name, its tensors)."""

SHARD_SIZE = "5GB"
"""The largest size of a weight file, where nothing else is asked for."""

CODE = ("auto_map", "attn_implementation")
"""Fields that may name code, in the folder or on the hub."""

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as ``5GB``, ``1.5 GiB`` or ``1000000``; a GB has 1000^3 bytes, a GiB
    1024^3. Raises StoreError: it is not a size."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    if not match or match[2].upper() not in _UNITS:
        raise StoreError(f"{text!r} is not a size: write 5GB, 500MB, 2GiB or a number of bytes")
    size = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise StoreError(f"a size of {text!r} holds nothing: write 5GB, 500MB, 2GiB or a number of bytes")
    return size


def named(schema: Schema, raw: Mapping[str, Any], naming: Naming | None = None) -> list[Stored]:
    """Return the tensors by the names that the class gives them which ``config.json`` names: those of a base model that
    was saved by itself lack their prefix. One whose head is another tensor is not such a model. ``naming``: that of the
    larger model that they are a part of."""
    kind, stored = family(raw["model_type"]).config, list(hugging_face(schema, copies=True))
    if naming is not None:
        theirs = (each.name if each.param.startswith(PROJECTOR) else naming.outside(each.name) for each in stored)
        return [replace(each, name=name) for each, name in zip(stored, theirs, strict=True)]
    prefix = f"{kind.base_model_prefix}."
    if raw.get("architectures") != [kind.base_architecture()] or kind.tied[1] in {each.name for each in stored}:
        return stored
    bare = {each.name: kind.base_names.get(each.name, each.name.removeprefix(prefix)) for each in stored}
    return [replace(each, name=bare[each.name]) for each in stored]


def export_files(tensors: Iterable[Stored], dtypes: Mapping[str, str], max_shard_bytes: int) -> list[Shard]:
    """Return the weight files, in the order of the family's table. ``dtypes``: {Hugging Face's tensor name: safetensors
    dtype}; ``max_shard_bytes``: the most that the tensors of a file take; a larger tensor has a file of its own."""
    shards: list[list[Stored]] = []
    room = 0
    for stored in tensors:
        size = _bytes(stored, dtypes)
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(stored)
        room -= size
    stem, _, extension = WEIGHTS.partition(".")
    names = [f"{stem}-{i:05d}-of-{len(shards):05d}.{extension}" for i in range(1, len(shards) + 1)]
    return list(zip([WEIGHTS] if len(shards) == 1 else names, map(tuple, shards), strict=True))


def texts(
    raw: Mapping[str, Any],
    schema: Schema,
    shards: Sequence[Shard],
    dtypes: Mapping[str, str],
    whole: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """Return {file name: content} of what goes with the weight files: ``config.json``, and the index of several.
    ``whole``: the fields of the larger model's, where ``raw`` is of a part."""
    made = {CONFIG: config_json(raw) if whole is None else whole_config_json(whole, raw)}
    return made | {INDEX: index_json(schema, shards, dtypes)} if len(shards) > 1 else made


def config_json(raw: Mapping[str, Any]) -> bytes:
    """Return a ``config.json`` with all fields of ``raw`` but the names of code, and a class to load where none is
    named."""
    kind = family(raw["model_type"]).config
    raw = {key: value for key, value in raw.items() if key not in CODE}
    return _json({**kind.as_written(raw), "architectures": raw.get("architectures") or [kind.architecture]})


def whole_config_json(whole: Mapping[str, Any], raw: Mapping[str, Any]) -> bytes:
    """Return the ``config.json`` of a larger model, in which the fields of its text part are those of ``raw``; the
    names of code are left out."""
    unknown = family(raw["model_type"]).config.unknown(unwrapped(whole)[0])
    return _json(_without_code(rewrapped(whole, raw, unknown)))


def _without_code(fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in fields.items() if key not in CODE}
    return {key: _without_code(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def with_dtype(raw: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the fields of a ``config.json`` after all weights were converted to a safetensors dtype."""
    names = [name for name in ("dtype", "torch_dtype") if name in raw] or ["dtype"]
    return {**raw, **dict.fromkeys(names, FLOATS[dtype])}


def index_json(schema: Schema, shards: Sequence[Shard], dtypes: Mapping[str, str]) -> bytes:
    """Return the index of several files."""
    tensors = [stored for _, own in shards for stored in own]
    return _json(
        {
            "metadata": {
                "total_parameters": schema.parameters,
                "total_size": sum(_bytes(stored, dtypes) for stored in tensors),
            },
            "weight_map": dict(sorted((stored.name, name) for name, own in shards for stored in own)),
        }
    )


def _bytes(stored: Stored, dtypes: Mapping[str, str]) -> int:
    return math.prod(stored.shape) * DTYPES[dtypes[stored.name]].itemsize


def _json(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree, indent=2, allow_nan=False).encode() + b"\n"
