"""Layers and machinery for models that are split over processes; see ``docs/weights.md`` and ``docs/meshes.md``.

Names are imported when they are asked for: the integer part works without torch.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors follow imports, not __getattr__
    from parallel.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from parallel.gradients.reduce import Gradients as Gradients
    from parallel.layout import Layout as Layout
    from parallel.layout import MeshShape as MeshShape
    from parallel.linear import ColumnParallelLinear as ColumnParallelLinear
    from parallel.linear import RowParallelLinear as RowParallelLinear
    from parallel.loss import cross_entropy as cross_entropy
    from parallel.mesh import Mesh as Mesh
    from parallel.norm import LayerNorm as LayerNorm
    from parallel.norm import RMSNorm as RMSNorm
    from parallel.parameters import Parameters as Parameters
    from parallel.pattern import Pattern as Pattern
    from parallel.pipeline.run import Pipeline as Pipeline
    from parallel.schema import Param as Param
    from parallel.schema import Schema as Schema

_PUBLIC: Mapping[str, str] = {
    "ColumnParallelLinear": "parallel.linear",
    "Gradients": "parallel.gradients.reduce",
    "LayerNorm": "parallel.norm",
    "Layout": "parallel.layout",
    "Mesh": "parallel.mesh",
    "MeshShape": "parallel.layout",
    "Param": "parallel.schema",
    "Parameters": "parallel.parameters",
    "Pattern": "parallel.pattern",
    "Pipeline": "parallel.pipeline.run",
    "RMSNorm": "parallel.norm",
    "RowParallelLinear": "parallel.linear",
    "Schema": "parallel.schema",
    "VocabParallelEmbedding": "parallel.embedding",
    "cross_entropy": "parallel.loss",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
