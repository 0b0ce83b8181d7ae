"""Going on in the processes that are left, or in more: groups and trainer are made anew, the state stays, or moves from
one layout to another.

The steps of any two ranks that live differ by one at most, for the norm of the gradient is a message to all. Where one
has the norm of a step, all others have summed their gradients, and roll the step forward by its number; where none has,
the step is done again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from megacore.control import Control
from megacore.recovery.policy import Incident
from megacore.recovery.protocol import Commit, Resolution, Status, resolve, sources, that_count
from megacore.recovery.spikes import Seen, Spikes
from megacore.store.dtypes import FLOATS
from megacore.store.strict_json import StoreError
from megacore.training import image
from megacore.training.build import agree_on_data, empty_trainer_of
from megacore.training.check import Setup
from megacore.training.copies import CopiedImage, Copies
from megacore.training.progress import Progress
from megacore.training.relayout import Left, World, move
from megacore.training.save import NAMES
from megacore.training.step import Stats
from megacore.training.trainer import Trainer
from megacore.training.trouble import BadStep
from parallel.copies import holders, refuges
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
        world: The world that the status is of; None where it has no state.
        forming: Its words about a newer world, which not all are known to be in.
    """

    status: Status
    state: Mapping[str, Any] | None = None
    copied: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    followed: int = 0
    unsaved: bool = False
    meter: tuple[int, float] = (0, 0.0)
    going_back: bool = False
    world: World | None = None
    forming: Told | None = None

    @property
    def is_new(self) -> bool:
        """Whether it has never had any of the run."""
        return self.status == Status(self.status.rank) and not self.going_back and self.forming is None

    def to_json(self) -> dict[str, Any]:
        forming = self.forming and self.forming.to_json()
        plain = asdict(replace(self, status=Status(self.status.rank), forming=None))
        return {**plain, "status": self.status.to_json(), "forming": forming}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Told:
        made = {"status": Status.from_json(tree["status"]), "meter": tuple(tree["meter"])}
        world = tree["world"] and TypeAdapter(World).validate_python(tree["world"])
        forming = tree["forming"] and cls.from_json(tree["forming"])
        return cls(**{**tree, **made, "world": world, "forming": forming})


@dataclass
class Held:
    """The state of a run that a process holds, over all generations.

    Args:
        copies: Copies of images.
        trainer: Its trainer, if it has one: of the newest world that all are known to have been in.
        forming: Its trainer of a newer world, until all are known to have theirs.
    """

    copies: Copies
    trainer: Trainer | None = None
    forming: Trainer | None = None


def state_of(trainer: Trainer) -> Mapping[str, Any]:
    """Return what is known of the run at the step that a trainer's state is of, beside its tensors; as JSON."""
    stats = trainer.stats
    adapters = trainer.saver.index.adapters
    return {
        "base": adapters and adapters.fingerprint,
        "progress": asdict(trainer.start.at(trainer.done, trainer.config, trainer.step.optimizer.updates)),
        "incidents": [] if trainer.repetition is None else list(map(asdict, trainer.repetition.history)),
        "bad": trainer.repetition and trainer.repetition.bad and asdict(trainer.repetition.bad),
        "outcome": None if stats is None else {name: _told(getattr(stats, name)) for name in _TOLD},
        "generation": trainer.committed_in,
    }


def let_go(held: Held, rank: int) -> Told:
    """Return what a process has of a run once its groups are gone, which are no more used.

    Args:
        held: The state that it has.
        rank: Its rank in them.
    """
    held.copies.leave()
    forming = None if held.forming is None else _told_of(held.forming, Copies())
    if held.trainer is None:
        return Told(Status(rank), forming=forming)
    return replace(_told_of(held.trainer, held.copies), forming=forming)


def _told_of(trainer: Trainer, copies: Copies) -> Told:
    trainer.meter.end()
    trainer.go_back()
    state, abandoned = state_of(trainer), trainer.saver.abandon()
    outcome = None if state["outcome"] is None else _commit(state)
    pending = trainer.generation if trainer.step.pending is not None else None
    rank, world = trainer.mesh.rank, World.of(trainer.config, trainer.mesh.shape, trainer.formed_in)
    versions = {of: frozenset(held) for of, held in copies.images.items()}
    return Told(
        Status(rank, trainer.done, pending, outcome, versions, trainer.rewound, world.formed_in),
        state,
        {str(step): image.state for held in copies.images.values() for step, image in held.items()},
        trainer.followed,
        abandoned or trainer.interrupt.save or trainer.saver.failing_s is not None,
        (trainer.meter.last_step, trainer.meter.seconds),
        world=world,
    )


