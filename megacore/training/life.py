"""The life of a process of a run, over all generations of its groups: it begins, recovers from faults, takes another
place in another world, and goes back to before bad steps.

Only a process that starts under an agent outlives a generation; any other ends with it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from megacore import checkpoints, open_files
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import in_vain
from megacore.launcher import gpus
from megacore.rank import STORE, Here, join, parted, parts
from megacore.recipe import ConfigError, changed
from megacore.recovery import incidents
from megacore.recovery.channel import Agent, overrides_here
from megacore.recovery.phases import Beat
from megacore.recovery.policy import Incident
from megacore.recovery.protocol import Status
from megacore.recovery.spikes import LEAST, Seen, Spikes
from megacore.say import say
from megacore.store.audit import DamageError
from megacore.store.objects import place
from megacore.store.publish import replace_file
from megacore.store.strict_json import StoreError, read_file
from megacore.store.tensors import os_errors
from megacore.training import metrics
from megacore.training.build import trainer_of
from megacore.training.check import Setup, files_of
from megacore.training.interrupt import Interrupt
from megacore.training.lock import RunLock
from megacore.training.problems import problems
from megacore.training.recover import Held, StateLost, Told, hand_over, keep_copies, let_go, recovered
from megacore.training.replicas import compare_replicas
from megacore.training.resume import Damaged, Start, find, remarks
from megacore.training.trainer import Paused, Trainer
from megacore.training.trouble import GoBack
from models.config import ModelConfig, flops_per_token, parameters_in_words
from parallel import kernels
from parallel.mesh import Mesh
from parallel.weights.layout import MeshShape

_RECALLED = 1 << 19
"""Bytes of records that are read for the spikes: more of them than are remembered."""
TOLD_WITHIN_S = 0.5
"""The time within which the agent tells of the end of a rank."""


@dataclass
class Life:
    """The run in this process, over all generations of its groups.

    Args:
        setup: The run.
        device: The device of this process.
        node: The number of successive ranks that share a machine.
        began: The time when the launch of the run began, in seconds since 1970; None for now.
        stack: Ends what the process has begun.
        held: The state of the run that it holds.
    """

    setup: Setup
    device: torch.device
    node: int
    began: float | None
    stack: ExitStack
    held: Held
    folder: ExitStack = field(default_factory=ExitStack)
    """Holds the folder of the run and what it writes there."""
    shape: MeshShape | None = None
    """The shape of the last mesh."""
    told: Told = field(default_factory=lambda: Told(Status(0)))
    beat: Beat = field(default_factory=Beat.here)
    log: metrics.Log | None = None
    locked: bool = False
    listens: bool = False
    going_back: bool = False
    """Whether other ranks may stand before a checkpoint that this one goes back to, or after it."""

    def outlived(self, agent: Agent | None) -> int | None:
        """Train -> the last step that was done; None once a generation has been ended by a fault that can be recovered
        from, or for another one of other ranks."""
        try:
            return self._generation(agent)
        except RuntimeError as error:
            # What follows from the end of another rank may show in any call, and before anybody tells.
            if agent is None or not (agent.over or parted(error) or agent.soon_over(TOLD_WITHIN_S)):
                raise
            agent.fault(error)
        return None

    def rejoin(self, agent: Agent | None) -> None:
        """Leave the groups of a generation, and wait for the next one.

        Raises:
            Dismissed: this process has no place in it.
        """
        assert agent is not None
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.beat.enter("recover")
        self.told = replace(let_go(self.held, rank), going_back=self.going_back)
        if dist.is_initialized():
            dist.destroy_process_group()
        agent.ready()

    def _listen(self) -> None:
        """Heed signals, also while there is no loop that does."""
        if self.held.trainer is not None and not self.listens:
            self.stack.enter_context(self.held.trainer.interrupt.listening())
            self.listens = True

    def _pause(self, mesh: Mesh, control: Control, agent: Agent) -> None:
        """End a generation between two steps, with all others: nobody waits for anything from another any more."""
        self.beat.enter("recover")
        leaving = agent.leaving()
        hand_over(self.setup, self.held, leaving)
        control.largest()
        if mesh.rank in leaving:
            self._let_go_of_folder()

    def _generation(self, agent: Agent | None) -> int | None:
        if agent is not None:
            here = Here.now()
            self.setup, self.node = in_world(self.setup, overrides_here(), here), here.local_world
            agent.connecting(partial(parts, os.environ.get(STORE)))
            join(here, self.device.type, timedelta(minutes=self.setup.config.train.timeout))
        config = self.setup.config
        world = dist.get_world_size() if dist.is_initialized() else 1
        mesh = Mesh.create(config.mesh.shape(world), self.device, timedelta(minutes=config.train.timeout))
        control = Control.create(mesh, self.node)
        if mesh.rank > 0:  # any more; rank 0 takes it once it has heard of all
            self._let_go_of_folder()
        told = [Told.from_json(each) for each in control.exchange(self.told.to_json())]
        if agent is None or not (agent.begun or any(not each.is_new for each in told)):
            self.held.trainer = self._begun(mesh, control)
        else:
            try:
                self.held.trainer = self._recovered(mesh, control, told, agent.generation)
            except StateLost as error:
                agent.lost(str(error))
        self.shape = mesh.shape
        self._take_up(self.held.trainer, agent)
        if agent is not None:
            self._listen()
            agent.recovered(self.held.trainer.done)
        while True:
            try:
                return self.held.trainer.run()
            except Paused:  # on every rank
                assert agent is not None
                self._pause(mesh, control, agent)
                return None
            except GoBack as error:  # on every rank
                back = error.with_traceback(None)  # which holds the trainer
            self._go_back(back, mesh, control, self.held.trainer.interrupt)
            self._take_up(self.held.trainer, agent)
            control.largest()  # all ranks are
            self.going_back = False

    def _take_up(self, trainer: Trainer, agent: Agent | None) -> None:
        """Have a trainer tell where it is, and be copied, in this generation."""
        trainer.step.beat = self.beat
        compare_replicas(self.setup, trainer)
        if agent is not None:
            trainer.generation, trainer.pausing = agent.generation, lambda: agent.pausing
            keep_copies(self.setup, trainer, self.held.copies, self.node)

    def _go_back(self, back: GoBack, mesh: Mesh, control: Control, interrupt: Interrupt) -> None:
        """Replace the trainer by one that goes on from before a bad step, without its samples."""
        assert self.held.trainer is not None
        spikes = self.held.trainer.spikes
        self.going_back, self.held.trainer = True, None
        self.beat.enter("recover")
        self.held.copies.leave()
        gc.collect()
        before = partial(_before, self.setup, back, control)
        start = control.attempt(partial(before, ()))
        self.setup, self.held.trainer = _built(self.setup.at(start), mesh, control, before)
        self.held.trainer.interrupt = interrupt
        if self.held.trainer.repetition is not None:
            self.held.trainer.repetition.history += back.history
        self.held.trainer.knows(spikes)
        self.held.copies.drop_after(self.held.trainer.done)
        self._open_log(self.held.trainer, control, self.held.trainer.done, rewound=True)

    def _begun(self, mesh: Mesh, control: Control) -> Trainer:
        """Return the trainer of a run that nothing has befallen yet."""
        self.setup = _led(self.setup, control)
        self._lock(mesh, control)
        if mesh.rank == 0:
            say(_headline(self.setup.config, self.setup.model, mesh))
        setup, otherwise = self.setup, None
        if setup.config.checkpoint.resume == AUTO:
            otherwise = partial(find, setup.config, checked=mesh.rank > 0)
        self.setup, trainer = _built(setup, mesh, control, otherwise)
        if mesh.rank == 0 and (chosen := kernels.chosen(self.device, self.setup.config.train.compile)):
            say(chosen)
        self._open_log(trainer, control, trainer.start.step)
        _recall(trainer, control)
        return trainer

    def _recovered(self, mesh: Mesh, control: Control, told: Sequence[Told], generation: int) -> Trainer:
        """Return the trainer that goes on where others, or this one, have been in another generation."""
        self._lock(mesh, control)
        if mesh.rank == 0 and self.shape not in (None, mesh.shape):
            say(_headline(self.setup.config, self.setup.model, mesh))
        trainer = recovered(self.setup, mesh, control, self.held, told, generation)
        self._open_log(trainer, control, trainer.followed, trainer.rewound, recovered=True)
        return trainer

    def _lock(self, mesh: Mesh, control: Control) -> None:
        """Hold the folder of the run, on rank 0, where it does not yet."""

        def lock() -> None:
            if mesh.rank == 0 and not self.locked:
                _hold(self.folder, self.setup.config)
                self.locked = True

        control.attempt(lock)

    def _let_go_of_folder(self) -> None:
        """Leave the folder of the run to the process that is rank 0 from now on."""
        self.folder.close()
        self.locked, self.log = False, None

    def _open_log(
        self, trainer: Trainer, control: Control, after: int, rewound: bool = False, recovered: bool = False
    ) -> None:
        """Have rank 0 write what follows a step. A run that has recovered may do steps again that a checkpoint has, on
        the same samples."""

        def open_log() -> None:
            if trainer.mesh.rank > 0 or not (self.log is None or rewound):
                return
            config = self.setup.config
            folder = checkpoints.folder_of(config.out, config.checkpoint.folder)
            saved = max(checkpoints.complete(folder), default=0) if recovered else 0
            if self.log is None:
                if config.checkpoint.resume == AUTO and not (recovered or after):
                    _keep_records(config)
                self.log = self.folder.enter_context(metrics.Log(config, after, self.began, saved))
            else:
                self.log.go_on(after, saved)

        control.attempt(open_log)
        trainer.log = self.log


def in_world(setup: Setup, overrides: Sequence[str], here: Here) -> Setup:
    """Return a run on the ranks that there are: nothing of it but the layout changes.

    Args:
        setup: The run on others.
        overrides: The overrides by which its recipe fits these.
        here: The place of this process among them.

    Raises:
        ConfigError: it does not fit them.
    """
    config, there = changed(setup.config, overrides), gpus()
    if found := problems(config, here.world, setup.model, gpus=there, local_ranks=here.local_world):
        raise ConfigError(found)
    open_files.allow(files_of(config, here.world, here.local_world))
    return replace(setup, config=config)


def _before(setup: Setup, back: GoBack, control: Control, damaged: tuple[Damaged, ...]) -> Start:
    """Return the newest checkpoint before a bad step that is not known to be damaged, or where there is none what the
    run started from, without the samples from there to the end of the step.

    Raises:
        StoreError: what the run started from is damaged.
    """
    config, start = setup.config, setup.start
    folder = checkpoints.folder_of(config.out, config.checkpoint.folder)

    def at(path: str) -> Start:
        section = replace(config.checkpoint, resume=path)
        return find(replace(config, checkpoint=section), checked=control.mesh.rank > 0)

    def newest() -> tuple[str | None, list[list[str]]]:
        """Return the newest that can be opened, and what is damaged: only rank 0 looks, which may have come later."""
        found = [[str(each.path), each.reason] for each in damaged]
        for step, path in reversed(checkpoints.complete(folder).items()):
            if start.progress.step <= step < back.step and str(path) not in dict(found):
                try:
                    at(str(path))
                except StoreError as error:
                    found.append([str(path), str(error)])
                else:
                    return str(path), found
        return None, found

    path, told = control.tell(newest() if control.mesh.rank == 0 else None)
    damaged = tuple(Damaged(place(path), reason) for path, reason in told)
    if path is None:
        for each in damaged:
            if each.path in (source.path for source in (start.adapters, start.source) if source is not None):
                raise StoreError(each.reason)
    found = start if path is None else at(path)
    first = back.skipped.sample(found.progress.samples)
    return replace(found, progress=found.progress.without([*back.skipped, (first, back.stop)]), damaged=damaged)


def _hold(stack: ExitStack, config: Config) -> None:
    """Hold the run's folder, and that of its checkpoints where it is elsewhere; what a holder that died was writing is
    removed."""
    out = Path(config.out)
    stack.enter_context(RunLock.take(out))
    if config.checkpoint.folder is not None:
        stack.enter_context(RunLock.take(place(config.checkpoint.folder), by=out))
    with os_errors(out):
        checkpoints.clean(checkpoints.folder_of(out, config.checkpoint.folder))


def _built(
    setup: Setup, mesh: Mesh, control: Control, otherwise: Callable[[tuple[Damaged, ...]], Start] | None
) -> tuple[Setup, Trainer]:
    """Return the trainer of a run, and where it really starts.

    Args:
        setup: The run.
        mesh, control: Its groups.
        otherwise: Finds another start where the checkpoint turns out to be damaged while it is loaded, which is set
            aside; None where there is no other.

    Raises:
        StoreError: what the run is to start from is damaged, and there is nothing else.
    """
    setup = control.attempt(lambda: _prepared(setup, mesh) if mesh.rank == 0 else setup)
    try:
        return setup, trainer_of(setup, mesh, control)
    except DamageError as error:
        start = setup.start.adapters or setup.start.source
        if otherwise is None or start is None or error.path != start.path:
            raise
        damaged = Damaged(error.path, str(error))
    gc.collect()  # the half of a trainer that there is: modules and hooks refer to each other
    found = control.attempt(lambda: otherwise((damaged,)))
    return _built(_led(setup.at(found), control), mesh, control, otherwise)


def _led(setup: Setup, control: Control) -> Setup:
    """Return a run that starts where rank 0 has found that it can: it alone has looked at all files of checkpoints."""
    told = control.tell([[str(each.path), each.reason] for each in setup.start.damaged])
    damaged = tuple(Damaged(place(path), reason) for path, reason in told)

    def start() -> Start:
        same = [each.path for each in damaged] == [each.path for each in setup.start.damaged]
        return setup.start if same else find(setup.config, damaged, checked=True)

    return setup.at(control.attempt(start))


def _prepared(setup: Setup, mesh: Mesh) -> Setup:
    """Put the run's folder in order, say what the run starts from -> the run with what its saves take from there."""
    config, start, out = setup.config, setup.start, Path(setup.config.out)
    for each in start.damaged:
        say(f"Set aside as {checkpoints.set_aside(each.path).name}: {each.reason}")
    _note(config, out / "config.yaml")
    uneven = in_vain(config.batch.global_size, config.batch.micro_size, mesh.shape.data)
    said = remarks(start, config, setup.model, mesh.shape, setup.corpora.identities)
    say("\n".join([*said, *setup.corpora.remarks, *uneven]))
    return setup.held()


