"""Nodes come together, are noticed when they die or stand, and come back: agents as threads, a few as processes.

torch's rendezvous looks at its store once a second, whatever one does. So all stories run side by side.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import datetime, timedelta, tzinfo
from multiprocessing.connection import Connection
from typing import Any

import pytest
from pool import forkserver

from megacore import exits
from megacore.recovery import links
from megacore.recovery.links import Link, Links, connected
from megacore.recovery.members import Came, Gone, Members, MembersError, News, Said

HOST = "127.0.0.1"
SILENCE_S = 3.0
SOON_S = 40.0
"""A time that is only waited for where something is wrong."""

STORIES = dict[str, Callable[[], None]]()


def story(function: Callable[[], None]) -> Callable[[], None]:
    STORIES[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, Future[None]]]:
    from megacore.recovery import rendezvous  # before the clocks of the stories run
    from megacore.recovery.rendezvous import Rendezvous

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "SILENCE_S", SILENCE_S)
        patch.setattr(links, "BEAT_S", SILENCE_S / 5)
        patch.setattr(rendezvous, "STORE_S", SILENCE_S)
        patch.setattr(rendezvous, "JOIN_S", 1.5 * SILENCE_S)
        patch.setattr(Rendezvous, "join", goes_wrong_once(Rendezvous.join))
        yield {name: in_thread(run) for name, run in STORIES.items()}


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Its outcome, from a thread that nobody waits for at the end."""
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Nodes:
    """The agents of one story, closed at its end."""

    def __init__(self, least: int, most: int, run: str = "run") -> None:
        self.range, self.run = (least, most), run
        self.members = list[Members]()
        self.lead = self.agent(0, True)
        self._opened = Opening(self.lead)
        wait_until(lambda: self.lead._side is not None)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for members in reversed(self.members):
            members.close()

    def agent(self, port: int | None = None, leads: bool | None = None, **differs: Any) -> Members:
        given = {"least": self.range[0], "most": self.range[1], "processes": 2, "run_id": self.run, "leads": leads}
        made = Members(host=HOST, port=self.lead.store[1] if port is None else port, **{**given, **differs})
        self.members.append(made)
        return made

    def start(self, **differs: Any) -> Opening:
        return Opening(self.agent(**differs))

    def came(self) -> list[int]:
        """The numbers of those with which the lead has begun."""
        return [each.node for each in self._opened.result()]

    def until(self, *wanted: type) -> list[Any]:
        return heard(self.lead, *wanted)


class Opening:
    """The opening of an agent, in a thread of its own."""

    def __init__(self, members: Members, timeout_s: float = SOON_S) -> None:
        self.members, self._future = members, in_thread(lambda: members.open(timeout_s))

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self) -> list[Came]:
        came: list[Came] = self._future.result(SOON_S)
        return came


def heard(members: Members, *wanted: type) -> list[Any]:
    """The news, once there are such of each kind."""
    found, until = list[News](), time.monotonic() + SOON_S
    while [type(each) for each in found] != list(wanted):
        assert select.select([members], [], [], max(0.0, until - time.monotonic()))[0], f"only {found}"
        found += members.news()
    return found


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def cut(members: Members) -> None:
    """End its connection, without a word."""
    side_of(members).link_to(0).end.shutdown(socket.SHUT_RDWR)


def side_of(members: Members) -> Any:
    return members._side


def is_spare(members: Members) -> bool:
    return side_of(members) is not None and side_of(members).spare


@story
def two_meet_and_talk() -> None:
    with Nodes(2, 2) as nodes:
        other = nodes.start()
        assert nodes.came() == [0, 1]
        nodes.lead.say(1, "begin", at=3)  # which may come before open has returned there
        assert other.result() == []
        assert (nodes.lead.leads, other.members.leads, other.members.node) == (True, False, 1)
        other.members.say(0, "done", by=[4])
        assert heard(other.members, Said) == [Said(0, {"what": "begin", "at": 3})]
        assert nodes.until(Said) == [Said(1, {"what": "done", "by": [4]})]
        assert not select.select([nodes.lead, other.members], [], [], 0)[0]


