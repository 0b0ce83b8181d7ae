"""Schedules made for the costs of a pipeline, within the bytes that its stages have room for. No torch.

A list scheduler makes the rows: at each time the stage that can act first runs what comes first by a few rules, as in
the automatic schedules of Qi et al. (2023, arXiv 2401.10241, section 3). Each set of rules makes a schedule, and the
shortest one is kept, or the shortest of those with names where no set makes a shorter one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from megacore.parallel.enum_errors import Placement
from megacore.parallel.pipeline.schedules import Action, Costs, Kind, Schedule, simulate
from megacore.parallel.virtual_stages import stage_of, virtual_stage

_ROUNDING = 1 + 1e-9
"""The factor up to which sums of the same bytes, or of the same times, are equal."""


class Rules(NamedTuple):
    """What a stage runs first of what it could run: forwards and backwards in turn, and weight gradients where it would
    wait.

    Args:
        group: Microbatches that go through all chunks of a stage before others do.
        patience: The share of a weight gradient that a stage rather waits for what is on its way.
        ahead: Chunks of microbatches that a stage holds at the most, over those that 1F1B has there.
    """

    group: int
    patience: float
    ahead: float


def rules(stages: int, chunks: int, microbatches: int) -> Iterator[Rules]:
    """Yield the rules that are tried."""
    groups = {1, stages, microbatches} if chunks > 1 else {microbatches}
    yield from (Rules(*each) for each in product(sorted(groups), (0.0, 0.5, 1.0), (math.inf, 1.5)))


def fits(schedule: Schedule, costs: Costs, room: Sequence[float], placement: Placement = "loop") -> bool:
    """Return whether each stage has room for what it holds, as the simulator counts it."""
    peaks = simulate(schedule, costs, placement).peaks
    return all(sum(held) <= most * _ROUNDING for held, most in zip(peaks, room, strict=True))


def search(
    costs: Costs,
    microbatches: int,
    room: Sequence[float],
    late: bool,
    placement: Placement = "loop",
    known: Iterable[Schedule] = (),
) -> Schedule | None:
    """Return the shortest schedule that is found; None where no stage, or not each, has room for a microbatch.

    Args:
        costs: Of each stage, those of each chunk.
        room: The bytes of each stage.
        late: Whether weight gradients come by themselves.
        known: Schedules of the same actions: what is returned is no longer than any of them that fits.
    """
    sizes = len(costs), len(costs[0]), microbatches
    found = [each for each in known if fits(each, costs, room, placement)]
    for each in rules(*sizes):
        made = _Listing(costs, microbatches, room, late, placement, each).rows()
        if made is not None:
            found.append(made)
    best, least = None, math.inf
    for schedule in found:
        seconds = simulate(schedule, costs, placement).total
        if seconds * _ROUNDING < least:
            best, least = schedule, seconds
    return best


@dataclass
class _StageSoFar:
    """What a stage has done.

    Args:
        chunks: Its virtual stages.
        kept, waiting: The bytes that it holds for input gradients, and for weight gradients.
        alive: Chunks of microbatches whose backward is still to come.
        last: The kind of its last action, weight gradients aside.
    """

    chunks: Sequence[int]
    row: list[Action] = field(default_factory=list)
    clock: float = 0.0
    kept: float = 0.0
    waiting: float = 0.0
    alive: int = 0
    last: Kind = "W"


class _NextAction(NamedTuple):
    """An action that a stage could run next."""

    start: float
    kind: Kind
    virtual: int
    microbatch: int


class _Listing:
    """One schedule in the making; microbatches ascend in each virtual stage.

    It ends if each stage has room for one microbatch in all its chunks. For a forward is only run if the oldest
    microbatch that has forwards left on the stage still has room for these, beside the others that have some left: so
    it comes to its end on all stages, and its backward makes room for the next one. Where an input gradient leaves more
    than it frees, that is left free too.
    """

    def __init__(
        self,
        costs: Costs,
        microbatches: int,
        room: Sequence[float],
        late: bool,
        placement: Placement,
        rules: Rules,
    ) -> None:
        self.stages, self.chunks, self.microbatches = len(costs), len(costs[0]), microbatches
        self.late, self.rules = late, rules
        self.room = [most * _ROUNDING for most in room]
        virtual = range(self.stages * self.chunks)
        self.of = [stage_of(each, self.stages, placement) for each in virtual]
        self.costs = [costs[self.of[each]][each // self.stages] for each in virtual]
        self.more = [max(0.0, *(each.waiting - each.kept for each in row)) if late else 0.0 for row in costs]
        self.most = [
            rules.ahead * (self.stages - stage + (self.chunks - 1) * self.stages) for stage in range(self.stages)
        ]
        self.done = [
            _StageSoFar([virtual_stage(stage, chunk, self.stages, placement) for chunk in range(self.chunks)])
            for stage in range(self.stages)
        ]
        # When the forwards, and the backwards or input gradients, of the microbatches of each virtual stage have ended.
        self.forwards: list[list[float]] = [[] for _ in virtual]
        self.backwards: list[list[float]] = [[] for _ in virtual]
        self.weights = [0 for _ in virtual]

    def rows(self) -> Schedule | None:
        """Return the schedule; None where a stage has too little room."""
        left = len(self.costs) * self.microbatches * (3 if self.late else 2)
        choices = [self._next(stage) for stage in range(self.stages)]
        for _ in range(left):
            ready = [(choice.start, stage) for stage, choice in enumerate(choices) if choice is not None]
            if not ready:
                return None
            _, stage = min(ready)
            choice = choices[stage]
            assert choice is not None
            for other in (stage, self._run(stage, choice)):
                choices[other] = self._next(other)
        return tuple(tuple(stage.row) for stage in self.done)

    def _run(self, stage: int, choice: _NextAction) -> int:
        """Run an action -> the stage that may have waited for it."""
        kind, virtual, own, cost = choice.kind, choice.virtual, self.done[stage], self.costs[choice.virtual]
        own.clock = choice.start + cost.time(kind)
        own.row.append(Action(kind, virtual // self.stages, choice.microbatch))
        if kind == "W":
            self.weights[virtual] += 1
            own.waiting -= cost.waiting
            return stage
        own.last = kind
        if kind == "F":
            self.forwards[virtual].append(own.clock)
            own.kept, own.alive, to = own.kept + cost.kept, own.alive + 1, virtual + 1
        else:
            self.backwards[virtual].append(own.clock)
            own.kept, own.alive, to = own.kept - cost.kept, own.alive - 1, virtual - 1
            own.waiting += cost.waiting if self.late else 0.0
        return self.of[to] if 0 <= to < len(self.of) else stage

    def _next(self, stage: int) -> _NextAction | None:
        """Return what a stage runs next, as far as it knows."""
        own = self.done[stage]
        ready = [*self._forwards(stage), *self._backwards(stage)]
        late = [
            _NextAction(own.clock, "W", virtual, self.weights[virtual])
            for virtual in own.chunks
            if self.late and self.weights[virtual] < len(self.backwards[virtual])
        ]
        soon = min((each.start for each in ready), default=math.inf)
        if late:
            first = min(late, key=lambda each: (each.microbatch, each.virtual))
            idle = soon - own.clock
            if idle > 0 and idle >= self.rules.patience * self.costs[first.virtual].weights:
                return first
        return min(
            (each for each in ready if each.start <= soon),
            key=lambda each: (each.kind == own.last, each.microbatch // self.rules.group, -each.virtual),
            default=None,
        )

    def _forwards(self, stage: int) -> Iterator[_NextAction]:
        own, room = self.done[stage], self.room[stage] - self.more[stage]
        oldest = min(len(self.forwards[virtual]) for virtual in own.chunks)
        begun = sum((len(self.forwards[virtual]) - oldest) * self.costs[virtual].kept for virtual in own.chunks)
        rest = sum(self.costs[virtual].kept for virtual in own.chunks if len(self.forwards[virtual]) == oldest)
        for virtual in own.chunks:
            m, cost = len(self.forwards[virtual]), self.costs[virtual]
            if m == self.microbatches or (virtual and m == len(self.forwards[virtual - 1])):
                continue
            needed = begun + rest + (cost.kept if m > oldest else 0.0)
            held = own.kept + cost.kept
            enough = needed <= room and held <= room and held + own.waiting <= self.room[stage]
            if enough and (m == oldest or own.alive < self.most[stage]):
                came = self._came(self.forwards, virtual - 1, m, stage) if virtual else 0.0
                yield _NextAction(max(own.clock, came), "F", virtual, m)

    def _backwards(self, stage: int) -> Iterator[_NextAction]:
        own = self.done[stage]
        for virtual in own.chunks:
            m, cost, last = len(self.backwards[virtual]), self.costs[virtual], virtual == len(self.of) - 1
            if m == len(self.forwards[virtual]) or not (last or m < len(self.backwards[virtual + 1])):
                continue
            if self.late and own.kept + own.waiting - cost.kept + cost.waiting > self.room[stage]:
                continue  # some weight gradients first
            came = 0.0 if last else self._came(self.backwards, virtual + 1, m, stage)
            yield _NextAction(max(own.clock, came), "I" if self.late else "B", virtual, m)

    def _came(self, ended: Sequence[Sequence[float]], virtual: int, m: int, stage: int) -> float:
        """Return when a stage has what another virtual stage gave."""
        return ended[virtual][m] + (self.costs[virtual].send if self.of[virtual] != stage else 0.0)
