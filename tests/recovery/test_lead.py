"""The agent that leads, without a process: the orders that follow from what nodes and processes do."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megacore import exits
from megacore.recovery.children import Children
from megacore.recovery.ends import Exit
from megacore.recovery.events import Event
from megacore.recovery.follow import Follower
from megacore.recovery.lead import Lead
from megacore.recovery.news import Came, Gone, News, Said
from megacore.recovery.policy import Budgets, Decision, Incident, decide
from megacore.recovery.worlds import places


class Sent(Children):
    """The processes of node 0: orders are written down."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "module", ["recipe"], {}, talks=True)
        self.orders = list[tuple[str, int, Mapping[str, Any]]]()

    def do(self, what: str, life: int, more: Mapping[str, Any]) -> None:
        self.orders.append((what, life, more))

    def stand_by(self, variables: Mapping[str, str]) -> None:
        pass


class Wires:
    """The connections to the other nodes."""

    store = ("host", 1)

    def __init__(self) -> None:
        self.arrives, self.said = list[News](), list[tuple[int, str, Mapping[str, Any]]]()

    def news(self) -> list[News]:
        news, self.arrives = self.arrives, []
        return news

    def say(self, node: int, what: str, **more: Any) -> None:
        self.said.append((node, what, more))


class Answers:
    """The policy of a run that needs one node."""

    def __init__(self, nodes: Mapping[int, int], least: int = 1) -> None:
        self.nodes, self.least, self.history = nodes, least, list[Incident]()
        self.steps = list[int | None]()

    def answer(self, event: Event) -> Decision:
        decision = decide(event, self.history, Budgets("a", nodes=len(self.nodes), least_nodes=self.least))
        self.history.append(Incident(event, decision, "a"))
        return decision

    def went_on(self, step: int | None) -> None:
        self.steps.append(step)


class Led:
    """A run of one process a node, led from here."""

    def __init__(self, folder: Path, count: int, least: int = 1) -> None:
        self.nodes, self.wires, self.children = dict.fromkeys(range(count), 1), Wires(), Sent(folder)
        self.answers = Answers(self.nodes, least)
        layouts = {number: [f"mesh.dp={number}"] for number in range(least, 4)}
        given: Any = {"recovery": self.answers, "members": self.wires, "layouts": layouts}
        self.lead = Lead(self.children, 60.0, name="a", nodes=self.nodes, **given)
        self.lead.begin()

    def hears(self, *news: News) -> None:
        self.wires.arrives += news
        self.lead.hear([])

    def says(self, life: int, what: str, **more: Any) -> None:
        """Have a process say something about the generation that it is in."""
        generation = self.lead.generations.processes[life].generation
        node = self.lead.homes[life]
        message = {"what": what, "generation": generation, **more}
        if node == 0:
            self.lead.said(life, message)
        else:
            self.wires.arrives.append(Said(node, {"what": "said", "launch": "a", "life": life, "message": message}))
        self.lead.hear([])

    def trains(self, step: int = 0) -> None:
        """Have all that are started or told to let go be ready, and then all train."""
        for life in list(self.lead.homes):
            if self.lead.generations.processes[life].state in ("start", "pause", "leave"):
                self.says(life, "ready")
        for life in list(self.lead.generations.world.values()):
            if self.lead.generations.processes[life].state == "recover":
                self.says(life, "recovered", step=step)
        assert self.lead.generations.trains

    def to(self, node: int) -> list[str]:
        return [what for other, what, _ in self.wires.said if other == node]

    @property
    def world(self) -> dict[int, int]:
        """{rank: node}."""
        return {rank: process.node for rank, process in self.lead.generations.places.items()}


@pytest.fixture
def led(tmp_path: Path) -> Callable[..., Led]:
    return lambda *given, **named: Led(tmp_path, *given, **named)


def test_a_process_of_another_node_is_replaced_there(led: Callable[..., Led]) -> None:
    run = led(2)
    run.trains()
    assert run.to(1) == ["begin", "spawn", "go", "stand_by"]
    end = Exit(2, 1, 77, -signal.SIGKILL)
    run.hears(Said(1, {"what": "exit", "launch": "a", "exit": asdict(end)}))
    assert run.to(1)[4:] == ["spawn"] and run.children.orders[-1][0] == "over"
    run.trains(3)
    event = run.answers.history[0].event
    assert (event.kind, event.rank, event.node, event.phase) == ("killed", 1, 1, None)
    (_, _, more) = next(said for said in reversed(run.wires.said) if said[1] == "go")
    told = more["more"]["variables"]
    assert told["MEGACORE_STORE"] == "tcp://host:1/a-2" and (told["RANK"], told["WORLD_SIZE"]) == ("1", "2")
    assert told["MEGACORE_OVERRIDES"] == '["mesh.dp=2"]'


def test_words_of_an_earlier_launch_are_passed_over(led: Callable[..., Led]) -> None:
    run = led(2)
    run.trains()
    run.hears(Said(1, {"what": "exit", "launch": "b", "exit": asdict(Exit(2, 1, 77, -9))}))
    assert run.lead.generations.trains


def test_a_node_that_comes_takes_part_after_a_pause(led: Callable[..., Led]) -> None:
    run = led(1)
    run.trains()
    run.hears(Came(4, 1, "host-b"))
    assert run.to(4) == ["begin", "spawn"] and run.lead.generations.trains  # who is there goes on meanwhile
    run.says(2, "ready")
    assert run.children.orders[-1][0] == "pause"
    assert run.answers.steps == []
    run.trains(5)
    assert run.world == {0: 0, 1: 4} and run.answers.steps == [5]


