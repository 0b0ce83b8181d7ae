"""The agent that leads: it hears of the processes of all nodes, and has those that died replaced. No torch.

One machine is a run of one node. Over several, the agents of the others (:mod:`megacore.recovery.follow`) bring it what
befalls their processes, and do what it orders::

    lead -> node    spawn, over, pause, go, kill, dismiss    about one process (:mod:`megacore.recovery.protocol`)
                    stand_by    have a process in reserve
                    send        send all processes a signal
                    begin       kill all processes, and take these arguments for those that come
                    end         the run has ended, with this status
    node -> lead    said        a process has said something to its agent
                    exit        a process has ended
                    signal      a signal has asked for the end
"""

from __future__ import annotations

import json
import select
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megacore import exits
from megacore.rank import STORE
from megacore.recovery.channel import OVERRIDES
from megacore.recovery.ends import Exit
from megacore.recovery.events import Event, Kind
from megacore.recovery.generations import (
    Cause,
    Command,
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
from megacore.recovery.members import Members
from megacore.recovery.news import Came, Gone, News, Said
from megacore.recovery.policy import Decision
from megacore.recovery.ranks import Ranks, Readable, tell
from megacore.recovery.worlds import places

LIMITS = Limits(start=600.0, leave=60.0, recover=3600.0, die=60.0)
"""The time that a process has: to import from a slow disk, to end a read, to load a checkpoint."""
REAP_S = 0.05
"""The time between the end of a connection and that of the process whose it was."""


class Recovery(Protocol):
    """The answers to faults while ranks live."""

    def answer(self, event: Event) -> Decision:
        """Return what is done about an event; all but a few of its actions end all ranks."""
        ...

    def went_on(self, step: int | None) -> None:
        """Note that all ranks go on after a step, or that none of them had stopped."""
        ...


@dataclass(kw_only=True)
class Lead(Ranks):
    """The ranks of all nodes, watched by the agent of node 0.

    Args:
        name: The name of this launch, which no other launch of the run has.
        recovery: Says which faults are recovered from.
        nodes: {node: its processes}.
        members: The nodes; None where this is the only one.
        layouts: {number of nodes: the overrides of the recipe on them}, where it may change.
    """

    name: str
    recovery: Recovery
    nodes: dict[int, int]
    members: Members | None = None
    layouts: Mapping[int, Sequence[str]] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)
    """{life: node} of the processes that have not ended."""
    ranks: dict[int, int] = field(default_factory=dict)
    """{life: the rank that it has, or is to have}."""
    deaths: dict[int, Exit] = field(default_factory=dict)
    """{life: its end} of those that have died."""
    begun: bool = False
    """Whether all have trained: from then on there is state to lose."""
    noticed: float = 0.0
    """The time when the fault that is being recovered from was noticed; 0 where none is."""
    failure: str = ""
    """Why the run could not go on, where that is so."""

    def __post_init__(self) -> None:
        places = (node for node, processes in self.nodes.items() for _ in range(processes))
        self.generations = Generations(dict(enumerate(places)), self._judge, LIMITS)
        self._stood_by = 0
        """The generation in which processes were last put in reserve."""
        self._unread = deque[News]()
        self._lost = set[int]()
        """The nodes that are gone, or that are left out, since the world was last changed."""
        self._moved = False
        """Whether nodes have come, or want to leave, since then."""
        self._leaving = dict[int, int]()
        """{node: the signal for which it leaves}."""

    def begin(self) -> None:
        """Start all ranks."""
        for node in self.nodes:
            self.order(node, "begin", launch=self.name, arguments=self.children.arguments)
        self._do(self.generations.begin(time.monotonic()))

    # -- what is ordered

    def order(self, node: int, what: str, **more: Any) -> None:
        """Have the agent of a node do something; here that is done by whoever calls this."""
        if self.members is not None and node > 0:
            self.members.say(node, what, **more)

    def send(self, number: int) -> None:
        super().send(number)
        for node in self.nodes:
            self.order(node, "send", number=number)

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Spawn(life=life, node=node):
                    rank = self.generations.processes[life].rank
                    self.homes[life], self.ranks[life] = node, rank
                    late = self.generations.generation > 0 or life not in self.generations.world.values()
                    self._tell(life, "spawn", rank=rank, variables=self._variables(life), late=late or self.signalled)
                    if self.signalled:  # nobody else may be left who was asked to end
                        self.send(signal.SIGTERM)
                case Pause(life=life, generation=generation, leaving=leaving):
                    self._tell(life, "pause", generation=generation, leaving=leaving)
                case Dismiss(life=life):
                    self._tell(life, "dismiss")
                    self.homes.pop(life, None)
                case Over(life=life, generation=generation):
                    self.noticed = self.noticed or time.monotonic()
                    self._tell(life, "over", generation=generation)
                case Kill(life=life):
                    self._tell(life, "kill")
                case Go(life=life, rank=rank, generation=generation):
                    self.ranks[life] = rank
                    variables = {**self._variables(life), **self._meeting(generation)}
                    self._tell(life, "go", rank=rank, generation=generation, variables=variables, begun=self.begun)
                case Fail(reason):
                    self.failure = reason

    def _tell(self, life: int, what: str, **more: Any) -> None:
        """Have the agent of a process do something with it."""
        node = self.homes.get(life)
        if node == 0:
            self.children.do(what, life, more)
        elif node is not None:
            self.order(node, what, life=life, more=more)

    def _variables(self, life: int) -> Mapping[str, str]:
        """Return the variables of a process in the world that it is in, or is to be in, as torchrun would make them."""
        generations = self.generations
        world = generations.world if life in generations.world.values() else generations.to or {}
        nodes = {rank: generations.processes[other].node for rank, other in sorted(world.items())}
        rank = next(rank for rank, other in world.items() if other == life)
        here = [other for other, node in nodes.items() if node == nodes[rank]]
        own = {"RANK": rank, "LOCAL_RANK": here.index(rank), "WORLD_SIZE": len(world), "LOCAL_WORLD_SIZE": len(here)}
        overrides = json.dumps(self.layouts.get(len(set(nodes.values())), ()))
        return {name: str(number) for name, number in own.items()} | {OVERRIDES: overrides}

    def _meeting(self, generation: int) -> Mapping[str, str]:
        """Return the variables that say where the ranks of a generation find each other."""
        if self.members is None:
            return {STORE: str(self.children.folder / f"store-{generation}")}
        host, port = self.members.store
        return {STORE: f"tcp://{host}:{port}/{self.name}-{generation}"}

    # -- what is heard

    @property
    def running(self) -> Mapping[int, int]:
        return {life: self.ranks[life] for life in self.homes}

    def goes_on(self) -> bool:
        return bool(self.homes) and not self.failure

    @property
    def deadline(self) -> float:
        return self.generations.deadline

    def speakers(self) -> list[Readable]:
        return [*super().speakers(), *([self.members] if self.members else [])]

    def hear(self, there: Sequence[int | Readable]) -> None:
        super().hear(there)
        if self.members is not None:
            self._unread += self.members.news()
            for news in self._unread:  # a spare steps in as another node goes
                if isinstance(news, Came):
                    self.came(news)
            while self._unread:
                self._take(self._unread.popleft())
        if time.monotonic() >= self.generations.deadline:
            self._do(self.generations.on(Passed(time.monotonic())))
        if self._lost:  # before: those that are left do not train any more
            self._change()
        if self.generations.trains:
            self._trains()
        if self._moved:
            self._change()
        for node in set(self._leaving) - set(self.homes.values()):
            self._let_go(node)

    def _take(self, news: News) -> None:
        """Take what is new of another node."""
        match news:
            case Gone(node, reason):
                self.gone(node, reason)
            case Said(node, {"what": "event", "event": event}):
                self.recovery.answer(Event(**{**event, "node": node}))
            case Said(node, {"launch": launch, "what": what, **more}) if launch == self.name:
                if what == "said":
                    self.said(more["life"], more["message"])
                elif what == "exit":
                    self.note(Exit(**more["exit"]))
                elif what == "signal":
                    self.asked(node, more["number"])

    # -- nodes come and go

    def came(self, node: Came) -> None:
        """Take a node in."""
        if node.node in self.nodes:
            return
        self.nodes[node.node] = node.processes
        self.order(node.node, "begin", launch=self.name, arguments=self.children.arguments)
        self.recovery.answer(Event("node_joins", None, node.node, detail=node.name, at=time.time()))
        self._moved = True

    def gone(self, node: int, reason: str) -> None:
        """Take note that a node is gone, with all of its processes."""
        if node in self.nodes:
            decision = self.recovery.answer(Event("agent_lost", None, node, detail=reason, at=time.time()))
            if decision.action != "evict":
                self.failure = decision.reason
            self._leave_out(node)
        elif self._leaving.pop(node, None) is not None:
            self._leave_out(node)

    def asked(self, node: int, number: int) -> None:
        """Take note that a signal has asked a node to end, or nobody but a file (0): it leaves, or all end, where the
        run needs it."""
        if self.signalled or node not in self.nodes:
            return
        detail = signal.Signals(number).name if number else "drained"
        event = Event("node_leaves", None, node, detail=detail, at=time.time())
        if self.layouts and self.recovery.answer(event).action == "evict":
            del self.nodes[node]
            self._leaving[node], self._moved = number, True
        else:
            self.end_by(number or signal.SIGTERM)

    def _let_go(self, node: int) -> None:
        """Let a node end that wanted to leave."""
        number = self._leaving.pop(node)
        self.order(node, "end", status=exits.of_signal(number) if number else exits.DONE)

    def _leave_out(self, node: int) -> None:
        """Go on without a node, whose processes are gone or do not matter any more."""
        self.nodes.pop(node, None)
        self.noticed = self.noticed or time.monotonic()
        self._lost.add(node)

    def _change(self) -> None:
        """Have the processes of all nodes that there are take part, and no others.

        Where nodes are lost, nobody is new: all would wait for it. Those that have come follow once all train again.
        """
        generations, nodes, lost = self.generations, self.nodes, self._lost
        self._lost, self._moved = set(), False
        self.homes = {life: node for life, node in self.homes.items() if node not in lost}
        if self.failure:
            return
        processes, world = generations.processes, list(generations.world.values())
        if lost:
            old = {processes[life].node for life in world}
            kept = {node: count for node, count in nodes.items() if node in old}
            nodes = kept if len(kept) in self.layouts else nodes
        there = [(processes[life].node, life) for life in dict.fromkeys([*world, *(generations.to or {}).values()])]
        self._do(generations.change(places(nodes, there), time.monotonic(), lost))

    def said(self, life: int, message: Mapping[str, Any]) -> None:
        """Take what a process says."""
        if life not in self.homes:
            return
        generations, generation = self.generations, message["generation"]
        match message["what"]:
            case "fault":
                self._reap_soon()
                if generations.trains and generation == generations.generation:
                    tell(f"Rank {self.ranks[life]} has lost contact to another rank: {message['error']}")
                event: Heard = Faulted(time.monotonic(), life, generation)
            case "ready":
                event = Ready(time.monotonic(), life, generation)
            case "recovered":
                event = Recovered(time.monotonic(), life, generation, message["step"])
            case "lost":
                tell(f"Rank {self.ranks[life]}: {message['reason']}")
                event = Lost(time.monotonic(), life, generation)
            case _:
                return
        self._do(generations.on(event))

    def note(self, end: Exit) -> None:
        if self.homes.pop(end.life, None) is None:
            return
        self.seen = self.seen or (time.time() if end.status else 0.0)
        if not end.status or not end.may_be_replaced:
            self.ended[end.life] = end
        if not end.status:
            self._do(self.generations.on(Ended(time.monotonic(), end.life)))
        elif end.may_be_replaced:
            tell(end.why)
            self.deaths[end.life] = end
            self._do(self.generations.on(Died(time.monotonic(), end.life, end.status)))

    def _reap_soon(self) -> None:
        """Hear of who has just died: the connections of a process end a moment before it does."""
        until, known = time.monotonic() + REAP_S, len(self.deaths)
        while len(self.deaths) == known and time.monotonic() < until:
            self.reap()
            select.select([self.members] if self.members else [], [], [], REAP_S / 10)
            for news in self.members.news() if self.members else ():
                if isinstance(news, Said) and news.message["what"] == "exit":
                    self._take(news)
                else:
                    self._unread.append(news)
                if isinstance(news, Gone):
                    return

    def _trains(self) -> None:
        """Take note that all ranks train."""
        begun, self.begun = self.begun, True
        noticed, self.noticed = self.noticed, 0.0
        anew, step = self._stood_by < self.generations.generation, self.generations.step or 0
        if noticed and anew:
            seconds = time.monotonic() - noticed
            tell(f"All ranks go on after step {step}, {seconds:.2f} s after the fault was noticed.")
        if begun and anew:
            self.recovery.went_on(step)
        elif noticed:
            self.recovery.went_on(None)
        if anew:
            self._stood_by = self.generations.generation
            here = {process.node for process in self.generations.places.values()}
            self._moved = self._moved or here != set(self.nodes)
            for node, process in {each.node: each for each in self.generations.places.values()}.items():
                if node == 0:
                    self.children.stand_by(self._variables(process.life))
                else:
                    self.order(node, "stand_by", variables=self._variables(process.life))

    def _judge(self, cause: Cause, earlier: Sequence[Cause]) -> str:
        """Return why a fault ends all; nothing where it is recovered from."""
        kind: Kind = "hung" if cause.kind == "late" else "lost_contact"
        rank: int | None = cause.rank
        detail = f"during {cause.during}"
        if cause.kind == "died":
            kind, rank, detail = self.deaths[cause.life].fault
        # What follows from a fault, or befalls while it is mended, does not tell against the step once more.
        phase = None if cause.during == "train" else "recover"
        event = Event(kind, rank, cause.node, phase=phase, detail=detail, at=time.time())
        decision = self.recovery.answer(event)
        if decision.action == "evict" and cause.node in self.nodes:
            self.order(cause.node, "end", status=exits.EVICT)
            self._leave_out(cause.node)
        return "" if decision.action in ("rebuild", "replace", "evict") else decision.reason

    def status(self) -> int:
        for node in list(self._leaving):
            self._let_go(node)
        if self.failure:
            self.fault = "lost_contact", None, self.failure
            return exits.RETRY
        return super().status()