def _commit(state: Mapping[str, Any]) -> Commit:
    return Commit(state["generation"], tuple(float(value) for _, value in state["outcome"].values()))


def recovered(
    setup: Setup, mesh: Mesh, control: Control, held: Held, told: Sequence[Told], generation: int = 0
) -> Trainer:
    """Return a trainer that goes on where a run has been, in new groups; the old one is no more, here and elsewhere.

    Where the ranks and what each has of the run are the same as before, they keep what they have. Elsewhere they form a
    new world, and the state moves to it.

    Args:
        setup: The run, as it is to go on.
        mesh, control: The new groups.
        held: The state of it that this process has.
        told: The words of each rank.
        generation: The number of the groups.

    Raises:
        StateLost: nobody has the state of some rank.
        ConfigError: a rank that has come has other data.
    """
    agree_on_data(control, setup)
    if any(each.going_back for each in told):
        raise StateLost("ranks were going back to a checkpoint")
    both = [(each if each.world is not None else None, each.forming) for each in told]
    counting = that_count([(None if a is None else a.status, None if b is None else b.status) for a, b in both])
    told = [
        next((each for each in said if each is not None and each.status is status), Told(Status(rank)))
        for rank, (said, status) in enumerate(zip(both, counting, strict=True))
    ]
    world = next((each.world for each in told if each.world is not None), None)
    if world is None:
        raise StateLost("no rank has any state of the run")
    if held.forming is not None and held.forming.formed_in == world.formed_in:
        held.trainer, held.copies.images = held.forming, {}
    held.forming = None
    if told[mesh.rank].world is None:
        held.trainer, held.copies.images = None, {}
    stays = all(each.status.rank == rank for rank, each in enumerate(told))
    if stays and world.is_like(World.of(setup.config, mesh.shape)):
        made = _in_place(setup, mesh, control, held, told, world)
    else:
        made = _relaid(setup, mesh, control, held, told, world, generation)
    held.forming = made
    control.largest()  # all ranks are
    held.trainer, held.forming = made, None
    if made.formed_in != world.formed_in:
        held.copies.images = {}
    return made


def _in_place(setup: Setup, mesh: Mesh, control: Control, held: Held, told: Sequence[Told], world: World) -> Trainer:
    """Return a trainer of the same world: all that is left of it stays where it is."""
    resolution = resolve([each.status for each in told], world.identical(setup))
    if resolution is None:
        lacking = [rank for rank, each in enumerate(told) if each.status.version is None]
        raise StateLost(f"the state of ranks {lacking} was in no other memory")
    done, before = resolution.version, held.trainer
    state = _state(told, done)
    way = resolution.ways[mesh.rank]
    if way.kind == "forward":
        assert before is not None
        before.update(done, _stats(before, state["outcome"]))
    trainer = _empty(setup, mesh, control, state)
    if before is not None and way.kind in ("keep", "forward"):
        image.restore(trainer, image.take(before))
    if way.kind == "back":
        image.restore_bytes(trainer, held.copies.images[way.image][done].bytes)
    _send(trainer, resolution, held.copies, everybody(mesh))
    trainer.formed_in = world.formed_in
    _go_on(trainer, before, told, state, resolution.rewound)
    if trainer.repetition is not None:  # elsewhere the same step has other bits
        trainer.repetition.bad = TypeAdapter(BadStep | None).validate_python(state["bad"])
    held.copies.drop_after(done)
    return trainer


def _relaid(
    setup: Setup, mesh: Mesh, control: Control, held: Held, told: Sequence[Told], world: World, generation: int
) -> Trainer:
    """Return a trainer of a new world, whose state is that of the old one."""
    found = sources([each.status for each in told if each.world is not None], world.identical(setup))
    if found is None:
        left = sorted(each.status.rank for each in told if each.world is not None)
        raise StateLost(f"the memory of ranks {left} of {world.mesh.world} does not hold the state of all")
    state, before = _state(told, found.version), held.trainer
    own = told[mesh.rank].status.rank if before is not None else None
    if any(way.kind == "forward" and way.source == own for ways in found.images.values() for way in ways):
        assert before is not None
        before.update(found.version, _stats(before, state["outcome"]))
    trainer = _empty(setup, mesh, control, state)
    group = everybody(mesh)
    readers = {each.status.rank: rank for rank, each in enumerate(told) if each.world is not None}
    try:
        move(trainer, setup, control, group, Left(world, found, readers, own, before, held.copies))
    except StoreError as error:  # on every rank
        raise StateLost(str(error)) from error
    trainer.formed_in = generation
    _go_on(trainer, before, told, state, found.rewound)
    return trainer


