"""Layers and machinery for models that are split over processes; see ``docs/weights.md`` and ``docs/meshes.md``.

Names are imported when they are asked for: the integer part works without torch.
"""

import importlib
from collections.abc import Mapping

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
