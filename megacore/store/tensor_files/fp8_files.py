"""Files whose weights lie in fp8, a scale for each block of them: read as the floats that they stand for.

A weight ``NAME`` has its scales in ``NAME_scale_inv``, in the same file or another. Each number is the product of the
two in fp32, rounded once, as transformers has it; only what a view asks for is computed, a band of blocks at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megacore.models.quantization import BlockFp8
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.accounting import TensorInFile, alike, tensors_of
from megacore.store.tensor_files.dtypes import FLOATS, as_floats, dtype_named
from megacore.store.tensor_files.quantised_files import AT_ONCE, Box, QuantisedWeight, shown
from megacore.store.tensor_files.tensors import Bits, TensorFile

if TYPE_CHECKING:
    from torch import Tensor

FP8, SCALE = "F8_E4M3", "_scale_inv"
_LARGEST = 448
"""The largest number in e4m3."""
_LEAST = 1e-30
"""A block of smaller numbers is one of zeros: its scale would be none of fp32."""
_EXPONENTS = np.float32(2**8)  # e4m3 has a bias of 7, and fp16 one of 15


def decoded(files: Sequence[TensorFile], fp8: BlockFp8) -> tuple[tuple[TensorFile, ...], list[str]]:
    """Return (the files as they are read, each scale used by its weight and no tensor by itself, problems)."""
    tensors = tensors_of(files)
    scales = {name.removesuffix(SCALE): tensors[name] for name in tensors if name.endswith(SCALE)}
    narrow = {name for name, tensor in tensors.items() if tensor.entry.dtype == FP8}
    problems = [(f"an fp8 weight has no {SCALE}", name) for name in sorted(narrow - scales.keys())]
    problems += [("a scale is of no fp8 weight", scales[name].name) for name in sorted(scales.keys() - narrow)]
    for name in sorted(narrow & scales.keys()):
        shape, scale = tensors[name].entry.shape, scales[name].entry
        if len(shape) != 2:
            problems.append((f"an fp8 weight has shape {list(shape)}, and only matrices are read", name))
            continue
        grid = (-(-shape[0] // fp8.rows), -(-shape[1] // fp8.columns))
        if scale.shape != grid:
            told = f"scales have shape {list(scale.shape)}, and blocks of {fp8.rows} x {fp8.columns} take {list(grid)}"
            problems.append((told, scales[name].name))
        if scale.dtype not in FLOATS:
            problems.append((f"scales have dtype {scale.dtype}, which is not one of {', '.join(FLOATS)}", name + SCALE))
    wide = dtype_named(fp8.dtype)
    quantised = {
        name: _InBlocks(tensors[name], tensors[name].entry.shape, wide, scales[name], fp8)
        for name in narrow & scales.keys()
    }
    return shown(files, quantised, {scale.name for scale in scales.values()}), alike(problems)


@dataclass(frozen=True)
class _InBlocks(QuantisedWeight):
    scales: TensorInFile
    fp8: BlockFp8

    def fill(self, floats: Tensor, box: Box) -> None:
        import torch

        bits, scales = self.stored.bits, self._factors()
        (top, bottom), (left, right) = box
        height, across = self.fp8.rows, np.arange(left, right) // self.fp8.columns
        for band in range(top // height, -(-bottom // height)):
            factors = torch.from_numpy(scales[band, across])
            start, stop = max(top, band * height), min(bottom, (band + 1) * height)
            step = max(1, AT_ONCE // (right - left))
            for row in range(start, stop, step):
                part = slice(row, min(row + step, stop))
                floats[part, left:right] = numbers(bits[part, left:right]).mul_(factors)

    def _factors(self) -> np.ndarray:
        scales = as_floats(self.scales.bits, self.scales.entry.dtype, "F32")
        if not (np.isfinite(scales).all() and (scales > 0).all()):
            raise StoreError(f"{self.scales}: scales must be finite and above 0, and some are not: it is damaged")
        return scales * _EXPONENTS


def encoded(bits: Bits, dtype: str, block: int) -> tuple[Bits, np.ndarray]:
    """Return a matrix in e4m3, and in fp32 the scale of each block of so many rows and columns, which
    divide its columns; the largest number of a block is 448. Raises ValueError: a number is not finite."""
    import torch

    made, scales = np.empty(bits.shape, np.uint8), np.empty([-(-size // block) for size in bits.shape], np.float32)
    for band in range(len(scales)):
        rows = slice(band * block, (band + 1) * block)
        floats = torch.from_numpy(as_floats(bits[rows], dtype, "F32").copy())
        whole = floats.unflatten(1, (-1, block))
        largest = whole.abs().amax((0, 2))
        if not largest.isfinite().all():
            raise ValueError("a number is not finite: fp8 has none for it")
        factors = torch.where(largest > _LEAST, _LARGEST / largest, 1.0)
        narrow = whole.mul_(factors[:, None]).flatten(1).clamp_(-_LARGEST, _LARGEST)
        made[rows], scales[band] = narrow.to(torch.float8_e4m3fn).view(torch.uint8), 1 / factors
    return made, scales


def numbers(bits: Bits) -> Tensor:
    """Return numbers in e4m3, each divided by 2^8, in fp32; torch's own way there is eight times slower."""
    import torch

    # Sign, exponent and fraction go to the places that they have in fp16.
    halves = torch.from_numpy(bits.view(np.int8).astype(np.int16)).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    floats = halves.view(torch.float16).float()
    if (none := (bits & 0x7F) == 0x7F).any():
        floats[torch.from_numpy(none)] = torch.nan
    return floats
