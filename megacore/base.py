"""The model that adapters are trained on: whether it is the same one again."""

from __future__ import annotations

import itertools

from megacore.control import Control
from megacore.store.audit import taken
from megacore.store.checkpoint import Checkpoint
from megacore.store.folder import Folder
from parallel.fingerprint import add_up, combined

_JOBS = 2


def fingerprint(base: Folder, control: Control) -> int:
    """Of the weights of a model: one number that is the same on all ranks, and for equal weights wherever they lie.

    A checkpoint knows it; of a Hugging Face folder each rank reads a part, so that together they read it once.

    Raises:
        StoreError: one of them cannot; on every rank.
    """
    if isinstance(base, Checkpoint):
        return combined(base.fingerprints("weights"))
    rank, world = control.mesh.rank, control.mesh.shape.world
    stored = list(base.stored())
    own = control.attempt(lambda: list(taken(stored[rank::world], base.read, base.schema, _JOBS)))
    gathered = control.gather(own)
    # Dealt out in turn, so taken back in turn.
    found = [each for each in itertools.chain(*itertools.zip_longest(*gathered)) if each is not None]
    known = combined(add_up(base.schema, zip(stored, found, strict=True))) if rank == 0 else 0
    return int(control.tell(f"{known:x}"), 16)
