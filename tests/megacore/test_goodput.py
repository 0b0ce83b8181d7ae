"""The formula of goodput, against runs that are simulated fault by fault."""

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from megacore.planning.goodput import (
    LEVELS,
    FaultCosts,
    FaultRates,
    best_interval,
    goodput,
    levels,
    useful,
)

COSTS = FaultCosts(
    notice=1800, detect=3, restart=60, load_memory=10, load_disk=90, copy=1, send=8, stall=4, publish=30, step=10
)
NODES = 8


@dataclass
class SimulatedRun:
    """A run of pairs of nodes that keep each other's memory: its clock, its steps, and its whole checkpoints."""

    faults: FaultRates
    costs: FaultCosts
    every: int
    disk_every: int
    chance: random.Random
    clock: float = 0.0
    step: int = 0
    memory: int = 0
    disk: int = 0
    coming: list[tuple[float, bool, int]] = field(default_factory=list)
    away: list[float] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.next_fault = self.chance.expovariate(NODES / self.faults.node_s)

    def share(self, count: int) -> float:
        for _ in range(count):
            while self._passes(self._step_s()):
                self.step += 1
                self._checkpoints()
            while not self._passes(self._recover()):
                pass
        return self.step * self.costs.step / self.clock

    def _step_s(self) -> float:
        """Return the seconds of the next step and of the checkpoints that end it."""
        self.away = [until for until in self.away if until > self.clock]
        speed = 1 - len(self.away) / NODES if self.faults.elastic else 1.0
        in_memory, on_disk = self._due(self.step + 1)
        return self.costs.step / speed + in_memory * self.costs.copy + on_disk * self.costs.stall

    def _due(self, step: int) -> tuple[bool, bool]:
        return bool(self.every) and step % self.every == 0, step % self.disk_every == 0

    def _checkpoints(self) -> None:
        in_memory, on_disk = self._due(self.step)
        self.coming += [(self.clock + self.costs.send, False, self.step)] * in_memory
        self.coming += [(self.clock + self.costs.publish, True, self.step)] * on_disk

    def _passes(self, seconds: float) -> bool:
        """Let time pass -> whether no fault broke in."""
        end = min(self.clock + seconds, self.next_fault)
        for when, on_disk, step in [each for each in self.coming if each[0] <= end]:
            self.coming.remove((when, on_disk, step))
            if on_disk:
                self.disk = step
            else:
                self.memory, self.lost = step, set()
        self.clock = end
        return end < self.next_fault

    def _recover(self) -> float:
        """Go back for a fault -> the seconds until the run goes on."""
        node, gone = self.chance.randrange(NODES), self.chance.random() < self.faults.hardware
        self.next_fault = self.clock + self.chance.expovariate(NODES / self.faults.node_s)
        self.coming.clear()
        if gone:
            self.lost.add(node)
            self.away = [*self.away, self.clock + self.faults.away_s][-NODES // 2 :]
        if not self.every or {node, node ^ 1} <= self.lost:
            self.memory = 0
        self.step = max(self.memory, self.disk)
        waits = 0.0 if self.faults.elastic else max(0.0, *self.away, self.clock) - self.clock
        load = self.costs.load_memory if self.memory else self.costs.load_disk
        return self.costs.detect + self.costs.restart + load + waits


FAULTS = {
    "rare": FaultRates(NODES * 7200, 0.78, 3600),
    "often": FaultRates(NODES * 2400, 0.78, 60),
    "mostly processes": FaultRates(NODES * 2400, 0.1, 600),
    "many at once": FaultRates(NODES * 600, 1.0, 60),
    "others wait": FaultRates(NODES * 3600, 0.5, 300, elastic=False),
}


@pytest.mark.in_turn(5)
@pytest.mark.in_turn(2)
@pytest.mark.quick
@pytest.mark.parametrize("every", [0, 1, 12])
@pytest.mark.parametrize("rates", FAULTS)
def test_the_formula_is_within_the_error_of_simulated_runs(rates: str, every: int) -> None:
    faults = FAULTS[rates]
    for costs in (COSTS, replace(COSTS, load_disk=900, stall=40, publish=200)):
        best = goodput(NODES, faults, costs, every).interval
        disk_every = min(max(1, round(best / costs.step / max(every, 1))) * max(every, 1), 120)
        expected = goodput(NODES, faults, costs, every, disk_every * costs.step).share
        shares = [
            SimulatedRun(faults, costs, every, disk_every, random.Random(f"{rates} {every} {number}")).share(30)
            for number in range(16)
        ]
        error = statistics.stdev(shares) / 4
        assert abs(statistics.mean(shares) - expected) < 4 * error + 0.004, (expected, statistics.mean(shares), error)


def intervals() -> Iterator[tuple[float, float]]:
    for rate in (1e-6, 1e-4, 1e-2):
        for stall in (0.5, 30.0):
            yield rate, stall


@pytest.mark.quick
def test_no_other_interval_has_more_goodput() -> None:
    """Daly's is an approximation: it is a thousandth of the goodput away from the best, at the most."""
    for rate, stall in intervals():
        best = best_interval(rate, stall)
        most = useful(rate, best, stall, 0.0, 0.0)
        for other in (0.2, 0.5, 0.7, 0.9, 1.1, 1.5, 2.0, 5.0):
            assert useful(rate, best * other, stall, 0.0, 0.0) < most * 1.001, (rate, stall, other)
    disk = goodput(NODES, FAULTS["rare"], replace(COSTS, publish=0.0))
    assert disk.interval == best_interval(1 / 7200, COSTS.stall)


@pytest.mark.quick
def test_checkpoints_in_memory_take_no_more_than_their_share() -> None:
    for copy in (0.001, 0.3, 4.0):
        costs = replace(COSTS, copy=copy, send=0.0)
        every = costs.every(0.01)
        assert copy <= 0.01 * every * costs.step
        assert every == 1 or copy > 0.01 * (every - 1) * costs.step
    assert replace(COSTS, copy=0.001, send=45.0).every(0.01) == 5


@pytest.mark.quick
def test_what_goes_on_from_disk() -> None:
    """It is each fault where nothing is in memory, each lost node where there is one, and else two that are lost."""
    faults = FaultRates(1e6, 0.5, 0.0)
    assert goodput(8, faults, COSTS).from_disk == 1.0
    assert goodput(1, faults, COSTS, 5).from_disk == 0.5
    assert goodput(8, replace(faults, together=0.02), COSTS, 5).from_disk == 0.02
    assert goodput(8, faults, COSTS, 5).from_disk == pytest.approx(0.5 * 0.5 * (3 + 60 + 50) / 1e6, rel=1e-3)


@pytest.mark.quick
def test_each_level_is_worth_more_than_the_one_before() -> None:
    for nodes in (512, 2048):
        shares = [each.share for _, each in levels(nodes, FaultRates(), COSTS, COSTS.every(0.01))]
        assert all(better > worse for worse, better in pairwise(shares)), (nodes, shares)
    assert [name for name, _ in levels(8, FaultRates(), COSTS, 1)] == list(LEVELS)
    assert all(each.share < 1e-9 for _, each in levels(8, FaultRates(1e-3), COSTS, 1))
