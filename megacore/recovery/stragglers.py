"""Ranks that are slower than those that do the same work: from the time in which each does not wait for another.

That others have a rank's core is no work of it, and on a busy machine befalls all: it is told where a rank loses far
more to them than the others.

Compared are ranks that differ in dp and tp alone: stages of a pipeline, experts and parts of the context have work of
their own. The median is the lower one of the middle, so that of two ranks the slower is compared with the faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megacore.gpus import gpu_in_words
from megacore.incidents import Incident
from megacore.parallel.weights.layout import MeshShape
from megacore.recovery.beats import Phase, Reading

CAUSES: Mapping[Phase, str] = {
    "data": "data",
    "forward": "compute",
    "backward": "compute",
    "update": "compute",
    "save": "save",
}
"""{phase: what it tells of}. The others are not the same on all ranks, or a rank may wait in them for its device."""

CORE = "core"
"""The cause of who waits for its own core."""
CROWDED = 0.5
"""The share of the median's work that a rank waits for its core, beyond three times what the median does, to be named:
where all wait at random, one is never so far above the others for long."""
ABOVE = 0.2
"""The share of the median that a rank is above it, to be named."""
STEPS = 20
"""The steps, and looks at them, for which it must be."""
SHARE = 0.1
"""The weight of a look in the moving averages."""
FIRST = 5
"""The looks whose median they begin with: in the first step a rank may wait for what it does once."""


@dataclass
class _Rank:
    """The moving averages of a rank: seconds of a step by cause, since the reading when its step had last changed; the
    looks in a row that it was above the median, and whether that was told."""

    last: Reading
    first: list[dict[str, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    above: int = 0
    named: bool = False

    @property
    def total(self) -> float:
        """All of its work."""
        return sum(seconds for cause, seconds in self.seconds.items() if cause != CORE)

    def see(self, reading: Reading) -> bool:
        """Take a look -> whether steps were done since the last one."""
        steps, spent = reading.step - self.last.step, dict.fromkeys([*CAUSES.values(), CORE], 0.0)
        for phase, cause in CAUSES.items():
            spent[cause] += reading.busy.get(phase, 0.0) - self.last.busy.get(phase, 0.0)
        spent[CORE] = reading.queued - self.last.queued
        if steps < 0:  # they are done again
            self.last, self.first, self.seconds, self.above = reading, [], {}, 0
        if steps <= 0:
            return False
        each, total = {cause: seconds / steps for cause, seconds in spent.items()}, self.total
        if len(self.first) < FIRST:
            self.first.append(each)
            self.seconds = {cause: statistics.median(look[cause] for look in self.first) for cause in each}
        else:  # one that was stopped once, or waited for a disk, is none: a look tells no more than twice the usual
            self.seconds = {
                cause: before + SHARE * min(each[cause] - before, total) for cause, before in self.seconds.items()
            }
        self.last = reading
        return True


@dataclass
class Stragglers:
    """Looks at the beats of the ranks of one agent, and names the slow ones: each once, until it is slow no more. Ranks
    have the GPUs of their machine in their order, and ``gpu`` tells of one by its number."""

    shape: MeshShape
    report: Callable[[Incident], object]
    gpu: Callable[[int], str] = gpu_in_words
    _ranks: dict[int, _Rank] = field(default_factory=dict, init=False)

    def see(self, readings: Mapping[int, Reading]) -> None:
        """Take a look at the ranks that live."""
        self._ranks = {rank: self._ranks.get(rank, _Rank(reading)) for rank, reading in readings.items()}
        for rank in [rank for rank, reading in readings.items() if self._ranks[rank].see(reading)]:
            peers = [other for other in self.shape.along(rank, "dp", "tp") if other in self._ranks]
            self._judge(rank, peers, self._ranks[rank])

    def _judge(self, rank: int, peers: list[int], one: _Rank) -> None:
        usual = statistics.median_low([self._ranks[other].total for other in peers])
        each = {
            cause: statistics.median_low([self._ranks[other].seconds.get(cause, 0.0) for other in peers])
            for cause in one.seconds
        }
        lost = one.seconds.get(CORE, 0.0) - 3 * each.get(CORE, 0.0)

        def is_slow(share: float) -> bool:
            """Return whether it is above the median by this share of what it takes to be named."""
            return bool(usual) and (lost > share * CROWDED * usual or one.total >= (1 + share * ABOVE) * usual)

        if len(peers) < 2 or not is_slow(1.0):
            one.above, one.named = 0, one.named and is_slow(0.5)
            return
        one.above += 1
        if one.above < STEPS or one.named:
            return
        one.named = True
        above = {cause: seconds - each[cause] for cause, seconds in one.seconds.items()}
        core = above.pop(CORE, 0.0)
        cause = CORE if lost > CROWDED * usual else max(above, key=lambda cause: above[cause])
        more = core if cause == CORE else one.total - usual
        detail = (
            f"{cause}: {'others had it for ' * (cause == CORE)}{one.seconds[cause]:.3g} s a step, "
            f"where {each[cause]:.3g} s are usual; "
            f"{more / usual:.0%} above the median of ranks {', '.join(map(str, peers))}"
        )
        gpu = self.gpu(sorted(self._ranks).index(rank))
        self.report(Incident("straggler", detail="; ".join(filter(None, (detail, gpu))), rank=rank, step=one.last.step))
