"""A step is a transaction: what ranks agree on after a fault, as data and pure functions.

The commit of a step is the world's all-reduce of the loss and the gradient norm. Whoever has the result of step s + 1
knows that everybody has contributed to it, so everybody holds the summed gradients of s + 1 or is past them. After a
fault every rank says its :class:`Status`, all compute the same :func:`resolve`, and each goes its :class:`Way` to one
version. A rank's own record is its ``Status``, which is replaced, and never changed: :meth:`~Status.contribute` before
the all-reduce, :meth:`~Status.commit` after the update, :meth:`~Status.hold` and :meth:`~Status.settle` around copies
of images, :meth:`~Status.overwrite` and :meth:`~Status.follow` in a recovery.

The explorer in ``tests/recovery`` walks through every order of events. No torch, no I/O, no clock.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
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
        world: The generation that formed the world that its rank and the ranks of its copies are of.
    """

    rank: int
    version: int | None = None
    pending: int | None = None
    outcome: Commit | None = None
    copies: Mapping[int, frozenset[int]] = field(default_factory=dict)
    rewound: bool = False
    world: int = 0

    # -- the points of a rank's life

    def loaded(self, version: int) -> Status:
        """Return what it holds once its state is that of a checkpoint, or of the start of a run."""
        return Status(self.rank, version, world=self.world)

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
        return Status(self.rank, copies=self.copies, world=self.world)

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
            world=self.world,
        )

    # -- on the wire

    def to_json(self) -> str:
        """Return it as JSON; numbers travel in hexadecimal, exactly."""
        outcome = self.outcome and [self.outcome.generation, _hex(self.outcome.numbers)]
        copies = [[rank, sorted(versions)] for rank, versions in sorted(self.copies.items())]
        return json.dumps([self.rank, self.version, self.pending, outcome, copies, self.rewound, self.world])

    @classmethod
    def from_json(cls, text: str) -> Status:
        rank, version, pending, outcome, copies, rewound, world = json.loads(text)
        commit = outcome and Commit(outcome[0], tuple(map(float.fromhex, outcome[1])))
        return cls(rank, version, pending, commit, {of: frozenset(each) for of, each in copies}, rewound, world)


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
    # A rank's own image first.
    identical = {rank: [rank, *sorted(set(others) - {rank})] for rank, others in replicas.items()}
    for version, outcome, rewound in _versions(said):
        ways = _ways(version, said, identical, outcome)
        if ways is not None:
            return Resolution(version, outcome, ways, rewound)
    return None


def _versions(said: Mapping[int, Status]) -> Iterator[tuple[int, Commit | None, bool]]:
    """Yield the versions that anybody has something of, the newest first: with its commit, if that is known, and
    whether to be there is to have gone back.

    Raises:
        ProtocolError: the statuses cannot be of one run.
    """
    outcomes = _outcomes(said)
    live = {rank: status.version for rank, status in said.items() if status.version is not None}
    apart = [version for rank, version in live.items() if not said[rank].rewound]
    if apart and max(apart) - min(apart) > 1:
        at = ", ".join(f"{status.version} (rank {rank})" for rank, status in said.items())
        raise ProtocolError(f"ranks are at steps {at}: more than one step apart")
    copied = {version for status in said.values() for versions in status.copies.values() for version in versions}
    rewound = any(status.rewound for status in said.values())
    for version in sorted(copied | set(live.values()), reverse=True):
        yield version, outcomes.get(version), rewound or version < max(live.values(), default=version)


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


# -- a world is changed


@dataclass(frozen=True)
class Sources:
    """The places from which the state of a world is taken that is no more, into another one.

    Args:
        version: The step that it is of.
        outcome: The commit of that step, where a rank knows it.
        images: {first of the ranks whose image is identical: all ways to it}; each is a rank that has it (keep), has it
            once it has updated (forward), or holds a copy (copy).
        rewound: Whether to be there is to have gone back, see :class:`Resolution`.
    """

    version: int
    outcome: Commit | None
    images: Mapping[int, tuple[Way, ...]]
    rewound: bool


def that_count(said: Sequence[tuple[Status | None, Status | None]]) -> list[Status | None]:
    """Return what each process has of the world that counts: the newest that anybody knows all to have been in.

    A process keeps its state of a world while another one is formed, until a barrier has told it that all have theirs:
    where one has passed it, each of the others has its state of the new world, whether it knows that or not.

    Args:
        said: The status of each process in the world that it knows all to have been in, and in a newer one that is
            formed; None where it has none.

    Raises:
        ProtocolError: processes are at one place of the same world.
    """
    newest = max((known.world for known, _ in said if known is not None), default=None)
    counting = [next((each for each in both if each is not None and each.world == newest), None) for both in said]
    ranks = [status.rank for status in counting if status is not None]
    if len(set(ranks)) < len(ranks):
        raise ProtocolError(f"processes say that they are ranks {sorted(ranks)} of one world")
    return counting


def sources(statuses: Collection[Status], replicas: Mapping[int, Collection[int]]) -> Sources | None:
    """Return the newest version of which every image is in some memory, and where; None where state is lost.

    Unlike in :func:`resolve` nobody has to come there by itself: all get their state anew.

    Args:
        statuses: Those of the ranks of a world that are left.
        replicas: {rank: ranks whose image is identical} of all of that world, with or without the rank itself.

    Raises:
        ProtocolError: the statuses cannot be of one run.
    """
    said = {status.rank: status for status in sorted(statuses, key=lambda status: status.rank)}
    if len(said) != len(statuses) or not said.keys() <= replicas.keys():
        raise ProtocolError(f"statuses of ranks {sorted(s.rank for s in statuses)}, and there are {sorted(replicas)}")
    alike = sorted({tuple(sorted({rank, *others})) for rank, others in replicas.items()})
    for version, outcome, rewound in _versions(said):
        images = {ranks[0]: tuple(_sources(version, said, ranks, outcome)) for ranks in alike}
        if all(images.values()):
            return Sources(version, outcome, images, rewound)
    return None


def _sources(
    version: int, said: Mapping[int, Status], identical: Sequence[int], outcome: Commit | None
) -> Iterator[Way]:
    """Yield the ways to the image of some ranks: of those that live first."""
    for rank in identical:
        way = _alone(version, said[rank], (), outcome) if rank in said else None
        if way is not None:
            yield way
    for image in identical:
        for holder, status in said.items():
            if version in status.copies.get(image, ()):
                yield Way("copy", holder, image)
