"""The channel between a rank and its agent, the launcher that started it: lines of JSON, both ways. No torch.

A *generation* is one life of the groups in which the ranks of a run talk. A fault ends it: the agent says ``over`` to
all ranks that live, each of which lets go of its groups and says ``ready``; the agent fills the places of the others
and says ``go``. So does a change of who takes part: after ``pause`` the ranks end the generation themselves, between
two steps, and no step is lost.

    rank -> agent    fault      a message to another rank has failed
                     ready      has let go of the groups of a generation, with its state
                     recovered  stands again, after the step that is said
                     lost       the ranks together do not have the state of the run any more
    agent -> rank    over       a generation is over
                     pause      a generation is to end after a step: the ranks of it that are not in the next one
                     go         the next one begins: the variables of the environment that have changed, and whether the
                                run has begun, in an earlier one
                     dismiss    the next one begins without this process
"""

from __future__ import annotations

import json
import os
import queue
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

CHANNEL = "MEGACORE_CHANNEL"
"""The variable that holds the number of a rank's end of its channel."""

STANDBY = "MEGACORE_STANDBY"
"""The variable that is set in a process that waits for a place among the ranks."""

OVERRIDES = "MEGACORE_OVERRIDES"
"""The variable that holds the overrides by which the recipe fits the ranks that there are: a list of JSON."""

CUT_AGAIN_S = 0.05
"""A rank that is in the middle of connecting opens new connections after the first have been cut."""

Message = Mapping[str, Any]


class Dismissed(Exception):  # no error: this process is not needed any more
    """The run goes on without this process."""


def overrides_here() -> list[str]:
    """Return the overrides by which the recipe fits the ranks that there are."""
    overrides: list[str] = json.loads(os.environ.get(OVERRIDES) or "[]")
    return overrides


