"""The image of a rank: all that its part of a run consists of between two steps, tensor by tensor.

Ranks of one layout whose places differ in what is replicated alone have the same image, and each can take that of
another. There are no names in it: what is built from one setup has its tensors in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import EllipsisType

import torch
from torch import Tensor

from megacore.run.states.store import MASTER, MOMENTS
from megacore.run.trainer import Trainer
from parallel.gradients.buckets import Elements


def elements(trainer: Trainer) -> Iterator[Elements]:
    """Yield the tensors of an image, or what stands for them where they are not on the device; they share the memory of
    the trainer's state.

    Of split parameters a rank has its shard alone: the others are gathered again.
    """
    step, parameters = trainer.step, trainer.model.parameters
    store = step.optimizer.store
    for part in step.gradients.parts:
        yield part.data
        for state in (MASTER, *MOMENTS) if store.masters else MOMENTS:
            yield store.of(part, state)
    frozen = {parameter for values in step.gradients.frozen for parameter in values.flat.parameters}
    for values in step.gradients.frozen:
        yield values.own
    for parameter in parameters.values():
        if not parameter.requires_grad and parameter not in frozen:
            yield parameter.detach()
    yield _Scale(trainer)
    trouble = trainer.trouble
    yield from (trouble.first, trouble.here, trouble.skipped, trouble.halted, trouble.recent)


class _Scale:
    """The loss scale and its good steps, which are other tensors after each step."""

    dtype = torch.float64

    def __init__(self, trainer: Trainer) -> None:
        self._scaler = trainer.step.scaler

    def __getitem__(self, where: slice | EllipsisType, /) -> Tensor:
        return torch.stack([self._scaler.scale.double(), self._scaler.good_steps.double()])

    def __setitem__(self, where: slice | EllipsisType, values: Tensor, /) -> None:
        self._scaler.scale.copy_(values[0])
        self._scaler.good_steps.copy_(values[1])


def take(trainer: Trainer) -> list[Tensor]:
    """Return the image of a trainer; what shares its memory is not copied."""
    return [each[...] for each in elements(trainer)]


@torch.no_grad()
def restore(trainer: Trainer, image: Sequence[Tensor]) -> None:
    """Give a trainer an image of its place; its parameters that are split are to be gathered afterwards."""
    for ours, theirs in zip(elements(trainer), image, strict=True):
        ours[...] = theirs.to(ours[...].device)


def to_bytes(trainer: Trainer) -> Tensor:
    """Return the bytes of an image, one tensor after the other, in host memory: uint8 [n]."""
    return torch.cat([_bytes(tensor.detach().cpu().contiguous()) for tensor in take(trainer)])


def size(trainer: Trainer) -> int:
    """Return the number of bytes of an image."""
    return sum(tensor.nbytes for tensor in take(trainer))


@torch.no_grad()
def restore_bytes(trainer: Trainer, flat: Tensor) -> None:
    """Give a trainer an image from its bytes."""
    for each in elements(trainer):
        ours = each[...]
        part, flat = flat[: ours.nbytes].clone(), flat[ours.nbytes :]
        each[...] = part.view(ours.dtype).view(ours.shape).to(ours.device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
