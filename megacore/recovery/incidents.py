"""The incidents of a run, ``incidents.jsonl`` in its folder: what befell it, what was done, what it cost. No torch.

The agent of node 0 appends a line for each incident, and another one, of the same number, with what is known of it
later; rank 0 adds such a line too, once a step is done again. Nothing is overwritten, and a line that a kill or a full
disk has cut is passed over.
"""

from __future__ import annotations

from pathlib import Path

from megacore.recovery.events import Event
from megacore.recovery.policy import Decision, Incident

INCIDENTS = "incidents.jsonl"


def read(out: Path) -> list[Incident]:
    """Return the incidents of a run, in the order in which they befell it; none where there is no file."""
    raise NotImplementedError


def write(out: Path, event: Event, decision: Decision, life: str, seen_after: float | None = None) -> Incident:
    """Add an incident to those of a run, on the disk -> it, with its number.

    Raises:
        StoreError: it cannot be written.
    """
    raise NotImplementedError


def recovered(out: Path, number: int, at: float, steps_lost: int, seconds_lost: float) -> None:
    """Add to an incident that a step was done again, at this time.

    Raises:
        StoreError: it cannot be written.
    """
    raise NotImplementedError


def summary(incidents: list[Incident]) -> str:
    """Return a few words: ``3 incidents, 0 steps lost``."""
    raise NotImplementedError
