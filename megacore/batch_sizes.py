"""The sizes of a run's global batches: one, or a ramp. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Ramp = tuple[int, int, int]
"""(first size, increment, samples until the last size), as Megatron-LM's ``--rampup-batch-size`` has them."""


@dataclass(frozen=True)
class BatchSizes:
    """A function of the samples that were consumed before a batch, and of nothing else. ``last``: the size in the end;
    ``ramp``: the way there, in steps of one length in samples; None: all are of the last size."""

    last: int
    ramp: Ramp | None = None

    def at(self, samples: int) -> int:
        """Return the size of the batch that begins after so many samples."""
        if self.ramp is None or samples >= self.ramp[2]:
            return self.last
        first, increment, until = self.ramp
        return first + samples * self._increments // until * increment

    def after(self, samples: int, batches: int) -> int:
        """Return the samples that are consumed after so many more batches."""
        for size, number in self._from(samples):
            now = batches if number is None else min(batches, number)
            samples, batches = samples + now * size, batches - now
            if not batches:
                break
        return samples

    def batches(self, samples: int) -> int:
        """Return the number of batches that hold the first so many samples."""
        done = position = 0
        for size, number in self._from(0):
            rest = -(-(samples - position) // size)
            if number is None or rest <= number:
                return done + max(0, rest)
            position, done = position + number * size, done + number
        return done

    def __str__(self) -> str:
        return f"{self.last:,}" if self.ramp is None else f"{self.ramp[0]:,} to {self.last:,}"

    @property
    def _increments(self) -> int:
        return 0 if self.ramp is None else (self.last - self.ramp[0]) // self.ramp[1]

    def _from(self, samples: int) -> Iterator[tuple[int, int | None]]:
        """Yield each size from a position on, and the number of its batches; None: all others."""
        while self.ramp is not None and samples < (until := self.ramp[2]):
            size = self.at(samples)
            ends = -(-(samples * self._increments // until + 1) * until // self._increments)
            number = -(-(ends - samples) // size)
            yield size, number
            samples += number * size
        yield self.last, None
