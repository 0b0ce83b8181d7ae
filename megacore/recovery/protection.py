"""What protects a run and stands beside its loop, on each rank: without it, a run trains to the same bytes."""

from __future__ import annotations

from megacore.rank import Here
from megacore.recovery.beat_writer import Beats
from megacore.recovery.memory_checkpoints import MemoryCheckpoints
from megacore.training.trainer import Callback


def protection(here: Here) -> list[Callback]:
    """Return the callbacks of a rank: it tells its agent where it is, and keeps checkpoints in memory."""
    return [Beats(), MemoryCheckpoints(here.local_world)]