def _state(told: Sequence[Told], done: int) -> Mapping[str, Any]:
    """Return what is known of a run at a step."""
    states = [each.state for each in told if each.status.version == done and each.state is not None]
    return next(iter(states), None) or next(each.copied[str(done)] for each in told if str(done) in each.copied)


def _empty(setup: Setup, mesh: Mesh, control: Control, state: Mapping[str, Any]) -> Trainer:
    """Return a trainer that goes on at a step, whose tensors are still to come."""
    progress = TypeAdapter(Progress).validate_python(state["progress"])
    return empty_trainer_of(replace(setup, start=replace(setup.start, progress=progress)), mesh, control, state["base"])


def _go_on(
    trainer: Trainer, before: Trainer | None, told: Sequence[Told], state: Mapping[str, Any], rewound: bool
) -> None:
    """Have a trainer that has its tensors go on as those before it would have."""
    done = trainer.done
    if trainer.repetition is not None:
        trainer.repetition.history += TypeAdapter(list[Incident]).validate_python(state["incidents"])
    if before is not None:
        trainer.interrupt = before.interrupt
    trainer.step.optimizer.updates = trainer.start.updates
    trainer.step.gradients.updated()
    if state["outcome"] is not None:
        trainer.stats, trainer.committed_in = _stats(trainer, state["outcome"]), state["generation"]
    trainer.rewound = rewound
    living = [each for each in told if each.status.version is not None]
    trainer.followed = min([done, *(each.followed for each in living)])
    last, seconds = min((each.meter for each in living), default=(done, 0.0))
    if last < done:
        trainer.meter.last_step, trainer.meter.seconds = last, seconds
    asked = told[:1] if told[0].status.version is not None else living
    trainer.interrupt.save |= any(each.unsaved for each in asked)
    first = next(rank for rank, each in enumerate(told) if each.status.version is not None)
    records = list(map(asdict, before.spikes.records)) if before is not None and trainer.mesh.rank == first else None
    known = trainer.control.exchange(records)[first]
    trainer.knows(Spikes(TypeAdapter(tuple[Seen, ...]).validate_python(known)))


def hand_over(setup: Setup, held: Held, leaving: Collection[int]) -> None:
    """Copy what only ranks that leave have to ranks that stay, between two steps; all ranks call this.

    Args:
        setup: The run.
        held: The state of it that this process has.
        leaving: The ranks that leave.
    """
    trainer, copies = held.trainer, held.copies
    assert trainer is not None
    copies.leave()
    trainer.go_back()
    if placed := refuges(identical_ranks(setup, trainer.mesh), leaving):
        own = CopiedImage.of(image.to_bytes(trainer), state_of(trainer), image.contents(trainer))
        copies.hand_over(trainer.done, own, trainer.mesh.rank, placed, everybody(trainer.mesh))


def keep_copies(setup: Setup, trainer: Trainer, copies: Copies, ranks_per_node: int) -> None:
    """Have each rank know whose copies it holds in this generation, and who holds its own; all ranks call this."""
    mesh = trainer.mesh
    nodes = mesh.shape.world // ranks_per_node
    placed = holders(identical_ranks(setup, mesh), ranks_per_node if nodes > 1 else 1)
    if placed:
        group = mesh.host_group([tuple(range(mesh.shape.world))])
        contents = image.contents(trainer)
        copies.join(mesh.rank, placed, group, partial(_copy, trainer, contents))
        trainer.copies = copies


def _copy(trainer: Trainer, contents: Sequence[Any]) -> tuple[Tensor, Mapping[str, Any], Sequence[Any]] | None:
    """Return what is to be copied of a trainer; nothing while the steps that it does are in vain: a run that is halted
    goes back to before them, and to copies from there."""
    return None if trainer.is_halted else (image.to_bytes(trainer), state_of(trainer), contents)


def identical_ranks(setup: Setup, mesh: Mesh) -> Mapping[int, tuple[int, ...]]:
    """Return {rank: the ranks whose image is the same, itself among them}."""
    return World.of(setup.config, mesh.shape).identical(setup)


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
