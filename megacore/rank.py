"""One process of several: who it is, how it joins the others, and what is left of it when they are gone.

``python -m megacore.rank FOLDER LAUNCHER MODULE ARGUMENT...`` is how :mod:`megacore.launcher` starts a rank: it runs
the module in a process that dies with the launcher and can be asked where it stands. Under torchrun a module runs as
well, without either.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from torch.distributed import Store

from megacore import exits
from megacore.training.corruption import Corrupted

STORE = "MEGACORE_STORE"
"""The variable that names the place where ranks find each other: a file, on one machine, or ``tcp://HOST:PORT/PREFIX``,
a store that an agent hosts, in which every generation has a prefix."""

BEGAN = "MEGACORE_BEGAN"
"""The variable that says when the launcher of a run began, in seconds since 1970."""

LOST = exits.RETRY
"""The exit status of a rank that could not talk to the others any more; its report says more."""

WAITING = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/rendezvous.py",
    "parallel/collectives.py",
    "parallel/pipeline/run.py",
)
"""The files whose calls wait for other ranks."""


CRASHED = 70
"""The exit status of a rank that nobody has foreseen the error of."""


def stacks_of(folder: Path, process: int) -> Path:
    """Return the file in the launcher's folder that the process of a rank writes its stacks to, on SIGUSR2."""
    return folder / f"stacks-{process}"


def report_of(folder: Path, process: int) -> Path:
    """Return the file that says why the process of a rank could not talk to the others any more."""
    return folder / f"report-{process}"


@dataclass(frozen=True)
class Here:
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
    def now(cls) -> Here:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        rank, world, local_rank, local_world = (int(os.environ.get(name, one)) for name, one in alone.items())
        began = float(os.environ.get(BEGAN) or time.time())
        return cls(rank, world, local_rank, local_world, "RANK" in os.environ, began)


def restarts() -> bool:
    """Return whether this run may have been started before: torchrun may start it again, or RESTART_COUNT says so.

    torchrun's own count is of one node: the others, which have failed in nothing, stay at 0.
    """
    return any(int(os.environ.get(name) or "0") for name in ("TORCHELASTIC_MAX_RESTARTS", "RESTART_COUNT"))


def join(here: Here, kind: str, timeout: timedelta) -> None:
    """Make the process group of all ranks, on one kind of device; each waits for another for ``timeout`` at most."""
    import torch.distributed as dist

    from parallel.mesh import urgent

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


def parts(store: str | None) -> None:
    """Free all ranks that wait for another in :func:`join`, where they meet in a file: a read of it fails from here on.

    torch waits for a file that is gone, but not for one that cannot be opened. Who waits in the store of an agent is
    freed by the end of its connection.
    """
    if store is not None and not store.startswith("tcp://") and not os.path.islink(store):
        with suppress(FileExistsError):
            with suppress(FileNotFoundError):
                os.remove(store)
            os.symlink(store, store)


def _met_at(place: str, timeout: timedelta) -> Store:
    """Return the part of an agent's store that ``tcp://HOST:PORT/PREFIX`` names."""
    from torch.distributed import PrefixStore, TCPStore

    at = urlsplit(place)
    assert at.hostname is not None and at.port is not None
    agents = TCPStore(at.hostname, at.port, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(at.path, agents)


def _met_anew(here: Here, timeout: timedelta) -> Store:
    """Return a store of this start of the ranks alone; torchrun's is one for all, with the addresses of those before.

    Rank 0 serves it, and says where in torchrun's. The place of an earlier rank 0, who is gone, answers nobody.
    """
    from torch.distributed import TCPStore

    agents = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    if here.rank == 0:
        host = os.environ["MASTER_ADDR"] if here.world == here.local_world else socket.getfqdn()
        own = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        agents.set("megacore", f"{host} {own.port}")
        return own
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        host, port = agents.get("megacore").decode().split()
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return TCPStore(host, int(port), is_master=False, timeout=timeout)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def leave(here: Here) -> None:
    """Leave what :func:`join` has joined, on all ranks, if it has."""
    import torch.distributed as dist

    if here.world == 1 or not dist.is_initialized():
        return
    # A gloo process that leaves while others still talk to it may abort them.
    dist.barrier()
    dist.destroy_process_group()


# -- under the launcher

_LONGEST = 300  # characters of an exception that are reported


def main() -> None:
    folder, launcher, module, *arguments = sys.argv[1:]
    die_with(int(launcher))
    stacks = stacks_of(Path(folder), os.getpid()).open("x")
    faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        report = parted(error) if isinstance(error, RuntimeError) else None
        with report_of(Path(folder), os.getpid()).open("x") as file:
            json.dump(report or _reported(error), file)
        if report is None:
            _crash()
        sys.stdout.flush()
        os._exit(LOST)  # without the destructors of what is broken


def _reported(error: Exception) -> dict[str, Any]:
    """Return the report of an error that this rank ends with."""
    corrupted = {"kind": "corrupted", "rank": error.rank} if isinstance(error, Corrupted) else {}
    return {"raised": f"{type(error).__name__}: {error}"[:_LONGEST], **corrupted}


def _crash() -> NoReturn:
    """End with what is known of an error that nobody has foreseen; the others may go on without this process."""
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CRASHED)


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


def parted(error: RuntimeError) -> dict[str, Any] | None:
    """Return the report of an error that comes from another rank, which is late or gone; None for any other."""
    calls = traceback.extract_tb(error.__traceback__)
    if not calls[-1].filename.endswith(WAITING):
        return None
    text = str(error).partition("\n")[0]
    return {
        "waited": re.search("[Tt]imed? ?out", text) is not None,
        "where": "".join(f" {note}" for note in getattr(error, "__notes__", ())),
        "error": text,
        "stack": "".join(traceback.format_list(calls)),
    }


if __name__ == "__main__":
    main()
