"""Samples that a run leaves out: ranges that are cut from the order of its data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

SampleRange = tuple[int, int]


@dataclass(frozen=True)
class SkippedSamples:
    """Ranges [first, stop) of the numbers of samples, which ascend and do not touch; those after them move up.

    Position n of a run's order is the n-th sample that is in none of them: a pure function of the count of samples, on
    any layout. A range changes nothing before its first sample, so one that is added while a run goes on, from where it
    stands or later, gives what a run gives that has had it from its start.
    """

    ranges: tuple[SampleRange, ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[SampleRange]) -> SkippedSamples:
        """Join ranges in any order, which may overlap; empty ones vanish."""
        joined = list[SampleRange]()
        for first, stop in sorted(each for each in ranges if each[0] < each[1]):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(joined[-1][1], stop)
            else:
                joined.append((first, stop))
        return cls(tuple(joined))

    @classmethod
    def read(cls, value: Any) -> SkippedSamples | None:
        """Return what ``trainer.json`` says; None where it is none."""
        if not isinstance(value, list) or not all(isinstance(each, list) and len(each) == 2 for each in value):
            return None
        ends = [end for each in value for end in each]
        ascending = all(type(end) is int for end in ends) and all(a < b for a, b in pairwise([-1, *ends]))
        return cls(tuple((first, stop) for first, stop in value)) if ascending else None

    @cached_property
    def _places(self) -> tuple[list[int], list[int]]:
        """The position that each range stands before, and the samples that are left out up to its end."""
        left_out = list(accumulate((stop - first for first, stop in self.ranges), initial=0))
        return [first - before for (first, _), before in zip(self.ranges, left_out, strict=False)], left_out

    def sample(self, position: int) -> int:
        """Return the number of the sample at a position of the run's order."""
        places, left_out = self._places
        return position + left_out[bisect_right(places, position)]

    def samples(self, position: int, count: int) -> list[SampleRange]:
        """Return the ranges of the samples at so many positions from one on."""
        first, last = self.sample(position), self.sample(position + count - 1)
        cuts = [each for each in self.ranges if first < each[0] < last]
        ends = [first, *(end for each in cuts for end in each), last + 1]
        return list(zip(ends[::2], ends[1::2], strict=True))

    def left_out_by(self, ranges: Iterable[SampleRange], position: int) -> list[SampleRange]:
        """Return the ranges of samples before a position that others would leave out and these have not."""
        done = self.samples(0, position) if position else []
        common = ((max(a, first), min(b, stop)) for a, b in done for first, stop in ranges)
        return list(SkippedSamples.of(common).ranges)

    def __or__(self, ranges: Iterable[SampleRange]) -> SkippedSamples:
        return SkippedSamples.of([*self.ranges, *ranges])

    def __iter__(self) -> Iterator[SampleRange]:
        return iter(self.ranges)

    def __len__(self) -> int:
        return self._places[1][-1]


NONE = SkippedSamples()


def in_words(ranges: Iterable[SampleRange]) -> str:
    """Return ranges for a reader: 16 to 23, 30."""
    return ", ".join(f"{first} to {stop - 1}" if first < stop - 1 else f"{first}" for first, stop in ranges)


def in_recipe(ranges: Iterable[SampleRange]) -> str:
    """Return ranges as ``recovery.skip_samples`` takes them: 16-24 is from 16 to 23."""
    return ", ".join(f"{first}-{stop}" for first, stop in ranges)
