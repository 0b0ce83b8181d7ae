"""The ranks of a run, as their agent watches them until all have ended: signals, hangs, and what has ended them.

Here a fault ends all; with an agent that leads (:mod:`megacore.recovery.lead`) those that died are replaced.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megacore import exits
from megacore.rank import CRASHED, LOST
from megacore.recovery.children import Children
from megacore.recovery.drain import LOOK_S
from megacore.recovery.ends import SAID, Exit, listed
from megacore.recovery.events import Kind
from megacore.recovery.hangs import doing
from megacore.recovery.watch import POLL_S
from megacore.say import err

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 30.0
"""The seconds that the other ranks have once one has failed: to say something, or to publish a checkpoint."""
PATIENCE_S = 1.0
"""A second Ctrl-C within it is the first one still: wrappers pass on what the terminal has sent to all."""


class Readable(Protocol):
    """A descriptor, or something that has one."""

    def fileno(self) -> int: ...


@dataclass
class Ranks:
    """The ranks of this machine, all of which a fault ends.

    Args:
        children: Their processes.
        shutdown_s: Seconds that the signal to end leaves them.
        way_out: A sentence that says what to do where a rank stands still.
        drained: Whether somebody asks this node to leave; looked at every second.
    """

    children: Children
    shutdown_s: float
    way_out: str = ""
    drained: Callable[[], bool] | None = None
    ended: dict[int, Exit] = field(default_factory=dict)
    """{life: its end} of those that have ended, and that nobody replaces."""
    signalled: int = 0
    """The signal that has asked for the end."""
    since: float = 0.0
    limit: float = math.inf
    """The time by which all are to have ended."""
    look_at: float = 0.0
    seen: float = 0.0
    """The time when the first rank was seen that had failed."""
    fault: tuple[Kind, int | None, str] | None = None
    """The fault that has ended them: its kind, the rank, and a few words."""

    @property
    def running(self) -> Mapping[int, int]:
        """{life: rank} of those that have not ended."""
        return {life: child.rank for life, child in self.children.living.items()}

    def goes_on(self) -> bool:
        """Return whether there is anything to wait for."""
        return bool(self.running)

    def watch(self, arriving: int) -> int:
        """Wait until all have ended, and say why, where they do not -> exit status."""
        self.reap()
        while self.goes_on():
            there = self.wait(arriving)
            if time.monotonic() >= self.limit:
                if self.signalled:
                    ranks = listed(self.running.values())
                    tell(f"Ranks {ranks} did not end within {self.shutdown_s:g} s of the signal: killed.")
                break
            for number in os.read(arriving, 4096) if arriving in there else ():
                if self.is_last(number):
                    return exits.of_signal(number)
            self.reap()
            failed = [end for end in self.ended.values() if end.status]
            if any(end.waited for end in failed):
                break
            if failed and not self.signalled:
                self.limit = min(self.limit, time.monotonic() + GRACE_S)
        return self.status()

    def wait(self, arriving: int) -> list[int | Readable]:
        """Wait for signals and for what others say, until the next deadline -> what of it can be read."""
        self.children.prepare()
        if self.children.hangs is not None:
            self.children.end_hangs()
        deadline = min(self.limit, self.deadline)
        if self.children.hangs is not None:
            deadline = min(deadline, time.monotonic() + POLL_S)
        if self.drained is not None and not self.signalled and time.monotonic() >= self.look_at:
            self.look_at = time.monotonic() + LOOK_S
            if self.drained():
                self.drain()
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ends: list[int | Readable] = [arriving, *self.speakers()]
        there = select.select(ends, [], [], left)[0]
        self.hear(there)
        return there

    @property
    def deadline(self) -> float:
        """The time at which :meth:`hear` is to be called, if nothing else is."""
        return math.inf

    def speakers(self) -> list[Readable]:
        """Return all that may have something to say."""
        return [child.channel for child in self.children.living.values()] if self.children.talks else []

    def hear(self, there: Sequence[int | Readable]) -> None:
        """Take what those that speak say."""
        for life, child in list(self.children.living.items()):
            for message in (child.channel.heard() or ()) if child.channel in there else ():
                self.said(life, message)

    def said(self, life: int, message: Mapping[str, Any]) -> None:
        """Take what a process says."""

    def is_last(self, number: int) -> bool:
        """Do what a signal asks for -> whether the run ends at once."""
        if number == signal.SIGUSR1:
            self.send(number)
        elif number == signal.SIGUSR2:
            self.children.show()
        elif number in ENDS and not self.signalled:
            self.end_by(number)
        elif number == signal.SIGINT and time.monotonic() - self.since > PATIENCE_S:
            tell("Interrupted again: ended at once, without a checkpoint.")
            return True
        return False

    def end_by(self, number: int) -> None:
        """Have all ranks end, because of a signal."""
        self.signalled, self.since = number, time.monotonic()
        self.limit = self.since + self.shutdown_s
        self.send(signal.SIGTERM)

    def drain(self) -> None:
        """Do what whoever wants this node to leave asks for."""
        self.end_by(signal.SIGTERM)

    def send(self, number: int) -> None:
        """Send all ranks a signal."""
        self.children.send(number)

    def reap(self) -> None:
        """Take note of those that have ended."""
        for end in self.children.reap():
            self.note(end)

    def note(self, end: Exit) -> None:
        """Take note of one that has ended."""
        self.ended[end.life] = end
        self.seen = self.seen or (time.time() if end.status else 0.0)

    def status(self) -> int:
        """Return the exit status of all together, once all have ended or been given up; says what they have not."""
        ends = list(self.ended.values())
        failed = [end for end in ends if end.status and end.status != LOST]
        if waiting := [end for end in ends if end.status and end.waited]:
            missing, said = self._say_who_stands_still(waiting[0])
            first = waiting[0]
            self.fault = ("hung", missing, said) if first.report else ("aborted", first.rank, said)
            return exits.FAILED
        if self.signalled:
            return next((end.status for end in failed if end.status > 0), exits.of_signal(self.signalled))
        if failed:
            end = failed[0]
            if end.hung:  # it has been said
                self.fault = end.fault
                return exits.of_signal(signal.SIGKILL)
            if end.status not in SAID:
                self.fault = end.fault
                if end.status != CRASHED:
                    tell(end.why)
            return (
                exits.of_signal(-end.status)
                if end.status < 0
                else exits.FAILED
                if end.status == CRASHED
                else end.status
            )
        for end in ends:
            if end.report:
                tell(f"Rank {end.rank} has lost a rank of another machine{end.report['where']}: {end.report['error']}")
                self.fault = "lost_contact", end.rank, end.report["error"]
                return exits.FAILED
        return exits.DONE

    def _say_who_stands_still(self, first: Exit) -> tuple[int | None, str]:
        """Say where every rank stands -> (the one that stands still, if it is here; who has waited for whom)."""
        for end in self.ended.values():
            if end.report and "stack" in end.report:
                tell(f"Rank {end.rank} (process {end.process}) waited here:\n{end.report['stack']}")
        stacks = self.children.show()
        missing = [rank for rank in self.children.ranks if doing(stacks.get(rank, ""))[0] != "waits"]
        whom = f"rank {listed(missing)}, which did not arrive" if missing else "a rank of another machine"
        where = first.report["where"] if first.report else ""
        said = f"Rank {first.rank} has waited too long for {whom}{where}"
        tell(f"{said}: all are ended. {self.way_out}".rstrip())
        return missing[0] if missing else None, said


def tell(text: str) -> None:
    """Say it on stderr."""
    err(f"\n{text}")  # a progress bar may stand in the last line
