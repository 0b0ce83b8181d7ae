"""Starts the processes of a module on this machine. No torch until they start.

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
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType

from megacore.launcher.signals import ASKS, ENDS, noted
from megacore.recovery.folders import temporary_folder

IMPORTS = ("torch", "torch.distributed", "torch._dynamo")
"""The modules that every rank imports, the last one with its first optimizer, which takes a second."""


@dataclass(frozen=True)
class Node:
    """The processes of this machine among those of all.

    Args:
        processes: The number of processes on each machine.
        nodes: Machines.
        index: The number of this one.
        master: (host of node 0, port) where there are several.
    """

    processes: int
    nodes: int = 1
    index: int = 0
    master: tuple[str, int] | None = None

    @property
    def world(self) -> int:
        return self.nodes * self.processes

    @property
    def network(self) -> Mapping[str, str]:
        """The variables that keep the ranks of one machine to themselves."""
        if self.master is not None:
            return {}
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def gpus() -> int:
    """Return the number of GPUs of this machine. torch, slow to import, is asked only where there is a driver."""
    drivers = ("nvidia*", "nvhost*", "dxg", "kfd")
    if not any(device for driver in drivers for device in Path("/dev").glob(driver)):
        return 0
    import torch

    return torch.cuda.device_count()


def memory_of_gpus() -> int:
    """Return the bytes of memory of the largest GPU of this machine, which has one."""
    import torch

    return max(torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count()))


def threads(processes: int) -> Mapping[str, str]:
    """Return the number of threads of each process, for the environment: an even share of the cores, unless it says."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // processes))}


def prepare(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the process that ranks are forked from, unless it lives; it imports modules while others do other things.

    Args:
        modules: The modules that it imports; a rank imports none of them again.
        environment: More variables for it: what libraries read when they are loaded holds for all ranks.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["megacore.launcher.forked", *modules])
    with _with(environment), unnamed_main():
        resource_tracker.ensure_running()
        # What the terminal, or a scheduler, sends to all is not for it; ranks have a mask of their own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDS, *ASKS))
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def unnamed_main() -> Iterator[None]:
    """Let processes that are started in this block not import the main module of this one: it may be any script."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


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


def launch(module: str, arguments: Sequence[str], node: Node, environment: Mapping[str, str] | None = None) -> int:
    """Run a module on all ranks of this machine, which knows no restarts -> exit status: of the first that failed, or
    128 + the ending signal.

    Args:
        module: The module.
        arguments: The arguments of each rank.
        node: Their number.
        environment: More variables for them.
    """
    more = {**(environment or {}), **node.network}
    with noted() as arrived, temporary_folder() as folder:
        prepare(IMPORTS, more)
        from megacore.recovery.agent import Agent, Job
        from megacore.recovery.rendezvous import OneNode

        job = Job(module, lambda nodes, again: arguments, node.processes, more)
        return Agent(job, OneNode(), folder, arrived).launch()
