"""The elements of parts in windows of one size: what fits into a bounded buffer, whatever the size of a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNED = 64
"""Elements: segments begin on cache lines, and are cut where no kernel sees it, whatever the dtype."""


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of the part with this number, from ``at`` on in a window."""

    part: int
    start: int
    stop: int
    at: int

    @property
    def here(self) -> slice:
        """Its place in the window."""
        return slice(self.at, self.at + self.stop - self.start)

    @property
    def there(self) -> slice:
        """Its place in the part."""
        return slice(self.start, self.stop)

    def overlap(self, start: int, stop: int) -> tuple[slice, slice] | None:
        """Return the place of elements [start, stop) of the part in the window, and their place from ``start`` on."""
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return None
        offset = self.at - self.start
        return slice(first + offset, last + offset), slice(first - start, last - start)


@dataclass(frozen=True)
class Window:
    """Some segments, up to ``numel`` elements."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return self.segments[-1].here.stop


def cut(sizes: Sequence[int], numel: int) -> list[Window]:
    """Return the parts of these sizes in windows of at most ``numel`` elements, a multiple of ALIGNED, in order."""
    windows: list[list[Segment]] = []
    at = numel
    for part, stop in enumerate(sizes):
        start = 0
        while start < stop:
            if at >= numel:
                windows.append([])
                at = 0
            end = min(stop, start + numel - at)
            windows[-1].append(Segment(part, start, end, at))
            at += -(-(end - start) // ALIGNED) * ALIGNED
            start = end
    return [Window(number, tuple(segments)) for number, segments in enumerate(windows)]
