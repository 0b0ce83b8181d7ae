"""The nodes of a run, of which some may die, come and leave: agents find each other by torch's elastic rendezvous.

The *lead* is an agent on the host that MASTER_ADDR names. It hosts the store of the rendezvous, and of the ranks; every
other agent keeps one connection to it, in which both beat each second. Where that ends, or nothing comes for a few
seconds, the other end is gone, and takes no round of the rendezvous to go on without. A newcomer is let in by a round
that all agents form in threads while their ranks train.

No torch is imported until there are several nodes.
"""

from __future__ import annotations

import socket
import time

from megacore import exits
from megacore.recovery.links import connected, is_here, listening
from megacore.recovery.news import Came, Gone, Mailbox, MembersError, News, Said, Terms
from megacore.recovery.sides import LeadSide, OtherSide, line

__all__ = ["Came", "Gone", "Members", "MembersError", "News", "Said"]


class Members:
    """The nodes of a run, as the agent of one of them sees them; all but :meth:`open` and :meth:`close` return at once.

    The lead hears which nodes come and go, and what they say; the others hear the lead, and when it is gone.

    Args:
        least: The least number of nodes that begin.
        most: The most that take part; more wait as spares.
        host: The host of the lead, MASTER_ADDR.
        port: The port of its store, MASTER_PORT.
        processes: The number of processes of each node.
        run_id: The name of the run.
        leads: Whether this agent leads; by default the first one on that host does.
    """

    def __init__(
        self, least: int, most: int, host: str, port: int, processes: int, run_id: str, leads: bool | None = None
    ) -> None:
        self._terms = Terms(run_id, processes, least, most)
        self.leads = bool(leads)
        self.store = host, port
        """The host and the port where ranks meet."""
        self._chosen = leads is not None
        self._mailbox = Mailbox()
        self._side: LeadSide | OtherSide | None = None

    @property
    def node(self) -> int:
        """The number of this node: 0 leads, and the others are numbered as they come."""
        return self._side.number if self._side is not None else 0

    def open(self, timeout_s: float) -> list[Came]:
        """Come together -> on the lead the nodes that take part, itself first; on the others nothing.

        A spare stays in here until a place is free.

        Args:
            timeout_s: Seconds until the least number of nodes is there, or this one is let in.

        Raises:
            MembersError: too few have come, this node does not fit, or the lead is gone.
        """
        deadline = time.monotonic() + timeout_s
        host, port = self.store
        try:
            end = self._listens()
            self.leads = end is not None
            if end is not None:
                self.store = host, end.getsockname()[1]
                self._side = LeadSide(self._terms, self._mailbox, self.store, end)
            else:
                self._side = OtherSide(self._terms, self._mailbox, self.store, connected(host, port, deadline))
            self._side.wait(deadline, timeout_s)
        except (OSError, RuntimeError) as error:
            text = f"no lead at {host}:{port} ({line(error)}): start the node of MASTER_ADDR and MASTER_PORT"
            self.close()
            raise MembersError(text, exits.RETRY) from error
        except BaseException:
            self.close()
            raise
        return self._mailbox.take_those_who_came()

    def _listens(self) -> socket.socket | None:
        """Listen at the host's port -> the socket; None where another agent leads."""
        host, port = self.store
        try:
            return listening(host, port) if self.leads or (not self._chosen and is_here(host)) else None
        except OSError as error:
            if not self._chosen:
                return None
            text = f"cannot lead at {host}:{port} ({line(error)}): choose another MASTER_PORT"
            raise MembersError(text, exits.MISUSED) from error

    def fileno(self) -> int:
        """Return a descriptor that can be read when there is news."""
        return self._mailbox.fileno()

    def news(self) -> list[News]:
        """Return what has happened since the last call, in order."""
        return self._mailbox.take()

    def say(self, node: int, what: str, **more: object) -> None:
        """Say something to the agent of a node, to nobody if it is gone; the others reach the lead alone, 0."""
        if self._side is not None and (link := self._side.link_to(node)) is not None:
            self._side.links.say(link, "said", message={"what": what, **more})

    def close(self) -> None:
        """Leave, and say so. What has been said before arrives."""
        side, self._side = self._side, None
        if side is not None:
            side.close()
        self._mailbox.close()
