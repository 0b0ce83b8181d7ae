"""What the ranks agree on after a fault, and what the agent does until they can."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from explorer import Explorer, Setting, Violation, Walked, explore, seed, walk
from hypothesis import given
from hypothesis import strategies as st

from megacore.recovery import protocol
from megacore.recovery.generations import (
    Cause,
    Died,
    Dismiss,
    Ended,
    Fail,
    Faulted,
    Generations,
    Go,
    Kill,
    Limits,
    Over,
    Passed,
    Pause,
    Ready,
    Recovered,
    Spawn,
)
from megacore.recovery.protocol import Commit, ProtocolError, Resolution, Status, Way, resolve, sources, that_count

DP2 = {0: (0, 1), 1: (0, 1)}
ALONE = {0: (0,), 1: (1,)}


def ways(resolution: Resolution | None) -> list[Way]:
    assert resolution is not None
    return list(resolution.ways.values())


@pytest.mark.quick
def test_who_has_the_commit_lets_the_others_roll_forward() -> None:
    contributed = [Status(rank, 4).contribute(1) for rank in (0, 1)]
    statuses = [contributed[0], contributed[1].commit(1, [2.5, math.nan])]
    found = resolve(statuses, ALONE)
    assert ways(found) == [Way("forward", 0, 0), Way("keep", 1, 1)]
    assert found == resolve(statuses[::-1], ALONE) and found is not None and found.version == 5
    assert ways(resolve(contributed, ALONE)) == [Way("keep", 0, 0), Way("keep", 1, 1)]


def test_a_status_travels_exactly() -> None:
    status = Status(3, 6, copies={1: frozenset({4, 6}), 3: frozenset({4})}).contribute(2)
    status = status.commit(2, [0.1, math.nan, math.inf, -0.0])
    back = Status.from_json(status.to_json())
    assert repr(back) == repr(status)


@pytest.mark.quick
def test_a_dead_rank_is_replaced_before_the_next_generation() -> None:
    agent = Generations({0: 0, 1: 0}, lambda cause, before: "", Limits())
    assert agent.begin(0) == [Spawn(1, 0), Spawn(2, 0)]
    assert agent.on(Ready(1, 1, 0)) == []
    assert agent.on(Ready(1, 2, 0)) == [Go(1, 0, 1), Go(2, 1, 1)]
    assert agent.on(Recovered(2, 1, 1, 0)) + agent.on(Recovered(2, 2, 1, 0)) == [] and agent.trains
    assert agent.on(Died(3, 2, -9)) == [Spawn(3, 0), Over(1, 1)]
    assert agent.on(Faulted(3, 1, 1)) == agent.on(Ready(3, 2, 0)) == agent.on(Ready(4, 1, 1)) == []
    assert agent.on(Ready(4, 3, 0)) == [Go(1, 0, 2), Go(3, 1, 2)]


def test_a_newcomer_takes_a_live_image_else_all_go_back_to_their_copies() -> None:
    held = {0: frozenset({2}), 1: frozenset({2})}
    old = Status(0, 4, copies=held)
    assert ways(resolve([old, Status(1)], DP2)) == [Way("keep", 0, 0), Way("live", 0, 0)]
    back = resolve([old, Status(1)], ALONE)
    assert (
        ways(back) == [Way("back", 0, 0), Way("copy", 0, 1)]
        and back is not None
        and (back.version, back.rewound) == (2, True)
    )
    assert resolve([Status(0, 4), Status(1)], ALONE) is None
    # Rank 0 has gone back when another fault comes, and rank 1 has not.
    after = old.follow(back)
    found = resolve([after, Status(1, 4, copies=held)], ALONE)
    assert ways(found) == [Way("keep", 0, 0), Way("back", 1, 1)]


@pytest.mark.parametrize(
    "statuses, says",
    [
        ([Status(0, 4), Status(1, 2)], "4 .rank 0., 2 .rank 1.: more than one step apart"),
        ([Status(0, 4), Status(0, 4)], "statuses of ranks .0, 0., but of all .0, 1. needed"),
        ([Status(rank, 4, outcome=Commit(1, (rank / 2,))) for rank in (0, 1)], "step 4 has two outcomes"),
    ],
)
def test_statuses_that_cannot_be_are_refused(statuses: list[Status], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        resolve(statuses, ALONE)


def test_the_judge_is_asked_of_causes_and_its_word_ends_all() -> None:
    asked: list[Cause] = []

    def judge(cause: Cause, before: Sequence[Cause]) -> str:
        asked.append(cause)
        return "enough" if len(before) == 2 else ""

    agent = Generations({0: 0, 1: 1}, judge, Limits(leave=5, die=7))
    agent.begin(0)
    for life in (1, 2):
        agent.on(Ready(0, life, 0))
    for life in (1, 2):
        agent.on(Faulted(1, life, 1))
    for life in (1, 2):
        agent.on(Ready(2, life, 1))
    assert agent.generation == 2 and [(cause.kind, cause.rank, cause.during) for cause in asked] == [
        ("faulted", 0, "recover")
    ]
    assert agent.on(Died(3, 2, -9)) == [Spawn(3, 1), Over(1, 2)] and agent.deadline == 8
    assert agent.on(Passed(8)) == [Kill(1), Kill(3), Fail("enough")] and agent.phase == "failed"
    assert [(cause.kind, cause.node, cause.during) for cause in asked[1:]] == [
        ("died", 1, "recover"),
        ("late", 0, "leave"),
    ]


def alive(to_begin: dict[int, int]) -> Generations:
    """Return a machine whose first world trains, in generation 1, from step 4."""
    agent = Generations(to_begin, lambda cause, before: "", Limits())
    agent.begin(0)
    for rank in to_begin:
        agent.on(Ready(0, rank + 1, 0))
    for rank in to_begin:
        agent.on(Recovered(0, rank + 1, 1, 4))
    return agent


@pytest.mark.quick
def test_who_is_new_gets_ready_while_others_train_and_who_leaves_is_dismissed_after_a_pause() -> None:
    agent = alive({0: 0, 1: 1})
    assert agent.change({0: (0, 1), 1: (2, None)}, 1) == [Spawn(3, 2)] and agent.trains
    assert agent.on(Ready(2, 3, 0)) == [Pause(1, 1, (1,)), Pause(2, 1, (1,))]
    assert agent.on(Ready(3, 1, 1)) == []
    assert agent.on(Ready(3, 2, 1)) == [Dismiss(2), Go(1, 0, 2), Go(3, 1, 2)] and not agent.causes
    assert agent.on(Died(4, 2, -9)) == agent.on(Ready(4, 2, 1)) == []


@pytest.mark.quick
def test_where_a_node_is_lost_the_others_go_on_without_it() -> None:
    agent = alive({0: 0, 1: 1, 2: 2})
    assert agent.on(Faulted(1, 1, 1)) == [Over(1, 1), Over(2, 1), Over(3, 1)]
    assert agent.on(Ready(1, 1, 1)) == agent.on(Ready(1, 3, 1)) == []
    assert agent.change({0: (0, 1), 1: (2, 3)}, 2, lost={1}) == [Go(1, 0, 2), Go(3, 1, 2)]
    assert [(cause.kind, cause.node) for cause in agent.causes] == [("faulted", 0), ("lost", 1)]


def test_a_fault_does_not_drop_who_may_hold_state_nor_a_change() -> None:
    agent = alive({0: 0, 1: 1})
    assert agent.change({0: (0, 1)}, 1) == [Pause(1, 1, (1,)), Pause(2, 1, (1,))]
    assert agent.on(Died(2, 1, -9)) == [Spawn(3, 0), Over(2, 1)]
    agent.on(Ready(3, 3, 0))
    assert agent.on(Ready(3, 2, 1)) == [Go(3, 0, 2), Go(2, 1, 2)]
    agent.on(Recovered(4, 2, 2, 4))
    assert agent.on(Recovered(4, 3, 2, 4)) == [Pause(3, 2, (1,)), Pause(2, 2, (1,))]
    agent.on(Ready(5, 2, 2))
    assert agent.on(Ready(5, 3, 2)) == [Dismiss(2), Go(3, 0, 3)]


def test_the_next_world_waits_for_who_is_new_where_a_node_is_lost() -> None:
    agent = alive({0: 0, 1: 1, 2: 2})
    assert agent.change({0: (0, 1), 1: (2, None)}, 1, lost={1}) == [Spawn(4, 2), Over(1, 1), Over(3, 1)]
    assert agent.on(Ready(2, 1, 1)) == agent.on(Ready(2, 3, 1)) == []
    assert agent.on(Ready(3, 4, 0)) == [Dismiss(3), Go(1, 0, 2), Go(4, 1, 2)]


def test_the_newest_change_counts() -> None:
    agent = alive({0: 0})
    assert agent.change({0: (0, 1), 1: (1, None)}, 1) == [Spawn(2, 1)]
    assert agent.change({0: (0, 1), 1: (2, None)}, 1) == [Dismiss(2), Spawn(3, 2)]
    assert agent.on(Ready(2, 3, 0)) == [Pause(1, 1)]
    assert agent.change({0: (0, 1)}, 2) == [Dismiss(3)]
    assert agent.on(Ready(3, 1, 1)) == [Go(1, 0, 2)] and [*agent.places] == [0]


def test_a_run_that_ends_while_it_is_to_change_has_ended() -> None:
    agent = alive({0: 0, 1: 0})
    agent.change({0: (0, 1), 1: (0, 2), 2: (1, None)}, 1)
    assert agent.on(Ready(2, 3, 0)) == [Pause(1, 1), Pause(2, 1)]
    assert agent.on(Ended(3, 1)) == [] and agent.on(Ended(3, 2)) == [Dismiss(3)] and agent.phase == "done"


@pytest.mark.parametrize(
    "to, lost, says",
    [
        ({0: (0, 1), 2: (0, 2)}, (), "a world of ranks .0, 2., not of 0, 1"),
        ({0: (0, 1), 1: (0, 1)}, (), "process 1 is to be two ranks"),
        ({0: (1, 1)}, (), "rank 0 is to be process 1 of node 1, which is of node 0"),
        ({0: (0, 1)}, (0,), "rank 0 is to be on node 0, which is lost"),
    ],
)
def test_worlds_that_cannot_be_are_refused(
    to: dict[int, tuple[int, int | None]], lost: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        alive({0: 0, 1: 0}).change(to, 1, lost)


# -- a world is changed


@pytest.mark.quick
def test_the_newest_world_that_anybody_has_confirmed_counts() -> None:
    old, new = [Status(rank, 4, world=1) for rank in (0, 1)], [Status(rank, 4, world=3) for rank in (0, 1, 2)]
    # Nobody has passed the barrier: what is formed is none, and the newcomer has nothing.
    assert that_count([(old[0], new[1]), (old[1], new[0]), (None, new[2])]) == [*old, None]
    # One has, so all of the others have theirs, whether they know that or not.
    assert that_count([(old[0], new[1]), (new[0], None), (None, new[2])]) == [new[1], new[0], new[2]]
    assert that_count([(None, new[2]), (None, None)]) == [None, None]
    with pytest.raises(ProtocolError, match=r"ranks .0, 0. of one world"):
        that_count([(old[0], None), (old[0], None)])


def test_what_has_been_lost_is_nowhere() -> None:
    tp2_dp2 = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    left = [Status(0, 5), Status(1, 4).contribute(2)]
    assert sources(left[:1], tp2_dp2) is None and sources(left, tp2_dp2) is None
    left[0] = Status(0, 4).contribute(2).commit(2, [1.0])
    found = sources(left, tp2_dp2)
    assert found is not None and found.version == 5 and not found.rewound
    assert found.images == {0: (Way("keep", 0, 0),), 1: (Way("forward", 1, 1),)}
    copied = Status(0, 5, copies={3: frozenset({3}), 0: frozenset({3})})
    found = sources([copied], tp2_dp2)
    assert found is not None and found.version == 3 and found.rewound
    assert found.images == {0: (Way("copy", 0, 0),), 1: (Way("copy", 0, 3),)}


def worlds() -> st.SearchStrategy[tuple[list[Status], Mapping[int, tuple[int, ...]]]]:
    """What the ranks that are left of a small world may say of themselves."""

    @st.composite
    def made(draw: st.DrawFn) -> tuple[list[Status], Mapping[int, tuple[int, ...]]]:
        ranks = draw(st.integers(1, 4))
        groups = [draw(st.integers(0, 2)) for _ in range(ranks)]
        replicas = {rank: tuple(r for r in range(ranks) if groups[r] == groups[rank]) for rank in range(ranks)}
        commits = {version: Commit(1, (float(version),)) for version in (4, 5)}
        said = []
        for rank in sorted(draw(st.sets(st.integers(0, ranks - 1)))):
            version = draw(st.sampled_from([None, 4, 4, 5]))
            copies = draw(st.dictionaries(st.integers(0, ranks - 1), st.frozensets(st.integers(2, 5)), max_size=3))
            pending = draw(st.sampled_from([None, 1, 2])) if version == 4 else None
            outcome = commits[version] if version is not None and draw(st.booleans()) else None
            said.append(Status(rank, version, pending, outcome, copies, draw(st.booleans())))
        return said, replicas

    return made()


@given(worlds())
def test_the_newest_version_of_which_all_is_in_some_memory_is_taken(
    world: tuple[list[Status], Mapping[int, tuple[int, ...]]],
) -> None:
    said, replicas = world

    def has(status: Status, image: int, version: int) -> bool:
        known = any(other.version == version and other.outcome is not None for other in said)
        live = status.version == version or (status.version == version - 1 and status.pending == 1 and known)
        return (live and status.rank in replicas[image]) or any(
            version in status.copies.get(each, ()) for each in replicas[image]
        )

    whole = [v for v in range(9) if all(any(has(status, image, v) for status in said) for image in replicas)]
    found = sources(said, replicas)
    assert (found.version if found else -1) == max(whole, default=-1)
    assert found == sources(said[::-1], replicas)
    if found is not None:
        for image, ways in found.images.items():
            assert ways and {way.source for way in ways} == {s.rank for s in said if has(s, image, found.version)}
    # What the ranks can reach where they are, they can take anywhere.
    in_place = resolve(said, replicas) if len(said) == len(replicas) else None
    assert in_place is None or (found is not None and found.version >= in_place.version)


# -- every order of events


def replicated(ranks: int, dp: int) -> Mapping[int, tuple[int, ...]]:
    """Return {rank: ranks with the same image} of a mesh whose outermost axis is dp."""
    inner = ranks // dp
    return {rank: tuple(other for other in range(ranks) if other % inner == rank % inner) for rank in range(ranks)}


def ring(ranks: int) -> Mapping[int, int]:
    """Return {rank: the next rank}, which holds copies of its image."""
    return {rank: (rank + 1) % ranks for rank in range(ranks)}


KILL_CUT = ("kill", "cut")
PAIRS = {
    "dp2": Setting(replicated(2, 2), 1, 1, stale=True),
    "copies": Setting(replicated(2, 1), 1, 1, stale=True, holder=ring(2)),
    "zero": Setting(replicated(2, 1), 1, 0, stale=True, gathers=True),
    "forgets": Setting(replicated(2, 2), 2, 0, 1, (1,), forgets=True, late=False, kinds=KILL_CUT),
}
"""Two ranks, a fault, and every delay of every message; gradients that are lost take two to tell."""
FOURS = {
    "dp4": Setting(replicated(4, 4), 2, 3, late=False, kinds=KILL_CUT),
    "tp2 x dp2": Setting(replicated(4, 2), 2, 1, late=False, kinds=KILL_CUT),
    "copies": Setting(replicated(4, 1), 1, 1, holder=ring(4), late=False, kinds=KILL_CUT),
    "copies, two deaths": Setting(replicated(4, 1), 2, 1, 1, (1,), ring(4), late=False, kinds=("kill",)),
    "copies of three": Setting(replicated(3, 1), 2, 1, 1, (1,), ring(3), late=False, kinds=KILL_CUT),
    "zero": Setting(replicated(4, 1), 2, 0, gathers=True, late=False, kinds=KILL_CUT),
}
"""Four ranks and two faults (with copies: two deaths, one fault of each kind, two of each kind among three).

