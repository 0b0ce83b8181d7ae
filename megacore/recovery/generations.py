"""Generations of processes, as data and pure functions: who is told, killed and started when something befalls them.

A generation is one life of the process groups. A fault ends it, and :class:`Generations` says who is told, killed
and started until every rank has a process that has left it: only then does the next one begin. A *change* of those who
take part does the same without a fault, between two steps.

The explorer in ``tests/recovery`` walks through every order of events. No torch, no I/O, no clock: time comes with the
events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

# -- what the agent hears


@dataclass(frozen=True)
class FromProcess:
    """A message of a process, or of its agent about it.

    Args:
        at: The time of the agent's clock in seconds.
        life: The number of the process, as :class:`Spawn` gave it; what one that is not there any more has sent is
            ignored.
    """

    at: float
    life: int


@dataclass(frozen=True)
class Died(FromProcess):
    """The process is gone, and not by the end of the run; ``status`` is its exit status, negative for a signal."""

    status: int


@dataclass(frozen=True)
class Faulted(FromProcess):
    """A collective of this generation has failed."""

    generation: int


@dataclass(frozen=True)
class Ready(FromProcess):
    """The process has left this generation, its last (0: it has been in none), and can join another.

    No thread of it waits in that generation or writes for it any more: neither a copy of an image nor a checkpoint.
    """

    generation: int


@dataclass(frozen=True)
class Recovered(FromProcess):
    """The process has the state that was agreed upon in this generation, that of ``step``."""

    generation: int
    step: int


@dataclass(frozen=True)
class Lost(FromProcess):
    """No version was found in this generation that all can come to: the run is to begin again from its files."""

    generation: int


@dataclass(frozen=True)
class Ended(FromProcess):
    """The process has done all of the run, and is gone."""


@dataclass(frozen=True)
class Passed:
    """The time is ``at``: a deadline may have passed."""

    at: float


Heard = Died | Faulted | Ready | Recovered | Lost | Ended | Passed


# -- and what it does


@dataclass(frozen=True)
class Spawn:
    """Start a process on a node, or take a standby; its messages carry ``life``."""

    life: int
    node: int


@dataclass(frozen=True)
class Go:
    """Tell a process to join this generation as this rank; all are told at once."""

    life: int
    rank: int
    generation: int


@dataclass(frozen=True)
class Pause:
    """Tell a process that this generation ends after a step: all agree on which, leave it, and say so (:class:`Ready`).

    Args:
        life: The process.
        generation: The generation that it is in.
        leaving: The ranks that have no place after it: what they alone hold, another is to have before all leave.
    """

    life: int
    generation: int
    leaving: tuple[int, ...] = ()


@dataclass(frozen=True)
class Over:
    """Tell a process that this generation is over: it leaves it at once, and says when it has (:class:`Ready`)."""

    life: int
    generation: int


@dataclass(frozen=True)
class Dismiss:
    """Let a process go that is in no generation and has no place: it is to end, and nobody waits for that."""

    life: int


@dataclass(frozen=True)
class Kill:
    """Kill a process; its agent says when it is gone (:class:`Died`)."""

    life: int


@dataclass(frozen=True)
class Fail:
    """Give up: all processes are to be killed (by :class:`Kill`, before this), and the reason stands here."""

    reason: str


Command = Spawn | Go | Pause | Over | Dismiss | Kill | Fail


During = Literal["start", "recover", "train", "pause", "leave"]


@dataclass(frozen=True)
class Cause:
    """Why a generation has ended: a process died, a collective failed, a process was late and is to be killed, or its
    node was lost. What befalls a process that is yet to come is a cause as well, and ends nothing.

    Args:
        kind: One of these.
        at: The time in seconds.
        rank, node: The process that it is about, with the rank that it had or was to have.
        generation: The generation that it ended; where it was over already, that one.
        status: The exit status of who died, else 0.
        during: The work that the process was at: to start, to recover, to train, to pause, or to leave the last
            generation.
        life: The number of the process.
    """

    kind: Literal["died", "faulted", "late", "lost"]
    at: float
    rank: int
    node: int
    generation: int
    status: int
    during: During
    life: int


Judge = Callable[[Cause, Sequence[Cause]], str]
"""(cause, those before it) -> "" to recover in place, or why this is to end. It is asked of each cause but lost nodes,
which the caller knows of, and failed collectives, which others bring about; where nothing else has happened, of the
first of them."""


@dataclass(frozen=True)
class Limits:
    """Seconds that a process has for what it is to do.

    Args:
        start: Time from :class:`Spawn` to its :class:`Ready`.
        pause: Time from :class:`Pause` to its :class:`Ready`; then the generation is over at once.
        leave: Time from :class:`Over` to its :class:`Ready`.
        recover: Time from :class:`Go` to its :class:`Recovered`.
        die: Time from :class:`Kill` to its :class:`Died`.
    """

    start: float = 60.0
    pause: float = 60.0
    leave: float = 10.0
    recover: float = 120.0
    die: float = 10.0


State = Literal["new", "start", "ready", "recover", "train", "pause", "leave", "die", "gone", "ended"]
_IN: tuple[State, ...] = ("recover", "train", "pause")
"""The states of a process that is in a generation and has not been told that it is over."""
_DOING: Mapping[State, During] = {
    "start": "start",
    "ready": "leave",
    "recover": "recover",
    "train": "train",
    "pause": "pause",
    "leave": "leave",
}


@dataclass(frozen=True)
class Process:
    """A process of the run.

    Args:
        life: Its number, which no other ever has.
        node: The node that it runs on.
        rank: The rank that it has, or is to have first.
        state: The process is to be started, is to start, has left its generation, is to recover, trains, is to pause,
            is to leave, is to die, is gone before its time, or has ended well.
        generation: The last one that it was told to join, 0 for none: then it has no state of the run.
        deadline: The time by which its state must change.
    """

    life: int
    node: int
    rank: int
    state: State = "new"
    generation: int = 0
    deadline: float = math.inf


class Generations:
    """Decides who is told, killed and started, so that one generation at a time lives, and the run ends or goes on.

    One for all nodes: where several agents share it, their events are brought to it, and its commands to them. What
    happens at the end of a run, when a rank has ended well already, is not mended in place: a restart finds what it has
    saved.

    Args:
        nodes: {rank: node} of the first world.
        judge: Says whether to recover.
        limits: Deadlines of the processes.
    """

    def __init__(self, nodes: Mapping[int, int], judge: Judge, limits: Limits) -> None:
        self.processes = dict[int, Process]()
        """{life: process} of all that are there, or that one is to be started for."""
        self._lives = 0
        self.world = {rank: self._add(node, rank) for rank, node in sorted(nodes.items())}
        """{rank: life} of this generation, or of the one that is to come."""
        self.to: dict[int, int] | None = None
        """{rank: life} of the world that this one is to become."""
        self.judge, self.limits = judge, limits
        self.generation = 0
        self.phase: Literal["over", "going", "done", "failed"] = "over"
        self.step: int | None = None
        """The step from which this generation goes on, once a rank has said so."""
        self.causes: tuple[Cause, ...] = ()
        self._earlier = 0
        """The number of them that were before this generation was over."""
        self._spared = frozenset[int]()
        """The processes whose state others have too, since all have paused."""
        self._refusal = ""

    @property
    def places(self) -> Mapping[int, Process]:
        """{rank: process} of this generation, or of the one that is to come."""
        return {rank: self.processes[life] for rank, life in self.world.items()}

    @property
    def deadline(self) -> float:
        """The time at which :class:`Passed` is to be heard, if nothing else is."""
        return min((process.deadline for process in self.processes.values()), default=math.inf)

    @property
    def trains(self) -> bool:
        """Whether all have recovered, and nobody has ended."""
        return all(process.state == "train" for process in self.places.values())

    def begin(self, at: float) -> list[Command]:
        """Return the commands that start all processes of the first world."""
        return self._act(at)

    def on(self, event: Heard) -> list[Command]:
        """Return what to do, in this order."""
        if self.phase in ("done", "failed"):
            return []
        kills = self._late(event.at) if isinstance(event, Passed) else self._hear(event)
        return [*kills, *self._act(event.at)]

    def change(
        self, to: Mapping[int, tuple[int, int | None]], at: float, lost: Collection[int] = frozenset()
    ) -> list[Command]:
        """Return what to do so that others take part, or others are which rank; the newest change counts.

        Who is new gets ready while the others train. Then all pause after a step, who is not named is dismissed, and
        the next generation is the new world. After a fault meanwhile it is that as well, if all who are new are ready
        and nobody with a state of the run is left out; else the old one once more, and then the change. Where ranks
        were on lost nodes there is no such way: the generation is over at once, and the new world is the next one.
        Name nobody new then, for all are waited for.

        Args:
            to: {rank: (node, life)} of all, from rank 0; where the life is None, or gone by now, of a new process.
            at: The time of the agent's clock in seconds.
            lost: The nodes that are gone with all their processes. Nothing is heard of these any more.

        Raises:
            ValueError: ranks are missing, or a process is named twice, of another node, or of one that is lost.
        """
        if self.phase in ("done", "failed"):
            return []
        self._check(to, lost)
        without = {life for life, process in self.processes.items() if process.node in lost}
        for life in sorted(without):
            if self.processes[life].state in _DOING:
                self._blame("lost", at, life)
            if self.processes[life].state != "ended":
                self._put(life, "gone")
        ended = any(self.processes[life].state == "ended" for life in self.world.values())
        new = {rank: life if life in self.processes else self._add(node, rank) for rank, (node, life) in to.items()}
        self.to = dict(sorted(new.items()))
        if without & set(self.world.values()) and not ended:
            self.world, self.to = self.to, None
        for life in without - set(self.world.values()):
            del self.processes[life]
        return self._act(at)

    def _check(self, to: Mapping[int, tuple[int, int | None]], lost: Collection[int]) -> None:
        if sorted(to) != list(range(len(to))) or not to:
            raise ValueError(f"a world of ranks {sorted(to)}, not of 0, 1, ...")
        lives = [life for _, life in to.values() if life is not None]
        for rank, (node, life) in to.items():
            if node in lost:
                raise ValueError(f"rank {rank} is to be on node {node}, which is lost")
            if life is None:
                continue
            if life in self.processes and (there := self.processes[life].node) != node:
                raise ValueError(f"rank {rank} is to be process {life} of node {node}, which is of node {there}")
            if lives.count(life) > 1:
                raise ValueError(f"process {life} is to be two ranks")

    # -- what has happened

    def _hear(self, event: FromProcess) -> list[Command]:
        life, process = event.life, self.processes.get(event.life)
        if process is None or process.state in ("gone", "ended"):
            return []
        match event:
            case Died():
                if process.state != "die":
                    self._blame("died", event.at, life, event.status)
                self._put(life, "gone")
            case Ended():
                self._put(life, "ended")
            case Lost(generation=process.generation):  # heeded when it is over too: the next one would find the same
                return self._fail("state is lost: no step that all ranks can come to is held in memory any more")
            case Faulted(generation=process.generation) if process.state in _IN:
                self._blame("faulted", event.at, life)
            case Ready(generation=process.generation) if process.state not in ("ready", "die"):
                if process.state in ("recover", "train"):
                    self._blame("faulted", event.at, life)
                self._put(life, "ready")
            case Recovered(generation=process.generation) if process.state == "recover":
                if event.step != (self.step if self.step is not None else event.step):
                    return self._fail(
                        f"rank {process.rank} has recovered to step {event.step}, others to step {self.step}"
                    )
                self.step = event.step
                self._put(life, "train")
        return []

    def _late(self, at: float) -> list[Command]:
        """Return whom to kill. Who is late in a recovery, or to pause, may wait for another, so there only the
        generation is over."""
        kills: list[Command] = []
        for life, process in self.processes.items():
            if process.deadline > at:
                continue
            if process.state == "die":
                who = f"rank {process.rank} (node {process.node})"
                return self._fail(f"{who} could not be killed within {self.limits.die:g} s")
            self._blame("late", at, life)
            if process.state not in ("recover", "pause"):
                self._put(life, "die", at + self.limits.die)
                kills.append(Kill(life))
        return kills

    def _blame(self, kind: Literal["died", "faulted", "late", "lost"], at: float, life: int, status: int = 0) -> None:
        process = self.processes[life]
        if self.phase == "going" and life in self.world.values():
            self._end()
        self._spared = frozenset()
        doing = _DOING[process.state]
        cause = Cause(kind, at, process.rank, process.node, self.generation, status, doing, life)
        if kind in ("died", "late") and not self._refusal:
            self._refusal = self.judge(cause, self.causes)
        self.causes += (cause,)

    def _end(self) -> None:
        self.phase, self._earlier = "over", len(self.causes)

    def _put(self, life: int, state: State, deadline: float = math.inf) -> None:
        self.processes[life] = replace(self.processes[life], state=state, deadline=deadline)

    def _add(self, node: int, rank: int) -> int:
        self._lives += 1
        self.processes[self._lives] = Process(self._lives, node, rank)
        return self._lives

    # -- what follows from how all processes are

    def _act(self, at: float) -> list[Command]:
        if self.phase == "failed":
            return []
        if self._refusal:
            return self._fail(self._refusal)
        if self.to == self.world:
            self.to = None
        if self.phase == "going" and not self._in(*_IN):
            self._end()
            if len(self._in("ended")) == len(self.world):
                self.phase, self.to = "done", None
                return self._dismiss()
        if self.phase == "over":
            if ended := self._in("ended"):
                who = self.processes[ended[0]].rank
                return self._fail(f"rank {who} has ended well, and the others have not: a restart finds what is saved")
            if self.to is not None and self._can_begin(self.to):
                self.world, self.to = self.to, None
        commands = [*self._dismiss(), *self._spawn(at)]
        if self.phase == "going":
            return [*commands, *self._pause(at)]
        for life, process in self.processes.items():
            if process.state in _IN:
                self._put(life, "leave", at + self.limits.leave)
                commands.append(Over(life, self.generation))
        if any(process.state != "ready" for process in self.processes.values() if self._is_awaited(process)):
            return commands
        new = self.causes[self._earlier :]
        if new and all(cause.kind == "faulted" for cause in new) and (refusal := self.judge(new[0], self.causes[:-1])):
            return self._fail(refusal)
        return [*commands, *self._go(at)]

    def _in(self, *states: State) -> list[int]:
        """Return the processes of this world in some states."""
        return [life for life in self.world.values() if self.processes[life].state in states]

    def _newcomers(self, to: Mapping[int, int]) -> set[int]:
        return set(to.values()) - set(self.world.values())

    def _is_awaited(self, process: Process) -> bool:
        """Return whether the next generation does not begin before it is ready: it is in it, or may be in another."""
        return process.life in self.world.values() or process.generation > 0

    def _can_begin(self, to: Mapping[int, int]) -> bool:
        """Return whether the next generation can be this world: no wait for who is new, and no loss of who is not."""
        holders = {p.life for p in self.processes.values() if p.generation > 0 and p.state not in ("gone", "die")}
        return holders - set(to.values()) <= self._spared and all(
            self.processes[life].state == "ready" for life in self._newcomers(to)
        )

    def _dismiss(self) -> list[Command]:
        """Let go of those that have no place, and are in no generation that others have not left."""
        commands: list[Command] = []
        for life in self.processes.keys() - set(self.world.values()) - set((self.to or {}).values()):
            process = self.processes[life]
            if process.generation == 0 or process.state == "gone":
                del self.processes[life]
                if process.state not in ("new", "gone"):
                    commands.append(Dismiss(life))
        return commands

    def _spawn(self, at: float) -> list[Command]:
        """Start all processes that are to be there, and are not."""
        for process in list(self.processes.values()):
            if process.state == "gone":
                self._replace(process)
        new = [life for life, process in self.processes.items() if process.state == "new"]
        for life in new:
            self._put(life, "start", at + self.limits.start)
        return [Spawn(life, self.processes[life].node) for life in new]

    def _replace(self, process: Process) -> None:
        del self.processes[process.life]
        life = self._add(process.node, process.rank)
        for world in (self.world, self.to or {}):
            world.update({rank: life for rank, old in world.items() if old == process.life})

    def _pause(self, at: float) -> list[Command]:
        """Have all pause, once all train and all who are new are ready."""
        if (
            self.to is None
            or not self.trains
            or any(self.processes[n].state != "ready" for n in self._newcomers(self.to))
        ):
            return []
        self._spared = frozenset(self.world.values()) - set(self.to.values())
        leaving = tuple(rank for rank, life in self.world.items() if life in self._spared)
        for life in self.world.values():
            self._put(life, "pause", at + self.limits.pause)
        return [Pause(life, self.generation, leaving) for life in self.world.values()]

    def _go(self, at: float) -> list[Command]:
        commands: list[Command] = []
        for life in self.processes.keys() - set(self.world.values()):
            # What it holds is old from here on, also where it is to come back.
            if (process := self.processes[life]).generation > 0:
                commands.append(Dismiss(life))
                self._replace(process)
        self.generation, self.phase, self.step, self._spared = self.generation + 1, "going", None, frozenset()
        deadline = at + self.limits.recover
        for rank, life in self.world.items():
            self.processes[life] = Process(life, self.processes[life].node, rank, "recover", self.generation, deadline)
        commands += [Go(life, rank, self.generation) for rank, life in self.world.items()]
        return [*commands, *self._dismiss(), *self._spawn(at)]

    def _fail(self, reason: str) -> list[Command]:
        self.phase = "failed"
        living = [p.life for p in self.processes.values() if p.state not in ("new", "gone", "ended", "die")]
        return [*map(Kill, living), Fail(reason)]
