"""A model of ranks, messages and deaths around the recovery protocol, and walks through every order of its events.

A world is a tuple of plain values, so that worlds that are alike are visited once. What is under test runs for real:
the ``Status`` of each rank, ``resolve`` and ``Generations``. Around them stand as few kinds of moves as tell all orders
apart: what a process does between two of its messages is one move, for whoever dies in the middle of it has done
nothing that another could know of.

A rank's life: it waits for Go, tells its status, goes its way, and then for each version that it has come to: copies
its image to a peer, saves a checkpoint where one is due (write, gather, publish, wait for that), contributes to the
next step, sees its commit. A fault is a death, a broken network or a deadline that passes early.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import pytest

from megacore.recovery import protocol
from megacore.recovery.generations import (
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
from megacore.recovery.protocol import ProtocolError, Resolution, Status, Way

Step = tuple[int, int, int]
"""An applied step: its number, the generation of its gradients and that of its commit."""
History = tuple[Step, ...]
"""The state of a model is what was applied to it."""
Copies = tuple[tuple[int, int, History], ...]
"""(rank, version, image) of the copies that a process holds."""

LIMITS = Limits(leave=1, start=2, recover=3, die=100)
NO_TIME = 0.0


class Violation(AssertionError):
    """The protocol has broken a promise; the moves that lead there stand in it."""


@dataclass(frozen=True)
class Setting:
    """A run in the model.

    Args:
        replicas: {rank: ranks with the same image}.
        faults: The number of them that may befall.
        survives: The number of deaths that never lose state.
        steps: The steps of the run.
        saves: The steps after which a checkpoint is published.
        holder: {rank: rank that holds copies of its image}.
        copies_first: Whether copies are made after a recovery too, before the next step, or after steps alone.
        gathers: Whether the weights are gathered after an update (ZeRO).
        forgets: Whether gradients are gone once a generation is over.
        stale: Whether a message of a process may arrive after its place has been filled again.
        kinds: The kinds of faults.
        late: Whether messages to the agent may be delayed; a death overtakes them either way.
    """

    replicas: Mapping[int, tuple[int, ...]]
    faults: int
    survives: int
    steps: int = 2
    saves: tuple[int, ...] = (2,)
    holder: Mapping[int, int] = field(default_factory=dict)
    copies_first: bool = True
    gathers: bool = False
    forgets: bool = False
    stale: bool = False
    kinds: tuple[str, ...] = ("kill", "cut", "passed", "hang")
    late: bool = True


class Proc(NamedTuple):
    """A process in a rank's place."""

    life: int
    at: str
    generation: int
    status: int
    history: History
    copies: Copies
    inbox: tuple[Any, ...]
    outbox: tuple[Any, ...]
    doomed: bool = False
    gradients: int = 0
    """The generation of the summed gradients that lie in its memory, 0 for none."""
    saving: Any = None
    """The save that it is at in the background."""
    unsaved: bool = False
    """Whether a save was given up, and is to be done again."""


class Groups(NamedTuple):
    """The process groups of a generation: the collective that goes on, and the result of the last one."""

    generation: int
    given: tuple[Any, ...]
    result: Any
    moved: tuple[Any, ...]
    """What each rank has sent in the recovery: its image, and its copies."""
    copied: tuple[Any, ...]
    """The image that each rank has last sent to its holder."""
    cut: bool
    unsaved: bool = False
    """Whether a rank has said in the recovery that a save is to be done again."""


class World(NamedTuple):
    agent: int
    procs: tuple[Proc, ...]
    groups: tuple[Groups, ...]
    files: tuple[tuple[int, int, History], ...]
    published: tuple[tuple[int, History], ...]
    faults: int
    stale: tuple[Any, ...]
    failed: str


Move = tuple[str, int]

WAITING = {"status", "take", "copy", "compute", "commit", "regather", "write", "gather", "written"}
WAITING |= {"listen", "gathered", "join", "finish", "begin"}  # of saves in the background
"""Where a process is in a generation and talks to others, so that a fault is noticed."""
GONE = {"dead", "reaped", "ended", "home"}
HALF: History = ((0, 0, 0),)
"""The state of a rank while another's image is written over it."""
EMPTY: Any = None


