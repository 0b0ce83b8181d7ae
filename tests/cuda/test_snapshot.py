"""Copies of the state on fake CUDA: beside the steps; the host waits for nothing, the next update for them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from pool import TIMEOUT_S, forkserver

from megacore.control import Control
from megacore.models.registry import configure
from megacore.parallel.mesh import Mesh
from megacore.planning.trace.fake_cuda import DEVICE, DeviceWatch, fake_cuda, pretend
from megacore.recipe import load
from megacore.training import build
from megacore.training.check import Setup
from megacore.training.resume import Start
from megacore.training.save import Snapshot

NO_PLACE = torch.cuda.is_available() or sys.platform != "linux"
pytestmark = pytest.mark.skipif(NO_PLACE, reason="made for Linux without a GPU")
COPIES = frozenset(f"parallel/gradients/reduce.py:Gradients.{name}" for name in ("read", "read_weight"))


class Streams:
    """What is recorded, waited for and done on which stream, in its order."""

    def __init__(self) -> None:
        self.at, self.did, self.made = "steps", list[str](), 0

    def event(self, **options: object) -> Event:
        self.made += 1
        return Event(self, ("begun", "taken")[self.made - 1])

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.at = self.at, "beside"
        try:
            yield
        finally:
            self.at = before


class Event:
    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self._name = streams, name

    def record(self) -> None:
        self._streams.did.append(f"{self._name} recorded on {self._streams.at}")

    def wait(self) -> None:
        self._streams.did.append(f"{self._streams.at} waits for {self._name}")

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


def trainer(overrides: Sequence[str]) -> Any:
    """As a rank makes it, but for data, checkpoints and initial values."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as recipe:
        small = ["model.preset=llama-tiny", "data.sequence_length=32", "data.train=none"]
        config = load(recipe.name, [*small, *overrides])
    corpora: Any = SimpleNamespace(train=None, validation=None, identities=[], batches=lambda *arguments: MagicMock())
    setup = Setup(config, configure(config.model), corpora, Start())
    world = config.mesh.model_ranks * (config.mesh.dp or 1)
    with (
        patch.object(build, "load_initial_state", lambda *arguments: None),
        patch.object(build, "_saver", MagicMock()),
    ):
        return build.trainer_of(setup, Mesh.create(config.mesh.shape(world), DEVICE), Control.create(Mesh.single()))


def in_a_process(world: int, overrides: Sequence[str]) -> list[str]:
    """What :func:`traced` gives in a process that believes in a GPU."""
    context = forkserver()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, world, overrides), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S), f"no answer in {TIMEOUT_S} s"
        found: list[str] = ours.recv()
        return found
    finally:
        process.kill()
        process.join()


def _serve(answers: Connection, world: int, overrides: Sequence[str]) -> None:
    torch.set_num_threads(1)
    pretend()
    answers.send(traced(world, overrides))


def traced(world: int, overrides: Sequence[str]) -> list[str]:
    """What a save and the updates after it do on which stream."""
    streams = Streams()
    with fake_cuda(world, 0):
        run = trainer(overrides)
        with patch.multiple(torch.cuda, Event=streams.event, stream=streams.stream):
            snapshot = Snapshot(run.contents.state)
            read = run.train_step.optimizer.read_weight

            def noted(*arguments: Any) -> None:
                if not streams.did[-1].startswith("copies"):
                    streams.did.append(f"copies on {streams.at}")
                read(*arguments)

            run.train_step.optimizer.read_weight = noted
            with DeviceWatch({}, COPIES) as watch:
                snapshot.take()
                update = run.train_step.optimizer.store.update
                with patch.object(run.train_step.optimizer.store, "update", lambda *_: streams.did.append("update")):
                    one = torch.ones((), device=DEVICE)
                    run.train_step.optimizer.update(1e-3, one)
                    run.train_step.optimizer.update(1e-3, one)
            assert update and watch.downloaded.total() == sum(len(each.host) for each in snapshot.written)
    return streams.did


def test_a_copy_goes_beside_the_steps_and_the_next_update_waits_for_it() -> None:
    assert in_a_process(1, []) == [
        "begun recorded on steps",
        "beside waits for begun",
        "copies on beside",
        "taken recorded on beside",
        "steps waits for taken",
        "update",
        "update",
    ]


def test_what_takes_messages_to_read_is_copied_between_the_steps() -> None:
    """The messages of the next step would stand in one queue with those of the copy."""
    assert in_a_process(2, ["mesh.dp=2", "zero.shard=optimizer"])[1:4] == [
        "steps waits for begun",
        "copies on steps",
        "taken recorded on steps",
    ]
