"""Going on after a fault, in the processes that are left: groups and trainer are made anew, the state stays.

The steps of any two ranks that live differ by one at most, for the norm of the gradient is a message to all. Where one
has the norm of a step, all others have summed their gradients, and roll the step forward by its number; where none has,
the step is done again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from megacore.control import Control
from megacore.recovery.policy import Incident
from megacore.recovery.protocol import Commit, Resolution, Status, resolve
from megacore.run import image
from megacore.run.build import empty_trainer_of
from megacore.run.check import Setup
from megacore.run.copies import Copies
from megacore.run.progress import Progress
from megacore.run.save import NAMES
from megacore.run.step import Stats
from megacore.run.trainer import Trainer
from megacore.store.dtypes import FLOATS
from models.stages import layout_of
from parallel.copies import holders, identical
from parallel.mesh import Group, Mesh

_TOLD = ("loss", "grad_norm", "tokens", "scale")
"""The fields of the statistics of a step that are the same on all ranks: the numbers of its commit."""


class StateLost(RuntimeError):
    """The ranks that are left do not have all of the state of the run."""


@dataclass(frozen=True)
class Told:
    """The words of a rank about itself to all others when a generation begins.

    Args:
        status: The steps that it has the state of.
        state: The rest of what it knows of the run at the step of its state, as JSON; None where it has no state.
        copied: {step: the same of the step} of the copies that it holds.
        followed: The last step that all is done for that follows one.
        unsaved: Whether a save is to be made that was not, or not to its end.
        meter: (step, seconds since) of the last record.
        going_back: Whether it was going back to a checkpoint, so that others may stand before that.
    """

    status: Status
    state: Mapping[str, Any] | None = None
    copied: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    followed: int = 0
    unsaved: bool = False
    meter: tuple[int, float] = (0, 0.0)
    going_back: bool = False

    @property
    def is_new(self) -> bool:
        """Whether it has never had any of the run."""
        return self.status == Status(self.status.rank) and not self.going_back

    def to_json(self) -> dict[str, Any]:
        return {**asdict(replace(self, status=Status(self.status.rank))), "status": self.status.to_json()}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Told:
        return cls(**{**tree, "status": Status.from_json(tree["status"]), "meter": tuple(tree["meter"])})


def state_of(trainer: Trainer) -> Mapping[str, Any]:
    """Return what is known of the run at the step that a trainer's state is of, beside its tensors; as JSON."""
    stats = trainer.stats
    return {
        "progress": asdict(trainer.start.at(trainer.done, trainer.config, trainer.step.optimizer.updates)),
        "incidents": [] if trainer.repetition is None else list(map(asdict, trainer.repetition.history)),
        "outcome": None if stats is None else {name: _told(getattr(stats, name)) for name in _TOLD},
        "generation": trainer.committed_in,
    }


def let_go(trainer: Trainer | None, copies: Copies, rank: int) -> Told:
    """Return what a rank has of a run once its groups are gone, which are no more used."""
    copies.leave()
    versions = {of: frozenset(held) for of, held in copies.images.items()}
    copied = {str(step): image.state for held in copies.images.values() for step, image in held.items()}
    if trainer is None:
        return Told(Status(rank, copies=versions), copied=copied)
    trainer.meter.end()
    trainer.go_back()
    state, abandoned = state_of(trainer), trainer.saver.abandon()
    outcome = None if state["outcome"] is None else _commit(state)
    pending = trainer.generation if trainer.step.pending is not None else None
    return Told(
        Status(rank, trainer.done, pending, outcome, versions, trainer.rewound),
        state,
        copied,
        trainer.followed,
        abandoned or trainer.interrupt.save,
        (trainer.meter.last_step, trainer.meter.seconds),
    )


def _commit(state: Mapping[str, Any]) -> Commit:
    return Commit(state["generation"], tuple(float(value) for _, value in state["outcome"].values()))


