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

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacore.rank import LOST, STORE, report_of, stacks_of
from megacore.recovery.hangs import doing
from megacore.recovery.phases import BEAT, beat_of
from megacore.recovery.watch import POLL_S, HangWatch
from megacore.say import err

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BLOCKED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that ranks block from their first instruction on; a rank unblocks those that it wants, and none is
lost."""

SHUTDOWN_S = 600.0
GRACE_S = 30.0
"""The seconds that the other ranks have once one has failed: to say something, or to publish a checkpoint."""
PATIENCE_S = 1.0
"""A second Ctrl-C within it is the first one still: wrappers pass on what the terminal has sent to all."""
STACKS_S = 2.0


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

    def environments(self, folder: Path) -> Iterator[Mapping[str, str]]:
        """Yield the environment of each rank here, as torchrun would make it, with the way to find the others."""
        everyone = {"WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": str(self.processes), "PYTHONSAFEPATH": "1"}
        if self.master is None:
            loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
            everyone |= {STORE: str(folder / "store"), "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        else:
            everyone |= {"MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1])}
        for local in range(self.processes):
            rank = self.index * self.processes + local
            yield everyone | {"LOCAL_RANK": str(local), "RANK": str(rank), BEAT: str(beat_of(folder, rank))}


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
    hangs: HangWatch | None = None,
) -> int:
    """Run a module on all ranks of this machine -> exit status: of the first that failed, or 128 + the ending signal.

    Args:
        module: The module.
        arguments: The arguments of each rank.
        node: Their number, and the machines beside this one.
        environment: More variables for them.
        shutdown_s: Seconds that the signal to end leaves them.
        way_out: A sentence that says what to do where a rank stands still.
        hangs: The watch over ranks that tell where they are; without it, one that stands is found by those that wait.
    """
    with tempfile.TemporaryDirectory(prefix="megacore-") as made, _signals() as arriving:
        ranks = _start(module, arguments, node, Path(made), environment or {})
        ranks.hangs = hangs
        try:
            return ranks.watch(arriving, shutdown_s, way_out)
        finally:
            ranks.kill()


def _start(module: str, arguments: Sequence[str], node: Node, folder: Path, environment: Mapping[str, str]) -> _Ranks:
    ranks = _Ranks(folder)
    # The mask is inherited. What arrives here meanwhile is not lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        for own in node.environments(folder):
            command = [sys.executable, "-m", "megacore.rank", str(folder), str(os.getpid()), module, *arguments]
            ranks.processes[int(own["RANK"])] = subprocess.Popen(command, env={**os.environ, **environment, **own})
    except BaseException:
        ranks.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ranks


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


@dataclass
class _Ranks:
    """The ranks of this machine, by their number among all."""

    folder: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    """{rank: status} of those that have ended by themselves."""
    hangs: HangWatch | None = None
    hung: set[int] = field(default_factory=set)
    """Those that stood still, and were killed."""

    @property
    def alive(self) -> dict[int, subprocess.Popen[bytes]]:
        return {rank: process for rank, process in self.processes.items() if process.returncode is None}

    def send(self, number: int) -> None:
        for process in self.alive.values():
            process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        for process in self.alive.values():
            process.wait()

    def reap(self) -> None:
        for rank, process in self.alive.items():
            if (status := process.poll()) is not None:
                self.ended[rank] = status

    def watch(self, arriving: int, shutdown_s: float, way_out: str) -> int:
        """Wait until all have ended, and say why, where they do not -> exit status."""
        signalled, since, deadline = 0, 0.0, float("inf")
        self.reap()
        while self.alive:
            left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            if self.hangs is not None:
                self.end_hangs(self.hangs)
                left = min(POLL_S, left or POLL_S)
            if not select.select([arriving], [], [], left)[0]:
                if time.monotonic() < deadline:
                    continue
                if signalled:
                    _say(f"Ranks {_listed(self.alive)} did not end within {shutdown_s:g} s of the signal: killed.")
                break
            for number in os.read(arriving, 4096):
                if number == signal.SIGUSR1:
                    self.send(number)
                elif number == signal.SIGUSR2:
                    self.show()
                elif number in ENDS and not signalled:
                    signalled, since, deadline = number, time.monotonic(), time.monotonic() + shutdown_s
                    self.send(signal.SIGTERM)
                elif number == signal.SIGINT and time.monotonic() - since > PATIENCE_S:
                    _say("Interrupted again: ended at once, without a checkpoint.")
                    return 128 + number
            self.reap()
            failed = {rank: status for rank, status in self.ended.items() if status}
            if any(map(self._waited_in_vain, failed)):
                break
            if failed and not signalled:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return self._status(signalled, way_out)

    def end_hangs(self, watch: HangWatch) -> None:
        """Kill who stands still, and say it."""
        if (found := watch.poll(self.folder, self.alive, self.stacks)) is not None:
            where = f" {found.report} has the stacks of all." if found.report else ""
            _say(f"{found.text[0].upper()}{found.text[1:]}: killed.{where}")
            self.hung.update(found.stands)
            for rank in found.stands:
                self.processes[rank].kill()

    def stacks(self) -> dict[int, str]:
        """Ask every rank where it stands -> {rank: its stacks}; of those that do not answer, nothing."""
        files = {rank: stacks_of(self.folder, rank) for rank in self.alive}
        before = {rank: _size(file) for rank, file in files.items()}
        self.send(signal.SIGUSR2)
        sizes, deadline = before, time.monotonic() + STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            earlier, sizes = sizes, {rank: _size(file) for rank, file in files.items()}
            if sizes == earlier and all(sizes[rank] > before[rank] for rank in files):
                break
        return {rank: file.read_text()[before[rank] :] for rank, file in files.items() if sizes[rank]}

    def show(self) -> dict[int, str]:
        """Write where every rank stands to stderr -> what :meth:`stacks` does."""
        stacks = self.stacks()
        for rank, process in self.alive.items():
            _say(f"Rank {rank} (process {process.pid}) stands here:\n{stacks.get(rank) or '  it does not answer'}")
        return stacks

    def _report(self, rank: int) -> Mapping[str, Any] | None:
        """Return the report of a rank that could not talk to the others any more."""
        file = report_of(self.folder, rank)
        report: Mapping[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
        return report

    def _waited_in_vain(self, rank: int) -> bool:
        report = self._report(rank)
        # NCCL's watchdog aborts a process that has waited for too long.
        return report["waited"] if report else self.ended[rank] == -signal.SIGABRT

    def _status(self, signalled: int, way_out: str) -> int:
        """Return the exit status of all together, once all have ended or been given up; says what they have not."""
        reports = {rank: report for rank in self.ended if (report := self._report(rank))}
        failed = {rank: status for rank, status in self.ended.items() if status and status != LOST}
        if waiting := [rank for rank, status in self.ended.items() if status and self._waited_in_vain(rank)]:
            self._say_who_stands_still(waiting[0], reports, way_out)
            return 1
        if signalled:
            return next((status for status in failed.values() if status > 0), 128 + signalled)
        if failed:
            rank, status = next(iter(failed.items()))
            if rank in self.hung:
                return 128 + signal.SIGKILL  # it has been said
            if status < 0:
                number = signal.Signals(-status)
                hint = ": where memory ran out, the kernel's log (dmesg) says so" if number == signal.SIGKILL else ""
                _say(f"Rank {rank} (process {self.processes[rank].pid}) was ended by {number.name}{hint}.")
                return 128 + number
            # Who ends with 1 or 2 has said what was wrong, and with 141 nobody reads its output any more.
            if status not in (1, 2, 128 + signal.SIGPIPE):
                _say(f"Rank {rank} (process {self.processes[rank].pid}) ended with status {status}.")
            return status
        for rank, report in reports.items():
            _say(f"Rank {rank} has lost a rank of another machine{report['where']}: {report['error']}")
            return 1
        return 0

    def _say_who_stands_still(self, first: int, reports: Mapping[int, Mapping[str, Any]], way_out: str) -> None:
        for rank, report in reports.items():
            _say(f"Rank {rank} (process {self.processes[rank].pid}) waited here:\n{report['stack']}")
        stacks = self.show()
        missing = [rank for rank in self.alive if doing(stacks.get(rank, ""))[0] != "waits"]
        whom = f"rank {_listed(missing)}, which did not arrive" if missing else "a rank of another machine"
        where = reports[first]["where"] if first in reports else ""
        _say(f"Rank {first} has waited too long for {whom}{where}: all are ended. {way_out}".rstrip())


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _listed(ranks: Sequence[int] | Mapping[int, object]) -> str:
    return ", ".join(map(str, ranks))


def _say(text: str) -> None:
    # A progress bar may stand in the last line.
    err(f"\n{text}")
