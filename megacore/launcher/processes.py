"""Starts the processes of a module on this machine, from one that has imported what they need. No torch until they
start.

Signals reach the launcher alone, whoever sends them; the ranks heed nothing but what it passes on:

- SIGINT (Ctrl-C), SIGTERM and SIGHUP become one SIGTERM to each rank: a trainer ends after its step, with a checkpoint.
- A second Ctrl-C kills the ranks at once, whatever they wait for.
- SIGUSR1 is passed on: a trainer saves a checkpoint and goes on; and it is said in a line where the ranks are.
- SIGUSR2 writes where every rank stands to stderr.

Every rank dies with the launcher, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

from megacore.background import unnamed_main
from megacore.launcher.node import Job, Node
from megacore.launcher.signals import ASKS, ENDS, noted
from megacore.launcher.temporary_folder import temporary_folder
from megacore.rank import LAUNCHER

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


def prepare(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the process that ranks are forked from, unless it lives; it imports modules, which no rank imports again,
    while others do other things. What libraries read of its environment when they are loaded holds for all ranks."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["megacore.launcher.forked", *modules])
    with _with({**environment, LAUNCHER: str(os.getpid())}), unnamed_main():
        resource_tracker.ensure_running()
        # What the terminal, or a scheduler, sends to all is not for it; ranks have a mask of their own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDS, *ASKS))
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _with(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
