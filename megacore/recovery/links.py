"""Connections between the agents of several machines, of which any may stand, die or be cut off. No torch."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from megacore.recovery.channel import Channel, Message

BEAT_S = 1.0
SILENCE_S = 5.0
"""A machine that stands, or whose cable is out, ends no connection: five beats that have not come do. A busy one may
miss some, and TCP sends what was lost again after 0.2, 0.6 and 1.4 s."""
AGAIN_S = 0.3
"""The time before the next attempt to reach what does not listen yet."""
PARTING_S = 1.0
"""The time that the other ends have to hear that this one leaves."""


class Link(Channel):
    """A connection to another agent. Nobody waits in it: what the other end does not take yet is sent on later.

    Args:
        end: The socket.
        peer: The name of the other end.
    """

    def __init__(self, end: socket.socket, peer: str) -> None:
        super().__init__(end)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.left = False
        """Whether the other end has said that it ends on purpose."""
        self.heard_at = time.monotonic()
        self.unsent = b""

    def say(self, what: str, **more: object) -> None:
        with self._writing:
            self.unsent += json.dumps({"what": what, **more}).encode() + b"\n"
        self.send()

    def send(self) -> None:
        """Send what the other end takes now."""
        with self._writing, suppress(OSError):
            while self.unsent:
                self.unsent = self.unsent[self.end.send(self.unsent, socket.MSG_DONTWAIT) :]

    def close(self) -> None:
        with self._writing:  # nobody is in the middle of sending to what will be another file's number
            self.end.close()


class Links:
    """The connections of an agent: a thread reads them, beats, and ends those that are silent.

    Args:
        heard: Is told of each message but beats, in that thread.
        ended: Is told of each connection that has ended, and how.
        listener: A socket at which others connect.
    """

    def __init__(
        self,
        heard: Callable[[Link, Message], None],
        ended: Callable[[Link, str], None],
        listener: socket.socket | None = None,
    ) -> None:
        self._heard, self._ended, self._listener = heard, ended, listener
        self._links = list[Link]()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._until = float("inf")
        self._thread = threading.Thread(target=self._attend, name="links", daemon=True)

    def start(self, *links: Link) -> None:
        """Attend to these, and to those that connect."""
        self._links += links
        self._thread.start()

    def say(self, link: Link, what: str, **more: object) -> None:
        """Say something, to nobody if the other end is gone; returns at once."""
        link.say(what, **more)
        if link.unsent:
            self._wake()

    def close(self) -> None:
        """End all connections on purpose, and say so; what has been said before arrives."""
        self._until = time.monotonic() + PARTING_S
        self._wake()
        self._thread.join()
        self._woken.close()
        self._waker.close()

    def _wake(self) -> None:
        with suppress(OSError):  # there is enough to read, or nobody who does
            self._waker.send(b".")

    def _attend(self) -> None:
        beat, parting = time.monotonic(), False
        while time.monotonic() < self._until and not (parting and not self._links):
            looked = time.monotonic()
            self._take(max(0.0, min(beat, self._until) - looked))
            # Not until now: this process may have stood itself meanwhile, and what has come then is not read yet.
            for link in [link for link in self._links if looked - link.heard_at > SILENCE_S]:
                self._end(link, f"has said nothing for {SILENCE_S:g} s")
            if (now := time.monotonic()) >= beat:
                beat = now + BEAT_S
                for link in self._links:
                    link.say("beat")
            if self._until < float("inf") and not parting:
                parting = True
                for link in self._links:
                    link.say("left")
        for link in self._links:
            link.close()
        if self._listener is not None:
            self._listener.close()

    def _take(self, seconds: float) -> None:
        """Wait for the others, and take what they send and can be sent."""
        ends = {link.fileno(): link for link in self._links}
        poll = select.poll()  # select takes no more than a thousand
        poll.register(self._woken, select.POLLIN)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        for number, link in ends.items():
            poll.register(number, select.POLLIN | (select.POLLOUT if link.unsent else 0))
        for number, what in poll.poll(1000 * seconds):
            if number == self._woken.fileno():
                self._woken.recv(4096)
            elif number not in ends:
                self._accept()
            elif what & ~select.POLLOUT:
                self._read(ends[number])
            else:
                ends[number].send()

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):  # who has connected is gone again
            end, address = self._listener.accept()
            self._links.append(Link(end, address[0]))

    def _read(self, link: Link) -> None:
        link.heard_at = time.monotonic()
        try:
            messages = link.heard()
            if messages is None:
                self._end(link, "is gone: its connection has ended")
            for message in messages or ():
                if message["what"] == "left":
                    link.left = True
                    self._end(link, "has left")
                elif message["what"] != "beat":
                    self._heard(link, message)
        except (ValueError, KeyError, TypeError) as error:  # whoever tries ports
            self._end(link, f"says what no agent does: {error!r}")

    def _end(self, link: Link, how: str) -> None:
        if link in self._links:
            self._links.remove(link)
            link.close()
            self._ended(link, how)


def is_here(host: str) -> bool:
    """Return whether a host is this machine."""
    family, kind, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as end:
        try:
            end.bind(address)
        except OSError:
            return False
    return True


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at all addresses of this machine: others may know it by another than it does."""
    if host == "localhost" or host.startswith("127."):
        return socket.create_server((host, port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def connected(host: str, port: int, deadline: float) -> socket.socket:
    """Return a socket that is connected to a host, once something listens there.

    Raises:
        OSError: nothing has until the deadline.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            end = socket.create_connection((host, port), max(left, AGAIN_S))
            end.settimeout(None)
            return end
        except OSError:
            if left < AGAIN_S:
                raise
        time.sleep(AGAIN_S)
