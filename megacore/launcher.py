"""Starts the processes of a module on this machine, passes on signals, and sees that they end together. No torch.

Every rank dies with the launcher, however that ends. On one machine the ranks find each other through a file in a
folder that only this user can enter, and talk over the loopback interface; on several over the network, by torch's own
means.

Signals reach the launcher alone, whoever sends them; the ranks heed nothing but what it passes on:

- SIGINT (Ctrl-C), SIGTERM and SIGHUP become one SIGTERM to each rank: a trainer ends after its step, with a checkpoint.
- A second Ctrl-C kills the ranks at once, whatever they wait for.
- SIGUSR1 is passed on: a trainer saves a checkpoint and goes on.
- SIGUSR2 writes where every rank stands to stderr.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megacore.rank import STORE
from megacore.recovery.children import Children
from megacore.recovery.events import Event
from megacore.recovery.folders import temporary_folder
from megacore.recovery.follow import Follower
from megacore.recovery.lead import Lead, Recovery
from megacore.recovery.members import Members
from megacore.recovery.ranks import ENDS, Ranks
from megacore.recovery.template import RankTemplate
from megacore.recovery.watch import HangWatch

SHUTDOWN_S = 600.0


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
    def ranks(self) -> range:
        """The ranks of this machine, by their number among all."""
        return range(self.index * self.processes, (self.index + 1) * self.processes)

    def environment(self, rank: int) -> Mapping[str, str]:
        """Return the environment of a rank here, as torchrun would make it."""
        local = rank - self.index * self.processes
        own = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.processes}
        return {name: str(number) for name, number in own.items()}

    @property
    def network(self) -> Mapping[str, str]:
        """The variables that keep the ranks of one machine to themselves."""
        if self.master is not None:
            return {}
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}

    def meeting(self, folder: Path) -> Mapping[str, str]:
        """Return the variables that say where the ranks find each other."""
        if self.master is None:
            return {STORE: str(folder / "store")}
        return {"MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1])}


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


def launch(
    module: str,
    arguments: Sequence[str],
    node: Node,
    environment: Mapping[str, str] | None = None,
    shutdown_s: float = SHUTDOWN_S,
    way_out: str = "",
    on_fault: Callable[[Event], object] = lambda event: None,
    recovery: Recovery | None = None,
    hangs: HangWatch | None = None,
    members: Members | None = None,
    nodes: dict[int, int] | None = None,
    layouts: Mapping[int, Sequence[str]] | None = None,
    on_world: Callable[[Mapping[str, str]], object] = lambda variables: None,
    drained: Callable[[], bool] | None = None,
    template: RankTemplate | None = None,
) -> int:
    """Run a module on all ranks of this machine -> exit status: of the first that failed, or 128 + the ending signal.

    Args:
        module: The module.
        arguments: The arguments of each rank.
        node: Their number, and the machines beside this one.
        environment: More variables for them.
        shutdown_s: Seconds that the signal to end leaves them.
        way_out: A sentence that says what to do where a rank stands still.
        on_fault: Is told of the fault that has ended the ranks; not of an end that they have said, or were asked for.
        recovery: Says whether a fault is recovered from, where the module knows how: a rank that has died is replaced
            while the others go on. By default a fault ends all.
        hangs: The watch over ranks that tell where they are; without it, one that stands is found by those that wait.
        members: The connections of the nodes, where ranks are replaced on several: the one that leads launches on all.
        nodes: {node: its processes}, kept as nodes come and go; this one alone by default.
        layouts: {number of nodes: more arguments of each rank}, where nodes may come and go.
        on_world: Is told the variables of each rank that takes its place in a new world.
        drained: Whether somebody asks this node to leave; looked at every second.
        template: Makes the processes, if it has imported the module soon enough.
    """
    more = {**(environment or {}), **node.network}
    with temporary_folder() as made, _signals() as arriving:
        children = Children(made, module, arguments, more, recovery is not None, hangs, on_world, template)
        nodes = {0: node.processes} if nodes is None else nodes
        ranks = _ranks(children, node, recovery, members, nodes, layouts or {}, shutdown_s, way_out)
        ranks.drained = drained
        try:
            status = ranks.watch(arriving)
        finally:
            children.kill()
        if ranks.fault is not None:
            kind, rank, detail = ranks.fault
            phase = "recover" if isinstance(ranks, Lead) and ranks.failure else None
            on_fault(Event(kind, rank, node.index, phase=phase, detail=detail, at=ranks.seen or time.time()))
        return status


def _ranks(
    children: Children,
    node: Node,
    recovery: Recovery | None,
    members: Members | None,
    nodes: dict[int, int],
    layouts: Mapping[int, Sequence[str]],
    shutdown_s: float,
    way_out: str,
) -> Ranks:
    """Return the ranks of this machine, started; or those of all nodes, where this one leads them."""
    if recovery is None:
        for rank in node.ranks:
            children.start(rank, rank, {**node.environment(rank), **node.meeting(children.folder)})
        return Ranks(children, shutdown_s, way_out)
    if members is not None and not members.leads:
        return Follower(children, shutdown_s, way_out, members=members)
    name = children.folder.name
    lead = Lead(
        children,
        shutdown_s,
        way_out,
        name=name,
        recovery=recovery,
        nodes=nodes,
        members=members,
        layouts=layouts,
    )
    lead.begin()
    return lead


def pause(seconds: float) -> int:
    """Wait between two launches -> the signal that has asked for the end meanwhile, or 0."""
    until = time.monotonic() + seconds
    with _signals() as arriving:
        while select.select([arriving], [], [], max(0.0, until - time.monotonic()))[0]:
            if ends := [number for number in os.read(arriving, 4096) if number in ENDS]:
                return ends[0]
    return 0


@contextmanager
def _signals() -> Iterator[int]:
    """Let signals within this block only appear as bytes in a pipe; those that are ignored stay so (nohup)."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    wanted = (*ENDS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    heeded = [each for each in wanted if signal.getsignal(each) != signal.SIG_IGN or each == signal.SIGCHLD]
    woken = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in heeded}
    try:
        yield reading
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        os.close(reading)
        os.close(writing)
