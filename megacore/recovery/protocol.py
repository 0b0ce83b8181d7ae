"""The protocol that lets a run survive a fault, as data and pure functions: steps, and generations of processes.

**A step is a transaction.** Its commit is the world's all-reduce of the loss and the gradient norm. Whoever has the
result of step s + 1 knows that everybody has contributed to it, so everybody holds the summed gradients of s + 1 or is
past them. After a fault every rank says its :class:`Status`, all compute the same :func:`resolve`, and each goes its
:class:`Way` to one version. A rank's own record is its ``Status``, which is replaced, and never changed:
:meth:`~Status.contribute` before the all-reduce, :meth:`~Status.commit` after the update, :meth:`~Status.hold` and
:meth:`~Status.settle` around copies of images, :meth:`~Status.overwrite` and :meth:`~Status.follow` in a recovery.

**A generation** is one life of the process groups. A fault ends it, and :class:`Generations` says who is told, killed
and started until every place is filled by a process that has left it: only then does the next one begin.

The explorer in ``tests/recovery`` walks through every order of events. No torch, no I/O, no clock: time comes with the
events.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple


class ProtocolError(RuntimeError):
    """The ranks say of themselves what cannot be: a mistake of ours, after which no state may be trusted."""


# -- a step is a transaction


class Commit(NamedTuple):
    """The result of a step's commit: the generation that it was made in, and its numbers (loss, norm, ...).

    A step that is done again in a later generation may differ in its last bits, so gradients go with the numbers of
    their own generation alone.
    """

    generation: int
    numbers: tuple[float, ...]

    def same(self, other: Commit) -> bool:
        """Return whether they are the same bit for bit; a NaN is that here, whichever it is."""
        return self.generation == other.generation and _hex(self.numbers) == _hex(other.numbers)


@dataclass(frozen=True)
class Status:
    """The state and the copies that a rank holds, as it says when a generation begins; a new one: ``Status(rank)``.

    Args:
        rank: The place among all.
        version: The last step that its state is of; None for a process that has just come.
        pending: The generation in which it contributed to the commit of step version + 1 while it still holds the
            summed gradients of that step: told the commit, it can do the step alone. None where it does not.
        outcome: The commit of step ``version``, if it knows it.
        copies: {rank: versions} of the whole images that this process holds for others, and of its own.
        rewound: Whether a recovery has gone back to an older version, and this rank has seen no commit since.
    """

    rank: int
    version: int | None = None
    pending: int | None = None
    outcome: Commit | None = None
    copies: Mapping[int, frozenset[int]] = field(default_factory=dict)
    rewound: bool = False

    # -- the points of a rank's life

    def loaded(self, version: int) -> Status:
        """Return what it holds once its state is that of a checkpoint, or of the start of a run."""
        return Status(self.rank, version)

    def contribute(self, generation: int) -> Status:
        """Return what it holds once all of its gradients are summed, before it takes part in the commit."""
        return replace(self, pending=generation)

    def commit(self, generation: int, numbers: Sequence[float]) -> Status:
        """Return what it holds once the step is updated: who has the result finishes the step, whatever befalls."""
        if self.version is None or self.pending != generation:
            raise ProtocolError(f"rank {self.rank} commits in generation {generation} what it did not contribute to")
        outcome = Commit(generation, tuple(numbers))
        return replace(self, version=self.version + 1, pending=None, outcome=outcome, rewound=False)

    def forget(self) -> Status:
        """Return what it holds once the summed gradients are no more."""
        return replace(self, pending=None)

    def hold(self, rank: int, version: int) -> Status:
        """Return what it holds once a copy of a rank's image is whole. The older ones stay until :meth:`settle`.

        Raises:
            ProtocolError: the copy is newer than this process' own state.
        """
        if self.version is None or version > self.version:
            raise ProtocolError(f"rank {self.rank} at step {self.version} holds a copy of step {version}")
        return replace(self, copies={**self.copies, rank: self.copies.get(rank, frozenset()) | {version}})

    def settle(self, version: int) -> Status:
        """Return what it holds once all ranks have whole copies of this version, and so need no older ones."""
        kept = {rank: frozenset(v for v in versions if v >= version) for rank, versions in self.copies.items()}
        return replace(self, copies={rank: versions for rank, versions in kept.items() if versions})

    def overwrite(self) -> Status:
        """Return what it holds while its state is overwritten by another's (live, copy): nothing but copies."""
        return Status(self.rank, copies=self.copies)

    def follow(self, resolution: Resolution) -> Status:
        """Return what it holds once it has gone its way; copies of what is undone are dropped."""
        version = resolution.version
        kept = {rank: frozenset(v for v in versions if v <= version) for rank, versions in self.copies.items()}
        return Status(
            self.rank,
            version,
            outcome=resolution.outcome,
            copies={rank: versions for rank, versions in kept.items() if versions},
            rewound=resolution.rewound,
        )

    # -- on the wire

    def to_json(self) -> str:
        """Return it as JSON; numbers travel in hexadecimal, exactly."""
        outcome = self.outcome and [self.outcome.generation, _hex(self.outcome.numbers)]
        copies = [[rank, sorted(versions)] for rank, versions in sorted(self.copies.items())]
        return json.dumps([self.rank, self.version, self.pending, outcome, copies, self.rewound])

    @classmethod
    def from_json(cls, text: str) -> Status:
        rank, version, pending, outcome, copies, rewound = json.loads(text)
        commit = outcome and Commit(outcome[0], tuple(map(float.fromhex, outcome[1])))
        return cls(rank, version, pending, commit, {of: frozenset(versions) for of, versions in copies}, rewound)


