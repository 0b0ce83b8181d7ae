"""The share of a run's time that trains, under faults: a formula, and a simulation to hold it against. No torch.

A node is faulty at random, after a mean time that does not change (exponentially). Some faults take the node away,
until another takes its place; after the others its processes are started again. A fault is got over in place, which
costs seconds and the steps since the last ones that are kept, or all ranks start again from the last checkpoint.

Between checkpoints there is a best time. That of Young (1974, doi 10.1145/361147.361115) and Daly (2006, doi
10.1016/j.future.2004.11.016) is an approximation for rare faults; here is the exact one for faults at random: with a
rate r of what ends in a restart, and checkpoints that stall the run for s seconds and are whole p seconds later, the
goodput of t seconds of work for each is r t exp(-r (R + p)) / (exp(r (t + s)) - 1), where a restart takes R. The best
t solves r t = 1 - exp(-r (t + s)), whatever R and p are.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megacore.plan.survival import PeerCopies, Survival

DAY_S = 86400.0
LLAMA_3 = 2048 * 54 * DAY_S / 419
"""Mean seconds from one fault of a node of 8 GPUs to the next: Llama 3's 16,384 GPUs were interrupted unexpectedly 419
times in 54 days (arXiv 2407.21783, 3.3.4): each node after 264 days."""
HARDWARE = 0.78
"""The share of these that was hardware, confirmed or suspected."""


def per_device(percent: float, per_node: int) -> float:
    """Return the mean seconds from one fault of a node to the next, if so many percent of all devices fail in a day."""
    return DAY_S / (percent / 100) / per_node


@dataclass(frozen=True)
class FaultRates:
    """The faults of nodes.

    Args:
        node_s: Mean seconds from one fault of a node to the next.
        hardware: The share of faults that take the node away.
        away_s: Seconds until another node takes its place.
        apart: Whether a simulated fault waits until the run has got over the last one and all nodes are there.
    """

    node_s: float = LLAMA_3
    hardware: float = HARDWARE
    away_s: float = 600.0
    apart: bool = False


@dataclass(frozen=True)
class FaultCosts:
    """Seconds that faults and checkpoints cost.

    Args:
        notice: Seconds until a person has seen that the run has ended, and has started it again.
        detect: Seconds until the other ranks know of a fault.
        restart: Seconds of a restart of all ranks, the loading of a checkpoint included.
        rebuild: Seconds in which living ranks make their groups anew and a newcomer gets its state.
        stall: Seconds that training stands for a checkpoint.
        publish: Seconds until that checkpoint is whole, with training going on.
        step: Seconds of a step.
    """

    notice: float
    detect: float
    restart: float
    rebuild: float
    stall: float
    publish: float
    step: float


@dataclass(frozen=True)
class Protection:
    """A level of protection, as it acts on one run.

    Args:
        name: The level.
        restart_s: Seconds of a restart from disk, from the fault to the first step.
        survival: The places of its images; None where nothing is got over in place.
        in_place_s: Seconds of a recovery in place, without the steps that are done again.
        copy_every: Steps from one copy to the next.
        slowed: The share of the time that copies take.
        replica: Nodes of one data parallel replica, a part of one perhaps; all, where the run needs all.
        spares: Warm nodes that step in.
    """

    name: str
    restart_s: float
    survival: Survival | None
    in_place_s: float
    copy_every: int
    slowed: float
    replica: float
    spares: int = 0


@dataclass(frozen=True)
class Goodput:
    """The goodput of a level.

    Args:
        protection: The level.
        interval: Seconds of training from one checkpoint to the next.
        share: The share of the time of all nodes, spares included, that trains.
        on_disk: The share of faults that end in a restart from disk.
    """

    protection: Protection
    interval: float
    share: float
    on_disk: float


LEVELS = ("by hand", "by itself, from disk", "in place, from replicas", "in place, and copies", "with spares")
MOST_SPARES = 256


def protections(
    costs: FaultCosts, bare: Survival, copied: Survival, copies: PeerCopies | None, replica: float
) -> list[Protection]:
    """Return the levels of protection of a run, each with what those before it have; spares are to be chosen.

    Args:
        costs: Seconds that things cost.
        bare: The places of its images, without copies.
        copied: The places of its images, with copies.
        copies: The cost of these, if there are any.
        replica: Nodes that hold one data parallel replica.
    """
    nodes, back = bare.nodes, costs.detect + costs.restart
    every, slowed = (copies.every, copies.seconds / (copies.every * costs.step)) if copies else (1, 0.0)
    hand, itself, in_place, kept, spared = LEVELS
    with_copies = Protection(kept, back, copied, costs.detect + costs.rebuild, every, slowed, replica)
    return [
        Protection(hand, costs.notice + costs.restart, None, 0.0, 1, 0.0, nodes),
        Protection(itself, back, None, 0.0, 1, 0.0, nodes),
        replace(with_copies, name=in_place, survival=bare, copy_every=1, slowed=0.0),
        with_copies,
        replace(with_copies, name=spared),
    ]


# -- the formula


def best_interval(rate: float, stall: float) -> float:
    """Return the seconds of work from one checkpoint to the next at which most of the time is goodput, exactly.

    Args:
        rate: Faults a second that end in a restart from the last checkpoint.
        stall: Seconds that the run stands for a checkpoint.
    """
    low, high = 0.0, 1.0
    for _ in range(60):  # as exact as a float is: the difference grows with x
        x = (low + high) / 2
        low, high = (x, high) if x + math.expm1(-(x + rate * stall)) < 0 else (low, x)
    return high / rate


def young(rate: float, stall: float) -> float:
    """Return Young's approximation to :func:`best_interval`."""
    return math.sqrt(2 * stall / rate)


