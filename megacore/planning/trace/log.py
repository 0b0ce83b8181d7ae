"""The log of a rank: what its host asks of its GPU, one entry after the other, and how much work each is.

Nothing here has a duration. :mod:`megacore.planning.trace.timeline` gives the entries one, on a device of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacore.planning.costs import MatMul

HOST = "host"
"""The host, where a stream is expected: it reads and writes pinned memory."""


@dataclass(frozen=True)
class NcclMessage:
    """What other ranks take part in.

    Args:
        communicator: The name of NCCL's.
        parts: (key, ranks) of what it is done with: once all of these ranks have come to the key.
        what: What all of them must have in common.
        kind: One of :mod:`megacore.planning.costs`, as "all-gather".
        size: Bytes, as :class:`megacore.planning.costs.Collective` has them.
    """

    communicator: str
    parts: Sequence[tuple[str, Sequence[int]]]
    what: str
    kind: str = ""
    size: int = 0


@dataclass(frozen=True)
class Launch:
    """A kernel or a copy; on the stream :data:`HOST`, what the host does with pinned memory.

    Args:
        name: That of the operator.
        place: Who launches it.
        message: What it is of a message.
        work: The event of torch's ``Work``, which holds on to the memories until somebody waits for it, or it is done.
        moved: Bytes that it reads and writes; of a copy between host and device, those that pass.
        product: What it multiplies, and how often.
        crosses: Whether it copies between host and device.
    """

    stream: str
    name: str
    place: str
    message: NcclMessage | None = None
    work: int | None = None
    moved: int = 0
    product: tuple[MatMul, int] | None = None
    crosses: bool = False


@dataclass(frozen=True)
class RecordEvent:
    """An event is recorded on a stream; by our code if there is a place."""

    event: int
    stream: str
    place: str = ""


@dataclass(frozen=True)
class Wait:
    """A stream, or the host, waits for an event; because our code says so if there is a place."""

    stream: str
    event: int
    place: str = ""


@dataclass(frozen=True)
class StepStart:
    """A step of the training begins."""


Entry = Launch | RecordEvent | Wait | StepStart
"""The steps of one rank are these, one after the other."""
