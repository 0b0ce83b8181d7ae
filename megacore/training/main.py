"""One rank of a run: ``torchrun -m megacore.training RECIPE [section.key=value ...]``, the agent's ranks alike, and
`megacore.train` from Python.

Everything that can be wrong with a run is found before a process group starts, and said once, by the first rank of each
node.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from megacore import checkpoints, exits, open_files
from megacore.config import Config, CorpusConfig
from megacore.control import Control
from megacore.data.batches import TokenError
from megacore.hardware import claim
from megacore.models.config import ModelConfig
from megacore.outcome import RankOutcome
from megacore.parallel import kernels
from megacore.parallel.import_path import path_of
from megacore.parallel.mesh import Mesh
from megacore.parallel.token_loss import TokenLoss
from megacore.rank import RankPlace, die_with, join, leave, restarts
from megacore.recipe import ConfigError, Recipe, load
from megacore.resources import gpus
from megacore.say import err, outlive, say
from megacore.store.io.strict_json import StoreError
from megacore.store.weight_folders.audit import DamageError
from megacore.training import start
from megacore.training.build import DTYPES, trainer_of
from megacore.training.callbacks.bad_steps import NonFinite
from megacore.training.check import check, files_of
from megacore.training.export import export as make_export
from megacore.training.finished_run import FinishedRun
from megacore.training.resume import Setup, overrides_of_restart
from megacore.training.save import SaveError
from megacore.training.trainer import Callback, Trainer, callbacks_of, check_methods


def checked(recipe: Recipe, overrides: Sequence[str], here: RankPlace, finetunes: bool = False) -> Setup:
    """Return a run once it is checked: one rank of each node reads the indexes of the data for all, and one of them all
    the files of a checkpoint; ``finetunes``: as of :func:`~megacore.training.check.check`. Raises ConfigError: all that
    is wrong."""
    given = overrides_of_restart(recipe, overrides) if restarts() else overrides
    return check(recipe, given, here.world, here.local_world, here.local_rank > 0, here.rank > 0, finetunes=finetunes)


def ready(setup: Setup, here: RankPlace) -> torch.device:
    """Make this process a rank of a run: its device, its threads, its group."""
    section = setup.config.train
    kind = section.device_type(gpus())
    device = claim(kind, here.local_rank)
    if section.threads is not None:
        torch.set_num_threads(section.threads)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a rank that leaves by os._exit would leave behind
    said = open_files.allow(files_of(setup.config, here.world, here.local_world))
    if said is not None and here.local_rank == 0:
        say(said)
    join(here, kind, timedelta(minutes=section.timeout))
    return device


def fit(setup: Setup, device: torch.device, here: RankPlace, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Train a run on the processes of the group that there is -> its trainer, after the last step. Raises ConfigError:
    the ranks have found different checkpoints to start from, or different kernels; NonFinite, SaveError, StoreError: it
    has ended, on all ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = setup.config
    mesh = Mesh.create(config.mesh.shape(world), device, timedelta(minutes=config.train.timeout))
    control = Control.create(mesh, here.local_world)
    setup = start.agreed(setup, control)
    with ExitStack() as stack:
        control.attempt(lambda: start.hold(config, stack) if mesh.rank == 0 else None)
        if mesh.rank == 0:
            say(start.headline(config, setup.model, mesh.shape, device.type))
        trainer = loaded(setup, mesh, control, callbacks)
        if mesh.rank == 0 and (chosen := kernels.chosen(device, config.train.compile, DTYPES[config.train.precision])):
            say(chosen)
        trainer.fit()
        return trainer


def loaded(setup: Setup, mesh: Mesh, control: Control, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Return the trainer of a run, with the newest state that is whole. Raises ConfigError: the ranks have found
    different things, or one of them cannot do what the config asks for; StoreError: what the run is to start from is
    damaged, and there is nothing else."""
    while True:
        newest = start.newest(setup, callbacks, control)
        try:
            return trainer_of(newest, mesh, control, callbacks)
        except DamageError as error:  # on all ranks
            damage = error.with_traceback(None)  # which holds half a trainer
        setup = start.instead_of(setup, newest, damage, control)


def train(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    *,
    model: type[ModelConfig] | None = None,
    data: object = None,
    loss: TokenLoss | None = None,
) -> FinishedRun:
    """Train what a recipe describes, as the rank that this process is -> the run, after its last step.

    Alone, in a notebook say, it is the only rank; under torchrun it is one of them. Checkpoints are kept in memory as
    under `megacore train`; whoever starts the ranks starts them again.

    Args:
        recipe: A file, the name of one that comes along, a mapping of its sections, or a :class:`megacore.Config`.
        overrides: Overrides of it in their order, ``section.key=value``.
        callbacks: The callbacks beside those that the config asks for, in this order; the same on all ranks.
        model: The config of a family of your own, for ``model.family`` (docs/extending.md, as the next two).
        data: A data set of your own, for ``data.train``.
        loss: A loss of your own, for ``loss.function``.

    Raises:
        ConfigError: all that is wrong with it, before any process group starts.
        TypeError: a method of a callback does not take what it is called with.
        NonFinite, SaveError, StoreError: the run has ended, on all ranks.
    """
    check_methods(callbacks)
    return _run(_with(load(recipe, overrides), model, data, loss), callbacks)


