"""Starts the processes of a module on this machine. No torch until they start.

Signals reach the launcher alone, whoever sends them; the ranks heed nothing but what it passes on:

- SIGINT (Ctrl-C), SIGTERM and SIGHUP become one SIGTERM to each rank: a trainer ends after its step, with a checkpoint.
- A second Ctrl-C kills the ranks at once, whatever they wait for.
- SIGUSR1 is passed on: a trainer saves a checkpoint and goes on; and it is said in a line where the ranks are.
- SIGUSR2 writes where every rank stands to stderr.

Every rank dies with the launcher, however that ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from megacore.launcher.forking import prepare
from megacore.launcher.node import Job, Node
from megacore.launcher.signals import noted
from megacore.launcher.temporary_folder import temporary_folder

IMPORTS = ("torch", "torch.distributed", "torch._dynamo")
"""The modules that every rank imports, the last one with its first optimizer, which takes a second."""


def threads(processes: int) -> Mapping[str, str]:
    """Return the number of threads of each process, for the environment: an even share of the cores, unless it says."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // processes))}


def launch(module: str, arguments: Sequence[str], node: Node, environment: Mapping[str, str] | None = None) -> int:
    """Run a module on all ranks of this machine, which knows no restarts -> exit status: of the first that failed, or
    128 + the ending signal."""
    more = {**(environment or {}), **node.network}
    with noted() as arrived, temporary_folder() as folder:
        prepare(IMPORTS, more)
        from megacore.recovery.agent import Agent
        from megacore.recovery.rendezvous import OneNode

        return Agent(Job(module, arguments, node, more), OneNode(), folder, arrived).launch()
