"""The formats of matrices that are held in fewer bits: blocks of 64 inputs of one output, each with a scale. No torch.

A block belongs to one row of the whole matrix, and ranks cut rows between blocks alone. So each block has the same
numbers on every layout, and a rank quantises what it holds without asking another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from megacore.parallel.enum_errors import BaseDtype
from megacore.parallel.weights.layout import MeshShape, split_axis
from megacore.parallel.weights.pattern import Pattern, Piece, Sizes
from megacore.parallel.weights.schema import Param, Split

BLOCK = 64
"""Inputs of a block, as of QLoRA (Dettmers et al. 2023, arXiv 2305.14314)."""
BLOCK_BYTES: Mapping[BaseDtype, int] = {"nf4": BLOCK // 2 + 4, "int8": BLOCK + 4}
"""The bytes of a block: its codes, and behind them its largest magnitude in fp32."""


def bytes_of(elements: int, dtype: BaseDtype) -> int:
    """Return the bytes of whole blocks of so many elements."""
    return elements // BLOCK * BLOCK_BYTES[dtype]


def in_bytes(piece: Piece, inputs: int, dtype: BaseDtype) -> Piece:
    """Return a piece of a matrix of so many inputs as a view of its blocks: whole rows of bytes."""
    width = bytes_of(inputs, dtype)
    outer = [i for i, stride in enumerate(piece.strides) if stride >= inputs]
    return Piece(
        piece.label,
        (*(piece.axes[i] for i in outer), "bytes"),
        (*(piece.shape[i] for i in outer), width),
        (*(piece.strides[i] // inputs * width for i in outer), 1),
        piece.offset // inputs * width,
    )


def block_problems(params: Iterable[Param], sizes: Sizes, mesh: MeshShape, split: Split) -> Iterator[str]:
    """Yield the matrices whose rows are no whole blocks, on a mesh that can split the model."""
    for param in params:
        inputs = Pattern(param.sentence.dims[-1:])
        over = {axis: split.get(axis, ()) for axis in inputs.axes}
        held = dict(sizes)
        for axis, dims in over.items():
            start, stop = split_axis(axis, sizes[axis], mesh.size(dims), 0, dims)
            held[axis] = stop - start
        (whole,), (own,) = inputs.shape(sizes), inputs.shape(held)
        if whole % BLOCK:
            yield f"the {whole} inputs of {param.name} are no multiple of {BLOCK}"
        elif own % BLOCK:
            cut = dict.fromkeys(dim for dims in over.values() for dim in dims if mesh[dim] > 1)
            spread = " x ".join(f"{dim}={mesh[dim]}" for dim in cut)
            yield f"{spread} cuts the {whole} inputs of {param.name} into {own}, which is no multiple of {BLOCK}"
