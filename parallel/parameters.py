"""The parameters that this process holds, cut by the layout and initialised the same on every mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from parallel.layout import Layout, Shard
from parallel.mesh import Mesh
from parallel.pattern import Piece
from parallel.random import initial_values


def view(tensor: Tensor, piece: Piece) -> Tensor:
    """A piece of a contiguous tensor, one dimension per axis, sharing its memory."""
    return tensor.detach().as_strided(piece.shape, piece.strides, tensor.storage_offset() + piece.offset)


class Parameters(Mapping[str, nn.Parameter]):
    """{name: parameter} of one rank; each is there once, however many chunks or layers use it.

    Args:
        layout: Who holds what.
        mesh: The live mesh.
        dtype: Of the parameters.
    """

    def __init__(self, layout: Layout, mesh: Mesh, dtype: torch.dtype) -> None:
        self.layout, self.mesh = layout, mesh
        self.shards: dict[str, Shard] = {shard.name: shard for shard in layout.shards(mesh.place)}
        self._tensors = {
            name: nn.Parameter(torch.zeros(shard.shape, dtype=dtype, device=mesh.device))
            for name, shard in self.shards.items()
        }

    def initialise(self, seed: int) -> None:
        """Draw the initial values: bitwise the same model on every mesh."""
        for name, label, tensor in self.pieces():
            tensor.copy_(torch.from_numpy(initial_values(self.layout, self.shards[name], label, seed)))

    def pieces(self) -> Iterator[tuple[str, str, Tensor]]:
        """(name, label, view) of every piece that is held here."""
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
