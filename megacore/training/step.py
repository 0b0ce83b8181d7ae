"""One training step: loss and gradients of a global batch, summed, clipped and applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megacore.models.decoder import Microbatch
from megacore.parallel.alignment import Alignment
from megacore.parallel.balance import Balance
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.gradients.reduce import Gradients
from megacore.parallel.labels import IGNORE
from megacore.parallel.mesh import Mesh
from megacore.parallel.pipeline.run import Pipeline
from megacore.parallel.pipeline.schedules import Kind
from megacore.training.scaler import UNSCALED, Scaler, Scaling

if TYPE_CHECKING:
    from megacore.training.states.optimizer import Optimizer

Phase = Literal["data", "forward", "backward", "reduce", "update", "log", "save", "evaluate", "end"]
"""The phases of a rank: ``data`` while it waits for a batch, ``log`` while it reads and writes metrics, ``end`` after
its last step."""
PHASES: Mapping[Kind, Phase] = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
"""The phase of each kind of action."""


@dataclass(frozen=True)
class Stats:
    """Scalars on the device, the same on every rank; reading them waits for the step.

    Args:
        loss: Mean loss of the counted tokens of the global batch, or of its pairs.
        tokens: The number of them.
        grad_norm: Norm of the whole model's gradient before clipping.
        own_loss: This rank's part of the loss, the one that is not the same everywhere.
        overflow: Whether the gradient alone is not finite, and a smaller scale may mend that in later steps.
        squares: This rank's part of the squares of the gradient, which is scaled, fp64.
        told: What else the loss says, means over the pairs: [n]; of no pairs, [0].
        own_norm: The norm that this rank's replica clips by, where replicas take steps alone: loss, norm (of squares)
            and what is told are then means over them.
    """

    loss: Tensor
    grad_norm: Tensor
    tokens: Tensor
    own_loss: Tensor
    scale: Tensor
    overflow: Tensor
    squares: Tensor
    told: Tensor
    own_norm: Tensor | None = None

    @cached_property
    def finite(self) -> Tensor:
        """Whether the loss and the gradient norm are finite, a bool scalar."""
        return torch.isfinite(self.loss) & torch.isfinite(self.grad_norm)

    @cached_property
    def outcome(self) -> Tensor:
        """The loss, the norm, and this rank's parts of the loss and of the squares, fp64 [4]: what another try must
        give again, bit for bit."""
        return torch.stack([each.double() for each in (self.loss, self.grad_norm, self.own_loss, self.squares)])


@dataclass
class TrainStep:
    """microbatches of this data-parallel rank, learning rate -> :class:`Stats`; the weights are updated.

    They stay as they are where the loss or the gradient norm is not finite, or ``halted`` (a bool scalar) is true: both
    are decided on the device. ``scaling`` is that of the loss, ``balance`` that of the experts of the model, and
    ``alignment`` what its indexers learn from. ``replicas`` is the mesh of several that take steps alone, of which
    ``mesh`` is one; all of them leave out an update that one does.
    """

    mesh: Mesh
    pipeline: Pipeline
    gradients: Gradients
    optimizer: Optimizer
    scaling: Scaling = UNSCALED
    balance: Balance | None = None
    alignment: Alignment | None = None
    replicas: Mesh | None = None
    scaler: Scaler = field(init=False)

    def __post_init__(self) -> None:
        self.scaler = Scaler(self.scaling, self.mesh.device)

    def __call__(self, microbatches: Sequence[Microbatch], lr: float, halted: Tensor | None = None) -> Stats:
        stats = self.backward(microbatches)
        self.update(stats, lr, halted)
        self.gradients.updated()
        return stats

    def update(self, stats: Stats, lr: float, halted: Tensor | None = None) -> None:
        """Do the second half, on this rank alone where no matrices are updated as wholes; parameters that are split are
        to be gathered after it."""
        go = stats.finite if halted is None else stats.finite & ~halted
        norm = stats.grad_norm if stats.own_norm is None else stats.own_norm
        self.optimizer.update(lr, norm, go, stats.scale if self.scaling.scales else None)
        if self.balance is not None:
            self.balance.move_biases(go)
        self.scaler.update(stats.loss, stats.grad_norm, halted)

    def backward(
        self, microbatches: Sequence[Microbatch], enter: Callable[[Phase], object] = lambda phase: None
    ) -> Stats:
        """Return the first half: loss, and gradients that are summed over their replicas; these are scaled. ``enter``
        is told each phase before it."""
        scale = self.scaler.scale
        self.gradients.begin(len(microbatches))
        own, tokens = self.loss(microbatches, enter)
        enter("reduce")
        self.gradients.finish()
        if self.balance is not None:
            self.balance.finish()
        squares = self.gradients.squares()
        # The norm comes last: whoever has it knows that every rank has summed all of its gradients, and that each can
        # do the rest alone.
        whole, norm = total_loss(own, self.mesh), self.gradients.norm(squares) / scale
        own_norm = norm if self.replicas is not None else None
        if self.replicas is not None:
            whole, norm = _means(whole, norm, self.replicas)
        loss, told = _parts(whole)
        overflow = self.scaler.overflow(loss, norm)
        return Stats(loss, norm, tokens, _parts(own)[0], scale, overflow, squares, told, own_norm)

    def loss(self, microbatches: Sequence[Microbatch], enter: Callable[[Phase], object]) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the loss, and the number that divides it, after forwards and backwards."""
        scale = self.scaler.scale
        if self.balance is None and self.alignment is None:
            tokens = counted_tokens(microbatches, self.mesh)
        else:
            tokens, sequences, present = counted_and_routed(microbatches, self.mesh)
            if self.balance is not None:
                self.balance.begin(len(microbatches), sequences, present, scale)
            if self.alignment is not None:
                self.alignment.begin(present, scale)
            microbatches = [replace(each, number=number) for number, each in enumerate(microbatches)]
        return self.pipeline.train(microbatches, scale / tokens, lambda kind: enter(PHASES[kind])) / scale, tokens


