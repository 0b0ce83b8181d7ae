"""The image of a rank: all that its part of a run consists of between two steps, tensor by tensor.

Ranks of one layout whose places differ in what is replicated alone have the same image, and each can take that of
another. There are no names in it: what is built from one setup has its tensors in one order. For others than these
there are its :class:`ImageRange` s, which say what lies where.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from megacore.training.save import NAMES, WEIGHTS
from megacore.training.states.store import MASTER, MOMENTS
from megacore.training.trainer import Trainer
from parallel.gradients.buckets import Elements, OwnedShard

OWN = "whether the loss of the rank was finite"
"""The name of what is a rank's own in an image: its replicas may have another."""


def elements(trainer: Trainer) -> Iterator[Elements]:
    """Yield the tensors of an image, as :func:`named` does, without their names."""
    return (each for _, each in named(trainer))


def named(trainer: Trainer) -> Iterator[tuple[str, Elements]]:
    """Yield (name for people, tensor) of an image, or what stands for the tensor where it is not on the device; they
    share the memory of the trainer's state.

    Of split parameters a rank has its shard alone: the others are gathered again.
    """
    names = {part: span.name for part, span, _, _ in trainer.step.gradients.owned()}
    for of, state, _, tensor in _saved(trainer):
        name = of if isinstance(of, str) else names.get(of, "parameters")
        yield name if state == WEIGHTS else f"{state} of {name}", tensor
    yield OWN, trainer.trouble.here
    yield from common(trainer)


def _saved(trainer: Trainer) -> Iterator[tuple[OwnedShard | str, str, int, Elements]]:
    """Yield (part, or name of a frozen parameter that is not split; state; bytes; tensor) of what checkpoints have
    too."""
    step = trainer.step
    store, owned = step.optimizer.store, [part for part, _, _, _ in step.gradients.owned()]
    trained = set(step.gradients.parts)
    for part in step.gradients.parts:
        yield part, WEIGHTS, part.data.nbytes, part.data
        for state in (MASTER, *MOMENTS) if store.masters else MOMENTS:
            kept = store.of(part, state)
            yield part, state, part.data.numel() * kept.dtype.itemsize, kept
    for part in dict.fromkeys(owned):
        if part not in trained:
            yield part, WEIGHTS, part.data.nbytes, part.data
    split = {parameter for values in step.gradients.frozen for parameter in values.flat.parameters}
    for name, parameter in trainer.model.parameters.items():
        if not parameter.requires_grad and parameter not in split:
            yield name, WEIGHTS, parameter.nbytes, parameter.detach()


def common(trainer: Trainer) -> Iterator[tuple[str, Elements]]:
    """Yield (name for people, tensor) of what all ranks of a run have alike on any layout; images end with it."""
    yield "the loss scale", _Scale(trainer)
    trouble = trainer.trouble
    for each in (trouble.first, trouble.skipped, trouble.halted, trouble.recent):
        yield "the steps left out", each


@dataclass(frozen=True)
class ImageRange:
    """Successive elements of a tensor that lie in an image.

    Args:
        name: The name of the tensor.
        label: The piece of it whose elements are counted; None where they are those of the tensor as it is stored.
        start, stop: The elements [start, stop).
        at: {state: (dtype, the byte of the image at which they begin)}.
    """

    name: str
    label: str | None
    start: int
    stop: int
    at: Mapping[str, tuple[str, int]]

    def to_json(self) -> list[Any]:
        return [self.name, self.label, self.start, self.stop, self.at]

    @classmethod
    def from_json(
        cls, name: str, label: str | None, start: int, stop: int, at: Mapping[str, Sequence[Any]]
    ) -> ImageRange:
        return cls(name, label, start, stop, {state: (dtype, first) for state, (dtype, first) in at.items()})


def extents(trainer: Trainer) -> list[ImageRange]:
    """Return where in the image of a trainer lies what a checkpoint has of it."""
    kept, at = {WEIGHTS, *trainer.step.optimizer.states()}, 0
    places = dict[OwnedShard | str, dict[str, tuple[torch.dtype, int]]]()
    for of, state, size, tensor in _saved(trainer):
        if state in kept:
            places.setdefault(of, {})[state] = tensor.dtype, at
        at += size

    def extent(of: OwnedShard | str, first: int, name: str, label: str | None, start: int, stop: int) -> ImageRange:
        there = {state: (NAMES[d], begin + first * d.itemsize) for state, (d, begin) in places[of].items()}
        return ImageRange(name, label, start, stop, there)

    split = [
        extent(part, there.start, span.name, span.piece.label if span.piece else None, here.start, here.stop)
        for part, span, there, here in trainer.step.gradients.owned()
    ]
    whole = [extent(of, 0, of, None, 0, trainer.model.parameters[of].numel()) for of in places if isinstance(of, str)]
    return split + whole


def contents(trainer: Trainer) -> list[Any]:
    """Return the :func:`extents` of a trainer as JSON."""
    return [each.to_json() for each in extents(trainer)]


Bytes = Callable[[int, int], Tensor]
"""A function of [start, stop): those bytes of an image, uint8 on some device."""


def reader(trainer: Trainer) -> Bytes:
    """Return what reads the image of a trainer, each time within one tensor of what its :func:`extents` say."""
    tensors, starts, at = list[Elements](), list[int](), 0
    for _, _, size, tensor in _saved(trainer):
        tensors.append(tensor)
        starts.append(at)
        at += size

    def read(start: int, stop: int) -> Tensor:
        number = bisect_right(starts, start) - 1
        flat = _bytes(tensors[number][...].detach())
        return flat[start - starts[number] : stop - starts[number]]

    return read


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
    _restore(elements(trainer), flat)


def common_to_bytes(trainer: Trainer) -> Tensor:
    """Return the bytes of what all ranks have alike: the end of :func:`to_bytes`."""
    return torch.cat([_bytes(each[...].cpu().contiguous()) for _, each in common(trainer)])


@torch.no_grad()
def restore_common(trainer: Trainer, flat: Tensor) -> None:
    """Give a trainer what all ranks have alike from its bytes."""
    _restore((each for _, each in common(trainer)), flat)


def _restore(into: Iterator[Elements], flat: Tensor) -> None:
    for each in into:
        ours = each[...]
        part, flat = flat[: ours.nbytes].clone(), flat[ours.nbytes :]
        each[...] = part.view(ours.dtype).view(ours.shape).to(ours.device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
