"""The processes of this machine among those of all machines of a run, and the program that they run. No torch."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.incidents import Incident

if TYPE_CHECKING:
    from megacore.recovery.hang_report import HangReport


@dataclass(frozen=True)
class Node:
    """The processes of this machine, which is number ``index`` of all; ``master`` is (host of node 0, port) where there
    are several, and ``least`` the least number of them that the run goes on with."""

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


@dataclass(frozen=True)
class Job:
    """The program that an agent runs on the ranks of its node, which the signal to end leaves ``shutdown_s``. There are
    ``max_restarts`` in a row with no new step between them; None for a program that has no checkpoints, which ends with
    the status of the rank that has failed."""

    module: str
    given: Sequence[str]
    node: Node
    environment: Mapping[str, str] = field(default_factory=dict)
    shutdown_s: float = 600.0
    max_restarts: int | None = None
    out: Path | None = None

    def arguments(self, nodes: int, again: bool) -> list[str]:
        """Return the arguments of a rank on a number of nodes that have come together; ``again``: it was started
        before."""
        return list(self.given)

    def watch(self, folder: Path, nodes: int, report: Callable[[Incident], object]) -> HangReport | None:
        """Return what tells where the ranks of this machine stand; folder: the agent's, report: takes incidents."""
        return None
