"""What the ranks agree on after a fault, and what the agent does until they can."""

from __future__ import annotations

import inspect
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from explorer import Explorer, Setting, Violation, Walked, explore, walk

from megacore.recovery import protocol
from megacore.recovery.protocol import (
    Cause,
    Commit,
    Died,
    Fail,
    Faulted,
    Generations,
    Go,
    Kill,
    Limits,
    Over,
    Passed,
    ProtocolError,
    Ready,
    Recovered,
    Resolution,
    Spawn,
    Status,
    Way,
    resolve,
)

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
    assert agent.begin(0) == [Spawn(0, 1, 0), Spawn(1, 1, 0)]
    assert agent.on(Ready(1, 0, 1, 0)) == []
    assert agent.on(Ready(1, 1, 1, 0)) == [Go(0, 1), Go(1, 1)]
    assert agent.on(Recovered(2, 0, 1, 1, 0)) + agent.on(Recovered(2, 1, 1, 1, 0)) == [] and agent.trains
    assert agent.on(Died(3, 1, 1, -9)) == [Over(0, 1), Spawn(1, 2, 0)]
    assert agent.on(Faulted(3, 0, 1, 1)) == agent.on(Ready(3, 1, 1, 0)) == agent.on(Ready(4, 0, 1, 1)) == []
    assert agent.on(Ready(4, 1, 2, 0)) == [Go(0, 2), Go(1, 2)]


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
    for rank in (0, 1):
        agent.on(Ready(0, rank, 1, 0))
    for rank in (0, 1):
        agent.on(Faulted(1, rank, 1, 1))
    for rank in (0, 1):
        agent.on(Ready(2, rank, 1, 1))
    assert agent.generation == 2 and [(cause.kind, cause.rank, cause.during) for cause in asked] == [
        ("faulted", 0, "recover")
    ]
    assert agent.on(Died(3, 1, 1, -9)) == [Over(0, 2), Spawn(1, 2, 1)] and agent.deadline == 8
    assert agent.on(Passed(8)) == [Kill(0), Kill(1), Fail("enough")] and agent.phase == "failed"
    assert [(cause.kind, cause.during) for cause in asked[1:]] == [("died", "recover"), ("late", "leave")]


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
    "copies of three": Setting(replicated(3, 1), 2, 1, 1, (1,), ring(3), late=False, kinds=KILL_CUT),
    "zero": Setting(replicated(4, 1), 2, 0, gathers=True, late=False, kinds=KILL_CUT),
}
"""Four ranks and two faults (with copies that is too many worlds: four and one, three and two).

What a living rank says, the agent hears at once."""


@pytest.mark.quick
@pytest.mark.parametrize("name", PAIRS)
def test_no_order_of_events_tears_or_sticks(name: str) -> None:
    walked = explore(PAIRS[name])
    assert walked.worlds > 2_000 and walked.done


@pytest.mark.grid
@pytest.mark.parametrize("name", FOURS)
def test_no_order_of_events_among_four_ranks_tears_or_sticks(name: str) -> None:
    walked = explore(FOURS[name])
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


def seed(monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str) -> None:
    """Change what a method or function of the protocol says, or of the explorer's ranks."""
    owner = next(each for each in (Generations, Status, Explorer, protocol) if hasattr(each, name))
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) == 1, f"{name} does not say {old!r} once"
    scope = dict(vars(sys.modules[getattr(owner, name).__module__]))
    exec(f"from __future__ import annotations\n{source.replace(old, new)}", scope)
    monkeypatch.setattr(owner, name, scope[name])


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
    "all go back as far as they can": (PAIRS["copies"], "resolve", "reverse=True", "reverse=False"),
    # Generations
    "goes before every place is filled": (
        PAIRS["dp2"],
        "_act",
        "< len(self.places)",
        "< len(self.places) - len(self._in('start'))",
    ),
    "goes before all have left": (
        PAIRS["dp2"],
        "_act",
        "< len(self.places)",
        "< len(self.places) - len(self._in('leave'))",
    ),
    "a place is filled before its process is dead": (PAIRS["dp2"], "_late", '"die", at + self.limits.die', '"gone"'),
    "deaths in a recovery are no cause": (
        PAIRS["dp2"],
        "_hear",
        'if place.state != "die":',
        'if place.state not in ("die", "recover"):',
    ),
    "faults without a death are no cause": (
        PAIRS["dp2"],
        "_hear",
        'self._blame("faulted", event.at, rank)\n        case Ready',
        "pass\n        case Ready",
    ),
    "who recovers is not told that it is over": (
        PAIRS["dp2"],
        "_act",
        'self._in("recover", "train")',
        'self._in("train")',
    ),
    "nobody is ever late": (PAIRS["dp2"], "_late", "place.deadline > at", "True"),
    "a generation's number is used again": (PAIRS["dp2"], "_go", "self.generation + 1, ", "max(self.generation, 1), "),
    "a new process inherits a generation": (PAIRS["dp2"], "_act", '"start", 0, at', '"start", place.generation, at'),
    "an end is waited for in vain": (PAIRS["dp2"], "_act", 'ended := self._in("ended")', "ended := self._in()"),
    "lost state is tried again": (
        PAIRS["zero"],
        "_hear",
        "case Lost(generation=place.generation):",
        "case Lost(generation=place.generation) if self._is_in(place, event.generation):",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, *change = BUGS[bug]
    seed(monkeypatch, *change)
    with pytest.raises((Violation, ProtocolError)) as caught:
        explore(setting)
    print(bug, "|", str(caught.value)[:110], "|", caught.value.__notes__[0][:40])