FAULTS = ("kill", "cut", "passed", "hang")


class Explorer:
    """The moves of a setting, with what they lead to."""

    faults = FAULTS

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.ranks = tuple(sorted(setting.replicas))
        self._statuses: list[Status] = []
        self._status_ids: dict[Any, int] = {}
        self._after: dict[Any, int] = {}
        self._resolutions: dict[Any, Resolution | None] = {}
        self._agents: list[Generations] = []
        self._agent_ids: dict[Any, int] = {}
        self._heard: dict[Any, tuple[int, tuple[Any, ...]]] = {}

    # -- what is under test, remembered by its arguments

    def _status(self, status: Status) -> int:
        copies = tuple(sorted((rank, tuple(sorted(versions))) for rank, versions in status.copies.items()))
        key = (status.rank, status.version, status.pending, status.outcome, copies, status.rewound)
        found = self._status_ids.get(key)
        if found is None:
            found = self._status_ids[key] = len(self._statuses)
            self._statuses.append(Status.from_json(status.to_json()))
        return found

    def _do(self, status: int, what: str, *arguments: Any) -> int:
        key = (status, what, arguments)
        found = self._after.get(key)
        if found is None:
            found = self._after[key] = self._status(getattr(self._statuses[status], what)(*arguments))
        return found

    def _follow(self, status: int, said: tuple[int, ...]) -> int:
        key = (status, "follow", said)
        if key not in self._after:
            resolution = self._resolutions[said]
            assert resolution is not None
            self._after[key] = self._status(self._statuses[status].follow(resolution))
        return self._after[key]

    def _resolve(self, said: tuple[int, ...]) -> Resolution | None:
        if said not in self._resolutions:
            statuses = [self._statuses[each] for each in said]
            found = protocol.resolve(statuses, self.setting.replicas)
            if found != protocol.resolve(statuses[::-1], self.setting.replicas):
                raise Violation("what is resolved depends on the order of what is said")
            newest = self._newest(statuses)
            if (found and found.version) != newest:
                raise Violation(f"step {newest} is the newest that all can come to, not {found and found.version}")
            self._resolutions[said] = found
        return self._resolutions[said]

    def _newest(self, statuses: list[Status]) -> int | None:
        """Return what resolve should, said in another way."""
        offers: dict[int, set[int]] = {}
        for status in statuses:
            reached = {status.version}
            for other in statuses:
                if other.outcome and other.version is not None and status.version == other.version - 1:
                    reached |= {other.version} if status.pending == other.outcome.generation else set()
            for rank in (status.rank, *self.setting.replicas[status.rank]):
                offers.setdefault(rank, set()).update(v for v in reached if v is not None)
            for of, versions in status.copies.items():
                for rank in (of, *self.setting.replicas[of]):
                    offers.setdefault(rank, set()).update(versions)
        common = set.intersection(*(offers.get(rank, set()) for rank in self.ranks))
        return max(common, default=None)

    def _agent(self, agent: Generations) -> int:
        new = tuple(cause.kind for cause in agent.causes[agent._earlier :])
        key = (tuple(agent.processes.values()), agent.generation, agent.phase, agent.step, agent._refusal, new)
        found = self._agent_ids.get(key)
        if found is None:
            found = self._agent_ids[key] = len(self._agents)
            self._agents.append(agent)
        return found

    def _hear(self, agent: int, event: Heard) -> tuple[int, tuple[Any, ...]]:
        key = (agent, event)
        found = self._heard.get(key)
        if found is None:
            after = copy.copy(self._agents[agent])
            after.processes, after.world = dict(after.processes), dict(after.world)
            commands = tuple(after.on(event))
            found = self._heard[key] = (self._agent(after), commands)
        return found

    # -- worlds

    def start(self) -> World:
        """Return the world in which all processes have come and the first generation begins, at step 0, which all have
        loaded and copied."""
        agent = Generations(dict.fromkeys(self.ranks, 0), lambda cause, before: "", LIMITS)
        procs = []
        agent.begin(NO_TIME)
        for rank in self.ranks:
            status = Status(rank).loaded(0)
            held: Copies = ()
            if self.setting.holder:
                of = [rank, *(other for other in self.ranks if self.setting.holder[other] == rank)]
                held = tuple((other, 0, ()) for other in of)
                for other in of:
                    status = status.hold(other, 0)
            procs.append(Proc(rank + 1, "idle", 0, self._status(status), (), held, (), ()))
        commands: list[Any] = []
        for rank in self.ranks:
            commands += agent.on(Ready(NO_TIME, rank + 1, 0))
        world = World(self._agent(agent), tuple(procs), (), (), (), self.setting.faults, (), "")
        return self._obey(world, tuple(commands))

    def moves(self, world: World) -> list[Move]:
        """Return what may happen next."""
        if world.failed:
            return []
        found: list[Move] = []
        agent = self._agents[world.agent]
        if not self.setting.late and (first := self._leaves_alone(world)):
            return first
        eager = not self.setting.late
        broken = {each.generation: each.cut or self._broken(world, each.generation) for each in world.groups}
        for rank, proc in enumerate(world.procs):
            if proc.outbox:
                if eager and proc.at not in GONE:
                    return [("hear", rank)]
                found.append(("hear", rank))
            if proc.at == "dead" or proc.at == "ended":
                if eager:
                    return [("reap", rank)]
                found.append(("reap", rank))
            if proc.at in GONE:
                continue
            stands = proc.at == "stands"
            # Who stands while all train is found by its phase, and killed; a deadline finds it elsewhere.
            if proc.doomed or (stands and agent.places[rank].state == "train"):
                found.append(("killed", rank))
            if not stands and proc.inbox and (proc.inbox[0][0] == "over" or proc.at == "idle"):
                found.append(("read", rank))
            if proc.at in WAITING:
                groups = self._groups(world, proc.generation)
                if self._can_go_on(rank, proc, groups):
                    found.append(("go on", rank))
                told = any(word == "over" for word, _ in proc.inbox)
                if not told and broken[proc.generation]:
                    found.append(("notice", rank))
        found += [("late message", n) for n in range(len(world.stale))]
        due = min((p.deadline for p in agent.processes.values() if p.state != "die"), default=math.inf)
        if due < math.inf and any(proc.at == "stands" for proc in world.procs) and not found:
            found.append(("passed in earnest", int(due)))
        if found and not world.faults and self._undisturbed(world):
            # Each waits for what it knows, so every order leads to the same end.
            return found[:1]
        if world.faults and agent.phase not in ("done", "failed"):
            kinds = self.setting.kinds
            if "kill" in kinds:
                found += [("kill", r) for r, p in enumerate(world.procs) if p.at not in GONE]
            if "cut" in kinds:
                # As early as can be: whoever does not notice goes on all the same.
                found += [("cut", g) for g, groups in enumerate(world.groups) if groups == self._new(groups.generation)]
            if "hang" in kinds:
                found += [("hang", r) for r, p in enumerate(world.procs) if p.at not in GONE | {"stands"}]
            if "passed" in kinds and due < math.inf:
                found.append(("passed", int(due)))
        return found

    def after(self, world: World, move: Move) -> World:
        """Return the world after a move; Violation, ProtocolError."""
        kind, rank = move
        if kind.startswith("passed"):
            return self._tell(world._replace(faults=world.faults - (kind == "passed")), Passed(float(rank)))
        if kind == "cut":
            groups = list(world.groups)
            groups[rank] = groups[rank]._replace(cut=True)
            return world._replace(groups=tuple(groups), faults=world.faults - 1)
        if kind == "late message":
            left = world.stale[:rank] + world.stale[rank + 1 :]
            return self._tell(world._replace(stale=left), world.stale[rank])
        proc = world.procs[rank]
        if kind == "hear":
            world = self._put(world, rank, proc._replace(outbox=proc.outbox[1:]))
            return self._tell(world, proc.outbox[0])
        if kind == "kill":
            return self._die(world._replace(faults=world.faults - 1), rank, proc)
        if kind == "hang":
            world = world._replace(faults=world.faults - 1)
            return self._put(world, rank, proc._replace(at="stands", outbox=()))
        if kind == "killed":
            return self._die(world, rank, proc)
        if kind == "reap":
            event = Ended(NO_TIME, proc.life) if proc.at == "ended" else Died(NO_TIME, proc.life, -9)
            at = "home" if proc.at == "ended" else "reaped"
            return self._tell(self._put(world, rank, proc._replace(at=at)), event)
        if kind == "read":
            return self._read(world, rank, proc)
        if kind == "notice":
            said = (*proc.outbox, Faulted(NO_TIME, proc.life, proc.generation))
            return self._put(world, rank, proc._replace(at="faulted", outbox=said))
        return self._go_on(world, rank, proc)

    def _put(self, world: World, rank: int, proc: Proc) -> World:
        return world._replace(procs=(*world.procs[:rank], proc, *world.procs[rank + 1 :]))

    def _new(self, generation: int) -> Groups:
        nothing = (EMPTY,) * len(self.ranks)
        return Groups(generation, nothing, EMPTY, nothing, nothing, False)

    def _groups(self, world: World, generation: int) -> Groups:
        return next(groups for groups in world.groups if groups.generation == generation)

    def _set(self, world: World, groups: Groups) -> World:
        others = tuple(each for each in world.groups if each.generation != groups.generation)
        return world._replace(groups=(*others, groups))

    def _broken(self, world: World, generation: int) -> bool:
        """Return whether a process of a generation is gone before its end, or has left it."""
        return any(
            proc.at in ("dead", "reaped", "faulted", "lost")
            or (proc.at == "idle" and ("go", generation) not in proc.inbox)
            for proc in world.procs
        )

    def _leaves_alone(self, world: World) -> list[Move]:
        """Return the moves of a rank that was told to leave, and that nobody's later moves concern: others can wait.

        It may see a result that is there, go on as far as that leads, die, or leave; whatever the others do and whoever
        dies meanwhile, it could as well have done so before.
        """
        if {"passed", "hang"} & set(self.setting.kinds) or any(
            p.outbox or p.at in ("dead", "ended") for p in world.procs
        ):
            return []
        for rank, proc in enumerate(world.procs):
            if (
                proc.at in GONE
                or proc.at == "idle"
                or len(proc.inbox) != 1
                or proc.inbox[0] != ("over", proc.generation)
            ):
                continue
            found: list[Move] = [("read", rank)]
            if proc.at in WAITING:
                groups = self._groups(world, proc.generation)
                left = [
                    given is EMPTY
                    and (other.generation != proc.generation or other.at not in WAITING)
                    and ("go", proc.generation) not in other.inbox
                    for given, other in zip(groups.given, world.procs, strict=True)
                ]
                if self._can_go_on(rank, proc, groups):
                    found.append(("go on", rank))
                elif proc.at in ("take", "copy") or not any(left):
                    continue
            return found + ([("kill", rank)] if world.faults and "kill" in self.setting.kinds else [])
        return []

    def _undisturbed(self, world: World) -> bool:
        """Return whether all are in one generation that nothing has befallen, and only results are under way."""
        generation = self._agents[world.agent].generation
        return (
            not world.stale
            and not any(groups.cut for groups in world.groups if groups.generation == generation)
            and all(
                not proc.doomed
                and (
                    (proc.generation == generation and proc.at in WAITING and not proc.inbox)
                    or proc.at in ("ended", "home")
                    or (proc.at == "idle" and proc.inbox == (("go", generation),))
                )
                for proc in world.procs
            )
        )

    # -- the agent

    def _tell(self, world: World, event: Heard) -> World:
        agent, commands = self._hear(world.agent, event)
        return self._obey(world._replace(agent=agent), commands)

    def _obey(self, world: World, commands: tuple[Any, ...]) -> World:
        for command in commands:
            match command:
                case Fail(reason=reason):
                    ending = any(proc.at == "home" for proc in world.procs)
                    deaths = (
                        len(world.procs) * -1
                        + max(proc.life for proc in world.procs)
                        + sum((proc.at in ("dead", "reaped")) for proc in world.procs)
                    )
                    lost = reason.startswith("state is lost") and deaths > self.setting.survives
                    if not (ending or lost):
                        raise Violation(f"ends without need: {reason}")
                    return world._replace(failed=reason)
                case Spawn(life):
                    rank = self._agents[world.agent].processes[life].rank
                    if world.procs[rank].at != "reaped":
                        raise Violation(f"rank {rank} has two processes")
                    stale = world.stale + (world.procs[rank].outbox if self.setting.stale else ())
                    status = self._status(Status(rank))
                    said = (Ready(NO_TIME, life, 0),)
                    proc = Proc(life, "idle", 0, status, (), (), (), said)
                    world = self._put(world._replace(stale=stale), rank, proc)
                case Kill(life):
                    rank = self._rank(world, life)
                    world = self._put(world, rank, world.procs[rank]._replace(doomed=True))
                case Go(life, generation=generation) | Over(life, generation):
                    rank = self._rank(world, life)
                    proc = world.procs[rank]
                    if generation > 1 + self.setting.faults - world.faults:
                        raise Violation(f"generation {generation - 1} has ended without a fault")
                    letter = ("go" if isinstance(command, Go) else "over", generation)
                    world = self._put(world, rank, proc._replace(inbox=(*proc.inbox, letter)))
        return world

    def _rank(self, world: World, life: int) -> int:
        return next(rank for rank, proc in enumerate(world.procs) if proc.life == life)

    # -- the ranks

    def _die(self, world: World, rank: int, proc: Proc) -> World:
        gone = proc._replace(at="dead", status=-1, history=(), copies=(), inbox=(), doomed=False, gradients=0)
        return self._put(world, rank, gone)

    def _read(self, world: World, rank: int, proc: Proc) -> World:
        word, generation = proc.inbox[0]
        proc = proc._replace(inbox=proc.inbox[1:])
        if word == "over":
            if proc.generation == generation and proc.at != "idle":
                said = (*proc.outbox, Ready(NO_TIME, proc.life, generation))
                status = self._do(proc.status, "forget") if self.setting.forgets else proc.status
                gradients = 0 if self.setting.forgets else proc.gradients
                proc = proc._replace(at="idle", outbox=said, status=status, gradients=gradients)
            return self._put(world, rank, proc)
        for other in world.procs:
            if other.at in WAITING and other.generation != generation:
                raise Violation(f"generations {other.generation} and {generation} live at once")
        if all(groups.generation != generation for groups in world.groups):
            world = world._replace(groups=(self._new(generation),))
            if self.setting.kinds:
                return self._put(world, rank, proc._replace(inbox=((word, generation), *proc.inbox)))
        proc = proc._replace(at="status", generation=generation)
        return self._give(self._put(world, rank, proc), rank, proc.status)

    def _give(self, world: World, rank: int, what: Any) -> World:
        """Contribute to the next collective; the last one makes its result."""
        groups = self._groups(world, world.procs[rank].generation)
        given = (*groups.given[:rank], (world.procs[rank].at, what), *groups.given[rank + 1 :])
        if EMPTY in given:
            return self._set(world, groups._replace(given=given))
        kinds = {kind for kind, _ in given}
        what = tuple(each for _, each in given)
        if len(kinds) > 1:
            raise Violation(f"ranks meet in different collectives: {sorted(kinds)}")
        if kinds <= {"commit", "gather", "gathered", "written"} and len(set(what)) > 1:
            raise Violation(f"torn: ranks meet in {kinds} with {what}")
        result = (kinds.pop(), what)
        return self._set(world, groups._replace(given=(EMPTY,) * len(self.ranks), result=result))

    def _can_go_on(self, rank: int, proc: Proc, groups: Groups) -> bool:
        if proc.at in ("compute", "write"):
            return True
        if proc.at == "take":
            return groups.moved[self._way(groups, rank).source] is not EMPTY
        if proc.at == "copy":
            version = len(proc.history)
            return all(groups.copied[r] is not EMPTY and len(groups.copied[r]) == version for r in self._held_by(rank))
        # A collective has its result once this rank's contribution to the next one is wanted.
        return groups.given[rank] is EMPTY

    def _way(self, groups: Groups, rank: int) -> Way:
        resolution = self._resolutions[groups.result[1]]
        assert resolution is not None
        return resolution.ways[rank]

    def _held_by(self, rank: int) -> list[int]:
        return [other for other, holder in self.setting.holder.items() if holder == rank]

    def _go_on(self, world: World, rank: int, proc: Proc) -> World:
        groups = self._groups(world, proc.generation)
        version = len(proc.history)
        match proc.at:
            case "status":
                return self._resolved(world, groups, rank, proc)
            case "take":
                way = self._way(groups, rank)
                if way.image not in self.setting.replicas[rank]:
                    raise Violation(f"rank {rank} takes the image of rank {way.image}, which is another")
                history, copies = groups.moved[way.source]
                if way.kind == "copy":
                    wanted = self._resolutions[groups.result[1]].version  # type: ignore[union-attr]
                    history = next(image for of, v, image in copies if (of, v) == (way.image, wanted))
                return self._moved(world, groups, rank, proc._replace(history=history))
            case "copy":
                for other in self._held_by(rank):
                    proc = self._hold(proc, other, version, groups.copied[other])
                return self._save(world, rank, proc)
            case "compute":
                status = self._do(proc.status, "contribute", proc.generation)
                proc = proc._replace(at="commit", status=status, gradients=proc.generation)
                return self._give(self._put(world, rank, proc), rank, (version, proc.history))
            case "commit":
                status = self._do(proc.status, "commit", proc.generation, (proc.generation + version / 8,))
                if self.setting.holder and (self.setting.copies_first or self._done_in(proc, proc.generation)):
                    # Nobody contributes before it has all of its copies of the version before.
                    status = self._do(status, "settle", version)
                history = (*proc.history, (version + 1, proc.generation, proc.generation))
                proc = self._drop(proc._replace(status=status, history=history))
                if self.setting.gathers:
                    proc = proc._replace(at="regather")
                    return self._give(self._put(world, rank, proc), rank, version)
                return self._reached(world, rank, proc)
            case "regather":
                return self._reached(world, rank, proc)
            case "write":
                files = tuple(each for each in world.files if each[:2] != (version, rank))
                proc = proc._replace(at="gather")
                world = self._put(world._replace(files=(*files, (version, rank, proc.history))), rank, proc)
                return self._give(world, rank, (version, proc.history))
            case "gather":
                if rank == 0:
                    world = self._publish(world, version)
                proc = proc._replace(at="written")
                return self._give(self._put(world, rank, proc), rank, version)
            case "written":
                at = "ended" if version == self.setting.steps else "compute"
                return self._put(world, rank, proc._replace(at=at))
        raise AssertionError(proc.at)

    def _resolved(self, world: World, groups: Groups, rank: int, proc: Proc) -> World:
        said = groups.result[1]
        resolution = self._resolve(said)
        if resolution is None:
            lost = (*proc.outbox, Lost(NO_TIME, proc.life, proc.generation))
            return self._put(world, rank, proc._replace(at="lost", outbox=lost))
        way = resolution.ways[rank]
        match way.kind:
            case "keep":
                return self._moved(world, groups, rank, proc)
            case "forward":
                if not proc.gradients or resolution.outcome is None:
                    raise Violation(f"rank {rank} rolls forward without gradients or without their commit")
                step = (len(proc.history) + 1, proc.gradients, resolution.outcome.generation)
                return self._moved(world, groups, rank, proc._replace(history=(*proc.history, step)))
            case "back":
                history = next(i for of, v, i in proc.copies if (of, v) == (way.image, resolution.version))
                return self._moved(world, groups, rank, proc._replace(history=history))
        moved = (*groups.moved[:rank], ((), proc.copies), *groups.moved[rank + 1 :])
        status_id = self._do(proc.status, "overwrite")
        proc = proc._replace(at="take", status=status_id, history=HALF)
        return self._put(self._set(world, groups._replace(moved=moved)), rank, proc)

    def _moved(self, world: World, groups: Groups, rank: int, proc: Proc) -> World:
        """End a rank's recovery: it has the image of the version, and has sent what others want of it."""
        said = groups.result[1]
        resolution = self._resolutions[said]
        assert resolution is not None
        if [step for step, _, _ in proc.history] != list(range(1, resolution.version + 1)):
            raise Violation(f"rank {rank} recovers to {proc.history}, not to step {resolution.version}")
        moved = (*groups.moved[:rank], (proc.history, proc.copies), *groups.moved[rank + 1 :])
        world = self._set(world, groups._replace(moved=moved))
        recovered = Recovered(NO_TIME, proc.life, proc.generation, resolution.version)
        proc = self._drop(proc._replace(status=self._follow(proc.status, said), outbox=(*proc.outbox, recovered)))
        return self._reached(world, rank, proc)

    def _drop(self, proc: Proc) -> Proc:
        """Drop the copies that the status does not tell of any more."""
        told = {(of, version) for of, versions in self._statuses[proc.status].copies.items() for version in versions}
        copies = tuple(each for each in proc.copies if each[:2] in told)
        if len(copies) < len(told):
            raise Violation(f"tells of copies {told}, and has {copies}")
        return proc._replace(copies=copies)

    def _hold(self, proc: Proc, of: int, version: int, image: History) -> Proc:
        status = self._do(proc.status, "hold", of, version)
        others = tuple(each for each in proc.copies if each[:2] != (of, version))
        return self._drop(proc._replace(status=status, copies=tuple(sorted((*others, (of, version, image))))))

    def _reached(self, world: World, rank: int, proc: Proc) -> World:
        """Begin what follows a step, or a recovery to it; the next gradients are summed where the last ones were."""
        proc = proc._replace(gradients=0)
        if not self.setting.holder or not (self.setting.copies_first or self._done_in(proc, proc.generation)):
            return self._save(world, rank, proc)
        groups = self._groups(world, proc.generation)
        copied = (*groups.copied[:rank], proc.history, *groups.copied[rank + 1 :])
        proc = self._hold(proc, rank, len(proc.history), proc.history)
        return self._put(self._set(world, groups._replace(copied=copied)), rank, proc._replace(at="copy"))

    def _done_in(self, proc: Proc, generation: int) -> bool:
        """Return whether the last step is of this generation."""
        return bool(proc.history) and proc.history[-1][2] == generation

    def _save(self, world: World, rank: int, proc: Proc) -> World:
        at = "write" if len(proc.history) in self.setting.saves else "compute"
        return self._put(world, rank, proc._replace(at=at))

    def _publish(self, world: World, version: int) -> World:
        images = {image for v, _, image in world.files if v == version}
        if len(images) != 1 or len([v for v, _, _ in world.files if v == version]) != len(self.ranks):
            raise Violation(f"the checkpoint of step {version} is torn: {images}")
        published = tuple(each for each in world.published if each[0] != version)
        return world._replace(published=(*published, (version, images.pop())))

    # -- ends

    def check_end(self, world: World) -> None:
        """Raise Violation if a world without moves is no end of a run."""
        if world.failed:
            return
        if self._agents[world.agent].phase != "done":
            raise Violation("stuck: nobody can go on, and nothing has failed")
        histories = {proc.history for proc in world.procs}
        (history,) = histories if len(histories) == 1 else ((),)
        if [step for step, _, _ in history] != list(range(1, self.setting.steps + 1)):
            raise Violation(f"the run has ended with {histories}")
        published = dict(world.published)
        newest = max(published, default=0)
        if newest < max(self.setting.saves) or published[newest] != history[:newest]:
            raise Violation("the run has ended without its last checkpoint")


