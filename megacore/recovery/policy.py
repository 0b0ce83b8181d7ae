"""The answer to an event: one pure function, ``decide(event, history, budgets) -> Decision``. No torch, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megacore import exits
from megacore.recovery.events import Event

Action = Literal["tell", "repeat", "skip", "go_back", "rebuild", "replace", "evict", "restart", "end"]
ACTIONS: Mapping[Action, str] = {
    "tell": "say so, and go on",
    "repeat": "do the step again on the same data",
    "skip": "leave the step's samples out, and go on from the weights before it",
    "go_back": "go back to the newest checkpoint before the step, and leave its samples out",
    "rebuild": "make the groups anew among the ranks that there are, in their own processes",
    "replace": "end the rank, if it lives, and let another process take its place",
    "evict": "go on without the node",
    "restart": "start all ranks again from the newest whole checkpoint",
    "end": "end the run",
}
"""{action: what is done}, the cheapest first."""


@dataclass(frozen=True)
class Decision:
    """The answer to an event.

    Args:
        action: The action.
        reason: Why, in a few words, for people.
        rank: The rank to replace.
        node: The node to leave out, or that is at fault where the run ends.
        samples: The samples [first, end) to leave out.
        status: The exit status where the run ends, on the node at fault; :meth:`status_on` tells that of any.
    """

    action: Action
    reason: str
    rank: int | None = None
    node: int | None = None
    samples: tuple[int, int] | None = None
    status: int = exits.FAILED

    def status_on(self, node: int) -> int:
        """Return the exit status of a node where the run ends: EVICT is for the one at fault alone."""
        return exits.RETRY if self.status == exits.EVICT and node != self.node else self.status


@dataclass(frozen=True)
class Incident:
    """An event, its answer, and what both have cost.

    Args:
        event: The event.
        decision: The answer to it.
        life: The launch that it befell; no two launches have the same.
        number: Counts the incidents of a run, from 1.
        seen_after: Seconds from the fault until it was seen, if that is known.
        recovered: The time when a step was done again; None until then.
        steps_lost: Steps that were done and had to be done again; None until that is known.
        seconds_lost: Seconds from the event to the next step that was done.
    """

    event: Event
    decision: Decision
    life: str = ""
    number: int = 0
    seen_after: float | None = None
    recovered: float | None = None
    steps_lost: int | None = None
    seconds_lost: float | None = None


@dataclass(frozen=True)
class Budgets:
    """The means of a launch: what it may spend, and what there is to go on with.

    Args:
        life: The launch; the budgets are its own, while steps and nodes that fail are known from all launches.
        max_recoveries: Answers in place: repeat, rebuild, replace, evict.
        max_restarts: Restarts of all ranks.
        max_skipped: Bad steps left out among 100; None for any number.
        in_place: Whether ranks can be rebuilt and replaced in place.
        resumable: Whether the run writes checkpoints, or can begin again.
        repeats: Whether a step can be repeated.
        go_back: Whether bad data are answered by going back.
        nodes: The nodes that there are.
        least_nodes: The fewest that the run goes on with.
    """

    life: str = ""
    max_recoveries: int = 100
    max_restarts: int = 3
    max_skipped: int | None = 10
    in_place: bool = True
    resumable: bool = True
    repeats: bool = True
    go_back: bool = False
    nodes: int = 1
    least_nodes: int = 1


def decide(event: Event, history: Sequence[Incident], budgets: Budgets) -> Decision:
    """Return the answer to an event, given the incidents before it (this one not among them) and the means left."""
    raise NotImplementedError


def table() -> str:
    """Return the answers to every kind of event as a table of Markdown."""
    raise NotImplementedError