def _hex(numbers: Sequence[float]) -> list[str]:
    return [number.hex() for number in numbers]


@dataclass(frozen=True)
class Way:
    """The way of a rank to the version of all.

    - keep: its state is that.
    - forward: it updates with the gradients that it holds and the commit of the resolution.
    - back: it restores a copy that it holds itself, of its own image or of one that is identical.
    - live: it takes the image of rank ``source``, which has gone its own way first (keep, forward or back).
    - copy: it takes the copy that rank ``source`` holds of the image of rank ``image``.

    Args:
        kind: One of these.
        source: The rank that it comes from, for back its own.
        image: The rank whose image it is: the rank's own, or one that is identical.
    """

    kind: Literal["keep", "forward", "back", "live", "copy"]
    source: int
    image: int


@dataclass(frozen=True)
class Resolution:
    """The ways of all ranks at the beginning of a generation.

    Args:
        version: The step that all are of afterwards.
        outcome: The commit of that step, where one of them knows it.
        ways: {rank: way} of all.
        rewound: Whether anybody had been further, or a recovery that went back had not been confirmed by a commit.
    """

    version: int
    outcome: Commit | None
    ways: Mapping[int, Way]
    rewound: bool


def resolve(statuses: Collection[Status], replicas: Mapping[int, Collection[int]]) -> Resolution | None:
    """Return how all ranks come to the newest version that all of them can reach; None where state is lost.

    It depends on nothing but what the ranks say, not on their order, so all compute the same.

    Args:
        statuses: One of each rank.
        replicas: {rank: ranks whose image is identical}, with or without the rank itself.

    Raises:
        ProtocolError: the statuses cannot be of one run: a rank twice or missing, states more than a step apart that
            no recovery has taken back, or two results of one commit.
    """
    said = {status.rank: status for status in sorted(statuses, key=lambda status: status.rank)}
    if len(said) != len(statuses) or said.keys() != replicas.keys():
        raise ProtocolError(
            f"statuses of ranks {sorted(s.rank for s in statuses)}, but of all {sorted(replicas)} needed"
        )
    outcomes = _outcomes(said)
    live = {status.version for status in said.values() if status.version is not None}
    apart = {status.version for status in said.values() if status.version is not None and not status.rewound}
    if apart and max(apart) - min(apart) > 1:
        raise ProtocolError(f"ranks are at steps {_versions(said)}: more than one step apart")
    copied = {version for status in said.values() for versions in status.copies.values() for version in versions}
    # A rank's own image first.
    identical = {rank: [rank, *sorted(set(others) - {rank})] for rank, others in replicas.items()}
    for version in sorted(live | copied, reverse=True):
        ways = _ways(version, said, identical, outcomes.get(version))
        if ways is not None:
            rewound = version < max(live, default=version) or any(status.rewound for status in said.values())
            return Resolution(version, outcomes.get(version), ways, rewound)
    return None


