"""The agent of a node that another one leads: it brings that what befalls its processes, and does what it orders."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megacore import exits
from megacore.recovery.ends import Exit
from megacore.recovery.members import Members
from megacore.recovery.news import Gone, Said
from megacore.recovery.ranks import Ranks, Readable, tell


@dataclass(kw_only=True)
class Follower(Ranks):
    """The ranks of this machine, whom the agent of node 0 leads.

    Args:
        members: The nodes.
    """

    members: Members
    launch: str = ""
    """The name of the launch that its processes are of."""
    told: int | None = None
    """The status that the run has ended with."""

    def goes_on(self) -> bool:
        return self.told is None

    def status(self) -> int:
        return exits.RETRY if self.told is None else self.told

    def speakers(self) -> list[Readable]:
        return [*super().speakers(), self.members]

    def hear(self, there: Sequence[int | Readable]) -> None:
        super().hear(there)
        for news in self.members.news():
            match news:
                case Said(_, {"what": what, **more}):
                    self._do(what, more)
                case Gone(_, reason) if self.told is None:
                    tell(f"The node that leads the run is gone: {reason}")
                    self.told = exits.RETRY

    def _do(self, what: str, more: Mapping[str, Any]) -> None:
        """Do what is ordered."""
        match what:
            case "begin":
                self.children.kill()
                self.children.forget()
                self.launch, self.children.arguments = more["launch"], more["arguments"]
            case "stand_by":
                self.children.stand_by(more["variables"])
            case "send":
                self.send(more["number"])
            case "end":
                self.told = more["status"]
            case _:
                self.children.do(what, more["life"], more["more"])

    def said(self, life: int, message: Mapping[str, Any]) -> None:
        self._report("said", life=life, message=message)

    def note(self, end: Exit) -> None:
        if end.status and end.may_be_replaced:
            tell(end.why)
        self._report("exit", exit=asdict(end))

    def end_by(self, number: int) -> None:
        self.signalled, self.since = number, time.monotonic()
        self._report("signal", number=number)

    def drain(self) -> None:
        self.signalled = signal.SIGTERM
        self._report("signal", number=0)

    def _report(self, what: str, **more: Any) -> None:
        self.members.say(0, what, launch=self.launch, **more)
