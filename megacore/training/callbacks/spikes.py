"""Spikes of the loss and of the gradient norm: values far above those before them, by median and MAD over a window;
they are told where they begin.

A spike is a value above median x exp(``DEVIATIONS`` x scale), where the scale is 1.4826 times the median absolute
deviation of the logarithms: the standard deviation of noise that is normal, and not moved by the spikes themselves.
Logarithms, for noise goes with what it is of, and that of a norm has a long tail above. No clock is asked: the same
values give the same answer on every rank.

While the learning rate rises, as it does in a warm-up, and for ``FIRST`` records after that, nothing is a spike: what
was before says nothing of what comes. A value that falls never is one, nor one that rises slowly: the median follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megacore.incidents import Incident
from megacore.training import metrics
from megacore.training.trainer import Callback, Trainer

WINDOW = 128
"""Records that the median is of: a level that stays for 64 of them is the level."""
FIRST = 32
"""Records before the first answer: the MAD of fewer is often far off."""
DEVIATIONS = 16.0
"""Noise with the tails of Laplace's distribution is above so many once in 28 million values, that of Student's with 5
degrees of freedom once in 170,000."""
LEAST: Mapping[str, float] = {"loss": 1.25, "grad_norm": 3.0}
"""The least ratio of a spike to the median: a curve without noise has steps too, and what is less does no harm."""
_RECALLED = 1 << 19
"""Bytes of records that are read when a run goes on: more of them than are remembered."""
_NORMAL = 1.4826
"""The standard deviation of normal noise over its median absolute deviation."""


class RecordedStep(NamedTuple):
    """A record that was looked at: its step, its learning rate, its ``loss`` and ``grad_norm``, whether it spiked."""

    step: int
    lr: float
    values: Mapping[str, float]
    spiked: bool


@dataclass(frozen=True)
class Spikes:
    """The last records of a run, and what would be a spike after them: a function of these alone. They are twice as
    many as the median is of: a run may go back over some."""

    records: tuple[RecordedStep, ...] = ()

    @property
    def limits(self) -> Mapping[str, float]:
        """The largest values of the next step that are no spikes, by metric; infinite where that is not known yet."""
        return {name: limit for name, (_, limit) in self._limits.items()}

    @cached_property
    def _limits(self) -> Mapping[str, tuple[float, float]]:
        """Return {metric: (median, limit)}."""
        rises = [at for at, (one, two) in enumerate(pairwise(self.records), 1) if two.lr > one.lr]
        level = self.records[rises[-1] if rises else 0 :]
        return {name: _limit([each.values[name] for each in level], least) for name, least in LEAST.items()}

    @property
    def spiking(self) -> bool:
        """Whether the last record was a spike."""
        return bool(self.records) and self.records[-1].spiked

    def found(self, record: Mapping[str, float]) -> list[str]:
        """Return the spikes in a step's ``loss`` and ``grad_norm`` in words; what is not finite is none."""
        return [
            f"{name} {record[name]:.4g} (median {middle:.4g}, limit {limit:.4g})"
            for name, (middle, limit) in self._limits.items()
            if limit < record[name] < math.inf
        ]

    def after(self, step: int, lr: float, record: Mapping[str, float]) -> Spikes:
        """Return what is known after another step, of this learning rate, ``loss`` and ``grad_norm``."""
        seen = RecordedStep(step, lr, {name: record[name] for name in LEAST}, bool(self.found(record)))
        return Spikes((*self.records, seen)[-2 * WINDOW :])

    def until(self, step: int) -> Spikes:
        """Return what was known after a step."""
        return Spikes(tuple(each for each in self.records if each.step <= step))


def _limit(values: Sequence[float], least: float) -> tuple[float, float]:
    """Return the median of values, and the limit."""
    logarithms = [math.log(value) for value in values if 0 < value < math.inf][-WINDOW:]
    if len(logarithms) < FIRST:
        return 1.0, math.inf
    middle = median(logarithms)
    scale = _NORMAL * median(abs(value - middle) for value in logarithms)
    return math.exp(middle), math.exp(middle + max(DEVIATIONS * scale, math.log(least)))


class TellSpikes(Callback):
    """Looks at what is recorded. A run that goes on knows what it has recorded before, as if it had never ended."""

    def __init__(self) -> None:
        self.seen = Spikes()

    def on_start(self, run: Trainer) -> None:
        out = Path(run.config.out)

        def known() -> list[Any]:
            spikes = Spikes()
            for each in metrics.newest(out / metrics.METRICS, _RECALLED) if run.step and run.mesh.rank == 0 else ():
                if "loss" in each and each["step"] <= run.step:
                    spikes = spikes.after(each["step"], each["lr"], {name: each[name] or 0.0 for name in LEAST})
            return list(spikes.records)

        records = run.control.tell(run.control.attempt(known))
        self.seen = Spikes(tuple(RecordedStep(*each) for each in records))

    def on_log(self, run: Trainer, record: dict[str, Any]) -> None:
        if "loss" not in record:
            return
        values = {name: float(record[name] or 0) for name in LEAST}
        if (found := self.seen.found(values)) and not self.seen.spiking:
            detail = ", ".join(found)
            run.report(Incident("spike", detail=detail, step=run.step, at=time.time()))
            run.tell(f"step {run.step}: {detail} is far above those before it")
        self.seen = self.seen.after(run.step, run.lr, values)

    def on_rewind(self, run: Trainer) -> None:
        self.seen = self.seen.until(run.step)
