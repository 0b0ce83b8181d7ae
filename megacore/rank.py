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
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megacore.recovery import collectives

STORE = "MEGACORE_STORE"
"""The variable that names the file through which ranks of one machine find each other."""

LOST = 75
"""The exit status of a rank that could not talk to the others any more; its report says more."""


WAITING = ("torch/distributed/distributed_c10d.py", "parallel/collectives.py", "parallel/pipeline/run.py")
"""The files whose calls wait for other ranks."""


def stacks_of(folder: Path, rank: int) -> Path:
    """Return the file in the launcher's folder that a rank writes its stacks to, on SIGUSR2."""
    return folder / f"stacks-{rank}"


def report_of(folder: Path, rank: int) -> Path:
    """Return the file that says why a rank could not talk to the others any more."""
    return folder / f"report-{rank}"


@dataclass(frozen=True)
class Here:
    """The place of this process, as its launcher (or torchrun) says it in the environment; the only one without it."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    launched: bool

    @classmethod
    def now(cls) -> Here:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        rank, world, local_rank, local_world = (int(os.environ.get(name, one)) for name, one in alone.items())
        return cls(rank, world, local_rank, local_world, "RANK" in os.environ)


def join(here: Here, kind: str, timeout: timedelta) -> None:
    """Make the process group of all ranks, on one kind of device; each waits for another for ``timeout`` at most."""
    import torch.distributed as dist

    from parallel.mesh import urgent

    if here.world == 1:
        return
    store = os.environ.get(STORE)
    # Without device_id, so that a group's communicator is made by its members when they first use it, rather than
    # split off the world's by everyone.
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{store}" if store else "env://",
        rank=here.rank,
        world_size=here.world,
        timeout=timeout,
        pg_options=urgent(timeout) if kind == "cuda" else None,
    )


def leave(here: Here) -> None:
    """Leave what :func:`join` has joined, on all ranks."""
    import torch.distributed as dist

    if here.world == 1:
        return
    # A gloo process that leaves while others still talk to it may abort them.
    dist.barrier()
    dist.destroy_process_group()


# -- under the launcher


def main() -> None:
    folder, launcher, module, *arguments = sys.argv[1:]
    die_with(int(launcher))
    rank = int(os.environ["RANK"])
    stacks = stacks_of(Path(folder), rank).open("x")
    faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    collectives.answer(Path(folder), rank)
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except RuntimeError as error:
        report = parted(error)
        if report is None:
            raise
        with report_of(Path(folder), rank).open("x") as file:
            json.dump(report, file)
        sys.stdout.flush()
        os._exit(LOST)  # without the destructors of what is broken


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