def daly(rate: float, stall: float) -> float:
    """Return Daly's approximation to :func:`best_interval`, of a higher order."""
    share = stall * rate / 2
    return young(rate, stall) * (1 + math.sqrt(share) / 3 + share / 9) - stall if share < 1 else 1 / rate


def goodput(level: Protection, nodes: int, faults: FaultRates, costs: FaultCosts, interval: float = 0.0) -> Goodput:
    """Return the goodput that is expected of a level.

    Args:
        level: The level.
        nodes: Nodes that train where none lacks.
        faults: Their faults.
        costs: The costs.
        interval: Seconds of training from one checkpoint to the next; 0: the best.
    """
    rate = nodes / faults.node_s
    to_disk = rate * _on_disk(level, nodes, faults)
    in_place = rate - to_disk
    held_up = _again_s(level, faults, costs) + level.in_place_s
    # Seconds in place pass while nothing is done; what ends in a restart may befall the run in them too.
    undisturbed = math.exp(-rate * held_up)
    through = undisturbed and undisturbed / (1 - in_place / rate * -math.expm1(-rate * held_up))
    ended = to_disk + in_place * (1 - through)
    least = max(costs.step, costs.publish - costs.stall)
    interval = interval or max(best_interval(ended, costs.stall), least)
    segment = interval + costs.stall
    restart = _restart_s(level, nodes, faults, rate)
    trained = interval * math.exp(-ended * costs.publish) / math.expm1(ended * segment) if ended * segment < 700 else 0
    share = trained / (1 / to_disk + restart) * (1 - level.slowed)
    return Goodput(
        level, interval, share * _speed(level, nodes, faults) * nodes / (nodes + level.spares), to_disk / rate
    )


def _on_disk(level: Protection, nodes: int, faults: FaultRates) -> float:
    """Return the share of faults that end in a restart from disk: all, where nothing is got over in place; else those
    of node 0, which the others meet at, and of what nobody else has, and of a node whose partner is not yet back."""
    where = level.survival
    if where is None:
        return 1.0
    twice = -math.expm1(-where.partners * level.in_place_s / faults.node_s * faults.hardware)
    kept = max(where.nodes_kept - 1 / nodes, 0.0)
    return 1 - faults.hardware * kept * (1 - twice) - (1 - faults.hardware) * where.ranks_kept


