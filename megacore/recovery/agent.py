"""The agent of one node: torch's elastic agent, with processes and decisions of our own.

It is a ``SimpleElasticAgent``, whose loop starts the ranks, looks at them, and starts all of them again after a fault.
It is not torch's ``LocalElasticAgent``: that waits 30 s for ranks which heed SIGTERM while they hang in a collective,
takes an exit status for the truth, and lets ranks live on, unwatched, after a launcher that was killed.

What ends a rank is its own word (:mod:`megacore.outcome`), a signal, or a fault; of a run that has said that it is
done, failed or stopped, nothing is started again. On several nodes each agent looks after its own ranks, and all meet
in rounds (:mod:`megacore.recovery.rendezvous`).
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import platform
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState

from megacore import exits, rank
from megacore.background import unnamed_main
from megacore.gpus import GpuErrors
from megacore.incidents import Action, Incident, IncidentWriter, Kind
from megacore.launcher.node import Job
from megacore.launcher.signals import ENDS
from megacore.outcome import PAUSE, RankOutcome, rank_file
from megacore.places import listed
from megacore.recipe import ConfigError
from megacore.recovery.beats import read
from megacore.recovery.hang_report import HangReport
from megacore.recovery.rendezvous import OneNode, RunEndedError
from megacore.say import brief, err

POLL_S = 0.1
"""The time between two looks at the ranks."""
GRACE_S = 1.0
"""The seconds that the other ranks have, once one has ended by a fault, to say that they end by themselves."""
WAITS_S = 3.0
"""The same where the fault is another node's, which then is to say so."""
SPEAKS_S = 30.0
"""The seconds that ranks without a word have once another one has said that the run ends: to publish a checkpoint."""
PATIENCE_S = 1.0
"""A second Ctrl-C within it is the first one still: wrappers pass on what the terminal has sent to all."""
BACKOFF_S, LONGEST_S = 1.0, 60.0
"""The seconds before the second restart in a row, which double for each further one, and the most."""
TOLD_S = 2.0
"""The seconds in which all nodes see what one has said."""
DRAIN_LOOK_S = 1.0


@dataclass
class RankProcess:
    """A rank of this node, and its end."""

    process: BaseProcess
    pid: int
    end: RankOutcome | None = None
    """The end: its own word, or what its status tells."""
    killed: bool = False
    """Whether the agent has killed it."""

    @property
    def silent(self) -> bool:
        """Whether it has ended, and something is to be started again."""
        return self.end is not None and not self.end.final and not self.end.paused


