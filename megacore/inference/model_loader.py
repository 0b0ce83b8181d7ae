"""A folder's model on a mesh, and microbatches for it: what generating, evaluating and verifying start from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megacore.control import Control
from megacore.data.batches import Batch
from megacore.models.assemble import Model
from megacore.models.decoder import Microbatch
from megacore.models.stages import layout_of
from megacore.parallel.collectives import broadcast_
from megacore.parallel.context_split import ContextParallel
from megacore.parallel.enum_errors import ContextExchange
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.parallel.weights.schema import SPLIT, Split
from megacore.store.conversions.adapters import check_fingerprint
from megacore.store.io.strict_json import StoreError
from megacore.store.tensor_files.dtypes import FLOATS
from megacore.store.weight_folders.folder import WeightFolder
from megacore.store.weight_folders.loader import Loader, fingerprint


def model_from(
    whole: WeightFolder,
    mesh: Mesh,
    dtype: torch.dtype | None = None,
    verified: bool = True,
    split: Split | None = None,
    exchange: ContextExchange = "auto",
) -> Model:
    """Return this rank's part of the model, dropout off, filled one tensor at a time.

    On the number of stages that a checkpoint has, its layers lie as they do there. Raises DamageError: a checkpoint's
    bytes are not those that were written; on every rank, as all others; StoreError: the adapters were trained on other
    weights than the base's, a rank cannot read its part, or some have found a newer checkpoint of a run than others.

    Args:
        whole: Its weights; adapters are computed beside those of their base.
        dtype: None for that of the weights.
        verified: Whether damaged bytes are refused. Without it they are loaded as they are, for who compares them.
        split: The dimensions of the mesh that split an axis; None for those of a checkpoint that has the same ep and
            tp, and the usual ones elsewhere.
        exchange: The way in which queries meet the keys of other ranks of cp.
    """
    control = Control.create(mesh)
    if len(paths := {*control.exchange(str(whole.path))}) > 1:
        raise StoreError(f"ranks have found different checkpoints of one run ({', '.join(sorted(paths))}): name one")
    if whole.base is not None:
        check_fingerprint(whole, whole.base.path, fingerprint(whole.base, control))
    there, tuning = whole.layout, whole.index.tuning
    layers = there.layers if there.mesh.pp == mesh.shape.pp else None
    if split is None:
        split = there.split if (there.mesh.ep, there.mesh.tp) == (mesh.shape.ep, mesh.shape.tp) else SPLIT
    layout = layout_of(whole.config, mesh.shape, layers=layers, tuning=tuning, split=split)
    context = ContextParallel.of(mesh.shape.cp, exchange)
    model = Model.create(whole.config, layout, mesh, dtype or dtype_of(whole), tuning=tuning, context=context)
    model.train(False)
    loader = Loader(model.parameters, control)
    with torch.no_grad():
        for name, tensor in loader.tensors(whole, "weights"):
            model.parameters[name].copy_(model.parameters.as_held(name, tensor))
    if verified:
        loader.verify()
    return model


def microbatch_of(model: Model, whole: Batch) -> Microbatch:
    """Return this rank's part of a batch of one row, on its device."""
    mesh = model.parameters.mesh
    batch = whole.of_rank(model.context, mesh.place.cp)
    tokens, labels, positions = (
        torch.from_numpy(each.ravel()).to(mesh.device) for each in (batch.tokens, batch.labels, batch.positions)
    )
    activation = len(tokens) // mesh.shape.tp, model.config.boundary_width
    documents = batch.documents
    return Microbatch(tokens, labels, positions, 1, activation, documents, lengths=documents, split=batch.split)


def logits_of(model: Model, tokens: Sequence[int]) -> Tensor:
    """tokens: [n] of one document -> logits: [n, vocab], on all ranks of the model's mesh, which all call this."""
    mesh, count = model.parameters.mesh, len(tokens)
    # A document of its own fills up to what tp x cp ranks share out evenly.
    rest = -count % (mesh.shape.tp * mesh.shape.cp)
    ids, positions = np.array([*tokens, *[0] * rest]), np.array([*range(count), *range(rest)])
    documents = (count, rest) if rest else (count,)
    whole = Batch(ids[None], np.full_like(ids, IGNORE)[None], positions[None], documents)
    found = model.logits(microbatch_of(model, whole))
    if found is None:
        size = count, model.config.vocab_size
        found = torch.empty(size, dtype=model.parameters.dtype, device=mesh.device)
    return broadcast_(found[:count].contiguous(), mesh.world, model.end)


def dtype_of(whole: WeightFolder) -> torch.dtype:
    """Return the dtype of a model's weights, buffers left out; of several, one that holds all of their numbers."""
    weights = (stored for stored in whole.stored() if not whole.schema[stored.param].buffer)
    dtypes = {whole.dtype("weights", stored) for stored in weights}
    widest = dtypes.pop() if len(dtypes) == 1 else "F64" if "F64" in dtypes else "F32"
    return getattr(torch, FLOATS[widest])
