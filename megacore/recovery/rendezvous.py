"""The places where the agents of a run agree who takes part, and where their ranks find each other.

One node alone has a store on its loopback interface. On several, torch's ``DynamicRendezvousHandler`` agrees on the
nodes of a *round*, over a store that the first node hosts. Whoever finds that a round is over, a rank having died, a
node coming or leaving, names the next one; all see its name within a second, and join it. Each round has a state of its
own. So a node that is gone is in no later one, no sign of life is needed, and neither a launcher that stands still for
a minute nor clocks that differ do any harm.

torch keeps the state of a rendezvous as a pickle, which runs code where it is read. It is signed here, with a secret
that all nodes know, and read after that was verified.
"""

from __future__ import annotations

import hmac
import os
import platform
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from megacore import exits
from megacore.background import in_background
from megacore.launcher.node import Node
from megacore.recipe import ConfigError
from megacore.say import err

Reason = Literal["begins", "fault", "joins", "leaves"]
"""Why a round begins."""
LAST_CALL_S = 2.0
"""The time for more than the least number of nodes to be in a round; who comes later has it begin anew."""
LOOK_S = 0.5
"""The time between two looks at the name of the round."""
LEAVES_S = 1.5
"""The time for others to say as well that they leave: of a run that is asked to end on all nodes, no node leaves."""
ANSWER_S = 5.0
"""The time for an answer of the store that may also be done without."""
STORE_S = 60.0
"""The time for an answer of the store that may not."""
ALIVE_S = 3600
"""The time between two signs of life of torch's, which nobody needs."""
SECRET, SECRET_FILE = "MEGACORE_SECRET", "MEGACORE_SECRET_FILE"
_ROUND, _END = "megacore/round", "megacore/end"


class RunEndedError(Exception):
    """The run ends."""

    def __init__(self, status: int, why: str = "") -> None:
        super().__init__(why)
        self.status = status


class ForgedError(RendezvousError):
    """The state of a rendezvous is not signed with the secret of this run."""