class Channel:
    """One end of a channel; several threads may write to it.

    Args:
        end: The socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._writing = threading.Lock()
        self._read = b""

    def fileno(self) -> int:
        return self.end.fileno()

    def say(self, what: str, **more: object) -> None:
        """Say something, to nobody if the other end is gone."""
        with self._writing, suppress(OSError):
            self.end.sendall(json.dumps({"what": what, **more}).encode() + b"\n")

    def heard(self) -> Iterator[Message] | None:
        """Return what has arrived, after waiting for something; None once the other end is gone."""
        try:
            data = self.end.recv(65536)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._read = (self._read + data).split(b"\n")
        return iter([json.loads(line) for line in lines])


class Agent:
    """The agent of this process, as the process sees it.

    Args:
        channel: Its channel.
        stands_by: Whether the process waits for a place among the ranks, which :meth:`ready` gives it.
    """

    def __init__(self, channel: Channel, stands_by: bool = False) -> None:
        self._channel = channel
        self.generation, self.stands_by = 0, stands_by
        self.begun = False
        """Whether the ranks have trained in an earlier generation: their state is in memory, or lost."""
        self._ended = 0
        self._pause: Message = {"generation": 0}
        self._before = frozenset[str]()
        self._abort: Callable[[], object] = lambda: None
        self._come: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._free, self._over = threading.Event(), threading.Condition()
        self._free.set()
        threading.Thread(target=self._listen, name="agent", daemon=True).start()

    @classmethod
    def here(cls) -> Agent | None:
        """Return the agent that the environment names; None where there is none, under torchrun say: then a fault ends
        the run."""
        number = os.environ.pop(CHANNEL, None)
        if number is None:
            return None
        return cls(Channel(socket.socket(fileno=int(number))), os.environ.pop(STANDBY, None) is not None)

    @property
    def over(self) -> bool:
        """Whether this generation has been ended."""
        return self._ended >= self.generation > 0

    @property
    def pausing(self) -> bool:
        """Whether this generation is to end after a step."""
        return bool(self._pause["generation"] == self.generation > 0)

    def leaving(self) -> frozenset[int]:
        """Return the ranks that are not in the next generation, once it is known here too that this one is to end.

        Raises:
            RuntimeError: a fault has ended it meanwhile.
        """
        with self._over:
            self._over.wait_for(lambda: self.pausing or self.over)
            if self.over:
                raise RuntimeError("the generation was over before its ranks had left it")
            return frozenset(self._pause["leaving"])

    def connecting(self, abort: Callable[[], object] = lambda: None) -> None:
        """Note that the connections of a generation are made from here on: they are cut when it is over.

        Args:
            abort: Frees a rank that waits for others in another way.

        Raises:
            RuntimeError: the generation is over already.
        """
        with self._over:
            self._before, self._abort = frozenset(_connections().values()), abort
            self._free.clear()
            if self.over:  # before there was anything to cut
                raise RuntimeError("the generation was over before its ranks were connected")

    def soon_over(self, seconds: float) -> bool:
        """Return whether this generation is ended, at the latest after some seconds."""
        with self._over:
            return self._over.wait_for(lambda: self.over, seconds)

    def fault(self, error: BaseException) -> None:
        """Tell that a message to another rank has failed."""
        self._say("fault", error=str(error).partition("\n")[0])

    def ready(self) -> None:
        """Tell that this rank has let go of the groups of its generation, and wait for the next one, whose variables
        then stand in the environment.

        Raises:
            Dismissed: there is none for this process.
        """
        with self._over:  # nobody is in the middle of cutting what comes next
            self._free.set()
        self._say("ready")
        while True:
            message = self._come.get()
            if message["what"] == "dismiss":
                raise Dismissed
            os.environ.update(message["variables"])
            self.generation, self.begun = message["generation"], message["begun"]
            if not self.over:
                return
            self._say("ready")

    def recovered(self, step: int) -> None:
        self._say("recovered", step=step)

    def lost(self, reason: str) -> NoReturn:
        """Tell that the state of the run is lost, and wait for the end."""
        self._say("lost", reason=reason)
        while True:
            time.sleep(60)

    def _say(self, what: str, **more: object) -> None:
        self._channel.say(what, generation=self.generation, **more)

    def _listen(self) -> None:
        while (messages := self._channel.heard()) is not None:
            for message in messages:
                match message["what"]:
                    case "go" | "dismiss":
                        self._come.put(message)
                    case "pause":
                        with self._over:
                            self._pause = message
                            self._over.notify_all()
                    case "over":
                        with self._over:
                            self._ended = max(self._ended, message["generation"])
                            self._over.notify_all()
                        self._free_those_that_wait()

    def _free_those_that_wait(self) -> None:
        """Cut all connections of the generation until this rank has noticed: whoever waits for others gets an error."""
        while True:
            with self._over:
                if not self.over or self._free.is_set():
                    return
                self._abort()
                cut(self._before)
            self._free.wait(CUT_AGAIN_S)


def _connections() -> dict[int, str]:
    """Return {descriptor: name} of the sockets of this process."""
    found = dict[int, str]()
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for number in map(int, os.listdir(folder)):
        with suppress(OSError):
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                found[number] = f"{status.st_dev}:{status.st_ino}"
    return found


def cut(before: frozenset[str]) -> None:
    """Shut the network connections of this process but those that were there before: gloo's, whose abort frees nobody.

    They stay open: whose they are closes them. Where a rank waits to be called, which nothing cuts, it is called in
    place of the one that does not, and hung up on.
    """
    for number, name in _connections().items():
        if name in before:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
            listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if end.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if listens:
                _call(end)
            else:
                end.shutdown(socket.SHUT_RDWR)


def _call(listening: socket.socket) -> None:
    """Begin each connection that gloo may wait for at an address, and end it. It begins with the connection's number,
    in 8 bytes; those of an address count from 0, one for each rank."""
    for number in range(int(os.environ.get("WORLD_SIZE", "1"))):
        with suppress(OSError), socket.create_connection(listening.getsockname()[:2], timeout=1) as end:
            end.sendall(struct.pack("=q", number))