def _versions(said: Mapping[int, Status]) -> str:
    return ", ".join(f"{status.version} (rank {rank})" for rank, status in said.items())


def _outcomes(said: Mapping[int, Status]) -> dict[int, Commit]:
    """Return {version: its commit} of those that are known."""
    known: dict[int, Commit] = {}
    for rank, status in said.items():
        if status.version is None or status.outcome is None:
            continue
        first = known.setdefault(status.version, status.outcome)
        if not first.same(status.outcome):
            raise ProtocolError(f"step {status.version} has two outcomes: {first}, and on rank {rank} {status.outcome}")
    return known


def _ways(
    version: int, said: Mapping[int, Status], identical: Mapping[int, Sequence[int]], outcome: Commit | None
) -> dict[int, Way] | None:
    """Return the way of each rank to a version; None where one has none."""
    ways = {rank: way for rank, status in said.items() if (way := _alone(version, status, identical[rank], outcome))}
    own = set(ways)
    gives = dict.fromkeys(said, 0)
    for rank in said:
        if rank in own:
            continue
        live = [Way("live", other, other) for other in identical[rank] if other in own]
        copies = [
            Way("copy", holder, image)
            for image in identical[rank]
            for holder, status in said.items()
            if version in status.copies.get(image, ())
        ]
        if not (live or copies):
            return None
        # Who has given least gives next, so that several newcomers do not wait for one.
        ways[rank] = min(live or copies, key=lambda way: gives[way.source])
        gives[ways[rank].source] += 1
    return ways


def _alone(version: int, status: Status, identical: Sequence[int], outcome: Commit | None) -> Way | None:
    """Return the way to a version that a rank can go without another, if there is one."""
    rank = status.rank
    if status.version == version:
        return Way("keep", rank, rank)
    if status.version == version - 1 and outcome is not None and status.pending == outcome.generation:
        return Way("forward", rank, rank)
    for image in identical:
        if version in status.copies.get(image, ()):
            return Way("back", rank, image)
    return None


# -- generations: what the agent hears


@dataclass(frozen=True)
class FromRank:
    """A message of a rank, or of its agent about it.

    Args:
        at: The time of the agent's clock in seconds.
        rank: The place among all.
        life: The number of the process in this place, as :class:`Spawn` gave it: what an earlier one has
            sent is ignored.
    """

    at: float
    rank: int
    life: int


@dataclass(frozen=True)
class Died(FromRank):
    """The process is gone, and not by the end of the run; ``status`` is its exit status, negative for a signal."""

    status: int


@dataclass(frozen=True)
class Faulted(FromRank):
    """A collective of this generation has failed."""

    generation: int


@dataclass(frozen=True)
class Ready(FromRank):
    """The process has left this generation, its last (0: it has been in none), and can join another.

    No thread of it waits in that generation or writes for it any more: neither a copy of an image nor a checkpoint.
    """

    generation: int


@dataclass(frozen=True)
class Recovered(FromRank):
    """The process has the state that was agreed upon in this generation, that of ``step``."""

    generation: int
    step: int


@dataclass(frozen=True)
class Lost(FromRank):
    """:func:`resolve` has found no version in this generation: the run is to begin again from its files."""

    generation: int


@dataclass(frozen=True)
class Ended(FromRank):
    """The process has done all of the run, and is gone."""


@dataclass(frozen=True)
class Passed:
    """The time is ``at``: a deadline may have passed."""

    at: float


Heard = Died | Faulted | Ready | Recovered | Lost | Ended | Passed


# -- and what it does


@dataclass(frozen=True)
class Over:
    """Tell a rank that this generation is over: it leaves it, and says when it has (:class:`Ready`)."""

    rank: int
    generation: int


@dataclass(frozen=True)
class Kill:
    """Kill a process; the agent says when it is gone (:class:`Died`)."""

    rank: int


@dataclass(frozen=True)
class Spawn:
    """Fill a place of this node by a process, a standby where there is one; its messages carry ``life``."""

    rank: int
    life: int
    node: int


