"""The answer to an event: one pure function, ``decide(event, history, budgets) -> Decision``. No torch, no clock.

Each kind of event has a ladder of answers, the cheapest first, and gets the first one that there are means for. Four
rules go before the ladders: a step that ends a run thrice is not tried again, nor one that ends it twice with the same
exception, nor a start that a rank ends thrice with the same one; and a node that fails twice within an hour is left
out, the only one for corruption alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megacore import exits
from megacore.recovery.events import KINDS, Event, Kind

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
        life: The launch that it befell; no two launches have the same. Nothing where the ranks have answered it.
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
        node_failures: Failures of a node within an hour with which it is left out; None for any number.
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
    node_failures: int | None = 2


LADDERS: Mapping[Kind, tuple[Action, ...]] = {
    "killed": ("replace", "restart", "end"),
    "raised": ("replace", "restart", "end"),
    "aborted": ("replace", "restart", "end"),
    "hung": ("replace", "restart", "end"),
    "lost_contact": ("rebuild", "restart", "end"),
    "agent_lost": ("evict", "restart", "end"),
    "node_joins": ("rebuild", "tell"),
    "node_leaves": ("evict", "end"),
    "non_finite": ("repeat", "end"),
    "spike": ("repeat", "tell"),
    "unrepeatable": ("evict", "tell"),
    "bad_data": ("skip", "go_back", "end"),
    "corrupted": ("restart", "replace", "end"),  # what its gradients were in is elsewhere too
    "straggler": ("tell",),
    "save_failed": ("tell",),
}
"""{kind: its answers, in the order in which they are tried}."""

ENDS: Mapping[Kind, int] = {
    **dict.fromkeys(("killed", "raised", "aborted", "hung", "lost_contact", "agent_lost", "node_leaves"), exits.RETRY),
    **dict.fromkeys(("non_finite", "bad_data"), exits.FAILED),
    **dict.fromkeys(("unrepeatable", "corrupted"), exits.EVICT),
}
"""{kind: the exit status where its ladder has no other answer left}."""

DEADLY = ("killed", "raised", "aborted", "hung", "lost_contact")
"""The kinds that tell against the step that was being done."""
TELLING = ("killed", "aborted", "hung", "agent_lost", "corrupted")
"""The kinds that tell against the node: an exception is rather the program's, and lost contact anybody's."""
ANNOUNCED = ("node_joins", "node_leaves")
"""The kinds that are no faults: their answers cost nothing."""
OUTSIDE = ("start", "recover")
"""The phases that are no part of a step."""

TRIES = 3
"""Runs that a step may end."""
HOUR_S = 3600.0
"""A node that fails so often within so many seconds is left out."""
WINDOW = 100
"""Steps among which ``max_skipped`` may be left out."""


def decide(event: Event, history: Sequence[Incident], budgets: Budgets) -> Decision:
    """Return the answer to an event.

    Args:
        event: The event.
        history: The incidents before it, of all launches, the oldest first.
        budgets: The means.
    """
    case = _Case(event, history, budgets)
    ended = [each for each in case.own if each.decision.action == "end"]
    if ended:
        return ended[-1].decision
    if case.kills >= TRIES:
        return case.end(f"{case.step} has ended the run {case.kills} times", exits.FAILED)
    if event.kind == "raised" and case.raised_before:
        return case.end(f"{case.step} has ended with the same exception before: {event.detail}", exits.FAILED)
    if case.stuck >= TRIES:
        who = "a rank" if event.rank is None else f"rank {event.rank}"
        return case.end(f"{who} has ended {case.stuck} times alike, and no step was done: {event.detail}", exits.FAILED)
    if event.kind == "bad_data" and case.alike >= TRIES - 1:
        return case.end(f"{case.step} was bad with other samples too: it is not the data", exits.FAILED)
    if event.kind == "unrepeatable" and event.rank is None:
        return Decision("tell", "nobody knows whose part of the step differed")
    if budgets.node_failures is not None and case.failures >= budgets.node_failures:
        if case.lacks("evict") is None:
            return case.take("evict", f"node {event.node} has failed {case.failures} times within an hour")
        return case.end(f"node {event.node} has failed {case.failures} times within an hour", exits.EVICT)
    lacking = list[str]()
    for action in LADDERS[event.kind]:
        if (lack := case.lacks(action)) is None:
            return case.take(action, "; ".join(lacking) or KINDS[event.kind])
        lacking += [lack] if lack else []
    raise AssertionError(f"the ladder of {event.kind} has no end")


@dataclass(frozen=True)
class _Case:
    """An event among the incidents before it."""

    event: Event
    history: Sequence[Incident]
    budgets: Budgets

    @property
    def own(self) -> list[Incident]:
        """The incidents of this launch."""
        return [each for each in self.history if each.life == self.budgets.life]

    @property
    def unread(self) -> list[Incident]:
        """The incidents since a run ended as failed: then somebody has read why, and changed something."""
        ends = [
            number
            for number, each in enumerate(self.history)
            if each.decision.action == "end" and each.decision.status == exits.FAILED
        ]
        return list(self.history[ends[-1] + 1 if ends else 0 :])

    @property
    def step(self) -> str:
        """The step in words."""
        event = self.event
        samples = f" (samples {event.samples[0]} to {event.samples[1] - 1})" if event.samples else ""
        return f"step {event.step}{samples}"

    @property
    def kills(self) -> int:
        """The times that this step has ended the run, this one among them; 0 where it is not the step's fault."""
        return 1 + sum(self._tells_against_the_step(each.event) for each in self.unread) if self._deadly else 0

    @property
    def raised_before(self) -> bool:
        return self._deadly and any(
            each.event.kind == "raised"
            and self._tells_against_the_step(each.event)
            and each.event.detail == self.event.detail
            for each in self.unread
        )

    @property
    def stuck(self) -> int:
        """The times that its rank has raised the same exception outside of a step, this one among them, with no step
        between them: a program that fails so does it again, and none would end it."""
        event = self.event
        if event.kind != "raised" or self._deadly:
            return 0
        same = ("kind", "rank", "detail", "step", "phase")
        return 1 + sum(all(getattr(each.event, key) == getattr(event, key) for key in same) for each in self.own)

    @property
    def alike(self) -> int:
        """The times before this one that such an event was met at this step."""
        return sum((each.event.kind, each.event.step) == (self.event.kind, self.event.step) for each in self.unread)

    @property
    def failures(self) -> int:
        """The times that its node has failed within an hour, this one among them; 0 where that is not known.

        Against a node that is the only one nothing but corruption tells: its ranks can die nowhere else.
        """
        telling = TELLING if self.budgets.nodes > 1 else ("corrupted",)
        if self.event.node is None or self.event.kind not in telling:
            return 0
        return 1 + sum(
            self._is_its_node(each) and each.event.kind in telling and abs(self.event.at - each.event.at) <= HOUR_S
            for each in self.history
        )

    def _is_its_node(self, other: Incident) -> bool:
        """Return whether another incident was on the same node: numbers tell within a launch, hosts between them."""
        if other.life != self.budgets.life and (other.event.host or self.event.host):
            return other.event.host == self.event.host
        return other.event.node == self.event.node

    @property
    def _deadly(self) -> bool:
        return self.event.step is not None and self._tells_against_the_step(self.event)

    def _tells_against_the_step(self, other: Event) -> bool:
        return other.kind in DEADLY and other.step == self.event.step and other.phase not in OUTSIDE

    def spent(self, *actions: Action) -> int:
        return sum(
            each.decision.action in actions and each.event.kind not in ANNOUNCED and each.life == self.budgets.life
            for each in self.history
        )

    def lacks(self, action: Action) -> str | None:
        """Return why there are no means for an answer: in words, or "" where they need not be told; None if there
        are."""
        return LACKS[action](self)

    def take(self, action: Action, reason: str) -> Decision:
        event, budgets = self.event, self.budgets
        if action == "end":
            return self.end(reason, ENDS[event.kind])
        if action == "restart":
            reason = f"restart {self.spent('restart') + 1} of {budgets.max_restarts}"
        samples = event.samples if action in ("skip", "go_back") else None
        return Decision(action, reason, event.rank, event.node, samples)

    def end(self, reason: str, status: int) -> Decision:
        return Decision("end", reason, self.event.rank, self.event.node, status=status)


