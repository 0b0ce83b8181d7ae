"""The two sides of the connections between agents: that of the lead, and that of the others. No torch until one begins.

    other -> lead   hello     its terms and its name
                    joined    is in a round of the rendezvous
    lead -> other   welcome   its number, and the lead's time
                    refused   and why
                    placed    takes part from here on
                    spare     waits until another node is gone
                    form      all leave this round, and form the next one
    both ways       said      a message of the agent
                    beat
                    left      ends the connection on purpose

The lead looks for newcomers that wait, and places those that have been in a round, in the order in which they came.
"""

from __future__ import annotations

import json
import platform
import socket
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from megacore.recovery.rendezvous import Rendezvous, Round

from megacore import exits
from megacore.recovery.channel import Message
from megacore.recovery.links import BEAT_S, PARTING_S, SILENCE_S, Link, Links, connected, listening
from megacore.recovery.news import Came, Gone, Mailbox, MembersError, Said, Terms
from megacore.say import err

POLL_S = 0.3
"""The time between two looks for nodes that wait, while there are newcomers."""
LEAD = "megacore/lead"
"""The key of the store under which the lead says where agents connect to, and for which run."""


class Side(ABC):
    """The threads of an agent beside its main one: one attends to its links, another one is in the rounds.

    Args:
        terms: The terms of the run.
        mailbox: The news for the main thread.
        store: The host and the port of the store.
    """

    links: Links

    def __init__(self, terms: Terms, mailbox: Mailbox, store: tuple[str, int]) -> None:
        self.terms, self.mailbox, self.store = terms, mailbox, store
        self.number = 0
        self.clock = time.time() - time.monotonic()
        """The lead's clock less this machine's monotonic one, in seconds."""
        self.after = -1
        """The last round that all are to leave."""
        self.open = self.spare = self.ended = False
        """Whether this node takes part, or waits until it may, or does so no more."""
        self.error: MembersError | None = None
        self.changed = threading.Condition()
        """Guards what is above, and wakes who waits for it."""
        self._rounds: threading.Thread | None = None

    def wait(self, deadline: float, timeout_s: float) -> None:
        """Wait until this node takes part.

        Raises:
            MembersError: it will not.
        """
        with self.changed:
            while not (self.open or self.error):
                left = None if self.spare else deadline - time.monotonic()
                if left is not None and left < 0:
                    self.error = MembersError(self.in_vain(timeout_s), exits.RETRY)
                    self.give_up(self.error)
                self.changed.wait(left)
            if self.error:
                raise self.error

    def start_rounds(self, address: str) -> None:
        """Be in the rounds of the run from now on, as a node with an address."""
        self._rounds = threading.Thread(target=self._stay, args=[address], name="rounds", daemon=True)
        self._rounds.start()

    def _stay(self, address: str) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousError

        from megacore.recovery.rendezvous import Rendezvous

        terms, late = self.terms, self.terms.most > self.terms.least
        while not self.ended:
            try:
                store = self.store_of_rounds()
                rendezvous = Rendezvous(
                    store, terms.run, terms.least, late, address, self.clock, self.has_ended, self.entered
                )
                try:
                    while not self.ended:
                        if (made := rendezvous.join()) is None:
                            self.in_none()
                        else:
                            self.in_round(made, rendezvous)
                finally:
                    rendezvous.close()
            except (RendezvousError, RuntimeError):  # the store does not answer: connect anew, while the lead is there
                with self.changed:
                    self.changed.wait_for(self.has_ended, BEAT_S)

    def has_ended(self) -> bool:
        return self.ended

    def close(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        self.links.close()
        if self._rounds is not None:
            self._rounds.join(2 * PARTING_S)  # torch sleeps for a second, and a lead that is gone may not answer

    @abstractmethod
    def link_to(self, node: int) -> Link | None:
        """Return the link to a node; None where there is none."""

    @abstractmethod
    def in_vain(self, timeout_s: float) -> str:
        """Return what to say where this node has waited too long."""

    @abstractmethod
    def give_up(self, error: MembersError) -> None:
        """Tell those who wait for this node."""

    @abstractmethod
    def store_of_rounds(self) -> TCPStore:
        """Return a connection to the store."""

    @abstractmethod
    def entered(self) -> None:
        """Note that this node is among those of the round that is made."""

    @abstractmethod
    def in_none(self) -> None:
        """Note that this node has come into no round for long."""

    @abstractmethod
    def in_round(self, made: Round, rendezvous: Rendezvous) -> None:
        """Stay in a round until another one is to be formed."""


@dataclass
class Member:
    """A node as the lead knows it."""

    number: int
    processes: int
    name: str
    joined: bool = False
    """Whether it has been in a round."""
    placed: bool = False
    """Whether it takes part."""


class LeadSide(Side):
    """The side of the agent that leads.

    Args:
        end: The socket that listens at the port of the store.
    """

    def __init__(self, terms: Terms, mailbox: Mailbox, store: tuple[str, int], end: socket.socket) -> None:
        from megacore.recovery.rendezvous import host_store

        super().__init__(terms, mailbox, store)
        self._nodes = dict[Link, Member]()
        self._numbers = 1
        self._lost_early = 0
        """The nodes that were gone before the run began."""
        self._latest = -1
        """The last round that a node has been in."""
        self._store = host_store(*store, end.detach())
        agents = listening(store[0], 0)
        self._facts = json.dumps({"run": terms.run, "port": agents.getsockname()[1]})
        self.links = Links(self._heard, self._gone, agents)
        self.links.start()
        self.start_rounds(store[0])

    def close(self) -> None:
        super().close()
        del self._store  # its port is free then

    def link_to(self, node: int) -> Link | None:
        with self.changed:
            return next((link for link, known in self._nodes.items() if known.number == node), None)

    def in_vain(self, timeout_s: float) -> str:
        host, port = self.store
        return (
            f"{1 + len(self._nodes)} of at least {self.terms.least} nodes came within {timeout_s:g} s: start the "
            f"others with NNODES={self.terms.told()['NNODES']} MASTER_ADDR={host} MASTER_PORT={port}, or ask for fewer"
        )

    def give_up(self, error: MembersError) -> None:
        for link in self._nodes:
            self.links.say(link, "refused", reason=str(error), status=error.status)

    def store_of_rounds(self) -> TCPStore:
        return self._store

    def entered(self) -> None:
        self._store.set(LEAD, self._facts)  # others wait for it: none closes the first round without the lead

    def in_none(self) -> None:
        self._form(self._latest)  # the others may have closed one without it: only the lead lets nodes in

    def _form(self, after: int) -> None:
        """Have all leave a round."""
        with self.changed:
            self.after = max(self.after, after)
            for link, node in self._nodes.items():
                if node.joined:
                    self.links.say(link, "form", after=self.after)

    def in_round(self, made: Round, rendezvous: Rendezvous) -> None:
        with self.changed:
            if not self.open:
                # Those that are in it see that within a second; some of it may have died.
                self.changed.wait_for(lambda: self._knows_of(made.nodes), SILENCE_S)
                self.open = self._joined() >= self.terms.least
                if self.open:
                    self.mailbox.put(Came(0, self.terms.processes, platform.node()))
                    self._place()
                self.changed.notify_all()
        while self.open and not self.ended and not self._newcomers_wait(made, rendezvous):
            pass
        self._form(made.number)

    def _joined(self) -> int:
        return 1 + sum(node.joined for node in self._nodes.values())

    def _knows_of(self, nodes: int) -> bool:
        return self.ended or self._joined() + self._lost_early >= nodes

    def _newcomers_wait(self, made: Round, rendezvous: Rendezvous) -> bool:
        """Sleep until there are newcomers -> whether they wait for another round already."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or not all(node.joined for node in self._nodes.values()))
            self.changed.wait_for(self.has_ended, POLL_S)
        return rendezvous.is_over(made)

    def _heard(self, link: Link, message: Message) -> None:
        with self.changed:
            match message["what"]:
                case "hello" if misfit := self._misfit(link, message):
                    self.links.say(link, "refused", reason=misfit, status=exits.MISUSED)
                case "hello":
                    node = Member(self._numbers, int(message["NPROC_PER_NODE"]), message["name"])
                    self._nodes[link], self._numbers = node, self._numbers + 1
                    self.links.say(link, "welcome", node=node.number, now=self.clock + time.monotonic())
                case "joined":
                    self._nodes[link].joined, self._latest = True, max(self._latest, message["round"])
                    if message["round"] <= self.after:  # the next one has begun meanwhile
                        self.links.say(link, "form", after=self.after)
                    self._place()
                case "said":
                    self.mailbox.put(Said(self._nodes[link].number, message["message"]))
            self.changed.notify_all()

    def _misfit(self, link: Link, hello: Message) -> str:
        """Return why a node cannot take part; nothing where it can."""
        differ = [
            f"{name}={hello[name]}, the lead {here}" for name, here in self.terms.told().items() if hello[name] != here
        ]
        return f"node {hello['name']} ({link.peer}) has {'; '.join(differ)}: give all the same" if differ else ""

    def _gone(self, link: Link, how: str) -> None:
        with self.changed:
            if (node := self._nodes.pop(link, None)) is None:
                return
            self._lost_early += not self.open
            if node.placed:
                self.mailbox.put(Gone(node.number, f"node {node.number} ({node.name}) {how}", link.left))
                self._place()
            self.changed.notify_all()

    def _place(self) -> None:
        """Let those take part that have joined, while there is room; the others are spares."""
        free = self.terms.most - 1 - sum(node.placed for node in self._nodes.values())
        for link, node in self._nodes.items():
            if self.open and node.joined and not node.placed:
                node.placed, free = free > 0, free - 1
                self.links.say(link, "placed" if node.placed else "spare")
                if node.placed:
                    self.mailbox.put(Came(node.number, node.processes, node.name))


class OtherSide(Side):
    """The side of an agent that does not lead; the lead's port is open."""

    def __init__(self, terms: Terms, mailbox: Mailbox, store: tuple[str, int], end: socket.socket) -> None:
        super().__init__(terms, mailbox, store)
        end.close()
        host, port = store
        try:
            lead = json.loads(self._ask()[1])
            if lead["run"] != terms.run:
                text = f"{host}:{port} leads the run {lead['run']}, this is {terms.run}: choose another MASTER_PORT"
                raise MembersError(text, exits.MISUSED)
        except (RuntimeError, ValueError, KeyError) as error:
            text = f"{host}:{port} is no lead of a run ({line(error)}): choose another MASTER_PORT, on all nodes"
            raise MembersError(text, exits.RETRY) from error
        self._lead = Link(connected(host, lead["port"], time.monotonic() + SILENCE_S), f"the lead ({host})")
        self._address = self._lead.end.getsockname()[0]
        self._lead.say("hello", name=platform.node(), **terms.told())
        self.links = Links(self._heard, self._gone)
        self.links.start(self._lead)

    def _ask(self) -> tuple[TCPStore, bytes]:
        from megacore.recovery.rendezvous import ask_store

        return ask_store(*self.store, LEAD)

    def link_to(self, node: int) -> Link | None:
        return self._lead if node == 0 else None

    def in_vain(self, timeout_s: float) -> str:
        return "the lead at {}:{} has not let this node in within {:g} s".format(*self.store, timeout_s)

    def give_up(self, error: MembersError) -> None:
        pass  # nobody does

    def store_of_rounds(self) -> TCPStore:
        return self._ask()[0]

    def entered(self) -> None:
        pass

    def in_none(self) -> None:
        pass

    def in_round(self, made: Round, rendezvous: Rendezvous) -> None:
        self.links.say(self._lead, "joined", round=made.number)
        with self.changed:
            self.changed.wait_for(lambda: self.ended or self.after >= made.number)

    def _heard(self, link: Link, message: Message) -> None:
        with self.changed:
            match message["what"]:
                case "welcome":
                    self.number, self.clock = message["node"], message["now"] - time.monotonic()
                    self.start_rounds(self._address)
                case "refused":
                    self.error = MembersError(message["reason"], message["status"])
                case "placed":
                    self.open = True
                case "spare" if not self.spare:
                    self.spare = True
                    err(f"node {self.number} is a spare: {self.terms.most} take part, and it waits until one is gone")
                case "form":
                    self.after = message["after"]
                case "said":
                    self.mailbox.put(Said(0, message["message"]))
            self.changed.notify_all()

    def _gone(self, link: Link, how: str) -> None:
        with self.changed:
            if self.open:
                self.mailbox.put(Gone(0, f"{link.peer} {how}", link.left))
            elif self.error is None:
                status = exits.DONE if link.left and self.spare else exits.RETRY
                self.error = MembersError(f"{link.peer} {how}", status)
            self.ended = True
            self.changed.notify_all()


def line(error: BaseException) -> str:
    """Return the first line of an error, for people."""
    return str(error).partition("\n")[0]
