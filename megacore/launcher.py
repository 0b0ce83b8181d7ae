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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megacore import exits
from megacore.rank import CRASHED, LOST, STORE, report_of, stacks_of
from megacore.recovery.channel import CHANNEL, STANDBY, Channel
from megacore.recovery.events import Event, Kind
from megacore.recovery.hangs import doing
from megacore.recovery.phases import BEAT, beat_of
from megacore.recovery.protocol import (
    Cause,
    Command,
    Died,
    Ended,
    Fail,
    Faulted,
    Generations,
    Go,
    Heard,
    Kill,
    Limits,
    Lost,
    Over,
    Passed,
    Ready,
    Recovered,
    Spawn,
)
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
REAP_S = 0.05

LIMITS = Limits(start=600.0, leave=60.0, recover=3600.0, die=60.0)
"""The time that a process has: to import from a slow disk, to end a read, to load a checkpoint."""


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
        made = {name: str(number) for name, number in own.items()} | {"PYTHONSAFEPATH": "1"}
        if self.master is None:
            loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
            made |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        return made

    def meeting(self, folder: Path, generation: int = 0) -> Mapping[str, str]:
        """Return the variables that say where the ranks of a generation find each other."""
        if self.master is None:
            return {STORE: str(folder / f"store-{generation}")}
        return {"MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1])}


class Recovery(Protocol):
    """The answers to faults while ranks live."""

    def refuses(self, event: Event) -> str:
        """Return why a fault ends all ranks; nothing where it is recovered from."""
        ...

    def went_on(self, step: int) -> None:
        """Note that all ranks go on after a step."""
        ...


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
    """
    with tempfile.TemporaryDirectory(prefix="megacore-") as made, _signals() as arriving:
        ranks = _Ranks(Path(made), module, arguments, node, environment or {}, hangs=hangs)
        try:
            ranks.start(recovery)
            status = ranks.watch(arriving, shutdown_s, way_out)
        finally:
            ranks.kill()
        if ranks.fault is not None:
            kind, rank, detail = ranks.fault
            phase = "recover" if ranks.failure else None
            on_fault(Event(kind, rank, node.index, phase=phase, detail=detail, at=ranks.seen or time.time()))
        return status


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


@dataclass
class _Ranks:
    """The ranks of this machine, by their number among all."""

    folder: Path
    module: str
    arguments: Sequence[str]
    node: Node
    environment: Mapping[str, str]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    """{rank: status} of those that have ended by themselves."""
    channels: dict[int, Channel] = field(default_factory=dict)
    standby: tuple[subprocess.Popen[bytes], Channel] | None = None
    """A process that has imported all that a rank needs, and waits for a place."""
    lives: dict[int, int] = field(default_factory=dict)
    """{rank: number of its process in this place}."""
    generations: Generations | None = None
    recovery: Recovery | None = None
    hangs: HangWatch | None = None
    hung: set[int] = field(default_factory=set)
    """Those that stood still, and were killed."""
    failure: str = ""
    """Why the run could not go on, where that is so."""
    begun: bool = False
    """Whether all have trained: from then on there is state to lose."""
    noticed: float = 0.0
    """The time when the fault that is being recovered from was noticed; 0 where none is."""

    seen: float = 0.0
    """The time when the first rank was seen that had failed."""
    fault: tuple[Kind, int | None, str] | None = None
    """The fault that has ended them: its kind, the rank, and a few words."""

    def start(self, recovery: Recovery | None) -> None:
        """Start all ranks; those that die are replaced if there is a recovery, and while it says so."""
        self.recovery = recovery
        if recovery is None:
            for rank in self.node.ranks:
                self.processes[rank], self.channels[rank] = self._process(rank)
            return
        self.generations = Generations(dict.fromkeys(self.node.ranks, self.node.index), self._judge, LIMITS)
        self._do(self.generations.begin(time.monotonic()))

    def _process(self, rank: int, stands_by: bool = False) -> tuple[subprocess.Popen[bytes], Channel]:
        """Start a process with its end of a channel."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "megacore.rank", str(self.folder), str(os.getpid()), self.module]
        own = dict(self._variables(rank))
        if self.generations is not None:
            own |= {CHANNEL: str(theirs.fileno()), **({STANDBY: "1"} if stands_by else {})}
        # The mask is inherited. What arrives here meanwhile is not lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            process = subprocess.Popen(
                [*command, *self.arguments],
                env={**os.environ, **self.environment, **own},
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        return process, Channel(ours)

    def _variables(self, rank: int, generation: int = 0) -> Mapping[str, str]:
        beat = {BEAT: str(beat_of(self.folder, rank))}
        return {**self.node.environment(rank), **self.node.meeting(self.folder, generation), **beat}

    # -- generations

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Spawn(rank, life):
                    if rank in self.channels:
                        self.channels[rank].end.close()
                    self.ended.pop(rank, None)
                    self.hung.discard(rank)
                    beat_of(self.folder, rank).unlink(missing_ok=True)
                    if self.standby is not None and self.standby[0].poll() is not None:
                        self.standby = None
                    self.processes[rank], self.channels[rank] = self.standby or self._process(rank, life > 1)
                    self.lives[rank], self.standby = life, None
                case Over(rank, generation):
                    self.noticed = self.noticed or time.monotonic()
                    self.channels[rank].say("over", generation=generation)
                case Kill(rank):
                    self.processes[rank].kill()
                case Go(rank, generation):
                    variables = self._variables(rank, generation)
                    self.channels[rank].say("go", generation=generation, variables=variables, begun=self.begun)
                case Fail(reason):
                    self.failure = reason

    def hear(self, rank: int) -> None:
        """Take what a rank says."""
        generations = self.generations
        assert generations is not None and self.recovery is not None
        for message in self.channels[rank].heard() or ():
            now, life, generation = time.monotonic(), self.lives[rank], message["generation"]
            match message["what"]:
                case "fault":
                    self._reap_soon()
                    if generations.trains and generation == generations.generation:
                        _say(f"Rank {rank} has lost contact to another rank: {message['error']}")
                    event: Heard = Faulted(now, rank, life, generation)
                case "ready":
                    event = Ready(now, rank, life, generation)
                case "recovered":
                    event = Recovered(now, rank, life, generation, message["step"])
                case "lost":
                    _say(f"Rank {rank}: {message['reason']}")
                    event = Lost(now, rank, life, generation)
            self._do(generations.on(event))
        if generations.trains:
            self.begun = True
            if self.noticed:
                seconds = time.monotonic() - self.noticed
                _say(f"All ranks go on after step {generations.step}, {seconds:.2f} s after the fault was noticed.")
                self.noticed = 0.0
                self.recovery.went_on(generations.step or 0)
            self.standby = self.standby or self._process(min(self.processes), True)

    def _reap_soon(self) -> None:
        """Reap who has just died: the connections of a process end a moment before it does."""
        until = time.monotonic() + REAP_S
        while not self.reap() and time.monotonic() < until:
            time.sleep(REAP_S / 10)

    def _judge(self, cause: Cause, earlier: Sequence[Cause]) -> str:
        """Return why a fault ends all; nothing where it is recovered from."""
        assert self.recovery is not None
        kind: Kind = "hung" if cause.kind == "late" else "lost_contact"
        detail = f"during {cause.during}"
        if cause.kind == "died":
            kind, detail = self._fault_of(cause.rank, cause.status)
        # What follows from a fault, or befalls while it is mended, does not tell against the step once more.
        phase = None if cause.during == "train" else "recover"
        return self.recovery.refuses(Event(kind, cause.rank, cause.node, phase=phase, detail=detail, at=time.time()))

    def _fault_of(self, rank: int, status: int) -> tuple[Kind, str]:
        """Return the kind of fault that a rank has ended by, and a few words."""
        if rank in self.hung:
            return "hung", "stood still, and was killed"
        if status < 0:
            return "aborted" if status == -signal.SIGABRT else "killed", signal.Signals(-status).name
        report = self._report(rank) or {}
        if status == LOST:
            return "lost_contact", report.get("error", "")
        return "raised", report.get("raised", f"ended with status {status}")

    @property
    def alive(self) -> dict[int, subprocess.Popen[bytes]]:
        return {rank: process for rank, process in self.processes.items() if process.returncode is None}

    def send(self, number: int) -> None:
        for process in self.alive.values():
            process.send_signal(number)

    def kill(self) -> None:
        if self.standby is not None:
            self.standby[0].kill()
            self.standby[0].wait()
        self.send(signal.SIGKILL)
        for process in self.alive.values():
            process.wait()

    def reap(self) -> bool:
        """Take note of those that have ended -> whether some of them may be replaced, or have done all of the run."""
        noted, now = False, time.monotonic()
        for rank, process in self.alive.items():
            if (status := process.poll()) is None:
                continue
            self.ended[rank] = status
            self.seen = self.seen or (time.time() if status else 0.0)
            generations = self.generations
            if generations is None or not (status <= 0 or status in (CRASHED, LOST)):
                continue
            noted = True
            if status:
                _say(self._why(rank, status))
            event = Died(now, rank, self.lives[rank], status) if status else Ended(now, rank, self.lives[rank])
            self._do(generations.on(event))
        return noted

    def watch(self, arriving: int, shutdown_s: float, way_out: str) -> int:
        """Wait until all have ended, and say why, where they do not -> exit status."""
        signalled, since, deadline = 0, 0.0, float("inf")
        self.reap()
        while self.alive and not self.failure:
            there = self._wait(arriving, deadline)
            if time.monotonic() >= deadline:
                if signalled:
                    _say(f"Ranks {_listed(self.alive)} did not end within {shutdown_s:g} s of the signal: killed.")
                break
            for number in os.read(arriving, 4096) if arriving in there else ():
                if number == signal.SIGUSR1:
                    self.send(number)
                elif number == signal.SIGUSR2:
                    self.show()
                elif number in ENDS and not signalled:
                    signalled, since, deadline = number, time.monotonic(), time.monotonic() + shutdown_s
                    self.send(signal.SIGTERM)
                elif number == signal.SIGINT and time.monotonic() - since > PATIENCE_S:
                    _say("Interrupted again: ended at once, without a checkpoint.")
                    return exits.of_signal(number)
            self.reap()
            failed = {rank: status for rank, status in self.ended.items() if status}
            if any(map(self._waited_in_vain, failed)):
                break
            if failed and not signalled:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return self._status(signalled, way_out)

    def _wait(self, arriving: int, deadline: float) -> list[int]:
        """Wait for signals, until the deadline, and take what ranks say -> what of ``arriving`` can be read."""
        generations, speaking = self.generations, dict[int, int]()
        if generations is not None:
            speaking = {self.channels[rank].fileno(): rank for rank in self.alive}
            deadline = min(deadline, generations.deadline)
        left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        if self.hangs is not None:
            self.end_hangs(self.hangs)
            left = POLL_S if left is None else min(POLL_S, left)
        there = select.select([arriving, *speaking], [], [], left)[0]
        for end in there:
            if end in speaking:
                self.hear(speaking[end])
        if generations is not None and time.monotonic() >= generations.deadline:
            self._do(generations.on(Passed(time.monotonic())))
        return there

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
        files = {rank: stacks_of(self.folder, process.pid) for rank, process in self.alive.items()}
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
        file = report_of(self.folder, self.processes[rank].pid)
        report: Mapping[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
        return report

    def _waited_in_vain(self, rank: int) -> bool:
        report = self._report(rank)
        # NCCL's watchdog aborts a process that has waited for too long.
        return report.get("waited", False) if report else self.ended[rank] == -signal.SIGABRT

    def _status(self, signalled: int, way_out: str) -> int:
        """Return the exit status of all together, once all have ended or been given up; says what they have not."""
        if self.failure:
            self.fault = "lost_contact", None, self.failure
            return exits.RETRY
        reports = {rank: report for rank in self.ended if (report := self._report(rank))}
        failed = {rank: status for rank, status in self.ended.items() if status and status != LOST}
        if waiting := [rank for rank, status in self.ended.items() if status and self._waited_in_vain(rank)]:
            missing, said = self._say_who_stands_still(waiting[0], reports, way_out)
            self.fault = ("hung", missing, said) if waiting[0] in reports else ("aborted", waiting[0], said)
            return exits.FAILED
        if signalled:
            return next((status for status in failed.values() if status > 0), exits.of_signal(signalled))
        if failed:
            rank, status = next(iter(failed.items()))
            kind, detail = self._fault_of(rank, status)
            if rank in self.hung:  # it has been said
                self.fault = kind, rank, detail
                return exits.of_signal(signal.SIGKILL)
            # Who ends with 1 or 2 has said what was wrong, and with 141 nobody reads its output any more.
            if status not in (exits.FAILED, exits.MISUSED, exits.of_signal(signal.SIGPIPE)):
                self.fault = kind, rank, detail
                if status != CRASHED:
                    _say(self._why(rank, status))
            return exits.of_signal(-status) if status < 0 else exits.FAILED if status == CRASHED else status
        for rank, report in reports.items():
            _say(f"Rank {rank} has lost a rank of another machine{report['where']}: {report['error']}")
            self.fault = "lost_contact", rank, report["error"]
            return exits.FAILED
        return exits.DONE

    def _why(self, rank: int, status: int) -> str:
        """Return how a rank has ended."""
        who = f"Rank {rank} (process {self.processes[rank].pid})"
        if status >= 0:
            return f"{who} ended with status {status}."
        number = signal.Signals(-status)
        hint = ": where memory ran out, the kernel's log (dmesg) says so" if number == signal.SIGKILL else ""
        return f"{who} was ended by {number.name}{hint}."

    def _say_who_stands_still(
        self, first: int, reports: Mapping[int, Mapping[str, Any]], way_out: str
    ) -> tuple[int | None, str]:
        """Say where every rank stands -> (the one that stands still, if it is here; who has waited for whom)."""
        for rank, report in reports.items():
            if "stack" in report:
                _say(f"Rank {rank} (process {self.processes[rank].pid}) waited here:\n{report['stack']}")
        stacks = self.show()
        missing = [rank for rank in self.alive if doing(stacks.get(rank, ""))[0] != "waits"]
        whom = f"rank {_listed(missing)}, which did not arrive" if missing else "a rank of another machine"
        where = reports[first]["where"] if first in reports else ""
        said = f"Rank {first} has waited too long for {whom}{where}"
        _say(f"{said}: all are ended. {way_out}".rstrip())
        return missing[0] if missing else None, said


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _listed(ranks: Sequence[int] | Mapping[int, object]) -> str:
    return ", ".join(map(str, ranks))


def _say(text: str) -> None:
    # A progress bar may stand in the last line.
    err(f"\n{text}")
