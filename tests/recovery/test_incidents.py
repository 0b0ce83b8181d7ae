"""The incidents of a run: each is read as it was written, whatever has cut a line, and by whom more became known."""

import fcntl
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from megacore import incidents
from megacore.incidents import KINDS, Incident
from megacore.store.io.files import flock
from megacore.store.io.strict_json import StoreError

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("not_durable")]
KILLED = Incident("killed", "restart", "SIGKILL \x1b[2J\n", "restart 1 of 3", 1, 0, "host", 8, at=100.0, launch="life")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert incidents.read(tmp_path) == []
    written = [
        incidents.write(tmp_path / "run", replace(KILLED, kind=kind, samples=(48, 56) if n % 2 else None))
        for n, kind in enumerate(KINDS)
    ]
    assert incidents.read(tmp_path / "run") == written
    assert [each.number for each in written] == list(range(1, len(KINDS) + 1))
    lines = (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()
    assert len(lines) == len(KINDS) and json.loads(lines[0])["kind"] == "killed"


def test_what_becomes_known_later_is_added(tmp_path: Path) -> None:
    first = incidents.write(tmp_path, KILLED)
    second = incidents.write(tmp_path, replace(KILLED, step=6, at=110.0))
    told = incidents.write(tmp_path, Incident("straggler", step=6, at=111.0))
    before = (tmp_path / "incidents.jsonl").read_bytes()
    incidents.went_on(tmp_path, 4, 112.5)
    incidents.went_on(tmp_path, 9, 999.0)  # nothing is open any more
    assert (tmp_path / "incidents.jsonl").read_bytes().startswith(before)
    one, other, same = incidents.read(tmp_path)
    assert one == replace(first, recovered=112.5, steps_lost=3, seconds_lost=12.5)
    assert other == replace(second, recovered=112.5, steps_lost=1, seconds_lost=2.5)
    assert same == told
    assert incidents.summary([one, other]) == "2 incidents, 4 steps lost"
    assert incidents.summary([told]) == "1 incident, 0 steps lost"


def test_two_writers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is waited for that was stopped in its turn."""
    spikes = [Incident("spike", step=step) for step in range(40)]

    def writes(part: list[Incident]) -> None:
        for each in part:
            incidents.write(tmp_path, each)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(writes, (spikes[n::4] for n in range(4))))
    assert sorted(each.step or 0 for each in incidents.read(tmp_path)) == list(range(40))
    monkeypatch.setattr(incidents, "TURN_S", 0.05)
    with (tmp_path / "incidents.jsonl").open("rb") as file:
        assert flock(file, fcntl.LOCK_EX)
        incidents.write(tmp_path, KILLED)
    assert len(incidents.read(tmp_path)) == 41


def test_what_a_disk_does_not_take_is_told_once_and_written_later(tmp_path: Path) -> None:
    told = list[str]()
    writer = incidents.IncidentWriter(tmp_path, told.append)
    (tmp_path / "incidents.jsonl").mkdir()
    writer.write(KILLED)
    writer.went_on(4, 101.5)
    writer.write(replace(KILLED, step=9, at=103.0))
    assert len(told) == 1 and "incidents.jsonl" in told[0]
    (tmp_path / "incidents.jsonl").rmdir()
    writer.catch_up()
    writer.catch_up()
    killed, later = incidents.read(tmp_path)
    assert killed == replace(KILLED, number=1, recovered=101.5, steps_lost=3, seconds_lost=1.5)
    assert later == replace(KILLED, number=2, step=9, at=103.0)
    writer.write(KILLED)
    assert len(incidents.read(tmp_path)) == 3 and len(told) == 1


def test_a_cut_line_costs_itself_alone(tmp_path: Path) -> None:
    kept = incidents.write(tmp_path, KILLED)
    incidents.write(tmp_path, KILLED)
    path = tmp_path / "incidents.jsonl"
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole), 7):
        path.write_bytes(whole[:cut])
        assert incidents.read(tmp_path) == [kept]
        after = incidents.write(tmp_path, replace(KILLED, kind="raised"))
        incidents.went_on(tmp_path, 7, 104.0)
        want = [replace(each, recovered=104.0, steps_lost=0, seconds_lost=4.0) for each in (kept, after)]
        assert incidents.read(tmp_path) == want


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b'{"number": "1"}',
        b'{"number": 2}',
        b'{"number": 2, "recovered": 5.0}',
        b'{"number": 2, "kind": "tea"}',
        b'{"number": 2, "kind": "killed", "rank": [1]}',
        b"[" * 10000,
        b"\xff\xfe",
    ],
)
def test_what_is_no_incident_is_passed_over(tmp_path: Path, line: bytes) -> None:
    kept = incidents.write(tmp_path, KILLED)
    with (tmp_path / "incidents.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert incidents.read(tmp_path) == [kept]


def test_words_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    kept = incidents.write(tmp_path, KILLED)
    path = tmp_path / "incidents.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weather": "fine"}) + "\n")
    assert incidents.read(tmp_path) == [kept]


def test_what_is_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    run = tmp_path / "run"
    run.mkdir()
    (run / "incidents.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        incidents.write(run, KILLED)
    assert (tmp_path / "elsewhere").read_bytes() == b""