@dataclass(frozen=True)
class Go:
    """Tell a rank to join this generation; all ranks are told at once."""

    rank: int
    generation: int


@dataclass(frozen=True)
class Fail:
    """Give up: all processes are to be killed (by :class:`Kill`, before this), and the reason stands here."""

    reason: str


Command = Over | Kill | Spawn | Go | Fail


@dataclass(frozen=True)
class Cause:
    """Why a generation has ended: a process died, a collective failed, or a process was late and is to be killed.

    Args:
        kind: One of these.
        at: The time in seconds.
        rank, node: The process that it is about.
        generation: The generation that it ended; where it was over already, that one.
        status: The exit status of who died, else 0.
        during: The work that the process was at: to start, to leave the last generation, to recover, or to train.
    """

    kind: Literal["died", "faulted", "late"]
    at: float
    rank: int
    node: int
    generation: int
    status: int
    during: Literal["start", "leave", "recover", "train"]


Judge = Callable[[Cause, Sequence[Cause]], str]
"""(cause, those before it) -> "" to recover in place, or why this is to end. It is asked of each cause but failed
collectives, which others bring about; where nothing else has happened, of the first of them."""


@dataclass(frozen=True)
class Limits:
    """Seconds that a process has for what it is to do.

    Args:
        start: Time from :class:`Spawn` to its :class:`Ready`.
        leave: Time from :class:`Over` to its :class:`Ready`.
        recover: Time from :class:`Go` to its :class:`Recovered`.
        die: Time from :class:`Kill` to its :class:`Died`.
    """

    start: float = 60.0
    leave: float = 10.0
    recover: float = 120.0
    die: float = 10.0


State = Literal["start", "ready", "recover", "train", "leave", "die", "gone", "ended"]
_DOING: Mapping[State, Literal["start", "leave", "recover", "train"]] = {
    "start": "start",
    "ready": "leave",
    "leave": "leave",
    "recover": "recover",
    "train": "train",
}


@dataclass(frozen=True)
class Place:
    """The place of a rank.

    Args:
        node: The node that its process runs on.
        life: The number of that process; 0 where there was none yet.
        state: The process is to start, has left its generation, is to recover, trains, is to leave, is to die, is gone
            before its time, or has ended well.
        generation: The last one that the process was told to join, 0 for none.
        deadline: The time by which its state must change.
    """

    node: int
    life: int = 0
    state: State = "gone"
    generation: int = 0
    deadline: float = math.inf


