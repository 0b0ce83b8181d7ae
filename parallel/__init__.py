"""Layers and machinery for models that are split over processes; see ``docs/weights.md`` and ``docs/meshes.md``.

Names are imported when they are asked for: the integer part works without torch.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if __name__ == "parallel":
    from megacore.parallel.short_names import share

    share("parallel")

if TYPE_CHECKING:  # type checkers and editors follow imports, not __getattr__
    from megacore.parallel.gradients.reduce import Gradients as Gradients
    from megacore.parallel.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from megacore.parallel.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from megacore.parallel.layers.linear import RowParallelLinear as RowParallelLinear
    from megacore.parallel.layers.loss import cross_entropy as cross_entropy
    from megacore.parallel.layers.norm import LayerNorm as LayerNorm
    from megacore.parallel.layers.norm import RMSNorm as RMSNorm
    from megacore.parallel.mesh import Mesh as Mesh
    from megacore.parallel.parameters import Parameters as Parameters
    from megacore.parallel.pipeline.run import Pipeline as Pipeline
    from megacore.parallel.weights.layout import Layout as Layout
    from megacore.parallel.weights.layout import MeshShape as MeshShape
    from megacore.parallel.weights.pattern import Pattern as Pattern
    from megacore.parallel.weights.schema import Param as Param
    from megacore.parallel.weights.schema import Schema as Schema

_PUBLIC: Mapping[str, str] = {
    "ColumnParallelLinear": "megacore.parallel.layers.linear",
    "Gradients": "megacore.parallel.gradients.reduce",
    "LayerNorm": "megacore.parallel.layers.norm",
    "Layout": "megacore.parallel.weights.layout",
    "Mesh": "megacore.parallel.mesh",
    "MeshShape": "megacore.parallel.weights.layout",
    "Param": "megacore.parallel.weights.schema",
    "Parameters": "megacore.parallel.parameters",
    "Pattern": "megacore.parallel.weights.pattern",
    "Pipeline": "megacore.parallel.pipeline.run",
    "RMSNorm": "megacore.parallel.layers.norm",
    "RowParallelLinear": "megacore.parallel.layers.linear",
    "Schema": "megacore.parallel.weights.schema",
    "VocabParallelEmbedding": "megacore.parallel.layers.embedding",
    "cross_entropy": "megacore.parallel.layers.loss",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