@story
def one_who_left_or_was_lost_comes_back_as_another() -> None:
    with Nodes(2, 4) as nodes:
        first, second = nodes.start(), nodes.start()
        assert nodes.came() == [0, 1, 2] or nodes.until(Came)  # where the last call was too short for one
        first.result()
        second.result()
        cut(first.members)
        second.members.close()
        gone = nodes.until(Gone, Gone)
        lost, left = sorted(gone, key=lambda each: each.left)
        assert (lost.left, left.left) == (False, True)
        assert {lost.node, left.node} == {1, 2}
        assert lost.reason.endswith("is gone: its connection has ended") and left.reason.endswith("has left")
        again = nodes.start()
        (came,) = nodes.until(Came)
        assert again.result() == [] and came.node == again.members.node == 3 and came.processes == 2


@story
def a_newcomer_is_let_in_while_the_others_hear_nothing() -> None:
    with Nodes(2, 3) as nodes:
        other = nodes.start()
        nodes.came()
        other.result()
        newcomer = nodes.start()
        assert [each.node for each in nodes.until(Came)] == [2]
        newcomer.result()
        nodes.lead.say(2, "welcome")
        assert heard(newcomer.members, Said) and other.members.news() == []


@story
def a_spare_steps_in_at_once() -> None:
    with Nodes(2, 2) as nodes:
        one, two = nodes.start(), nodes.start()
        assert nodes.came() == [0, 1] or nodes.came() == [0, 2]
        wait_until(lambda: bool(one.done or two.done))
        taken, spare = (one, two) if one.done else (two, one)
        wait_until(lambda: is_spare(spare.members))
        cut(taken.members)
        began = time.monotonic()
        gone, came = nodes.until(Gone, Came)
        spare.result()
        assert time.monotonic() - began < SILENCE_S  # torch would drop the other one then, and form a round
        assert (gone.node, came.node) == (taken.members.node, spare.members.node)


@story
def a_spare_ends_well_with_the_run() -> None:
    with Nodes(1, 1) as nodes:
        assert nodes.came() == [0]
        spare = nodes.start()
        wait_until(lambda: is_spare(spare.members))
        nodes.lead.close()
        with pytest.raises(MembersError, match="has left") as raised:
            spare.result()
        assert raised.value.status == exits.DONE


@story
def a_lead_that_closes_is_no_loss_and_one_that_dies_is() -> None:
    with Nodes(3, 3) as nodes:
        one, two = nodes.start(), nodes.start()
        nodes.came()
        one.result()
        two.result()
        cut(one.members)
        assert heard(one.members, Gone) == [Gone(0, f"the lead ({HOST}) is gone: its connection has ended")]
        nodes.lead.say(two.members.node, "verdict", status=0)
        nodes.lead.close()
        said, gone = heard(two.members, Said, Gone)
        assert (said.message, gone.node, gone.left) == ({"what": "verdict", "status": 0}, 0, True)


@story
def too_few_are_told_so() -> None:
    nodes = Nodes.__new__(Nodes)
    nodes.range, nodes.run, nodes.members = (3, 4), "run", []
    nodes.lead = nodes.agent(0, True)
    opened = Opening(nodes.lead, 2.0)
    wait_until(lambda: nodes.lead.store[1] > 0)
    port, waits = nodes.lead.store[1], nodes.start()
    for each in (opened, waits):
        with pytest.raises(MembersError) as raised:
            each.result()
        text = (
            f"2 of at least 3 nodes came within 2 s: start the others with NNODES=3:4 MASTER_ADDR={HOST} MASTER_PORT="
        )
        assert str(raised.value) == f"{text}{port}, or ask for fewer" and raised.value.status == exits.RETRY
    with pytest.raises(MembersError, match=f"no lead at {HOST}:{port} .*refused") as raised:
        nodes.agent(leads=False).open(0.4)
    assert raised.value.status == exits.RETRY


