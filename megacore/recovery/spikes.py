"""Spikes of the loss and of the gradient norm: values far above those before them, by median and MAD over a window.

A spike is a value above median x exp(``DEVIATIONS`` x scale), where the scale is 1.4826 times the median absolute
deviation of the logarithms: the standard deviation of noise that is normal, and not moved by the spikes themselves.
Logarithms, for noise goes with what it is of, and that of a norm has a long tail above. No torch and no clock: the same
values give the same answer on every rank.

While the learning rate rises, as it does in a warm-up, and for ``FIRST`` records after that, nothing is a spike: what
was before says nothing of what comes. A value that falls never is one, nor one that rises slowly: the median follows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

WINDOW = 128
"""Records that the median is of: a level that stays for 64 of them is the level."""
FIRST = 32
"""Records before the first answer: the MAD of fewer is often far off."""
DEVIATIONS = 16.0
"""Noise with the tails of Laplace's distribution is above so many once in 28 million values, that of Student's with 5
degrees of freedom once in 170,000."""
LEAST: Mapping[str, float] = {"loss": 1.25, "grad_norm": 3.0}
"""The least ratio of a spike to the median: a curve without noise has steps too, and what is less does no harm."""
_NORMAL = 1.4826
"""The standard deviation of normal noise over its median absolute deviation."""


@dataclass(frozen=True)
class Spike:
    """A value far above those before it.

    Args:
        name: The metric, ``loss`` or ``grad_norm``.
        value: The value.
        median: The median of the records before it.
        limit: The most that is no spike.
    """

    name: str
    value: float
    median: float
    limit: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} (median {self.median:.4g}, limit {self.limit:.4g})"


@dataclass
class Spikes:
    """The last records of a run, and what would be a spike after them."""

    _values: dict[str, deque[float]] = field(default_factory=lambda: {name: deque(maxlen=WINDOW) for name in LEAST})
    _limits: dict[str, tuple[float, float]] = field(default_factory=dict)
    _lr: float = math.inf

    @property
    def limits(self) -> Mapping[str, float]:
        """The largest values that are no spikes, by metric; infinite where that is not known yet."""
        return {name: self._limits.get(name, (0.0, math.inf))[1] for name in LEAST}

    def found(self, record: Mapping[str, float]) -> list[Spike]:
        """Return the spikes in a step's ``loss`` and ``grad_norm``; what is not finite is none."""
        return [
            Spike(name, record[name], middle, limit)
            for name, (middle, limit) in self._limits.items()
            if limit < record[name] < math.inf
        ]

    def note(self, lr: float, record: Mapping[str, float]) -> None:
        """Add a step's ``loss`` and ``grad_norm``, and its learning rate."""
        if lr > self._lr:
            for values in self._values.values():
                values.clear()
        self._lr = lr
        for name, values in self._values.items():
            if 0 < record[name] < math.inf:
                values.append(math.log(record[name]))
            self._limits[name] = _limit(values, LEAST[name])


def _limit(values: deque[float], least: float) -> tuple[float, float]:
    """Return (median, limit) of the logarithms of values."""
    if len(values) < FIRST:
        return 0.0, math.inf
    middle = median(values)
    scale = _NORMAL * median(abs(value - middle) for value in values)
    return math.exp(middle), math.exp(middle + max(DEVIATIONS * scale, math.log(least)))