def test_a_node_that_is_lost_is_done_without(led: Callable[..., Led]) -> None:
    run = led(3)
    run.trains()
    run.hears(Gone(1, "silent"))
    assert run.children.orders[-1][0] == "over" and run.to(2)[-1] == "over"
    assert run.answers.steps == []  # nobody goes on yet
    run.trains(3)
    assert run.world == {0: 0, 1: 2} and not run.lead.failure and run.answers.steps == [3]


def test_a_spare_that_is_lost_stops_nobody(led: Callable[..., Led]) -> None:
    run = led(3)
    run.trains()
    run.hears(Came(4, 1))
    run.hears(Gone(4, "silent"))
    assert run.lead.generations.trains and run.answers.steps == [None]


def test_a_spare_steps_in_for_a_node_that_the_run_needs(led: Callable[..., Led]) -> None:
    run = led(2, least=2)
    run.trains()
    run.hears(Gone(1, "silent"), Came(2, 1))
    run.trains(3)
    assert not run.lead.failure and run.world == {0: 0, 1: 2}
    assert [each.decision.action for each in run.answers.history] == ["rebuild", "evict"]


def test_nobody_waits_for_a_node_that_has_just_come_when_another_is_lost(led: Callable[..., Led]) -> None:
    """It takes part once the others train again."""
    run = led(2)
    run.trains()
    run.hears(Came(2, 1))
    run.hears(Gone(1, "silent"))
    assert run.world == {0: 0}
    run.says(1, "ready")
    run.says(1, "recovered", step=3)
    assert run.lead.generations.trains and run.to(2)[-1] == "spawn"
    run.says(max(run.lead.homes), "ready")
    run.trains(5)
    assert run.world == {0: 0, 1: 2}


def test_too_few_nodes_end_the_launch(led: Callable[..., Led]) -> None:
    run = led(2, least=2)
    run.trains()
    run.hears(Gone(1, "silent"))
    assert run.lead.failure and not run.lead.goes_on()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (0, exits.DONE)])
def test_a_node_leaves_once_the_others_have_let_it_go(led: Callable[..., Led], number: int, status: int) -> None:
    run = led(3)
    run.trains()
    run.hears(Said(1, {"what": "signal", "launch": "a", "number": number}))
    assert run.to(1)[-1] == "pause"
    run.trains(3)
    assert run.world == {0: 0, 1: 2} and run.wires.said[-1] != (1, "end", {"status": status})
    assert (1, "end", {"status": status}) in run.wires.said and run.to(1)[-2:] == ["dismiss", "end"]


def test_all_end_where_the_run_needs_the_node_that_wants_to_leave(led: Callable[..., Led]) -> None:
    run = led(2, least=2)
    run.trains()
    run.hears(Said(1, {"what": "signal", "launch": "a", "number": signal.SIGTERM}))
    assert run.lead.signalled == signal.SIGTERM and run.to(1)[-1] == "send"


def test_who_takes_a_place_after_the_signal_to_end_is_asked_too(led: Callable[..., Led]) -> None:
    run = led(2)
    run.trains()
    run.lead.end_by(signal.SIGTERM)
    run.hears(Said(1, {"what": "exit", "launch": "a", "exit": asdict(Exit(2, 1, 77, -signal.SIGKILL))}))
    assert run.to(1)[-2:] == ["spawn", "send"] and run.wires.said[-1] == (1, "send", {"number": signal.SIGTERM})


def test_a_node_that_fails_twice_is_left_out(led: Callable[..., Led]) -> None:
    run = led(3)
    run.trains()
    for life in (2, 4):
        run.hears(Said(1, {"what": "exit", "launch": "a", "exit": asdict(Exit(life, 1, 77, -signal.SIGKILL))}))
        run.trains(3)
    assert (1, "end", {"status": exits.EVICT}) in run.wires.said
    assert run.world == {0: 0, 1: 2}


def test_what_another_node_sees_of_its_ranks_is_among_the_incidents(led: Callable[..., Led]) -> None:
    run = led(2)
    run.trains()
    run.hears(Said(1, {"what": "event", "event": asdict(Event("straggler", 1, 7, step=30, detail="data"))}))
    (incident,) = run.answers.history
    assert (incident.event.kind, incident.event.rank, incident.event.node) == ("straggler", 1, 1)
    assert incident.decision.action == "tell" and run.lead.goes_on()


def test_who_is_led_ends_as_it_is_told_or_with_the_agent_that_leads(tmp_path: Path) -> None:
    for news, status in (((Said(0, {"what": "end", "status": 143}), Gone(0, "left")), 143), ((Gone(0, "died"),), 75)):
        wires: Any = Wires()
        follower = Follower(Sent(tmp_path), 60.0, members=wires)
        follower.end_by(signal.SIGTERM)  # the agent that leads says what that means
        assert follower.goes_on() and [said[:2] for said in wires.said] == [(0, "signal")]
        wires.arrives += news
        follower.hear([])
        assert not follower.goes_on() and follower.status() == status


def test_processes_keep_their_order_and_those_of_a_node_stay_together() -> None:
    there = [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6)]
    assert places({0: 2, 2: 2, 5: 2}, there) == {0: (0, 1), 1: (0, 2), 2: (2, 5), 3: (2, 6), 4: (5, None), 5: (5, None)}