def _parts(loss: Tensor) -> tuple[Tensor, Tensor]:
    """loss: a scalar or [n] -> the loss, a scalar, and what else it says."""
    return loss.flatten()[0], loss.flatten()[1:]


def _means(loss: Tensor, norm: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return the means over all replicas of a mesh of what each has come to, of the norm the root of that of squares:
    they are finite where those of all replicas are."""
    here = torch.cat([loss.double().flatten(), norm.double().square().view(1)])
    mean = all_reduce_(here, mesh.world) / mesh.shape.world
    return mean[:-1].view_as(loss).to(loss.dtype), mean[-1].sqrt().to(norm.dtype)


def evaluate(mesh: Mesh, pipeline: Pipeline, microbatches: Sequence[Microbatch]) -> tuple[Tensor, Tensor]:
    """Return (mean loss of the counted tokens or pairs, a scalar or [n], and their number) of a global batch, the same
    on all ranks."""
    tokens = counted_tokens(microbatches, mesh)
    return total_loss(pipeline.evaluate(microbatches, 1 / tokens), mesh), tokens


def counted_tokens(microbatches: Sequence[Microbatch], mesh: Mesh) -> Tensor:
    """Return the number of labels of the global batch that count, or of its pairs, at least 1: the one divisor of the
    loss."""
    return all_reduce_(_counted(microbatches, mesh), mesh.batch).clamp_(min=1)


def counted_and_routed(microbatches: Sequence[Microbatch], mesh: Mesh) -> tuple[Tensor, ...]:
    """Return what :func:`counted_tokens` does, and the numbers of sequences of the global batch and of its tokens that
    are no padding, each at least 1; one sum over the ranks gives all three."""
    tokens = _number([torch.ones_like(m.tokens) if m.padding is None else ~m.padding for m in microbatches])
    # The ranks of cp have other tokens of the same sequences.
    sequences = tokens.new_full((), sum(m.sequences - m.blank for m in microbatches) / mesh.shape.cp)
    own = torch.stack([_counted(microbatches, mesh), sequences, tokens])
    return all_reduce_(own, mesh.batch).clamp_(min=1).unbind()


def _counted(microbatches: Sequence[Microbatch], mesh: Mesh) -> Tensor:
    pairs = [m.pairs for m in microbatches if m.pairs is not None]
    if pairs:  # each of which all ranks of cp have
        return _number([each.real for each in pairs]) / mesh.shape.cp
    return _number([m.labels != IGNORE for m in microbatches])


def _number(chosen: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.sum() for each in chosen]).sum().to(torch.float64)


def total_loss(own: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over ranks of their parts of the loss."""
    return all_reduce_(own.clone(), mesh.world)
