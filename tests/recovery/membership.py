"""A model of nodes, agents and processes around :class:`~megacore.recovery.generations.Generations`, for every order
in which nodes come, leave and are lost while processes die.

The lead's agent runs for real. Its commands travel to the agents of other nodes, and their events to it, each
connection in order and with any delay; those of its own node are heard at once. A process joins a generation, says
what it has of the run, takes the state of the old world or of a new one, keeps what it had until all have theirs, and
trains: a step is a message of all to all, and so is the agreement on a pause. What ranks say (``Status``), and what
follows (``resolve``, or ``that_count`` and ``sources``), is the protocol's; a state is told by its history.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from explorer import Violation

from megacore.recovery.generations import (
    Died,
    Dismiss,
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
    Pause,
    Ready,
    Recovered,
    Spawn,
)
from megacore.recovery.protocol import Resolution, Sources, Status, Way, resolve, sources, that_count

LIMITS = Limits(leave=1, pause=2, start=3, recover=4, die=100)
LEAD = 0

History = tuple[tuple[int, int], ...]
"""(step, generation of its commit) of all that is in a state."""
Copies = tuple[tuple[int, History], ...]
"""(rank, history) of the images of others that a process holds."""


class Held(NamedTuple):
    """The state of a rank in a world: what it says of it, the ranks of that world, its history, and its copies."""

    status: int
    size: int
    history: History = ()
    copies: Copies = ()


@dataclass(frozen=True)
class Cluster:
    """A run on several nodes in the model.

    Args:
        nodes: {node: processes} at the start; node 0 leads, and stays.
        comes, leaves, lost: The nodes that may come, announce that they leave, and be lost, each at any time.
        processes: The processes of a node that comes.
        faults: The number of processes that die, or deadlines that pass early.
        kinds: The kinds of faults.
        steps: The steps of the run; it does not end before it is the world that was wanted last.
        ends: Whether it ends in the middle of a change too.
        replicated: Whether each rank has all of the state, or a piece that no other has.
        late: Whether other nodes' messages may be delayed.
    """

    nodes: tuple[int, ...]
    comes: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    processes: int = 1
    faults: int = 0
    kinds: tuple[str, ...] = ("kill",)
    steps: int = 2
    ends: bool = False
    replicated: bool = True
    late: bool = True


class Proc(NamedTuple):
    """A process: where it is, what it has of the world that it knows to be whole, and of one that forms."""

    life: int
    node: int
    at: str = "idle"
    generation: int = 0
    rank: int = 0
    known: Held | None = None
    forming: Held | None = None
    pause: tuple[int, ...] | None = None
    """The ranks that leave after the pause that it has heard of."""
    inbox: tuple[Any, ...] = ()


class Groups(NamedTuple):
    """The groups of a generation: its processes by rank, the collective that goes on, and the result of the last."""

    generation: int
    members: tuple[int, ...]
    given: tuple[Any, ...]
    result: Any = None


class Wire(NamedTuple):
    """What is on the way to the agent of a node, and from it."""

    down: tuple[Any, ...] = ()
    up: tuple[Any, ...] = ()


class Nodes(NamedTuple):
    """The nodes that the lead knows of: wanted, and leaving."""

    wanted: frozenset[int]
    leaving: frozenset[int]


class World(NamedTuple):
    lead: int
    known: Nodes
    procs: tuple[Proc, ...]
    groups: tuple[Groups, ...]
    wires: tuple[tuple[int, Wire], ...]
    script: frozenset[tuple[str, int]]
    gone: frozenset[int]
    """Nodes that are lost, and the lead does not know it."""
    faults: int
    deaths: int
    failed: str = ""


Move = tuple[str, int]
WAITING = {"status", "confirm", "commit", "hand over"}
LEFT = {"dead", "reaped", "home"}
FAULTS = {"kill", "passed", "cut", "come", "leave", "lose"}
"""The moves that need not be."""


class Membership:
    """The moves of a cluster, with what they lead to."""

    faults = FAULTS

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._statuses: list[Status] = []
        self._status_ids: dict[str, int] = {}
        self._leads: list[Generations] = []
        self._lead_ids: dict[Any, int] = {}

    # -- the lead

    def _lead(self, lead: Generations) -> int:
        new = tuple(cause.kind == "faulted" for cause in lead.causes[lead._earlier :]) if lead.phase == "over" else ()
        to = lead.to and tuple(lead.to.items())
        key = (
            tuple(sorted(lead.processes.values(), key=lambda process: process.life)),
            tuple(lead.world.items()),
            to,
            lead._lives,
            lead.generation,
            lead.phase,
            lead.step,
            lead._spared,
            all(new),
        )
        found = self._lead_ids.get(key)
        if found is None:
            found = self._lead_ids[key] = len(self._leads)
            self._leads.append(lead)
        return found

    def _copy(self, world: World) -> Generations:
        lead = copy.copy(self._leads[world.lead])
        lead.processes, lead.world, lead.to = dict(lead.processes), dict(lead.world), lead.to and dict(lead.to)
        return lead

    def _tell(self, world: World, event: Heard) -> World:
        lead = self._copy(world)
        commands = lead.on(event)
        return self._obey(world._replace(lead=self._lead(lead)), commands)

    def _change(self, world: World, known: Nodes, lost: frozenset[int] = frozenset()) -> World:
        """Have the lead want the processes of its nodes, in their order; what has state first, if a node is lost."""
        world = world._replace(known=known)
        for nodes in [known.wanted | known.leaving, known.wanted] if lost else [known.wanted]:
            lead = self._copy(world)
            if lead.phase in ("done", "failed"):
                return world
            # Those who are yet to come stay wanted, but where a node is lost.
            there = lead.world if lost else {**lead.world, **(lead.to or {})}
            lives = list(dict.fromkeys([*lead.world.values(), *there.values()]))
            kept = [life for life in lives if life in lead.processes and lead.processes[life].node in nodes]
            places: list[tuple[int, int | None]] = [(lead.processes[life].node, life) for life in kept]
            if not lost:
                has = {node for node, _ in places}
                places += [(node, None) for node in sorted(nodes - has) for _ in range(self.cluster.processes)]
            commands = lead.change(dict(enumerate(places)), 0.0, lost)
            world, lost = self._obey(world._replace(lead=self._lead(lead)), commands), frozenset()
        return world

    def _obey(self, world: World, commands: list[Any]) -> World:
        goes = [command for command in commands if isinstance(command, Go)]
        if goes:
            world = self._form(world, goes)
        for reason in (command.reason for command in commands if isinstance(command, Fail)):
            there = self._leads[world.lead].processes
            held = any(p.known and p.at not in LEFT and p.life in there for p in world.procs)
            lost = reason.startswith("state is lost") and world.deaths and not (self.cluster.replicated and held)
            if not (lost or any(process.state == "ended" for process in there.values())):
                raise Violation(f"ends without need: {reason}")
            return world._replace(failed=reason)
        for command in commands:
            node = command.node if isinstance(command, Spawn) else self._node_of(world, command.life)
            if node is None:
                continue
            if isinstance(command, Spawn) and node not in world.known.wanted | world.known.leaving | world.gone:
                raise Violation(f"a process is started on node {node}, which is lost")
            if node == LEAD or not self.cluster.late:
                world = self._execute(world, command, node)
            else:
                wire = self._wire(world, node)
                world = self._set_wire(world, node, wire._replace(down=(*wire.down, command)))
        return world

    def _node_of(self, world: World, life: int) -> int | None:
        """Return the node of a process, which may be yet to be started; None where it is lost."""
        coming = [Proc(c.life, c.node) for _, wire in world.wires for c in wire.down if isinstance(c, Spawn)]
        found = next((proc.node for proc in (*world.procs, *coming) if proc.life == life), None)
        if found is None and not world.gone:
            raise Violation(f"a command to process {life}, which is not there")
        return found

    def _form(self, world: World, goes: list[Go]) -> World:
        lead = self._leads[world.lead]
        generation = goes[0].generation
        ranks = {go.rank: go.life for go in goes}
        if sorted(ranks) != list(range(len(ranks))) or len(set(ranks.values())) < len(ranks) or ranks != lead.world:
            raise Violation(f"a world of {ranks}")
        changes = len(self.cluster.comes) + len(self.cluster.leaves) + 2 * len(self.cluster.lost)
        if generation > 1 + changes + self.cluster.faults:
            raise Violation(f"generation {generation - 1} has ended without a cause")
        members = tuple(ranks[rank] for rank in sorted(ranks))
        return world._replace(groups=(*world.groups, Groups(generation, members, (None,) * len(ranks))))

    # -- agents

    def _wire(self, world: World, node: int) -> Wire:
        return dict(world.wires).get(node, Wire())

    def _set_wire(self, world: World, node: int, wire: Wire) -> World:
        wires = {**dict(world.wires), node: wire}
        return world._replace(wires=tuple(sorted((n, w) for n, w in wires.items() if w != Wire())))

    def _say(self, world: World, node: int, event: Heard) -> World:
        if node == LEAD or not self.cluster.late:
            return self._tell(world, event)
        wire = self._wire(world, node)
        return self._set_wire(world, node, wire._replace(up=(*wire.up, event)))

    def _execute(self, world: World, command: Any, node: int) -> World:
        """Have the agent of a node do a command."""
        if node in world.gone:
            return world
        if isinstance(command, Spawn):
            procs = (*world.procs, Proc(command.life, node))
            return self._say(world._replace(procs=procs), node, Ready(0.0, command.life, 0))
        proc = self._procs(world).get(command.life)
        if proc is None or proc.at in LEFT | {"ended"}:
            return world
        match command:
            case Kill():
                return self._die(world, proc)
            case Dismiss():
                if proc.at != "idle":
                    raise Violation(f"process {proc.life} is dismissed at {proc.at}")
                world = self._put(world, proc._replace(at="home", known=None, forming=None, inbox=()))
                return self._say(world, node, Ended(0.0, proc.life))
        world = self._put(world, proc._replace(inbox=(*proc.inbox, command)))
        # A delay on the way from a node's agent to its process is one on the way to the agent.
        return world if node == LEAD or not self.cluster.late else self._read(world, self._procs(world)[proc.life])

    # -- processes

    def _procs(self, world: World) -> dict[int, Proc]:
        return {proc.life: proc for proc in world.procs}

    def _put(self, world: World, proc: Proc) -> World:
        procs = (proc if each.life == proc.life else each for each in world.procs)
        return world._replace(procs=tuple(procs))

    def _die(self, world: World, proc: Proc) -> World:
        world = world._replace(deaths=world.deaths + bool(proc.known or proc.forming))
        return self._put(world, Proc(proc.life, proc.node, "dead", proc.generation))

    def _groups(self, world: World, generation: int) -> Groups:
        return next(groups for groups in world.groups if groups.generation == generation)

    def _read(self, world: World, proc: Proc) -> World:
        command, proc = proc.inbox[0], proc._replace(inbox=proc.inbox[1:])
        match command:
            case Over(generation=generation) if proc.generation == generation and proc.at != "idle":
                world = self._put(world, proc._replace(at="idle", pause=None))
                return self._say(world, proc.node, Ready(0.0, proc.life, generation))
            case Pause(generation=generation, leaving=leaving) if proc.generation == generation and proc.at != "idle":
                return self._put(world, proc._replace(pause=leaving))
            case Go(rank=rank, generation=generation):
                for other in world.procs:
                    if other.generation != generation and other.at in WAITING | {"train"}:
                        raise Violation(f"generations {other.generation} and {generation} live at once")
                proc = proc._replace(at="status", generation=generation, rank=rank, pause=None)
                return self._give(self._put(world, proc), proc, (proc.known, proc.forming))
        return self._put(world, proc)

    def _give(self, world: World, proc: Proc, what: Any) -> World:
        groups = self._groups(world, proc.generation)
        given = (*groups.given[: proc.rank], (proc.at, what), *groups.given[proc.rank + 1 :])
        if None not in given:
            if len({kind for kind, _ in given}) > 1:
                raise Violation(f"ranks meet in different collectives: {given}")
            if any(other.at == "train" and other.generation != proc.generation for other in world.procs):
                raise Violation(f"a world that was left, of generation {proc.generation}, goes on")
            groups = groups._replace(given=(None,) * len(given), result=tuple(what for _, what in given))
            self._check_last(world, proc, groups)
        else:
            groups = groups._replace(given=given)
        others = [groups if each.generation == groups.generation else each for each in world.groups]
        return world._replace(groups=tuple(others))

    def _train(self, world: World, life: int) -> World:
        """Have a process that has begun to train, or has done a step, go on to the commit of the next."""
        proc = self._procs(world)[life]
        return self._go_on(world, proc) if proc.at == "train" and self._can_go_on(world, proc) else world

    def _check_last(self, world: World, proc: Proc, groups: Groups) -> None:
        """Raise Violation if the run is to end, and is not the world that was wanted last."""
        if (
            proc.at != "commit"
            or proc.known is None
            or self.cluster.ends
            or not self._is_last(proc.known.history, groups)
        ):
            return
        lead = self._leads[world.lead]
        if not all(life in lead.processes for life in groups.members):
            return  # who is dead already is replaced
        nodes = {lead.processes[life].node for life in groups.members}
        if nodes != world.known.wanted or lead.to is not None:
            raise Violation(f"the run ends on nodes {nodes}, and {world.known} were wanted")

    def _is_last(self, history: History, groups: Groups) -> bool:
        return len(history) >= self.cluster.steps - 1 and all(may for _, may in groups.result)

    # -- what they have of the run

    def _id(self, status: Status) -> int:
        found = self._status_ids.setdefault(status.to_json(), len(self._statuses))
        if found == len(self._statuses):
            self._statuses.append(Status.from_json(status.to_json()))
        return found

    def _status(self, held: Held) -> Status:
        return self._statuses[held.status]

    def _identical(self, size: int) -> dict[int, tuple[int, ...]]:
        return {rank: tuple(range(size)) if self.cluster.replicated else (rank,) for rank in range(size)}

    def _taken(self, groups: Groups, proc: Proc) -> tuple[Held | None, Held] | None:
        """Return what a process has, once it has taken the state that counts; None where that is lost."""
        said: list[tuple[Held | None, Held | None]] = list(groups.result)
        counting = that_count([(a and self._status(a), b and self._status(b)) for a, b in said])
        held = {
            status.rank: next(each for each in both if each is not None and self._status(each) is status)
            for both, status in zip(said, counting, strict=True)
            if status is not None
        }
        if not held:
            return None
        old, size = next((self._status(each).world, each.size) for each in held.values())
        own = counting[proc.rank]
        before = held[own.rank] if own is not None else None
        stays = all(status is None or status.rank == rank for rank, status in enumerate(counting))
        if stays and size == len(counting):
            statuses = [status or Status(rank, world=old) for rank, status in enumerate(counting)]
            resolution = resolve(statuses, self._identical(size))
            if resolution is None:
                return None
            history = self._same([self._by(way, resolution, held) for way in resolution.ways.values()], resolution)
            way, status = resolution.ways[proc.rank], statuses[proc.rank].follow(resolution)
            after = Held(self._id(status), size, history, before.copies if before else ())
            if status.copies.keys() - {rank for rank, _ in after.copies}:
                raise Violation(f"rank {proc.rank} tells of copies {status.copies}, and has {after.copies}")
            return (after if way.kind in ("keep", "forward") else before), after
        found = sources([status for status in counting if status is not None], self._identical(size))
        if found is None:
            return None
        ways = [way for each in found.images.values() for way in each]
        history = self._same([self._by(way, found, held) for way in ways], found)
        if before is not None and own is not None and any(w.kind == "forward" and w.source == own.rank for w in ways):
            rolled = replace(own, version=found.version, pending=None, outcome=found.outcome)
            before = before._replace(status=self._id(rolled), history=history)
        new = Status(proc.rank, found.version, outcome=found.outcome, rewound=found.rewound, world=proc.generation)
        return before, Held(self._id(new), len(counting), history)

    def _by(self, way: Way, found: Resolution | Sources, held: Mapping[int, Held]) -> History:
        """Return the history of the image that a way leads to."""
        source = held.get(way.source)
        if source is None:
            raise Violation(f"{way} is by a rank that has nothing")
        if way.kind in ("copy", "back"):
            return next(h for rank, h in source.copies if rank == way.image and len(h) == found.version)
        if way.kind == "forward" or (way.kind == "live" and len(source.history) < found.version):
            assert found.outcome is not None
            return (*source.history, (found.version, found.outcome.generation))
        return source.history

    def _same(self, histories: list[History], found: Resolution | Sources) -> History:
        if len(set(histories)) > 1 or [step for step, _ in histories[0]] != list(range(1, found.version + 1)):
            raise Violation(f"step {found.version} of two histories: {sorted(set(histories))}")
        return histories[0]

    def _handed(self, groups: Groups, proc: Proc) -> Held:
        """Return what a process has once all have handed over; each rank that leaves has given its image to one."""
        assert proc.known is not None and proc.pause is not None
        leaving = proc.pause
        stay = [rank for rank in range(len(groups.members)) if rank not in leaving]
        held, status = proc.known, self._status(proc.known)
        for n, rank in enumerate(leaving):
            history = groups.result[rank]
            if stay and stay[n % len(stay)] == proc.rank and not self.cluster.replicated:
                status = status.hold(rank, len(history))
                held = held._replace(copies=tuple(sorted({**dict(held.copies), rank: history}.items())))
        return held._replace(status=self._id(status))

    def _go_on(self, world: World, proc: Proc) -> World:
        groups = self._groups(world, proc.generation)
        match proc.at:
            case "status":
                taken = self._taken(groups, proc)
                if taken is None:
                    world = self._put(world, proc._replace(at="lost"))
                    return self._say(world, proc.node, Lost(0.0, proc.life, proc.generation))
                proc = proc._replace(at="confirm", known=taken[0], forming=taken[1])
                return self._give(self._put(world, proc), proc, proc.generation)
            case "confirm":
                assert proc.forming is not None
                event = Recovered(0.0, proc.life, proc.generation, len(proc.forming.history))
                proc = proc._replace(at="train", known=proc.forming, forming=None)
                return self._train(self._say(self._put(world, proc), proc.node, event), proc.life)
            case "train":
                assert proc.known is not None
                status = self._status(proc.known).contribute(proc.generation)
                proc = proc._replace(at="commit", known=proc.known._replace(status=self._id(status)))
                return self._give(self._put(world, proc), proc, (proc.pause, self._may_end(world)))
            case "commit":
                known = proc.known
                assert known is not None
                history, status, last = known.history, self._status(known), self._is_last(known.history, groups)
                # Where the run waits for what is to come, steps are not counted any more.
                if len(history) < self.cluster.steps:
                    numbers = (proc.generation + len(history) / 8,)
                    status = replace(status.commit(proc.generation, numbers), copies={})
                    known = known._replace(history=(*history, (len(history) + 1, proc.generation)), copies=())
                else:
                    status = status.forget()
                proc = proc._replace(known=known._replace(status=self._id(status)))
                proc = proc._replace(at="train")
                leaving = next((each for each, _ in groups.result if each is not None), None)
                if last:
                    return self._put(world, proc._replace(at="ended", inbox=()))
                if leaving is not None:
                    proc = proc._replace(at="hand over", pause=leaving)
                    return self._give(self._put(world, proc), proc, known.history if proc.rank in leaving else None)
                return self._train(self._put(world, proc), proc.life)
            case "hand over":
                world = self._put(world, proc._replace(at="idle", known=self._handed(groups, proc), pause=None))
                return self._say(world, proc.node, Ready(0.0, proc.life, proc.generation))
        raise AssertionError(proc.at)

    def _may_end(self, world: World) -> bool:
        """Return whether no other world is to come, or the run does not wait for that."""
        return self.cluster.ends or self._is_settled(world)

    def _is_settled(self, world: World) -> bool:
        lead = self._leads[world.lead]
        return lead.phase == "going" and lead.to is None and not world.wires and not world.gone

    def _can_go_on(self, world: World, proc: Proc) -> bool:
        groups = self._groups(world, proc.generation)
        if proc.at != "train":
            return groups.given[proc.rank] is None
        assert proc.known is not None
        if len(proc.known.history) < self.cluster.steps or self.cluster.ends:
            return True
        # It trains on, which changes nothing, until there is a pause, or nothing more to wait for.
        met = any(given is not None for given in groups.given)
        return met or proc.pause is not None or (self._may_end(world) and not proc.inbox)

    def _is_broken(self, world: World, generation: int) -> bool:
        """Return whether a process of a generation is gone from it, not by its end or after a pause."""
        members = self._procs(world)
        for life in self._groups(world, generation).members:
            proc = members.get(life)
            if proc is None or proc.at in ("dead", "reaped", "home", "faulted", "lost"):
                return True
            if proc.generation > generation:
                return True
            if proc.generation == generation and proc.at == "idle":
                return True
        return False

    # -- worlds

    def start(self) -> World:
        cluster = self.cluster
        nodes = [node for node, processes in enumerate(cluster.nodes) for _ in range(processes)]
        lead = Generations(dict(enumerate(nodes)), lambda cause, before: "", LIMITS)
        lead.begin(0.0)
        held = [Held(self._id(Status(rank).loaded(0)), len(nodes)) for rank in range(len(nodes))]
        procs = tuple(Proc(rank + 1, node, known=held[rank]) for rank, node in enumerate(nodes))
        script = {("come", n) for n in cluster.comes} | {("leave", n) for n in cluster.leaves}
        script |= {("lose", n) for n in cluster.lost}
        commands: list[Any] = []
        for rank in range(len(nodes)):
            commands += lead.on(Ready(0.0, rank + 1, 0))
        known = Nodes(frozenset(nodes), frozenset())
        world = World(0, known, procs, (), (), frozenset(script), frozenset(), cluster.faults, 0)
        return self._obey(world._replace(lead=self._lead(lead)), commands)

    def moves(self, world: World) -> list[Move]:
        """Return what may happen next."""
        if world.failed:
            return []
        found: list[Move] = []
        lead = self._leads[world.lead]
        for node, wire in world.wires:
            if wire.down and node not in world.gone:
                found.append(("obey", node))
            if wire.up:
                found.append(("hear", node))
        for node in world.gone:
            if not self._wire(world, node).up:
                found.append(("gone", node))
        for proc in world.procs:
            if proc.at in ("dead", "ended"):
                if not (proc.node != LEAD and self.cluster.late):
                    return [("reap", proc.life)]
                found.append(("reap", proc.life))
            if proc.at in LEFT | {"ended"}:
                continue
            if proc.inbox and (proc.at == "idle" or not isinstance(proc.inbox[0], Go)):
                found.append(("read", proc.life))
            if proc.at in WAITING | {"train"}:
                if self._can_go_on(world, proc):
                    found.append(("go on", proc.life))
                elif self._is_broken(world, proc.generation) and not any(isinstance(c, Over) for c in proc.inbox):
                    found.append(("notice", proc.life))
        optional: list[Move] = []
        if lead.phase not in ("done", "failed"):
            for what, node in sorted(world.script):
                if what == "come" or node in world.known.wanted | world.known.leaving:
                    optional.append((what, node))
            if world.faults:
                if "kill" in self.cluster.kinds:
                    optional += [("kill", proc.life) for proc in world.procs if proc.at not in LEFT | {"ended"}]
                due = min((p.deadline for p in lead.processes.values() if p.state != "die"), default=math.inf)
                if "passed" in self.cluster.kinds and due < math.inf:
                    optional.append(("passed", int(due)))
        if found and not optional and self._undisturbed(world):
            return found[:1]
        return found + optional

    def _undisturbed(self, world: World) -> bool:
        generation = self._leads[world.lead].generation
        return not (world.wires or world.gone) and all(
            proc.at in LEFT or (proc.generation == generation and proc.at in WAITING | {"train"} and not proc.inbox)
            for proc in world.procs
        )

    def after(self, world: World, move: Move) -> World:
        world = self._after(world, move)
        lives = self._leads[world.lead].processes
        # Of who is gone for all, and of groups that nobody is in, nothing is left.
        procs = tuple(p for p in world.procs if p.at not in ("reaped", "home") or p.life in lives)
        new = self._leads[world.lead].generation
        used = {p.generation for p in procs if p.at in WAITING | {"train"}} | {new}
        groups = tuple(each for each in world.groups if each.generation in used)
        return world._replace(procs=tuple(sorted(procs)), groups=groups)

    def _after(self, world: World, move: Move) -> World:
        kind, number = move
        if kind == "passed":
            return self._tell(world._replace(faults=world.faults - 1), Passed(float(number)))
        if kind in ("come", "leave", "lose"):
            world = world._replace(script=world.script - {move})
            wanted, leaving = world.known
            if kind == "come":
                return self._change(world, Nodes(wanted | {number}, leaving))
            if kind == "leave":
                return self._change(world, Nodes(wanted - {number}, leaving | {number}))
            for proc in world.procs:
                if proc.node == number and proc.at not in LEFT:
                    world = self._die(world, proc)
                    world = self._put(world, self._procs(world)[proc.life]._replace(at="reaped"))
            wire = self._wire(world, number)
            world = self._set_wire(world, number, wire._replace(down=()))
            script = frozenset(each for each in world.script if each[1] != number)
            return world._replace(gone=world.gone | {number}, script=script)
        if kind == "gone":
            lost_ = frozenset({number})
            wanted, leaving = world.known
            procs = tuple(p for p in world.procs if p.node != number)
            world = self._set_wire(world._replace(gone=world.gone - lost_, procs=procs), number, Wire())
            return self._change(world, Nodes(wanted - lost_, leaving - lost_), lost_)
        if kind == "obey":
            wire = self._wire(world, number)
            world = self._set_wire(world, number, wire._replace(down=wire.down[1:]))
            return self._execute(world, wire.down[0], number)
        if kind == "hear":
            wire = self._wire(world, number)
            world = self._set_wire(world, number, wire._replace(up=wire.up[1:]))
            return self._tell(world, wire.up[0])
        proc = self._procs(world)[number]
        if kind == "kill":
            return self._die(
                world._replace(faults=world.faults - 1, deaths=world.deaths + bool(proc.known or proc.forming)), proc
            )
        if kind == "reap":
            event = Ended(0.0, number) if proc.at == "ended" else Died(0.0, number, -9)
            at = "home" if proc.at == "ended" else "reaped"
            return self._say(self._put(world, proc._replace(at=at)), proc.node, event)
        if kind == "read":
            return self._read(world, proc)
        if kind == "notice":
            world = self._put(world, proc._replace(at="faulted"))
            return self._say(world, proc.node, Faulted(0.0, number, proc.generation))
        return self._go_on(world, proc)

    # -- ends

    def check_end(self, world: World) -> None:
        """Raise Violation if a world without moves is no end of a run."""
        if world.failed:
            return
        lead = self._leads[world.lead]
        if lead.phase != "done":
            raise Violation("stuck: nobody can go on, and nothing has failed")
        if left := [proc.life for proc in world.procs if proc.at not in LEFT]:
            raise Violation(f"the run has ended, and processes {left} are left")
