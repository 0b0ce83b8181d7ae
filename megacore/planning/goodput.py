"""The share of a run's time that goes into steps that count, under faults. No torch.

Faults come at random at a rate r, and after each all start again from the newest checkpoint. A segment of w seconds of
work, s that its checkpoint blocks and p more until that is whole takes exp(r (R + p)) (exp(r (w + s)) - 1) / r seconds
on the average, where a restart takes R (Daly 2006, doi 10.1016/j.future.2004.11.016).
"""

from __future__ import annotations

import math

NODE_S = 2048 * 54 * 86400.0 / 419
"""Mean seconds from one fault of a node of 8 GPUs to the next: Llama 3's 16,384 GPUs were interrupted unexpectedly 419
times in 54 days (arXiv 2407.21783, 3.3.4): each node after 264 days."""


def goodput(rate: float, work: float, stall: float, publish: float, restart: float) -> float:
    """Return the share of the time that is work, with so many seconds of it from one checkpoint to the next."""
    faults = rate * (work + stall)
    return rate * work * math.exp(-faults - rate * (publish + restart)) / -math.expm1(-faults)


def best_interval(rate: float, stall: float) -> float:
    """Return the seconds of work from one checkpoint to the next at which most of the time is work, by Daly; the first
    term is that of Young (1974, doi 10.1145/361147.361115)."""
    x = rate * stall / 2
    return math.sqrt(2 * stall / rate) * (1 + math.sqrt(x) / 3 + x / 9) - stall if x < 1 else 1 / rate