def _again_s(level: Protection, faults: FaultRates, costs: FaultCosts) -> float:
    """Return the mean seconds of steps that are done again after a recovery in place: half of a step where replicas
    live, else half of those from one copy to the next."""
    where = level.survival
    if where is None:
        return 0.0
    kinds = (
        (faults.hardware, where.nodes_kept, where.nodes_with_replicas),
        (1 - faults.hardware, where.ranks_kept, where.ranks_with_replicas),
    )
    kept = sum(share * all_of_them for share, all_of_them, _ in kinds) or 1.0
    copied = sum(share * max(each - with_replicas, 0.0) for share, each, with_replicas in kinds)
    return costs.step / 2 * (1 + (level.copy_every - 1) * copied / kept)


def _restart_s(level: Protection, nodes: int, faults: FaultRates, rate: float) -> float:
    """Return the mean seconds from a fault until all ranks have started again, which they begin anew with each fault.

    A run that needs all of its nodes waits until none lacks: for a busy period of a queue that serves all at once.
    """
    waits = 0.0
    if level.replica == nodes and not level.spares:
        leaving = rate * faults.hardware
        waits = faults.hardware * (math.expm1(min(leaving * faults.away_s, 700.0)) / leaving)
    through = math.exp(-rate * level.restart_s)
    return waits + (1 - through) / through * (1 / rate + waits) if through else math.inf


def _speed(level: Protection, nodes: int, faults: FaultRates) -> float:
    """Return the mean speed beside that of all nodes: as many lack as faults come while one is away (Poisson)."""
    if level.survival is None:
        return 1.0
    lacking = nodes / faults.node_s * faults.hardware * faults.away_s
    return sum(chance * speed(level, nodes, gone) for gone, chance in poisson(lacking))


def speed(level: Protection, nodes: int, gone: int) -> float:
    """Return the speed where some nodes are gone: that of the whole replicas that the others, and spares, make up."""
    whole = math.floor(max(nodes + level.spares - gone, 0) / level.replica + 1e-9)
    return min(whole * level.replica / nodes, 1.0)


def poisson(mean: float) -> Iterator[tuple[int, float]]:
    """Yield numbers and their chances, but for those that nobody will see."""
    spread = 8 * math.sqrt(mean) + 8
    for n in range(max(0, int(mean - spread)), int(mean + spread) + 1):
        yield n, math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) if mean else float(n == 0)


def with_best_spares(level: Protection, nodes: int, faults: FaultRates, costs: FaultCosts) -> Goodput:
    """Return the goodput of a level with the number of spares that makes most of all nodes, spares included."""
    most = min(MOST_SPARES, nodes)
    return max(
        (goodput(replace(level, spares=spares), nodes, faults, costs) for spares in range(most + 1)),
        key=lambda each: each.share,
    )


# -- the simulation


@dataclass(frozen=True)
class Simulated:
    """The goodput of simulated runs, and the standard error of their mean."""

    share: float
    error: float


RUNS = 24
MOST_FAULTS = 10
"""Faults of a simulated run over those that are asked for: so many more may break into its recoveries. Where they come
faster than a level recovers, a run would never see the end of one."""


def simulate(
    level: Protection,
    nodes: int,
    faults: FaultRates,
    costs: FaultCosts,
    interval: float,
    count: int = 400,
    seed: int = 0,
) -> Simulated:
    """Simulate some runs, fault by fault, with the nodes that hold what, those that are away, and the steps.

    Args:
        level: The level.
        nodes: Nodes that train where none lacks.
        faults: Their faults.
        costs: The costs.
        interval: Seconds of training from one checkpoint to the next.
        count: Faults of each run, without those that break into recoveries.
        seed: The seed of all chance.
    """
    shares = [
        _FaultyRun(level, nodes, faults, costs, interval, random.Random(f"{seed} {number}")).share(count)
        for number in range(RUNS)
    ]
    mean = sum(shares) / RUNS
    return Simulated(mean, math.sqrt(sum((share - mean) ** 2 for share in shares) / (RUNS - 1) / RUNS))


