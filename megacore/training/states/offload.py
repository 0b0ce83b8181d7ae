"""Masters and moments in host memory or in a file, updated by the CPU (as in ZeRO-Offload, Ren et al. 2021, arXiv
2101.06840, and ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857).

Parts are cut into windows. While the CPU updates one, the gradient of the next is on its way to the host on one
stream, the values of the one before on their way back on another, and threads read and write the file ahead and
behind. No gradient leaves before the whole norm is known: a window takes longer to update than to copy, so that only
the first one's way is seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from megacore.parallel.gradients.buckets import Elements, OwnedShard
from megacore.parallel.kernels.narrow_adamw import Step, update
from megacore.store.weight_folders.index import EMA, MASTER, MOMENTS
from megacore.training.states.device_store import Rule
from megacore.training.states.windows import ALIGNED, BUFFERS, Segment, WindowStore, cut


@dataclass(frozen=True)
class Offload:
    """The place of offloaded states: a file in a folder, on a disk of this machine, or host memory. They and gradients
    pass through ``buffer_bytes`` of that; states that stay there come on top."""

    folder: Path | None = None
    buffer_bytes: int = 512 << 20


_Flat = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Staging:
    """Host memory through which windows pass: a gradient [numel], and values [numel] where no master is kept."""

    gradient: Tensor
    values: Tensor | None
    arrived: Any
    """The event after which they have come."""
    left: Any
    """The event after which the new values have gone."""


class OffloadedStore:
    """A store of masters and moments as :class:`~megacore.training.states.device_store.DeviceStore`, elsewhere; dtype:
    that of the parts' values. Raises StoreError: there is no room for the file."""

    def __init__(
        self, parts: Sequence[OwnedShard], rule: Rule, dtype: torch.dtype, device: torch.device, offload: Offload
    ) -> None:
        self.updates = 0
        self._parts, self._rule = parts, rule
        kept, value, pinned = rule.kept(dtype), rule.value(dtype), device.type != "cpu"
        self.kept, self.masters = kept, MASTER in kept
        passing = value.itemsize * (1 if self.masters else 2)
        staying = sum(each.itemsize for each in kept.values())
        sizes = [part.data.numel() for part in parts]
        numel = _window(sizes, offload.buffer_bytes // (BUFFERS * (passing + staying * (offload.folder is not None))))
        self._windows = cut(sizes, numel)
        self._of: dict[OwnedShard, list[Segment]] = {part: [] for part in parts}
        for segment in chain.from_iterable(self._windows):
            self._of[parts[segment.part]].append(segment)
        self._on: Any = torch.get_device_module(device)
        self._down, self._up = self._on.Stream(), self._on.Stream()
        self._stagings = [
            _Staging(
                torch.zeros(numel, dtype=value, pin_memory=pinned),
                None if self.masters else torch.zeros(numel, dtype=value, pin_memory=pinned),
                self._on.Event(),
                self._on.Event(),
            )
            for _ in self._windows[:BUFFERS]
        ]
        self._store = WindowStore([window[-1].here.stop for window in self._windows], kept, device, offload.folder)
        for state in (MASTER, EMA):
            for part in parts if state in kept else ():
                self.of(part, state)[...] = part.data

    def update(self, lr: float, go: Tensor, divisor: Tensor | None) -> None:
        """Update the values of all parts. The host waits for the device, as it computes."""
        # One number tells both: it is 0 where nothing changes.
        divided_by = float((go if divisor is None else torch.where(go, divisor, go)).item())
        if not divided_by:
            return
        self.updates += 1
        current = self._on.current_stream()
        # Of each part values and gradient in one dimension: views, or where its memory has gaps, copies.
        flats = [(part.data.reshape(-1), part.gradient.reshape(-1)) for part in self._parts]
        self._down.wait_stream(current)
        self._up.wait_stream(current)
        ahead = max(1, len(self._stagings) - 1)
        numbers = range(len(self._windows))
        for number in numbers[:ahead]:
            self._send(number, flats)
        for number in numbers:
            for coming in numbers[number + ahead :][:1]:
                self._send(coming, flats)
            self._update(number, flats, lr, divided_by)
        current.wait_stream(self._up)
        for part, (values, _) in zip(self._parts, flats, strict=True):
            if not part.data.is_contiguous():
                part.data.copy_(values.view(part.data.shape))
        for number in numbers[:ahead]:  # the next step's, beside its forward and backward
            self._store.fetch(number)

    def of(self, part: OwnedShard, state: str) -> Elements:
        if state == MASTER and not self.masters:
            return part.data
        return _StoredElements(self._store, self._of[part], part, state, self.kept[state])

    def states(self, part: OwnedShard) -> Sequence[str]:
        return [*self.kept]

    def _send(self, window: int, flats: Sequence[_Flat]) -> None:
        self._store.fetch(window)
        staging = self._stagings[window % len(self._stagings)]
        with self._on.stream(self._down):
            self._down.wait_event(staging.left)
            for segment in self._windows[window]:
                values, gradient = flats[segment.part]
                staging.gradient[segment.here].copy_(gradient[segment.there], non_blocking=True)
                if staging.values is not None:
                    staging.values[segment.here].copy_(values[segment.there], non_blocking=True)
        staging.arrived.record(self._down)

    def _update(self, window: int, flats: Sequence[_Flat], lr: float, divisor: float) -> None:
        staging = self._stagings[window % len(self._stagings)]
        staging.arrived.synchronize()
        states = self._store.open(window)
        values = states[MASTER] if staging.values is None else staging.values
        for decays in (True, False):
            here = [each.here for each in self._windows[window] if self._parts[each.part].decays == decays]
            decay = self._rule.weight_decay if decays else 0.0
            tensors = (values, staging.gradient, *(states[moment] for moment in MOMENTS))
            update(
                Step(self.updates, lr, self._rule.betas, self._rule.eps, decay, divisor),
                *([tensor[where] for where in here] for tensor in tensors),
            )
        if self._rule.ema is not None:
            states[EMA].lerp_(values[: len(states[EMA])], 1.0 if self.updates == 1 else 1 - self._rule.ema)
        with self._on.stream(self._up):
            for segment in self._windows[window]:
                target = flats[segment.part][0][segment.there]
                target.copy_(values[segment.here].to(target.device, non_blocking=True))
        staging.left.record(self._up)
        self._store.changed(window, staging.left)
        self._store.put_back(window)


@dataclass(frozen=True)
class _StoredElements:
    """:class:`~parallel.gradients.buckets.Elements` of a part that are in a store."""

    store: WindowStore
    segments: Sequence[Segment]
    part: OwnedShard
    state: str
    dtype: torch.dtype

    def __getitem__(self, where: slice | EllipsisType, /) -> Tensor:
        if where is ...:
            shape = self.part.data.shape
            return self[: shape.numel()].view(shape)
        start, stop, _ = where.indices(self.part.data.numel())
        found = torch.empty(stop - start, dtype=self.dtype)
        for window, here, there in self._overlaps(start, stop):
            found[there] = self.store.open(window)[self.state][here]
        return found

    def __setitem__(self, where: slice | EllipsisType, values: Tensor, /) -> None:
        start, stop, _ = (slice(None) if where is ... else where).indices(self.part.data.numel())
        flat = values.reshape(-1)
        for window, here, there in self._overlaps(start, stop):
            self.store.open(window)[self.state][here] = flat[there]
            self.store.changed(window)

    def _overlaps(self, start: int, stop: int) -> Iterable[tuple[int, slice, slice]]:
        """Yield (window, where in it, where from ``start`` on) of what lies in [start, stop)."""
        for each in self.segments:
            first, last = max(start, each.there.start), min(stop, each.there.stop)
            if first < last:
                offset = each.here.start - each.there.start
                yield each.window, slice(first + offset, last + offset), slice(first - start, last - start)


def _window(sizes: Sequence[int], most: int) -> int:
    """Return the number of elements of a window: a power of two, as pinned memory is given out; at most all."""
    everything = sum(-(-size // ALIGNED) * ALIGNED for size in sizes)
    return max(ALIGNED, min(1 << max(0, everything - 1).bit_length(), 1 << (max(1, most).bit_length() - 1)))