@dataclass(frozen=True)
class Walked:
    """The worlds that were seen, the moves between them, and the ends: done and declared lost."""

    worlds: int
    moves: int
    done: int
    failed: int


class Model(Protocol):
    """The worlds of a model, and the moves between them; ``faults`` need not be."""

    @property
    def faults(self) -> Collection[str]: ...
    def start(self) -> Any: ...
    def moves(self, world: Any) -> list[Move]: ...
    def after(self, world: Any, move: Move) -> Any: ...
    def check_end(self, world: Any) -> None: ...


def explore(explorer: Model, most: float = math.inf) -> Walked:
    """Visit every world of a model once, depth first; Violation with the moves that led there."""
    start = explorer.start()
    open_: set[Any] = {start}
    seen = {hash(start)}  # of 64 bits: of 10 million worlds, two share one once in 200,000 runs
    path: list[tuple[Move, Any, list[Move]]] = [(("start", 0), start, explorer.moves(start))]
    moves = done = failed = 0
    try:
        while path:
            _, world, left = path[-1]
            if not left:
                path.pop()
                open_.remove(world)
                continue
            move = left.pop()
            moves += 1
            path.append((move, world, []))
            after = explorer.after(world, move)
            if hash(after) in seen:
                if after in open_:
                    raise Violation("in circles: a world comes again")
                path.pop()
                continue
            if len(seen) >= most:
                raise LookupError("more worlds than asked for")
            seen.add(hash(after))
            next_ = explorer.moves(after)
            if all(kind in explorer.faults for kind, _ in next_):
                explorer.check_end(after)
                done, failed = done + (not after.failed), failed + bool(after.failed)
            path[-1] = (move, after, next_)
            open_.add(after)
    except (Violation, ProtocolError, LookupError, StopIteration) as error:
        error.add_note(
            f"after {moves} moves and {len(seen)} worlds, by " + " ".join(f"{k}:{r}" for (k, r), _, _ in path)
        )
        raise
    return Walked(len(seen), moves, done, failed)


