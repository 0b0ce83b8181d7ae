"""Choosing weights by the patterns of their names, and what of a model is trained. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from megacore.parallel.weights.schema import Param, Schema

PROJECTOR = "projector."
"""The beginning of the names of what connects the tower of a model that also sees to its text model."""
_LAYER = "{layer}."
_LOCAL, _WIDE, _THEN = "local_", "wide_", "then."
_PARTS = ("experts", "router")
"""Parts of a mixture of experts that are known by these words alone."""


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Return whether one of the names, or the part of it before one of its dots, is of the pattern (as a shell's)."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for name in names)


def unmatched(key: str, patterns: Sequence[str], known: Sequence[Sequence[str]]) -> list[str]:
    """Return a problem for each pattern that matches nothing, with the nearest of the names.

    Args:
        key: The recipe's key that holds the patterns.
        known: The names of each thing that can be matched.
    """
    names = list(dict.fromkeys(part for names in known for name in names for part in _parts(name)))
    found = []
    for pattern in patterns:
        if not any(matches(pattern, each) for each in known):
            near = get_close_matches(pattern, names, n=3) or names[:8]
            found.append(f"{key}: {pattern!r} matches nothing: choose from {', '.join(near)}, ...")
    return found


def _parts(name: str) -> Iterator[str]:
    """Return the parts of a name before each of its dots, and all of it."""
    return itertools.accumulate(name.split("."), lambda before, word: f"{before}.{word}")


def in_block(name: str) -> str:
    """Return what a name says after its layer, ``attn.qkv.weight``; all of it where there is none."""
    return name.partition(_LAYER)[2] or name


def without_block(name: str) -> tuple[str, ...]:
    """Return the names of a part of a block without its layer: ``attn.qkv``, of layers with windows ``local_attn.qkv``
    too, as ``mlp.up`` is ``wide_mlp.up`` and ``then.mlp.up``; ``mlp.experts.up`` and ``experts.up``."""
    short = name.partition(".")[2]
    alike = {name: None, name.removeprefix(_THEN).removeprefix(_LOCAL).removeprefix(_WIDE): None}
    return (*alike, short) if short.partition(".")[0] in _PARTS else (*alike,)


def tensors(schema: Schema) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each tensor of a model, and the names by which it can be chosen: with its layer, and
    without."""
    for param in schema.params:
        for name in whole_names(schema, param):
            yield name, (name, *without_block(in_block(param.name)))


def whole_names(schema: Schema, param: Param) -> Iterator[str]:
    """Return the names of a parameter's tensors, all that stands in braces filled in."""
    return (param.name.format(**index) for index in schema.indices(param, param.name))


def buffers(schema: Schema) -> Iterator[str]:
    """Return the names of the tensors that get no gradient."""
    return (name for param in schema.params if param.buffer for name in whole_names(schema, param))


def matrices(schema: Schema) -> Iterator[str]:
    """Return the names of the tensors that may be updated as whole matrices."""
    return (name for param in schema.params if param.is_matrix for name in whole_names(schema, param))


def frozen(schema: Schema, only: Sequence[str] | None, freeze: Sequence[str]) -> frozenset[str]:
    """Return the tensors that are not trained: buffers, those of ``freeze``, and those that are not of ``only`` (None:
    all are)."""
    still = frozenset(buffers(schema))
    if only is None and not freeze:
        return still
    return frozenset(
        name
        for name, names in tensors(schema)
        if name in still
        or (only is not None and not any(matches(each, names) for each in only))
        or any(matches(each, names) for each in freeze)
    )


def problems(schema: Schema, only: Sequence[str] | None, freeze: Sequence[str]) -> list[str]:
    """Return what is wrong with ``train.only`` and ``train.freeze``."""
    known = [names[::-1] for _, names in tensors(schema)]
    found = [*unmatched("train.only", only or (), known), *unmatched("train.freeze", freeze, known)]
    if not found and len(frozen(schema, only, freeze)) == len(known):
        found.append("train.only and train.freeze leave nothing to train: freeze less")
    return found
