"""The start of a run in this process: what it goes on from is found and loaded, its folder is held and put in order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from megacore import checkpoints
from megacore.checkpoints import AUTO
from megacore.config import Config
from megacore.control import Control
from megacore.data.batches import in_vain
from megacore.say import say
from megacore.store.audit import DamageError
from megacore.store.objects import place
from megacore.store.publish import replace_file
from megacore.store.strict_json import read_file
from megacore.store.tensors import os_errors
from megacore.training.build import trainer_of
from megacore.training.check import Setup
from megacore.training.lock import RunLock
from megacore.training.resume import Damaged, Start, find, remarks
from megacore.training.trainer import Callback, Trainer
from models.config import ModelConfig, flops_per_token, parameters_in_words
from parallel import kernels
from parallel.mesh import Mesh


def begin(setup: Setup, mesh: Mesh, control: Control, given: Sequence[Callback], stack: ExitStack) -> Trainer:
    """Return the trainer of a run, whose state is loaded; all ranks call this.

    Args:
        setup: The run, as this rank has checked it.
        mesh, control: Its groups.
        given: What is to happen beside the steps, besides all that the config asks for.
        stack: Lets go of the folder of the run.

    Raises:
        ConfigError: the ranks have found different things, or one of them cannot do what the config asks for.
        StoreError: another run holds the folder, or what the run is to start from is damaged.
    """
    setup = _led(setup, control)
    control.attempt(lambda: _hold(stack, setup.config) if mesh.rank == 0 else None)
    if mesh.rank == 0:
        say(_headline(setup.config, setup.model, mesh))
    otherwise = None
    if setup.config.checkpoint.resume == AUTO:
        otherwise = partial(find, setup.config, checked=mesh.rank > 0)
    trainer = _loaded(setup, mesh, control, given, otherwise)
    if mesh.rank == 0 and (chosen := kernels.chosen(mesh.device, setup.config.train.compile)):
        say(chosen)
    return trainer


def _led(setup: Setup, control: Control) -> Setup:
    """Return a run that starts where rank 0 has found that it can: it alone has looked at all files of checkpoints."""
    told = control.tell([[str(each.path), each.reason] for each in setup.start.damaged])
    damaged = tuple(Damaged(place(path), reason) for path, reason in told)

    def start() -> Start:
        same = [each.path for each in damaged] == [each.path for each in setup.start.damaged]
        return setup.start if same else find(setup.config, damaged, checked=True)

    return setup.at(control.attempt(start))


def _hold(stack: ExitStack, config: Config) -> None:
    """Hold the run's folder, and that of its checkpoints where it is elsewhere; what a holder that died was writing is
    removed."""
    out = Path(config.out)
    stack.enter_context(RunLock.take(out))
    if config.checkpoint.folder is not None:
        stack.enter_context(RunLock.take(place(config.checkpoint.folder), by=out))
    with os_errors(out):
        checkpoints.clean(checkpoints.folder_of(out, config.checkpoint.folder))


def _loaded(
    setup: Setup,
    mesh: Mesh,
    control: Control,
    given: Sequence[Callback],
    otherwise: Callable[[tuple[Damaged, ...]], Start] | None,
) -> Trainer:
    """Return the trainer of a run, from the newest state that is whole.

    Args:
        setup, mesh, control, given: As of :func:`begin`.
        otherwise: Finds another start where the checkpoint turns out to be damaged while it is loaded, which is set
            aside; None where there is no other.

    Raises:
        StoreError: what the run is to start from is damaged, and there is nothing else.
    """
    start = setup.start
    for callback in given:
        start = callback.on_find(setup, start, control)
    newest = setup.at(start)
    prepared = control.attempt(lambda: _prepared(newest, mesh) if mesh.rank == 0 else newest)
    try:
        return trainer_of(prepared, mesh, control, given)
    except DamageError as error:
        used = start.adapters or start.source
        if used is None or error.path != used.path or (otherwise is None and start is setup.start):
            raise
        damaged = Damaged(error.path, str(error))
    gc.collect()  # the half of a trainer that there is: modules and hooks refer to each other
    if start is not setup.start:  # a callback's, which knows now that this one is of no use
        other = replace(setup.start, damaged=(*setup.start.damaged, damaged))
        return _loaded(setup.at(other), mesh, control, given, otherwise)
    assert otherwise is not None
    found = control.attempt(lambda: otherwise((damaged,)))
    return _loaded(_led(setup.at(found), control), mesh, control, given, otherwise)


def _prepared(setup: Setup, mesh: Mesh) -> Setup:
    """Put the run's folder in order, say what the run starts from -> the run with what its saves take from there."""
    config, start, out = setup.config, setup.start, Path(setup.config.out)
    own = checkpoints.folder_of(config.out, config.checkpoint.folder)
    for each in start.damaged:
        if each.path.parent == own and each.path.exists():
            say(f"Set aside as {checkpoints.set_aside(each.path).name}: {each.reason}")
        elif each.path.parent != own:
            say(f"Not used: {each.reason}")
    _note(config, out / "config.yaml")
    uneven = in_vain(config.batch.global_size, config.batch.micro_size, mesh.shape.data)
    said = remarks(start, config, setup.model, mesh.shape, setup.corpora.identities)
    say("\n".join([*said, *setup.corpora.remarks, *uneven]))
    return setup.held()


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
    """Write the config of a run, unless it is there: a run starts again on a full disk too."""
    text = config.to_yaml().encode()
    with os_errors(path):
        there = path.is_file() and not path.is_symlink() and path.stat().st_size == len(text)
    if not there or read_file(path, path.parent) != text:
        replace_file(path, text)
