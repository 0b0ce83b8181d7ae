"""The events that a run may have to answer. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "killed",
    "raised",
    "aborted",
    "hung",
    "lost_contact",
    "agent_lost",
    "node_joins",
    "node_leaves",
    "non_finite",
    "spike",
    "unrepeatable",
    "bad_data",
    "corrupted",
    "straggler",
    "save_failed",
]
KINDS: Mapping[Kind, str] = {
    "killed": "a rank was ended by a signal",
    "raised": "a rank ended with an exception, or a status that says nothing",
    "aborted": "a rank aborted: a library gave up in it",
    "hung": "a rank stands still",
    "lost_contact": "a collective failed, though nobody died here",
    "agent_lost": "a node is gone with all of its ranks",
    "node_joins": "a node has come",
    "node_leaves": "a node says that it will go",
    "non_finite": "a step's loss or gradient norm is not finite",
    "spike": "a step's loss or gradient norm is far above those before it",
    "unrepeatable": "a bad step that was repeated on the same data gave other bits",
    "bad_data": "a bad step that was repeated on the same data gave the same bits",
    "corrupted": "weights, state, a copy or what a rank computes is not what it must be",
    "straggler": "a rank is slower than the others",
    "save_failed": "a checkpoint could not be written",
}
"""{kind of an event: what has happened}."""


@dataclass(frozen=True)
class Event:
    """Something that befell a run.

    Args:
        kind: The kind.
        rank: The rank at fault, if it is known.
        node: The node of it, or the node that comes, goes or is gone.
        host: The name of that node's host, where there are several: numbers are those of one launch.
        step: The step that was being done, as far as it is known.
        phase: The phase of that step (:mod:`megacore.recovery.phases`), if it is known.
        detail: A few words more: the signal, the exception, who waits for whom.
        at: The time, in seconds since 1970, by the clock of whoever saw it.
        samples: The samples [first, end) of the step, of a bad one.
    """

    kind: Kind
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    phase: str | None = None
    detail: str = ""
    at: float = 0.0
    samples: tuple[int, int] | None = None
    host: str = ""
