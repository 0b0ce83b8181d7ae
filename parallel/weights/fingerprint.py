"""Fingerprints of logical pieces that add up over boxes, so that shards can be compared without putting them together.

The bits of the elements are read as unsigned integers v, and a piece has the sum of v times a weight of its place,
modulo 2^64. A place's weight is the product of odd numbers, one drawn for each of its coordinates; along the last axis
the elements of 64 bits share one, shifted to each. So the sum over any boxes that tile a piece is that of the piece,
and a changed element always changes it. Exchanged rows, columns or runs of elements do unless numbers collide by
chance. Two single elements that differ in their top bits alone may be exchanged unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np

from megacore.parallel.weights.schema import Schema
from megacore.parallel.weights.transfer import Stored, whole_name

MODULUS = 1 << 64

Logical = tuple[str, str]
"""(our name of the whole tensor, its layer filled in; label): a logical piece."""


class ReplicasDiffer(ValueError):
    """Replicas, which hold the same elements, differ."""

    def __init__(self, differ: Sequence[tuple[Logical, object]]) -> None:
        where = ", ".join(f"{spell(piece)} in {holder}" for piece, holder in differ)
        super().__init__(f"replicas of the same elements differ: {where}")
        self.pieces = {piece for piece, _ in differ}


def spell(piece: Logical) -> str:
    """Return a piece as people read it: ``layers.0.attn.qkv.weight (q)``."""
    name, label = piece
    return f"{name} ({label})" if label else name


def fingerprint(bits: np.ndarray, axes: Sequence[str], starts: Mapping[str, int]) -> int:
    """Return the fingerprint of one box of a piece.

    Args:
        bits: Unsigned integers, one dimension per axis in the order of the piece's sentence; any strides.
        axes: Their names.
        starts: The start of the box, for each axis.
    """
    if not axes:
        return int(bits[()])
    total = _words(bits, starts[axes[-1]])
    first = starts[axes[-1]] * bits.itemsize // 8
    for axis, start in zip(reversed(axes), (first, *(starts[axis] for axis in reversed(axes[:-1]))), strict=True):
        total = np.einsum("...i,i->...", total, _weights(axis, start, start + total.shape[-1]))
    return int(total)


def add_up(schema: Schema, of_boxes: Iterable[tuple[Stored, Mapping[str, int]]]) -> dict[Logical, int]:
    """Return the fingerprints of the logical pieces from those of their boxes: {label: fingerprint} of each stored
    tensor.

    Raises:
        ReplicasDiffer: replicas, which hold the same box, differ; the message names all of them.
    """
    boxes: dict[Logical, dict[tuple[tuple[int, int], ...], int]] = {}
    differ: list[tuple[Logical, object]] = []
    for stored, of in of_boxes:
        name, sentence = whole_name(schema, stored), schema[stored.param].sentence
        for label, value in of.items():
            box = tuple(stored.box[axis] for axis in sentence.piece_axes(label))
            if boxes.setdefault((name, label), {}).setdefault(box, value) != value:
                differ.append(((name, label), stored.where))
    if differ:
        raise ReplicasDiffer(differ)
    return {piece: sum(of.values()) % MODULUS for piece, of in boxes.items()}


def of_layers(schema: Schema, stored: Stored, known: Mapping[Logical, int]) -> dict[Logical, int]:
    """Return what :func:`add_up` says of a tensor that holds those of several layers: the sum of what is known of each;
    nothing of a piece where that is not all."""
    name, found = schema[stored.param].name, dict[Logical, int]()
    for label in stored.labels:
        pieces = [(name.format(layer=layer), label) for layer in range(*stored.box["layer"])]
        if known.keys() >= {*pieces}:
            found[whole_name(schema, stored), label] = sum(known[piece] for piece in pieces) % MODULUS
    return found


def combined(fingerprints: Mapping[Logical, int]) -> int:
    """Return one 64-bit number for all pieces of a model: the same for equal weights, wherever they lie."""
    lines = "\n".join(f"{spell(piece)} {value:016x}" for piece, value in sorted(fingerprints.items()))
    return int.from_bytes(hashlib.blake2b(lines.encode(), digest_size=8).digest(), "little")


def _words(bits: np.ndarray, start: int) -> np.ndarray:
    """Return the elements along the last axis as 64-bit words, with zeros around them if the box begins or ends in a
    word."""
    per_word = 8 // bits.itemsize
    before = start % per_word
    length = bits.shape[-1]
    words = -(-(before + length) // per_word)
    aligned = all(n % 8 == 0 for n in (bits.ctypes.data, *bits.strides[:-1]))
    if not before and words * per_word == length and bits.strides[-1] == bits.itemsize and aligned:
        return bits.view(np.uint64)
    padded = np.zeros((*bits.shape[:-1], words * per_word), bits.dtype)
    padded[..., before : before + length] = bits
    return padded.view(np.uint64)


@lru_cache(maxsize=32)  # boxes of many tensors are alike
def _weights(axis: str, start: int, stop: int) -> np.ndarray:
    """Return an odd 64-bit number for each coordinate: Steele, Lea and Flood's SplitMix64 (2014) from the axis' own
    seed."""
    x = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_seed(axis))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@cache
def _seed(axis: str) -> int:
    return int.from_bytes(hashlib.blake2b(axis.encode(), digest_size=8).digest(), "little")
