"""The share of a run's time that goes into steps that count, under faults, by a formula. No torch.

Nodes are faulty at random, after a mean time that does not change (exponentially). All ranks then start again from the
newest checkpoint in memory, or from the newest one on disk where a node was lost together with the one that keeps a
copy of its memory. A segment of w seconds of work, s that its checkpoint blocks and p more until that is whole takes
exp(r (R + p)) (exp(r (w + s)) - 1) / r seconds on the average, where faults come at a rate r and a restart takes R
(Daly 2006, doi 10.1016/j.future.2004.11.016). Checkpoints in memory (Gemini, Wang et al., SOSP 2023, doi
10.1145/3600006.3613145) are such segments within those of checkpoints on disk, whose work they slow down. The best
interval is Daly's, whose first term, sqrt(2 s / r), is that of Young (1974, doi 10.1145/361147.361115).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

DAY_S = 86400.0
LLAMA_3 = 2048 * 54 * DAY_S / 419
"""Mean seconds from one fault of a node of 8 GPUs to the next: Llama 3's 16,384 GPUs were interrupted unexpectedly 419
times in 54 days (arXiv 2407.21783, 3.3.4): each node after 264 days."""
HARDWARE = 0.78
"""The share of these that was hardware, confirmed or suspected."""
LEVELS = ("by hand, from disk", "by itself, from disk", "by itself, from memory")


@dataclass(frozen=True)
class FaultRates:
    """The faults of nodes: mean seconds from one of a node to the next, the share that takes the node away, and its
    memory with it, and the seconds until another takes its place; ``elastic``: the others train on meanwhile, rather
    than wait. ``together`` is the share that takes a node and its partner; None: that of two which are independent."""

    node_s: float = LLAMA_3
    hardware: float = HARDWARE
    away_s: float = 600.0
    elastic: bool = True
    together: float | None = None


@dataclass(frozen=True)
class FaultCosts:
    """Seconds that faults and checkpoints cost.

    Args:
        notice: Until a person has seen that the run has ended, and has started it again.
        detect, restart: Until a fault is known; of new processes and groups.
        load_memory, load_disk: Until a checkpoint is loaded.
        copy, stall: That training stands for a checkpoint in memory, and for one on disk.
        send, publish: Until its copy is in the memory of another node, or it is whole on disk, with training going on.
    """

    notice: float
    detect: float
    restart: float
    load_memory: float
    load_disk: float
    copy: float
    send: float
    stall: float
    publish: float
    step: float

    def every(self, overhead: float) -> int:
        """Return the least number of steps from one checkpoint in memory to the next, such that they block no more than
        a share of the time, and each is with the other node before the next."""
        return max(1, math.ceil(max(self.copy / overhead, self.send) / self.step))


@dataclass(frozen=True)
class Goodput:
    """The share of the time of all nodes that goes into steps that count, the seconds of training from one checkpoint
    on disk to the next, and the share of faults after which the run goes on from there."""

    share: float
    interval: float
    from_disk: float


def useful(rate: float, work: float, stall: float, publish: float, restart: float) -> float:
    """Return the share of the time that is work: so much in each segment, which ends with a checkpoint."""
    faults = rate * (work + stall)
    if not faults:
        return work / (work + stall)
    return rate * work * math.exp(-faults - rate * (publish + restart)) / -math.expm1(-faults)


def best_interval(rate: float, stall: float) -> float:
    """Return the seconds of work from one checkpoint to the next at which most of the time is work, by Daly."""
    x = rate * stall / 2
    return math.sqrt(2 * stall / rate) * (1 + math.sqrt(x) / 3 + x / 9) - stall if x < 1 else 1 / rate


def goodput(nodes: int, faults: FaultRates, costs: FaultCosts, every: int = 0, interval: float = 0.0) -> Goodput:
    """Return the goodput that is expected of a run with so many steps from one checkpoint in memory to the next (0:
    there are none), and seconds of training from one on disk to the next (0: the best)."""
    rate, lacking = nodes / faults.node_s, faults.hardware * faults.away_s
    restart = costs.detect + costs.restart + (0.0 if faults.elastic else lacking)
    alone = restart + every * costs.step  # from the loss of a node until the next copy of what its partner keeps
    from_disk = -faults.hardware * math.expm1(-alone / faults.node_s * faults.hardware)
    if not every or nodes == 1:
        from_disk = faults.hardware if every else 1.0
    elif faults.together is not None:
        from_disk = faults.together
    kept, lost = rate * (1 - from_disk), rate * from_disk
    calm = useful(kept, every * costs.step, costs.copy, costs.send, restart + costs.load_memory) if every else 1.0
    interval = interval or max(best_interval(lost, costs.stall), costs.step, costs.publish - costs.stall)
    share = calm and calm * useful(lost, interval / calm, costs.stall, costs.publish, restart + costs.load_disk)
    return Goodput(share * max(1 - faults.elastic * lacking / faults.node_s, 0.0), interval, from_disk)


def levels(nodes: int, faults: FaultRates, costs: FaultCosts, every: int) -> Iterator[tuple[str, Goodput]]:
    """Yield each level of protection and its goodput; the arguments are those of :func:`goodput`."""
    hand, itself, memory = LEVELS
    yield hand, goodput(nodes, replace(faults, elastic=False), replace(costs, detect=costs.notice))
    yield itself, goodput(nodes, faults, costs)
    yield memory, goodput(nodes, faults, costs, every)
