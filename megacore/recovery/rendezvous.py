"""torch's elastic rendezvous, by which the nodes of a run agree who takes part: imported where there are several.

A *round* is closed once the least number of nodes has come and a last call is over. Who comes later waits until all
that are in a round leave it and join the next one, which their ranks do not notice.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from megacore.recovery.channel import _connections

LAST_CALL_S = 1.0
"""The time for more than the least number of nodes. torch's 30 s are for machines that boot; who comes later is let in
while the others train."""
NO_CALL_S = 1e-6
"""The time where nobody else is to come."""
NEXT_CALL_S = 2.0
"""The time for all that have left a round to be in the next one: each looks once a second."""
JOIN_S = 10.0
"""The time after which a node that is in no round says so."""
KEEP_ALIVE_S = 1
KEEP_ALIVES = 3
"""A node that dies in a round is dropped after so many intervals without a sign; the next round waits for that."""
STORE_S = 10.0
"""The time for an answer of the store, which is a few numbers away: it has them all in memory."""


def host_store(host: str, port: int, listening: int) -> TCPStore:
    """Serve a store on the descriptor of a socket that listens at the host's port, which it takes over."""
    wait = timedelta(seconds=STORE_S)
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening, timeout=wait)


def ask_store(host: str, port: int, key: str) -> tuple[TCPStore, bytes]:
    """Connect to a store -> (it, what stands under a key).

    Raises:
        RuntimeError: what listens there is no store, or one without this key.
    """

    def ask() -> None:
        try:
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_S))
            answer.set_result((store, store.get(key)))
        except RuntimeError as error:
            answer.set_exception(error)

    answer = Future[tuple[TCPStore, bytes]]()
    # In a thread of its own: torch would wait for ever for what listens and says nothing.
    thread = threading.Thread(target=ask, name=f"ask {port}", daemon=True)
    thread.start()
    try:
        return answer.result(STORE_S + 1)
    except TimeoutError:
        # A process that ends while torch waits in a thread is aborted.
        for number in _connections():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] == port:
                    end.shutdown(socket.SHUT_RDWR)
        thread.join(1.0)
        raise RuntimeError("it says nothing") from None


@dataclass(frozen=True)
class Round:
    """A round: its number, and the number of its nodes."""

    number: int
    nodes: int


class Rendezvous:
    """The rounds of the rendezvous of a run, as one node sees them; all of it is for one thread.

    Args:
        store: The store that the lead hosts.
        run_id: The name of the run.
        least: The least number of nodes of a round.
        late: Whether more than those may come.
        address: An address of this machine.
        clock: The time of the lead less this machine's monotonic one, in seconds.
        stopped: Says whether this node asks for no more.
        entered: Is told when this node has entered its first round, which no other can close without it.
    """

    def __init__(
        self,
        store: TCPStore,
        run_id: str,
        least: int,
        late: bool,
        address: str,
        clock: float,
        stopped: Callable[[], bool],
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        # What it warns of, a lead that is gone say, is told by who sees it first: the agent.
        logging.getLogger("torch.distributed.elastic.rendezvous").setLevel(logging.ERROR)
        # torch compares times that the nodes took, each by its own clock: one that is 4 s off, or is set while it runs,
        # would drop all others from every round.
        _LeadsClock.ahead = clock
        vars(dynamic_rendezvous)["datetime"] = _LeadsClock
        # It looks at the whole stack, twice for each sign of life, to name what it records nowhere.
        vars(dynamic_rendezvous)["get_method_name"] = lambda: ""
        self._timeout = _Timeout(LAST_CALL_S if late else NO_CALL_S)
        closed = self._closed = threading.Event()  # the backend keeps no more: this is to free the store
        self._handler = DynamicRendezvousHandler.from_backend(
            run_id,
            _Bootstrap(),
            _Stoppable(store, run_id, lambda: closed.is_set() or stopped(), entered),
            least,
            # Who is too many is the lead's to say: torch would let whoever is quicker in, newcomers before members.
            max_nodes=1 << 16,
            local_addr=address,
            timeout=self._timeout,
            keep_alive_interval=KEEP_ALIVE_S,
            keep_alive_max_attempt=KEEP_ALIVES,
        )

    def join(self) -> Round | None:
        """Leave the round that this node is in, and join the next one -> it; None if there is none within
        :data:`JOIN_S`, and within a second once stopped.

        Raises:
            RendezvousError: the store is gone.
        """
        try:
            info = self._handler.next_rendezvous()
        except (RendezvousTimeoutError, RendezvousClosedError):
            return None
        self._timeout.last_call_s = NEXT_CALL_S
        return Round(int(info.store.get(_Bootstrap.ROUND)), info.world_size)

    def is_over(self, made: Round) -> bool:
        """Return whether nodes wait for the next round, or are in it: one whose nodes have all been silent for too long
        is over, and who comes then waits for nobody.

        Raises:
            RendezvousError: the store is gone, or this node has stopped.
        """
        return self._handler.num_nodes_waiting() > 0 or self._handler._state_holder.state.round != made.number

    def close(self) -> None:
        """Give no more signs of life: the others drop this node from its round."""
        self._closed.set()
        self._handler.shutdown()  # which would close it for all, did the backend pass that on


class _Timeout(RendezvousTimeout):
    """torch's timeouts, of which the last call changes."""

    def __init__(self, last_call_s: float) -> None:
        super().__init__(join=timedelta(seconds=JOIN_S))
        self.last_call_s = last_call_s

    @property
    def last_call(self) -> timedelta:
        return timedelta(seconds=self.last_call_s)


class _Stoppable(C10dRendezvousBackend):
    """torch's backend of a node, which asks for nothing any more once that has stopped."""

    def __init__(self, store: TCPStore, run_id: str, stopped: Callable[[], bool], entered: Callable[[], None]) -> None:
        super().__init__(store, run_id)
        self._stopped, self._entered = stopped, entered

    def get_state(self) -> tuple[bytes, Any] | None:
        self._unless_stopped()
        return super().get_state()

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        self._unless_stopped()
        made = super().set_state(state, token)
        if made is not None and made[-1]:  # the first thing that a node says is that it is there
            self._entered()
        return made

    def _unless_stopped(self) -> None:
        if self._stopped():
            raise RendezvousClosedError


class _Bootstrap(Store):
    """The answers to torch's question after each round: where its first node hosts a store, which nothing here uses.

    With a store that others fill, all nodes would wait 60 s for a first node that has died since, and then end.
    """

    ROUND = "round"

    def set(self, key: str, value: object) -> None:
        pass

    def get(self, key: str) -> bytes:
        """Return the answer; the handler puts ``torch.rendezvous.RUN.ROUND/`` before each key."""
        prefix, _, name = key.rpartition("/")
        known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", self.ROUND: prefix.rpartition(".")[2]}
        return known[name].encode()


class _LeadsClock(datetime):
    """The lead's clock, told from this machine's monotonic one."""

    ahead = 0.0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.fromtimestamp(time.monotonic() + cls.ahead, tz)
