"""Bad steps: those that are not finite or spike, known on the device alone until somebody looks; and what they come to
when they are done again."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megacore import exits
from megacore.control import Control
from megacore.data.skipped import SkippedSamples
from megacore.recovery.events import Event, Kind
from megacore.recovery.policy import WINDOW, Budgets, Decision, Incident, decide
from megacore.training.step import Stats


class NonFinite(RuntimeError):
    """The loss or the gradient norm is not a number any more, or too often; on every rank."""

    status = exits.FAILED


class UnsoundHardware(NonFinite):
    """A bad step was bad again, with other numbers."""

    status = exits.EVICT


@dataclass
class Trouble:
    """Bad steps, counted on the device so that nobody waits for it.

    Args:
        first: The step from which on the weights do not change any more, 0 if there is none: the one that is not finite
            and one more than ``allowed`` among the last ``WINDOW``, or one above ``limits``. Those that overflowed for
            their loss scale do not count.
        here: Whether this rank's own part of the loss was not finite at that step.
        skipped: The number of steps that were left out.
        halted: Whether there is such a step.
        recent: The last ``WINDOW`` steps that were left out and count.
        allowed: The number of them that may be; None for any.
        outcome: fp64 [5], what that step has come to, and ``skipped`` before it; None where nobody asks.
        limits: fp64 [2], the loss and the gradient norm above which a step spikes; None where none does.
    """

    first: Tensor
    here: Tensor
    skipped: Tensor
    halted: Tensor
    recent: Tensor
    allowed: int | None
    outcome: Tensor | None = None
    limits: Tensor | None = None

    @classmethod
    def none(cls, device: torch.device, allowed: int | None, skipped_before: int = 0, repeats: bool = False) -> Trouble:
        first, skipped = torch.tensor([0, skipped_before], device=device).unbind()
        here, halted = torch.zeros(2, dtype=torch.bool, device=device).unbind()
        outcome = torch.zeros(5, dtype=torch.float64, device=device) if repeats else None
        return cls(first, here, skipped, halted, torch.zeros(WINDOW, dtype=torch.bool, device=device), allowed, outcome)

    def note(self, step: int, stats: Stats) -> None:
        bad, before = ~stats.finite, self.skipped
        self.skipped = before + bad
        bad &= ~stats.overflow
        self.recent[step % WINDOW] = bad
        if self.allowed is None:
            return
        now = self.recent.sum() > self.allowed
        if self.limits is not None:
            now |= (stats.outcome[:2] > self.limits).any() & stats.finite
        now &= ~self.halted
        self.halted |= now
        self.first = torch.where(now, step, self.first)
        self.here |= now & ~torch.isfinite(stats.own_loss)
        if self.outcome is not None:
            self.outcome = torch.where(now, torch.cat([stats.outcome, before[None]]), self.outcome)

    @property
    def spiked(self) -> bool:
        """Whether the step that has halted the run was a finite one, above the limits."""
        return self.outcome is not None and bool(torch.isfinite(self.outcome[:2]).all())


class Again(Exception):
    """The steps from the one on that has halted the run are to be done again, from the state before it, which is
    there."""


class GoBack(Exception):
    """The run is to go on from the newest checkpoint before a bad step, without the samples from there to its end.

    Args:
        step: The step.
        stop: The sample after its last one.
        skipped: The samples that the run leaves out by now.
        history: The incidents of the run.
    """

    def __init__(self, step: int, stop: int, skipped: SkippedSamples, history: list[Incident]) -> None:
        super().__init__(f"before step {step}")
        self.step, self.stop, self.skipped, self.history = step, stop, skipped, history


Bits = tuple[str, str]
"""Two numbers by their bits: all that are none are alike."""


@dataclass(frozen=True)
class StepResult:
    """The numbers that a step has come to, which all ranks know.

    Args:
        total: The loss and the gradient norm.
        parts: Each rank's own part of the loss, and of the squares of the gradient.
    """

    total: Bits
    parts: tuple[Bits, ...]

    @classmethod
    def of(cls, values: Tensor, control: Control) -> StepResult:
        """Ask all ranks for what they have, [4] or more; all of them call this."""
        loss, norm, *own = (value.hex() for value in values.tolist()[:4])
        return cls((loss, norm), tuple((own_loss, squares) for own_loss, squares in control.exchange(own)))

    def __str__(self) -> str:
        loss, norm = map(float.fromhex, self.total)
        return f"loss {loss:.6g}, gradient norm {norm:.6g}"

    def differing(self, other: StepResult) -> list[int]:
        """Return the ranks whose part of the loss is another; where there is none, those whose gradient is."""
        pairs = list(enumerate(zip(self.parts, other.parts, strict=True)))
        losses = [rank for rank, (one, two) in pairs if one[0] != two[0]]
        return losses or [rank for rank, (one, two) in pairs if one != two]


@dataclass(frozen=True)
class BadStep:
    """A bad step that is done again.

    Args:
        step: The step.
        samples: The samples [first, stop) of it.
        outcome: The numbers that it has come to.
    """

    step: int
    samples: tuple[int, int]
    outcome: StepResult

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(float.fromhex(each)) for each in self.outcome.total)


@dataclass
class Repetition:
    """The steps of a run that are done again: each is compared, bit for bit, with what it came to before.

    The same on all ranks, which call it together, so that they give one answer.

    Args:
        control: The messages between the ranks.
        budgets: The means of the run.
    """

    control: Control
    budgets: Budgets
    bad: BadStep | None = field(default=None, init=False)
    """The one that is to be done again, or is being done."""
    history: list[Incident] = field(default_factory=list, init=False)

    def found(self, bad: BadStep) -> tuple[Event, Decision]:
        """Return the answer to a step that is bad for the first time."""
        event = self._event("spike" if bad.is_finite else "non_finite", bad, str(bad.outcome))
        decision = self._decide(event)
        self.bad = bad if decision.action == "repeat" else None
        return event, decision

    def compared(self, now: BadStep) -> tuple[Event, Decision]:
        """Return the answer to what the bad step has come to when it was done again."""
        before, self.bad = self.bad, None
        assert before is not None and before.step == now.step
        if now.outcome == before.outcome:
            event = self._event("bad_data", now, str(now.outcome))
        else:
            ranks = now.outcome.differing(before.outcome)
            # In a pipeline what is wrong on one stage is seen on others.
            known = ranks[0] if len(ranks) == 1 and self.control.mesh.shape.pp == 1 else None
            who = ", ".join(self.control.who(rank) for rank in ranks) or "no rank's own part, but their sum"
            event = self._event("unrepeatable", now, f"{before.outcome}; then {now.outcome}; differed: {who}", known)
        return event, self._decide(event)

    def _event(self, kind: Kind, bad: BadStep, detail: str, rank: int | None = None) -> Event:
        at = self.control.tell(time.time())
        return Event(kind, rank, None, bad.step, None, detail, at, bad.samples)

    def _decide(self, event: Event) -> Decision:
        decision = decide(event, self.history, self.budgets)
        self.history.append(Incident(event, decision, self.budgets.life, len(self.history) + 1))
        return decision