class Agent(SimpleElasticAgent):
    """The agent of this node; to ``arrived`` the signals are added that reach it."""

    def __init__(self, job: Job, meeting: OneNode, folder: Path, arrived: list[int]) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.node.processes,
            rdzv_handler=meeting,
            entrypoint=job.module,
            max_restarts=1 << 30,  # how many there are is decided here
            monitor_interval=POLL_S,
        )
        super().__init__(spec, exit_barrier_timeout=SPEAKS_S)
        for name in ("agent.server.api", "rendezvous.dynamic_rendezvous"):  # all of it is said here
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
        self._job, self._meeting, self._folder, self._arrived = job, meeting, folder, arrived
        self._status = exits.DONE
        self._ranks = dict[int, RankProcess]()
        self._watch: HangReport | None = None
        self._launch = uuid.uuid4().hex[:8]
        self._incidents = IncidentWriter(job.out, err) if job.out else None
        self._node, self._nodes = 0, 0
        self._signal, self._signalled_at = 0, math.inf
        self._leaving = False
        self._since: float | None = None
        """The time when the first rank was seen that has ended, or another node said that the run ends."""
        self._doomed_at: float | None = None
        """The time when another node was seen to have said that ranks have died."""
        self._wait_s = 0.0
        """The seconds to wait before the next start."""
        self._furthest, self._in_row = 0, 0
        """The furthest step that was begun, and the faults since without a further one."""
        self._raised: tuple[str, int] | None = None
        self._look_at = 0.0
        self._gpu_errors = GpuErrors(tell)

    def launch(self) -> int:
        """Run the ranks, again after faults, until the run ends -> its exit status, on this node."""
        try:
            self.run()
        except RunEndedError as end:
            self._status = end.status
            if str(end):
                err(str(end))
            if self._nodes > 1 and self._node == 0:  # which hosts what the others are to read
                time.sleep(TOLD_S)
        except ConfigError:
            self._meeting.end(exits.MISUSED)
            raise
        finally:
            self._stop_workers(self.get_worker_group())
            self._meeting.shutdown()
        return self._status

    # -- torch's extension points

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        heed(self._arrived)
        nodes, before = worker_group.group_world_size or 1, self._nodes
        self._node, self._nodes = worker_group.group_rank or 0, nodes
        if before and nodes != before:
            self._note_nodes(before)
        for file in self._folder.iterdir():  # of processes whose numbers may come again
            if file.is_file() and file.name != "held":
                file.unlink(missing_ok=True)
        arguments = self._job.arguments(nodes, self._meeting.started)
        self._meeting.started = True
        context = multiprocessing.get_context("forkserver")
        for worker in worker_group.workers:
            variables = {
                "RANK": worker.global_rank,
                "LOCAL_RANK": worker.local_rank,
                "WORLD_SIZE": worker.world_size,
                "LOCAL_WORLD_SIZE": self._job.node.processes,
                "GROUP_RANK": self._node,
                rank.STORE: self._meeting.place,
            }
            environment = {**os.environ, **self._job.environment, **{key: str(each) for key, each in variables.items()}}
            given = self._folder, self._job.module, arguments, environment
            process = context.Process(target=rank.main, args=given, name=f"rank {worker.global_rank}")
            with unnamed_main():
                process.start()
            assert process.pid is not None
            self._ranks[worker.global_rank] = RankProcess(process, process.pid)
        self._since, self._doomed_at = None, None
        self._watch = self._job.watch(self._folder, nodes, self._report)
        return {worker.local_rank: self._ranks[worker.global_rank].pid for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._kill(self._ranks)
        for each in self._ranks.values():
            each.process.join()
            each.process.close()
        self._ranks.clear()
        until = time.monotonic() + self._wait_s
        self._wait_s = 0.0
        while time.monotonic() < until:
            heed(self._arrived)
            time.sleep(POLL_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._kill(self._ranks)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for each in self._ranks.values():
            if each.end is None and each.process.exitcode is not None:
                unsaid = _KILLED if each.killed else _outcome_of_status(each.process.exitcode)
                each.end = RankOutcome.read(self._folder, each.pid) or unsaid
                self._since = self._since or time.monotonic()
        self._take_signals()
        living = {number: each.pid for number, each in self._ranks.items() if each.end is None}
        if self._watch is not None:
            self._watch.poll(living)
        self._heed_drain()
        state = self._state()
        return RunResult(state, dict.fromkeys(self._ranks) if state == WorkerState.SUCCEEDED else {}, {})

    # -- decisions

    def _state(self) -> WorkerState:
        """Return the state of the ranks, and decide what follows from it. Raises RunEndedError: the run ends, and no
        other node is to be waited for."""
        now, ranks = time.monotonic(), self._ranks
        living = [number for number, each in ranks.items() if each.end is None]
        late = [number for number in living if not ranks[number].killed]
        if late and now >= self._signalled_at + self._job.shutdown_s:
            who = listed(late)
            tell(f"{who[0].upper()}{who[1:]} did not end within {self._job.shutdown_s:g} s of the signal: killed.")
            self._kill(late)
            return WorkerState.HEALTHY
        over, ended = self._meeting.over, self._meeting.ended() is not None
        if over is None and not ended and self._since is None:
            return WorkerState.HEALTHY
        if self._leaving and not living:
            self._meeting.renew("leaves")
            self._note("node_leaves", "restart", f"{platform.node()} was asked to", "the others go on")
            raise RunEndedError(exits.of_signal(self._signal))
        if (self._signal and not self._leaving) or ended or any(each.final for each in self._outcomes().values()):
            return self._ending(living)
        if over in ("fault", "begins"):  # the ranks here wait for some that are gone
            self._doomed_at = self._doomed_at or now
            if now >= self._doomed_at + GRACE_S:
                self._kill(living)
        elif over is not None:
            self._pause()
        if any(each.silent for each in ranks.values()):
            return self._failing(living)
        if living:  # which do their step, and write their state to memory
            return WorkerState.HEALTHY
        self._meeting.renew("leaves")
        return WorkerState.UNHEALTHY

    def _ending(self, living: Sequence[int]) -> WorkerState:
        """Return the state while the run ends: ranks that have said so are waited for, others for a while."""
        if not living:
            return self._concluded()
        spoken = self._outcomes()
        mute = [number for number in living if number not in spoken]
        failed = any(end.status or end.kind for end in spoken.values()) or self._meeting.ended() is not None
        dead = any(each.end for number, each in self._ranks.items() if number not in spoken or spoken[number].kind)
        since = self._since = self._since or time.monotonic()
        if mute and (failed or dead) and not self._signal and time.monotonic() > since + SPEAKS_S:
            self._kill(mute)
        return WorkerState.HEALTHY

    def _concluded(self) -> WorkerState:
        """Take the status of a run that has ended, and tell the other nodes."""
        self._status = self._final_status()
        if self._status == exits.EVICT and self._meeting.may_leave():
            self._meeting.renew("fault")
            raise RunEndedError(self._status)
        self._meeting.end(exits.RETRY if self._status == exits.EVICT else self._status)
        return WorkerState.SUCCEEDED

    def _final_status(self) -> int:
        ends = [each.end for _, each in sorted(self._ranks.items()) if each.end is not None]
        final = [end for end in ends if end.final]
        stopped = [end.status for end in final if end.stopped]
        if failed := [end.status for end in final if end.status and not end.stopped]:
            return failed[0]
        if not final and (elsewhere := self._meeting.ended()) is not None:
            return elsewhere
        if self._signal:
            done = final and all(end.stopped is False for end in final)
            return exits.DONE if done else exits.of_signal(self._signal)
        return next((status or exits.of_signal(signal.SIGTERM) for status in stopped), exits.DONE)

    def _failing(self, living: Sequence[int]) -> WorkerState:
        """Return the state after a fault: first the others may say that they end by themselves."""
        kinds = [each.end.kind for each in self._ranks.values() if each.end and each.silent]
        elsewhere = self._nodes > 1 and all(kind == "lost_contact" for kind in kinds)
        grace = WAITS_S if elsewhere and not self._meeting.over else GRACE_S
        if time.monotonic() < (self._since or 0.0) + grace and (living or (elsewhere and not self._meeting.over)):
            return WorkerState.HEALTHY
        if living:
            self._kill(living)
            return WorkerState.HEALTHY
        if self._nodes > 1 and self._meeting.ended(ask=True) is not None:
            return self._concluded()
        first = self._meeting.over is None and self._meeting.renew("fault")
        if first or not elsewhere:
            self._answer()
        elif self._meeting.over == "begins":
            tell("The node that the others meet at was lost, and is there again.")
            self._note("node_lost", "restart", "its ranks are gone", "it is there again")
        return WorkerState.UNHEALTHY

    def _answer(self) -> None:
        """Decide about a fault, tell it and write it down. Raises RunEndedError: the run ends with it."""
        who, end = min(
            ((number, each.end) for number, each in self._ranks.items() if each.end and each.silent),
            key=lambda found: (_CAUSES.index(_cause(found[1])), found[0]),
        )
        kind: Kind = end.kind or "raised"
        at = self._step()
        again = kind == "raised" and self._raised == (end.detail, at)
        self._raised = (end.detail, at) if kind == "raised" else None
        self._in_row = 1 if at > self._furthest else self._in_row + 1
        self._furthest = max(self._furthest, at)
        detail, most = "; ".join(filter(None, (end.detail, self._gpu_errors.lately()))), self._job.max_restarts
        if most is None:
            if end.status != rank.CRASHED:  # which has told it
                hint = ": where memory ran out, the kernel's log (dmesg) says so" if end.detail == "SIGKILL" else ""
                tell(f"Rank {who} (process {self._ranks[who].pid}) ended: {detail}{hint}.")
            raise RunEndedError(exits.FAILED if end.status in (rank.CRASHED, rank.LOST) else end.status)
        action: Action = "restart"
        status, why = exits.RETRY, f"restart {self._in_row} of {most}"
        if again:
            action, status, why = "end", exits.FAILED, "the same exception at the same step once more"
        elif self._in_row > most:
            spent = f"all {most} restarts are spent" if most else "it may not restart"
            action, why = "end", f"{spent} (recovery.max_restarts)"
        at_fault = who if end.rank is None else end.rank
        self._note(kind, action, detail, why, at_fault, at or None)
        where = f"at step {at}" if at else "before the first step"
        way_out = f"; ends with status {status}: {exits.MEANING[status][1]}" if action == "end" else ""
        tell(f"{kind.replace('_', ' ')} rank {at_fault} {where} ({brief(detail)}) -> {action}: {why}{way_out}")
        if action == "end":
            self._meeting.end(status)
            raise RunEndedError(status)
        self._wait_s = min(LONGEST_S, BACKOFF_S * 2 ** (self._in_row - 2)) if self._in_row > 1 else 0.0

    def _note(
        self, kind: Kind, action: Action, detail: str, reason: str, at_rank: int | None = None, step: int | None = None
    ) -> None:
        """Write an incident of this node down."""
        host = platform.node() if self._nodes > 1 else ""
        self._report(Incident(kind, action, detail, reason, at_rank, self._node, host, step, at=time.time()))

    def _note_nodes(self, before: int) -> None:
        """Say that the run goes on on another number of nodes."""
        if self._node == 0:
            told = f"goes on on {self._nodes} node{'s' * (self._nodes > 1)}, after {before}"
            tell(f"The run {told}.")
            if self._nodes > before:
                self._note("node_joins", "restart", told, "it takes part from here on")

    def _report(self, incident: Incident) -> None:
        if self._incidents is not None:
            self._incidents.write(replace(incident, launch=incident.launch or self._launch))

    # -- signals

    def _take_signals(self) -> None:
        """Do what the signals that have arrived ask for, while there are ranks."""
        while self._arrived:
            number = self._arrived.pop(0)
            if number == signal.SIGUSR1:
                self._send(number)
                if self._watch is not None:
                    err(self._watch.brief())
            elif number == signal.SIGUSR2:
                if self._watch is not None:
                    self._watch.show()
            elif not self._signal:
                self._end_by(number)
            elif number == signal.SIGINT and time.monotonic() - self._signalled_at > PATIENCE_S:
                tell("Interrupted again: ended at once, without a checkpoint.")
                self._kill(self._ranks)
                self._meeting.end(exits.of_signal(number))
                raise RunEndedError(exits.of_signal(number))

    def _heed_drain(self) -> None:
        """Do what a file in the run's folder asks for: that this node leaves."""
        out = self._job.out
        if out is None or self._signal or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + DRAIN_LOOK_S
        file = out / f"drain-{platform.node()}"
        with suppress(OSError):
            if file.exists():
                self._end_by(signal.SIGTERM)
                file.unlink()  # it may come again

    def _end_by(self, number: int) -> None:
        """Have the ranks end, because of a signal; or this node leave, where the others can go on without it."""
        self._signal, self._signalled_at = number, time.monotonic()
        self._leaving = number == signal.SIGTERM and self._meeting.may_leave()
        if self._leaving:
            self._pause()
        else:
            self._send(signal.SIGTERM)

    def _pause(self) -> None:
        with suppress(FileExistsError), (self._folder / PAUSE).open("x"):
            pass

    # -- processes

    def _outcomes(self) -> dict[int, RankOutcome]:
        """Return {rank: its outcome} of those that have said one, also of those that live."""
        found = {number: each.end or RankOutcome.read(self._folder, each.pid) for number, each in self._ranks.items()}
        return {number: end for number, end in found.items() if end is not None}

    def _step(self) -> int:
        """Return the furthest step that a rank here has begun; 0 for none."""
        readings = [read(rank_file(self._folder, "beat", each.pid)) for each in self._ranks.values()]
        return max((each.step for each in readings if each is not None), default=0)

    def _kill(self, numbers: Sequence[int] | Mapping[int, RankProcess]) -> None:
        for number in numbers:
            if self._ranks[number].end is None:
                self._ranks[number].killed = True
                self._ranks[number].process.kill()

    def _send(self, number: int) -> None:
        for each in self._ranks.values():
            if each.process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, number)


_KILLED = RankOutcome(rank.LOST, kind="lost_contact", detail="its agent has ended it")
_CAUSES = ("killed", "raised", "aborted", "lost_contact")
"""The kinds of ends: of several ranks that have ended, the one at fault is the first in this order."""


def _cause(end: RankOutcome) -> str:
    if end.kind == "killed" and end.detail == "SIGABRT":  # NCCL's watchdog aborts a process that has waited too long
        return "aborted"
    return end.kind if end.kind in _CAUSES else "raised"


def _outcome_of_status(status: int) -> RankOutcome:
    """Return the end of a process that has said nothing."""
    if status == 0:
        return RankOutcome(exits.DONE, stopped=None)
    if status > 0:
        return RankOutcome(status, kind="raised", detail=f"ended with status {status}")
    return RankOutcome(exits.of_signal(-status), kind="killed", detail=signal.Signals(-status).name)


def heed(arrived: list[int]) -> None:
    """Do what the signals that have arrived ask for, while there are no ranks. Raises RunEndedError: one of them asks
    for the end."""
    while arrived:
        if (number := arrived.pop(0)) in ENDS:
            raise RunEndedError(exits.of_signal(number))


def tell(text: str) -> None:
    """Say it on stderr."""
    err(f"\n{text}")  # a progress bar may stand in the last line
