"""From a model's configuration and a mesh to the live parts of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from models.config import ModelConfig
from models.decoder import Decoder, Losses
from models.registry import build
from parallel.layout import Layout, MeshShape, balanced_layers
from parallel.mesh import Mesh
from parallel.parameters import Parameters


def default_layers(config: ModelConfig, virtual_stages: int) -> tuple[int, ...]:
    """A balanced split of the layers that counts the head and, at a quarter of it, the embedding.

    The head's GEMM is counted as layers by its parameters. Looking tokens up is cheap, but the table's gradient and
    optimizer traffic are not: a quarter is what they came to on the model of ``benchmarks/train_step.py``.
    """
    schema = config.schema
    layers = schema.sizes["layer"]
    in_layers = sum(schema.numel(p) for p in schema.params if "layer" in p.named_axes) / layers
    head = schema.sizes["vocab"] * schema.sizes["embed"] / in_layers
    return balanced_layers(layers, virtual_stages, embedding=head / 4, head=head)


def layout_of(config: ModelConfig, mesh: MeshShape, chunks: int = 1, layers: tuple[int, ...] | None = None) -> Layout:
    """The layout of a model on a mesh, its layers split as given or in a balanced way."""
    return Layout(config.schema, mesh, layers or default_layers(config, mesh.pp * chunks))


@dataclass(frozen=True)
class Model:
    """What one rank holds of a model.

    Args:
        config: Of the whole model.
        parameters: This rank's parameters.
        chunks: This rank's modules, one for each pipeline chunk.
    """

    config: ModelConfig
    parameters: Parameters
    chunks: tuple[Decoder, ...]

    @classmethod
    def create(
        cls, config: ModelConfig, layout: Layout, mesh: Mesh, dtype: torch.dtype, losses: Losses | None = None
    ) -> Model:
        """Uninitialised: ``model.parameters.initialise(seed)``, or fill it by a transfer."""
        parameters = Parameters(layout, mesh, dtype)
        chunks = tuple(build(config, parameters, chunk) for chunk in range(layout.chunks))
        for chunk in chunks:
            if losses and chunk.head is not None:
                chunk.head.losses = losses
        return cls(config, parameters, chunks)

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        for chunk in self.chunks:
            chunk.train(mode)

    def compile(self) -> None:
        """Compile every block with torch.compile; layers of one shape share the code."""
        for chunk in self.chunks:
            for block in chunk.layers.values():
                block.compile()
