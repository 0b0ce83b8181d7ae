"""One process of several: who it is, how it joins the others, and what is left of it when they are gone.

:func:`main` is what :mod:`megacore.recovery.agent` forks: it runs a module in a process that dies with the launcher,
can be asked where it stands, and says how it ends. Under torchrun a module runs as well, without any of it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from torch.distributed import Store

from megacore import exits
from megacore.corruption import Corrupted
from megacore.outcome import AGENT, RankOutcome, rank_file
from megacore.say import err

STORE = "MEGACORE_STORE"
"""The variable that names the place where ranks find each other: ``tcp://HOST:PORT/PREFIX``, a store that an agent
hosts, in which every start of the ranks has a prefix of its own, or a file."""

LAUNCHER = "MEGACORE_LAUNCHER"
"""The variable that tells the process that ranks are forked from which process has started it."""
BEGAN = "MEGACORE_BEGAN"
"""The variable that says when the launcher of a run began, in seconds since 1970."""

LOST = exits.RETRY
"""The exit status of a rank that could not talk to the others any more; its report says more."""

WAITING = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/rendezvous.py",
    "parallel/collectives.py",
    "parallel/pipeline/run.py",
    "megacore/control.py",
)
"""The files whose calls wait for other ranks."""


CRASHED = 70
"""The exit status of a rank that nobody has foreseen the error of."""


@dataclass(frozen=True)
class RankPlace:
    """The place of this process, as its launcher (or torchrun) says it in the environment; the only one without it.

    ``began`` is when the launcher did, or this process, in seconds since 1970.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    launched: bool
    began: float = 0.0

    @classmethod
    def of_environment(cls) -> RankPlace:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        rank, world, local_rank, local_world = (int(os.environ.get(name, one)) for name, one in alone.items())
        began = float(os.environ.get(BEGAN) or time.time())
        return cls(rank, world, local_rank, local_world, "RANK" in os.environ, began)


def restarts() -> bool:
    """Return whether this run may have been started before: torchrun may start it again, or RESTART_COUNT says so.

    torchrun's own count is of one node: the others, which have failed in nothing, stay at 0.
    """
    return any(int(os.environ.get(name) or "0") for name in ("TORCHELASTIC_MAX_RESTARTS", "RESTART_COUNT"))


def join(here: RankPlace, kind: str, timeout: timedelta) -> None:
    """Make the process group of all ranks, on one kind of device; each waits for another for ``timeout`` at most."""
    import torch.distributed as dist

    from megacore.parallel.mesh import urgent

    if here.world == 1:
        return
    names: Any = dist.distributed_c10d._world
    names.group_count = 0  # of an attempt that has failed: groups are named by it
    store = os.environ.get(STORE)
    met = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        met = _met_anew(here, timeout)
    elif store is not None and store.startswith("tcp://"):
        met = _met_at(store, timeout)
    # Without device_id, so that a group's communicator is made by its members when they first use it, rather than
    # split off the world's by everyone.
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=None if met else f"file://{store}" if store else "env://",
        store=met,
        rank=here.rank,
        world_size=here.world,
        timeout=timeout,
        pg_options=urgent(timeout) if kind == "cuda" else None,
    )


def _met_at(place: str, timeout: timedelta) -> Store:
    """Return the part of an agent's store that ``tcp://HOST:PORT/PREFIX`` names."""
    from torch.distributed import PrefixStore, TCPStore

    at = urlsplit(place)
    assert at.hostname is not None and at.port is not None
    agents = TCPStore(at.hostname, at.port, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(at.path, agents)


_MEETINGS = itertools.count()
"""Numbers the groups that this process has joined under torchrun, one after the other."""


def _met_anew(here: RankPlace, timeout: timedelta) -> Store:
    """Return a store of this start of the ranks alone; torchrun's is one for all, with the addresses of those before.

    Rank 0 serves it, and says where in torchrun's. The place of an earlier rank 0, who is gone, answers nobody; that of
    a group which this process was in before still may, and has another name.
    """
    from torch.distributed import TCPStore

    name = f"megacore-{next(_MEETINGS)}"

    agents = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    if here.rank == 0:
        host = os.environ["MASTER_ADDR"] if here.world == here.local_world else socket.getfqdn()
        own = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        agents.set(name, f"{host} {own.port}")
        return own
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        host, port = agents.get(name).decode().split()
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return TCPStore(host, int(port), is_master=False, timeout=timeout)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def leave(here: RankPlace) -> None:
    """Leave what :func:`join` has joined, on all ranks, if it has."""
    import torch.distributed as dist

    if here.world == 1 or not dist.is_initialized():
        return
    # A gloo process that leaves while others still talk to it may abort them.
    dist.barrier()
    dist.destroy_process_group()


# -- under the launcher

BLOCKED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""The signals that ranks block from their first instruction on; a module unblocks those that it wants, and none is
lost."""
_LONGEST = 300  # characters of an exception that are reported


def main(folder: Path, module: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run a module as the main one of this process, which was forked for it, and end; folder: the agent's, variables:
    all of its environment."""
    os.environ.clear()
    os.environ.update({**variables, AGENT: str(folder)})
    die_with(os.getppid())  # the forkserver, which ends with the launcher, and may have ended before
    if (launcher := multiprocessing.parent_process()) is None or not launcher.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
    stacks = rank_file(folder, "stacks", os.getpid())
    stacks.unlink(missing_ok=True)
    faulthandler.register(signal.SIGUSR2, stacks.open("x"), all_threads=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, BLOCKED)
    sys.argv[:] = [module, *arguments]
    # Nothing is imported from the working folder, which may be one that was downloaded.
    wanted = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [each for each in sys.path if each and (each != os.getcwd() or each in wanted)]
    for name in (module, f"{module}.__main__"):  # which has been imported, and is run anew
        sys.modules.pop(name, None)
    status = _status_of(folder, module)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)  # without the destructors of libraries, which may abort


def _status_of(folder: Path, module: str) -> int:
    """Run a module, and write its outcome, if it has not -> its exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = exits.DONE
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            err(end.code)
        status = end.code if isinstance(end.code, int) else exits.DONE if end.code is None else exits.FAILED
    except Exception as error:
        outcome = outcome_of(error)
        if outcome.kind != "lost_contact":
            traceback.print_exc()
        outcome.write()
        return outcome.status
    if RankOutcome.read(folder, os.getpid()) is None:
        RankOutcome(status, stopped=None).write()
    return status


def outcome_of(error: Exception) -> RankOutcome:
    """Return the outcome of a rank that ends with an error, which may come from another rank that is late or gone."""
    if isinstance(error, RuntimeError) and traceback.extract_tb(error.__traceback__)[-1].filename.endswith(WAITING):
        where = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        return RankOutcome(LOST, kind="lost_contact", detail=f"{str(error).partition(chr(10))[0]}{where}"[:_LONGEST])
    text = f"{type(error).__name__}: {error}"[:_LONGEST]
    if isinstance(error, Corrupted):
        return RankOutcome(CRASHED, kind="corrupted", detail=text, rank=error.rank)
    return RankOutcome(CRASHED, kind="raised", detail=text)


def die_with(parent: int) -> None:
    """Let this process be killed when its parent has ended, however that ended; at once, if it has ended already."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    else:
        threading.Thread(target=_outlive, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _outlive(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
