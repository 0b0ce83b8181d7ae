"""Matrices in the formats of :mod:`parallel.weights.block_formats`: quantised once, and dequantised for each product.

NF4 is that of QLoRA (Dettmers et al. 2023, arXiv 2305.14314) without its second quantisation, that of scales: it takes
their mean over a whole matrix, which no rank has. int8 is that of LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339)
for each block instead of each row, which ranks may share. Both have the numbers of bitsandbytes, bit for bit, in the
order of its operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor

from megacore.parallel.enum_errors import BaseDtype
from megacore.parallel.weights.block_formats import BLOCK, BLOCK_BYTES, bytes_of

# The quantiles of the normal distribution, as the paper's appendix E lists them.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_SMALLEST = 1e-36
"""A magnitude below which all of a block may become zeros: 127 over it is still a number of fp32."""
_AT_ONCE = 1 << 22
"""Elements that are wide at a time."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Quantises and dequantises on a device.

    Args:
        dtype: The format.
        pairs: [256, 2] in fp32, the two numbers of NF4 that a byte stands for, that of its high half first.
    """

    dtype: BaseDtype
    pairs: Tensor

    @classmethod
    def on(cls, device: torch.device | str, dtype: BaseDtype) -> Self:
        numbers = torch.tensor(_NF4)
        return cls(dtype, torch.cartesian_prod(numbers, numbers).to(device))

    def quantise(self, matrix: Tensor) -> Tensor:
        """matrix: [..., out, in] of any float dtype -> [..., out, bytes], of which nothing depends on other rows."""
        *outer, inputs = matrix.shape
        rows = matrix.reshape(-1, inputs)
        made = torch.empty(len(rows), bytes_of(inputs, self.dtype), dtype=torch.uint8, device=matrix.device)
        bounds = (self.pairs[:15, 1] + self.pairs[1:16, 1]) / 2
        for own, held in _some_rows(rows, made):
            blocks, given = own.float().reshape(-1, BLOCK), held.view(-1, BLOCK_BYTES[self.dtype])
            largest = blocks.abs().amax(1, keepdim=True)
            divisor = largest.clamp(min=_SMALLEST)
            if self.dtype == "nf4":
                nearest = torch.bucketize(blocks * (1 / divisor), bounds, out_int32=True).view(-1, BLOCK // 2, 2)
                codes = (nearest[..., 0] << 4 | nearest[..., 1]).to(torch.uint8)
            else:
                codes = (blocks * (127 / divisor)).round_().to(torch.int8).view(torch.uint8)
            given[:, :-4], given[:, -4:] = codes, largest.view(torch.uint8)
        return made.view(*outer, -1)

    def dequantise(self, held: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
        """held: [..., out, bytes] -> [..., out, in], rounded once from fp32.

        Args:
            held: The blocks.
            dtype: That of the result.
            after: A tensor that must be there before the compiler dequantises. It takes that of a backward, which needs
                nothing else of it, for the forward's, and keeps the matrix until then.
        """
        if after is not None and torch.compiler.is_compiling():
            return _dequantise_after(held, self.pairs, self.dtype, dtype, after)
        *outer, width = held.shape
        rows = held.reshape(-1, width)
        inputs = width // BLOCK_BYTES[self.dtype] * BLOCK
        made = torch.empty(len(rows), inputs, dtype=dtype, device=held.device)
        for own, wide in _some_rows(rows, made):
            wide.view(-1, BLOCK).copy_(self._wide(own))
        return made.view(*outer, inputs)

    def _wide(self, rows: Tensor) -> Tensor:
        """rows: [n, bytes] -> [blocks of them, 64] in fp32."""
        blocks = rows.view(-1, BLOCK_BYTES[self.dtype])
        codes, largest = blocks[:, :-4], blocks.view(torch.float32)[:, -1:]
        if self.dtype == "nf4":
            return self.pairs.index_select(0, codes.int().flatten()).view(-1, BLOCK).mul_(largest)
        return codes.view(torch.int8).float().mul_(largest).mul_(1 / 127)


@torch.library.custom_op("megacore::dequantise_after", mutates_args=())
def _dequantise_after(held: Tensor, pairs: Tensor, name: str, dtype: torch.dtype, after: Tensor) -> Tensor:
    return Blocks(cast(BaseDtype, name), pairs).dequantise(held, dtype)


@_dequantise_after.register_fake
def _(held: Tensor, pairs: Tensor, name: str, dtype: torch.dtype, after: Tensor) -> Tensor:
    inputs = held.shape[-1] // BLOCK_BYTES[cast(BaseDtype, name)] * BLOCK
    return held.new_empty(*held.shape[:-1], inputs, dtype=dtype)


def _some_rows(rows: Tensor, made: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield successive rows of both, some at a time."""
    step = max(1, _AT_ONCE // max(rows.shape[1], made.shape[1]))
    return zip(rows.split(step), made.split(step), strict=True)
