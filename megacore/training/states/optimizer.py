"""AdamW, and Muon where it is asked for, on the parts of the parameters that this rank updates: spans, or slices of
flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from megacore.parallel.gradients.buckets import Elements, OwnedShard, Take, all_of_it
from megacore.parallel.gradients.matrices import Matrices
from megacore.parallel.gradients.reduce import Gradients
from megacore.store.weight_folders.index import EMA, MASTER, MOMENTS, RESIDUAL, kind_of, of_replica
from megacore.training.states.device_store import DeviceStore, Nothing, Rule
from megacore.training.states.muon import Muon
from megacore.training.states.offload import Offload, OffloadedStore

_AWAY_FROM_0 = 1e-6


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with clipping by the global norm.

    Weight decay applies to matrices, not to norms and biases. With ``muon`` the matrices of blocks are updated by that
    rule, as wholes; their one moment is the first. ``clip``: largest global gradient norm; None for no clipping;
    ``muon``: the rule of the matrices of blocks, if not AdamW; nothing is offloaded then; ``offload``: the place of
    masters and moments if not the device; ``others``: as of :class:`~megacore.training.states.device_store.Rule`."""

    def __init__(
        self,
        gradients: Gradients,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float | None = 1.0,
        master_weights: bool = True,
        moments: torch.dtype | None = None,
        muon: Muon | None = None,
        ema: float | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.clip = clip
        self.replica = 0
        """The number of the replica whose states are here, where replicas take steps alone."""
        self._gradients = gradients
        self.data_rank = gradients.data_ranks.index(gradients.parameters.mesh.rank)
        """The number of this rank among those that differ in their data alone, by which it has residuals."""
        self._rule = Rule(lr, betas, eps, weight_decay, master_weights, moments, muon, ema)
        device, matrices = gradients.parameters.mesh.device, None if muon is None else Matrices(gradients)
        some = next(iter(gradients.parameters.values()))
        nothing = Nothing(some.new_empty(0), some.new_empty(0, dtype=gradients.dtype))
        self.store: DeviceStore | OffloadedStore = (
            DeviceStore(gradients.parts, self._rule, device, nothing, matrices)
            if offload is None
            else OffloadedStore(gradients.parts, self._rule, gradients.parameters.dtype, device, offload)
        )
        self._names = tuple(dict.fromkeys(span.name for span in gradients.spans))
        self._after = list[torch.cuda.Event]()

    @torch.no_grad()
    def update(self, lr: float, norm: Tensor, go: Tensor | None = None, scale: Tensor | None = None) -> None:
        """Update what this rank owns from the summed gradients: parameters that are split are to be gathered after it
        (``Gradients.updated``). AdamW sends no message to anybody, and Muon brings whole matrices together.

        ``norm`` is the global one of the gradient, without the scale, the factor that the summed gradients have. Where
        ``go``, a bool scalar on the device, is false nothing changes; by default, where ``norm`` is not finite.
        """
        self._wait_for_copies()
        go = torch.isfinite(norm) if go is None else go
        self.store.update(lr, go, self._divisor(norm, scale))
        self._gradients.keep_residuals(go)

    def change_after(self, event: torch.cuda.Event) -> None:
        """Have the next change of weights or states wait for an event, on the device: until then they are being copied.
        There may be several: to a disk and to memory they are copied on a stream each."""
        self._after.append(event)

    def _wait_for_copies(self) -> None:
        while self._after:
            self._after.pop().wait()

    def outer_states(self, part: OwnedShard) -> Mapping[str, Tensor]:
        """Return {name for people: tensor} of what replicas that take steps alone have alike of a part."""
        return {}

    @property
    def is_split(self) -> bool:
        """Whether ranks have states of one parameter between them, so that it takes messages to read them."""
        return self._gradients.splits

    def _divisor(self, norm: Tensor, scale: Tensor | None) -> Tensor | None:
        """Return the divisor of the gradients: clipping and the loss scale, in the fp32 that kernels take."""
        if self.clip is None:
            return scale
        over = ((norm + _AWAY_FROM_0) / self.clip).clamp_(min=1)
        return (over if scale is None else over * scale).to(torch.float32)

    @torch.no_grad()
    def forget(self) -> None:
        """Begin anew: no update has been done, and the moments are 0; averages are those of the first."""
        self._wait_for_copies()
        self.updates = 0
        for part in self._gradients.parts:
            for state in self.store.states(part):
                if state in MOMENTS:
                    moments = self.store.of(part, state)
                    moments[...] = torch.zeros_like(moments[...])
        for name in self._names:
            for _, residual in self._gradients.residuals(name):
                residual.zero_()

    # -- the state, by the names and in the shapes of the parameters

    @property
    def updates(self) -> int:
        """Steps taken, without those that were left out. Reading it waits for the device."""
        return self.store.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self.store.updates = count

    def states(self) -> Mapping[str, Mapping[str, torch.dtype]]:
        """Return {state: {parameter: dtype}} of what is kept beside the parameters: masters that are wider, moments."""
        shards, kept = self._gradients.parameters.shards, self._rule.kept(self._gradients.parameters.dtype)
        whole = {name for name in self._names if self._rule.muon is not None and shards[name].param.is_matrix}
        # A rank that trains nothing has the same states, and nothing in them.
        states = {
            state: {name: dtype for name in self._names if state != MOMENTS[1] or name not in whole}
            for state, dtype in kept.items()
        }
        own = dict.fromkeys(self._names, torch.float32)
        return states | {of_replica(RESIDUAL, rank): own for rank in range(self.residuals)}

    @property
    def residuals(self) -> int:
        """The number of ranks that keep what rounding leaves of gradients: of those that differ in their data alone."""
        return len(self._gradients.data_ranks) if self._gradients.feeds_back else 0

    @torch.no_grad()
    def read_into(self, state: str, name: str, host: Tensor | None, take: Take = all_of_it) -> None:
        """Copy the state of a parameter, or what is taken of it, to a host tensor; from a GPU, it is there once the
        stream is.

        All ranks do so for all states and names in one order, for some hold a part of what others want: those that do
        not want it leave out ``host``.
        """
        if kind_of(state)[0] == RESIDUAL:
            if host is not None:
                host.copy_(take(self._residual(name)), non_blocking=True)
            return
        self._gradients.read(name, self._state(state), host, take)

    @torch.no_grad()
    def read_weight(self, name: str, host: Tensor | None, take: Take = all_of_it) -> None:
        """Read the parameter itself, as :meth:`read_into` does."""
        self._gradients.read_weight(name, host, take)

    @torch.no_grad()
    def weight(self, name: str) -> Tensor:
        """Return the parameter itself, see :meth:`~parallel.gradients.reduce.Gradients.weight`."""
        return self._gradients.weight(name)

    @torch.no_grad()
    def load_from(self, state: str, name: str, host: Tensor) -> None:
        """Fill the moments or averages of a parameter from a host tensor of its shape, of any float dtype."""
        self._wait_for_copies()
        self._gradients.write(name, self._state(state), host)

    @torch.no_grad()
    def add_residual(self, name: str, host: Tensor) -> None:
        """Add to what rounding has left of this rank's gradients of a parameter, a host tensor of its shape."""
        self._wait_for_copies()
        for span, residual in self._gradients.residuals(name):
            residual.add_(span.of(host.to(residual)))

    @torch.no_grad()
    def load_weight(self, name: str, host: Tensor) -> None:
        """Fill a parameter, and its master and average if it has some, from a host tensor of its shape, of any float
        dtype."""
        self._wait_for_copies()
        self._gradients.fill(name, host)
        if self._gradients.parameters[name].requires_grad:
            for state in [MASTER] * self.store.masters + [EMA] * (self._rule.ema is not None):
                self._gradients.write(name, partial(self.store.of, state=state), host)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the parameters be their averages in this block, on all ranks at once."""
        with self._standing_in([self.store.of(part, EMA)[...] for part in self._gradients.parts]):
            yield

    @contextmanager
    def common(self) -> Iterator[None]:
        """Have the parameters be what is saved and evaluated in this block, which they are, but for replicas that take
        steps alone."""
        yield

    @contextmanager
    def _standing_in(self, values: Sequence[Tensor]) -> Iterator[None]:
        self._wait_for_copies()
        with torch.no_grad():
            held = [part.data.clone() for part in self._gradients.parts]
            self._fill_parts(values)
        try:
            yield
        finally:
            with torch.no_grad():
                self._fill_parts(held)

    def _fill_parts(self, values: Sequence[Tensor]) -> None:
        for part, each in zip(self._gradients.parts, values, strict=True):
            part.data.copy_(each.view(part.data.shape))
        self._gradients.updated()

    def _residual(self, name: str) -> Tensor:
        """Return what rounding has left of this rank's gradients of a parameter, in its shape: 0 where none is."""
        parameter = self._gradients.parameters[name]
        whole = torch.zeros(parameter.shape, device=parameter.device)
        for span, residual in self._gradients.residuals(name):
            span.of(whole).copy_(residual)
        return whole

    def _state(self, state: str) -> Callable[[OwnedShard], Elements]:
        return partial(self.store.of, state=state)