class Generations:
    """Decides who is told, killed and started, so that one generation at a time lives, and the run ends or goes on.

    One for all nodes: where several agents share it, their events are brought to it, and its commands to them. What
    happens at the end of a run, when a rank has ended well already, is not mended in place: a restart finds what it has
    saved.

    Args:
        nodes: {rank: node} of all.
        judge: Says whether to recover.
        limits: Deadlines of the processes.
    """

    def __init__(self, nodes: Mapping[int, int], judge: Judge, limits: Limits) -> None:
        self.places = {rank: Place(node) for rank, node in sorted(nodes.items())}
        self.judge, self.limits = judge, limits
        self.generation = 0
        self.phase: Literal["over", "going", "done", "failed"] = "over"
        self.step: int | None = None
        """The step from which this generation goes on, once a rank has said so."""
        self.causes: tuple[Cause, ...] = ()
        self._earlier = 0
        """The number of them that were before this generation began."""
        self._refusal = ""

    @property
    def deadline(self) -> float:
        """The time at which :class:`Passed` is to be heard, if nothing else is."""
        return min(place.deadline for place in self.places.values())

    @property
    def trains(self) -> bool:
        """Whether all have recovered, and nobody has ended."""
        return all(place.state == "train" for place in self.places.values())

    def begin(self, at: float) -> list[Command]:
        """Return the commands that fill all places for the first time."""
        return self._act(at)

    def on(self, event: Heard) -> list[Command]:
        """Return what to do, in this order."""
        if self.phase in ("done", "failed"):
            return []
        kills = self._late(event.at) if isinstance(event, Passed) else self._hear(event)
        return [*kills, *self._act(event.at)]

    # -- what has happened

    def _hear(self, event: FromRank) -> list[Command]:
        rank, place = event.rank, self.places[event.rank]
        if event.life != place.life or place.state in ("gone", "ended"):
            return []
        match event:
            case Died():
                if place.state != "die":
                    self._blame("died", event.at, rank, event.status)
                self._put(rank, "gone")
            case Ended():
                self._put(rank, "ended")
            case Lost(generation=place.generation):  # heeded when it is over too: the next one would find the same
                return self._fail("state is lost: no step that all ranks can come to is held in memory any more")
            case Faulted(generation=generation) if self._is_in(place, generation):
                self._blame("faulted", event.at, rank)
            case Ready(generation=place.generation) if place.state not in ("ready", "die"):
                if self._is_in(place, event.generation):
                    self._blame("faulted", event.at, rank)
                self._put(rank, "ready")
            case Recovered(generation=place.generation) if place.state == "recover":
                if event.step != (self.step if self.step is not None else event.step):
                    return self._fail(f"rank {rank} has recovered to step {event.step}, others to step {self.step}")
                self.step = event.step
                self._put(rank, "train")
        return []

    def _late(self, at: float) -> list[Command]:
        """Return whom to kill. Who is late in a recovery may wait for another, so there only the generation is over."""
        kills: list[Command] = []
        for rank, place in self.places.items():
            if place.deadline > at:
                continue
            if place.state == "die":
                return self._fail(f"rank {rank} (node {place.node}) could not be killed within {self.limits.die:g} s")
            self._blame("late", at, rank)
            if place.state != "recover":
                self._put(rank, "die", at + self.limits.die)
                kills.append(Kill(rank))
        return kills

    def _is_in(self, place: Place, generation: int) -> bool:
        return place.generation == generation and place.state in ("recover", "train")

    def _blame(self, kind: Literal["died", "faulted", "late"], at: float, rank: int, status: int = 0) -> None:
        place = self.places[rank]
        cause = Cause(kind, at, rank, place.node, self.generation, status, _DOING[place.state])
        if kind != "faulted" and not self._refusal:
            self._refusal = self.judge(cause, self.causes)
        self.causes += (cause,)

    def _put(self, rank: int, state: State, deadline: float = math.inf) -> None:
        self.places[rank] = replace(self.places[rank], state=state, deadline=deadline)

    # -- what follows from how all places are

    def _act(self, at: float) -> list[Command]:
        if self.phase == "failed":
            return []
        if self._refusal:
            return self._fail(self._refusal)
        new = self.causes[self._earlier :]
        if new and self.phase == "going":
            self.phase = "over"
        if self.phase == "going":
            if all(place.state == "ended" for place in self.places.values()):
                self.phase = "done"
            return []
        if ended := self._in("ended"):
            return self._fail(f"rank {ended[0]} has ended well, and the others have not: a restart finds what is saved")
        commands: list[Command] = []
        for rank in self._in("recover", "train"):
            self._put(rank, "leave", at + self.limits.leave)
            commands.append(Over(rank, self.generation))
        for rank in self._in("gone"):
            place = self.places[rank]
            self.places[rank] = Place(place.node, place.life + 1, "start", 0, at + self.limits.start)
            commands.append(Spawn(rank, place.life + 1, place.node))
        if len(self._in("ready")) < len(self.places):
            return commands
        if new and all(cause.kind == "faulted" for cause in new) and (refusal := self.judge(new[0], self.causes[:-1])):
            return self._fail(refusal)
        return self._go(at)

    def _in(self, *states: State) -> list[int]:
        return [rank for rank, place in self.places.items() if place.state in states]

    def _go(self, at: float) -> list[Command]:
        self.generation, self.phase, self.step = self.generation + 1, "going", None
        self._earlier = len(self.causes)
        for rank, place in self.places.items():
            self.places[rank] = Place(place.node, place.life, "recover", self.generation, at + self.limits.recover)
        return [Go(rank, self.generation) for rank in self.places]

    def _fail(self, reason: str) -> list[Command]:
        self.phase = "failed"
        kills = [Kill(rank) for rank in self.places if rank not in self._in("gone", "ended", "die")]
        return [*kills, Fail(reason)]
