"""Spans: successive tokens of one document each, over whose ends goes nothing but what is handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Spans:
    """Spans of t tokens, one after the other.

    Args:
        lengths: Their lengths.
        device: The device of the tokens.
    """

    lengths: tuple[int, ...]
    device: torch.device

    def __len__(self) -> int:
        return len(self.lengths)

    def earlier(self, most: int) -> Tensor:
        """Return [most, t], where what stands 1, 2, ... ``most`` tokens before each token is: among the t tokens, or
        behind them among ``most`` tokens for each span, those before it."""
        return self.kept(f"earlier {most}", lambda: _earlier(self.lengths, most))

    def last(self, count: int) -> Tensor:
        """Return [spans, count], where the last ``count`` tokens of each span are: in the same places as
        :meth:`earlier`."""
        return self.kept(f"last {count}", lambda: _last(self.lengths, count))

    @property
    def starts(self) -> Tensor:
        """[spans + 1], where each begins, and where the last one ends."""
        return self.kept("starts", lambda: np.cumsum([0, *self.lengths]))

    def chunks(self, size: int) -> Chunks:
        """Return the spans cut into chunks of a size, the last one of a span filled up."""
        found = _cut(self.lengths, size)
        names = ("tokens", "behind", "places", "order", "back")
        return Chunks(
            found.counts, size, *(self.kept(f"{name} {size}", partial(getattr, found, name)) for name in names)
        )

    def kept(self, name: str, made: Callable[[], npt.ArrayLike]) -> Tensor:
        """Return integers of these spans on their device, made where they are first asked for by this name; nobody
        waits for the copy."""
        if name not in self._there:
            host = torch.tensor(made(), dtype=torch.int64, device="cpu")
            pinned = host.pin_memory() if self.device.type == "cuda" else host
            self._there[name] = pinned.to(self.device, non_blocking=True)
        return self._there[name]

    @cached_property
    def _there(self) -> dict[str, Tensor]:
        """Kept with the microbatch, as every layer asks for them."""
        return {}


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks of spans: first the first ones of all spans, then the second ones of those that have two, and so on.

    Args:
        counts: The number of spans that have a first chunk, a second one, and so on: those with most chunks come first.
        size: Tokens of a chunk.
        tokens: [chunks * size], the token in each place.
        behind: The places that are behind a span's end.
        places: [t], the place of each token.
        order: The spans in the order in which their chunks stand.
        back: The place of each span in that order.
    """

    counts: tuple[int, ...]
    size: int
    tokens: Tensor
    behind: Tensor
    places: Tensor
    order: Tensor
    back: Tensor


@dataclass(frozen=True, eq=False)
class _Cut:
    counts: tuple[int, ...]
    tokens: _Integers
    behind: _Integers
    places: _Integers
    order: _Integers
    back: _Integers


def _positions(lengths: Sequence[int]) -> tuple[_Integers, _Integers]:
    """Return [t], the span of each token, and its place there."""
    held = np.array(lengths, np.int64)
    spans = np.repeat(np.arange(len(held)), held)
    return spans, np.arange(len(spans)) - (np.cumsum(held) - held)[spans]


@lru_cache(maxsize=16)
def _earlier(lengths: tuple[int, ...], most: int) -> _Integers:
    spans, places = _positions(lengths)
    t, back = len(spans), np.arange(1, most + 1)[:, None]
    return np.where(places >= back, np.arange(t) - back, t + spans * most + most + places - back)


@lru_cache(maxsize=16)
def _last(lengths: tuple[int, ...], count: int) -> _Integers:
    spans, ends = np.arange(len(lengths))[:, None], np.cumsum(lengths)[:, None]
    back = count - np.arange(count)
    held, t = np.array(lengths)[:, None], sum(lengths)
    return np.where(held >= back, ends - back, t + spans * count + count + held - back)


@lru_cache(maxsize=16)
def _cut(lengths: tuple[int, ...], size: int) -> _Cut:
    held = np.array(lengths)
    counts = -(-held // size)
    order = np.argsort(-counts, kind="stable")
    steps = [order[counts[order] > step] for step in range(int(counts.max()))]
    chunk, step = np.concatenate(steps), np.repeat(np.arange(len(steps)), [len(each) for each in steps])
    at = step[:, None] * size + np.arange(size)
    inside = (at < held[chunk, None]).flatten()
    tokens = np.where(inside, ((np.cumsum(held) - held)[chunk, None] + at).flatten(), 0)
    places = np.empty(sum(lengths), np.int64)
    places[tokens[inside]] = inside.nonzero()[0]
    sizes = tuple(len(each) for each in steps)
    return _Cut(sizes, tokens, (~inside).nonzero()[0], places, order, np.argsort(order))
