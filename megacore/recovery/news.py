"""The news that an agent has of the other nodes of its run. No torch."""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from megacore.recovery.channel import Message


@dataclass(frozen=True)
class Came:
    """A node takes part from here on.

    Args:
        node: Its number, which no other node of the run has had.
        processes: The number of its processes.
        name: The name of its host.
    """

    node: int
    processes: int
    name: str = ""


@dataclass(frozen=True)
class Gone:
    """A node takes part no more.

    Args:
        node: Its number.
        reason: Its name, and how that was noticed.
        left: Whether it has said so: where the lead has, the run has ended.
    """

    node: int
    reason: str
    left: bool = False


@dataclass(frozen=True)
class Said:
    """A message of the agent of a node."""

    node: int
    message: Message


News = Came | Gone | Said


class MembersError(Exception):
    """The nodes do not come together.

    Args:
        text: The reason, and the way out.
        status: The exit status that tells whether to try again.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Terms:
    """The terms that all nodes of a run have alike.

    Args:
        run: The name of the run.
        processes: The number of processes of each node.
        least: The least number of nodes that begin.
        most: The most that take part.
    """

    run: str
    processes: int
    least: int
    most: int

    def told(self) -> dict[str, str]:
        """Return them as the environment of a launch says them."""
        nodes = str(self.most) if self.least == self.most else f"{self.least}:{self.most}"
        return {"run": self.run, "NPROC_PER_NODE": str(self.processes), "NNODES": nodes}


class Mailbox:
    """The news of an agent, which its main thread waits for among other things."""

    def __init__(self) -> None:
        self._news = deque[News]()
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)

    def fileno(self) -> int:
        return self._reading.fileno()

    def put(self, news: News) -> None:
        self._news.append(news)
        with suppress(OSError):  # there is enough to read, or nobody who does
            self._writing.send(b".")

    def take(self) -> list[News]:
        with suppress(BlockingIOError):
            self._reading.recv(4096, socket.MSG_DONTWAIT)
        return [self._news.popleft() for _ in range(len(self._news))]

    def take_those_who_came(self) -> list[Came]:
        """Take what stands before any other news."""
        came = list[Came]()
        while self._news and isinstance(self._news[0], Came):
            came.append(self._news[0])
            self._news.popleft()
        return came

    def close(self) -> None:
        self._reading.close()
        self._writing.close()
