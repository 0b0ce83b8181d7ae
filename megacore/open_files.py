"""The number of files that a rank has open at once: each rank that it talks to over gloo takes a socket for each group.

A limit of 1,024 is common, and whoever meets it while ranks connect waits without a word.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator

from megacore.parallel.weights.layout import MeshShape

OWN = 512
"""The files of a rank by itself: its data, checkpoints, libraries, and what NCCL opens."""


def needed(shape: MeshShape, kind: str, nodes: int = 1) -> int:
    """Return the number of files of the rank that has most open: the first one, which others ask to find each other.
    On devices of the kind ``cpu`` all groups are gloo's; ranks of one node find each other by a file."""
    store = shape.world if nodes > 1 else 0
    if kind != "cpu":
        return OWN + store  # between hosts ranks talk over levels of small groups
    data = shape.dp * shape.ep * shape.cp
    # The world, tp, dp; the replicas of tensors that tp splits and of those that it does not, whole and in parts; and
    # the channels of a pipeline.
    groups = shape.world + shape.tp + data + 2 * (data + data * shape.tp) + 4 * shape.pp
    return OWN + store + groups


def problems(files: int) -> Iterator[str]:
    """Yield why this machine cannot have so many files open."""
    if files > (most := limits()[1]):
        yield (
            f"a rank has up to {files:,} files open (a socket for each rank that it talks to), and this machine allows "
            f"{most:,}: raise the hard limit (ulimit -Hn, LimitNOFILE of a service, or limits.conf), or use fewer ranks"
        )


def allow(files: int) -> str | None:
    """Raise the limit of this process, and of those that it starts -> what to say; None where it was high enough."""
    soft, hard = limits()
    if files <= soft or files > hard:
        return None
    _, real = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, real))
    return f"The limit of open files was {soft:,}, and is {files:,} for this run."


def limits() -> tuple[int, int]:
    """Return the limit of this process, and the one that it may be raised to."""
    soft, hard = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, hard
