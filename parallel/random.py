"""Random numbers that depend on what they are for, never on which rank draws them.

Initial weights: every block of a logical piece has a counter-based generator of its own, keyed by (seed, tensor, label,
block), so that each mesh starts from bitwise the same model and a rank draws little more than what it holds.
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np

from megacore.parallel.weights.layout import Layout, Shard
from megacore.parallel.weights.schema import SPLIT

_BLOCK = 1 << 16


def key(*words: object) -> int:
    """Return a 64-bit key of some words, the same in every process and release."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little")


def initial_values(layout: Layout, shard: Shard, label: str, seed: int) -> np.ndarray:
    """Return the initial values of one piece of a shard: float32 [one dimension per axis of the piece]; padding is
    zero."""
    param = shard.param
    piece = shard.piece(label)
    values = np.zeros(piece.shape, np.float32)
    box = [shard.box[axis] for axis in piece.axes]
    sizes = [layout.schema.sizes[axis] for axis in piece.axes]
    if param.below:  # rows of numbers that are equally far apart; nobody splits it
        rows, width = piece.shape
        generator = np.random.Generator(np.random.Philox(key=key(seed, shard.name, label)))
        first = generator.integers(param.below, size=(rows, 1))
        return ((first + np.arange(width) * (param.below // width)) % param.below).astype(np.float32)
    if not param.std:
        real = (slice(0, max(0, min(stop, size) - start)) for (start, stop), size in zip(box, sizes, strict=True))
        values[tuple(real)] = param.mean
        return values
    # Blocks cut the axes that a mesh may split (experts, then heads, mlp, vocab), so that a rank can skip the others'.
    split = [i for i, axis in enumerate(piece.axes) if axis in SPLIT]
    row = int(np.prod([size for i, size in enumerate(sizes) if i not in split], dtype=np.int64))
    steps = [max(1, _BLOCK // row) if i == split[-1] else 1 for i in split]
    # A rank that holds nothing but padding draws nothing.
    starts = [
        range(box[i][0] // step * step, min(box[i][1], sizes[i]), step) if box[i][0] < sizes[i] else range(0)
        for i, step in zip(split, steps, strict=True)
    ]
    for block in itertools.product(*starts):
        low, high = [0] * len(sizes), list(sizes)
        for i, start, step in zip(split, block, steps, strict=True):
            low[i], high[i] = start, min(start + step, sizes[i])
        shape = [stop - start for start, stop in zip(low, high, strict=True)]
        generator = np.random.Generator(np.random.Philox(key=key(seed, shard.name, label, block)))
        if param.uniform:  # of mean 0 and standard deviation 1
            drawn = (generator.random(shape, np.float32) * 2 - 1) * np.float32(3**0.5)
        else:
            drawn = generator.standard_normal(shape, np.float32)
        hit = [(max(a, s), min(b, e)) for a, b, (s, e) in zip(low, high, box, strict=True)]
        inside = tuple(slice(start - s, stop - s) for (start, stop), (s, _) in zip(hit, box, strict=True))
        chosen = tuple(slice(start - a, stop - a) for (start, stop), a in zip(hit, low, strict=True))
        values[inside] = drawn[chosen] * np.float32(param.std) + np.float32(param.mean)
        if param.log:
            values[inside] = np.log(values[inside])
    return values