def _recall(trainer: Trainer, control: Control) -> None:
    """Have a run that goes on know of spikes and of samples that were left out, as if it had never ended."""
    out, step = Path(trainer.config.out), trainer.start.step

    def known() -> tuple[list[Any], list[Any]]:
        spikes = Spikes()
        if trainer.mesh.rank > 0 or not step:
            return [], []
        for each in metrics.newest(out / metrics.METRICS, _RECALLED):
            if "loss" in each and each["step"] <= step:
                spikes = spikes.after(each["step"], each["lr"], {name: each[name] or 0.0 for name in LEAST})
        answered = [
            replace(each, life=each.life or "an earlier launch")
            for each in incidents.read(out)
            # A repetition is each launch's own business: it has means of its own for that.
            if each.decision.action == "end"
            or (each.decision.action in ("skip", "go_back") and (each.event.step or 0) <= step)
        ]
        return list(map(asdict, spikes.records)), list(map(asdict, answered))

    records, answered = control.tell(control.attempt(known))
    trainer.knows(Spikes(TypeAdapter(tuple[Seen, ...]).validate_python(records)))
    if trainer.repetition is not None:
        trainer.repetition.history += TypeAdapter(list[Incident]).validate_python(answered)


def _keep_records(config: Config) -> None:
    """Rename the records of a run that begins anew though it must have saved: what it goes on from may be elsewhere."""
    out, every = Path(config.out), config.checkpoint.every
    last = max((record["step"] for record in metrics.newest(out / metrics.METRICS)), default=0)
    if config.checkpoint.on and last >= min(every or config.train.steps, config.train.steps):
        kept = metrics.set_aside(out)
        say(f"Its records come to step {last:,}, and none of its checkpoints is there: they are kept in {kept}.")


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


def _note(config: Config, path: Path) -> None:
    """Write the config of a run, unless it is there: a run goes back, and starts again, on a full disk too."""
    text = config.to_yaml().encode()
    with os_errors(path):
        there = path.is_file() and not path.is_symlink() and path.stat().st_size == len(text)
    if not there or read_file(path, path.parent) != text:
        replace_file(path, text)
