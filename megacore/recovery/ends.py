"""The ends of the processes of a run, and the words for them. No torch."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megacore import exits
from megacore.rank import CRASHED, LOST
from megacore.recovery.events import Kind

SAID = (exits.FAILED, exits.MISUSED, exits.of_signal(signal.SIGPIPE))
"""The statuses of who has said what was wrong; with 141 nobody reads its output any more."""


@dataclass(frozen=True)
class Exit:
    """The end of a process, as its agent has seen it; it travels to other agents as JSON.

    Args:
        life: The number of the process.
        rank: The rank that it had.
        process: The number that its machine knew it by.
        status: Its exit status, negative for a signal.
        report: The words that it has left about its end, if it has.
        hung: Whether it stood still, and was killed.
    """

    life: int
    rank: int
    process: int
    status: int
    report: Mapping[str, Any] | None = None
    hung: bool = False

    @property
    def may_be_replaced(self) -> bool:
        """Whether it has ended without having said what was wrong with the run."""
        return self.status < 0 or self.status in (CRASHED, LOST)

    @property
    def waited(self) -> bool:
        """Whether it has waited for others in vain. NCCL's watchdog aborts a process that has waited for too long."""
        return bool(self.report.get("waited")) if self.report else self.status == -signal.SIGABRT

    @property
    def fault(self) -> tuple[Kind, int, str]:
        """The kind of fault that it has ended by, the rank at fault, and a few words."""
        report = self.report or {}
        if self.hung:
            return "hung", self.rank, "stood still, and was killed"
        if self.status < 0:
            kind: Kind = "aborted" if self.status == -signal.SIGABRT else "killed"
            return kind, self.rank, signal.Signals(-self.status).name
        if self.status == LOST:
            return "lost_contact", self.rank, report.get("error", "")
        raised = report.get("raised", f"ended with status {self.status}")
        return report.get("kind", "raised"), report.get("rank", self.rank), raised

    @property
    def why(self) -> str:
        """A sentence about it."""
        who = f"Rank {self.rank} (process {self.process})"
        if self.status >= 0:
            return f"{who} ended with status {self.status}."
        number = signal.Signals(-self.status)
        hint = ": where memory ran out, the kernel's log (dmesg) says so" if number == signal.SIGKILL else ""
        return f"{who} was ended by {number.name}{hint}."


def listed(ranks: Iterable[int]) -> str:
    """Return "0, 1"."""
    return ", ".join(map(str, sorted(ranks)))
