"""A rank tells its agent where it is, by a callback that waits for nothing."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine import train, write_recipe

from megacore.outcome import AGENT, rank_file
from megacore.recovery import flight_recorder
from megacore.recovery.beats import Reading, read
from megacore.recovery.protection import Beats


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The agent's."""
    monkeypatch.setenv(AGENT, str(tmp_path))
    return tmp_path


def seen(folder: Path) -> Reading:
    found = read(rank_file(folder, "beat", os.getpid()))
    assert found is not None
    return found


def test_a_run_tells_where_it_is(folder: Path, not_durable: None) -> None:
    class Look(Beats):
        def on_phase(self, run: Any, phase: Any) -> None:
            super().on_phase(run, phase)
            told.append((phase, seen(folder)))

    told = list[tuple[str, Reading]]()
    beats = Look()
    assert seen(folder).phase == "start"
    overrides = [f"out={folder / 'run'}", "train.steps=4", "evaluate.every=2", "checkpoint.every=2"]
    train(write_recipe(folder), overrides, callbacks=[beats])
    for phase, reading in told:
        assert (reading.phase, reading.device) == (phase, -1)
        assert reading.step - max(reading.done, 0) == (phase in ("data", "forward", "backward", "reduce", "update")), (
            phase
        )
    assert {phase for phase, _ in told} > {"data", "forward", "backward", "reduce", "update", "save", "evaluate", "end"}
    last = seen(folder)
    assert (last.step, last.done, last.phase) == (4, 4, "end") and 0 < last.slowest < 60 and last.longest > 0
    assert last.busy["forward"] > 0


def test_where_no_agent_is_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT, raising=False)
    beats, run = Beats(), SimpleNamespace(step=1)
    for call in beats.on_phase, beats.on_step:
        call(run, "data")  # type: ignore[arg-type]
    beats.on_step_begin(run)  # type: ignore[arg-type]


def test_an_agent_without_room_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGENT, str(tmp_path / "gone"))
    Beats().on_phase(SimpleNamespace(step=1), "data")  # type: ignore[arg-type]


def test_a_device_is_asked_how_far_it_is_and_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the host waits for it, for room to record an event as well."""
    marks, asked, told = list[Mock](), list[Any](), list[Any]()

    def event() -> Mock:
        mark = Mock(spec=["record", "query"])  # nothing else may be called
        mark.query.return_value = True  # torch's say so before they are recorded

        def record() -> None:
            told.append(asked[0]())
            mark.query.return_value = False

        mark.record.side_effect = record
        marks.append(mark)
        return mark

    monkeypatch.setattr(flight_recorder, "answer", lambda folder, step: asked.append(step))
    monkeypatch.setattr("megacore.recovery.protection.answer", flight_recorder.answer)
    monkeypatch.setattr(torch.cuda, "Event", event)
    beats, run = Beats(), SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cuda", 0)), step=6)
    done = list[int]()
    for step in range(7, 12):
        beats.on_phase(run, "data")  # type: ignore[arg-type]
        run.step = step
        beats.on_step_begin(run)  # type: ignore[arg-type]
        beats.on_phase(run, "forward")  # type: ignore[arg-type]
        beats.on_step(run, None)  # type: ignore[arg-type]
        assert seen(folder).done == step and [mark.record.call_count for mark in marks] == [1] * len(marks)
        done.append(seen(folder).device)
        if step == 9:
            assert asked[0]() is None and told == [None] * 9
            for mark in marks[:7]:  # until the next step has begun
                mark.query.return_value = True
    assert done == [6, 6, 6, 8, 8] and asked[0]() == (9, 1, "data")
    marks[7].query.return_value = True
    assert asked[0]() == (9, 2, "forward")
    beats.on_phase(run, "end")  # type: ignore[arg-type]
    assert len(marks) == 15  # a device with an error would raise another one