class OneNode(RendezvousHandler):
    """The rounds of a run on one node, and what those on several have in common."""

    started = False
    """Whether ranks have been started before; after a round it is true of all nodes if it was of one."""

    def __init__(self) -> None:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # torch hosts a store of its own for ranks
        listening = socket.create_server(("127.0.0.1", 0))
        self._host, self._port = "127.0.0.1", listening.getsockname()[1]
        self._store = _hosted(self._host, self._port, listening)
        self._round = 0

    def get_backend(self) -> str:
        return "megacore"

    def get_run_id(self) -> str:
        return "megacore"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the next round."""
        self._round += 1
        store = PrefixStore(f"agent-{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._host, self._port))

    def num_nodes_waiting(self) -> int:
        """Return 0: the agent asks :attr:`over` instead, which also tells why."""
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True

    @property
    def place(self) -> str:
        """The place where the ranks of this round find each other, as :data:`megacore.rank.STORE` has it."""
        return f"tcp://{self._host}:{self._port}/{self._round}"

    @property
    def over(self) -> Reason | None:
        """Why this round is over, if another node says that it is."""
        return None

    def renew(self, reason: Reason) -> bool:
        """Begin the next round, for all nodes -> whether it is the first to have found that this one is over."""
        return True

    def may_leave(self) -> bool:
        """Return whether the run goes on without this node."""
        return False

    def end(self, status: int) -> None:
        """Tell all nodes that the run ends."""

    def ended(self, ask: bool = False) -> int | None:
        """Return the status that the run ends with, if another node says that it does; without ``ask`` it is what was
        known a moment ago."""
        return None


class SeveralNodes(OneNode):
    """The rounds of a run on several nodes, of which the first one hosts the store. While ``patience_s`` are waited for
    enough of them, ``heed`` is called, and raises :class:`RunEndedError` where a signal asks for the end. Raises
    ConfigError: the store cannot be hosted."""

    def __init__(self, node: Node, secret: bytes, patience_s: float, heed: Callable[[], None]) -> None:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        assert node.master is not None
        self._host, self._port = node.master
        self._node, self._secret, self._patience_s, self._heed = node, secret, patience_s, heed
        self._own: TCPStore | None = None
        if node.index == 0:
            self._own = self._serve()
        self._agents: TCPStore | None = None
        """The store as the thread of the agent asks it: a client waits for one answer at a time."""
        self._name = ""
        self._members = 0
        self._seen: tuple[str, int | None] = "", None
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="rendezvous", daemon=True).start()

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round -> it. Raises RunEndedError: too few nodes came, a signal asks for the end, another node
        says that the run ends, or somebody has meddled with the rendezvous."""
        until, told = time.monotonic() + self._patience_s, ""
        while True:
            try:
                return self._patiently(lambda: self._join(until), None)
            except ForgedError as error:
                raise RunEndedError(exits.FAILED, str(error)) from None
            except RendezvousTimeoutError:
                why = f"fewer than {self._node.least} nodes"
            except RendezvousClosedError:
                why = "no place in a round yet"
            except (RendezvousError, RuntimeError, ValueError) as error:
                self._agents, why = None, f"no answer of the rendezvous at {self._address}"
                if told != why:
                    told = why
                    said = str(error.__cause__ or error).partition("\n")[0]  # torch's own class only names the cause
                    err(f"{why} ({said}): it is tried again for {self._patience_s:g} s")
            if (status := self.ended()) is not None:
                raise RunEndedError(status, "the run has ended on the other nodes")
            if time.monotonic() > until:
                raise RunEndedError(exits.RETRY, f"{why} after {self._patience_s / 60:g} min (train.timeout)")
            self._heed()
            time.sleep(LOOK_S)

    @property
    def place(self) -> str:
        return f"tcp://{self._address}/{self._name}"

    @property
    def over(self) -> Reason | None:
        name = self._seen[0]
        return None if name in ("", self._name) else _reason(name)

    def renew(self, reason: Reason) -> bool:
        named = _named(reason)
        found = self._asked(lambda store: store.compare_set(_ROUND, self._name, named))
        return found is None or found.decode() == named

    def may_leave(self) -> bool:
        if self._node.index == 0 or self._members <= self._node.least:
            return False
        key = f"{self._name}/leaving"
        if self._asked(lambda store: store.add(key, 1)) is None:
            return False
        time.sleep(LEAVES_S)
        leaving = self._asked(lambda store: store.add(key, 0))
        return leaving is not None and self._members - leaving >= self._node.least

    def end(self, status: int) -> None:
        self._asked(lambda store: store.compare_set(_END, "", str(status)))

    def ended(self, ask: bool = False) -> int | None:
        found = self._asked(_end_of) if ask else None
        return self._seen[1] if found is None else found

    def shutdown(self) -> bool:
        """Leave the rounds for good."""
        self._closed.set()
        return True

    @property
    def _address(self) -> str:
        return f"{self._host}:{self._port}"

    def _serve(self) -> TCPStore:
        try:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listening = socket.create_server(("", self._port), family=family, backlog=4096, dualstack_ipv6=dual)
        except OSError as error:
            raise ConfigError([f"MASTER_PORT ({self._port}): {error.strerror}: choose another one"]) from None
        return _hosted("127.0.0.1", self._port, listening)

    def _client(self) -> TCPStore:
        host = "127.0.0.1" if self._own is not None else self._host
        patience = timedelta(seconds=STORE_S)
        return TCPStore(host, self._port, is_master=False, timeout=patience, wait_for_workers=False)

    def _join(self, until: float) -> RendezvousInfo:
        """Join the round that is open, or have one begin."""
        node = self._node
        store = self._agents = self._agents or self._client()
        name = self._now(store)
        if store.check([f"{name}/formed"]):
            if int(store.get(f"{name}/formed")) >= node.nodes and name != self._name:
                raise RendezvousClosedError
            store.compare_set(_ROUND, name, _named("fault" if name == self._name else "joins"))
            name = self._now(store)
        left = max(1.0, until - time.monotonic())
        handler = DynamicRendezvousHandler.from_backend(
            name,
            store,
            SignedBackend(store, name, self._secret, lambda: self._goes_on(store, name)),
            node.least,
            node.nodes,
            # torch ranks nodes by this name
            local_addr=f"{node.index:06}-{platform.node()}-{secrets.token_hex(4)}",
            timeout=RendezvousTimeout(join=timedelta(seconds=left), last_call=timedelta(seconds=LAST_CALL_S)),
            keep_alive_interval=ALIVE_S,
            keep_alive_max_attempt=1000,
        )
        info = handler.next_rendezvous()
        try:
            if info.rank == 0:
                store.set(f"{name}/formed", str(info.world_size))
            store.set(f"{name}/started/{info.rank}", str(int(self.started)))
            found = store.multi_get([f"{name}/started/{rank}" for rank in range(info.world_size)])
        except RuntimeError:  # one of its nodes is gone
            store.compare_set(_ROUND, name, _named("fault"))
            raise
        self._name, self._members = name, info.world_size
        self._seen, self.started = (name, self._seen[1]), any(int(each) for each in found)
        return info

    def _now(self, store: Store) -> str:
        """Return the name of the round that is open; whoever asks first names it."""
        return str(store.compare_set(_ROUND, "", _named("begins")).decode())

    def _goes_on(self, store: Store, name: str) -> None:
        """Raise RendezvousClosedError where a round is joined that another has followed, or by who has gone."""
        if self._closed.is_set() or self._now(store) != name or _end_of(store) is not None:
            raise RendezvousClosedError

    def _look(self) -> None:
        """See which round there is, and whether the run ends, until this node leaves; in a thread of its own."""
        store: TCPStore | None = None
        while not self._closed.wait(LOOK_S):
            try:
                store = store or self._client()
                self._seen = self._now(store), _end_of(store)
            except RuntimeError:
                store = None

    def _asked(self, question: Callable[[Store], Any]) -> Any:
        """Return the store's answer to a question; None where there is none in time."""

        try:
            return self._patiently(lambda: question(self._agents or self._client()), ANSWER_S)
        except (RendezvousError, RuntimeError, TimeoutError):
            self._agents = None
            return None

    def _patiently(self, function: Callable[[], Any], limit_s: float | None) -> Any:
        """Return what a function does in a thread of its own; meanwhile signals are heeded where there is no limit."""
        answer = in_background(function, "rendezvous asks")
        until = time.monotonic() + (limit_s or 0)
        while not wait([answer], 0.05).done:
            if limit_s is None:
                self._heed()
            elif time.monotonic() > until:
                raise TimeoutError
        return answer.result()


