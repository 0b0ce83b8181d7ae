"""A folder's model on a mesh, to compute with: what generating, evaluating and verifying start from."""

from __future__ import annotations

import torch

from megacore.resume import tensors
from megacore.store.checkpoint import Checkpoint
from megacore.store.dtypes import FLOATS
from megacore.store.folder import Folder
from models.assemble import Model
from models.stages import layout_of
from parallel.layout import Layout
from parallel.mesh import Mesh


def model_from(folder: Folder, mesh: Mesh, dtype: torch.dtype | None = None) -> Model:
    """This rank's part of the model, dropout off, filled one tensor at a time.

    On the number of stages that a checkpoint has, its layers lie as they do there.

    Args:
        folder: Its weights.
        mesh: Any mesh that the model can be split over.
        dtype: Of its parameters; None for that of the folder.
    """
    model = Model.create(folder.config, _layout(folder, mesh), mesh, dtype or dtype_of(folder))
    model.train(False)
    with torch.no_grad():
        for name, tensor in tensors(folder, "weights", model.parameters):
            model.parameters[name].copy_(tensor)
    return model


def dtype_of(folder: Folder) -> torch.dtype:
    """The dtype of a folder's weights; of several, one that holds all of their numbers."""
    weights = folder.stored()
    if isinstance(folder, Checkpoint):
        held = {folder.dtype("weights", stored) for stored in weights}
    else:
        held = {folder.dtype(stored) for stored in weights}
    widest = held.pop() if len(held) == 1 else "F64" if "F64" in held else "F32"
    found: torch.dtype = getattr(torch, FLOATS[widest])
    return found


def _layout(folder: Folder, mesh: Mesh) -> Layout:
    own = folder.layout if isinstance(folder, Checkpoint) else None
    same = own is not None and own.mesh.pp == mesh.shape.pp
    return layout_of(folder.config, mesh.shape, layers=own.layers if own is not None and same else None)
