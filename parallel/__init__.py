"""Layers and machinery for models that are split over processes; see ``docs/weights.md`` and ``docs/meshes.md``.

Names are imported when they are asked for: the integer part works without torch.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors follow imports, not __getattr__
    from parallel.gradients.reduce import Gradients as Gradients
    from parallel.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from parallel.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from parallel.layers.linear import RowParallelLinear as RowParallelLinear
    from parallel.layers.loss import cross_entropy as cross_entropy
    from parallel.layers.norm import LayerNorm as LayerNorm
    from parallel.layers.norm import RMSNorm as RMSNorm
    from parallel.mesh import Mesh as Mesh
    from parallel.parameters import Parameters as Parameters
    from parallel.pipeline.run import Pipeline as Pipeline
    from parallel.weights.layout import Layout as Layout
    from parallel.weights.layout import MeshShape as MeshShape
    from parallel.weights.pattern import Pattern as Pattern
    from parallel.weights.schema import Param as Param
    from parallel.weights.schema import Schema as Schema

_PUBLIC: Mapping[str, str] = {
    "ColumnParallelLinear": "parallel.layers.linear",
    "Gradients": "parallel.gradients.reduce",
    "LayerNorm": "parallel.layers.norm",
    "Layout": "parallel.weights.layout",
    "Mesh": "parallel.mesh",
    "MeshShape": "parallel.weights.layout",
    "Param": "parallel.weights.schema",
    "Parameters": "parallel.parameters",
    "Pattern": "parallel.weights.pattern",
    "Pipeline": "parallel.pipeline.run",
    "RMSNorm": "parallel.layers.norm",
    "RowParallelLinear": "parallel.layers.linear",
    "Schema": "parallel.weights.schema",
    "VocabParallelEmbedding": "parallel.layers.embedding",
    "cross_entropy": "parallel.layers.loss",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
