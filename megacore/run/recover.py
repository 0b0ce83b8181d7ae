"""Going on after a fault, in the processes that are left: groups and trainer are made anew, the state stays.

The steps of any two ranks that live differ by one at most, for the norm of the gradient is a message to all. Where one
has the norm of a step, all others have summed their gradients, and roll the step forward by its number; where none has,
the step is done again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.control import Control
from megacore.run import image
from megacore.run.build import empty_trainer_of
from megacore.run.check import Setup
from megacore.run.progress import Progress
from megacore.run.save import NAMES
from megacore.run.step import Stats
from megacore.run.trainer import Trainer
from megacore.store.dtypes import FLOATS
from parallel.mesh import Group, Mesh

Status = Mapping[str, Any]
"""What a rank says of its state to the others, as JSON."""

NOTHING: Status = {"done": None}
"""The status of a process that has just come."""

_TOLD = ("loss", "grad_norm", "tokens", "scale")
"""The fields of the statistics of a step that are the same on all ranks."""


class Lost(RuntimeError):
    """The ranks that are left do not have all of the state of the run."""


def let_go(trainer: Trainer | None) -> Status:
    """Return what a rank has of a run once its groups are gone: they are no more used."""
    if trainer is None:
        return NOTHING
    abandoned, stats = trainer.saver.abandon(), trainer.stats
    trainer.meter.end()
    progress = trainer.start.at(trainer.done, trainer.config, trainer.step.optimizer.updates)
    return {
        "done": trainer.done,
        "pending": trainer.step.pending is not None,
        "outcome": None if stats is None else {name: _told(getattr(stats, name)) for name in _TOLD},
        "followed": trainer.followed,
        "meter": [trainer.meter.last_step, trainer.meter.seconds],
        "unsaved": abandoned or trainer.interrupt.save,
        "progress": asdict(progress),
    }


def recovered(setup: Setup, mesh: Mesh, control: Control, held: Trainer | None, statuses: Sequence[Status]) -> Trainer:
    """Return a trainer that goes on where the ranks have been, in new groups.

    Args:
        setup: The run.
        mesh, control: The new groups.
        held: The trainer that this rank had, if it had one.
        statuses: What each rank has said.

    Raises:
        Lost: nobody has the state of some rank.
    """
    done = max(each["done"] for each in statuses if each["done"] is not None)
    newest = next(each for each in statuses if each["done"] == done)
    sources = _sources(mesh, statuses, done)
    if held is not None and held.done < done:
        held.update(done, _stats(held, newest["outcome"]))
    progress = Progress(**newest["progress"])
    trainer = empty_trainer_of(replace(setup, start=replace(setup.start, progress=progress)), mesh, control)
    if held is not None:
        image.restore(trainer, image.take(held))
        trainer.interrupt = held.interrupt
    _send(trainer, sources, _everybody(mesh))
    trainer.step.optimizer.updates = progress.updates
    trainer.step.gradients.updated()
    if newest["outcome"] is not None:
        trainer.stats = _stats(trainer, newest["outcome"])
        trainer.followed = min(each["followed"] for each in statuses if each["done"] is not None)
    held_by = [each for each in statuses if each["done"] is not None]
    trainer.meter.last_step, trainer.meter.seconds = min(each["meter"] for each in held_by)
    asked = statuses[:1] if statuses[0]["done"] is not None else [each for each in statuses if each["done"] is not None]
    trainer.interrupt.save |= any(each["unsaved"] for each in asked)
    control.largest()
    return trainer


def _sources(mesh: Mesh, statuses: Sequence[Status], done: int) -> Mapping[int, int]:
    """Return {rank without state: rank whose image it takes}.

    Raises:
        Lost: there is none for some.
    """
    has = [each["done"] == done or (each["done"] == done - 1 and each["pending"]) for each in statuses]
    sources = dict[int, int]()
    for rank, there in enumerate(has):
        if there:
            continue
        same = [other for other in mesh.shape.along(rank, "dp", "cp") if has[other]]
        if not same:
            raise Lost(f"nobody else has the state of rank {rank} ({mesh.shape.place(rank)})")
        sources[rank] = same[0]
    return sources


def _told(scalar: Tensor) -> tuple[str, float]:
    """Return the dtype and the value of a scalar, which JSON keeps to the bit."""
    return NAMES[scalar.dtype], scalar.item()


def _stats(trainer: Trainer, outcome: Mapping[str, tuple[str, float]]) -> Stats:
    """Return the statistics of a step of which another rank tells the outcome."""
    step, device = trainer.step, trainer.mesh.device
    told = {
        name: torch.tensor(value, dtype=getattr(torch, FLOATS[dtype]), device=device)
        for name, (dtype, value) in outcome.items()
    }
    own = step.pending.own_loss if step.pending is not None else told["loss"]
    return Stats(**told, own_loss=own, overflow=step.scaler.overflow(told["loss"], told["grad_norm"]))


def _everybody(mesh: Mesh) -> Group:
    """Return a group of all ranks for tensors in host memory."""
    everybody = tuple(range(mesh.shape.world))
    return mesh.world if mesh.device.type == "cpu" else mesh.host_group([everybody])


def _send(trainer: Trainer, sources: Mapping[int, int], group: Group) -> None:
    """Give each rank without state the image of another."""
    rank = trainer.mesh.rank
    for target, source in sorted(sources.items()):
        if rank not in (target, source):
            continue
        for each in image.elements(trainer):
            here = each[...]
            host = here.cpu().contiguous() if rank == source else torch.empty(here.shape, dtype=here.dtype)
            if rank == source:
                dist.send(_bytes(host), target, group=group.process_group)
            else:
                dist.recv(_bytes(host), source, group=group.process_group)
                each[...] = host.to(here.device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
