"""Files whose experts lie in mxfp4, as gpt-oss is published: read as the floats that they stand for.

Stacked matrices ``NAME`` [experts, in, out] lie transposed, as ``NAME_blocks`` [experts, out, in / 32, 16]: bytes of
two numbers in e2m1, the lower half first. ``NAME_scales`` [experts, out, in / 32] has the exponent of each 32, plus
127.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megacore.models.quantization import Mxfp4
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.accounting import TensorInFile, alike, tensors_of
from megacore.store.tensor_files.dtypes import dtype_named
from megacore.store.tensor_files.quantised_files import Box, QuantisedWeight, halves, shown
from megacore.store.tensor_files.tensors import TensorFile

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS, _SCALES, _BLOCK = "_blocks", "_scales", 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_MAGNITUDES, *(-number for number in _MAGNITUDES)], np.float32)
_FACTORS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
"""What an exponent multiplies by; the last one stands for no number."""
_LARGEST = 252
"""The largest exponent, plus 127, with which each number in e2m1 is one of fp32."""
_COLUMNS = 64
"""Of a matrix as it is shown, which are computed at once: whole lines of a cache are written."""


def decoded(files: Sequence[TensorFile], how: Mxfp4) -> tuple[tuple[TensorFile, ...], list[str]]:
    """Return (the files as they are read, blocks with their scales as one tensor, problems)."""
    tensors, quantised, problems = tensors_of(files), dict[str, QuantisedWeight](), list[tuple[str, str]]()
    parts = {name for name in tensors if name.endswith((_BLOCKS, _SCALES))}
    for name in sorted({name.removesuffix(_BLOCKS).removesuffix(_SCALES) for name in parts}):
        blocks, scales = tensors.get(name + _BLOCKS), tensors.get(name + _SCALES)
        if blocks is None or scales is None:
            problems.append((f"there are {_BLOCKS} or {_SCALES} alone", name))
            continue
        if name in tensors:
            problems.append((f"it is there by itself, and as {_BLOCKS} and {_SCALES} too", name))
            continue
        shape, said = blocks.entry.shape, (blocks.entry.dtype, scales.entry.dtype)
        if said != ("U8", "U8") or len(shape) != 4 or shape[3] != _BLOCK // 2 or scales.entry.shape != shape[:3]:
            given = f"{list(shape)} in {said[0]} with scales {list(scales.entry.shape)} in {said[1]}"
            problems.append(
                (f"{given}: it must be [experts, out, in / 32, 16] and [experts, out, in / 32], in U8", name)
            )
            continue
        made = shape[0], shape[2] * _BLOCK, shape[1]
        quantised[name] = _StackedExperts(blocks, made, dtype_named(how.dtype), scales)
    return shown(files, quantised, parts), alike(problems)


@dataclass(frozen=True)
class _StackedExperts(QuantisedWeight):
    scales: TensorInFile

    def fill(self, floats: Tensor, box: Box) -> None:
        import torch

        experts, (top, bottom), (left, right) = box
        first, last = top // _BLOCK, -(-bottom // _BLOCK)
        blocks, exponents, pairs = self.stored.bits, self.scales.bits, halves(_NUMBERS, higher_first=False)
        for expert in range(*experts):
            for start in range(left, right, _COLUMNS):
                columns = slice(start, min(start + _COLUMNS, right))
                values = pairs.take(blocks[expert, columns, first:last]).view(np.float32)
                scales = exponents[expert, columns, first:last]
                with np.errstate(over="ignore"):
                    values *= _FACTORS[scales, None]
                if scales.max(initial=0) > _LARGEST and not np.isfinite(values).all():
                    raise StoreError(f"{self.scales}: a scale is no number, or one of numbers too large: it is damaged")
                rows = torch.from_numpy(values.reshape(len(values), -1)).to(floats.dtype)
                floats[expert, first * _BLOCK : last * _BLOCK, columns] = rows.t()