@story
def who_does_not_fit_is_refused() -> None:
    with Nodes(2, 2, run="a") as nodes:
        port = nodes.lead.store[1]
        for differs, text in (
            ({"run_id": "b"}, f"{HOST}:{port} leads the run a, this is b: choose another MASTER_PORT"),
            ({"processes": 3}, "NPROC_PER_NODE=3, the lead 2: give all the same"),
            ({"most": 9}, "NNODES=2:9, the lead 2: give all the same"),
        ):
            with pytest.raises(MembersError) as raised:
                nodes.start(**differs).result()
            assert str(raised.value).endswith(text) and raised.value.status == exits.MISUSED
        with pytest.raises(MembersError, match=rf"cannot lead at {HOST}:{port} .*in use.*: choose another MASTER_PORT"):
            nodes.agent(leads=True).open(1.0)
        stranger = socket.create_connection((HOST, side_of(nodes.lead).links._listener.getsockname()[1]))
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(1) == b""
        stranger.close()
        fits = nodes.start()
        nodes.came()
        fits.result()
        assert nodes.lead.news() == []


@story
def what_listens_there_may_be_no_lead() -> None:
    with socket.create_server((HOST, 0)) as other:
        host, port = other.getsockname()
        with pytest.raises(MembersError, match=f"{host}:{port} is no lead of a run .*choose another MASTER_PORT"):
            Members(1, 2, host, port, 1, "run", leads=False).open(SOON_S)
        wait_until(lambda: f"ask {port}" not in {thread.name for thread in threading.enumerate()})


@story
def the_first_agent_on_the_host_leads() -> None:
    with Nodes(1, 1) as nodes:
        port = nodes.lead.store[1]
        nodes.came()
        nodes.lead.close()
        first = nodes.agent(port, least=2, most=2)
        opening = Opening(first)
        wait_until(lambda: first.leads)
        second = nodes.agent(port, least=2, most=2)
        second.open(SOON_S)
        assert [each.node for each in opening.result()] == [0, 1] and not second.leads


def is_in_round(rendezvous: Any) -> bool:
    """Whether the store has it among those of a round that is open still."""
    handler = rendezvous._handler
    holder = handler._state_holder
    return holder._token is not None and not holder._dirty and handler._this_node in holder.state.participants


def dies_while_all_meet(least: int, dead: Callable[[Any], bool]) -> None:
    """An agent says hello, is in a round until it is dead, and says no more."""
    from megacore.recovery.rendezvous import Rendezvous, ask_store

    with Nodes(least, least) as nodes:
        port, lead = nodes.lead.store[1], side_of(nodes.lead)
        store = ask_store(HOST, port, "megacore/lead")[0]
        link = Link(connected(HOST, lead.links._listener.getsockname()[1], time.monotonic() + 1), "lead")
        link.say("hello", name="dies", **lead.terms.told())
        ghost = Rendezvous(store, "run", least, False, "0", time.time() - time.monotonic(), lambda: dead(ghost))
        died = in_thread(ghost.join)
        others = [nodes.start() for _ in range(least - 2)]
        died.result(SOON_S)
        ghost.close()
        link.close()
        others.append(nodes.start())
        assert len(nodes.came()) == least and all(other.result() == [] for other in others)


@story
def an_agent_that_dies_before_all_have_met_costs_seconds() -> None:
    dies_while_all_meet(4, is_in_round)


@story
def an_agent_that_dies_when_all_have_met_costs_seconds() -> None:
    dies_while_all_meet(3, lambda ghost: False)


@story
def the_first_node_of_a_round_may_die_at_its_end() -> None:
    """torch makes it host a store that nothing here uses, and all others wait 60 s for its address."""
    from megacore.recovery.rendezvous import Rendezvous, host_store

    end = socket.create_server((HOST, 0))
    store = host_store(HOST, end.getsockname()[1], end.detach())
    clock = time.time() - time.monotonic()
    first = Rendezvous(store, "run", 2, True, "0", clock, lambda: is_in_round(first))
    second = Rendezvous(store, "run", 2, True, "1", clock, lambda: False)
    died, lived = in_thread(first.join), in_thread(second.join)
    made = lived.result(8)
    assert made is not None and made.nodes == 2 and died.result(8) is None