def finetune(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    *,
    init: str | Path | None = None,
    export: str | Path | None = None,
    model: type[ModelConfig] | None = None,
    data: object = None,
    loss: TokenLoss | None = None,
) -> FinishedRun:
    """Fine-tune a model that there is, all weights or adapters, as `megacore finetune` does -> the run.

    It is :func:`train`, which it shares arguments and errors with, but never begins with random weights.

    Args:
        init: The Hugging Face folder or checkpoint to start from: checkpoint.init.
        export: The Hugging Face folder to make of the last checkpoint: checkpoint.export.
    """
    check_methods(callbacks)
    options = {"init": init, "export": export}
    given = [f"checkpoint.{name}={value}" for name, value in options.items() if value is not None]
    return _run(_with(load(recipe, [*overrides, *given]), model, data, loss), callbacks, finetunes=True)


def _with(config: Config, model: type[ModelConfig] | None, data: object, loss: TokenLoss | None) -> Config:
    """Return a config with what is given from Python, by the import paths that this process finds it by."""
    if model is not None:
        config = replace(config, model={**config.model, "family": path_of(model)})
    if data is not None:
        config = replace(config, data=replace(config.data, train=(CorpusConfig(path_of(data)),)))
    return config if loss is None else replace(config, loss=replace(config.loss, function=path_of(loss)))


def _run(config: Config, callbacks: Sequence[Callback], finetunes: bool = False) -> FinishedRun:
    here = RankPlace.of_environment()
    setup = checked(config, (), here, finetunes)
    own = callbacks_of(setup.config)
    device = ready(setup, here)
    try:
        run = fit(setup, device, here, [*protection(), *callbacks, *own])
    except (ConfigError, NonFinite, SaveError, StoreError):  # on every rank
        leave(here)
        raise
    leave(here)
    exports = here.rank == 0 and setup.config.checkpoint.export is not None
    made = make_export(setup.config, run.step, run.last) if exports else None
    return FinishedRun(setup.config, run.step, made)


def protection() -> list[Callback]:
    """Return the callbacks that protect a run, where the room of recovery is there: it trains without."""
    if find_spec("megacore.recovery") is None:
        return []
    from megacore.recovery import protection

    return protection.protection()


def main(argv: Sequence[str], callbacks: Sequence[Callback] = ()) -> int:
    """Train as the arguments say -> the exit status of this rank."""
    if not argv or argv[0].startswith("-"):
        err("usage: megacore.training RECIPE [section.key=value ...]")
        return exits.MISUSED
    outlive()
    here = RankPlace.of_environment()
    if not here.launched and "ACCELERATE_USE_CPU" in os.environ:
        say(
            "accelerate launch starts one process on CPUs, whatever its --num_processes says: megacore train starts as "
            "many as the mesh needs, and so does accelerate launch --multi_gpu, which needs no GPU"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent, killed, would leave its ranks to train on
        die_with(os.getppid())
    try:
        setup = checked(argv[0], argv[1:], here)
        callbacks = [*callbacks, *callbacks_of(setup.config)]
    except ConfigError as error:
        if here.local_rank == 0:  # of each node: a file may be missing on one
            err(error)
        return exits.MISUSED
    device = ready(setup, here)
    status, run = exits.DONE, None
    try:
        run = fit(setup, device, here, callbacks)
    except ConfigError as error:  # on every rank
        status = exits.MISUSED
        if here.rank == 0:
            err(error)
    except (NonFinite, SaveError, StoreError) as error:  # on every rank
        status = error.status if isinstance(error, NonFinite) else exits.FAILED
        if here.rank == 0:  # while the others wait, for the launcher ends one that is left over
            err(error)
            if isinstance(error, DamageError) and (other := checkpoints.instead_of(error.path)):
                err(other)
    except TokenError as error:  # on this rank alone: the others wait for it, until the launcher ends them
        err(f"rank {here.rank}: {error}")
        RankOutcome(exits.FAILED).write()
        os._exit(exits.FAILED)
    except KeyboardInterrupt:  # the second one: under the launcher it ends all ranks itself
        err("Interrupted again: ended at once, without a checkpoint.")
        os._exit(exits.of_signal(signal.SIGINT))
    exports = here.rank == 0 and run is not None and not run.pausing and run.config.checkpoint.export is not None
    stopped = run is not None and run.stopping and run.step < run.last
    if not exports:  # before a library can abort this process, which has nothing more to do
        RankOutcome(status, stopped, paused=run is not None and run.pausing).write()
    leave(here)
    # After the group's end, so that no other rank waits for it: an export of many bytes may outlast their patience.
    if exports and run is not None:
        try:
            make_export(run.config, run.step, run.last)
        except StoreError as error:
            status = exits.FAILED
            err(error)
        RankOutcome(status, stopped).write()
    return status