def _in_place(case: _Case) -> str | None:
    most = case.budgets.max_recoveries
    if not case.budgets.in_place:
        return ""
    if case.event.kind in ANNOUNCED:
        return None
    return None if case.spent("repeat", "rebuild", "replace", "evict") < most else f"all {most} recoveries are spent"


def _replace(case: _Case) -> str | None:
    return "nobody knows which rank" if case.event.rank is None else _in_place(case)


def _evict(case: _Case) -> str | None:
    budgets = case.budgets
    if case.event.node is None:
        return "nobody knows which node"
    if budgets.nodes <= budgets.least_nodes:
        return f"it needs all of its nodes ({budgets.nodes})"
    return _in_place(case)


def _repeat(case: _Case) -> str | None:
    return _in_place(case) if case.budgets.repeats else "steps are not repeated"


def _skip(case: _Case) -> str | None:
    most, step = case.budgets.max_skipped, case.event.step or 0
    if case.event.samples is None:
        return "nobody knows which samples"
    left_out = sum(
        each.decision.action in ("skip", "go_back") and abs((each.event.step or 0) - step) < WINDOW
        for each in case.unread
    )
    return None if most is None or left_out < most else f"{most} of {WINDOW} steps are left out already"


def _restart(case: _Case) -> str | None:
    most = case.budgets.max_restarts
    if not case.budgets.resumable:
        return "it writes no checkpoints to restart from"
    if most == 0:
        return "it may not restart (recovery.max_restarts=0)"
    spent = case.spent("restart")
    return None if spent < most else f"all {most} restarts are spent (recovery.max_restarts)"


LACKS: Mapping[Action, Callable[[_Case], str | None]] = {
    "tell": lambda case: None,
    "repeat": _repeat,
    "skip": lambda case: "" if case.budgets.go_back else _skip(case),
    "go_back": lambda case: _skip(case) if case.budgets.go_back else "",
    "rebuild": _in_place,
    "replace": _replace,
    "evict": _evict,
    "restart": _restart,
    "end": lambda case: None,
}
"""{answer: why there are no means for it}."""


def table() -> str:
    """Return the answers to every kind of event as a table of Markdown."""
    names = {value: name for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    rows = ["| event | what it is | answers, the first that there are means for |", "|---|---|---|"]
    for kind, ladder in LADDERS.items():
        answers = ", ".join(
            f"{action} ({ENDS[kind]}, {names[ENDS[kind]]})" if action == "end" else action for action in ladder
        )
        rows.append(f"| `{kind}` | {KINDS[kind]} | {answers} |")
    return "\n".join(rows)