class _FaultyRun:
    """A run: its clock, its place in seconds of training and of stalls at full speed, and its last whole checkpoint."""

    def __init__(
        self,
        level: Protection,
        nodes: int,
        faults: FaultRates,
        costs: FaultCosts,
        interval: float,
        chance: random.Random,
    ) -> None:
        self.level, self.nodes, self.faults, self.costs, self.chance = level, nodes, faults, costs, chance
        self.interval, self.segment = interval, interval + costs.stall
        self.clock, self.place, self.kept, self.away = 0.0, 0.0, 0, list[float]()
        self.left = 0
        """Faults that are still to come."""

    def share(self, count: int) -> float:
        self.left = MOST_FAULTS * count
        for _ in range(count):
            if self.left <= 0:
                break
            if self.faults.apart:
                self._train(max(self.away, default=self.clock))
            self._train(self.clock + self.chance.expovariate(self.nodes / self.faults.node_s))
            self._recover()
        trained = self.place * self.interval / self.segment * (1 - self.level.slowed)
        return trained / self.clock * self.nodes / (self.nodes + self.level.spares)

    def _train(self, until: float) -> None:
        while self.clock < until:
            while self.away and self.away[0] <= self.clock:
                heapq.heappop(self.away)
            end = min(until, self.away[0]) if self.away else until
            self.place += (end - self.clock) * self._speed()
            self.clock = end
        whole = math.floor((self.place - self.costs.publish) / self.segment)
        self.kept = max(self.kept, whole)

    def _speed(self) -> float:
        return 1.0 if self.level.survival is None else speed(self.level, self.nodes, len(self.away))

    def _strike(self) -> tuple[int, bool]:
        """Draw a fault: the node or, of one that it outlives, a rank; and whether the node is gone."""
        self.left -= 1
        gone = self.chance.random() < self.faults.hardware
        if gone:
            heapq.heappush(self.away, self.clock + self.faults.away_s)
            return self.chance.randrange(self.nodes), True
        where = self.level.survival
        return self.chance.randrange(len(where.alike) if where else self.nodes), False

    def _recover(self) -> None:
        where, ended, again = self.level.survival, set[int](), 0.0
        struck, gone = self._strike()
        while where is not None:
            if gone:
                ended.add(struck)
                steps = self.level.copy_every if where.one_node[struck] else 1
                lost = struck == 0 or where.loses(ended)
            else:
                alone = len(where.alike[struck]) == 1
                steps = self.level.copy_every if alone else 1
                lost = alone and struck not in where.copies
            again = max(again, self.place % (steps * self.costs.step))
            if lost or self.left <= 0:
                break
            if (left := self._passed(self.level.in_place_s)) is None:
                self.place -= again
                return
            struck, gone = left
        while self._passed(self._restart_s()) is not None and self.left > 0:
            pass
        self.place = self.kept * self.segment

    def _restart_s(self) -> float:
        """Return the seconds until the run goes on from disk, which it does when it has the nodes that it needs."""
        waits = 0.0
        if self.level.replica == self.nodes and len(self.away) > self.level.spares:
            waits = sorted(self.away)[len(self.away) - self.level.spares - 1] - self.clock
        return max(waits, 0.0) + self.level.restart_s

    def _passed(self, seconds: float) -> tuple[int, bool] | None:
        """Let time pass in which nothing is trained -> the fault that breaks in, if one does."""
        fault = math.inf if self.faults.apart else self.chance.expovariate(self.nodes / self.faults.node_s)
        self.clock += min(fault, seconds)
        while self.away and self.away[0] <= self.clock:
            heapq.heappop(self.away)
        return self._strike() if fault < seconds else None


def curves(
    levels: Sequence[Protection], sizes: Sequence[int], faults: FaultRates, costs: FaultCosts
) -> Iterator[tuple[str, list[float]]]:
    """Yield each level and its goodput on numbers of nodes, with what holds on the run's own: a share of its nodes that
    may end, a replica's nodes and all costs stay.

    Args:
        levels: The levels of the run; the last one with the best number of spares.
        sizes: The numbers of nodes.
        faults: Their faults.
        costs: The costs.
    """
    for level in levels:
        whole = level.survival is None
        shares = list[float]()
        for nodes in sizes:
            here = replace(level, replica=nodes if whole else level.replica)
            best = with_best_spares if level.name == LEVELS[-1] else goodput
            shares.append(best(here, nodes, faults, costs).share)
        yield level.name, shares