def walk(setting: Setting, seed: int) -> Walked:
    """Go one random way to an end, with faults at random moments."""
    explorer, chosen = Explorer(setting), random.Random(seed)
    world, trail = explorer.start(), list[Move]()
    # About where a run of so many ranks ends, so that faults fall anywhere in it.
    expected = 40 * len(explorer.ranks)
    faults = sorted(chosen.randrange(expected) for _ in range(setting.faults))
    try:
        while moves := explorer.moves(world):
            hits = [move for move in moves if move[0] in FAULTS and move[0] != "cut"]
            hits += [("cut", number) for number, groups in enumerate(world.groups) if not groups.cut]
            others = [move for move in moves if move[0] not in FAULTS]
            if not others:
                break
            if hits and faults and faults[0] <= len(trail):
                faults.pop(0)
                others = [hit for hit in hits if hit[0] == chosen.choice(sorted({kind for kind, _ in hits}))] or hits
            trail.append(chosen.choice(others))
            world = explorer.after(world, trail[-1])
        explorer.check_end(world)
    except (Violation, ProtocolError, LookupError, StopIteration) as error:
        error.add_note(f"seed {seed}, by " + " ".join(f"{kind}:{rank}" for kind, rank in trail[-60:]))
        raise
    return Walked(len(trail) + 1, len(trail), int(not world.failed), int(bool(world.failed)))


def seed(monkeypatch: pytest.MonkeyPatch, owners: Sequence[Any], name: str, old: str, new: str) -> None:
    """Change what a function says of the first of some classes and modules that has it."""
    owner = next(each for each in owners if hasattr(each, name))
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) == 1, f"{name} does not say {old!r} once"
    scope = dict(vars(sys.modules[getattr(owner, name).__module__]))
    exec(f"from __future__ import annotations\n{source.replace(old, new)}", scope)
    monkeypatch.setattr(owner, name, scope[name])
