"""Pretrain what a recipe describes: ``python -m megacore.run.train RECIPE [overrides]`` is one rank of the run.

launch/pretrain.sh starts them, and so may torchrun. Everything that can be wrong with a run is found before a process
group starts, and said once, by the first rank of each node.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megacore import checkpoints, exits, open_files
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import TokenError, in_vain
from megacore.data.corpora import facts
from megacore.hardware import claim
from megacore.launcher import gpus
from megacore.rank import STORE, Here, die_with, join, leave, parted, parts, restarts
from megacore.recipe import ConfigError
from megacore.recovery import collectives, incidents
from megacore.recovery.channel import Agent
from megacore.recovery.phases import BEAT, Beat
from megacore.recovery.protocol import Status
from megacore.run import metrics
from megacore.run.build import trainer_of
from megacore.run.check import Setup, check, files_of
from megacore.run.copies import Copies
from megacore.run.export import export
from megacore.run.lock import RunLock
from megacore.run.recover import StateLost, Told, keep_copies, let_go, recovered
from megacore.run.replicas import compare_replicas
from megacore.run.resume import Damaged, Start, again, find, remarks
from megacore.run.save import SaveError
from megacore.run.trainer import Interrupt, Trainer
from megacore.run.trouble import GoBack, NonFinite
from megacore.say import err, say
from megacore.store.audit import DamageError
from megacore.store.objects import place
from megacore.store.publish import replace_file
from megacore.store.strict_json import StoreError
from megacore.store.tensors import os_errors
from models.config import ModelConfig, flops_per_token, parameters_in_words
from parallel import kernels
from parallel.mesh import Mesh


def run(
    setup: Setup, device: torch.device, node: int = 8, agent: Agent | None = None, began: float | None = None
) -> int:
    """Train one run on the processes that there are -> the last step that was done.

    Args:
        setup: The run.
        device: The device of this process.
        node: The number of successive ranks that share a machine.
        agent: Replaces ranks that have died, so that this one goes on, in groups that it joins by itself; None where a
            fault ends the run, whose group is there.
        began: The time when the launch of the run began, in seconds since 1970; None for now.

    Raises:
        ConfigError: the ranks have found different checkpoints to start from, or different kernels.
        StoreError: another run holds the folder, or what the run is to start from is damaged.
        StateLost: after a fault the ranks that are left do not have the whole state of the run.
    """
    with ExitStack() as stack:
        life = _Life(setup, device, node, began, stack, Copies(setup.config.recovery.overhead))
        while (last := life.outlived(agent)) is None:
            life.rejoin(agent)
        stack.close()
        if life.log is not None:
            say(_report(life.setup.config, last))
    return last


TOLD_WITHIN_S = 0.5
"""The time within which the agent tells of the end of a rank."""


@dataclass
class _Life:
    """The run in this process, over all generations of its groups.

    Args:
        setup: The run.
        device: The device of this process.
        node: The number of successive ranks that share a machine.
        began: The time when the launch of the run began, in seconds since 1970; None for now.
        stack: Holds what rank 0 has open.
        copies: The copies of images that it holds.
    """

    setup: Setup
    device: torch.device
    node: int
    began: float | None
    stack: ExitStack
    copies: Copies
    trainer: Trainer | None = None
    told: Told = field(default_factory=lambda: Told(Status(0)))
    beat: Beat = field(default_factory=Beat.here)
    log: metrics.Log | None = None
    locked: bool = False
    listens: bool = False
    going_back: bool = False
    """Whether other ranks may stand before a checkpoint that this one goes back to, or after it."""

    def outlived(self, agent: Agent | None) -> int | None:
        """Train -> the last step that was done; None once a fault that can be recovered from has ended a generation."""
        try:
            return self._generation(agent)
        except RuntimeError as error:
            # What follows from the end of another rank may show in any call, and before anybody tells.
            if agent is None or not (agent.over or parted(error) or agent.soon_over(TOLD_WITHIN_S)):
                raise
            agent.fault(error)
        return None

    def rejoin(self, agent: Agent | None) -> None:
        """Leave the groups that are broken, and wait for the next generation of them."""
        assert agent is not None
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.beat.enter("recover")
        if self.trainer is not None and not self.listens:  # to signals, while there is no loop that does
            self.stack.enter_context(self.trainer.interrupt.listening())
            self.listens = True
        self.told = replace(let_go(self.trainer, self.copies, rank), going_back=self.going_back)
        if dist.is_initialized():
            dist.destroy_process_group()
        agent.ready()

    def _generation(self, agent: Agent | None) -> int:
        config = self.setup.config
        if agent is not None:
            agent.connecting(partial(parts, os.environ.get(STORE)))
            join(Here.now(), self.device.type, timedelta(minutes=config.train.timeout))
        world = dist.get_world_size() if dist.is_initialized() else 1
        mesh = Mesh.create(config.mesh.shape(world), self.device, timedelta(minutes=config.train.timeout))
        control = Control.create(mesh, self.node)
        mine = replace(self.told, status=replace(self.told.status, rank=mesh.rank))
        told = [Told.from_json(each) for each in control.exchange(mine.to_json())]
        if agent is None or not (agent.begun or any(not each.is_new for each in told)):
            self.trainer = self._begun(mesh, control)
        else:
            try:
                self.trainer = self._recovered(mesh, control, told)
            except StateLost as error:
                agent.lost(str(error))
        self._take_up(self.trainer, agent)
        if agent is not None:
            agent.recovered(self.trainer.done)
        while True:
            try:
                return self.trainer.run()
            except GoBack as error:  # on every rank
                back = error.with_traceback(None)  # which holds the trainer
            self._go_back(back, mesh, control, self.trainer.interrupt)
            self._take_up(self.trainer, agent)
            control.largest()  # all ranks are
            self.going_back = False

    def _take_up(self, trainer: Trainer, agent: Agent | None) -> None:
        """Have a trainer tell where it is, and be copied, in this generation."""
        trainer.step.beat = self.beat
        compare_replicas(self.setup, trainer)
        if agent is not None:
            trainer.generation = agent.generation
            keep_copies(self.setup, trainer, self.copies, self.node)

    def _go_back(self, back: GoBack, mesh: Mesh, control: Control, interrupt: Interrupt) -> None:
        """Replace the trainer by one that goes on from before a bad step, without its samples."""
        self.going_back, self.trainer = True, None
        self.beat.enter("recover")
        self.copies.leave()
        gc.collect()
        start = control.attempt(partial(_before, self.setup, back, control))
        self.setup, self.trainer = _built(replace(self.setup, start=start), mesh, control)
        self.trainer.interrupt = interrupt
        if self.trainer.repetition is not None:
            self.trainer.repetition.history += back.history
        self.copies.drop_after(self.trainer.done)
        self._close_log()
        self._open_log(self.trainer, control, self.trainer.done)

    def _begun(self, mesh: Mesh, control: Control) -> Trainer:
        """Return the trainer of a run that nothing has befallen yet."""
        self.setup = _led(self.setup, control)
        self._lock(mesh, control)
        if mesh.rank == 0:
            say(_headline(self.setup.config, self.setup.model, mesh))
        self.setup, trainer = _built(self.setup, mesh, control)
        if mesh.rank == 0 and (chosen := kernels.chosen(self.device, self.setup.config.train.compile)):
            say(chosen)
        self._open_log(trainer, control, trainer.start.step)
        return trainer

    def _recovered(self, mesh: Mesh, control: Control, told: Sequence[Told]) -> Trainer:
        """Return the trainer that goes on after a fault."""
        self._lock(mesh, control)
        trainer = recovered(self.setup, mesh, control, self.trainer, self.copies, told)
        if trainer.rewound:
            self._close_log()
        self._open_log(trainer, control, trainer.followed)
        return trainer

    def _lock(self, mesh: Mesh, control: Control) -> None:
        """Hold the folder of the run, on rank 0, where it does not yet."""

        def lock() -> None:
            if mesh.rank == 0 and not self.locked:
                _hold(self.stack, self.setup.config)
                self.locked = True

        control.attempt(lock)

    def _close_log(self) -> None:
        if self.log is not None:
            self.log.__exit__()
            self.log = None

    def _open_log(self, trainer: Trainer, control: Control, after: int) -> None:
        """Have rank 0 write what follows a step."""

        def open_log() -> None:
            if trainer.mesh.rank == 0 and self.log is None:
                self.log = self.stack.enter_context(metrics.Log(self.setup.config, after, self.began))

        control.attempt(open_log)
        trainer.log = self.log


def _before(setup: Setup, back: GoBack, control: Control) -> Start:
    """Return the newest checkpoint before a bad step, or where there is none what the run started from, without the
    samples from there to the end of the step."""
    config, start = setup.config, setup.start
    folder = checkpoints.folder_of(config.out, config.checkpoint.folder)
    newest = control.tell(max((step for step in checkpoints.complete(folder) if step < back.step), default=0))
    if newest > start.progress.step:
        resume = str(checkpoints.path_of(folder, newest))
        start = find(replace(config, checkpoint=replace(config.checkpoint, resume=resume)))
    first = back.skipped.sample(start.progress.samples)
    return replace(start, progress=start.progress.without([*back.skipped, (first, back.stop)]))


def _hold(stack: ExitStack, config: Config) -> None:
    """Hold the run's folder, and that of its checkpoints where it is elsewhere; what a holder that died was writing is
    removed."""
    out = Path(config.out)
    stack.enter_context(RunLock.take(out))
    if config.checkpoint.folder is not None:
        stack.enter_context(RunLock.take(place(config.checkpoint.folder), by=out))
    with os_errors(out):
        checkpoints.clean(checkpoints.folder_of(out, config.checkpoint.folder))


def _built(setup: Setup, mesh: Mesh, control: Control) -> tuple[Setup, Trainer]:
    """Return the trainer of a run, and where it really starts.

    With ``checkpoint.resume=auto``, a checkpoint that turns out to be damaged while it is loaded is set aside, and the
    one before it is taken.

    Raises:
        StoreError: what the run is to start from is damaged, and there is nothing else.
    """
    control.attempt(lambda: _prepare(setup, mesh) if mesh.rank == 0 else None)
    try:
        return setup, trainer_of(setup, mesh, control)
    except DamageError as error:
        start = setup.start.adapters or setup.start.source
        if setup.config.checkpoint.resume != AUTO or start is None or error.path != start.path:
            raise
        damaged = Damaged(error.path, str(error))
    gc.collect()  # the half of a trainer that there is: modules and hooks refer to each other
    before = control.attempt(lambda: find(setup.config, (damaged,), checked=mesh.rank > 0))
    return _built(_led(replace(setup, start=before), control), mesh, control)


def _led(setup: Setup, control: Control) -> Setup:
    """Return a run that starts where rank 0 has found that it can: it alone has looked at all files of checkpoints."""
    told = control.tell([[str(each.path), each.reason] for each in setup.start.damaged])
    damaged = tuple(Damaged(place(path), reason) for path, reason in told)

    def start() -> Start:
        same = [each.path for each in damaged] == [each.path for each in setup.start.damaged]
        return setup.start if same else find(setup.config, damaged, checked=True)

    return replace(setup, start=control.attempt(start))


def _prepare(setup: Setup, mesh: Mesh) -> None:
    """Put the run's folder in order, and say what the run starts from."""
    config, start, out = setup.config, setup.start, Path(setup.config.out)
    for each in start.damaged:
        say(f"Set aside as {checkpoints.set_aside(each.path).name}: {each.path}: {each.reason}")
    with os_errors(out):
        replace_file(out / "config.yaml", config.to_yaml().encode())
    uneven = in_vain(config.batch.global_size, config.batch.micro_size, mesh.shape.data)
    say("\n".join([*remarks(start, config, setup.model, mesh.shape), *setup.corpora.remarks, *uneven]))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0].startswith("-"):
        err("usage: megacore.run.train RECIPE [section.key=value ...]")
        return exits.MISUSED
    here, agent = Here.now(), Agent.here()
    if not here.launched and "ACCELERATE_USE_CPU" in os.environ:
        say(
            "accelerate launch starts one process on CPUs, whatever its --num_processes says: megacore train starts as "
            "many as the mesh needs, and so does accelerate launch --multi_gpu, which needs no GPU"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent, killed, would leave its ranks to train on
        die_with(os.getppid())
    try:
        overrides = again(arguments[0], arguments[1:]) if restarts() else arguments[1:]
        # One rank of each node reads the indexes of the data for all, and one of them all the files of a checkpoint.
        stands_by = agent is not None and agent.stands_by
        checked, led = stands_by or here.local_rank > 0, stands_by or here.rank > 0
        setup = check(arguments[0], overrides, here.world, here.local_world, checked, led, stands_by)
    except ConfigError as error:
        if here.local_rank == 0:  # of each node: a file may be missing on one
            err(error)
        return exits.MISUSED
    if agent is not None:
        if stands_by:
            importlib.import_module("torch._dynamo")  # in a second, as the first optimizer would
        agent.ready()
        here = Here.now()
    if BEAT in os.environ:
        collectives.answer(Path(os.environ[BEAT]).parent, here.rank)
    train = setup.config.train
    kind = train.device_type(gpus())
    device = claim(kind, here.local_rank)
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    said = open_files.allow(files_of(setup.config, here.world, here.local_world))
    if said is not None and here.local_rank == 0:
        say(said)
    status, last, damaged = exits.DONE, 0, None
    if agent is None:
        join(here, kind, timedelta(minutes=train.timeout))
    try:
        last = run(setup, device, here.local_world, agent, here.began)
    except ConfigError as error:  # on every rank
        status = exits.MISUSED
        if here.rank == 0:
            err(error)
    except (NonFinite, SaveError, StoreError) as error:  # on every rank
        status = error.status if isinstance(error, NonFinite) else exits.FAILED
        damaged = error.path if isinstance(error, DamageError) else None
        if here.rank == 0:
            err(error)
    except TokenError as error:  # on this rank alone: the others wait for it, until the launcher ends them
        err(f"rank {here.rank}: {error}")
        os._exit(exits.FAILED)
    except KeyboardInterrupt:  # the second one: under the launcher it ends all ranks itself
        err("Interrupted again: ended at once, without a checkpoint.")
        os._exit(exits.of_signal(signal.SIGINT))
    if here.rank == 0 and damaged is not None:  # while the others wait, for the launcher ends one that is left over
        err(checkpoints.instead_of(damaged))
    leave(here)
    # After the group's end, so that no other rank waits for it: an export of many bytes may outlast their patience.
    if here.rank == 0 and status == exits.DONE and setup.config.checkpoint.export is not None:
        try:
            say(export(setup.config, last))
        except StoreError as error:
            status = exits.FAILED
            err(error)
    return status


def _headline(config: Config, model: ModelConfig, mesh: Mesh) -> str:
    sizes = " x ".join(f"{dim}={mesh.shape[dim]}" for dim in mesh.shape.DIMS)
    context = config.context.over(mesh.shape.cp, model.drops_attention)
    if context.size > 1:
        inner = f", heads over {context.heads}" if 1 < context.heads < context.size else ""
        sizes += f" (context by {context.exchange}{inner}, balance {context.balance})"
    flops = flops_per_token(model, config.data.sequence_length, config.tuning)
    return (
        f"{model.family} of {parameters_in_words(model, config.tuning)}, {flops / 1e6:,.1f} MFLOP per token, "
        f"on {mesh.shape.world} x {mesh.device.type} as {sizes}, {config.train.precision}"
    )


def _report(config: Config, last: int) -> str:
    """Return the end of a run in a few lines and draw the pictures."""
    out = Path(config.out)
    records = metrics.read(out / metrics.METRICS)
    known = facts(config.data.train[0]) if len(config.data.train) == 1 else None
    entropy = known.unigram_entropy if known else None
    metrics.draw(records, out / metrics.PICTURE, entropy)
    losses = [loss for _, loss in metrics.curve(records, "loss")]
    held_out = [loss for _, loss in metrics.curve(records, "validation_loss")]
    lines = ["", f"Done after step {last} of {config.train.steps}." if last < config.train.steps else "Done."]
    if losses:
        recent = losses[-10:]
        lines.append(
            f"  training loss    {sum(recent) / len(recent):.4f} nats per token (the last {len(recent)} records)"
        )
    if held_out:
        lines.append(f"  validation loss  {held_out[-1]:.4f}")
    if skipped := [count for _, count in metrics.curve(records, "skipped_steps")][-1:]:
        lines += [f"  skipped steps    {skipped[0]:,} of {last:,}, which changed nothing"] if skipped[0] else []
    if goodput := [share for _, share in metrics.curve(records, "goodput")][-1:]:
        befell = incidents.summary(incidents.read(out))
        lines.append(f"  goodput          {goodput[0]:.1%} of the wall clock went into steps that count ({befell})")
    if entropy is not None:
        lines.append(f"  unigram entropy  {entropy:.4f} (what knowing the tokens' frequencies alone would give)")
    paths = {"metrics": out / metrics.METRICS, "loss curve": out / metrics.PICTURE}
    if (out / metrics.EXPERTS).exists() and (lines_of_experts := metrics.read(out / metrics.EXPERTS)):
        metrics.draw_loads(lines_of_experts, out / metrics.PICTURE_OF_EXPERTS)
        paths["load of experts"] = out / metrics.PICTURE_OF_EXPERTS
    paths["resolved config"] = out / "config.yaml"
    if found := checkpoints.complete(checkpoints.folder_of(out, config.checkpoint.folder)):
        paths["checkpoint"] = found[max(found)]
    lines += [f"  {what:<16} {path}" for what, path in paths.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