@story
def who_has_stood_itself_reads_before_it_judges() -> None:
    """A beat has come meanwhile, and lies there when it goes on."""
    ended = list[str]()

    def stands(_: Link, message: Any) -> None:
        time.sleep(1.5 * SILENCE_S)

    server = socket.create_server((HOST, 0))
    theirs = socket.create_connection(server.getsockname())
    ours, _ = server.accept()
    attends = Links(stands, lambda _, how: ended.append(how))
    attends.start(Link(ours, "it"))
    theirs.sendall(b'{"what": "said"}\n')
    time.sleep(SILENCE_S)
    theirs.sendall(b'{"what": "beat"}\n')
    time.sleep(SILENCE_S)
    assert not ended
    wait_until(lambda: bool(ended))
    assert ended == [f"has said nothing for {SILENCE_S:g} s"]
    attends.close()
    server.close()
    theirs.close()


BREAKS, MISSES, STANDS = "breaks", "misses", "stands"
"""The names of runs: the store does not answer, once; the others do not wait for the lead; none says that it lives."""


def goes_wrong_once(join: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    asked = list[str]()

    def joins(rendezvous: Any) -> Any:
        run = rendezvous._handler.get_run_id()
        asked.append(run)
        if run == BREAKS and asked.count(run) == 3:
            raise RendezvousConnectionError
        if run == MISSES and asked.count(run) == 1:
            rendezvous._handler._state_holder._backend._entered()
            time.sleep(2)
        made = join(rendezvous)
        if run == STANDS and asked.count(run) <= 2:
            rendezvous._handler._stop_heartbeats()
        return made

    return joins


@story
def a_round_without_the_lead_is_formed_again() -> None:
    with Nodes(2, 2, run=MISSES) as nodes:
        one, two = nodes.start(), nodes.start()
        assert len(nodes.came()) == 2
        wait_until(lambda: is_spare(one.members) or is_spare(two.members))


@story
def a_store_that_does_not_answer_is_asked_again() -> None:
    with Nodes(2, 3, run=BREAKS) as nodes:
        nodes.start().result()
        nodes.start().result()
        assert [each.node for each in nodes.until(Came)] == [2]


@story
def a_newcomer_is_let_in_where_all_others_have_stood() -> None:
    """torch drops them from their round, which is over then: nobody is in the next one but the newcomer."""
    with Nodes(2, 3, run=STANDS) as nodes:
        nodes.start().result()
        assert nodes.came() == [0, 1]
        from megacore.recovery.rendezvous import KEEP_ALIVE_S, KEEP_ALIVES

        time.sleep(KEEP_ALIVE_S * KEEP_ALIVES + 0.5)
        nodes.start().result()
        assert [each.node for each in nodes.until(Came)] == [2]


def killed(pipe: Connection, port: int, ahead_s: float) -> None:
    """A process that takes part, with a clock of its own, until it is killed."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(seconds=ahead_s)

    vars(dynamic_rendezvous)["datetime"] = Wrong
    members = Members(3, 3, HOST, port, 2, "run")
    members.open(SOON_S)
    pipe.send(members.node)
    signal.pause()


@story
def processes_that_die_or_stand_are_noticed_and_clocks_do_not_matter() -> None:
    context, pipes = forkserver(), list[Connection]()
    processes = []
    with Nodes(3, 3) as nodes:
        try:
            for ahead_s in (-3600.0, 3600.0):
                ours, theirs = context.Pipe()
                process = context.Process(target=killed, args=(theirs, nodes.lead.store[1], ahead_s), daemon=True)
                process.start()
                processes.append(process)
                pipes.append(ours)
            assert len(nodes.came()) == 3
            dead, stands = (pipe.recv() for pipe in pipes)
            os.kill(processes[1].pid or 0, signal.SIGSTOP)
            processes[0].kill()
            began = time.monotonic()
            (gone,) = nodes.until(Gone)
            assert gone.node == dead and time.monotonic() - began < SILENCE_S / 2
            (silent,) = nodes.until(Gone)
            assert silent.node == stands and silent.reason.endswith(f"has said nothing for {SILENCE_S:g} s")
        finally:
            for process in processes:
                process.kill()
                process.join()


def test_members(told: dict[str, Future[None]]) -> None:
    """One test, so that one worker alone tells all of them. They live by the clock, all at once: one that cores came
    too late for has another try, alone."""
    for name in [name for name, future in told.items() if future.exception(100)]:
        STORIES[name]()