What a living rank says, the agent hears at once."""


@pytest.mark.quick
@pytest.mark.parametrize("name", PAIRS)
def test_no_order_of_events_tears_or_sticks(name: str) -> None:
    walked = explore(Explorer(PAIRS[name]))
    assert walked.worlds > 2_000 and walked.done


@pytest.mark.grid
@pytest.mark.parametrize("name", FOURS)
def test_no_order_of_events_among_four_ranks_tears_or_sticks(name: str) -> None:
    walked = explore(Explorer(FOURS[name]))
    print(name, walked)
    assert walked.done and walked.failed


def walks(ranks: int, seed: int) -> list[Walked]:
    """Walk through four faults on each layout of so many ranks."""
    return [
        walk(replace(setting, steps=3, saves=(1, 3)), seed)
        for setting in (
            Setting(replicated(ranks, 2), 4, 1),
            Setting(replicated(ranks, 4), 4, 3),
            Setting(replicated(ranks, 1), 4, 1, holder=ring(ranks)),
            Setting(replicated(ranks, 1), 4, 0, gathers=True),
        )
    ]


@pytest.mark.parametrize("ranks, seeds", [(8, 12), (64, 2)])
def test_no_random_order_among_many_ranks_tears_or_sticks(ranks: int, seeds: int) -> None:
    walked = [each for seed in range(seeds) for each in walks(ranks, seed)]
    assert any(each.done for each in walked) and any(each.failed for each in walked)


@pytest.mark.grid
@pytest.mark.parametrize("ranks, seeds", [(4, 2000), (8, 600), (64, 30)])
def test_no_random_order_of_thousands_tears_or_sticks(ranks: int, seeds: int) -> None:
    walked = [each for seed in range(100, 100 + seeds) for each in walks(ranks, seed)]
    print(f"{len(walked)} walks, {sum(each.done for each in walked)} done, {sum(each.moves for each in walked)} moves")


# -- seeded bugs, each of which must be found

DP4 = Setting(replicated(4, 4), 2, 3, 1, (1,), late=False, kinds=("kill",))
TP2_DP2 = replace(FOURS["tp2 x dp2"], faults=1, steps=1, saves=(1,), kinds=("kill",))
THREE = Setting(replicated(3, 1), 2, 1, 1, (1,), ring(3), late=False, kinds=KILL_CUT)


BUGS: dict[str, tuple[Setting, str, str, str]] = {
    # Status
    "a commit is forgotten": (PAIRS["zero"], "commit", "outcome=outcome, ", "outcome=None, "),
    "a commit counts twice": (PAIRS["dp2"], "commit", "self.version + 1", "self.version + 2"),
    "copies outlive what is undone": (replace(THREE, kinds=("kill",)), "follow", "if v <= version", "if True"),
    "a half-written image counts": (
        PAIRS["forgets"],
        "overwrite",
        "Status(self.rank, copies",
        "Status(self.rank, self.version, copies",
    ),
    "a copy replaces the older one at once": (
        PAIRS["copies"],
        "hold",
        "self.copies.get(rank, frozenset()) | {version}",
        "frozenset({version})",
    ),
    "the last copies are dropped": (PAIRS["copies"], "settle", "v >= version", "v > version"),
    # what the ranks owe to it
    "a step begins before its copies are whole": (
        PAIRS["copies"],
        "_reached",
        'return self._put(self._set(world, groups._replace(copied=copied)), rank, proc._replace(at="copy"))',
        "return self._save(self._set(world, groups._replace(copied=copied)), rank, proc)",
    ),
    "a checkpoint is published before all have written": (
        PAIRS["dp2"],
        "_can_go_on",
        "return groups.given[rank] is EMPTY",
        'return proc.at == "gather" or groups.given[rank] is EMPTY',
    ),
    "another's image is written over a state that is told": (
        PAIRS["forgets"],
        "_resolved",
        'self._do(proc.status, "overwrite")',
        "proc.status",
    ),
    # resolve
    "nobody rolls forward": (PAIRS["zero"], "_alone", "status.version == version - 1 and", "False and"),
    "who has not contributed rolls forward": (
        PAIRS["forgets"],
        "_alone",
        "status.pending == outcome.generation",
        "True",
    ),
    "gradients go with another commit": (
        replace(THREE, copies_first=False),
        "_alone",
        "status.pending == outcome.generation",
        "status.pending",
    ),
    "any image will do": (TP2_DP2, "_ways", "for other in identical[rank] if", "for other in said if"),
    "newcomers take from newcomers": (PAIRS["dp2"], "_ways", "if other in own]", "if other in said]"),
    "peers' copies are not asked for": (
        PAIRS["copies"],
        "_ways",
        "if version in status.copies.get(image, ())",
        "if False",
    ),
    "what is said first decides": (
        DP4,
        "resolve",
        "sorted(statuses, key=lambda status: status.rank)",
        "statuses",
    ),
    "all go back as far as they can": (PAIRS["copies"], "_versions", "reverse=True", "reverse=False"),
    # Generations
    "goes before every place is filled": (
        PAIRS["dp2"],
        "_act",
        'process.state != "ready" for',
        'process.state not in ("ready", "start") for',
    ),
    "goes before all have left": (
        PAIRS["dp2"],
        "_act",
        'process.state != "ready" for',
        'process.state not in ("ready", "leave") for',
    ),
    "a place is filled before its process is dead": (PAIRS["dp2"], "_late", '"die", at + self.limits.die', '"gone"'),
    "faults without a death are no cause": (
        PAIRS["dp2"],
        "_hear",
        'self._blame("faulted", event.at, life)\n        case Ready',
        "pass\n        case Ready",
    ),
    "who recovers is not told that it is over": (
        PAIRS["dp2"],
        "_act",
        "if process.state in _IN:",
        'if process.state == "train":',
    ),
    "nobody is ever late": (PAIRS["dp2"], "_late", "process.deadline > at", "True"),
    "a generation's number is used again": (PAIRS["dp2"], "_go", "self.generation + 1, ", "max(self.generation, 1), "),
    "a new process inherits a generation": (
        PAIRS["dp2"],
        "_spawn",
        '"start", at + self.limits.start)',
        '"start", at + self.limits.start)\n        self.processes[life] = replace(self.processes[life], generation=1)',
    ),
    "an end is waited for in vain": (PAIRS["dp2"], "_act", 'ended := self._in("ended")', "ended := self._in()"),
    "lost state is tried again": (
        PAIRS["zero"],
        "_hear",
        "case Lost(generation=process.generation):",
        "case Lost(generation=process.generation) if process.state in _IN:",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, *change = BUGS[bug]
    seed(monkeypatch, (Generations, Status, Explorer, protocol), *change)
    with pytest.raises((Violation, ProtocolError)) as caught:
        explore(Explorer(setting))
    print(bug, "|", str(caught.value)[:110], "|", caught.value.__notes__[0][:40])