class SignedBackend(C10dRendezvousBackend):
    """torch's state of one round, signed; ``goes_on`` raises where it is not to be joined any more."""

    def __init__(self, store: Store, name: str, secret: bytes, goes_on: Callable[[], None] = lambda: None) -> None:
        super().__init__(store, name)
        self._goes_on, self._secret = goes_on, hmac.digest(secret, name.encode(), "sha256")

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token, if there is one. Raises ForgedError: it is not signed with the secret;
        RendezvousConnectionError: the store does not answer."""
        return self._verified(super().get_state)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write a state if none was written since the token's -> the one that stands now, its token, and whether it
        is this one. Raises as :meth:`get_state`."""
        signed = hmac.digest(self._secret, state, "sha256") + state
        return self._verified(partial(super().set_state, signed, token))

    def _verified(self, ask: Callable[[], Any]) -> Any:
        self._goes_on()
        try:
            found = ask()
        except RendezvousStateError:  # it is no base64
            found = b"", b""
        if found is None:
            return None
        signature, state = found[0][:32], found[0][32:]
        if not hmac.compare_digest(signature, hmac.digest(self._secret, state, "sha256")):
            raise ForgedError(
                "the state of the rendezvous is not signed with the secret of this run: nodes of another one meet at "
                "this port, or somebody has written there. Choose another MASTER_PORT, and give all nodes the same "
                f"{SECRET} or {SECRET_FILE} (by default rendezvous.secret in the run's folder, which they share)"
            )
        return state, *found[1:]


def secret_of(out: Path) -> bytes:
    """Return the secret of a run: from the environment, or from a file, which the first node makes. Raises ConfigError:
    it cannot be read or made, or others may read it."""
    if text := os.environ.get(SECRET):
        return text.encode()
    named = os.environ.get(SECRET_FILE)
    path = Path(named or out / "rendezvous.secret")
    # Links of the user's own lead where they should: files of a volume of Kubernetes are such.
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if named else os.O_NOFOLLOW)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            new = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
            with new.open("x") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(secrets.token_hex(32))
            with suppress(FileExistsError):
                os.link(new, path)  # whole, or that of another node
            new.unlink()
        with open(os.open(path, flags), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise ConfigError([f"{path}: must be a file that only this user may read (chmod 600)"])
            if secret := file.read().strip():
                return bytes(secret)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}: set {SECRET} or {SECRET_FILE}"]) from None
    raise ConfigError([f"{path}: it is empty: remove it, or set {SECRET}"])


def _hosted(host: str, port: int, listening: socket.socket) -> TCPStore:
    """Return the store of a socket that listens, which it takes over."""
    patience, given = timedelta(seconds=STORE_S), listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=given, timeout=patience)


def _named(reason: Reason) -> str:
    """Return the name of a new round, which no other has, of this run or another."""
    return f"{secrets.token_hex(8)}-{reason}"


def _reason(name: str) -> Reason:
    return next((each for each in get_args(Reason) if name.endswith(f"-{each}")), "fault")


def _end_of(store: Store) -> int | None:
    return int(store.get(_END)) if store.check([_END]) else None
