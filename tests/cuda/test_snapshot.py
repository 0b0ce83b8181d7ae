"""Copies of the state that is saved, on a simulated GPU: beside the steps, in order with all that changes the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from ordered_gpu import MemoryLaunch
from orders import findings, left_out
from steps import CASES
from test_orders import log_of
from test_trace import in_a_process, pytestmark

from megacore.devices import DEVICES
from megacore.parallel.weights.layout import MeshShape
from megacore.planning.step_time import Cluster
from megacore.planning.trace.log import HOST, Wait
from megacore.planning.trace.timeline import Costs, beside, covered, play
from megacore.training.save import Snapshot
from megacore.training.trainer import Callback, Trainer

__all__ = ["pytestmark"]

COPY_S = 1e-3
"""Seconds that the copies take; the forward and backward after them take longer."""


class Saves(Callback):
    """Takes snapshots after the first step, and evaluates with averages then, where there are some."""

    def __init__(self, run: Trainer, count: int) -> None:
        self.snapshots = [Snapshot(run.contents) for _ in range(count)]

    def on_answers(self, run: Trainer, largest: Mapping[str, float]) -> None:
        if run.step == 1:
            for snapshot in self.snapshots:
                snapshot.take()
            if run.config.ema.decay is not None:
                with run.train_step.optimizer.averaged():
                    pass


@dataclass(frozen=True)
class Traced:
    """Two steps with snapshots between them.

    Args:
        found: What is not ordered.
        unneeded: What of the snapshots' order may be left out, and nothing is found.
        streams: The streams that copies run on.
        copied, held: Bytes that are copied, and those of the snapshots.
        waits: Who waits because of it.
        meanwhile: Seconds in which the stream of the steps works while copies run, which take :data:`COPY_S`.
    """

    found: list[str]
    unneeded: list[str]
    streams: set[str]
    copied: int
    held: int
    waits: set[str]
    meanwhile: float


def traced(name: str, count: int = 1) -> Traced:
    made = list[Saves]()

    def prepare(run: Trainer) -> None:
        made.append(Saves(run, count))
        run.callbacks = [*run.callbacks, *made]

    log: Sequence[Any] = log_of(CASES[name], 2, prepare)
    copies = [
        each for each in log if isinstance(each, MemoryLaunch) and each.crosses and "Gradients.read" in each.place
    ]
    copied = sum(each.moved for each in copies)
    device = replace(DEVICES["h100-80"], host=copied / COPY_S)
    times = Costs(Cluster(device, 989.4), MeshShape(dp=2))
    ran = play({0: log}, times).ran[0]
    copying, working = (
        covered(
            [(each.start, each.end) for each in ran if (each.launch in copies) == wanted and each.launch.stream in on]
        )
        for wanted, on in ((True, {each.stream for each in copies}), (False, {"main"}))
    )
    ours = ("megacore/training/save.py:Snapshot", "megacore/training/states/optimizer.py:Optimizer._wait_for_copies")
    return Traced(
        findings(log),
        [
            str(each.entry)
            for step in (1, 2)
            for each in left_out(log, step)
            if each.entry.place.startswith(ours) and not each.caught
        ],
        {each.stream for each in copies},
        copied,
        sum(host.nbytes for of in made[0].snapshots for each in of.written for host in each.host.values()),
        {each.stream for each in log if isinstance(each, Wait) and each.place.startswith(ours)},
        beside(copying, working),
    )


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["bf16", "averages"])
def test_a_copy_goes_beside_the_steps_and_the_next_change_of_the_state_waits_for_it(name: str) -> None:
    found: Traced = in_a_process(traced, name)
    assert (found.found, found.unneeded) == ([], [])
    (stream,) = found.streams
    assert found.waits == {stream, "main"} and stream not in ("main", HOST)
    assert found.copied == found.held > 0
    assert found.meanwhile > 0.1 * COPY_S or name == "averages"  # which take the place of the weights at once


@pytest.mark.in_turn(2, 1)
def test_a_change_of_the_state_waits_for_all_copies_of_it() -> None:
    """A checkpoint on disk and one in memory may be taken after the same step, each on a stream of its own."""
    found: Traced = in_a_process(traced, "bf16", 2)
    assert (found.found, found.unneeded) == ([], [])
    assert len(found.streams) == 2 and "main" not in found.streams
    assert found.copied == found.held > 0


@pytest.mark.in_turn(2, 1)
def test_what_takes_messages_to_read_is_copied_between_the_steps() -> None:
    """The messages of the next step would stand in one queue with those of the copy."""
    found: Traced = in_a_process(traced, "dp, optimizer")
    assert (found.found, found.streams, found.waits) == ([], {"main"}, {"main"})
    assert found.copied == found.held > 0
    assert found.meanwhile == 0
