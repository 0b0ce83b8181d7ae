"""Local steps (DiLoCo, Douillard et al. 2023, arXiv 2311.08105): replicas take steps alone, and are brought together by
an outer one.

Each of ``sync.replicas`` parts of dp trains as if it were the whole mesh, on its share of each global batch, and sends
nothing of its gradients to another one. After every ``sync.every`` steps the ways that they have come from their common
start are averaged. That is the gradient of one step of SGD with Nesterov's momentum from there, from which all go on.
The start and the momentum are split as the optimizer's own states are; moments stay with their replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megacore.parallel.budgets import BUCKET_BYTES
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.gradients.buckets import Elements, OwnedShard, Take, all_of_it
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.mesh import Group
from megacore.store.weight_folders.index import LOCAL, MASTER, OUTER, kind_of, of_replica
from megacore.training.states.optimizer import Optimizer


class LocalSteps(Optimizer):
    """An optimizer of one replica, whose states are its own but for the weights that all have begun from and the
    momentum of the outer step: the former are what is saved, streamed and evaluated. ``across``: the ranks that hold
    the same of each replica, in their order; ``outer_lr`` and ``momentum`` are those of the outer step, ``given`` is as
    of :class:`~megacore.training.states.optimizer.Optimizer`."""

    def __init__(self, gradients: Gradients, *, across: Group, outer_lr: float, momentum: float, **given: Any) -> None:
        super().__init__(gradients, **given)
        self.replica, self._across = across.index, across
        self._outer_lr, self._momentum = outer_lr, momentum
        self._start = {part: self._values(part)[...].clone() for part in gradients.parts}
        self._together = list(_buckets(self._start))
        self._momenta = {part: torch.zeros_like(start) for part, start in self._start.items()}

    @torch.no_grad()
    def end_round(self, halted: Tensor | None = None) -> None:
        """Do the outer step, from which all replicas go on: parameters that are split are to be gathered after it.

        All replicas call this after the same step; nothing changes where ``halted``, a bool scalar on the device that
        is the same on all, is true.
        """
        self._wait_for_copies()
        self._gradients.settle()
        for parts in self._together:
            ways = [(self._start[part] - self._values(part)[...]).flatten() for part in parts]
            mean = all_reduce_(torch.cat(ways), self._across) / self._across.size
            for part, way in zip(parts, mean.split([each.numel() for each in ways]), strict=True):
                self._step(part, way.view_as(self._start[part]), halted)

    def _step(self, part: OwnedShard, way: Tensor, halted: Tensor | None) -> None:
        start, momentum, values = self._start[part], self._momenta[part], self._values(part)
        moved = momentum * self._momentum + way
        stepped = goes_on = start - self._outer_lr * (way + self._momentum * moved)
        if halted is not None:
            moved, stepped = torch.where(halted, momentum, moved), torch.where(halted, start, stepped)
            goes_on = torch.where(halted, values[...], goes_on)
        momentum.copy_(moved)
        start.copy_(stepped)
        values[...] = goes_on
        part.data.copy_(goes_on)

    def outer_states(self, part: OwnedShard) -> Mapping[str, Tensor]:
        """Return {name for people: tensor} of what all replicas have alike of a part."""
        return {"the common start": self._start[part], "the outer momentum": self._momenta[part]}

    @contextmanager
    def common(self) -> Iterator[None]:
        """Have the parameters be those that the round has begun from in this block, on all ranks at once."""
        with self._standing_in([self._start[part] for part in self._gradients.parts]):
            yield

    @torch.no_grad()
    def forget(self) -> None:
        """Begin anew, as of :meth:`.Optimizer.forget`; the outer momentum is 0 too."""
        super().forget()
        for momentum in self._momenta.values():
            momentum.zero_()

    # -- the state, by the names and in the shapes of the parameters

    def states(self) -> Mapping[str, Mapping[str, torch.dtype]]:
        """Return {state: {parameter: dtype}} of what all replicas keep beside the common weights, on each rank."""
        kept = dict(super().states())
        common = {MASTER: kept.pop(MASTER)} if MASTER in kept else {}
        values = dict.fromkeys(self._names, self._rule.value(self._gradients.parameters.dtype))
        own = {LOCAL: values, **kept}
        replicas = range(self._across.size)
        return {
            **common,
            OUTER: values,
            **{of_replica(state, replica): dtypes for replica in replicas for state, dtypes in own.items()},
        }

    @torch.no_grad()
    def read_weight(self, name: str, host: Tensor | None, take: Take = all_of_it) -> None:
        """Read the parameter that all replicas have begun from, as :meth:`read_into` does."""
        if not self._is_trained(name):
            super().read_weight(name, host, take)
            return
        self._gradients.read(name, self._start_of, host, take)

    @torch.no_grad()
    def weight(self, name: str) -> Tensor:
        """Return the parameter that all replicas have begun from, in its shape."""
        return self._gradients.collected(name, self._start_of) if self._is_trained(name) else super().weight(name)

    @torch.no_grad()
    def load_weight(self, name: str, host: Tensor) -> None:
        """Fill a parameter, as all replicas begin with it, from a host tensor of its shape, of any float dtype."""
        super().load_weight(name, host)
        if self._is_trained(name):
            self._gradients.write(name, self._start.__getitem__, host)

    @torch.no_grad()
    def load_from(self, state: str, name: str, host: Tensor) -> None:
        """Fill a state of a parameter, which is this replica's or that of all, from a host tensor of its shape."""
        if kind_of(state)[0] == LOCAL:
            super().load_weight(name, host)
        else:
            super().load_from(state, name, host)

    def _is_trained(self, name: str) -> bool:
        return self._gradients.parameters[name].requires_grad

    def _start_of(self, part: OwnedShard) -> Tensor:
        return self._start[part].to(part.data.dtype)

    def _values(self, part: OwnedShard) -> Elements:
        """Return what the inner steps update of a part."""
        return self.store.of(part, MASTER)

    def _state(self, state: str) -> Callable[[OwnedShard], Elements]:
        kind, _ = kind_of(state)
        own: dict[str, Callable[[OwnedShard], Elements]] = {
            MASTER: self._start.__getitem__,
            OUTER: self._momenta.__getitem__,
            LOCAL: self._values,
        }
        return own.get(kind) or super()._state(kind)


def _buckets(starts: Mapping[OwnedShard, Tensor]) -> Iterator[list[OwnedShard]]:
    """Yield the parts whose ways are averaged in one message."""
    filled, size = list[OwnedShard](), 0
    for part, start in starts.items():
        if filled and size + start.nbytes > BUCKET_BYTES:
            yield filled
            filled, size = [], 0
        filled.append(part)
        size += start.nbytes
    if filled:
        yield filled
