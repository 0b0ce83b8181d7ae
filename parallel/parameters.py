"""The parameters that this process holds, cut by the layout and initialised the same on every mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from megacore.parallel.enum_errors import BaseDtype
from megacore.parallel.mesh import Mesh
from megacore.parallel.quantised import Blocks
from megacore.parallel.random import initial_values
from megacore.parallel.weights.block_formats import BLOCK, bytes_of, in_bytes
from megacore.parallel.weights.layout import Layout, Shard
from megacore.parallel.weights.pattern import Piece


def view(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a contiguous tensor, one dimension per axis, sharing its memory."""
    return tensor.detach().as_strided(piece.shape, piece.strides, tensor.storage_offset() + piece.offset)


@dataclass(frozen=True)
class WeightGradient:
    """A gradient that is computed when it is asked for, once.

    Args:
        make: Computes it.
        add_to: (total, first): adds it to ``total``, or writes it there if it is the ``first``.
        start: Starts the messages that it is made of, if there are any and it has not been called before.
        in_graph: Whether compiled code gives it that may still need the parameters, whatever has come before.
        held: Whether it may wait for a message beside which it is computed: the next one of a backward.
    """

    make: Callable[[], Tensor]
    add_to: Callable[[Tensor, bool], None]
    start: Callable[[], object] = lambda: None
    in_graph: bool = False
    held: bool = False


class CastWeight(Protocol):
    """A weight of which the products multiply narrower numbers, which are made once for all of them until it changes.

    Their scales go by the largest magnitudes of what has a scale of its own: the weight, or the matrix of each expert,
    wherever it is. They are of no dimension or [experts in all], 0 for what is not here.
    """

    dtype: torch.dtype
    """The dtype of the narrow numbers."""

    @property
    def scales(self) -> tuple[int, ...]:
        """The shape of the largest magnitudes."""
        ...

    @property
    def made(self) -> tuple[Tensor | None, ...] | None:
        """The narrow numbers, their scales and a transposed copy, as the products have them; None before."""
        ...

    def largest(self, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Return the largest magnitudes in parts of the weight, one at least, each with the element it begins at."""
        ...

    def cast(self, largest: Tensor) -> None:
        """Make the narrow numbers of the weight, which is here whole."""
        ...

    def fill(self, narrow: Tensor, part: Tensor, start: int, largest: Tensor) -> None:
        """Make the narrow numbers of a flat part of it, from element ``start`` on, in a tensor of as many."""
        ...

    def give(self, values: Tensor, largest: Tensor) -> None:
        """Have the products multiply ``values``, of the weight's shape, whose owner fills them with what
        :meth:`fill` has made."""
        ...


class Parameters(Mapping[str, nn.Parameter]):
    """{name: parameter} of one rank; each is there once, however many chunks or layers use it.

    Args:
        layout: The shards of each rank.
        dtype: The dtype of the parameters.
        hollow: Whether they have no memory, for a sharing that gives it to them; otherwise they are zeros. Buffers,
            which are shared by nobody, always have some.
        quantised: {declaration: the format of its blocks} of matrices that are held in bytes, and never trained.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        dtype: torch.dtype,
        hollow: bool = False,
        quantised: Mapping[str, BaseDtype] = MappingProxyType({}),
    ) -> None:
        self.layout, self.mesh, self.dtype = layout, mesh, dtype
        self.shards: dict[str, Shard] = {shard.name: shard for shard in layout.shards(mesh.place)}
        formats = {name: quantised[s.param.name] for name, s in self.shards.items() if s.param.name in quantised}
        blocks = {each: Blocks.on(mesh.device, each) for each in {*formats.values()}}
        self.blocks = {name: blocks[each] for name, each in formats.items()}
        """{parameter: its blocks} of those that are quantised."""
        self.casts: dict[Tensor, CastWeight] = {}
        """{parameter: its narrow numbers} of those of which nothing else is multiplied; whoever updates the parameters
        makes them, where somebody does."""
        self._tensors = {
            name: nn.Parameter(self._new(shard, hollow), requires_grad=self._may_train(name))
            for name, shard in self.shards.items()
        }
        if hollow:
            for name, parameter in self._tensors.items():
                if not self.shards[name].param.buffer:
                    parameter.untyped_storage().resize_(0)

    def _new(self, shard: Shard, hollow: bool) -> Tensor:
        buffer, shape, dtype = shard.param.buffer, shard.shape, self.dtype
        if shard.name in self.blocks:
            if shape[-1] % BLOCK:
                raise ValueError(
                    f"cannot hold {shard.name} in {self.blocks[shard.name].dtype}: a rank has {shape[-1]} of its "
                    f"inputs, no multiple of {BLOCK}: choose another tp"
                )
            shape, dtype = (*shape[:-1], bytes_of(shape[-1], self.blocks[shard.name].dtype)), torch.uint8
        make = torch.empty if hollow and not buffer else torch.zeros
        return make(shape, dtype=torch.float32 if buffer else dtype, device=self.mesh.device)

    def _may_train(self, name: str) -> bool:
        return name not in self.blocks and not self.shards[name].param.buffer

    def initialise(self, seed: int) -> None:
        """Draw the initial values: bitwise the same model on every mesh."""
        for name, parameter in self._tensors.items():
            parameter.detach().copy_(self.as_held(name, self.drawn(name, seed)))

    def drawn(self, name: str, seed: int) -> Tensor:
        """Return the initial values of a parameter, a host tensor of its shard's shape, quantised or not."""
        shard = self.shards[name]
        values = torch.empty(shard.shape, dtype=self.dtype if name in self.blocks else self._tensors[name].dtype)
        for piece in shard.pieces:
            view(values, piece).copy_(torch.from_numpy(initial_values(self.layout, shard, piece.label, seed)))
        return values

    def as_held(self, name: str, values: Tensor) -> Tensor:
        """Return the values of a parameter, of its shard's shape and any float dtype, as it holds them: quantised on
        its device, or as they are."""
        return self.blocks[name].quantise(values.to(self.mesh.device)) if name in self.blocks else values

    def pieces_of(self, name: str) -> Sequence[Piece]:
        """Return the pieces of a parameter, as views of what it holds."""
        shard = self.shards[name]
        if name not in self.blocks:
            return shard.pieces
        return [in_bytes(piece, shard.shape[-1], self.blocks[name].dtype) for piece in shard.pieces]

    def freeze(self, names: Collection[str]) -> None:
        """Train no longer the tensors of these names that are held here."""
        for name, parameter in self._tensors.items():
            parameter.requires_grad_(name not in names and self._may_train(name))

    def pieces(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the name, label and view of every piece that is held here."""
        for name, shard in self.shards.items():
            for piece in shard.pieces:
                yield name, piece.label, view(self._tensors[name], piece)

    def __getitem__(self, name: str) -> nn.Parameter:
        try:
            return self._tensors[name]
        except KeyError:
            raise KeyError(f"{name} is not held by rank {self.mesh.rank} ({self.mesh.place})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
