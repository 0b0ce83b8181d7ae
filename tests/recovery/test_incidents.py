"""The incidents of a run: each is read as it was written, whatever has cut a line, and by whom more became known."""

from __future__ import annotations

import fcntl
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megacore.recovery import incidents
from megacore.recovery.events import KINDS, Event
from megacore.recovery.policy import Budgets, Decision, decide
from megacore.store.lock import flock
from megacore.store.strict_json import StoreError

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("not_durable")]
RESTART = Decision("restart", "restart 1 of 3", 1, 0)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert incidents.read(tmp_path) == []
    events = [
        Event(kind, 1, 0, 7, "forward", "SIGKILL \x1b[2J\n", 1.5, (48, 56) if n % 2 else None)
        for n, kind in enumerate(KINDS)
    ]
    written = [
        incidents.write(tmp_path / "run", event, decide(event, (), Budgets()), "life", 0.25 * n)
        for n, event in enumerate(events)
    ]
    assert incidents.read(tmp_path / "run") == written
    assert [each.number for each in written] == list(range(1, len(KINDS) + 1))
    lines = (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()
    assert len(lines) == len(KINDS)
    assert json.loads(lines[0])["event"]["kind"] == "killed" and json.loads(lines[0])["decision"]["action"] == "replace"


def test_what_becomes_known_later_is_added(tmp_path: Path) -> None:
    first = incidents.write(tmp_path, Event("killed", 1, 0, 8, at=100.0), RESTART, "life")
    second = incidents.write(tmp_path, Event("hung", 0, 0, 6, at=110.0), RESTART, "life")
    told = incidents.write(tmp_path, Event("straggler", 0, 0, 6, at=111.0), Decision("tell", "slow"), "life")
    before = (tmp_path / "incidents.jsonl").read_bytes()
    incidents.went_on(tmp_path, 4, 112.5)
    incidents.went_on(tmp_path, 9, 999.0)  # nothing is open any more
    assert (tmp_path / "incidents.jsonl").read_bytes().startswith(before)
    one, other, same = incidents.read(tmp_path)
    assert (one.event, one.recovered, one.steps_lost, one.seconds_lost) == (first.event, 112.5, 3, 12.5)
    assert (other.event, other.recovered, other.steps_lost, other.seconds_lost) == (second.event, 112.5, 1, 2.5)
    assert same == told
    assert incidents.summary([one, other]) == "2 incidents, 4 steps lost"
    assert incidents.summary([told]) == "1 incident, 0 steps lost"


def test_two_writers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is waited for that was stopped in its turn."""
    events = [Event("spike", step=step) for step in range(40)]

    def writes(part: list[Event]) -> None:
        for event in part:
            incidents.write(tmp_path, event, Decision("tell", "told"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(writes, (events[n::4] for n in range(4))))
    assert sorted(each.event.step or 0 for each in incidents.read(tmp_path)) == list(range(40))
    monkeypatch.setattr(incidents, "TURN_S", 0.05)
    with (tmp_path / "incidents.jsonl").open("rb") as file:
        assert flock(file, fcntl.LOCK_EX)
        incidents.write(tmp_path, Event("killed"), RESTART)
    assert len(incidents.read(tmp_path)) == 41


def test_what_a_disk_does_not_take_is_told_once_and_written_later(tmp_path: Path) -> None:
    told = list[str]()
    writer = incidents.IncidentWriter(tmp_path, told.append)
    (tmp_path / "incidents.jsonl").mkdir()
    assert writer.write(Event("killed", 1, 0, 8, at=1.0), RESTART, "life").number == 0
    writer.went_on(4, 2.5)
    assert writer.write(Event("hung", 0, 0, 9, at=3.0), RESTART, "life").number == 0
    assert len(told) == 1 and "incidents.jsonl" in told[0]
    (tmp_path / "incidents.jsonl").rmdir()
    writer.catch_up()
    writer.catch_up()
    killed, hung = incidents.read(tmp_path)
    assert (killed.number, killed.event.kind, killed.life, killed.recovered) == (1, "killed", "life", 2.5)
    assert (killed.steps_lost, killed.seconds_lost) == (3, 1.5)
    assert (hung.number, hung.event.kind, hung.recovered) == (2, "hung", None)
    assert writer.write(Event("raised", 0, 0, 9, at=4.0), RESTART, "life").number == 3 and len(told) == 1


def test_a_cut_line_costs_itself_alone(tmp_path: Path) -> None:
    kept = incidents.write(tmp_path, Event("killed", at=1.0), RESTART, "life")
    incidents.write(tmp_path, Event("hung", at=2.0), RESTART, "life")
    path = tmp_path / "incidents.jsonl"
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole), 7):
        path.write_bytes(whole[:cut])
        assert incidents.read(tmp_path) == [kept]
        after = incidents.write(tmp_path, Event("raised", at=3.0), RESTART, "life")
        incidents.recovered(tmp_path, after.number, 4.0, 0, 1.0)
        assert [each.event.kind for each in incidents.read(tmp_path)] == ["killed", "raised"]
        assert incidents.read(tmp_path)[1].recovered == 4.0


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b'{"number": "1"}',
        b'{"number": 2}',
        b'{"number": 2, "recovered": 5.0}',
        b'{"number": 2, "event": {"kind": "tea"}, "decision": {"action": "restart", "reason": ""}}',
        b'{"number": 2, "event": {"kind": "killed", "rank": [1]}, "decision": {"action": "restart", "reason": ""}}',
        b"[" * 10000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_incident_is_passed_over(tmp_path: Path, line: bytes) -> None:
    kept = incidents.write(tmp_path, Event("killed"), RESTART, "life")
    with (tmp_path / "incidents.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert incidents.read(tmp_path) == [kept]


def test_words_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    kept = incidents.write(tmp_path, Event("killed"), RESTART, "life")
    path = tmp_path / "incidents.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weather": "fine"}) + "\n")
    assert incidents.read(tmp_path) == [kept]


def test_what_is_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    run = tmp_path / "run"
    run.mkdir()
    (run / "incidents.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        incidents.write(run, Event("killed"), RESTART, "life")
    assert (tmp_path / "elsewhere").read_bytes() == b""
