"""A process that has imported all that a rank needs, and becomes one by a fork: in milliseconds, however busy the cores
are. It imports once; a process of its own for each rank that is replaced would import for seconds. No torch here.

It computes nothing and joins no group, so that there are no threads, locks or devices to inherit. What it forks is a
child of the agent, as if that had started it: the process between the two ends at once, and the agent adopts.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from megacore import rank

_IMPORTS_S = 30.0
"""The seconds for which it is waited for, before processes import by themselves."""
_ANSWERS_S = 1.0
_LONGEST = 1 << 17
"""Bytes of a message."""


class Forked:
    """A process that a template has made, for its agent as a :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class RankTemplate:
    """The template of ranks of this machine, as their agent sees it.

    Args:
        modules: The modules that it imports; the first one is what ranks run.
        environment: Its variables; those that libraries read when they are loaded hold for all that it makes.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        _adopt()
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._imported, self._until = False, time.monotonic() + _IMPORTS_S
        command = [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), *modules]
        # What the terminal sends to all is not for it; what it makes has a mask of its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._process = subprocess.Popen(command, env={**environment}, pass_fds=[theirs.fileno()])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptor: int,
        blocked: Collection[signal.Signals] = (),
    ) -> Forked | None:
        """Make a rank; None where it has not imported all yet, or is gone.

        Args:
            arguments: The arguments of :mod:`megacore.rank`.
            environment: All of its variables.
            descriptor: The end of a channel that it has under the same number.
            blocked: The signals that it blocks from its first instruction on.
        """
        if not self.imported:
            return None
        message = {
            "arguments": [*arguments],
            "environment": {**environment},
            "descriptor": descriptor,
            "blocked": [*map(int, blocked)],
        }
        with suppress(OSError):
            socket.send_fds(self._end, [json.dumps(message).encode()], [descriptor])
        made = self._heard(_ANSWERS_S)
        if not made:
            self._process.kill()
            self._process.wait()
            made = self._heard(0)  # from its last moment; what it has not told of ends by itself
        return Forked(int(made)) if made else None

    def wait(self) -> None:
        """Wait until it can fork, if that is soon."""
        self._imported = self._imported or bool(self._heard(max(0.0, self._until - time.monotonic())))

    @property
    def imported(self) -> bool:
        """Whether it can fork."""
        self._imported = self._imported or bool(self._heard(0))
        return self._imported

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End it; what it has made lives on."""
        self._end.close()
        self._process.kill()
        self._process.wait()

    def _heard(self, seconds: float) -> bytes:
        """Return what it says next; nothing where it says nothing for so long, or is gone."""
        try:
            self._end.settimeout(seconds)
            return self._end.recv(_LONGEST)
        except OSError:
            return b""


def main() -> None:
    agent, number, *modules = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    rank.die_with(agent)
    end = socket.socket(fileno=number)
    for name in modules:
        importlib.import_module(name)
    del sys.modules[modules[0]]  # it is run, as __main__
    end.send(b"imported")
    while True:
        data, descriptors, _, _ = socket.recv_fds(end, _LONGEST, 1)
        if not data:
            return
        reading, telling = os.pipe()
        held, holding = os.pipe()
        between = os.fork()
        if not between:
            os.close(holding)
            _become(telling, held, [end.detach(), reading], descriptors[0], json.loads(data))
        for each in (telling, held, *descriptors):
            os.close(each)
        made = os.read(reading, 32)
        os.waitpid(between, 0)  # from here on what was made is the agent's child
        end.send(made)
        os.write(holding, b"1")
        os.close(reading)
        os.close(holding)


def _become(telling: int, held: int, others: Sequence[int], descriptor: int, message: Mapping[str, Any]) -> NoReturn:
    """Make the process that becomes a rank, and end; in that process, become it.

    Args:
        telling: The pipe that takes its number.
        held: The pipe that says that the agent was told of it; if it closes without, the process ends.
        others: The files that are open and not for it.
        descriptor: The rank's end of its channel.
        message: The order of the agent.
    """
    if made := os.fork():
        os.write(telling, str(made).encode())
        os._exit(0)
    if not os.read(held, 1):
        os._exit(0)
    for each in (telling, held, *others):
        os.close(each)
    if descriptor != message["descriptor"]:
        os.dup2(descriptor, message["descriptor"])
        os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_SETMASK, message["blocked"])
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.argv = [str(rank.__file__), *message["arguments"]]
    rank.main()
    sys.exit()


def _adopt() -> None:
    """Have the orphans among the descendants of this process become its children."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


if __name__ == "__main__":
    main()
