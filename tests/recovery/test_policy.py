"""What a run answers to what befalls it: the rules, and that no sequence of events is answered for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore import exits
from megacore.recovery.events import KINDS, Event
from megacore.recovery.policy import (
    ACTIONS,
    ANNOUNCED,
    ENDS,
    LADDERS,
    Action,
    Budgets,
    Decision,
    Incident,
    decide,
    table,
)

pytestmark = pytest.mark.quick


def answers(events: Sequence[Event], budgets: Budgets, before: Sequence[Incident] = ()) -> list[Decision]:
    """What is answered to one event after another, until the end."""
    history = list(before)
    for event in events:
        history.append(Incident(event, decide(event, history, budgets), budgets.life))
        if history[-1].decision.action == "end":
            break
    return [each.decision for each in history[len(before) :]]


def actions(events: Sequence[Event], budgets: Budgets) -> list[str]:
    return [each.action for each in answers(events, budgets)]


def killed(step: int | None = None, rank: int = 1, **more: Any) -> Event:
    return Event("killed", rank, step=step, **more)


# -- the rules


def test_the_cheapest_first_and_each_has_its_budget() -> None:
    budgets = Budgets(max_recoveries=2, max_restarts=1)
    said = answers([killed(step) for step in range(9)], budgets)
    assert [each.action for each in said] == ["replace", "replace", "restart", "end"]
    assert said[-1].status == exits.RETRY
    assert said[-1].reason == "all 2 recoveries are spent; all 1 restarts are spent (recovery.max_restarts)"
    assert said[-2].reason == "restart 1 of 1"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"resumable": False}, "it writes no checkpoints to restart from"),
        ({"max_restarts": 0}, "it may not restart (recovery.max_restarts=0)"),
    ],
)
def test_a_run_that_cannot_restart_says_why(changed: dict[str, Any], reason: str) -> None:
    (said,) = answers([killed(3)], Budgets(in_place=False, **changed))
    assert (said.action, said.status, said.reason) == ("end", exits.RETRY, reason)


def test_a_step_that_kills_thrice_is_not_tried_a_fourth_time() -> None:
    *before, said = answers([killed(7, samples=(48, 56))] * 4, Budgets(in_place=False, max_restarts=9))
    assert [each.action for each in before] == ["restart", "restart"]
    assert (said.action, said.status) == ("end", exits.FAILED)
    assert said.reason == "step 7 (samples 48 to 55) has ended the run 3 times"


def test_the_three_times_may_be_of_several_launches_and_end_where_somebody_has_read_of_it() -> None:
    first, second, third = (Budgets(life, in_place=False) for life in "abc")
    history = [Incident(event, decide(event, (), first), "a") for event in [killed(7)] * 2]
    end = decide(killed(7), history, second)
    assert end.action == "end"
    assert decide(killed(7), [*history, Incident(killed(7), end, "b")], third).action == "restart"


@pytest.mark.parametrize("event", [killed(7, phase="start"), killed(7, phase="recover"), killed(None)])
def test_what_befalls_no_step_does_not_tell_against_it(event: Event) -> None:
    assert actions([event] * 5, Budgets(in_place=False, max_restarts=4)) == ["restart"] * 4 + ["end"]


def test_the_same_exception_at_the_same_step_is_the_program() -> None:
    raised = Event("raised", 0, step=3, detail="ZeroDivisionError: division by zero")
    budgets = Budgets(in_place=False)
    assert actions([raised, replace(raised, detail="OSError: disk")], budgets) == ["restart", "restart"]
    assert actions([raised, replace(raised, step=4)], budgets) == ["restart", "restart"]
    first, said = answers([raised, raised], budgets)
    assert (first.action, said.action, said.status) == ("restart", "end", exits.FAILED)
    assert "ZeroDivisionError" in said.reason


def test_a_rank_that_raises_before_each_first_step_is_not_replaced_for_ever() -> None:
    raised = Event("raised", 0, phase="start", detail="ImportError: no tensorboard")
    first, second, said = answers([raised] * 9, Budgets())
    assert (first.action, second.action) == ("replace", "replace")
    assert (said.action, said.status) == ("end", exits.FAILED)
    assert said.reason == "rank 0 has ended 3 times alike, and no step was done: ImportError: no tensorboard"
    others = [replace(raised, **change) for change in ({}, {"rank": 1}, {"detail": "OSError"}, {"step": 4})]
    assert actions([*others, *others], Budgets()) == ["replace"] * 8


def test_a_node_that_fails_twice_within_an_hour_is_left_out() -> None:
    events = [killed(1, node=2, at=0.0), killed(5, node=2, at=3599.0)]
    assert answers(events, Budgets(nodes=4))[1].node == 2
    assert actions(events, Budgets(nodes=4)) == ["replace", "evict"]
    assert actions([events[0], replace(events[1], at=3601.0)], Budgets(nodes=4)) == ["replace", "replace"]
    assert actions([events[0], replace(events[1], node=1)], Budgets(nodes=4)) == ["replace", "replace"]
    end = answers(events, Budgets(nodes=4, least_nodes=4))[1]
    assert (end.action, end.status_on(2), end.status_on(0)) == ("end", exits.EVICT, exits.RETRY)
    more = [*events, killed(9, node=2, at=3600.0)]
    assert actions(more, Budgets(nodes=4, node_failures=3)) == ["replace", "replace", "evict"]
    assert actions(more, Budgets(nodes=4, node_failures=None)) == ["replace"] * 3


def test_a_node_that_is_gone_is_done_without_while_there_are_means() -> None:
    gone = [Event("agent_lost", node=node, at=node * 4000.0) for node in (1, 2)]
    assert actions(gone, Budgets(nodes=4)) == ["evict", "evict"]
    assert actions(gone, Budgets(nodes=4, max_recoveries=1)) == ["evict", "restart"]
    assert actions(gone, Budgets(nodes=4, least_nodes=4)) == ["restart", "restart"]


def test_one_machine_alone_is_not_left_out_for_its_ranks_die() -> None:
    assert actions([killed(n, node=0) for n in range(3)], Budgets(in_place=False)) == ["restart"] * 3
    hung, flipped = Event("hung", 1, 0, 9), Event("corrupted", None, 0, 13)
    assert actions([hung, flipped, hung, flipped], Budgets()) == ["replace", "restart", "replace", "end"]
    assert actions([hung, flipped], Budgets(nodes=2)) == ["replace", "evict"]


def test_a_bad_step_is_repeated_and_then_either_its_data_or_the_hardware_is_at_fault() -> None:
    bad = Event("non_finite", 3, 1, 7, samples=(48, 56))
    data, hardware = replace(bad, kind="bad_data"), replace(bad, kind="unrepeatable")
    assert actions([bad, data], Budgets()) == ["repeat", "skip"]
    assert answers([bad, data], Budgets())[1].samples == (48, 56)
    assert actions([bad, data], Budgets(go_back=True)) == ["repeat", "go_back"]
    assert actions([bad, hardware], Budgets(nodes=2)) == ["repeat", "evict"]
    alone = answers([bad, hardware], Budgets())[1]
    assert alone.action == "tell"
    assert actions([bad, replace(hardware, rank=None)], Budgets()) == ["repeat", "tell"]
    assert actions([bad], Budgets(repeats=False)) == ["end"]
    assert actions([replace(bad, kind="spike")], Budgets(repeats=False)) == ["tell"]


def test_skipping_has_a_budget_and_an_end_at_one_step() -> None:
    far, near = ([Event("bad_data", step=step, samples=(0, 8)) for step in range(0, 900, by)] for by in (50, 49))
    assert "end" not in actions(far, Budgets(max_skipped=2))
    assert actions(near, Budgets(max_skipped=2)) == ["skip", "skip", "end"]
    assert answers([far[0]] * 5, Budgets(max_skipped=None))[-1].status == exits.FAILED
    assert actions([far[0]] * 5, Budgets(max_skipped=None)) == ["skip", "skip", "end"]


def test_corruption_is_mended_from_files_and_hardware_the_second_time() -> None:
    flipped = Event("corrupted", 3, 0, 7)
    said = answers([flipped, flipped], Budgets())
    assert [each.action for each in said] == ["restart", "end"] and said[1].status == exits.EVICT
    assert actions([flipped], Budgets(resumable=False)) == ["replace"]
    assert actions([replace(flipped, rank=None, node=None)], Budgets()) == ["restart"]


def test_who_comes_and_goes_costs_nothing() -> None:
    moves = [Event("node_joins", node=1), Event("node_leaves", node=1)] * 50
    budgets = Budgets(nodes=2, max_recoveries=1)
    assert actions([*moves, killed(1)], budgets) == ["rebuild", "evict"] * 50 + ["replace"]


# -- whatever may happen

STEPS = 6
EVENTS = st.builds(
    Event,
    kind=st.sampled_from(list(KINDS)),
    rank=st.sampled_from([None, 0, 1]),
    node=st.sampled_from([None, 0, 1]),
    step=st.sampled_from([None, *range(STEPS)]),
    phase=st.sampled_from([None, "start", "forward"]),
    detail=st.sampled_from(["", "OSError"]),
    at=st.floats(0, 1e5),
    samples=st.sampled_from([None, (0, 8)]),
)
BUDGETS = st.builds(
    Budgets,
    life=st.just("life"),
    max_recoveries=st.integers(0, 4),
    max_restarts=st.integers(0, 3),
    max_skipped=st.sampled_from([0, 1, 2]),
    in_place=st.booleans(),
    resumable=st.booleans(),
    repeats=st.booleans(),
    go_back=st.booleans(),
    nodes=st.integers(1, 3),
    least_nodes=st.integers(1, 3),
)


@settings(max_examples=200)
@given(st.lists(EVENTS, max_size=40), BUDGETS)
def test_every_event_is_answered_by_its_ladder_and_an_end_is_for_good(events: list[Event], budgets: Budgets) -> None:
    history = list[Incident]()
    for event in events:
        said = decide(event, history, budgets)
        if history and history[-1].decision.action == "end":
            assert said == history[-1].decision
        else:
            rules = ("evict", "end", "tell") if event.kind in ENDS else ()
            assert said.action in (*LADDERS[event.kind], *rules)
        assert said.reason and (said.action != "end" or said.status in (exits.FAILED, exits.RETRY, exits.EVICT))
        history.append(Incident(event, said, "life"))


FAULTS = EVENTS.filter(lambda each: each.kind not in ANNOUNCED)


@settings(max_examples=100)
@given(st.lists(FAULTS, min_size=20, max_size=20), BUDGETS)
def test_answers_that_change_anything_come_to_an_end(events: list[Event], budgets: Budgets) -> None:
    spending = [each.action for each in answers(events, budgets) if each.action not in ("tell", "end")]
    most = budgets.max_recoveries + budgets.max_restarts + (budgets.max_skipped or 0)
    assert len(spending) <= most


# A node that is left out costs about what a restart does.
RANK = [action for action in ACTIONS if action != "evict"]


def cost(action: Action) -> int:
    return RANK.index("restart" if action == "evict" else action)


ASCENDING = [kind for kind, ladder in LADDERS.items() if list(ladder) == sorted(ladder, key=cost)]


@settings(max_examples=300)
@given(
    EVENTS, st.lists(EVENTS, max_size=8), BUDGETS, st.sampled_from(["max_recoveries", "max_restarts", "max_skipped"])
)
def test_more_means_never_make_an_answer_harder(event: Event, before: list[Event], fewer: Budgets, of: str) -> None:
    more = replace(fewer, **{of: getattr(fewer, of) + 1})
    history = [
        Incident(each, said, "life")
        for each, said in zip(before, answers(before, fewer), strict=False)
        if said.action != "end"
    ]
    with_fewer, with_more = decide(event, history, fewer), decide(event, history, more)
    assert with_more.action != "end" or with_fewer.action == "end"
    if event.kind in ASCENDING:
        assert cost(with_more.action) <= cost(with_fewer.action)


@settings(max_examples=200)
@given(EVENTS, st.lists(EVENTS, max_size=8), BUDGETS)
def test_more_of_a_past_never_makes_an_answer_cheaper(event: Event, before: list[Event], budgets: Budgets) -> None:
    said = answers(before, budgets)
    history = [Incident(each, one, "life") for each, one in zip(before, said, strict=False) if one.action != "end"]
    ranks = [cost(decide(event, history[:n], budgets).action) for n in range(len(history) + 1)]
    if event.kind in ASCENDING:
        assert ranks == sorted(ranks)


def test_the_table_tells_every_kind_and_every_answer() -> None:
    shown = table()
    assert all(f"`{kind}`" in shown and what in shown for kind, what in KINDS.items())
    assert set(LADDERS) == set(KINDS) and {each for ladder in LADDERS.values() for each in ladder} == set(ACTIONS)
    assert "end (75, RETRY)" in shown