def recovered(
    setup: Setup, mesh: Mesh, control: Control, held: Trainer | None, copies: Copies, told: Sequence[Told]
) -> Trainer:
    """Return a trainer that goes on where the ranks have been, in new groups.

    Args:
        setup: The run.
        mesh, control: The new groups.
        held: The trainer that this rank had, if it had one.
        copies: The copies that it holds.
        told: The words of each rank.

    Raises:
        StateLost: nobody has the state of some rank.
    """
    if any(each.going_back for each in told):
        raise StateLost("ranks were going back to a checkpoint")
    resolution = resolve([each.status for each in told], identical_ranks(setup, mesh))
    if resolution is None:
        lacking = [rank for rank, each in enumerate(told) if each.status.version is None]
        raise StateLost(f"the state of ranks {lacking} was in no other memory")
    done = resolution.version
    states = [each.state for each in told if each.status.version == done and each.state is not None]
    state = next(iter(states), None) or next(each.copied[str(done)] for each in told if str(done) in each.copied)
    way = resolution.ways[mesh.rank]
    if way.kind == "forward":
        assert held is not None
        held.update(done, _stats(held, state["outcome"]))
    progress = TypeAdapter(Progress).validate_python(state["progress"])
    trainer = empty_trainer_of(replace(setup, start=replace(setup.start, progress=progress)), mesh, control)
    if trainer.repetition is not None:
        trainer.repetition.history += TypeAdapter(list[Incident]).validate_python(state["incidents"])
    if held is not None:
        trainer.interrupt = held.interrupt
        if way.kind in ("keep", "forward"):
            image.restore(trainer, image.take(held))
    if way.kind == "back":
        image.restore_bytes(trainer, copies.images[way.image][done].bytes)
    _send(trainer, resolution, copies, everybody(mesh))
    trainer.step.optimizer.updates = progress.updates
    trainer.step.gradients.updated()
    if state["outcome"] is not None:
        trainer.stats, trainer.committed_in = _stats(trainer, state["outcome"]), state["generation"]
    trainer.rewound = resolution.rewound
    living = [each for each in told if each.status.version is not None]
    trainer.followed = min([done, *(each.followed for each in living)])
    last, seconds = min((each.meter for each in living), default=(done, 0.0))
    if last < done:
        trainer.meter.last_step, trainer.meter.seconds = last, seconds
    asked = told[:1] if told[0].status.version is not None else living
    trainer.interrupt.save |= any(each.unsaved for each in asked)
    copies.drop_after(done)
    control.largest()
    return trainer


def keep_copies(setup: Setup, trainer: Trainer, copies: Copies, ranks_per_node: int) -> None:
    """Have each rank know whose copies it holds in this generation, and who holds its own; all ranks call this."""
    mesh = trainer.mesh
    nodes = mesh.shape.world // ranks_per_node
    placed = holders(identical_ranks(setup, mesh), ranks_per_node if nodes > 1 else 1)
    if placed:
        group = mesh.host_group([tuple(range(mesh.shape.world))])
        copies.join(mesh.rank, placed, group, partial(_copy, trainer))
        trainer.copies = copies


def _copy(trainer: Trainer) -> tuple[Tensor, Mapping[str, Any]] | None:
    """Return what is to be copied of a trainer; nothing while the steps that it does are in vain: a run that is halted
    goes back to before them, and to copies from there."""
    return None if trainer.is_halted else (image.to_bytes(trainer), state_of(trainer))


def identical_ranks(setup: Setup, mesh: Mesh) -> Mapping[int, tuple[int, ...]]:
    """Return {rank: the ranks whose image is the same, itself among them}."""
    config = setup.config
    chunks, layers = config.pipeline.chunks, config.pipeline.layers_per_stage
    layout = layout_of(setup.model, mesh.shape, chunks, layers, config.tuning, config.mesh.split)
    return identical(layout, config.zero.shard, config.zero.replicas)


def everybody(mesh: Mesh) -> Group:
    """Return a group of all ranks for tensors in host memory."""
    ranks = tuple(range(mesh.shape.world))
    return mesh.world if mesh.device.type == "cpu" else mesh.host_group([ranks])


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
    # Where this rank has no parts of its own, nobody asks for them: a run that is halted goes back before it is told.
    own, pending = (told["loss"], told["grad_norm"]), step.pending
    own_loss, squares = own if pending is None else (pending.own_loss, pending.squares)
    overflow = step.scaler.overflow(told["loss"], told["grad_norm"])
    return Stats(**told, own_loss=own_loss, overflow=overflow, squares=squares)


def _send(trainer: Trainer, resolution: Resolution, copies: Copies, group: Group) -> None:
    """Give each rank without state the image of another, or the copy that another holds."""
    rank = trainer.mesh.rank
    for target, way in sorted(resolution.ways.items()):
        if way.kind not in ("live", "copy") or rank not in (target, way.source):
            continue
        if rank == way.source:
            flat = image.to_bytes(trainer) if way.kind == "live" else copies.images[way.image][resolution.version].bytes
            dist.send(flat, target, group=group.process_group)
        else:
            flat = torch.empty(image.size(trainer), dtype=torch.uint8)
            dist.recv(flat, way.source, group=group.process_group)
            image.restore_bytes(trainer, flat)
