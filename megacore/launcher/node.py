"""The processes of this machine among those of all machines of a run. No torch."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """The processes of this machine among those of all.

    Args:
        processes: The number of processes on each machine.
        nodes: Machines.
        index: The number of this one.
        master: (host of node 0, port) where there are several.
        least: The least number of machines that the run goes on with.
    """

    processes: int
    nodes: int = 1
    index: int = 0
    master: tuple[str, int] | None = None
    least: int = 1

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
