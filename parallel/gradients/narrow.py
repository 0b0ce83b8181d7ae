"""Weights in the narrow numbers that their products multiply: made once for all of them after each change.

Of each the scales go by its largest magnitudes on all ranks. A rank looks at what it owns, whatever the rung, and one
message has the magnitudes of all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import Group
from megacore.parallel.parameters import CastWeight


class NarrowWeights:
    """Knows of which weights the narrow numbers are those of values that have changed, and makes them anew.

    It owns nothing: numbers of a weight that is here whole belong to its product, those of slices to whoever has these.

    Args:
        casts: {weight: its narrow numbers}, the same on all ranks of a stage, in one order.
        owned: Returns the parts of a weight that this rank owns, each with the element it begins at; together ranks
            own all of it.
        across: The groups of ranks that have other parts, one after the other.
    """

    def __init__(
        self,
        casts: Mapping[Tensor, CastWeight],
        owned: Callable[[Tensor], Sequence[tuple[int, Tensor]]],
        across: Sequence[Group],
    ) -> None:
        self._casts, self._owned, self._across = dict(casts), owned, across
        self._largest: dict[Tensor, Tensor] = {}
        self._changed, self._uncast = set(casts), set[Tensor]()
        self.whole = set(casts)
        """Those that are cast whole, before they are used."""
        self._slices: list[tuple[set[Tensor], Callable[[Mapping[Tensor, Tensor]], None]]] = []

    def cast_slices(self, weights: Iterable[Tensor], cast: Callable[[Mapping[Tensor, Tensor]], None]) -> None:
        """Have ``cast`` make the narrow numbers of slices of some weights, whenever they have changed: it is given the
        largest magnitude of each weight."""
        weights = set(weights)
        self.whole -= weights
        self._slices.append((weights, cast))

    def leave_out(self, weights: Iterable[Tensor]) -> None:
        """Leave some weights to products, which cast them for each use."""
        for weight in weights:
            self._casts.pop(weight, None)
            self._changed.discard(weight)
            self.whole.discard(weight)

    def changed(self, weights: Iterable[Tensor]) -> None:
        """Note that some weights have other values: all ranks do so for all of them."""
        self._changed.update(weight for weight in weights if weight in self._casts)

    @torch.no_grad()
    def measure(self) -> None:
        """Find the largest magnitudes of weights that have changed, and cast their slices."""
        if not self._changed:
            return
        changed = [weight for weight in self._casts if weight in self._changed]
        here = [self._own_largest(weight) for weight in changed]
        largest = torch.cat([each.reshape(-1) for each in here])
        for group in self._across:
            largest = all_reduce_(largest, group, dist.ReduceOp.MAX)
        for weight, each, own in zip(changed, here, largest.split([each.numel() for each in here]), strict=True):
            self._largest[weight] = own.view(each.shape)
        for weights, cast in self._slices:
            if not self._changed.isdisjoint(weights):
                cast(self._largest)
        self._uncast |= self._changed & self.whole
        self._changed.clear()

    @torch.no_grad()
    def ready(self, weights: Iterable[Tensor]) -> None:
        """Make the narrow numbers of weights that are here whole, and have changed."""
        self.measure()
        for weight in weights:
            if weight in self._uncast:
                self._casts[weight].cast(self._largest[weight])
                self._uncast.discard(weight)

    def _own_largest(self, weight: Tensor) -> Tensor:
        parts, wide = self._owned(weight), torch.promote_types(weight.dtype, torch.float32)
        if not parts:
            return torch.zeros(self._casts[weight].scales, dtype=wide, device=weight.device)
        return self._casts[weight].largest(parts)
